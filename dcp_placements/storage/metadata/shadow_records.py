"""The records of shadows: their names and contents."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

PREFIX = "dcp_placements.shadows."
"""The prefix of the keys of packs in ``storage_data``."""

PACK_NBYTES = 1 << 20
"""The largest pack of several tensors; a larger tensor is a pack of its own."""

OBJECTS_NBYTES = 1 << 20
"""A rank whose objects take more than this writes no shadows of them."""


def packed_objects(objects: Sequence[bytes | memoryview]) -> BytesIO:
    """Return the record of a pack of objects: their lengths, then their bytes."""
    lengths = struct.pack(f"<{len(objects)}q", *map(len, objects))
    return BytesIO(b"".join((lengths, *objects)))


def packed_object(record: memoryview, position: int, count: int) -> memoryview:
    """Return one object of a pack of ``count``.

    Raises:
        ValueError: The record is no pack of so many.
    """
    try:
        lengths = struct.unpack_from(f"<{count}q", record)
    except struct.error as error:
        raise ValueError(f"{record.nbytes} bytes are no pack of {count} objects") from error
    start = 8 * count + sum(lengths[:position])
    if min(lengths) < 0 or 8 * count + sum(lengths) != record.nbytes:
        raise ValueError(f"{record.nbytes} bytes are no pack of {count} objects")
    return record[start : start + lengths[position]]


def shadowed(provenance: Mapping[str, Any] | None) -> Mapping[str, Sequence[str]]:
    """Return the keys in each pack of a checkpoint, by the pack's key."""
    packs = None if provenance is None else provenance.get("shadows")
    return packs if isinstance(packs, Mapping) else {}
