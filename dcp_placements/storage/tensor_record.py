"""One tensor as ``torch.save`` writes it: a zip file with the bytes of its storage uncompressed.

The bytes can therefore be read in place, as many of them as are wanted: ``RecordHeads`` finds where
they begin. It reads forwards from the first bytes of a record, because ``zipfile`` begins with the
directory at the end, three more reads for a tensor of a few KB.

Everything that is not plain (other strides, conjugated, transformed) goes to ``torch.load``.
"""

from __future__ import annotations

import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from dcp_placements.storage.file_reads import Part, c_strides
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    ORDERED_DICT,
    Call,
    SafeUnpickler,
    refusal,
)

LOCAL = b"PK\x03\x04"
DESCRIPTOR = b"PK\x07\x08"

HEADS_NBYTES = (1 << 10, 16 << 10)
"""Elements begin within the first KiB of what ``torch.save`` writes; with very many dims later."""

_LOCAL_HEADER = struct.Struct("<4s2xHH8xI4xHH")
_DESCRIPTOR_NBYTES = 16
BEHIND = 8
"""Behind the elements stand ``DESCRIPTOR`` and their CRC-32, four bytes each."""

_SIZES_FOLLOW = 8
_UTF_8 = 0x800
_MAX_HEADS = 64


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where the elements of a saved tensor are.

    Attributes:
        shape: The elements are in C order.
        start: Where they begin, in bytes from the record's first.
        has_crc: Whether their checksum follows them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    has_crc: bool = False

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return prod(self.shape) * self.dtype.itemsize


class RecordHeads:
    """Finds the elements of records; of tensors that are alike the head is parsed once."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[bytes, TensorRecord]]] = {}

    def find(self, part: Part) -> TensorRecord | None:
        """Return where the elements of a record are; None where the record is not plain.

        Args:
            part: The record. No more than its head is read.
        """
        known = self._known.setdefault(part.size, [])
        for nbytes in HEADS_NBYTES:
            head = part.read(0, nbytes)
            for start, held in known:
                if head.startswith(start):
                    return held
            record = parse_record(head, part.size)
            if record is not None:
                del known[_MAX_HEADS:]
                known.insert(0, (head[: record.start], record))
                return record
            if part.size <= nbytes:
                break
        return None


def parse_record(head: bytes, nbytes: int) -> TensorRecord | None:
    """Return where the elements are; None where the record is not of the plain kind.

    Args:
        head: The first bytes of the record, up to its elements at least.
        nbytes: Length of the whole record.
    """
    try:
        entries = _entries(head)
        name, start, end = next(entries)
        prefix, _, last = name.rpartition("/")
        if last != "data.pkl" or end is None:
            return None
        # torch.serialization.set_crc32_options(False) leaves the checksums of all entries 0.
        has_crc = head.startswith(DESCRIPTOR, end) and any(head[end + 4 : end + 8])
        tensor = _PlainTensorUnpickler(head[start:end]).load()
        if not isinstance(tensor, _PlainTensor):
            return None
        for name, start, end in entries:
            if name == f"{prefix}/data/{tensor.key}":
                stop = start + prod(tensor.shape) * tensor.dtype.itemsize
                has_crc = has_crc and stop + _DESCRIPTOR_NBYTES <= nbytes
                record = TensorRecord(tensor.dtype, tensor.shape, start, has_crc)
                return record if stop <= nbytes else None
            if name.startswith(f"{prefix}/data/"):
                return None
            if name == f"{prefix}/byteorder" and head[start:end].decode() != sys.byteorder:
                return None
    except (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, ValueError):
        pass  # not what torch.save writes: torch.load decides
    return None


def entry_start(read_into: Callable[[memoryview, int], object], entry: zipfile.ZipInfo) -> int:
    """Return where the contents of an entry begin.

    The name is in the file twice: ``torch.load`` goes by the header, ``zipfile`` by the directory.

    Raises:
        zipfile.BadZipFile: The header at the place that the directory gives is of another entry.
    """
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF_8 else "cp437")
    head = bytearray(_LOCAL_HEADER.size + len(name))
    read_into(memoryview(head), entry.header_offset)
    mark, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(head)
    if (mark, name_nbytes) != (LOCAL, len(name)) or head[_LOCAL_HEADER.size :] != name:
        raise zipfile.BadZipFile("a header is not where the directory says")
    return entry.header_offset + len(head) + int(extra_nbytes)


def _entries(head: bytes) -> Iterator[tuple[str, int, int | None]]:
    """Yield ``(name, start, end)`` of zip entries; end is None where ``head`` ends before it."""
    position = 0
    while True:
        mark, flags, method, size, name, extra = _LOCAL_HEADER.unpack_from(head, position)
        named = position + _LOCAL_HEADER.size
        start = named + name + extra
        if mark != LOCAL or method != zipfile.ZIP_STORED or start > len(head):
            raise zipfile.BadZipFile("compressed or cut off")
        end: int | None = start + size
        position = start + size
        if flags & _SIZES_FOLLOW:
            end = head.find(DESCRIPTOR, start)
            # The four bytes may be contents; the size that follows them is then another one.
            while end >= 0 and head[end + 8 : end + 12] != struct.pack("<I", end - start):
                end = head.find(DESCRIPTOR, end + 1)
            position = end + _DESCRIPTOR_NBYTES
            end = None if end < 0 else end
        yield head[named : named + name].decode(), start, end
        if end is None:
            return


class Storage(NamedTuple):
    """What a saved tensor is a part of.

    Attributes:
        kind: The name of its type, which has the dtype.
        key: The name of its entry in the file.
        numel: Its elements.
    """

    kind: str
    key: str
    numel: int


def storage_of(pid: Any) -> Storage:
    """Return the storage that a persistent id in a pickle of ``torch.save`` names.

    Raises:
        pickle.UnpicklingError: It names none.
    """
    if type(pid) is not tuple or len(pid) != 5:
        raise refusal("it has a persistent id that is no storage")
    tag, kind, key, _, numel = pid
    if type(tag) is not str or tag != "storage" or type(kind) is not Call:
        raise refusal("it has a persistent id that is no storage")
    if type(key) is not str or type(numel) is not int:
        raise refusal("it has a storage without a name or a size")
    return Storage(kind.name, key, numel)


@dataclass(frozen=True, slots=True)
class _PlainTensor:
    """A tensor in C order, from the beginning of its storage."""

    dtype: torch.dtype
    key: str
    shape: tuple[int, ...]


class _PlainTensorUnpickler(SafeUnpickler):
    """Reads the description of one such tensor; makes no tensor."""

    subject = "a saved tensor"
    allowed = ORDERED_DICT

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return Call(name, _rebuild)
        if module in ("torch", "torch.storage"):
            # A dtype; or the type of a storage, which a file may only mention.
            return DTYPES.get(("torch", name)) or Call(name)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        return storage_of(pid)


def _rebuild(
    storage: Any, offset: Any, shape: Any, strides: Any, _: Any, hooks: Any, *more: Any
) -> _PlainTensor:
    """Return the tensor of ``_rebuild_tensor_v2``; of ``_v3``, which appends the dtype."""
    if not all(type(size) is int and size >= 0 for size in shape):
        raise refusal("it has a shape that is no tuple of sizes")
    dtype = STORAGES.get(storage.kind)
    if storage.kind == "UntypedStorage" and more and isinstance(more[0], torch.dtype):
        dtype, more = more[0], more[1:]
    sized = zip(shape, strides, c_strides(shape), strict=True)
    is_plain = 0 in shape or all(size == 1 or step == plain for size, step, plain in sized)
    if dtype is None or hooks or more or offset != 0 or not is_plain:
        raise refusal("its elements are not in C order")
    return _PlainTensor(dtype, storage.key, shape)


STORAGES = {
    f"{name}Storage": DTYPES["torch", dtype]
    for name, dtype in (
        *(("BFloat16", "bfloat16"), ("Half", "float16"), ("Float", "float32")),
        *(("Double", "float64"), ("ComplexFloat", "complex64"), ("ComplexDouble", "complex128")),
        *(("Bool", "bool"), ("Byte", "uint8"), ("Char", "int8")),
        *(("Short", "int16"), ("Int", "int32"), ("Long", "int64")),
    )
}
"""The dtypes of elements, by the names of storages."""
