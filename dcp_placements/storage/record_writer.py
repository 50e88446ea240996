"""Writes tensors as ``torch.save`` does, from the file of another one with their dtype and shape.

``torch.save`` takes 100 us and more, however small the tensor, which dominates a checkpoint of many
small tensors, and its CRC-32 is a quarter of the time of writing a large one. The files of two
tensors of one dtype and shape differ only in the elements, a few checksums, and an id derived from
these; all but the elements stand after them. So the files of small tensors are made many at a time,
and large ones pass through the processor's cache once, for the checksum and for the system call.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dcp_placements.errors import PlacementError
from dcp_placements.layout.byte_ranges import c_strides
from dcp_placements.storage.file_reads import SeekableRaw
from dcp_placements.storage.tensor_record import DESCRIPTOR, crc32, entry_start, local_header

T = TypeVar("T")
Array = np.ndarray[Any, Any]
Kind = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""Dtype, shape and strides."""

SMALL_NBYTES = 32 << 10
"""Tensors up to this are small: their files are made together."""

BATCH_NBYTES = 1 << 20
"""So many bytes of small tensors are written in one call."""

BLOCK_NBYTES = 256 << 10
"""So many bytes of a large tensor are written in one call, right after their checksum."""

_DIGITS = 20
_U64 = (1 << 64) - 1


class Stamp:
    """Writes tensors of one dtype and shape as ``torch.save`` would, byte for byte.

    Only the elements, a few checksums and an id derived from these differ between two such files.
    The constructor writes the file that it was given and compares, so that a stamp is never used
    with a torch whose files differ.

    Args:
        head: The file of one such tensor, by ``torch.save``, up to its elements.
        nbytes: Of the elements; not 0.
        tail: The file from the end of the elements on.

    Attributes:
        head: The same of every such tensor.

    Raises:
        ValueError: This torch writes another format.
    """

    def __init__(self, head: bytes, nbytes: int, tail: bytes) -> None:
        self.head = head
        self._nbytes, self._tail_nbytes = nbytes, len(tail)
        try:
            checksum = self._cut(_Parts(head, nbytes, tail), tail)
        except (KeyError, struct.error, zipfile.BadZipFile) as error:
            raise ValueError("torch.save writes another kind of file") from error
        if self.tail(checksum) != tail:
            raise ValueError("torch.save writes other bytes than this class would")

    @classmethod
    def of(
        cls, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> Stamp:
        """Return the stamp of tensors; the memory of one is not needed.

        Args:
            dtype: Of the elements.
            shape: Without a dim of size 0.
            strides: Of tensors that fill their storage in another order than C.

        Raises:
            ValueError: This torch writes another format.
        """
        nbytes = prod(shape) * dtype.itemsize
        # Pages of zeros that nothing writes to take no memory.
        zeros = torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype)
        zeros = zeros.as_strided(tuple(shape), tuple(strides or c_strides(tuple(shape))))
        if nbytes <= _HELD_NBYTES:
            buffer = io.BytesIO()
            torch.save(zeros, buffer)
            return cls.of_file(buffer.getvalue(), nbytes)
        around: Any = _AroundElements(nbytes)
        torch.save(zeros, around)
        if len(around.parts) != 2:
            raise ValueError("torch.save writes elements in several parts")
        return cls(bytes(around.parts[0]), nbytes, bytes(around.parts[1]))

    @classmethod
    def of_file(cls, saved: bytes, nbytes: int) -> Stamp:
        """Return the stamp by the file of one tensor of ``nbytes``.

        Raises:
            ValueError: This torch writes another format.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(saved)) as file:
                entries = {entry.filename.partition("/")[2]: entry for entry in file.infolist()}
            at = entries["data/0"].header_offset
            at += local_header(saved, at).nbytes
        except (KeyError, struct.error, zipfile.BadZipFile) as error:
            raise ValueError("torch.save writes another kind of file") from error
        return cls(saved[:at], nbytes, saved[at + nbytes :])

    @property
    def start(self) -> int:
        """Where the elements begin."""
        return len(self.head)

    @property
    def length(self) -> int:
        """Bytes of such a file."""
        return len(self.head) + self._nbytes + self._tail_nbytes

    def parts(self, data: bytes) -> list[bytes]:
        """Return the file of a tensor with these bytes, in parts."""
        return [self.head, data, self.tail(crc32(data))]

    def files(self, data: Array) -> Array:
        """Return the files of tensors as the rows of an array.

        Args:
            data: The bytes of a tensor in each row, contiguous uint8.
        """
        count, nbytes = data.shape
        files = np.empty((count, self.length), np.uint8)
        files[:, : self.start] = np.frombuffer(self.head, np.uint8)
        files[:, self.start : self.start + nbytes] = data
        flat = data.data.cast("B")
        checksums = [crc32(flat[at : at + nbytes]) for at in range(0, len(flat), nbytes)]
        files[:, self.start + nbytes :] = self._tails(checksums)
        return files

    def tail(self, checksum: int) -> bytes:
        """Return what follows elements with this CRC-32."""
        return self._tails([checksum]).tobytes()

    def _tails(self, checksums: Sequence[int]) -> Array:
        """Return what follows elements with these CRC-32s: one row each."""
        crcs = np.array(checksums, np.uint64)
        combined = _combine(self._before, crcs)
        for other in self._after:
            combined = _combine(combined, other)
        digits = (combined[:, None] // _POWERS % 10 + ord("0")).astype(np.uint8)
        flat = digits.data.cast("B")
        ends = range(_DIGITS, len(flat) + 1, _DIGITS)
        name_crcs = [crc32(flat[end - _DIGITS : end], self._name_crc) for end in ends]
        tails = np.tile(self._tail, (len(checksums), 1))
        tails[:, self._digits_at : self._digits_at + _DIGITS] = digits
        for values, places in (
            (crcs, self._crc_at),
            (np.array(name_crcs, np.uint64), self._name_crc_at),
        ):
            fields = values.astype("<u4").view(np.uint8).reshape(-1, 4)
            for at in places:
                tails[:, at : at + 4] = fields
        return tails

    def _cut(self, saved: _Parts, tail: bytes) -> int:
        """Locate the bytes of the tail that differ from file to file; return its checksum."""
        with zipfile.ZipFile(saved) as file:
            entries = file.infolist()
            directory = file.start_dir
        behind = len(self.head) + self._nbytes
        starts: dict[str, int] = {}
        crc_at: dict[str, int] = {}
        for entry in entries:
            last = entry.filename.partition("/")[2]
            starts[last] = entry_start(saved.read_into, entry)
            crc_at[last] = directory + 16 - behind
            lengths = struct.unpack_from("<HHH", tail, directory + 28 - behind)
            directory += 46 + sum(lengths)
        order = [entry.filename.partition("/")[2] for entry in entries]
        if "data/0" not in order[:-1] or order[-1] != ".data/serialization_id":
            raise ValueError("torch.save writes other entries than this class would")
        at = order.index("data/0")
        if starts["data/0"] != len(self.head) or entries[at].file_size != self._nbytes:
            raise ValueError("torch.save writes other elements than these")
        name = starts[order[-1]] - behind
        # The id is 20 digits of the entries' names, then 20 of their contents.
        self._digits_at = name + _DIGITS
        end = name + 2 * _DIGITS
        self._tail = np.frombuffer(tail, np.uint8)
        self._crc_at = (len(DESCRIPTOR), crc_at["data/0"])
        self._name_crc_at = (end + len(DESCRIPTOR), crc_at[order[-1]])
        crcs = [entry.CRC for entry in entries]
        self._before = 0
        for value in crcs[:at]:
            self._before = _combine(self._before, value)
        self._after = crcs[at + 1 : -1]
        self._name_crc = crc32(tail[name : self._digits_at])
        return crcs[at]


_HELD_NBYTES = 64 << 10
"""Files with at most so many bytes of elements are held whole."""


class _AroundElements:
    """A file that ``torch.save`` writes to, of which what stands around the elements is held."""

    def __init__(self, nbytes: int) -> None:
        self.parts = [bytearray()]
        self._nbytes = nbytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes == self._nbytes:
            self.parts.append(bytearray())
        else:
            self.parts[-1] += view
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


class _Parts(SeekableRaw):
    """A file without its elements, which are never read."""

    def __init__(self, head: bytes, nbytes: int, tail: bytes) -> None:
        super().__init__(len(head) + nbytes + len(tail))
        self._parts = (head, nbytes, tail)

    def readinto(self, buffer: Any) -> int:
        left = max(self._nbytes - self._position, 0)
        view = memoryview(buffer).cast("B")[:left]
        self.read_into(view, self._position)
        self._position += view.nbytes
        return view.nbytes

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from a position in the file on.

        Raises:
            zipfile.BadZipFile: These are elements.
        """
        head, nbytes, tail = self._parts
        part, start = (head, position) if position < len(head) else (tail, position - len(head))
        start -= 0 if part is head else nbytes
        data = part[start : start + buffer.nbytes] if start >= 0 else b""
        if len(data) < buffer.nbytes:
            raise zipfile.BadZipFile("an entry is where the elements are")
        buffer[:] = data


_POWERS = np.array([10**power for power in reversed(range(_DIGITS))], np.uint64)


def _combine(seed: Any, value: Any) -> Any:
    """Return torch's running hash (``c10::hash_combine``) of checksums, integers or arrays."""
    return seed ^ ((value + 0x9E3779B9 + ((seed << 6) & _U64) + (seed >> 2)) & _U64)


class Saved(NamedTuple):
    """What was written of a tensor.

    Attributes:
        nbytes: Length of its file.
        start: Where its elements begin; None where they are not in C order, or that is unknown.
    """

    nbytes: int
    start: int | None


def save_tensors(tensors: Sequence[torch.Tensor], stream: Any) -> Saved:
    """Write what ``torch.save(tensor, stream)`` writes of each tensor.

    Args:
        tensors: One, or several that ``batches`` yields together.
        stream: Open for writing.

    Returns:
        The same for all of them.
    """
    first = tensors[0]
    kind = _kind_of(first)
    stamp = None if kind is None else _stamp_of(kind)
    if stamp is None:
        before = stream.tell()
        for tensor in tensors:
            torch.save(tensor, stream)
        return Saved((stream.tell() - before) // len(tensors), None)
    is_contiguous = first.is_contiguous()
    if is_contiguous and first.nbytes <= SMALL_NBYTES:
        data = torch.stack(list(tensors)).view(-1).view(torch.uint8).numpy()
        stream.write(stamp.files(data.reshape(len(tensors), -1)).data.cast("B"))
    else:
        for tensor in tensors:
            _write_large(stamp, _storage_bytes(tensor), stream)
    return Saved(stamp.length, stamp.start if is_contiguous else None)


@lru_cache(maxsize=1024)
def _stamp_of(kind: Kind) -> Stamp | None:
    """Return the stamp of a kind; None where this torch writes in another way."""
    try:
        return Stamp.of(*kind)
    except ValueError:
        return None


def batches(
    tensors: Iterable[tuple[torch.Tensor, T]],
) -> Iterator[tuple[list[torch.Tensor], list[T]]]:
    """Yield tensors that ``save_tensors`` takes together, and what comes with each."""
    held: list[torch.Tensor] = []
    beside: list[T] = []
    nbytes, kind = 0, None
    for tensor, item in tensors:
        next_kind = _kind_of(tensor)
        if held and (next_kind is None or next_kind != kind or nbytes >= BATCH_NBYTES):
            yield held, beside
            held, beside, nbytes = [], [], 0
        held.append(tensor)
        beside.append(item)
        nbytes += tensor.nbytes
        kind = next_kind
    if held:
        yield held, beside


def _write_large(stamp: Stamp, data: memoryview, stream: Any) -> None:
    stream.write(stamp.head)
    checksum = 0
    for start in range(0, data.nbytes, BLOCK_NBYTES):
        block = data[start : start + BLOCK_NBYTES]
        checksum = crc32(block, checksum)
        stream.write(block)
    stream.write(stamp.tail(checksum))


def _kind_of(tensor: torch.Tensor) -> Kind | None:
    """Return the kind of a tensor; None of one that is not plain, or is empty."""
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not (tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.storage_offset() == 0
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
        and not tensor.__dict__
    )
    return (tensor.dtype, tensor.shape, tensor.stride()) if is_plain else None


def _storage_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's storage, no copy."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return flat.numpy().data


@contextmanager
def errors_of(path: Any) -> Iterator[None]:
    """Raise the system's error for a file that is being written, with the file's name.

    ``torch.save`` closes its zip file when a write fails, which fails as well, over positions that
    do not fit; the reason is what that error came after.
    """
    try:
        yield
    except PlacementError:
        raise  # of what is read
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__
        if reason is None or reason.filename is not None or (reason is error and not error.errno):
            raise
        if reason.errno is None:
            raise reason from error
        raise OSError(reason.errno, os.strerror(reason.errno), os.fspath(path)) from error
