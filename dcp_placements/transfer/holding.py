"""Which ranks of a world that does not run hold which boxes of its tensors, by what lies alike.

There is no DTensor here. A rule cuts a tensor, and then one flattened FSDP axis cuts dim 0 inside
the rule's cuts. Of a ``(4, 3)`` weight with ``Shard(0)`` over two ep ranks::

    ranks   [0, 1]
    local   [[0, 0], [0, 0]]
    boxes   [[[0, 0], [2, 3]], [[2, 0], [2, 3]]]

Ranks at one coordinate of the axes that cut a tensor hold the same boxes, so a layout is computed
once per such coordinate, and once for all tensors that are cut alike and that the same ranks have.

A rank's rename has two parts. ``Renumber`` and ``Replace`` make its keys those of its world, with
global numbers, and determine which of them the rank holds. From the first ``Stack``, ``Unstack`` or
``Split`` on, the steps are equal on all ranks: they make the *common* tensors of both worlds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements.errors import CannotLook, CannotPlace, Fault, PlacementError
from dcp_placements.layout.boxes import (
    Array,
    Boxes,
    Ints,
    as_array,
    as_boxes,
    expanded,
    intersect,
    overlaps,
)
from dcp_placements.layout.sharding import Box, Cut, Position, Sharding, dim_pieces
from dcp_placements.names.renames import (
    Renames,
    Renumber,
    Replace,
    Split,
    Stack,
    Unstack,
    apply,
    number_in,
    steps,
)
from dcp_placements.names.stacks_and_parts import Rename, Row, Target, renamed_boxes, row_target
from dcp_placements.rules.mesh import mesh_at
from dcp_placements.rules.patterns import (
    PlacementRules,
    Rules,
    asked,
    matched_nowhere,
    rule_name,
)
from dcp_placements.rules.placement import CheckpointPlacement, cut_of, kind_of
from dcp_placements.table.world import cover_of
from dcp_placements.transfer.world import EVERY, Fsdp, TransferWorld, matcher, rules_at

Shape = tuple[int, ...]

MAX_NBYTES = 2**63 - 1
"""Offsets and counts are 64-bit integers, as torch's are."""


class Whole(NamedTuple):
    """A whole tensor without data, or an object, which has no dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a world under its names."""

    key: str  # its key in the world
    shape: Shape  # its whole shape, in elements
    dtype: torch.dtype  # of its elements
    rule_name: str  # the key that the world's rules see
    rule_shape: Shape  # the shape that the world's rules cut: that of the stack for one of its rows
    rule_dims: tuple[int, ...]  # for each dim of ``shape`` that of ``rule_shape``
    targets: tuple[Target, ...]  # the common tensors that it is, or is a part of

    def probe(self) -> torch.Tensor:
        """Return a tensor without data for rules that are a function."""
        return torch.empty(self.rule_shape, dtype=self.dtype, device="meta")


def named_tensors(
    tensors: Mapping[str, Any], world: Renames, more: Rename | None, faults: list[Fault]
) -> list[Named]:
    """Return the tensors of a world under their names.

    Args:
        tensors: By key: anything with ``shape`` and ``dtype``.
        world: The steps from the keys of the world to the keys that its rules see.
        more: A further step to the common keys, or None.
        faults: Takes in the tensors that have no name, or do not fit it.
    """
    whole = world if more is None else Renames(*world.steps, more)
    found = []
    for key, tensor in tensors.items():
        shape = tuple(int(size) for size in tensor.shape)
        if prod(shape) * tensor.dtype.itemsize > MAX_NBYTES:
            headline = f"a tensor of shape {shape} has more than {MAX_NBYTES:,} bytes"
            faults.append(Fault(key, headline, ("likely:      a wrong shape in tensors=",)))
            continue
        try:
            seen = world(key)
            rule_shape: Shape = shape
            rule_dims = tuple(range(len(shape)))
            if isinstance(seen, Row):
                stack = row_target(seen, shape)
                rule_shape = stack.shape
                rule_dims = tuple(d for d, origin in enumerate(stack.dims) if origin is not None)
            rule_name = seen if isinstance(seen, str) else getattr(seen, "stacked", seen.fqn)
            targets = tuple(renamed_boxes(whole(key), shape))
        except CannotPlace as error:
            faults.append(error.fault(key))
            continue
        found.append(Named(key, shape, tensor.dtype, rule_name, rule_shape, rule_dims, targets))
    return found


class HeldBoxes(NamedTuple):
    """Boxes that ranks hold, one per row."""

    ranks: Ints  # the global rank, ``[rows]``
    local: Ints  # the start in the rank's local tensor, ``[rows, dims]``
    boxes: Boxes  # in the whole tensor


class FsdpAxes:
    """The axes over which FSDP cuts dim 0 of the tensors of a world.

    >>> fsdp = FsdpAxes({"experts": ["edp"], "**": ["ep", "edp"]}, {"edp": 2, "ep": 4})
    >>> fsdp.of("layers.0.experts.w1"), fsdp.of("layers.0.norm")
    (('edp',), ('edp', 'ep'))

    Args:
        declared: Of all tensors, or by pattern.
        axes: The mesh.

    Raises:
        CannotLook: The mesh does not have one of them, or a pattern has an empty component.
    """

    def __init__(self, declared: Fsdp, axes: Mapping[str, int]) -> None:
        by_pattern = declared if isinstance(declared, Mapping) else {EVERY: declared}
        self._axes: dict[str | None, tuple[str, ...]] = {None: ()}
        for pattern, names in by_pattern.items():
            if unknown := sorted(set(names) - set(axes)):
                has = ", ".join(axes)
                raise CannotLook(f"no axis {', '.join(unknown)} for FSDP: the mesh has {has}")
            self._axes[pattern] = tuple([name for name in axes if name in names])
        try:
            self._patterns = PlacementRules(dict.fromkeys(by_pattern))
        except PlacementError as error:
            raise CannotLook(str(error)) from error

    def of(self, key: str) -> tuple[str, ...]:
        """Return the axes of a tensor, in the mesh's order."""
        return self._axes[self._patterns.pattern_of(key)]

    def matches(self, keys: Iterable[str]) -> dict[str, bool]:
        """Return which of the patterns match any of the keys."""
        matched = {self._patterns.pattern_of(key) for key in keys}
        patterns = [one for one in self._patterns.patterns if one != EVERY]
        return {f"fsdp({pattern!r})": pattern in matched for pattern in patterns}


class Placed(NamedTuple):
    """Ranks whose placements of a tensor differ only in the coordinate."""

    placement: CheckpointPlacement | None  # that of the first
    coordinates: dict[int, tuple[int, ...]]  # by rank, in the mesh of the placement


def placed_ranks(rules: Iterable[tuple[int, Rules]], tensor: Named, name: str) -> list[Placed]:
    """Return the ranks that rules give a place for a tensor.

    Args:
        rules: Ranks and their rules.
        tensor: The tensor.
        name: The key that the rules are asked for.

    Raises:
        PlacementError: A function of the user's raises an error.
    """
    probe = tensor.probe()
    found: dict[Hashable, Placed] = {}
    for rank, one in rules:
        placement = asked(one, name, probe) if tensor.shape else None
        coordinate = () if placement is None else placement.mesh.get_coordinate()
        if coordinate is not None:  # it is a part of the rule's mesh
            alike = found.setdefault(cut_signature(placement), Placed(placement, {}))
            alike.coordinates[rank] = tuple(coordinate)
    return list(found.values())


class RankCuts(NamedTuple):
    """How ranks hold a tensor: cut alike, each at a place of its own.

    Of a ``(4, 3)`` weight with ``Shard(0)`` over two ep ranks::

        RankCuts(Sharding((4, 3), (Cut(0, "ep", 2),)), "", {0: (0,), 1: (1,)})
    """

    sharding: Sharding
    fsdp: str  # the axis of FSDP, flattened, whose cut is the last; empty without one
    places: dict[int, tuple[Position, ...]]  # by rank, in the cuts of ``sharding``


def rank_cuts(
    tensor: Named, placed: Placed, axes: Mapping[str, int], fsdp: Sequence[str]
) -> RankCuts:
    """Return how ranks hold a tensor: its rule cuts it, then FSDP over all axes that are left.

    Args:
        tensor: The tensor.
        placed: The ranks, and the rule's placement; of a row of a stack that of the stack.
        axes: The mesh.
        fsdp: The axes of FSDP, in mesh order.

    Raises:
        PlacementError: A rule that does not fit the tensor.
    """
    shape, padded, placement = tensor.rule_shape, None, placed.placement
    cuts: list[Cut] = []
    # By cut the place of each rank.
    columns: list[Sequence[Position]] = []
    taken: set[str | None] = set()
    if placement is not None:
        if placement.global_shape not in (None, shape):
            raise PlacementError(
                f"the checkpoint holds a {shape} tensor, the rule says global_shape="
                f"{placement.global_shape}"
            )
        padded = placement.padded_shape
        names = placement.mesh.mesh_dim_names or (None,) * len(placement.placements)
        declared = zip(placement.placements, names, placement.mesh.shape, strict=True)
        for axis, (entry, name, size) in enumerate(declared):
            if not kind_of(entry):
                continue
            taken.add(name)
            cut = cut_of(entry, len(shape), name, size)
            if cut.dim in tensor.rule_dims:  # not the dim of the stack, of a row of it
                cuts.append(cut)
                rows = getattr(entry, "indices", None)
                columns.append(
                    [at[axis] if rows is None else rows for at in placed.coordinates.values()]
                )
    own = [name for name in fsdp if name not in taken] if tensor.shape else []
    if own:
        # Several axes flattened into one have no name that a save could have recorded.
        name, sizes = own[0] if len(own) == 1 else None, [axes[name] for name in own]
        cuts.append(Cut(tensor.rule_dims[0], name, prod(sizes)))
        by_axis = np.unravel_index(list(placed.coordinates), tuple(axes.values()))
        of_own = [by_axis[axis] for axis, name in enumerate(axes) if name in own]
        columns.append(np.ravel_multi_index(of_own, sizes).tolist())
    places = zip(*columns, strict=True) if columns else repeat(())
    by_rank = dict(zip(placed.coordinates, places, strict=False))
    return RankCuts(Sharding(shape, tuple(cuts), padded), "_".join(own), by_rank)


def cut_signature(placement: CheckpointPlacement | None) -> Hashable:
    """Return what decides how a placement cuts, whatever its rank."""
    if placement is None:
        return None
    mesh = placement.mesh
    shapes = placement.global_shape, placement.padded_shape
    return placement.placements, tuple(mesh.shape), mesh.mesh_dim_names, shapes


def rule_label(rules: Rules, tensor: Named) -> Hashable:
    """Return what tensors of one shape have in common if a rank's rules cut them alike.

    None: no rule matches.
    """
    if not tensor.shape:
        return None
    if isinstance(rules, PlacementRules):
        return rules.pattern_of(tensor.rule_name)
    placement = asked(rules, tensor.rule_name, tensor.probe())
    place = None if placement is None else placement.mesh.get_coordinate()
    return placement and (cut_signature(placement), None if place is None else tuple(place))


def held_boxes(tensor: Named, held: RankCuts) -> HeldBoxes:
    """Return what ranks hold of a tensor, rank after rank.

    A dim is cut once for each different position in the cuts of it.

    Raises:
        CannotPlace: A cut that does not fit what is left to cut.
    """
    sharding, ranks = held.sharding, np.array(list(held.places), np.int64)
    counts = np.ones(len(ranks), np.int64)
    dims: list[tuple[Ints, Ints, Ints]] = []
    for dim, size in zip(tensor.rule_dims, tensor.shape, strict=True):
        columns = [i for i, cut in enumerate(sharding.cuts) if cut.dim == dim]
        parts = [tuple([at[i] for i in columns]) for at in held.places.values()]
        of_part = dict(zip(parts, held.places.values(), strict=True))
        numbers = dict(zip(of_part, range(len(of_part)), strict=True))
        which = np.array([numbers[part] for part in parts], np.int64)
        pieces = [dim_pieces(sharding.dim_at(dim, at), size) for at in of_part.values()]
        # (start in the local tensor, start in the whole, size), and which of them each rank has.
        table = np.array(list(chain.from_iterable(pieces)), np.int64).reshape(-1, 3)
        number = np.array([len(each) for each in pieces], np.int64)
        dims.append((table, (np.cumsum(number) - number)[which], number[which]))
        counts *= number[which]
    # The boxes of a rank are the product of its pieces of all dims, in C order.
    rank, within = expanded(np.zeros_like(counts), counts)
    pieces_of = []
    for table, start, number in reversed(dims):
        within, piece = np.divmod(within, number[rank])
        pieces_of.append(table[start[rank] + piece])
    boxes = np.array(pieces_of[::-1], np.int64).reshape(len(dims), len(rank), 3).transpose(1, 2, 0)
    return HeldBoxes(ranks[rank], boxes[:, 0], boxes[:, 1:])


def as_common(held: HeldBoxes, target: Target) -> HeldBoxes:
    """Return the boxes of a tensor as boxes of the common tensor; ``local`` keeps its dims."""
    found = []
    for source, common in target.boxes:
        start = np.array(source.offsets, np.int64)
        shared = intersect(held.boxes, as_array([source], len(start)))
        kept = (shared[:, 1] > 0).all(axis=1)
        shared = shared[kept]
        boxes = np.ones((len(shared), 2, len(target.dims)), np.int64)
        boxes[:, 0] = common.offsets
        for dim, origin in enumerate(target.dims):
            if origin is not None:
                boxes[:, 0, dim] += shared[:, 0, origin] - start[origin]
                boxes[:, 1, dim] = shared[:, 1, origin]
        local = held.local[kept] + shared[:, 0] - held.boxes[kept, 0]
        found.append(HeldBoxes(held.ranks[kept], local, boxes))
    return HeldBoxes(*map(np.concatenate, zip(*found, strict=True)))


class Hosts:
    """The order of ranks as senders: by host, then by rank.

    Attributes:
        size: One more than the highest global rank of both worlds.
        number: The number of each global rank in this order, from 1 up; 0 if it is not in the
            source.
        near: For each global rank the numbers ``first .. stop`` of the source's ranks on its host,
            ``[size, 2]``; an empty range where there are none, or hosts are unknown.
    """

    def __init__(self, source: TransferWorld, target: TransferWorld) -> None:
        self.size = 1 + max(*source.global_ranks, *target.global_ranks)
        self.number = np.zeros(self.size, np.int64)
        self.near = np.zeros((self.size, 2), np.int64)
        names, far = source.host_names, target.host_names
        if names is None or far is None:
            names, far = [0] * source.size, [None] * target.size
        on_host: dict[Hashable, list[int]] = {host: [] for host in names}
        for rank, host in zip(source.global_ranks, names, strict=True):
            on_host[host].append(rank)
        ranges: dict[Hashable, tuple[int, int]] = {}
        stop = 1
        for host, ranks in on_host.items():
            first, stop = stop, stop + len(ranks)
            self.number[sorted(ranks)] = np.arange(first, stop)
            ranges[host] = first, stop
        self.near[target.global_ranks] = [ranges.get(host, (0, 0)) for host in far]


class Holders:
    """Who holds which box of a common tensor, in the order of ``Hosts`` for each box.

    Attributes:
        shape: Of the common tensor.
        dims: For each of its dims that of the local tensor; None if that has none.
        boxes: The different boxes, in the common tensor.
        numel: Their elements.
        first: By box, its first holder; the number of holders last.
        box: By holder, the box, ascending.
        rank: By holder, the global rank.
        local: By holder, the start of the box in its local tensor.
        key: By holder, box and number of the rank as one number, ascending.
    """

    def __init__(self, held: HeldBoxes, target: Target, hosts: Hosts) -> None:
        self.shape, self.dims = target.shape, target.dims
        ranks, local, boxes = as_common(held, target)
        cover = cover_of(hosts.number[ranks], boxes)
        self.boxes, self.numel, self.first = cover.boxes, cover.numel, cover.starts
        self.box, self.rank = cover.box_of[cover.order], ranks[cover.order]
        self.local = local[cover.order]
        self.key = self.box * (hosts.size + 1) + cover.ranks[cover.order]
        self._has = np.zeros(hosts.size, bool)
        self._has[ranks] = True

    @cached_property
    def counts(self) -> Array:
        """The number of holders of each box."""
        return np.diff(self.first)

    @cached_property
    def overlap(self) -> tuple[Box, Box] | None:
        """Two of the boxes that share elements; None if there are none."""
        for pair in overlaps(self.boxes, 1):
            one, other = as_boxes(self.boxes[list(pair)])
            return one, other
        return None

    def holds(self, rank: int) -> bool:
        """Whether a global rank holds a box."""
        return 0 <= rank < len(self._has) and bool(self._has[rank])

    def by_rank(self, numel: Array) -> Array:
        """Return sums by global rank of what each box has."""
        sums = np.zeros(len(self._has), np.int64)
        np.add.at(sums, self.rank, numel[self.box])
        return sums

    def slices(self, holder: Array, boxes: Boxes) -> tuple[Array, Array]:
        """Return start and sizes in local tensors of parts of what holders have.

        Args:
            holder: By row, the holder.
            boxes: By row, the part of its box, in the common tensor.
        """
        start = self.local[holder]
        sizes = np.ones_like(start)
        moved = boxes[:, 0] - self.boxes[self.box[holder], 0]
        for dim, origin in enumerate(self.dims):
            if origin is not None:
                start[:, origin] += moved[:, dim]
                sizes[:, origin] = boxes[:, 1, dim]
        return start, sizes


RowAt = tuple[tuple[int, int], ...]
"""Which row of a common tensor a tensor is: the dims that it lacks, and its index along each."""


class Part(NamedTuple):
    """A tensor of a world as one of the common tensors that it is, or is a part of."""

    tensor: Named
    target: Target
    holders: Holders

    @property
    def row(self) -> RowAt:
        """The row; empty if it has all dims."""
        offsets = self.target.boxes[0][1].offsets
        lacks = [dim for dim, origin in enumerate(self.target.dims) if origin is None]
        return tuple([(dim, offsets[dim]) for dim in lacks])


class _Rank(NamedTuple):
    """What one rank declares."""

    rules: Rules
    rename: Renames  # to the keys of the world
    absent: tuple[str, ...]


def held_parts(
    world: TransferWorld,
    tensors: Mapping[str, Any],
    more: Rename | None,
    hosts: Hosts,
    faults: list[Fault],
) -> tuple[list[list[Part]], tuple[str, ...]]:
    """Return each tensor of a world as common tensors, and what is declared and matches no key.

    Tensors that lie alike on every rank, as alike parts, have the same ``Holders``.

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
    placed: dict[Hashable, list[Placed]] = {}
    numbers = np.array(world.global_ranks, np.int64)
    parts: list[list[Part]] = []
    for members, labels, having in alike.values():
        first = members[0]
        labels = *labels, bool(first.shape)
        if labels not in placed:
            rules = enumerate([rank.rules for rank in ranks])
            placed[labels] = placed_ranks(rules, first, first.rule_name)
        own = fsdp.of(first.rule_name)
        held = _held(world, ranks, placed[labels], own, having, members, faults)
        held = held._replace(ranks=numbers[held.ranks])
        holders = [Holders(held, target, hosts) for target in first.targets]
        parts += [
            [Part(one, *pair) for pair in zip(one.targets, holders, strict=True)] for one in members
        ]
    common = whole if more is None else Renames(*whole.steps, more)
    matches = [fsdp.matches([one.rule_name for one in named])]
    return parts, _unmatched(ranks, list(different.values()), common, named, matches)


def split_rename(rename: object) -> tuple[Renames, Renames]:
    """Return the steps that lead to the keys of the world, and those to the common keys.

    Raises:
        PlacementError: A function of the user's among the first: which keys a rank holds does not
            follow from it.
    """
    found = steps(rename)
    first = [isinstance(step.rename, Stack | Unstack | Split) for step in found]
    at = first.index(True) if any(first) else len(found)
    for step in found[:at]:
        if not isinstance(step.rename, Renumber | Replace):
            raise PlacementError(
                f"the rename of a rank's Placements has the step {step.rename!r}: which keys the "
                "rank holds does not follow from it\n"
                "    way out:     Renumber and Replace; or rename= of transfer_plan, for names "
                "that differ between the worlds and not between ranks"
            )
    whole = [Renames(step.rename, optional=step.declared is None) for step in found]
    return Renames(*whole[:at]), Renames(*whole[at:])


def _declared(world: TransferWorld) -> tuple[list[_Rank], Renames]:
    """Return what each rank declares, and the steps of its rename that all ranks have alike."""
    ranks: list[_Rank] = []
    wholes: list[Renames] = []
    axes = dict(world.axes)
    for place in range(world.size):
        rules, rename, _ = rules_at(world.rules, axes, place)
        local, whole = split_rename(rename)
        absent = () if world.absent is None else tuple(world.absent(mesh_at(axes, place)))
        ranks.append(_Rank(rules, local, absent))
        if whole not in wholes:
            wholes.append(whole)
    if len(wholes) > 1:
        raise PlacementError(
            f"ranks differ in how they stack, unstack or split: {wholes[0]!r} and {wholes[1]!r}\n"
            "    way out:     put Renumber before these steps; the rest must be equal on all ranks"
        )
    return ranks, wholes[0]


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
        for step in rank.rename.flat:
            if not isinstance(step.rename, Renumber):
                continue
            by_selector: Mapping[str, Iterable[int]] = step.rename.by_selector
            if "{" not in step.pattern.replace("{}", ""):
                # There is no selector, or a later Replace has taken it out of the keys.
                by_selector = {"": chain.from_iterable(by_selector.values())}
            others.setdefault(step.pattern, np.ones(len(ranks), bool))[place] = False
            for selector, numbers in by_selector.items():
                kind = step.pattern, selector, frozenset(numbers)
                alike.setdefault(kind, []).append(place)
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


def _held(
    world: TransferWorld,
    ranks: Sequence[_Rank],
    placed: Iterable[Placed],
    fsdp: Sequence[str],
    having: Array,
    tensors: Sequence[Named],
    faults: list[Fault],
) -> HeldBoxes:
    """Return what the rank at each place holds of each of some tensors that lie alike."""
    first, has = tensors[0], having.tolist()
    none = np.zeros((0, 2, len(first.shape)), np.int64)
    found = [HeldBoxes(np.zeros(0, np.int64), none[:, 0], none)]
    for one in placed:
        of_ranks = {rank: at for rank, at in one.coordinates.items() if has[rank]}
        if not of_ranks:
            continue
        try:
            cuts = rank_cuts(first, Placed(one.placement, of_ranks), world.axes, fsdp)
            found.append(held_boxes(first, cuts))
        except PlacementError as error:
            at = next(iter(one.coordinates))
            rule = rule_name(ranks[at].rules, first.rule_name)
            detail = f"by rule:     {rule}, on rank {world.global_ranks[at]}"
            faults += [Fault(tensor.key, str(error), (detail,)) for tensor in tensors]
            break
    return HeldBoxes(*map(np.concatenate, zip(*found, strict=True)))
