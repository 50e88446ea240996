"""The digest vector: what a rank sends of contents that may have replicas.

One digest per key and box, while those of all ranks fit into a budget. Beyond it the keys of a
group that have a number in their name share one digest per box. Keys without one (embeddings, final
norms, the head) keep theirs, because ranks that hold otherwise different keys share them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_placements.storage.hashing import SAMPLED_NBYTES
from dcp_placements.table.table import Group

Digests = np.ndarray[Any, np.dtype[np.uint64]]

WORLD_BUDGET_NBYTES = 64 << 20
"""What the digests of all ranks may take together before a rank folds its own.

A conflict names its key where none is folded, and its group where they are.
"""

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def may_have_replicas(group: Group, world: int) -> bool:
    """Whether another rank may hold the same box: not if there are as many parts as ranks."""
    return group.parts != world or world == 1


def exceeds_budget(digests: int, world: int) -> bool:
    """Whether so many digests of one rank of a world are to be folded."""
    return digests * SAMPLED_NBYTES * world > WORLD_BUDGET_NBYTES


def has_number(fqn: str) -> bool:
    """Whether one of the components of a key is a number."""
    return _NUMBER.search(fqn) is not None


class Slots:
    """Which keys of a group have a digest of their own, and which share one.

    Args:
        fqns: The keys.
        is_folded: Whether those with a number share one digest, where there are several.

    Attributes:
        own: Positions of the keys with a digest of their own.
        folded: Positions of the others.
        count: Digests per box: one for each of ``own``, then the one of ``folded``, if any.
    """

    def __init__(self, fqns: Sequence[str], is_folded: bool) -> None:
        self.own = list(range(len(fqns)))
        self.folded: list[int] = []
        numbered = [at for at, fqn in enumerate(fqns) if has_number(fqn)] if is_folded else []
        if len(numbered) > 1:
            self.own = sorted(set(self.own) - set(numbered))
            self.folded = numbered
        self.count = len(self.own) + bool(self.folded)

    def vector(self, digests: Digests) -> Digests:
        """Return what travels of digests by key and box, of shape (keys, boxes).

        Returns:
            Of shape (``count``, boxes).
        """
        if not self.folded:
            return digests
        # Multiplied by its place, so that two exchanged tensors do not fold to the same.
        places = np.arange(len(self.folded), dtype=np.uint64)
        folded = (digests[self.folded] * (2 * places + 1)[:, None]).sum(0, dtype=np.uint64)
        return np.concatenate([digests[self.own], folded[None]])
