"""The algebra of boxes: which are equal, which meet, whether they make a whole, what is left.

Many boxes are one array ``int64[n, 2, ndim]``: each box is its offsets, then its sizes, in elements
of the whole tensor. Two ep ranks that hold half of an expert weight of shape ``(4, 3)`` each::

    [[[0, 0], [2, 3]],
     [[2, 0], [2, 3]]]

The proof of a save and of a load, the structure of a checkpoint, rehearsals and imports all use
these functions. Boxes without elements meet nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from operator import add, sub
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_placements.layout.sharding import Box

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Boxes = npt.NDArray[np.int64]

_PAIRS = 1 << 20
"""Candidate pairs that are compared at a time, for their memory: 16 MiB per dim."""


def as_array(boxes: Iterable[Box], ndim: int) -> Boxes:
    """Return boxes of ``ndim`` dims as an array.

    >>> as_array([Box((2, 0), (2, 3))], 2).tolist()
    [[[2, 0], [2, 3]]]
    """
    boxes = list(boxes)
    numbers = chain.from_iterable(chain.from_iterable(boxes))
    return np.fromiter(numbers, np.int64, 2 * ndim * len(boxes)).reshape(len(boxes), 2, ndim)


def as_boxes(boxes: Boxes) -> list[Box]:
    """Return the rows of an array as boxes."""
    return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes.tolist()]


def numel(boxes: Boxes) -> Ints:
    """Return the number of elements of each box; 1 without dims."""
    return np.asarray(boxes[:, 1].prod(axis=1), np.int64)


def unique(boxes: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each different box, in order of offsets, and each box's number there.

    ``boxes`` may be any other table of integers, whose rows are then compared.

    >>> first, number = unique(as_array([Box((2,), (2,)), Box((0,), (2,)), Box((2,), (2,))], 1))
    >>> first.tolist(), number.tolist()
    ([1, 0], [1, 0, 1])
    """
    rows = boxes.reshape(len(boxes), prod(boxes.shape[1:]))
    rows = rows[:, (rows != rows[:1]).any(axis=0)]  # most columns of boxes have one value
    if not rows.shape[1]:
        return np.arange(min(len(rows), 1)), np.zeros(len(rows), np.int64)
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    number = np.empty(len(rows), np.int64)
    number[order] = np.cumsum(is_first) - 1
    return order[is_first], number


def intersect(boxes: Boxes, others: Boxes) -> Boxes:
    """Return what each box shares with the other box of the same row, or with the only other one.

    Where two share nothing, a size is 0 or less.
    """
    offsets = np.maximum(boxes[:, 0], others[:, 0])
    stops = np.minimum(boxes.sum(axis=1), others.sum(axis=1))
    return np.stack([offsets, stops - offsets], axis=1)


def common(box: Box, other: Box) -> Box | None:
    """Return what two boxes share, or None; for single boxes, without arrays."""
    offsets = tuple(map(max, box.offsets, other.offsets))
    ends = map(min, map(add, *box), map(add, *other))
    sizes = tuple(map(sub, ends, offsets))
    return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


@dataclass(eq=False)
class Index:
    """Boxes, searched for those that meet a given box."""

    boxes: Boxes

    @cached_property
    def _dims(self) -> list[tuple[Ints, Ints, Any]]:
        """For each dim: the order of the boxes by start, the sorted starts, the largest size."""
        dims = []
        for dim in range(self.boxes.shape[2] if len(self.boxes) else 0):
            order = np.argsort(self.boxes[:, 0, dim], kind="stable")
            dims.append((order, self.boxes[order, 0, dim], self.boxes[:, 1, dim].max()))
        return dims

    def meeting(self, boxes: Boxes) -> tuple[Ints, Ints]:
        """Return the pairs ``(row of boxes, row of the index)`` that share elements, sorted."""
        rows, own_rows = map(np.concatenate, zip(*self.iter_pairs(boxes), strict=True))
        order = np.lexsort((own_rows, rows))
        return rows[order], own_rows[order]

    def iter_pairs(self, boxes: Boxes) -> Iterator[tuple[Ints, Ints]]:
        """Yield the same pairs, some of ``boxes`` at a time.

        The candidates of a box are found by a binary search along the dim that leaves the fewest.
        """
        order = np.arange(len(self.boxes))
        first = np.zeros(len(boxes), np.int64)
        counts = np.full(len(boxes), len(order))
        stops = boxes.sum(axis=1)
        for dim, (by_start, starts, longest) in enumerate(self._dims):
            low = starts.searchsorted(boxes[:, 0, dim] - longest, "right")
            near = np.maximum(starts.searchsorted(stops[:, dim]) - low, 0)
            if near.sum() < counts.sum():
                first, counts, order = low, near, by_start
        batches = np.flatnonzero(np.diff(np.cumsum(counts) // _PAIRS, prepend=-1)).tolist()
        for start, stop in pairwise([*(batches or [0]), len(boxes)]):
            number, candidate = expanded(first[start:stop], counts[start:stop])
            rows, own_rows = number + start, order[candidate]
            shares = (intersect(boxes[rows], self.boxes[own_rows])[:, 1] > 0).all(axis=1)
            yield rows[shares], own_rows[shares]

    def overlaps(self, box: Box) -> list[tuple[int, Box, Box]]:
        """Return ``(number, box of the index, what both share)`` for each that meets a box.

        A box of the index that equals it is returned alone, as in most loads, which are of the
        world that saved.
        """
        wanted = as_array([box], len(box.sizes))
        equal = np.flatnonzero((self.boxes == wanted).all(axis=(1, 2)))
        if len(equal) and 0 not in box.sizes:
            return [(int(equal[0]), box, box)]
        met = np.sort(np.concatenate([own_rows for _, own_rows in self.iter_pairs(wanted)]))
        boxes = self.boxes[met]
        shared = as_boxes(intersect(boxes, wanted))
        return list(zip(met.tolist(), as_boxes(boxes), shared, strict=True))


def expanded(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return ``(range number, value)`` of all values of the ranges ``first .. first + counts``.

    >>> expanded(np.array([5, 0]), np.array([2, 1]))
    (array([0, 0, 1]), array([5, 6, 0]))
    """
    number = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return number, np.arange(len(number)) + (first - before)[number]


def overlaps(boxes: Boxes, limit: int = 8) -> list[tuple[int, int]]:
    """Return up to ``limit`` pairs of row numbers of boxes that share elements; equal boxes do."""
    pairs: list[tuple[int, int]] = []
    for first, second in Index(boxes).iter_pairs(boxes):
        once = first < second
        pairs += zip(first[once].tolist(), second[once].tolist(), strict=True)
        if len(pairs) >= limit:
            break
    return sorted(pairs)[:limit]


def within(whole: Box, boxes: Boxes) -> Bools:
    """Return which boxes lie within ``whole``."""
    starts, sizes = np.array(whole, np.int64)
    is_inside = (boxes[:, 0] >= starts) & (boxes.sum(axis=1) <= starts + sizes)
    return np.asarray(is_inside.all(axis=1))


def tile(whole: Box, boxes: Boxes) -> bool:
    """Whether ``boxes`` cover ``whole`` exactly, each element once; empty ones do not matter.

    The shards of placements are a grid, since each dim is cut on its own, and a grid is proved by
    one sort per dim. Other boxes are compared with those near them.
    """
    return bool(numel(boxes).sum() == prod(whole.sizes)) and apart(whole, boxes)


def apart(whole: Box, boxes: Boxes) -> bool:
    """Whether all of ``boxes`` lie within ``whole`` and no two of them share elements."""
    boxes = boxes[numel(boxes) > 0]
    if not within(whole, boxes).all() or len(unique(boxes)[0]) < len(boxes):
        return False
    for dim in range(boxes.shape[2]):
        intervals = boxes[:, :, dim]
        intervals = intervals[np.lexsort((intervals[:, 1], intervals[:, 0]))]
        is_other = (intervals[1:] != intervals[:-1]).any(axis=1)
        if (intervals[1:, 0] < intervals[:-1].sum(axis=1))[is_other].any():
            return not overlaps(boxes, limit=1)  # it is no grid
    return True


class Flaw(NamedTuple):
    """One reason why boxes do not make a whole.

    Where the only box is the first two rows of a whole of ``(4, 3)``::

        Flaw("hole", [], [Box((2, 0), (2, 3))])

    Attributes:
        kind: ``"out_of_bounds"``: boxes reach beyond the whole. ``"repeated"``: boxes are there
            more than once. ``"overlap"``: two different boxes share elements. ``"hole"``: no box
            covers a part.
        numbers: The rows of the boxes that it is about; for overlaps pair after pair; empty for a
            hole.
        boxes: These boxes; for a hole, the boxes that are not covered.
    """

    kind: Literal["out_of_bounds", "repeated", "overlap", "hole"]
    numbers: list[int]
    boxes: list[Box]


def flaws(whole: Box, boxes: Boxes, limit: int = 8) -> Iterator[Flaw]:
    """Yield why boxes do not make a whole, one flaw of each kind; none where they do.

    Args:
        whole: The box that they should make.
        boxes: The boxes; those without elements do not matter.
        limit: The largest number of holes, and of overlapping pairs, that is searched.
    """
    if tile(whole, boxes):
        return
    filled = np.flatnonzero(numel(boxes) > 0)
    first, number = unique(boxes[filled])
    different = filled[first]
    counts = np.bincount(number, minlength=len(first))
    outside = different[~within(whole, boxes[different])].tolist()
    if outside:
        yield Flaw("out_of_bounds", outside, as_boxes(boxes[outside]))
    repeated = different[counts > 1].tolist()
    if repeated:
        yield Flaw("repeated", repeated, as_boxes(boxes[repeated]))
    pairs = np.array(overlaps(boxes[different], limit), np.int64).reshape(-1)
    if crossing := different[pairs].tolist():
        yield Flaw("overlap", crossing, as_boxes(boxes[crossing]))
    if holes := uncovered(whole, boxes[different], limit):
        yield Flaw("hole", [], holes)


def uncovered(whole: Box, boxes: Boxes, limit: int = 8) -> list[Box]:
    """Return up to ``limit`` boxes of ``whole`` that no box covers, in order; boxes may overlap.

    >>> uncovered(Box((0, 0), (4, 3)), as_array([Box((0, 0), (2, 3))], 2))
    [Box(offsets=(2, 0), sizes=(2, 3))]
    """
    if 0 in whole.sizes or tile(whole, boxes):
        return []
    inside = intersect(boxes, as_array([whole], len(whole.sizes)))
    return _holes(whole, inside[(inside[:, 1] > 0).all(axis=1)], 0, limit)


def _holes(whole: Box, boxes: Boxes, dim: int, limit: int) -> list[Box]:
    """Return what boxes that equal ``whole`` in the dims below ``dim`` leave uncovered of it.

    ``whole`` is cut into slabs at the starts and ends of the boxes along ``dim``; each slab is
    searched along the next dim.
    """
    if not len(boxes):
        return [whole]
    if dim == len(whole.offsets):
        return []
    starts, stops = boxes[:, 0, dim], boxes[:, :, dim].sum(axis=1)
    start, stop = whole.offsets[dim], whole.offsets[dim] + whole.sizes[dim]
    edges = sorted({*starts.tolist(), *stops.tolist(), start, stop})
    holes: list[Box] = []
    for low, high in pairwise(edges):
        slab = Box(_with(whole.offsets, dim, low), _with(whole.sizes, dim, high - low))
        for hole in _holes(slab, boxes[(starts <= low) & (high <= stops)], dim + 1, limit):
            _add_joined(holes, hole, dim)
            if len(holes) > limit:
                return holes[:limit]
    return holes


def _add_joined(holes: list[Box], hole: Box, dim: int) -> None:
    """Append ``hole``, joined to the last one if the two are one box along ``dim``."""
    if holes:
        last = holes[-1]
        end = last.offsets[dim] + last.sizes[dim]
        joined = Box(last.offsets, _with(last.sizes, dim, last.sizes[dim] + hole.sizes[dim]))
        if hole == Box(_with(last.offsets, dim, end), _with(last.sizes, dim, hole.sizes[dim])):
            holes[-1] = joined
            return
    holes.append(hole)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def format_box(box: Box, whole: Sequence[int] | None = None) -> str:
    """Return a box as index ranges, whole dims as ``:``.

    >>> format_box(Box((4, 0), (2, 8)), (16, 8))
    '[4:6, :]'
    """
    ranges = []
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        full = whole is not None and offset == 0 and size == whole[dim]
        ranges.append(":" if full else f"{offset}:{offset + size}")
    return f"[{', '.join(ranges)}]"


def format_boxes(boxes: Sequence[Box], whole: Sequence[int], limit: int = 4) -> str:
    """Return the first boxes of a whole as text, and how many more there are.

    >>> format_boxes([Box((4, 0), (2, 8))], (16, 8))
    '[4:6, :] of (16, 8)'
    """
    text = ", ".join(format_box(box, whole) for box in boxes[:limit])
    more = f" and {len(boxes) - limit} more" if len(boxes) > limit else ""
    return f"{text}{more} of {tuple(whole)}"
