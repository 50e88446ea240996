"""Digests of many items in a bounded number of bytes: folded into buckets.

What differs is known by the bucket that differs. Objects differ one by one (a generator's state, a
rank's own counter), so theirs go to several rows of buckets, by the digits of their number: one
that differs is then told by its buckets alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_placements.evidence import DIGEST_NBYTES

BUCKETS = 16
"""Buckets in a row."""

OBJECT_ROWS = 3
"""Rows for objects: one that differs among up to ``BUCKETS ** OBJECT_ROWS`` is told by name."""


def folded(digests: Sequence[bytes], rows: int = 1) -> bytes:
    """Return digests folded into ``rows`` of buckets; as they are where that takes no more."""
    if len(digests) <= BUCKETS * rows:
        return b"".join(digests)
    buckets = [0] * (BUCKETS * rows)
    for position, digest in enumerate(digests):
        # Multiplied by its place, so that two exchanged tensors do not fold to the same.
        value = (int.from_bytes(digest, "little") * (2 * position + 1)) & ((1 << 64) - 1)
        for bucket in _buckets_of(position, rows):
            buckets[bucket] ^= value
    return b"".join(bucket.to_bytes(DIGEST_NBYTES, "little") for bucket in buckets)


def is_folded(blob: bytes, count: int) -> bool:
    """Whether a blob of ``count`` digests is folded."""
    return len(blob) != count * DIGEST_NBYTES


def suspects(blobs: Sequence[bytes], count: int) -> list[int]:
    """Return what may differ of ``count`` items: the positions of which every bucket does."""
    columns = list(zip(*map(_cut, dict.fromkeys(blobs)), strict=True))
    differing = [len(set(column)) > 1 for column in columns]
    return [
        position
        for position in range(count)
        if all(differing[bucket] for bucket in _places(position, len(columns), count))
    ]


def told_of(blob: bytes, position: int, count: int) -> tuple[bytes, ...]:
    """Return what the digests of ``count`` items, folded or not, tell of one of them."""
    buckets = _cut(blob)
    return tuple([buckets[bucket] for bucket in _places(position, len(buckets), count)])


def _cut(blob: bytes) -> list[bytes]:
    return [blob[at : at + DIGEST_NBYTES] for at in range(0, len(blob), DIGEST_NBYTES)]


def _places(position: int, buckets: int, count: int) -> list[int]:
    return [position] if buckets == count else _buckets_of(position, buckets // BUCKETS)


def _buckets_of(position: int, rows: int) -> list[int]:
    return [row * BUCKETS + position // BUCKETS**row % BUCKETS for row in range(rows)]
