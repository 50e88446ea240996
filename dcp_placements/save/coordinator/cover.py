"""Which ranks hold which box of a tensor, and whether the boxes make the whole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dcp_placements.layout.boxes import Boxes, Ints, apart, numel, tile, unique
from dcp_placements.layout.sharding import Box


class Cover(NamedTuple):
    """The boxes of all ranks side by side.

    A *row* is one box on one rank. Equal boxes are replicas.

    Attributes:
        boxes: The different boxes, in order of offsets.
        numel: Elements of each box.
        box_of: By row, position in ``boxes``.
        ranks: By row, the rank (position of its plan).
        order: The rows by box, then by rank.
        starts: By box, its first place in ``order``; the number of rows last.
    """

    boxes: Boxes
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


_NO_ROWS = np.zeros(0, np.int64)
NOTHING = Cover(
    boxes=np.zeros((0, 2, 0), np.int64),
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

    def of(self, ranks: Ints, boxes: Boxes, shape: tuple[int, ...]) -> tuple[Cover, bool]:
        """Return who holds what, and whether the boxes make the whole (or, of a part of the
        ranks, share nothing).

        Args:
            ranks: By row, the rank.
            boxes: By row, the box.
            shape: Of the whole tensor.
        """
        # Rows of ascending ranks have one order within a box, whatever the ranks are.
        is_sorted = bool((ranks[1:] >= ranks[:-1]).all())
        key = shape, len(boxes), boxes.tobytes(), b"" if is_sorted else ranks.tobytes()
        result = self._memo.get(key)
        if result is None:
            cover = cover_of(ranks, boxes)
            proof = tile if self.complete else apart
            result = self._memo[key] = cover, proof(Box.whole(shape), cover.boxes)
        cover, whole = result
        return cover._replace(ranks=ranks), whole


def cover_of(ranks: Ints, boxes: Boxes) -> Cover:
    """Return who holds what: by row the rank and the box."""
    first, box_of = unique(boxes)
    order = np.lexsort((ranks, box_of))
    starts = np.searchsorted(box_of[order], np.arange(len(first) + 1))
    different = boxes[first]
    return Cover(different, numel(different), box_of, ranks, order, starts)
