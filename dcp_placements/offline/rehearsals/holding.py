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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements.errors import CannotLook, CannotPlace, Fault, PlacementError
from dcp_placements.layout.boxes import Boxes, Ints, as_array, expanded, intersect
from dcp_placements.layout.sharding import Cut, Position, Sharding, dim_pieces
from dcp_placements.names.renames import Renames
from dcp_placements.names.stacks_and_parts import Row, Target, renamed_boxes, row_target
from dcp_placements.rules.patterns import (
    EVERY,
    PlacementRules,
    Rules,
    asked,
)
from dcp_placements.rules.placement import CheckpointPlacement, cut_of, kind_of

Shape = tuple[int, ...]

Fsdp = Sequence[str] | Mapping[str, Sequence[str]]
"""Axes over which FSDP cuts dim 0: of every tensor, or by pattern of its key."""

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


def named_tensors(tensors: Mapping[str, Any], rename: Renames, faults: list[Fault]) -> list[Named]:
    """Return the tensors of a world under their names.

    Args:
        tensors: By key: anything with ``shape`` and ``dtype``.
        rename: From these keys to the checkpoint's.
        faults: Takes in the tensors that have no name, or do not fit it.
    """
    found = []
    for key, tensor in tensors.items():
        shape = tuple(int(size) for size in tensor.shape)
        if prod(shape) * tensor.dtype.itemsize > MAX_NBYTES:
            headline = f"a tensor of shape {shape} has more than {MAX_NBYTES:,} bytes"
            faults.append(Fault(key, headline, ("likely:      a wrong shape in tensors=",)))
            continue
        try:
            seen = rename(key)
            rule_shape: Shape = shape
            rule_dims = tuple(range(len(shape)))
            if isinstance(seen, Row):
                stack = row_target(seen, shape)
                rule_shape = stack.shape
                rule_dims = tuple(d for d, origin in enumerate(stack.dims) if origin is not None)
            rule_name = seen if isinstance(seen, str) else getattr(seen, "stacked", seen.fqn)
            targets = tuple(renamed_boxes(seen, shape))
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
