"""One tensor as ``torch.save`` writes it: a zip file with the bytes of its storage uncompressed.

The bytes can therefore be read where they lie, as many of them as are wanted. Nothing is guessed:
what is not exactly as expected is left to ``torch.load``.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dcp_placements.layout.byte_ranges import c_strides

LOCAL = b"PK\x03\x04"
DESCRIPTOR = b"PK\x07\x08"
LOCAL_NBYTES = 30

HEADS_NBYTES = (1 << 10, 16 << 10)
"""Elements begin within the first KiB of what ``torch.save`` writes; with very many dims later."""

_DESCRIPTOR_NBYTES = 16
_SIZES_FOLLOW = 8


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where the elements of a saved tensor are.

    Attributes:
        dtype: Its dtype.
        shape: Its shape; the elements are in C order.
        start: Where they begin, in bytes from the record's first.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return prod(self.shape) * self.dtype.itemsize


def parse_record(head: bytes, nbytes: int) -> TensorRecord | None:
    """Return where the elements are; None where the record is not of the plain kind.

    Args:
        head: The first bytes of the record, up to its elements at least.
        nbytes: Length of the whole record.
    """
    try:
        return _parsed(head, nbytes)
    except (
        # All that other bytes do to this parser: they are no reason to stop, torch.load decides.
        pickle.UnpicklingError,
        struct.error,
        AttributeError,
        DeprecationWarning,
        EOFError,
        IndexError,
        KeyError,
        MemoryError,
        OverflowError,
        TypeError,
        ValueError,
    ):
        return None


CHECK_NBYTES = 12
"""What stands behind the elements: a mark, their checksum, and how many bytes they are."""


def is_check(check: memoryview, data: memoryview) -> bool:
    """Whether what stands behind elements says that these are they."""
    return bytes(check) == DESCRIPTOR + struct.pack("<II", zlib.crc32(data), data.nbytes)


def head_record(read_into: Callable[[memoryview, int], object], nbytes: int) -> TensorRecord | None:
    """Return where the elements of a record are, reading no more than its head.

    Args:
        read_into: Fills a buffer from a position in the record on.
        nbytes: Length of the whole record.
    """
    for tried in HEADS_NBYTES:
        head = bytearray(min(tried, nbytes))
        read_into(memoryview(head), 0)
        found = parse_record(bytes(head), nbytes)
        if found is not None:
            return found
    return None


def _parsed(head: bytes, nbytes: int) -> TensorRecord | None:
    position = 0
    saved: _Saved | None = None
    prefix = ""
    while True:
        name, start, end, position = _entry(head, position)
        if saved is None:
            prefix, _, last = name.rpartition("/")
            if last != "data.pkl" or end is None:
                return None
            told = head[start:end]
            if not {op.name for op, _, _ in pickletools.genops(told)} <= RECORD_OPCODES:
                return None
            saved = _Unpickler(io.BytesIO(told)).load()
            if not isinstance(saved, _Saved):
                return None
        elif name == f"{prefix}/data/{saved.key}":
            if start + saved.nbytes > nbytes or not saved.is_plain:
                return None
            return TensorRecord(saved.dtype, saved.shape, start)
        elif name == f"{prefix}/byteorder":
            if head[start:end].decode() != sys.byteorder:
                return None
        elif name.startswith(f"{prefix}/data/"):
            return None
        if end is None:
            return None


def _entry(head: bytes, position: int) -> tuple[str, int, int | None, int]:
    """Return ``(name, start, end, next)`` of a zip entry; end is None where ``head`` ends first."""
    if head[position : position + 4] != LOCAL:
        raise ValueError("no zip entry")
    flags, method = struct.unpack_from("<HH", head, position + 6)
    name_length, extra_length = struct.unpack_from("<HH", head, position + 26)
    if method != 0:
        raise ValueError("compressed")
    at = position + LOCAL_NBYTES
    name = head[at : at + name_length].decode()
    start = at + name_length + extra_length
    if start > len(head):
        raise ValueError("cut off")
    if not flags & _SIZES_FOLLOW:
        (size,) = struct.unpack_from("<I", head, position + 18)
        return name, start, start + size, start + size
    end = head.find(DESCRIPTOR, start)
    while end >= 0:
        # The four bytes may be contents; the sizes behind them then are not those of the entry.
        if head[end + 8 : end + 12] == struct.pack("<I", end - start):
            return name, start, end, end + _DESCRIPTOR_NBYTES
        end = head.find(DESCRIPTOR, end + 1)
    return name, start, None, position


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str


@dataclass(frozen=True, slots=True)
class _Saved:
    dtype: torch.dtype
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def is_plain(self) -> bool:
        return self.offset == 0 and (
            0 in self.shape
            or all(
                size == 1 or step == wanted
                for size, step, wanted in zip(
                    self.shape, self.stride, c_strides(self.shape), strict=True
                )
            )
        )


def _rebuild_v2(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
) -> _Saved:
    if storage.dtype is None or hooks:
        raise ValueError("not a plain tensor")
    return _Saved(storage.dtype, storage.key, tuple(shape), tuple(stride), offset)


def _rebuild_v3(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
) -> _Saved:
    if storage.dtype is not None or hooks:
        raise ValueError("not a plain tensor")
    return _Saved(dtype, storage.key, tuple(shape), tuple(stride), offset)


# By name, because to ask these classes for their dtype warns that they are old.
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_REBUILD = {"_rebuild_tensor_v2": _rebuild_v2, "_rebuild_tensor_v3": _rebuild_v3}


# What torch.save says of a plain tensor. Others can take memory without end, in a damaged file.
RECORD_OPCODES = {
    *("PROTO", "GLOBAL", "BINPUT", "MARK", "BINUNICODE", "BINPERSID", "REDUCE", "STOP"),
    *("BININT", "BININT1", "BININT2", "LONG1", "NEWFALSE", "NEWTRUE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


class _Unpickler(pickle.Unpickler):
    """Reads what a saved tensor says of itself; makes no tensor and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils":
            return _REBUILD[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, _ = pid
        if kind != "storage":
            raise ValueError("no storage")
        return _Storage(dtype, key)
