"""How a whole tensor is cut in a world that does not exist, and which boxes its ranks hold.

There is no DTensor here. A rule cuts the tensor, and then one flattened FSDP axis cuts dim 0 inside
the rule's cuts. Of a ``(4, 3)`` weight with ``Shard(0)`` over two ep ranks::

    ranks   [0, 1]
    local   [[0, 0], [0, 0]]
    boxes   [[[0, 0], [2, 3]], [[2, 0], [2, 3]]]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.layout.boxes import Boxes, Ints, expanded, unique
from dcp_placements.layout.sharding import Cut, Kind, Sharding, dim_pieces
from dcp_placements.rules.patterns import PlacementRules, Rules, asked
from dcp_placements.rules.placement import CheckpointPlacement, cut_of, kind_of, shards
from dcp_placements.transfer.names import Named
from dcp_placements.transfer.world import EVERY, Fsdp


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


def tensor_sharding(
    tensor: Named,
    placement: CheckpointPlacement | None,
    axes: Mapping[str, int],
    fsdp: Sequence[str],
) -> tuple[Sharding, list[str], list[int]]:
    """Return how a tensor is cut: by its rule, then by FSDP over all axes that its rule leaves.

    Args:
        tensor: The tensor.
        placement: Its rule's, of whose mesh the rank is a part; of a row of a stack that of the
            stack.
        axes: The mesh.
        fsdp: The axes of FSDP, in mesh order.

    Returns:
        The sharding, with FSDP's cut last; the axes of FSDP; for each cut of the rule its axis of
        the rule's mesh.

    Raises:
        PlacementError: A rule that does not fit the tensor.
    """
    shape, padded = tensor.rule_shape, None
    cuts: list[Cut] = []
    columns: list[int] = []
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
        for column, (entry, name, size) in enumerate(declared):
            if not shards(entry):
                continue
            taken.add(name)
            cut = cut_of(entry, len(shape), name, size)
            if cut.dim in tensor.rule_dims:  # not the dim of the stack, of a row of it
                cuts.append(cut)
                columns.append(column)
    own = [name for name in fsdp if name not in taken] if tensor.shape else []
    if own:
        # Several axes flattened into one have no name that a save could have recorded.
        axis = own[0] if len(own) == 1 else None
        cuts.append(Cut(tensor.rule_dims[0], axis, prod(axes[name] for name in own)))
    return Sharding(shape, tuple(cuts), padded), own, columns


def listed_rows(
    placement: CheckpointPlacement | None, columns: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the rows that listed cuts have, by the number of the cut."""
    entries = () if placement is None else placement.placements
    return {
        number: entries[axis].indices
        for number, axis in enumerate(columns)
        if kind_of(entries[axis]) is Kind.LISTED
    }


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


class _HeldDim(NamedTuple):
    """The pieces that ranks hold of one dim."""

    first: Ints  # the first piece of each rank, an index of ``pieces``
    counts: Ints  # how many it has
    pieces: Ints  # (start in the local tensor, start in the whole, size), [pieces, 3]


def held_boxes(
    tensor: Named,
    sharding: Sharding,
    positions: Ints,
    ranks: Ints,
    listed: Mapping[int, tuple[int, ...]],
) -> HeldBoxes:
    """Return what ranks hold of a tensor, rank after rank.

    A dim is cut once for each different position in the cuts of it.

    Args:
        tensor: The tensor.
        sharding: How it is cut.
        positions: Of each rank in each cut, ``[ranks, cuts]``; of a listed cut any number.
        ranks: Their numbers.
        listed: By the number of a listed cut, the rows.

    Raises:
        CannotPlace: A cut that does not fit what is left to cut.
    """
    held = []
    for dim, size in zip(tensor.rule_dims, tensor.shape, strict=True):
        cuts = [cut for cut in sharding.cuts if cut.dim == dim]
        columns = [i for i, cut in enumerate(sharding.cuts) if cut.dim == dim and i not in listed]
        first, which = unique(positions[:, columns])
        different = positions[first]
        if all(cut.kind is Kind.PLAIN for cut in cuts):
            counts, table = _plain_pieces(sharding, dim, size, different)
        else:
            intervals = [
                sharding.dim_at(dim, [listed.get(i, at) for i, at in enumerate(row)])
                for row in different.tolist()
            ]
            pieces = [dim_pieces(each, size) for each in intervals]
            counts = np.array([len(each) for each in pieces], np.int64)
            table = np.array(list(chain.from_iterable(pieces)), np.int64).reshape(-1, 3)
        held.append(_HeldDim((np.cumsum(counts) - counts)[which], counts[which], table))
    return _product(held, ranks)


def _plain_pieces(sharding: Sharding, dim: int, size: int, positions: Ints) -> tuple[Ints, Ints]:
    """Return counts and pieces of a dim that plain shards cut, for all positions at once.

    It is ``Sharding.dim_at`` for one interval: FSDP cuts a dim in as many pieces as a world has
    ranks, and 16,384 of them take 1 ms here and 70 ms there.
    """
    start = np.zeros(len(positions), np.int64)
    length = np.full(len(positions), sharding.cut_shape[dim], np.int64)
    for number, cut in enumerate(sharding.cuts):
        if cut.dim == dim:
            step = -(-length // cut.size)
            low = np.minimum(positions[:, number] * step, length)
            length = np.minimum(low + step, length) - low
            start += low
    stored = np.minimum(start + length, size) - start
    has = stored > 0
    table = np.stack([np.zeros_like(start), start, stored], 1)
    return has.astype(np.int64), table[has]


def _product(dims: Sequence[_HeldDim], ranks: Ints) -> HeldBoxes:
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
