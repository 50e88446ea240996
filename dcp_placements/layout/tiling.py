"""Do boxes tile a whole: exact cover, holes, overlaps.

The shards of placements are a grid (each dim is cut on its own), and a grid is proved in one pass.
Other boxes are swept along the dim with the most cuts, which keeps the candidates of each box few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise

from dcp_placements.layout.sharding import Box


def tiles(whole: Box, boxes: Collection[Box]) -> bool:
    """Whether distinct non-empty ``boxes`` cover ``whole`` exactly, each element once."""
    if sum([box.numel for box in boxes]) != whole.numel:
        return False
    if not all(contains(whole, box) for box in boxes):
        return False
    return is_grid(whole, boxes) or next(iter(overlaps(boxes, limit=1)), None) is None


def is_grid(whole: Box, boxes: Collection[Box]) -> bool:
    """Whether ``boxes`` are all cells of a grid over ``whole``, each once; sufficient, O(n)."""
    cells = 1
    for dim, (start, size) in enumerate(zip(*whole, strict=True)):
        intervals = sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes})
        position = start
        for offset, length in intervals:
            if offset != position or length == 0:
                return False
            position += length
        if position != start + size:
            return False
        cells *= len(intervals)
    return len(boxes) == cells and len(set(boxes)) == cells


def contains(outer: Box, inner: Box) -> bool:
    """Whether ``inner`` lies within ``outer``."""
    return all(
        a <= b and b + size <= a + extent for a, extent, b, size in zip(*outer, *inner, strict=True)
    )


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box that both share, or None."""
    offsets, sizes = [], []
    for a, size_a, b, size_b in zip(*one, *other, strict=True):
        start = max(a, b)
        stop = min(a + size_a, b + size_b)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def overlaps(boxes: Collection[Box], limit: int = 8) -> list[tuple[Box, Box]]:
    """Return up to ``limit`` pairs of distinct boxes that share elements."""
    ordered = list(boxes)
    pairs: list[tuple[Box, Box]] = []
    if len(ordered) < 2:
        return pairs
    dim = _most_cut_dim(ordered)
    if dim is None:
        return [(ordered[0], ordered[1])]
    ordered.sort(key=lambda box: box.offsets[dim])
    active: list[tuple[int, int]] = []
    for index, box in enumerate(ordered):
        start = box.offsets[dim]
        active = active[bisect_right(active, (start, len(ordered))) :]
        for _, other in active:
            if intersection(box, ordered[other]) is not None:
                pairs.append((ordered[other], box))
                if len(pairs) >= limit:
                    return pairs
        entry = (start + box.sizes[dim], index)
        active.insert(bisect_right(active, entry), entry)
    return pairs


def uncovered(whole: Box, boxes: Sequence[Box], limit: int = 8) -> list[Box]:
    """Return up to ``limit`` boxes of ``whole`` that no box covers; boxes may overlap."""
    if whole.numel == 0:
        return []
    inside = [box for box in (intersection(whole, box) for box in boxes) if box is not None]
    return _holes(whole, inside, 0, limit)


def _holes(whole: Box, boxes: Sequence[Box], dim: int, limit: int) -> list[Box]:
    if not boxes:
        return [whole]
    if dim == len(whole.offsets):
        return []
    start, size = whole.offsets[dim], whole.sizes[dim]
    cuts = {start, start + size}
    for box in boxes:
        cuts.update((box.offsets[dim], box.offsets[dim] + box.sizes[dim]))
    edges = sorted(cuts)
    holes: list[Box] = []
    for low, high in pairwise(edges):
        slab = [b for b in boxes if b.offsets[dim] <= low and high <= b.offsets[dim] + b.sizes[dim]]
        piece = Box(_with(whole.offsets, dim, low), _with(whole.sizes, dim, high - low))
        for hole in _holes(piece, slab, dim + 1, limit):
            _add_joined(holes, hole, dim)
            if len(holes) > limit:
                return holes[:limit]
    return holes


def _add_joined(holes: list[Box], hole: Box, dim: int) -> None:
    """Append ``hole``, joined to the last one if the two are one box along ``dim``."""
    if holes:
        last = holes[-1]
        joins = last.offsets[dim] + last.sizes[dim] == hole.offsets[dim]
        same = all(
            d == dim or (last.offsets[d], last.sizes[d]) == (hole.offsets[d], hole.sizes[d])
            for d in range(len(hole.offsets))
        )
        if joins and same:
            holes[-1] = Box(last.offsets, _with(last.sizes, dim, last.sizes[dim] + hole.sizes[dim]))
            return
    holes.append(hole)


def _most_cut_dim(boxes: Sequence[Box]) -> int | None:
    ndim = len(boxes[0].offsets)
    counts = [(len({box.offsets[dim] for box in boxes}), -dim) for dim in range(ndim)]
    return -max(counts)[1] if counts else None


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
