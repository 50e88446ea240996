"""Who writes a replica: the ranks that hold the same boxes divide the keys among them.

Ranks that hold the same boxes are a *replica group*. It divides the keys that its ranks share, in
order, into runs, one per writer. As few of the lowest ranks write as can do so without writing more
than ``BALANCE`` times the mean of all ranks, since a load opens a file for each. Their shares are
equal in bytes, whatever the sizes of the tensors. Objects go to the lowest rank.
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
"""What a rank may write in any case: one more file to open costs a load more than that."""


def runs_of(
    covers: Sequence[Cover],
    keys: Sequence[int],
    itemsizes: Sequence[int],
    *,
    ranks: int,
    undivided: Sequence[bool],
) -> list[Ints]:
    """Return for each piece, by row of its cover, the run of keys that the rank writes of the box.

    Two keys of a piece whose one box two ranks hold, in equal shares: ``[[0, 1], [1, 2]]``.

    Args:
        covers: Who holds which boxes; the cover of each piece.
        keys: The number of keys of each piece.
        itemsizes: The bytes of an element of each piece.
        ranks: Number of ranks.
        undivided: Whether the lowest rank writes all of a box; for each piece.
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
    # The boxes of each replica group, which is known by its ranks.
    shared: dict[bytes, list[int]] = {}
    for box in np.flatnonzero(~is_alone).tolist():
        replica_group = in_order[starts[box] : starts[box] + holders[box]]
        shared.setdefault(replica_group.tobytes(), []).append(box)
    divided = cache(lambda *shares: np.array(divide(*shares)))
    key_counts, key_nbytes = counts.tolist(), nbytes.tolist()
    # The smaller a replica group, the fewer ranks can make up for what it writes.
    for packed_ranks in sorted(shared, key=len):
        replica_group = np.frombuffer(packed_ranks, np.int64)
        # The smallest stay together, with the lowest rank.
        boxes = sorted(shared[packed_ranks], key=key_nbytes.__getitem__)
        shares = tuple([(key_counts[box], key_nbytes[box]) for box in boxes])
        bounds = divided(shares, tuple(load[replica_group].tolist()), limit)
        rows = order[starts[boxes][:, None] + np.arange(bounds.shape[1] - 1)]
        runs[rows, 0] = bounds[:, :-1]
        runs[rows, 1] = bounds[:, 1:]
        load[replica_group] += nbytes[boxes] @ np.diff(bounds, axis=1)
    return np.split(runs, ends[:-1])


def divide(shares: Sequence[tuple[int, int]], held: Sequence[int], limit: float) -> list[list[int]]:
    """Return the bounds of the runs into which a replica group divides the keys that it shares.

    Args:
        shares: The number of keys and the bytes of one key, for each box that the ranks share.
        held: Bytes that each rank writes already, lowest rank first.
        limit: Bytes that no rank should exceed. A single key that is larger raises it, since some
            rank has to write it.

    Returns:
        For each box the ascending bounds of the runs: rank ``i`` writes the keys from bound ``i``
        to bound ``i + 1``.

    >>> divide([(4, 10)], [0, 0], 20)
    [[0, 2, 4]]
    >>> divide([(4, 10)], [0, 0], 100)
    [[0, 4, 4]]
    """
    total = sum(count * nbytes for count, nbytes in shares)
    largest = max((nbytes for count, nbytes in shares if count), default=0)
    loads = np.array(held, np.float64)
    room = np.maximum(max(limit, min(held) + largest) - loads, 0).cumsum()
    # As few of the first ranks as have room, filled up to one level.
    writers = loads[: np.searchsorted(room, total) + 1]
    among = np.sort(writers)
    levels = (total + among.cumsum()) / np.arange(1, len(among) + 1)
    level = levels[np.argmax(levels <= np.append(among[1:], np.inf))]
    written = np.maximum(level - writers, 0)
    ends = np.append(written, np.zeros(len(held) - len(writers))).cumsum()[:-1]
    bounds = []
    start = 0
    for count, nbytes in shares:
        # A key goes to the rank in whose share its middle is.
        middles = (ends - start) / nbytes if nbytes else np.where(ends >= start, count, 0)
        inner = np.clip(np.round(middles), 0, count).astype(np.int64)
        bounds.append([0, *np.maximum.accumulate(inner).tolist(), count])
        start += count * nbytes
    return bounds
