"""Which ranks hold which box of a tensor, and whether the boxes make the whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import overlaps, tiles

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Cover:
    """The boxes of all ranks side by side.

    A *row* is one box on one rank. Equal boxes are replicas.

    Attributes:
        boxes: The different boxes, ``(n, 2 * ndim)``: offsets, then sizes; in order of offsets.
        box_of: By row, position in ``boxes``.
        ranks: By row, the rank (position of its plan).
        order: The rows by box, then by rank.
        starts: By box, its first place in ``order``; the number of rows last.
    """

    boxes: Ints
    box_of: Ints
    ranks: Ints
    order: Ints
    starts: Ints

    @property
    def has_replicas(self) -> bool:
        """Whether any box is held more than once."""
        return len(self.boxes) < len(self.ranks)

    @cached_property
    def numel(self) -> Ints:
        """Elements of each box."""
        ndim = self.boxes.shape[1] // 2
        found: Ints = np.prod(self.boxes[:, ndim:], axis=1, dtype=np.int64)
        return found

    def holders(self, box: int) -> Ints:
        """Return the ranks that hold a box, ascending."""
        return self.ranks[self.order[self.starts[box] : self.starts[box + 1]]]

    def as_boxes(self) -> list[Box]:
        """Return the different boxes."""
        ndim = self.boxes.shape[1] // 2
        return [Box(tuple(row[:ndim]), tuple(row[ndim:])) for row in self.boxes.tolist()]


def cover_of(ranks: Ints, boxes: Ints, shape: tuple[int, ...]) -> Cover:
    """Return who holds what.

    Args:
        ranks: By row, the rank.
        boxes: By row, offsets and sizes.
        shape: Of the whole tensor.
    """
    unique, box_of = _distinct(boxes, shape)
    order = np.lexsort((ranks, box_of))
    ordered = box_of[order]
    starts = np.searchsorted(ordered, np.arange(len(unique) + 1))
    return Cover(unique, box_of, ranks, order, starts)


def makes_whole(cover: Cover, shape: tuple[int, ...], *, complete: bool) -> bool:
    """Whether the boxes tile the whole tensor, each element once.

    Args:
        cover: The boxes.
        shape: Of the whole tensor.
        complete: Whether every element must be there; otherwise no two boxes may overlap.
    """
    if 0 in shape:
        return True
    boxes = cover.boxes
    ndim = len(shape)
    offsets, sizes = boxes[:, :ndim], boxes[:, ndim:]
    if ((offsets + sizes) > np.array(shape, np.int64)).any():
        return False
    held = int(cover.numel.sum())
    if held > prod(shape) or (complete and held < prod(shape)):
        return False
    if len(boxes) < 2:
        return True
    for dim in range(ndim):
        found = np.unique(boxes[:, (dim, ndim + dim)], axis=0)
        ends = found[:, 0] + found[:, 1]
        if (found[1:, 0] < ends[:-1]).any():
            return _is_tiling(cover, shape, complete)
    # Different cells of a grid do not overlap.
    return True


def _is_tiling(cover: Cover, shape: tuple[int, ...], complete: bool) -> bool:
    boxes = cover.as_boxes()
    if complete:
        return tiles(Box((0,) * len(shape), shape), boxes)
    return not overlaps(boxes, limit=1)


def _distinct(boxes: Ints, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return the distinct rows, and for each row which of them it is."""
    ndim = len(shape)
    if not ndim or not len(boxes):
        return boxes[:1], np.zeros(len(boxes), np.int64)
    if prod(shape) < 1 << 62:
        # One number per offset sorts many times faster than rows do; sizes are looked at then.
        strides = np.array([prod(shape[dim + 1 :]) for dim in range(ndim)], np.int64)
        place = boxes[:, :ndim] @ strides
        _, first, found = np.unique(place, return_index=True, return_inverse=True)
        unique = boxes[first]
        if (unique[found] == boxes).all():
            return unique, found.reshape(-1)
    unique, found = np.unique(boxes, axis=0, return_inverse=True)
    return unique, found.reshape(-1)
