"""One tensor as ``torch.save`` writes it: a zip file with the bytes of its storage uncompressed.

So any of these bytes can be read in place: ``HeadCache`` finds where they begin. It reads
forwards from the first bytes of a record, because ``zipfile`` begins with the directory at the end,
which takes three more reads for a tensor of a few KB.

``torch.load`` reads all records that are not plain (with gaps, conjugated, transformed).
"""

from __future__ import annotations

import pickle
import struct
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from dcp_placements.storage.file_reads import ByteRange, crc32, is_contiguous
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    MAX_NAME_CHARS,
    GlobalStandIn,
    SafeUnpickler,
    Stub,
    check_unfolded,
    describe,
    refusal,
)

LOCAL = b"PK\x03\x04"
DESCRIPTOR = b"PK\x07\x08"

HEADS_NBYTES = (1 << 10, 16 << 10)
"""Elements begin within the first KiB of a record, or later if a tensor has very many dims."""

_LOCAL_HEADER = struct.Struct("<4s2xHH8xI4xHH")
_DESCRIPTOR_NBYTES = 16
BEHIND = 8
"""Bytes of ``DESCRIPTOR`` and the CRC-32, which follow the elements."""

DIRECTORY_CRC, DIRECTORY_NAME = 16, 46
"""Positions of the CRC-32 and of the name in an entry of a zip file's directory."""

SIZES_FOLLOW = 8
"""The flag of an entry of a zip file whose checksum follows its bytes."""

_UTF_8 = 0x800


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Where the elements of a saved tensor are.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        strides: Strides in elements. In a record of DCP the elements have any order, but no gaps.
        start: First byte of the elements in the record, or in their storage.
        has_crc: Whether a checksum follows the elements; False if they have gaps.
        storage: Name of the storage in a file with several; empty in a record.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0
    has_crc: bool = False
    storage: str = ""

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in C order, without gaps."""
        return is_contiguous(self.shape, self.strides)

    def in_order(self) -> tuple[RecordHead, list[int]]:
        """Return the record with dims by descending strides, and the order of the dims."""
        dims = sorted(range(len(self.shape)), key=self.strides.__getitem__, reverse=True)
        shape, strides = ([values[dim] for dim in dims] for values in (self.shape, self.strides))
        return replace(self, shape=tuple(shape), strides=tuple(strides)), dims

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first element to the end of the last; there must be elements."""
        steps = zip(self.shape, self.strides, strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * self.dtype.itemsize


class HeadCache:
    """Finds the elements of records; parses equal heads of records of one size only once."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[bytes, RecordHead]] = {}

    def find(self, part: ByteRange) -> RecordHead | None:
        """Return where the elements of a record are; None if the record is not plain.

        Args:
            part: The record, of which only the head is read.
        """
        start, record = self._latest.get(part.size, (b"", None))
        if record is not None and part.begins_with(start):
            return record
        for nbytes in HEADS_NBYTES:
            head = part.read(0, nbytes)
            record = parse_record(head, part.size)
            if record is not None:
                self._latest[part.size] = head[: record.start], record
            if record is not None or part.size <= nbytes:
                return record
        return None


def parse_record(head: bytes, nbytes: int) -> RecordHead | None:
    """Return where the elements of a record are; None if the record is not plain.

    Args:
        head: The first bytes of the record, at least up to its elements.
        nbytes: Size of the whole record.
    """
    try:
        entries = _entries(head)
        name, start, end = next(entries)
        prefix, _, last = name.rpartition("/")
        if last != "data.pkl" or end is None:
            return None
        # torch.serialization.set_crc32_options(False) leaves the checksums of all entries 0.
        has_crc = head.startswith(DESCRIPTOR, end) and any(head[end + 4 : end + 8])
        pickled = head[start:end]
        if has_crc and wrong_crc(crc32(pickled), head[end : end + BEHIND]) is not None:
            return None
        tensor = strided_tensor(TorchUnpickler(pickled, None).load())
        if tensor is None or tensor.start or not tensor.in_order()[0].is_contiguous:
            return None
        for name, start, end in entries:
            if name == f"{prefix}/data/{tensor.storage}":
                stop = start + tensor.nbytes
                has_crc = has_crc and stop + _DESCRIPTOR_NBYTES <= nbytes
                record = replace(tensor, start=start, has_crc=has_crc, storage="")
                return record if stop <= nbytes else None
            if name.startswith(f"{prefix}/data/"):
                return None
            if name == f"{prefix}/byteorder" and head[start:end].decode() != sys.byteorder:
                return None
    except (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, ValueError):
        pass  # not what torch.save writes: torch.load decides
    return None


def crc_entry(checksum: int) -> bytes:
    """Return the ``BEHIND`` bytes after elements with this CRC-32."""
    return DESCRIPTOR + checksum.to_bytes(4, "little")


def wrong_crcs(checksums: Sequence[int], behind: bytes | memoryview) -> Iterator[tuple[int, str]]:
    """Yield which contents are not what was written, by number, and the two checksums of each.

    Every CRC-32 is compared here: of elements, of entries of a zip file, of pickles.

    Args:
        checksums: CRC-32 of each contents, as they were read.
        behind: The ``BEHIND`` bytes after each, joined.
    """
    if behind == b"".join(map(crc_entry, checksums)):
        return
    for number, checksum in enumerate(checksums):
        written = behind[number * BEHIND : (number + 1) * BEHIND]
        if written == crc_entry(checksum):
            continue
        what = "no checksum follows any more"
        if written[:4] == DESCRIPTOR:
            what = f"{int.from_bytes(written[4:], 'little'):08x} was written"
        yield number, f"their CRC-32 is {checksum:08x}, where {what}"


def wrong_crc(checksum: int, behind: bytes | memoryview) -> str | None:
    """Return the two checksums of contents that are not what was written; None if they are.

    Args:
        checksum: CRC-32 of the contents, as they were read.
        behind: The ``BEHIND`` bytes after them.
    """
    return next((text for _, text in wrong_crcs([checksum], behind)), None)


def entry_start(read_into: Callable[[memoryview, int], object], entry: zipfile.ZipInfo) -> int:
    """Return where the contents of an entry begin.

    The name is in the file twice: ``torch.load`` uses the header, ``zipfile`` the directory.

    Raises:
        zipfile.BadZipFile: The header at the directory's position is of another entry.
    """
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF_8 else "cp437")
    head = bytearray(_LOCAL_HEADER.size + len(name))
    read_into(memoryview(head), entry.header_offset)
    mark, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(head)
    if (mark, name_nbytes) != (LOCAL, len(name)) or head[_LOCAL_HEADER.size :] != name:
        raise zipfile.BadZipFile("a header is not where the directory says")
    extra, behind = bytearray(extra_nbytes), entry.header_offset + len(head)
    read_into(memoryview(extra), behind)
    _check_extra(extra)
    return int(behind + extra_nbytes)


def _check_extra(extra: bytes | bytearray) -> None:
    """Check the length of an entry's padding, which is a sequence of fields.

    A field is an id of two bytes, its size of two bytes, and as many bytes.

    Raises:
        zipfile.BadZipFile: The fields have another length than the padding.
    """
    position = 0
    while position + 4 <= len(extra):
        position += 4 + int.from_bytes(extra[position + 2 : position + 4], "little")
    if position != len(extra):
        raise zipfile.BadZipFile("an entry is padded by another length than it says")


def _entries(head: bytes) -> Iterator[tuple[str, int, int | None]]:
    """Yield ``(name, start, end)`` of zip entries; end is None where ``head`` ends before it."""
    position = 0
    while True:
        mark, flags, method, size, name, extra = _LOCAL_HEADER.unpack_from(head, position)
        named = position + _LOCAL_HEADER.size
        start = named + name + extra
        if mark != LOCAL or method != zipfile.ZIP_STORED or start > len(head):
            raise zipfile.BadZipFile("compressed or cut off")
        _check_extra(head[named + name : start])
        end: int | None = start + size
        position = start + size
        if flags & SIZES_FOLLOW:
            end = head.find(DESCRIPTOR, start)
            # The four bytes may be contents; then a wrong size follows them.
            while end >= 0 and head[end + 8 : end + 12] != struct.pack("<I", end - start):
                end = head.find(DESCRIPTOR, end + 1)
            position = end + _DESCRIPTOR_NBYTES
            end = None if end < 0 else end
        yield head[named : named + name].decode(), start, end
        if end is None:
            return


class Storage(NamedTuple):
    """The storage of a saved tensor."""

    kind: str  # name of its type, which says the dtype
    key: str  # name of its entry in the file


class _Items(dict[Any, Any]):
    """Stands for an ``OrderedDict``, or a dict with defaults."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:  # the state dict of a module has attributes
            raise refusal("it sets attributes of a dict that are no dict")


_LOADED = threading.local()
"""``calls``: stubs of the calls in the pickle that the thread reads."""


def _called(called: GlobalStandIn, *args: Any) -> Any:
    """Return a stub of a call's result or of an instance; a dict for classes of dicts."""
    module, _, name = called.name.rpartition(".")
    stub = Stub(called.name, args)
    _LOADED.calls.append(stub)
    _check_shown(name, args)
    if module in _TORCH and called.name not in _OF_TORCH:
        raise refusal(f"it calls {called.name}, which allocates by a number")
    if name == "bytearray" and not set(map(type, args)) <= {str, bytes, Stub}:
        raise refusal("it has a bytearray of a length without contents")
    is_dict = called.name == "collections.OrderedDict" and not args
    return _Items() if is_dict or name == "defaultdict" else stub


@lru_cache(maxsize=1 << 10)
def _stand_in(name: str) -> GlobalStandIn:
    """Return the stand-in of a name, which all pickles share."""
    return GlobalStandIn(name, (), {"name": name, "__new__": _called})


class TorchUnpickler(SafeUnpickler):
    """Reads dicts, lists and stubs from a pickle of ``torch.save``; refuses calls that allocate.

    Args:
        data: The pickle.
        storages: Zip entries of the storages by key; None if they are unknown.
    """

    subject = "what torch.load(weights_only=True) loads"

    def __init__(self, data: bytes, storages: Mapping[str, zipfile.ZipInfo] | None) -> None:
        super().__init__(data)
        self._storages = storages

    def load(self) -> Any:
        """Return the value of the pickle, as the base class does.

        Any callable may format its arguments in an error, or hash them: so the arguments of all
        calls are counted.
        """
        calls: list[Stub] = []
        _LOADED.calls = calls
        try:
            value = super().load()
        finally:
            del _LOADED.calls
        elements: dict[Stub, int] = {}
        left = _SHARED_RATIO * self.most_elements
        for stub in calls:
            most = min(left, self.most_elements - _SPARE_OF_VALUE)
            held = stub.args, stub.state, stub.contents
            elements[stub] = check_unfolded(held, most, elements) + 1
            left -= elements[stub]
        return value

    def named(self, module: str, name: str) -> GlobalStandIn:
        return _stand_in(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Storage:
        if type(pid) is not tuple or len(pid) != 5:
            raise refusal("it has a persistent id that is no storage")
        tag, kind, key, _, numel = pid
        if type(tag) is not str or tag != "storage" or not isinstance(kind, GlobalStandIn):
            raise refusal("it has a persistent id that is no storage")
        if type(key) is not str or type(numel) is not int:
            raise refusal("it has a storage without a name or a size")
        module, _, name = kind.name.rpartition(".")
        if module not in _TORCH:
            raise refusal(f"it has a storage of a type {describe(kind)}")
        if self._storages is not None:
            entry, itemsize = self._storages.get(key), _ITEMSIZES.get(name)
            held = 0 if entry is None else entry.file_size
            if itemsize is None or not 0 <= numel * itemsize <= held:
                shown = f"{held} bytes for {numel} elements of {kind.name}"
                raise refusal(f"its storage {key[:MAX_NAME_CHARS]!r} has {shown}")
        return Storage(name, key)


_SHARED_RATIO = 16
"""All calls may have this many times the elements of a value."""

_SPARE_OF_VALUE = 60 << 10
"""A call may have this many elements less than a value, since errors print its arguments."""


def _check_shown(name: str, args: Sequence[Any]) -> None:
    """Refuse arguments that torch would format in an error: the text of a tensor is long."""
    if name == "_rebuild_sparse_tensor":
        (layout,) = args[:1]
        is_short = type(layout) is Stub and layout.by == "torch.serialization._get_layout"
    elif name == "_rebuild_qtensor":
        size, quantizer = args[2], args[4]
        is_short = type(size) is tuple and set(map(type, size)) <= {int}
        is_short = is_short and type(quantizer) is tuple and isinstance(quantizer[0], GlobalStandIn)
    elif name in {"_rebuild_parameter_with_state", "_rebuild_from_type_v2"}:
        is_short = type(args[3]) is not tuple or len(args[3]) == 2
    else:
        return
    if not is_short:
        raise refusal(f"it calls {name} with other arguments than it takes")


def strided_tensor(stub: Any) -> RecordHead | None:
    """Return the record of a tensor's stub; None if the tensor is more than strided elements."""
    if type(stub) is not Stub or stub.by not in _REBUILT:
        return None
    storage, offset, shape, strides, _, _, *more = stub.args
    if type(storage) is not Storage or type(shape) is not tuple or type(strides) is not tuple:
        return None
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        return None
    dtype = STORAGES.get(storage.kind)
    if storage.kind == "UntypedStorage" and more and isinstance(more[0], GlobalStandIn):
        dtype, more = DTYPES.get(("torch", more[0].name.removeprefix("torch."))), more[1:]
    if dtype is None or more:
        return None
    return RecordHead(dtype, shape, strides, offset * dtype.itemsize, storage=storage.key)


_REBUILT = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
"""The second appends the dtype."""

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

_TORCH = ("torch", "torch.storage")
_OF_TORCH = {"torch.Size", "torch.device"}
"""Names in ``torch`` that pickles may call; its storages and tensors allocate by a number."""

_ITEMSIZES = {
    **{kind: dtype.itemsize for kind, dtype in STORAGES.items()},
    **{"QInt32Storage": 4, "UntypedStorage": 1},
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
}
