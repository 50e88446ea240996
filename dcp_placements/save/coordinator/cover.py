"""Which ranks hold which box of a tensor, and whether the boxes make the whole."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import overlaps, tiles
from dcp_placements.save.packing import Ints


class Cover(NamedTuple):
    """The boxes of all ranks side by side.

    A *row* is one box on one rank. Equal boxes are replicas.

    Attributes:
        boxes: The different boxes, ``(n, 2 * ndim)``: offsets, then sizes; in order of offsets.
        numel: Elements of each box.
        box_of: By row, position in ``boxes``.
        ranks: By row, the rank (position of its plan).
        order: The rows by box, then by rank.
        starts: By box, its first place in ``order``; the number of rows last.
    """

    boxes: Ints
    numel: Ints
    box_of: Ints
    ranks: Ints
    order: Ints
    starts: Ints

    @property
    def has_replicas(self) -> bool:
        """Whether any box is held more than once."""
        return len(self.boxes) < len(self.ranks)

    def holders(self, box: int) -> Ints:
        """Return the ranks that hold a box, ascending."""
        return self.ranks[self.order[self.starts[box] : self.starts[box + 1]]]

    def as_boxes(self) -> list[Box]:
        """Return the different boxes."""
        ndim = self.boxes.shape[1] // 2
        return [Box(tuple(row[:ndim]), tuple(row[ndim:])) for row in self.boxes.tolist()]


_NO_ROWS = np.zeros(0, np.int64)
NOTHING = Cover(
    boxes=np.zeros((0, 0), np.int64),
    numel=_NO_ROWS,
    box_of=_NO_ROWS,
    ranks=_NO_ROWS,
    order=_NO_ROWS,
    starts=np.zeros(1, np.int64),
)
"""The cover of no rows."""


class Covers:
    """Makes covers; ranks that hold equal boxes in the same order share one but for ``ranks``."""

    def __init__(self, complete: bool) -> None:
        self.complete = complete
        self._memo: dict[tuple[tuple[int, ...], int, bytes, bytes], tuple[Cover, bool]] = {}

    def of(self, ranks: Ints, boxes: Ints, shape: tuple[int, ...]) -> tuple[Cover, bool]:
        """Return who holds what, and whether the boxes make the whole; as ``cover_of``."""
        # Rows of ascending ranks have one order within a box, whatever the ranks are.
        is_sorted = bool((ranks[1:] >= ranks[:-1]).all())
        key = shape, len(boxes), boxes.tobytes(), b"" if is_sorted else ranks.tobytes()
        result = self._memo.get(key)
        if result is None:
            cover = cover_of(ranks, boxes, shape)
            whole = makes_whole(cover, shape, complete=self.complete)
            result = self._memo[key] = cover, whole
        cover, whole = result
        return cover._replace(ranks=ranks), whole


def cover_of(ranks: Ints, boxes: Ints, shape: tuple[int, ...]) -> Cover:
    """Return who holds what: by row the rank, and offsets and sizes in a tensor of that shape."""
    ndim = len(shape)
    # One number per offset sorts many times faster than rows do.
    place = np.zeros(len(boxes), np.int64)
    if prod(shape) < 1 << 62:
        place = boxes[:, :ndim] @ np.array([prod(shape[dim + 1 :]) for dim in range(ndim)], int)
    order = np.lexsort((ranks, place))
    ordered = boxes[order]
    is_new = np.ones(len(boxes), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    if (place[order][1:] == place[order][:-1])[is_new[1:]].any():
        # Boxes of one offset and several sizes, or offsets beyond one number.
        order = np.lexsort((ranks, *boxes.T[::-1]))
        ordered = boxes[order]
        is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(is_new)
    unique = ordered[starts]
    box_of = np.empty(len(boxes), np.int64)
    box_of[order] = np.cumsum(is_new) - 1
    numel = np.prod(unique[:, ndim:], axis=1, dtype=np.int64)
    return Cover(unique, numel, box_of, ranks, order, np.append(starts, len(boxes)))


def makes_whole(cover: Cover, shape: tuple[int, ...], *, complete: bool) -> bool:
    """Whether the boxes tile the whole tensor; if not ``complete``, whether none overlap."""
    if 0 in shape:
        return True
    boxes = cover.boxes
    ndim = len(shape)
    if ((boxes[:, :ndim] + boxes[:, ndim:]) > np.array(shape, np.int64)).any():
        return False
    held = int(cover.numel.sum())
    if held > prod(shape) or (complete and held < prod(shape)):
        return False
    if len(boxes) < 2 or all(_is_split(boxes[:, d], boxes[:, ndim + d]) for d in range(ndim)):
        # Different cells of a grid do not overlap.
        return True
    if complete:
        return tiles(Box.whole(shape), cover.as_boxes())
    return not overlaps(cover.as_boxes(), limit=1)


def _is_split(offsets: Ints, sizes: Ints) -> bool:
    """Whether different intervals of one dim do not overlap."""
    if offsets[0] == offsets[-1] and (offsets == offsets[0]).all():
        return bool((sizes == sizes[0]).all())
    order = np.argsort(offsets, kind="stable")
    offsets, sizes = offsets[order], sizes[order]
    is_same = (offsets[1:] == offsets[:-1]) & (sizes[1:] == sizes[:-1])
    return bool((is_same | (offsets[1:] >= offsets[:-1] + sizes[:-1])).all())
