"""Which ranks hold which box of a tensor: whether the boxes make the whole, and who writes each.

Ranks that hold the same boxes are a *replica group*. What a group holds in common is one row of
equal decisions: its keys, in order, are divided into runs, one per writer. As few of the lowest
ranks write as can do so without writing more than ``BALANCE`` times the mean of all ranks, since a
load opens a file for each; what they write is levelled by bytes, whatever the size of one tensor.
Objects go to the lowest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dcp_placements.layout.boxes import Boxes, Ints, numel, unique

BALANCE = 1.05
"""What a rank may write, as a multiple of the mean, before another takes a share."""

SMALL_NBYTES = 64 << 10
"""What a rank may write in any case: a file more to open costs a load more than that."""


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
        has_replicas: Whether any box is held more than once.
    """

    boxes: Boxes
    numel: Ints
    box_of: Ints
    ranks: Ints
    order: Ints
    starts: Ints
    has_replicas: bool

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


def cover_of(ranks: Ints, boxes: Boxes) -> Cover:
    """Return who holds what: by row the rank and the box."""
    first, box_of = unique(boxes)
    order = np.lexsort((ranks, box_of))
    starts = np.searchsorted(box_of[order], np.arange(len(first) + 1))
    different, has_replicas = boxes[first], len(first) < len(boxes)
    return Cover(different, numel(different), box_of, ranks, order, starts, has_replicas)


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


def runs_of(
    covers: Sequence[Cover],
    keys: Sequence[int],
    itemsizes: Sequence[int],
    *,
    ranks: int,
    undivided: Sequence[bool],
) -> list[Ints]:
    """Return for each cover, by row, the run of keys that the rank writes of the box.

    Args:
        covers: Who holds the boxes, of all pieces.
        keys: By piece, the number of its keys.
        itemsizes: By piece, the bytes of an element.
        ranks: Number of ranks.
        undivided: By piece, whether every replica is left to its lowest rank.
    """
    if not covers:
        return []
    # Rows and boxes of all pieces, one after another.
    ends = np.cumsum([len(cover.ranks) for cover in covers])
    rank_of = np.concatenate([cover.ranks for cover in covers])
    order = np.concatenate(
        [c.order + end - len(c.order) for c, end in zip(covers, ends, strict=True)]
    )
    holders = np.concatenate([np.diff(cover.starts) for cover in covers])
    starts = np.cumsum(holders) - holders
    of_box = np.repeat(np.arange(len(covers)), [len(cover.boxes) for cover in covers])
    nbytes = np.concatenate([cover.numel for cover in covers]) * np.array(itemsizes)[of_box]
    counts = np.array(keys)[of_box]

    runs = np.zeros((len(rank_of), 2), np.int64)
    load = np.zeros(ranks, np.int64)
    is_alone = (holders == 1) | np.array(undivided)[of_box]
    first = order[starts[is_alone]]
    runs[first, 1] = counts[is_alone]
    np.add.at(load, rank_of[first], (counts * nbytes)[is_alone])
    mean = int((counts * nbytes).sum()) / ranks
    limit = max(BALANCE * mean, float(load.max()), SMALL_NBYTES)
    in_order = rank_of[order]
    # Of each group of replicas the boxes.
    shared: dict[bytes, list[int]] = {}
    for box in np.flatnonzero(~is_alone).tolist():
        group = in_order[starts[box] : starts[box] + holders[box]]
        shared.setdefault(group.tobytes(), []).append(box)
    divided = cache(lambda *group: np.array(divide(*group)))
    key_counts, key_nbytes = counts.tolist(), nbytes.tolist()
    # The smaller a group of replicas, the fewer ranks can make up for what it writes.
    for key in sorted(shared, key=len):
        group = np.frombuffer(key, np.int64)
        # The smallest stay together, with the lowest rank.
        boxes = sorted(shared[key], key=key_nbytes.__getitem__)
        shares = tuple([(key_counts[box], key_nbytes[box]) for box in boxes])
        cuts = divided(shares, tuple(load[group].tolist()), limit)
        rows = order[starts[boxes][:, None] + np.arange(cuts.shape[1] - 1)]
        runs[rows, 0] = cuts[:, :-1]
        runs[rows, 1] = cuts[:, 1:]
        load[group[: cuts.shape[1] - 1]] += nbytes[boxes] @ np.diff(cuts, axis=1)
    return np.split(runs, ends[:-1])


def divide(pieces: Sequence[tuple[int, int]], held: Sequence[int], limit: float) -> list[list[int]]:
    """Return where each piece is divided among the ranks of a replica group.

    Args:
        pieces: Number of keys and bytes of one, for each piece that the ranks hold in common.
        held: Bytes that each rank writes already, lowest rank first.
        limit: Bytes that none ought to write more than. A key that is too large for that by itself
            raises it, since some rank has to write it.

    Returns:
        For each piece the ascending positions between which each rank writes: the rank at ``i``
        from the ``i``-th to the next, and none where there are no more.

    >>> divide([(4, 10)], [0, 0], 20)
    [[0, 2, 4]]
    >>> divide([(4, 10)], [0, 0], 100)
    [[0, 4, 4]]
    """
    largest = max((nbytes for count, nbytes in pieces if count), default=0)
    limit = max(limit, min(held) + largest)
    shares = _shares(sum(count * nbytes for count, nbytes in pieces), held, limit)
    ends = list(accumulate(shares))
    found = []
    start = 0.0
    for count, nbytes in pieces:
        cuts = [0]
        for end in ends[:-1]:
            # A key goes to the rank in whose share its middle lies.
            middle = (end - start) / nbytes if nbytes else (count if end >= start else 0)
            cuts.append(min(max(round(middle), cuts[-1]), count))
        found.append([*cuts, count])
        start += count * nbytes
    return found


def _shares(total: int, held: Sequence[int], limit: float) -> list[float]:
    """Return the bytes that each rank is to take, level among as few of the first as suffice."""
    room = 0.0
    writers = len(held)
    for at, nbytes in enumerate(held):
        room += max(limit - nbytes, 0.0)
        if room >= total:
            writers = at + 1
            break
    among = sorted(held[:writers])
    level, below = float(among[0]), 0.0
    for count, nbytes in enumerate(among, 1):
        below += nbytes
        level = (total + below) / count
        if count == writers or level <= among[count]:
            break
    return [max(level - nbytes, 0.0) if at < writers else 0.0 for at, nbytes in enumerate(held)]
