"""Which ranks of a world hold which boxes of its tensors, by what lies alike.

Ranks at one coordinate of the axes that cut a tensor hold the same boxes, so a layout is computed
once per such coordinate, and once for all tensors that are cut alike and that the same ranks have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import Fault, PlacementError
from dcp_placements.layout.boxes import Array
from dcp_placements.names.renames import Renames, Renumber, apply, number_in
from dcp_placements.names.stacks_and_parts import Rename, Target
from dcp_placements.rules.patterns import (
    PlacementRules,
    Rules,
    asked,
    matched_nowhere,
    rule_name,
)
from dcp_placements.rules.placement import CheckpointPlacement
from dcp_placements.transfer.cutting import (
    FsdpAxes,
    HeldBoxes,
    cut_signature,
    held_boxes,
    listed_rows,
    rule_label,
    tensor_sharding,
)
from dcp_placements.transfer.names import Named, named_tensors, split_rename
from dcp_placements.transfer.routes import Holders, Hosts
from dcp_placements.transfer.world import TransferWorld, matcher, mesh_at, rules_at

Row = tuple[tuple[int, int], ...]
"""Which row of a common tensor a tensor is: the dims that it lacks, and its index along each."""


class Part(NamedTuple):
    """A tensor of a world as one of the common tensors that it is, or is a part of."""

    tensor: Named
    target: Target
    holders: Holders

    @property
    def row(self) -> Row:
        """The row; empty if it has all dims."""
        offsets = self.target.boxes[0][1].offsets
        lacks = [dim for dim, origin in enumerate(self.target.dims) if origin is None]
        return tuple([(dim, offsets[dim]) for dim in lacks])


class Group(NamedTuple):
    """Tensors of a world that lie alike on every rank, as alike parts of common tensors."""

    tensors: list[Named]  # in the order of the world
    parts: list[Holders]  # who holds what of each of ``Named.targets``

    def parts_of(self, tensor: Named) -> list[Part]:
        """Return one of the tensors as common tensors."""
        pairs = zip(tensor.targets, self.parts, strict=True)
        return [Part(tensor, target, holders) for target, holders in pairs]


Numbers = dict[str, dict[str, frozenset[int]]]
"""By pattern in the checkpoint's keys and by selector, the numbers that a rank has."""


class _Rank(NamedTuple):
    """What one rank declares."""

    rules: Rules
    rename: Renames  # to the keys of the world
    numbers: Numbers
    absent: tuple[str, ...]


class _Placed(NamedTuple):
    """Ranks whose placements differ only in the coordinate."""

    placement: CheckpointPlacement | None  # that of the first
    places: Array  # in the mesh of the world, [ranks]
    coordinates: Array  # in the mesh of the placement, [ranks, axes]


def held_groups(
    world: TransferWorld,
    tensors: Mapping[str, Any],
    more: Rename | None,
    hosts: Hosts,
    faults: list[Fault],
) -> tuple[list[Group], tuple[str, ...]]:
    """Return the tensors of a world by group, and what is declared by pattern and matches no key.

    Args:
        world: The world.
        tensors: Its whole tensors, by key.
        more: A step from the keys that the world's rules see to the common keys, or None.
        hosts: The order of the senders.
        faults: Takes in the tensors that cannot be placed.

    Raises:
        CannotLook: The function of the rules fails.
        PlacementError: A rename that is not as ``TransferWorld`` has it.
    """
    ranks, whole = _declared(world)
    fsdp = FsdpAxes(world.fsdp, world.axes)
    named = named_tensors(tensors, whole, more, faults)
    # What any function but a table of patterns answers may differ from rank to rank.
    different = {
        rank.rules.patterns if isinstance(rank.rules, PlacementRules) else place: rank.rules
        for place, rank in enumerate(ranks)
    }
    alike: dict[Hashable, tuple[list[Named], tuple[Hashable, ...], Array]] = {}
    for tensor, having in zip(named, _having(ranks, [one.key for one in named]), strict=True):
        labels = tuple([rule_label(rules, tensor) for rules in different.values()])
        lies = tensor.shape, tensor.dtype, tensor.rule_shape, tensor.rule_dims
        forms = tuple([(target.dims, target.boxes) for target in tensor.targets])
        own = fsdp.of(tensor.rule_name)
        key = lies, forms, labels, own, np.packbits(having).tobytes()
        alike.setdefault(key, ([], labels, having))[0].append(tensor)
    placed: dict[Hashable, list[_Placed]] = {}
    numbers = np.array(world.global_ranks, np.int64)
    groups = []
    for members, labels, having in alike.values():
        first = members[0]
        labels = *labels, bool(first.shape)
        if labels not in placed:
            placed[labels] = list(_placements(ranks, first))
        own = fsdp.of(first.rule_name)
        held = _held(world, ranks, placed[labels], own, having, members, faults)
        held = held._replace(ranks=numbers[held.ranks])
        parts = [Holders(held, target, hosts) for target in first.targets]
        groups.append(Group(members, parts))
    common = whole if more is None else Renames(*whole.steps, more)
    matches = [fsdp.matches([one.rule_name for one in named])]
    return groups, _unmatched(ranks, list(different.values()), common, named, matches)


def _declared(world: TransferWorld) -> tuple[list[_Rank], Renames]:
    """Return what each rank declares, and the steps of its rename that all ranks have alike."""
    ranks: list[_Rank] = []
    wholes: list[Renames] = []
    axes = dict(world.axes)
    for place in range(world.size):
        rules, rename, _ = rules_at(world.rules, axes, place)
        local, whole = split_rename(rename)
        absent = () if world.absent is None else tuple(world.absent(mesh_at(axes, place)))
        ranks.append(_Rank(rules, local, _held_numbers(local), absent))
        if whole not in wholes:
            wholes.append(whole)
    if len(wholes) > 1:
        raise PlacementError(
            f"ranks differ in how they stack, unstack or split: {wholes[0]!r} and {wholes[1]!r}\n"
            "    way out:     put Renumber before these steps; the rest must be equal on all ranks"
        )
    return ranks, wholes[0]


def _held_numbers(rename: Renames) -> Numbers:
    """Return the numbers that determine which keys a rank has."""
    numbers: Numbers = {}
    for step in rename.flat:
        if isinstance(step.rename, Renumber):
            by = {at: frozenset(ids) for at, ids in step.rename.by_selector.items()}
            # A later Replace may have taken the selector out of the keys.
            has_selector = "{" in step.pattern.replace("{}", "")
            numbers[step.pattern] = by if has_selector else {"": frozenset().union(*by.values())}
    return numbers


def _unmatched(
    ranks: Sequence[_Rank],
    different: Sequence[Rules],
    common: Renames,
    named: Sequence[Named],
    matches: list[dict[str, bool]],
) -> tuple[str, ...]:
    """Return what no key of a world matches, as far as the world's own keys show it."""
    keys = [tensor.key for tensor in named]
    names = {tensor.rule_name for tensor in named if tensor.shape}
    for rules in different:
        if isinstance(rules, PlacementRules):
            matched = {repr(rules.pattern_of(name)) for name in names}
            matches.append({pattern: pattern in matched for pattern in rules.declared})
    numbers = {
        step.declared: step.pattern
        for rank in ranks
        for step in rank.rename.flat
        if step.declared is not None and step.kind == "Renumber"
    }
    for declared, pattern in numbers.items():
        matches.append({declared: any(number_in(pattern, key) for key in keys)})
    matches.append({step.declared: False for step in common.flat if step.declared is not None})
    for key in keys if common.flat else ():
        apply(common.flat, key, matches[-1])
    return matched_nowhere(matches)


def _having(ranks: Sequence[_Rank], keys: Iterable[str]) -> Iterator[Array]:
    """Yield for each key a mask of the ranks that have it, ``[ranks]``."""
    alike: dict[tuple[str, str, frozenset[int]], list[int]] = {}
    absent: dict[str, list[int]] = {}
    # By pattern the ranks without it, which have all of its numbers.
    others: dict[str, Array] = {}
    for place, rank in enumerate(ranks):
        for pattern, by_selector in rank.numbers.items():
            others.setdefault(pattern, np.ones(len(ranks), bool))[place] = False
            for selector, numbers in by_selector.items():
                alike.setdefault((pattern, selector, numbers), []).append(place)
        for pattern in rank.absent:
            absent.setdefault(pattern, []).append(place)
    having: dict[tuple[str, str, int], Array] = {}
    for (pattern, selector, numbers), places in alike.items():
        for number in numbers:
            at = pattern, selector, number
            having.setdefault(at, others[pattern].copy())[places] = True
    lacking = [(matcher(pattern), places) for pattern, places in absent.items()]
    for key in keys:
        mask = np.ones(len(ranks), bool)
        for pattern, every in others.items():
            if found := number_in(pattern, key):
                mask &= having.get((pattern, found.by, found.number), every)
        for matches, places in lacking:
            if matches(key):
                mask[places] = False
        yield mask


def _placements(ranks: Sequence[_Rank], tensor: Named) -> Iterator[_Placed]:
    """Yield all ranks that the rules give a place for a tensor."""
    probe = tensor.probe()
    placements: dict[Hashable, CheckpointPlacement | None] = {}
    placed: dict[Hashable, tuple[list[int], list[Any]]] = {}
    for place, rank in enumerate(ranks):
        placement = asked(rank.rules, tensor.rule_name, probe) if tensor.shape else None
        coordinate = () if placement is None else placement.mesh.get_coordinate()
        if coordinate is None:
            continue  # no part of the rule's mesh: it holds nothing
        signature = cut_signature(placement)
        placements.setdefault(signature, placement)
        places, coordinates = placed.setdefault(signature, ([], []))
        places.append(place)
        coordinates.append(coordinate)
    for signature, (places, coordinates) in placed.items():
        table = np.array(coordinates, np.int64).reshape(len(places), -1)
        yield _Placed(placements[signature], np.array(places, np.int64), table)


def _held(
    world: TransferWorld,
    ranks: Sequence[_Rank],
    placed: Iterable[_Placed],
    fsdp: Sequence[str],
    having: Array,
    tensors: Sequence[Named],
    faults: list[Fault],
) -> HeldBoxes:
    """Return what the rank at each place holds of each of some tensors that lie alike."""
    first, axes = tensors[0], dict(world.axes)
    none = np.zeros((0, 2, len(first.shape)), np.int64)
    found = [HeldBoxes(np.zeros(0, np.int64), none[:, 0], none)]
    for placement, all_places, all_coordinates in placed:
        has = having[all_places]
        if not has.any():
            continue
        places, coordinates = all_places[has], all_coordinates[has]
        try:
            sharding, own, columns = tensor_sharding(first, placement, axes, fsdp)
            at = coordinates[:, columns]
            if own:
                by_axis = np.unravel_index(places, tuple(axes.values()))
                of_own = [by_axis[axis] for axis, name in enumerate(axes) if name in own]
                sizes = [axes[name] for name in own]
                at = np.column_stack([at, np.ravel_multi_index(of_own, sizes)])
            listed = listed_rows(placement, columns)
            found.append(held_boxes(first, sharding, at, places, listed))
        except PlacementError as error:
            rule = rule_name(ranks[all_places[0]].rules, first.rule_name)
            detail = f"by rule:     {rule}, on rank {world.global_ranks[all_places[0]]}"
            faults += [Fault(tensor.key, str(error), (detail,)) for tensor in tensors]
            break
    return HeldBoxes(*map(np.concatenate, zip(*found, strict=True)))
