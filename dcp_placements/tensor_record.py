"""One tensor as ``torch.save`` writes it: a zip file with the bytes of its storage uncompressed.

The bytes can therefore be read where they lie, and for a tensor like one that was written before
the file can be made without going through ``torch.save`` again (which costs 100 us and more,
however small the tensor). Neither guesses: what is not exactly as expected is left to torch.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from dcp_placements.slices import c_strides

LOCAL = b"PK\x03\x04"
DESCRIPTOR = b"PK\x07\x08"
_LOCAL_NBYTES = 30
_DESCRIPTOR_NBYTES = 16
_SIZES_FOLLOW = 8
_U64 = (1 << 64) - 1


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
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ):
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
            saved = _Unpickler(io.BytesIO(head[start:end])).load()
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
    at = position + _LOCAL_NBYTES
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


class Stamp:
    """Writes tensors that are alike as ``torch.save`` would, byte for byte.

    Only the elements, three checksums and an id made of them differ between two such files. The
    constructor makes one of its own and compares, so that another torch's files are never faked.

    Args:
        saved: What ``torch.save`` made of one such tensor.
        data: The bytes of that tensor's storage; not empty.

    Raises:
        ValueError: ``torch.save`` writes something else than is known here.
    """

    def __init__(self, saved: bytes, data: bytes) -> None:
        try:
            self._cut(saved, len(data))
        except (KeyError, struct.error, zipfile.BadZipFile) as error:
            raise ValueError("torch.save writes no zip file that is known here") from error
        if b"".join(self.parts(data)) != saved:
            raise ValueError("torch.save writes other bytes than are made here")

    def parts(self, data: bytes) -> list[bytes]:
        """Return the file of a tensor with these bytes, in parts."""
        crc = zlib.crc32(data)
        told = struct.pack("<I", crc)
        combined = _combine(self._before, crc)
        for other in self._after:
            combined = _combine(combined, other)
        name = b"%020d" % combined
        name_told = struct.pack("<I", zlib.crc32(name, self._name_crc))
        head, after_data, after_crc, after_name, after_name_crc, after_dir, rest = self._fixed
        return [
            *(head, data, after_data, told, after_crc, name, after_name, name_told),
            *(after_name_crc, told, after_dir, name_told, rest),
        ]

    def _cut(self, saved: bytes, nbytes: int) -> None:
        """Find what differs from file to file."""
        with zipfile.ZipFile(io.BytesIO(saved)) as file:
            entries = file.infolist()
            directory = file.start_dir
        starts: dict[str, int] = {}
        told: dict[str, int] = {}
        for entry in entries:
            name_length, extra_length = struct.unpack_from("<HH", saved, entry.header_offset + 26)
            last = entry.filename.partition("/")[2]
            starts[last] = entry.header_offset + _LOCAL_NBYTES + name_length + extra_length
            told[last] = directory + 16
            directory += 46 + sum(struct.unpack_from("<HHH", saved, directory + 28))
        order = [entry.filename.partition("/")[2] for entry in entries]
        at = order.index("data/0")
        if order[-1] != ".data/serialization_id" or at > len(order) - 2:
            raise ValueError("other entries than are known here")
        data, name = starts["data/0"], starts[order[-1]]
        # The id is 20 digits of the entries' names, then 20 of their contents.
        middle, end = name + 20, name + 40
        crc = data + nbytes + len(DESCRIPTOR)
        spots = [
            (data, data + nbytes),
            (crc, crc + 4),
            (middle, end),
            (end + 4, end + 8),
            (told["data/0"], told["data/0"] + 4),
            (told[order[-1]], told[order[-1]] + 4),
        ]
        fixed = []
        position = 0
        for start, stop in spots:
            fixed.append(saved[position:start])
            position = stop
        self._fixed = (*fixed, saved[position:])
        crcs = [entry.CRC for entry in entries]
        self._before = 0
        for known in crcs[:at]:
            self._before = _combine(self._before, known)
        self._after = crcs[at + 1 : -1]
        self._name_crc = zlib.crc32(saved[name:middle])


def _combine(seed: int, value: int) -> int:
    """Return torch's running hash of checksums (``c10::hash_combine``)."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _U64)


class TensorSaver:
    """Makes the file of one tensor after another; small ones that are alike by ``Stamp``.

    Args:
        small_nbytes: What counts as small; checksums of larger ones cost more than is won.
    """

    def __init__(self, small_nbytes: int = 32 * 1024) -> None:
        self.small_nbytes = small_nbytes
        self._stamps: dict[Any, Stamp | None] = {}

    def save(self, tensor: torch.Tensor, stream: Any) -> None:
        """Write what ``torch.save(tensor, stream)`` writes."""
        if not self._is_small_and_plain(tensor):
            torch.save(tensor, stream)
            return
        key = (tensor.dtype, tensor.shape, tensor.stride())
        data = _storage_bytes(tensor)
        if key not in self._stamps:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            saved = buffer.getvalue()
            try:
                self._stamps[key] = Stamp(saved, data)
            except ValueError:
                self._stamps[key] = None
            stream.write(saved)
            return
        stamp = self._stamps[key]
        if stamp is None:
            torch.save(tensor, stream)
        else:
            stream.write(b"".join(stamp.parts(data)))

    def _is_small_and_plain(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.is_cpu
            and not tensor.requires_grad
            and not (tensor.is_nested or tensor.is_quantized)
            and not (tensor.is_conj() or tensor.is_neg())
            and 0 < tensor.nbytes <= self.small_nbytes
            and tensor.storage_offset() == 0
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and not tensor.__dict__
        )


def _storage_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.numpy().tobytes()
