"""Digests of many items in a bounded number of bytes: folded into buckets.

What differs is known by the bucket that differs. Objects differ one by one (a generator's state, a
rank's own counter), so theirs go to several rows of buckets, by the digits of their number: one
that differs is then told by its buckets alone.

Keys without a number in their name are never folded: embeddings, final norms and heads stand beside
otherwise different keys on the ranks of two pipeline stages, where no bucket could be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_placements.evidence import DIGEST_NBYTES

BUCKETS = 16
"""Buckets in a row."""

OBJECT_ROWS = 3
"""Rows for objects: one that differs among up to ``BUCKETS ** OBJECT_ROWS`` is told by name."""

_NUMBER = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class Folding:
    """Where the digests of a class of keys are in a blob of them; the same on every rank.

    Attributes:
        buckets_of: By position of a digest, the buckets that it is folded into.
        alone: Buckets that hold one digest as it is; they come first.
        size: All buckets.
    """

    buckets_of: list[list[int]]
    alone: int
    size: int

    def is_alone(self, position: int) -> bool:
        """Whether a digest is in the blob as it is."""
        return self.buckets_of[position][0] < self.alone

    def folded(self, digests: Sequence[bytes]) -> bytes:
        """Return the blob of these digests."""
        buckets = [0] * self.size
        for position, digest in enumerate(digests):
            value = int.from_bytes(digest, "little")
            if not self.is_alone(position):
                # Multiplied by its place, so that two exchanged tensors do not fold to the same.
                value = (value * (2 * position + 1)) & ((1 << 64) - 1)
            for bucket in self.buckets_of[position]:
                buckets[bucket] ^= value
        return b"".join(bucket.to_bytes(DIGEST_NBYTES, "little") for bucket in buckets)

    def suspects(self, blobs: Sequence[bytes]) -> list[int]:
        """Return what may differ: the positions of which every bucket does."""
        columns = list(zip(*map(_cut, dict.fromkeys(blobs)), strict=True))
        differing = [len(set(column)) > 1 for column in columns]
        return [
            position
            for position, buckets in enumerate(self.buckets_of)
            if all(differing[bucket] for bucket in buckets)
        ]

    def told_of(self, blob: bytes, position: int) -> bytes:
        """Return what a blob tells of one digest: itself where it is alone."""
        buckets = _cut(blob)
        return b"".join([buckets[bucket] for bucket in self.buckets_of[position]])


def folding(names: Sequence[str], pieces: int = 1, rows: int = 1) -> Folding:
    """Return how the digests of a class are folded in a large world.

    Args:
        names: The keys of the class, in order.
        pieces: Digests of each key.
        rows: Rows of buckets for those that are folded.
    """
    numbered = [_NUMBER.search(name) is not None for name in names for _ in range(pieces)]
    if sum(numbered) <= BUCKETS * rows:
        numbered = [False] * len(numbered)
    alone = len(numbered) - sum(numbered)
    buckets_of: list[list[int]] = []
    plain = count = 0
    for is_numbered in numbered:
        if is_numbered:
            digits = [count // BUCKETS**row % BUCKETS for row in range(rows)]
            buckets_of.append([alone + row * BUCKETS + at for row, at in enumerate(digits)])
            count += 1
        else:
            buckets_of.append([plain])
            plain += 1
    return Folding(buckets_of, alone, alone + (BUCKETS * rows if count else 0))


def _cut(blob: bytes) -> list[bytes]:
    return [blob[at : at + DIGEST_NBYTES] for at in range(0, len(blob), DIGEST_NBYTES)]
