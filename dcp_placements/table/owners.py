"""Who writes a replica: the ranks that hold the same boxes divide the keys among them.

Ranks that hold the same boxes are a *replica group*. What a group holds in common is one row of
equal decisions: its keys, in order, are divided into runs, one per writer. As few of the lowest
ranks write as can do so without writing more than ``BALANCE`` times the mean of all ranks, since a
load opens a file for each; what they write is levelled by bytes, whatever the size of one tensor.
Objects go to the lowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from dcp_placements.layout.boxes import Ints
from dcp_placements.table.world import Cover

BALANCE = 1.05
"""What a rank may write, as a multiple of the mean, before another takes a share."""

UNDIVIDED_NBYTES = 64 << 10
"""What a rank may write in any case: a file more to open costs a load more than that."""


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
    limit = max(BALANCE * mean, float(load.max()), UNDIVIDED_NBYTES)
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
    total = sum(count * nbytes for count, nbytes in pieces)
    largest = max((nbytes for count, nbytes in pieces if count), default=0)
    loads = np.array(held, np.float64)
    room = np.maximum(max(limit, min(held) + largest) - loads, 0).cumsum()
    # As few of the first ranks as have room, filled up to one level.
    writers = loads[: np.searchsorted(room, total) + 1]
    among = np.sort(writers)
    levels = (total + among.cumsum()) / np.arange(1, len(among) + 1)
    level = levels[np.argmax(levels <= np.append(among[1:], np.inf))]
    shares = np.maximum(level - writers, 0)
    ends = np.append(shares, np.zeros(len(held) - len(writers))).cumsum()[:-1]
    found = []
    start = 0
    for count, nbytes in pieces:
        # A key goes to the rank in whose share its middle lies.
        middles = (ends - start) / nbytes if nbytes else np.where(ends >= start, count, 0)
        cuts = np.clip(np.round(middles), 0, count).astype(np.int64)
        found.append([0, *np.maximum.accumulate(cuts).tolist(), count])
        start += count * nbytes
    return found
