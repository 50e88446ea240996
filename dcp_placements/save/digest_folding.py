"""The digest vector: what a rank sends of contents that may have replicas.

One digest per key and box while they fit into the budget of a rank. Beyond it the keys of a group
that have a number in their name are folded into a few buckets per box; keys without one
(embeddings, final norms, the head) never are, because ranks that hold otherwise different keys
share them. A bucket that differs leaves a few candidates: every key is in one bucket of each of
``ROWS_OF_BUCKETS`` rows, by the digits of its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_placements.save.key_table import Group, KeyTable
from dcp_placements.storage.hashing import SAMPLED_NBYTES

Digests = np.ndarray[Any, np.dtype[np.uint64]]

BUDGET_NBYTES = 4 << 10
"""What a rank's digests may take in a world of any size."""

WORLD_BUDGET_NBYTES = 16 << 20
"""What the digests of all ranks may take together before any is folded."""

BUCKETS = (16, 4, 1)
"""Buckets in a row, the most that fit; each divides the one before."""

ROWS_OF_BUCKETS = 2


def may_have_replicas(group: Group, world: int) -> bool:
    """Whether another rank may hold the same box: not if there are as many parts as ranks."""
    return group.parts != world or world == 1


def budget(world: int) -> int:
    """Return the bytes that the digests of one rank may take."""
    return max(BUDGET_NBYTES, WORLD_BUDGET_NBYTES // world)


class Slots:
    """Which keys of a group have a digest of their own, and which bucket the others are in.

    Args:
        numbered: For each key of the group, whether its name has a number in it.
        buckets: Buckets in a row; 0 where nothing is folded.

    Attributes:
        own: Positions of the keys with a digest of their own.
        folded: Positions of the others.
        count: Digests per box: one for each of ``own``, then the rows of buckets.
    """

    def __init__(self, numbered: Sequence[bool], buckets: int) -> None:
        self.buckets = buckets
        self.own = list(range(len(numbered)))
        self.folded: list[int] = []
        if buckets and sum(numbered) > buckets * ROWS_OF_BUCKETS:
            self.own = [at for at, has in enumerate(numbered) if not has]
            self.folded = [at for at, has in enumerate(numbered) if has]
        self.count = len(self.own) + (ROWS_OF_BUCKETS * buckets if self.folded else 0)

    def vector(self, digests: Digests) -> Digests:
        """Return what travels of digests by key and box, of shape (keys, boxes).

        Returns:
            Of shape (``count``, boxes).
        """
        own = digests[self.own]
        if not self.folded:
            return own
        rows = np.zeros((ROWS_OF_BUCKETS * self.buckets, digests.shape[1]), np.uint64)
        places = np.arange(len(self.folded), dtype=np.uint64)
        # Multiplied by its place, so that two exchanged tensors do not fold to the same.
        values = digests[self.folded] * (2 * places + 1)[:, None]
        for row in range(ROWS_OF_BUCKETS):
            np.bitwise_xor.at(rows, self._bucket(row), values)
        return np.concatenate([own, rows])

    def first_row(self, sent: Digests, like: Slots) -> Digests:
        """Return the first row of buckets that other slots of these keys would have.

        Args:
            sent: Digests by these slots, of shape (rows, ``count``).
            like: The others, of as many buckets or fewer; they are folded.

        Returns:
            Of shape (rows, ``like.buckets``).
        """
        if not self.folded:
            start = len(like.own)
            return like.vector(sent.T)[start : start + like.buckets].T
        start = len(self.own)
        mine = sent[:, start : start + self.buckets].reshape(len(sent), -1, like.buckets)
        row: Digests = np.bitwise_xor.reduce(mine, axis=1)
        return row

    def suspects_of_first_row(self, differing: Sequence[int]) -> list[int]:
        """Return positions of the keys that may differ, where these buckets of the row do."""
        hit = np.isin(self._bucket(0), list(differing))
        return [key for key, is_hit in zip(self.folded, hit.tolist(), strict=True) if is_hit]

    def suspects(self, differing: Sequence[int]) -> list[int]:
        """Return positions of the keys that may differ, where these slots do."""
        slots = set(differing)
        found = [key for slot, key in enumerate(self.own) if slot in slots]
        if self.folded:
            start = len(self.own)
            in_rows = [
                {int(b) for b in range(self.buckets) if start + row * self.buckets + b in slots}
                for row in range(ROWS_OF_BUCKETS)
            ]
            every = np.ones(len(self.folded), bool)
            for row, buckets in enumerate(in_rows):
                here = self._bucket(row) - row * self.buckets
                every &= np.isin(here, list(buckets))
            found += [key for key, hit in zip(self.folded, every.tolist(), strict=True) if hit]
        return sorted(found)

    def _bucket(self, row: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        places = np.arange(len(self.folded))
        buckets: np.ndarray[Any, np.dtype[np.int64]] = places // self.buckets**row % self.buckets
        return row * self.buckets + buckets


def buckets_needed(tables: Sequence[KeyTable], boxes: Sequence[Sequence[int]], world: int) -> int:
    """Return how many buckets a row has; 0 where every digest fits into the budget.

    Args:
        tables: The rank's key tables.
        boxes: Per table and group, the number of boxes that the rank holds.
        world: Number of ranks.
    """
    compared = [
        # A rank that holds nothing of a group counts as the others do, which hold one box.
        (table.numbered[table.starts[at] : table.starts[at + 1]], max(counts[at], 1))
        for table, counts in zip(tables, boxes, strict=True)
        for at, group in enumerate(table.groups)
        if may_have_replicas(group, world)
    ]
    limit = budget(world) // SAMPLED_NBYTES
    if sum(len(numbered) * count for numbered, count in compared) <= limit:
        return 0
    for buckets in BUCKETS:
        if sum(Slots(numbered, buckets).count * count for numbered, count in compared) <= limit:
            return buckets
    return BUCKETS[-1]
