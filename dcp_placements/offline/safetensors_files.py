"""The headers of safetensors files, read without trusting them, and written."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import torch

from dcp_placements.errors import CannotLook, format_name
from dcp_placements.layout.sharding import Box
from dcp_placements.storage.checks import LARGEST, counts

HEADER_LIMIT_NBYTES = 100 << 20
"""What the safetensors library allows."""

DTYPES = {
    name: dtype
    for name, dtype in (
        *(
            ("F64", torch.float64),
            ("F32", torch.float32),
            ("F16", torch.float16),
            ("BF16", torch.bfloat16),
        ),
        *(
            ("F8_E4M3", torch.float8_e4m3fn),
            ("F8_E5M2", torch.float8_e5m2),
            ("C64", torch.complex64),
        ),
        *(("F8_E8M0", torch.float8_e8m0fnu), ("BOOL", torch.bool)),
        *(("I64", torch.int64), ("I32", torch.int32), ("I16", torch.int16), ("I8", torch.int8)),
        *(("U64", torch.uint64), ("U32", torch.uint32), ("U16", torch.uint16), ("U8", torch.uint8)),
    )
}
"""The format's dtypes by their names in files."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one file.

    Attributes:
        dtype: Its dtype.
        box: Its place in the whole tensor: at the origin, unless torch's
            ``HuggingFaceStorageWriter`` cut it and recorded the offsets.
        start: Where its bytes begin in the file.
        nbytes: How many they are.
    """

    dtype: torch.dtype
    box: Box
    start: int
    nbytes: int


def read_header(stream: IO[bytes], name: str, size: int) -> dict[str, Entry]:
    """Return the tensors of a safetensors file, by name.

    Args:
        stream: The file.
        name: Its name, for messages.
        size: Its bytes.

    Raises:
        CannotLook: Its header is not sound.
    """
    try:
        (length,) = struct.unpack("<Q", stream.read(8))
        if not 2 <= length <= min(HEADER_LIMIT_NBYTES, max(size - 8, 0)):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(stream.read(length))
        offsets = _saved_offsets(header.pop("__metadata__", None))
        base = 8 + length
        entries = {fqn: _entry(entry, offsets.get(fqn), base) for fqn, entry in header.items()}
        _check_ranges(entries, base, size)
        return entries
    except (
        *(struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError),
    ) as error:
        raise CannotLook(
            f"{name}: this is no sound safetensors file\n    found:       {format_name(error)}"
        ) from error


def _entry(entry: Any, offsets: Any, base: int) -> Entry:
    shape = counts(entry["shape"])
    start, stop = counts(entry["data_offsets"])
    if entry["dtype"] not in DTYPES:
        raise ValueError("a dtype that the format has not")
    dtype = DTYPES[entry["dtype"]]
    if stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes of a {shape} tensor of {entry['dtype']}")
    at = (0,) * len(shape) if offsets is None else counts(offsets)
    if len(at) != len(shape):
        raise ValueError(f"{len(at)} offsets of a tensor of {len(shape)} dims")
    if any(offset + size >= LARGEST for offset, size in zip(at, shape, strict=True)):
        raise ValueError("a part of a tensor that is larger than any")
    return Entry(dtype, Box(at, shape), base + start, stop - start)


def _check_ranges(entries: Mapping[str, Entry], base: int, size: int) -> None:
    """Refuse tensors that share bytes, and bytes of no tensor, as the safetensors library does.

    A file that ends too early is left to whoever reads its tensors.
    """
    end = base
    for fqn, entry in sorted(entries.items(), key=lambda one: (one[1].start, one[1].nbytes)):
        if entry.start != end:
            raise ValueError(f"{fqn} begins at byte {entry.start}; those before it end at {end}")
        end += entry.nbytes
    if end < size:
        raise ValueError(f"{size - end} bytes after the last tensor, which belong to none")


def _saved_offsets(metadata: Any) -> dict[str, Any]:
    sharding = (metadata or {}).get("DCP_SHARDING_INFO")
    if sharding is None:
        return {}
    return {fqn: entry["saved_offsets"] for fqn, entry in json.loads(sharding).items()}


def write_header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], notes: Mapping[str, str]
) -> bytes:
    """Return the header of a safetensors file; the elements follow in the order given.

    Args:
        tensors: Name, dtype and shape of each. Those with the largest elements come first, so that
            every tensor is aligned to its element size.
        notes: Free text by name, for the header's ``__metadata__``.
    """
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
