"""One tensor as ``torch.save`` writes it: a zip file with the bytes of its storage uncompressed.

The bytes can therefore be read in place, as many of them as are wanted: ``RecordHeads`` finds where
they begin. It reads forwards from the first bytes of a record, because ``zipfile`` begins with the
directory at the end, three more reads for a tensor of a few KB.

Everything that is not plain (other strides, conjugated, transformed) goes to ``torch.load``, which
takes as much memory as a record asks for: compressed entries expand, a pickle may call a global
with a size, and a tensor of stride 0 has more elements than bytes. ``load_saved_tensor`` refuses
such a record first; ``torch.save`` writes none of these.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from dcp_placements.errors import format_name
from dcp_placements.storage.byte_ranges import c_strides
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    MAX_NAME_CHARS,
    ORDERED_DICT,
    Call,
    SafeUnpickler,
    check_for_torch,
    check_unfolded,
    most_elements,
    refusal,
)

LOCAL = b"PK\x03\x04"
DESCRIPTOR = b"PK\x07\x08"

HEADS_NBYTES = (1 << 10, 16 << 10)
"""Elements begin within the first KiB of what ``torch.save`` writes; with very many dims later."""

PICKLE_NBYTES = 64 << 10
"""The pickle of one tensor has no more bytes. It bounds how deep tuples nest."""

_LOCAL_HEADER = struct.Struct("<4s2xHH8xI4xHH")
_END = struct.Struct("<4s12xIH")
_END64 = struct.Struct("<4s44xQ")
_END64_LOCATOR = struct.Struct("<4s4xQ4x")
_ENDS_NBYTES = _END64.size + _END64_LOCATOR.size + _END.size
"""A zip file ends with these three, or with the last of them alone."""

_DESCRIPTOR_NBYTES = 16
_SIZES_FOLLOW = 8
_UTF_8 = 0x800
_MAX_HEADS = 4096


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


class ReadsInto(Protocol):
    """The bytes of a record."""

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from a position in the record on."""


class RecordHeads:
    """Finds the elements of records; of tensors that are alike the head is parsed once."""

    def __init__(self) -> None:
        self._parsed: dict[tuple[int, bytes], TensorRecord] = {}
        self._start_by_length: dict[int, int] = {}

    def find(self, part: ReadsInto, nbytes: int) -> TensorRecord | None:
        """Return where the elements of a record are; None where the record is not plain.

        Args:
            part: The record. No more than its head is read.
            nbytes: Its length.
        """
        tried = 0
        for wanted in (self._start_by_length.get(nbytes, HEADS_NBYTES[0]), *HEADS_NBYTES):
            wanted = min(wanted, nbytes)
            if wanted <= tried:
                continue
            buffer = bytearray(wanted)
            part.read_into(memoryview(buffer), 0)
            tried, head = wanted, bytes(buffer)
            record = self._parsed.get((nbytes, head)) or parse_record(head, nbytes)
            if record is not None:
                if len(self._parsed) > _MAX_HEADS:
                    self._parsed.clear()
                self._parsed[nbytes, head[: record.start]] = record
                self._start_by_length[nbytes] = record.start
                return record
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
        tensor = _TensorUnpickler(head[start:end]).load()
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


class LocalHeader(NamedTuple):
    """What precedes the contents of an entry in a zip file.

    Attributes:
        flags: As the format defines them.
        method: How the contents are compressed; 0 for not.
        size: Bytes of the contents as they are stored; 0 where a descriptor after them has it.
        name: Of the entry.
        nbytes: Length of the header.
    """

    flags: int
    method: int
    size: int
    name: bytes
    nbytes: int


def local_header(data: bytes | bytearray, position: int = 0) -> LocalHeader:
    """Return the header of an entry.

    Raises:
        zipfile.BadZipFile: There is none.
        struct.error: The data end before.
    """
    mark, flags, method, size, name, extra = _LOCAL_HEADER.unpack_from(data, position)
    if mark != LOCAL:
        raise zipfile.BadZipFile("a header is not where the directory says")
    start = position + _LOCAL_HEADER.size
    return LocalHeader(
        flags, method, size, bytes(data[start : start + name]), start + name + extra - position
    )


def entry_start(read_into: Callable[[memoryview, int], object], entry: zipfile.ZipInfo) -> int:
    """Return where the contents of an entry begin.

    The name is in the file twice: ``torch.load`` goes by the header, ``zipfile`` by the directory.

    Raises:
        zipfile.BadZipFile: The header at the place that the directory gives is of another entry.
    """
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF_8 else "cp437")
    head = bytearray(_LOCAL_HEADER.size + len(name))
    read_into(memoryview(head), entry.header_offset)
    header = local_header(head)
    if header.name != name or header.nbytes < len(head):
        raise zipfile.BadZipFile("a header is not where the directory says")
    return entry.header_offset + header.nbytes


def _entries(head: bytes) -> Iterator[tuple[str, int, int | None]]:
    """Yield ``(name, start, end)`` of zip entries; end is None where ``head`` ends before it."""
    position = 0
    while True:
        header = local_header(head, position)
        start = position + header.nbytes
        if header.method != zipfile.ZIP_STORED or start > len(head):
            raise zipfile.BadZipFile("compressed or cut off")
        end: int | None = start + header.size
        position = start + header.size
        if header.flags & _SIZES_FOLLOW:
            end = head.find(DESCRIPTOR, start)
            # The four bytes may be contents; the size that follows them is then another one.
            while end >= 0 and head[end + 8 : end + 12] != struct.pack("<I", end - start):
                end = head.find(DESCRIPTOR, end + 1)
            position = end + _DESCRIPTOR_NBYTES
            end = None if end < 0 else end
        yield header.name.decode(), start, end
        if end is None:
            return


def load_saved_tensor(stream: Any) -> torch.Tensor:
    """Return the tensor of a seekable stream that ``torch.save`` wrote.

    Raises:
        ValueError: It is not one tensor in stored entries, or not of the stream's size.
        Exception: Whatever else a broken record makes ``torch.load`` raise.
    """
    nbytes = int(stream.seek(0, io.SEEK_END))
    file = stored_zip(stream)
    if file is None:
        raise ValueError("it is no zip file of torch.save")
    _check_pickle(file)
    stream.seek(0)
    loaded = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(f"it holds a {type(loaded).__name__}, and no tensor")
    if loaded.layout != torch.strided or not loaded.is_cpu:
        raise ValueError(f"it holds a tensor of {loaded.layout} on {loaded.device}")
    if loaded.numel() * loaded.element_size() > nbytes:
        raise ValueError(f"it holds a {tuple(loaded.shape)} tensor in {nbytes} bytes")
    return loaded


def load_plain(stream: Any, device: str | None = None) -> Any:
    """Return the value of a seekable stream that ``torch.save`` wrote; nothing of it is called.

    Args:
        stream: The file.
        device: Where its tensors are put; None for where each of them was.

    Raises:
        ValueError: It is no zip file of stored entries.
        pickle.UnpicklingError: ``torch.load(weights_only=True)`` refuses it, or would take far more
            memory or time for it than its size.
        Exception: Whatever else a broken file makes ``torch.load`` raise.
    """
    most = check_saved(stream)
    loaded = torch.load(stream, map_location=device, weights_only=True)
    check_unfolded([loaded], most)
    return loaded


def check_saved(stream: Any) -> int:
    """Refuse a file for which ``torch.load`` takes far more than its size; return to its beginning.

    Returns:
        How many elements its value may have when all of it is looked at.

    Raises:
        ValueError: It is no zip file of stored entries, with one pickle.
        pickle.UnpicklingError: Its pickle is broken, allocates by a number, or has keys that nest.
    """
    file = stored_zip(stream)
    if file is None:
        raise ValueError("it is no zip file of torch.save")
    data = _pickle_in(file)
    check_for_torch(data)
    stream.seek(0)
    return most_elements(data)


def _pickle_in(file: zipfile.ZipFile) -> bytes:
    entries = file.infolist()
    names = [one.filename for one in entries if one.filename.rpartition("/")[2] == "data.pkl"]
    if len(names) != 1:
        raise ValueError("it has no pickle, or several")
    if not any(entry.CRC for entry in entries):
        del file.getinfo(names[0]).CRC  # it was not written, and zipfile would compare it
    return file.read(names[0])


def stored_zip(stream: Any) -> zipfile.ZipFile | None:
    """Return a stream as a zip file in which ``torch.load`` finds what ``zipfile`` does.

    The stream is at its beginning then. None where it does not begin as a zip file: ``torch.load``
    reads that in its older format. Of entries whose names differ at most in case, and of several
    directories, the two may choose different ones.

    Raises:
        zipfile.BadZipFile: It is broken.
        ValueError: An entry is compressed, or the entries are more bytes than the file.
    """
    nbytes = int(stream.seek(0, io.SEEK_END))
    stream.seek(0)
    is_zip = stream.read(len(LOCAL)) == LOCAL
    stream.seek(0)
    if not is_zip:
        return None
    file = zipfile.ZipFile(stream)
    entries = file.infolist()
    if _directory_start(stream, nbytes) != file.start_dir:
        raise zipfile.BadZipFile("its directory is not where its end says")
    if len({entry.filename.lower() for entry in entries}) != len(entries):
        raise zipfile.BadZipFile("two of its entries have one name")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError("it has a compressed entry, and torch.save writes none")
    if sum(entry.file_size for entry in entries) > nbytes:
        raise ValueError("its entries overlap or are longer than the file")
    stream.seek(0)
    return file


def _directory_start(stream: Any, nbytes: int) -> int | None:
    """Return where the directory begins by the last bytes of a zip file; None for other ends."""
    stream.seek(max(nbytes - _ENDS_NBYTES, 0))
    ends = stream.read(_ENDS_NBYTES)
    mark, start, comment_nbytes = _END.unpack(ends[-_END.size :])
    if mark != b"PK\x05\x06" or comment_nbytes:
        return None
    locator = ends[-_END.size - _END64_LOCATOR.size : -_END.size]
    if not locator.startswith(b"PK\x06\x07"):
        return int(start)
    _, end64 = _END64_LOCATOR.unpack(locator)
    mark, start = _END64.unpack_from(ends)
    return int(start) if end64 == nbytes - _ENDS_NBYTES and mark == b"PK\x06\x06" else None


def _check_pickle(file: zipfile.ZipFile) -> None:
    """Refuse a record whose pickle is not one tensor of the storages beside it."""
    sizes = {entry.filename: entry.file_size for entry in file.infolist()}
    names = [name for name in sizes if name.rpartition("/")[2] == "data.pkl"]
    if len(names) != 1 or sizes[names[0]] > PICKLE_NBYTES:
        raise ValueError("it has no pickle of one tensor")
    unpickler = _TensorUnpickler(_pickle_in(file))
    tensor = unpickler.load()
    if tensor is not _OTHER_TENSOR and not isinstance(tensor, _PlainTensor):
        raise ValueError("it holds no tensor")
    prefix = names[0].rpartition("/")[0]
    for kind, key, numel in unpickler.storages:
        held = sizes.get(f"{prefix}/data/{key}", 0)
        itemsize = _ITEMSIZES.get(kind)
        if itemsize is None or not 0 <= numel * itemsize <= held:
            raise ValueError(f"its storage {key!r} has {held} bytes for {numel} elements of {kind}")


class _Storage(NamedTuple):
    kind: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class _PlainTensor:
    """A tensor in C order, from the beginning of its storage."""

    dtype: torch.dtype
    key: str
    shape: tuple[int, ...]


_OTHER_TENSOR = object()
"""Stands for any other tensor."""

_OF_SUBCLASSES = {
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.serialization", "_get_layout"),
    ("torch", "device"),
}
"""What records of subclasses call beside their classes."""


def _may_make_tensors(module: str, name: str) -> bool:
    """Whether a user could allow a global that makes the tensor of a record."""
    # These two call a method of a subclass.
    indirect = {("__builtin__", "getattr"), ("builtins", "getattr"), ("functools", "partial")}
    is_standard = module.partition(".")[0] in {"__builtin__", *sys.stdlib_module_names}
    return not is_standard or (module, name) in indirect or (module, name) in ORDERED_DICT


class _Instance:
    """Stands for an instance of a class that the user allowed."""


def _allowed_by_user() -> set[str]:
    """Return the names that ``torch.serialization.add_safe_globals`` was called with."""
    names = set()
    for one in torch.serialization.get_safe_globals():
        if isinstance(one, tuple):
            names.add(one[1])
        else:
            names.add(f"{one.__module__}.{one.__qualname__}")
    return names


class _TensorUnpickler(SafeUnpickler):
    """Reads the description of one saved tensor; makes no tensor.

    Attributes:
        storages: What it names.
    """

    subject = "a saved tensor"
    allowed = ORDERED_DICT
    fillable = (_Instance,)

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.storages: list[_Storage] = []
        self._is_first = True

    def find_class(self, module: str, name: str) -> Any:
        is_outermost, self._is_first = self._is_first, False
        if module == "torch._utils" and name.startswith("_rebuild_"):
            return _REBUILDS.get(name, _REBUILD_OTHER)
        if (module, name) in _OF_SUBCLASSES or f"{module}.{name}" in _allowed_by_user():
            return Call(name, lambda *args: _OTHER_TENSOR, new=_Instance)
        if module in ("torch", "torch.storage") and name != "Tensor":
            # A dtype; or a storage type or a scheme, which a file may only mention.
            return DTYPES.get(("torch", name)) or Call(name)
        if is_outermost and not _may_make_tensors(module, name):
            shown = format_name(f"{module}.{name}"[:MAX_NAME_CHARS])
            raise refusal(f"it begins with {shown}, which makes no tensor")
        return super().find_class(module, name)

    def fill(self, instance: Any, state: Any) -> None:
        if type(instance) is not _Instance:
            super().fill(instance, state)

    def persistent_load(self, pid: Any) -> _Storage:
        tag, kind, key, _, count = pid
        types = (type(kind), type(key), type(count))
        if tag != "storage" or types != (Call, str, int):
            raise refusal("it has a persistent id that is no storage")
        self.storages.append(_Storage(kind.name, key, count))
        return self.storages[-1]


def _rebuild(*args: Any) -> object:
    """Return the tensor of ``_rebuild_tensor_v2``; of ``_v3``, which appends the dtype."""
    storage, offset, shape, strides, _, hooks, *more = args
    if not all(type(size) is int and size >= 0 for size in shape):
        raise refusal("it has a shape that is no tuple of sizes")
    dtype = _STORAGES.get(storage.kind)
    if storage.kind == _UNTYPED and more and isinstance(more[0], torch.dtype):
        dtype = more.pop(0)
    plain_strides = zip(shape, strides, c_strides(shape), strict=True)
    if dtype is None or hooks or more or offset != 0:
        return _OTHER_TENSOR
    if 0 in shape or all(size == 1 or step == plain for size, step, plain in plain_strides):
        return _PlainTensor(dtype, storage.key, shape)
    return _OTHER_TENSOR


_REBUILDS = {name: Call(name, _rebuild) for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")}
_REBUILD_OTHER = Call("a tensor", lambda *args: _OTHER_TENSOR)

_STORAGES = {
    f"{name}Storage": DTYPES["torch", dtype]
    for name, dtype in (
        *(("BFloat16", "bfloat16"), ("Half", "float16"), ("Float", "float32")),
        *(("Double", "float64"), ("ComplexFloat", "complex64"), ("ComplexDouble", "complex128")),
        *(("Bool", "bool"), ("Byte", "uint8"), ("Char", "int8")),
        *(("Short", "int16"), ("Int", "int32"), ("Long", "int64")),
    )
}
_UNTYPED = "UntypedStorage"
_ITEMSIZES = {
    **{name: dtype.itemsize for name, dtype in _STORAGES.items()},
    **{_UNTYPED: 1, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4},
}
