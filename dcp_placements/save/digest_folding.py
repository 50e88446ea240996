"""The digest vector: what a rank sends of contents that may have replicas.

One digest per key and box while they fit into the budget of a rank. Beyond it the keys of a group
that have a number in their name are folded into a few buckets per box; keys without one
(embeddings, final norms, the head) never are, because ranks that hold otherwise different keys
share them. A bucket that differs leaves a few candidates: every key is in one bucket of each of
``ROWS`` rows, by the digits of its position.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dcp_placements.save.key_table import Group
from dcp_placements.storage.hashing import SAMPLED_NBYTES

Digests = np.ndarray[Any, np.dtype[np.uint64]]

BUDGET_NBYTES = 4 << 10
"""What a rank's digests may take in a world of any size."""

WORLD_BUDGET_NBYTES = 8 << 20
"""What the digests of all ranks may take together before any is folded.

A conflict names its key where none is folded, and some candidates where they are. So small worlds,
where a coordinator receives few bytes anyway, fold nothing: from 2,048 ranks on ``BUDGET_NBYTES``
is what counts.
"""

BUCKETS = 4
"""Buckets in a row."""

ROWS = 4
"""Rows of buckets: of ``BUCKETS**ROWS`` keys each has buckets that no other has in every row."""

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def may_have_replicas(group: Group, world: int) -> bool:
    """Whether another rank may hold the same box: not if there are as many parts as ranks."""
    return group.parts != world or world == 1


def exceeds_budget(digests: int, world: int) -> bool:
    """Whether so many digests of one rank of a world are to be folded."""
    return digests * SAMPLED_NBYTES > max(BUDGET_NBYTES, WORLD_BUDGET_NBYTES // world)


def has_number(fqn: str) -> bool:
    """Whether one of the components of a key is a number."""
    return _NUMBER.search(fqn) is not None


class Slots:
    """Which keys of a group have a digest of their own, and which buckets the others are in.

    Args:
        fqns: The keys.
        is_folded: Whether those with a number are folded, where that takes fewer digests.

    Attributes:
        own: Positions of the keys with a digest of their own.
        folded: Positions of the others.
        count: Digests per box: one for each of ``own``, then the rows of buckets.
    """

    def __init__(self, fqns: Sequence[str], is_folded: bool) -> None:
        self.own = list(range(len(fqns)))
        self.folded: list[int] = []
        numbered = [at for at, fqn in enumerate(fqns) if has_number(fqn)] if is_folded else []
        if len(numbered) > BUCKETS * ROWS:
            self.own = sorted(set(self.own) - set(numbered))
            self.folded = numbered
        self.count = len(self.own) + (BUCKETS * ROWS if self.folded else 0)

    @cached_property
    def _buckets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """By row and folded key, the bucket; buckets of a row follow those of the rows before."""
        rows = np.arange(ROWS)[:, None]
        digits = np.arange(len(self.folded)) // BUCKETS**rows % BUCKETS
        buckets: np.ndarray[Any, np.dtype[np.int64]] = rows * BUCKETS + digits
        return buckets

    def vector(self, digests: Digests) -> Digests:
        """Return what travels of digests by key and box, of shape (keys, boxes).

        Returns:
            Of shape (``count``, boxes).
        """
        own = digests[self.own]
        if not self.folded:
            return own
        rows = np.zeros((BUCKETS * ROWS, digests.shape[1]), np.uint64)
        places = np.arange(len(self.folded), dtype=np.uint64)
        # Multiplied by its place, so that two exchanged tensors do not fold to the same.
        values = digests[self.folded] * (2 * places + 1)[:, None]
        for buckets in self._buckets:
            np.bitwise_xor.at(rows, buckets, values)
        return np.concatenate([own, rows])

    def suspects(self, differing: Collection[int]) -> list[int]:
        """Return positions of the keys that may differ, where these slots do."""
        found = [self.own[slot] for slot in differing if slot < len(self.own)]
        hit = np.isin(self._buckets + len(self.own), list(differing))
        found += [self.folded[at] for at in np.flatnonzero(hit.all(axis=0)).tolist()]
        return sorted(found)
