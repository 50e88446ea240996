"""Which ranks hold which box of a tensor: whether the boxes make the whole, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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

    def parts(self) -> dict[frozenset[int], list[int]]:
        """Return the ranks by the boxes that they hold: ``{{0}: [0, 2], {1}: [1, 3]}``."""
        order = np.argsort(self.ranks, kind="stable")
        ranks = self.ranks[order]
        starts = np.flatnonzero(np.diff(ranks, prepend=-1))
        found: dict[frozenset[int], list[int]] = {}
        for rank, boxes in zip(
            ranks[starts].tolist(), np.split(self.box_of[order], starts[1:]), strict=True
        ):
            found.setdefault(frozenset(boxes.tolist()), []).append(rank)
        return found

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


def repeated(parts: Mapping[frozenset[int], Sequence[int]]) -> list[frozenset[int]]:
    """Return the parts of a whole all of which another rank holds, too.

    Parts that only overlap are those of ranks with copies of some experts.

    >>> repeated({frozenset({0, 1}): [0], frozenset({1, 2}): [1]})
    []
    >>> repeated({frozenset({0, 1}): [0, 1]})
    [frozenset({0, 1})]

    Args:
        parts: The ranks that hold each part.
    """
    counts = Counter(element for part in parts for element in part)
    return [
        part
        for part, ranks in parts.items()
        if part
        and (
            len(ranks) > 1
            or (
                all(counts[element] > 1 for element in part)
                and any(part < other for other in parts)
            )
        )
    ]
