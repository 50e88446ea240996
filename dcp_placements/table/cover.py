"""Which ranks hold which box of a tensor: whether the boxes make the whole, what is missing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dcp_placements.layout.boxes import Boxes, Ints, apart, numel, tile, unique
from dcp_placements.layout.sharding import Box


class Cover(NamedTuple):
    """The boxes of all ranks side by side.

    A *row* is one box on one rank. Equal boxes are replicas. An expert weight of shape ``(4, 3)``
    on ranks 0 and 1 of ``ep``, and again on ranks 2 and 3::

        boxes   [[[0, 0], [2, 3]], [[2, 0], [2, 3]]]
        numel   [6, 6]
        box_of  [0, 1, 0, 1]
        ranks   [0, 1, 2, 3]
        order   [0, 2, 1, 3]
        starts  [0, 2, 4]

    Attributes:
        boxes: The different boxes, in order of offsets.
        numel: Elements of each box.
        box_of: By row, position in ``boxes``.
        ranks: By row, the rank (position among those that take part).
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

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether the boxes tile a tensor of that shape, each element once."""
        return tile(Box.whole(shape), self.boxes)

    def is_apart(self, shape: tuple[int, ...]) -> bool:
        """Whether the boxes lie within a tensor of that shape and share nothing."""
        return apart(Box.whole(shape), self.boxes)


def cover_of(ranks: Ints, boxes: Boxes) -> Cover:
    """Return who holds what: by row the rank and the box."""
    first, box_of = unique(boxes)
    order = np.lexsort((ranks, box_of))
    starts = np.searchsorted(box_of[order], np.arange(len(first) + 1))
    different = boxes[first]
    return Cover(different, numel(different), box_of, ranks, order, starts)


NOTHING = cover_of(np.zeros(0, np.int64), np.zeros((0, 2, 0), np.int64))
"""The cover of no rows."""
