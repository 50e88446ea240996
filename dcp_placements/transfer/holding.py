"""Which rank of a world holds which boxes of its tensors, in one table per group of tensors.

A group is the tensors of one shape that lie alike on every rank. Ranks at one coordinate of the
axes that cut a group hold the same boxes, so a layout is computed once per such coordinate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import Fault, PlacementError
from dcp_placements.layout.boxes import Boxes, expanded, unique_rows
from dcp_placements.layout.sharding import Cut, Kind, LayoutError, Sharding, dim_pieces
from dcp_placements.names.renames import (
    Numbers,
    Renames,
    apply,
    expected,
    held_numbers,
    number_in,
    steps,
)
from dcp_placements.names.target import Rename
from dcp_placements.offline.declared import matcher, mesh_at, rules_at
from dcp_placements.offline.views.cutting import (
    cut_signature,
    fsdp_axes,
    in_mesh_order,
    whole_sharding,
)
from dcp_placements.rules.matches import (
    Declared,
    matched_nowhere,
    rule_matches,
)
from dcp_placements.rules.patterns import PlacementRules, Rules, asked, rule_name
from dcp_placements.rules.placement import CheckpointPlacement
from dcp_placements.storage.metadata.table import Array
from dcp_placements.transfer.names import Named, named_tensors, split_rename
from dcp_placements.transfer.world import TransferWorld


class HeldBoxes(NamedTuple):
    """Boxes that ranks hold, one per row."""

    ranks: Array  # the global rank, ``[rows]``
    local: Array  # the start in the rank's local tensor, ``[rows, dims]``
    boxes: Boxes  # in the whole tensor


@dataclass(slots=True, eq=False)
class Group:
    """Tensors of a world that have one shape and lie alike."""

    tensors: list[Named]  # they, in the order of the world
    held: HeldBoxes  # what each rank holds of each of them


class _Rank(NamedTuple):
    """What one rank declares: its place in the mesh, its rules, what gives its keys."""

    place: int
    coordinate: tuple[int, ...]
    rules: Rules
    rename: Renames  # to the keys of the world
    numbers: Numbers
    absent: tuple[str, ...]


def held_groups(
    world: TransferWorld, tensors: Mapping[str, Any], more: Rename | None, faults: list[Fault]
) -> tuple[list[Group], tuple[Declared, ...]]:
    """Return the tensors of a world by group, and what is declared by pattern and matches no key.

    Args:
        world: The world.
        tensors: Its whole tensors, by key.
        more: A step from the keys that the world's rules see to the common keys, or None.
        faults: Takes in the tensors that cannot be placed.

    Raises:
        CannotLook: The function of the rules fails.
        PlacementError: A rename that is not as ``TransferWorld`` has it.
    """
    ranks, whole = _declared(world)
    named = named_tensors(tensors, whole, more, faults)
    cutter = _Cutter(world, ranks, faults)
    groups = [cutter.group(alike) for alike in _alike(named, ranks)]
    return groups, _unmatched(ranks, whole, more, named)


def _declared(world: TransferWorld) -> tuple[list[_Rank], Renames]:
    """Return what each rank declares, and the steps of its rename that all ranks have alike."""
    ranks: list[_Rank] = []
    wholes: list[Renames] = []
    axes = dict(world.axes)
    for place, coordinate in enumerate(np.ndindex(*axes.values())):
        rules, rename, _ = rules_at(world.rules, axes, place)
        local, whole = split_rename(rename)
        numbers = held_numbers(local)
        assert numbers is not None, "split_rename leaves Renumber and Replace"
        absent = () if world.absent is None else tuple(world.absent(mesh_at(axes, place)))
        ranks.append(_Rank(place, coordinate, rules, local, numbers, absent))
        if whole not in wholes:
            wholes.append(whole)
    if len(wholes) > 1:
        raise PlacementError(
            f"ranks differ in how they stack, unstack or split: {wholes[0]!r} and {wholes[1]!r}\n"
            "    way out:     put Renumber before these steps; the rest must be equal on all ranks"
        )
    return ranks, wholes[0]


def _unmatched(
    ranks: Sequence[_Rank], whole: Renames, more: Rename | None, named: Sequence[Named]
) -> tuple[Declared, ...]:
    """Return what no key of a world matches, as far as the world's own keys show it."""
    keys = [tensor.key for tensor in named]
    names = {tensor.rule_name for tensor in named if tensor.shape}
    tables = {
        one.rules.patterns: one.rules for one in ranks if isinstance(one.rules, PlacementRules)
    }
    matches: list[dict[Declared, bool]] = [
        rule_matches(rules, {repr(rules.pattern_of(name)) for name in names})
        for rules in tables.values()
    ]
    numbers = {
        step.declared: step.pattern
        for rank in ranks
        for step in rank.rename.flat
        if step.declared is not None and step.kind == "Renumber"
    }
    for declared, pattern in numbers.items():
        matches.append({declared: any(number_in(pattern, key) for key in keys)})
    common = steps(whole if more is None else Renames(*whole.steps, more))
    matches.append(expected(common))
    for key in keys if common else ():
        apply(common, key, matches[-1])
    return matched_nowhere(matches)


class _Alike(NamedTuple):
    """Tensors that lie alike, what determines how each rank's rules cut them, who has them."""

    tensors: list[Named]
    labels: tuple[Hashable, ...]
    held: Array  # whether each rank does, [ranks]


def _alike(named: Sequence[Named], ranks: Sequence[_Rank]) -> Iterator[_Alike]:
    """Yield the tensors by what lies alike."""
    by_rules: dict[Hashable, Rules] = {}
    for rank in ranks:
        rules = rank.rules
        # What any other function answers may differ from rank to rank.
        alike = rules.patterns if isinstance(rules, PlacementRules) else rank.place
        by_rules.setdefault(alike, rules)
    holds = _KeysHeld(ranks)
    groups: dict[Hashable, _Alike] = {}
    for tensor in named:
        number, held = holds(tensor.key)
        rules_of = by_rules.values() if tensor.shape else ()
        labels = tuple([_label(rules, tensor) for rules in rules_of])
        lies = tensor.shape, tensor.dtype, tensor.rule_shape, tensor.rule_dims
        key = lies, labels, number
        if key not in groups:
            groups[key] = _Alike([], labels, held)
        groups[key].tensors.append(tensor)
    yield from groups.values()


def _label(rules: Rules, tensor: Named) -> Hashable:
    """Return what tensors of one shape have in common if one rank's rules cut them alike."""
    if isinstance(rules, PlacementRules):
        return rules.pattern_of(tensor.rule_name)
    placement = asked(rules, tensor.rule_name, tensor.probe())
    place = None if placement is None else placement.mesh.get_coordinate()
    return cut_signature(placement), None if place is None else tuple(place)


class _KeysHeld:
    """Which ranks have a key; keys with the same numbers are looked up once, not rank by rank."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        # By pattern the different sets of numbers, and which of them each rank has.
        sets: dict[str, dict[tuple[tuple[str, frozenset[int]], ...], int]] = {}
        absent: dict[str, list[int]] = {}
        self._size = len(ranks)
        self._set_of: dict[str, Array] = {}
        for rank, declared in enumerate(ranks):
            for pattern, held in declared.numbers.items():
                by_selector = tuple(held.items())
                found = sets.setdefault(pattern, {})
                column = self._set_of.setdefault(pattern, np.full(self._size, -1))
                column[rank] = found.setdefault(by_selector, len(found))
            for pattern in declared.absent:
                absent.setdefault(pattern, []).append(rank)
        self._sets = {pattern: [dict(one) for one in found] for pattern, found in sets.items()}
        self._absent = [(matcher(pattern), on) for pattern, on in absent.items()]
        self._by_token: dict[Hashable, bytes] = {}
        self._by_content: dict[bytes, tuple[int, Array]] = {}

    def __call__(self, key: str) -> tuple[int, Array]:
        """Return a mask of the ranks that have a key, ``[ranks]``, and a number of its content."""
        at = tuple([number_in(pattern, key) for pattern in self._sets])
        token = at, tuple([matches(key) for matches, _ in self._absent])
        content = self._by_token.get(token)
        if content is None:
            held = self._held(*token)
            content = self._by_token[token] = np.packbits(held).tobytes()
            self._by_content.setdefault(content, (len(self._by_content), held))
        return self._by_content[content]

    def _held(
        self, numbers: tuple[tuple[str, int] | None, ...], is_absent: tuple[bool, ...]
    ) -> Array:
        held = np.ones(self._size, bool)
        for at, (pattern, sets) in zip(numbers, self._sets.items(), strict=True):
            if at is not None:
                has = [at[1] in numbers_by.get(at[0], ()) for numbers_by in sets]
                # The last is for ranks without this pattern.
                held &= np.array([*has, True])[self._set_of[pattern]]
        for absent, (_, ranks) in zip(is_absent, self._absent, strict=True):
            if absent:
                held[ranks] = False
        return held


class _Placed(NamedTuple):
    """Ranks whose placements differ only in the coordinate; the placement is the first one's."""

    placement: CheckpointPlacement | None
    first: _Rank
    places: Array  # in the mesh of the world, [ranks]
    coordinates: Array  # in the mesh of the placement, [ranks, axes]


class _Cutter:
    """Cuts the groups of one world."""

    def __init__(self, world: TransferWorld, ranks: Sequence[_Rank], faults: list[Fault]) -> None:
        self._axes = dict(world.axes)
        self._ranks = ranks
        self._coordinates = np.array([rank.coordinate for rank in ranks], np.int64)
        self._fsdp = in_mesh_order(world.axes, world.fsdp)
        self._global = np.array(world.global_ranks, np.int64)
        self._faults = faults
        self._placed: dict[Hashable, list[_Placed]] = {}

    def group(self, alike: _Alike) -> Group:
        """Return a group with what each rank holds of it."""
        tensors, labels, held = alike
        first = tensors[0]
        if labels not in self._placed:
            self._placed[labels] = list(self._placements(first))
        none = np.zeros((0, 2, len(first.shape)), np.int64)
        found = [HeldBoxes(np.zeros(0, np.int64), none[:, 0], none)]
        for placed in self._placed[labels]:
            has = held[placed.places]
            places, coordinates = placed.places[has], placed.coordinates[has]
            if not len(places):
                continue
            try:
                sharding, own = self._cut(first, placed.placement)
                position = self._fsdp_position(places, own)
                dims = _held_dims(first, sharding, np.column_stack([coordinates, position]))
            except (PlacementError, LayoutError) as error:
                rule = rule_name(placed.first.rules, first.rule_name)
                detail = f"by rule:     {rule}, on rank {self._global[placed.first.place]}"
                self._faults += [Fault(tensor.key, str(error), (detail,)) for tensor in tensors]
                break
            found.append(_product(dims, self._global[places]))
        return Group(tensors, HeldBoxes(*map(np.concatenate, zip(*found, strict=True))))

    def _placements(self, tensor: Named) -> Iterator[_Placed]:
        """Yield all ranks that the rules give a place for a tensor."""
        probe = tensor.probe()
        by_signature: dict[Hashable, tuple[list[_Rank], list[Any]]] = {}
        placements: dict[Hashable, CheckpointPlacement | None] = {}
        for rank in self._ranks:
            placement = asked(rank.rules, tensor.rule_name, probe) if tensor.shape else None
            place = () if placement is None else placement.mesh.get_coordinate()
            if place is None:
                continue  # no part of the rule's mesh: it holds nothing
            signature = cut_signature(placement)
            placements.setdefault(signature, placement)
            members, coordinates = by_signature.setdefault(signature, ([], []))
            members.append(rank)
            coordinates.append(place)
        for signature, (members, coordinates) in by_signature.items():
            places = np.array([rank.place for rank in members], np.int64)
            table = np.array(coordinates, np.int64).reshape(len(members), -1)
            yield _Placed(placements[signature], members[0], places, table)

    def _cut(
        self, tensor: Named, placement: CheckpointPlacement | None
    ) -> tuple[Sharding, list[str]]:
        """Return how a tensor is cut, by its rule and then by FSDP, and the axes of FSDP."""
        own = fsdp_axes(tensor.shape, placement, self._fsdp)
        sharding = whole_sharding(tensor.rule_shape, placement, self._axes, own)
        # Of a row of a stack FSDP cuts dim 0, not the dim of the stack.
        rule_cuts = sharding.cuts[:-1] if own else sharding.cuts
        cuts = [cut for cut in rule_cuts if cut.dim in tensor.rule_dims]
        if own:
            cuts.append(Cut(tensor.rule_dims[0], len(sharding.axis_sizes) - 1))
        return replace(sharding, cuts=tuple(cuts)), own

    def _fsdp_position(self, places: Array, own: Sequence[str]) -> Array:
        position = np.zeros(len(places), np.int64)
        for axis, (name, size) in enumerate(self._axes.items()):
            if name in own:
                position = position * size + self._coordinates[places, axis]
        return position


class _HeldDim(NamedTuple):
    """The pieces that ranks hold of one dim."""

    first: Array  # the first piece of each rank, an index of ``pieces``
    counts: Array  # how many it has
    pieces: Array  # (start in the local tensor, start in the whole, size), [pieces, 3]


def _held_dims(tensor: Named, sharding: Sharding, coordinates: Array) -> list[_HeldDim]:
    """Return what ranks at ``coordinates`` hold of each dim of a tensor.

    A dim is cut once for each different position along the axes that cut it.
    """
    held = []
    for dim, size in zip(tensor.rule_dims, tensor.shape, strict=True):
        cuts = [cut for cut in sharding.cuts if cut.dim == dim]
        axes = sorted({cut.axis for cut in cuts if isinstance(cut, Cut)})
        first, which = unique_rows(coordinates[:, axes])
        positions = coordinates[first]
        if all(cut.kind is Kind.PLAIN for cut in cuts):
            counts, table = _plain_pieces(sharding, dim, size, positions)
        else:
            intervals = [sharding.dim_at(dim, position) for position in positions.tolist()]
            pieces = [dim_pieces(each, size) for each in intervals]
            counts = np.array([len(each) for each in pieces], np.int64)
            table = np.array(list(chain.from_iterable(pieces)), np.int64).reshape(-1, 3)
        held.append(_HeldDim((np.cumsum(counts) - counts)[which], counts[which], table))
    return held


def _plain_pieces(sharding: Sharding, dim: int, size: int, positions: Array) -> tuple[Array, Array]:
    """Return counts and pieces of a dim that plain shards cut, for all positions at once.

    It is ``Sharding.dim_at`` for one interval: FSDP cuts a dim in as many pieces as a world has
    ranks, and 16,384 of them take 1 ms here and 70 ms there.
    """
    start = np.zeros(len(positions), np.int64)
    length = np.full(len(positions), sharding.cut_shape[dim], np.int64)
    for cut in sharding.cuts:
        if isinstance(cut, Cut) and cut.dim == dim:
            step = -(-length // sharding.axis_sizes[cut.axis])
            low = np.minimum(positions[:, cut.axis] * step, length)
            length = np.minimum(low + step, length) - low
            start += low
    stored = np.minimum(start + length, size) - start
    has = stored > 0
    table = np.stack([np.zeros_like(start), start, stored], 1)
    return has.astype(np.int64), table[has]


def _product(dims: Sequence[_HeldDim], ranks: Array) -> HeldBoxes:
    """Return the boxes of each rank: the product of its pieces of all dims, in C order."""
    counts = np.ones(len(ranks), np.int64)
    for dim in dims:
        counts *= dim.counts
    which, within = expanded(np.zeros_like(counts), counts)
    columns = []
    for dim in reversed(dims):
        within, piece = np.divmod(within, dim.counts[which])
        columns.append(dim.pieces[dim.first[which] + piece])
    table = np.array(columns[::-1], np.int64).reshape(len(dims), len(which), 3).transpose(1, 2, 0)
    return HeldBoxes(ranks[which], table[:, 0], table[:, 1:])
