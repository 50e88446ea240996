"""Writes tensors of one dtype and shape as ``torch.save`` does, by the file of one of them.

The files of two such tensors differ only in the elements, a few checksums, and an id derived from
these; all but the elements stand after them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements.layout.byte_ranges import c_strides
from dcp_placements.storage.file_reads import SeekableRaw
from dcp_placements.storage.records.fast_zlib import crc32
from dcp_placements.storage.tensor_record import DESCRIPTOR, entry_start, local_header

Array = np.ndarray[Any, Any]

BLOCK_NBYTES = 256 << 10
"""So many bytes are written in one call, while they are in the processor's cache."""

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

    def write(self, data: Array, stream: Any) -> None:
        """Write the files of tensors, a block of them at a time.

        Args:
            data: The bytes of a tensor in each row, contiguous uint8.
            stream: Open for writing.
        """
        rows = min(len(data), max(BLOCK_NBYTES // self.length, 1))
        files = np.empty((rows, self.length), np.uint8)
        head, elements, tails = np.split(files, (self.start, self.start + self._nbytes), axis=1)
        head[:] = np.frombuffer(self.head, np.uint8)
        tails[:] = self._tail
        fields = self._fields(list(map(crc32, data)))
        for first in range(0, len(data), rows):
            count = min(rows, len(data) - first)
            elements[:count] = data[first : first + count]
            for at, values in fields:
                tails[:count, at : at + values.shape[1]] = values[first : first + count]
            stream.write(files[:count].data.cast("B"))

    def tail(self, checksum: int) -> bytes:
        """Return what follows elements with this CRC-32."""
        tail = self._tail.copy()
        for at, values in self._fields([checksum]):
            tail[at : at + values.shape[1]] = values
        return tail.tobytes()

    def _fields(self, checksums: Sequence[int]) -> list[tuple[int, Array]]:
        """Return what depends on the elements in what follows them.

        Args:
            checksums: The CRC-32 of the elements of each tensor.

        Returns:
            Where each field begins, and its bytes, a row for each tensor.
        """
        crcs = np.array(checksums, np.uint64)
        combined = _combine(self._before, crcs)
        for other in self._after:
            combined = _combine(combined, other)
        name_crcs = np.full(len(crcs), self._name_crc, np.uint32)
        fours = np.empty((len(crcs), _DIGITS // 4), np.uint32)
        for column in reversed(range(_DIGITS // 4)):
            rest = combined // 10_000
            four = (combined - rest * 10_000).astype(np.intp)
            fours[:, column] = _FOUR_DIGITS[four]
            # A CRC is linear: that of a text is those of its parts, each at its place.
            name_crcs ^= _FOUR_CRCS[column, four]
            combined = rest
        crc, name_crc = (
            values.astype("<u4").view(np.uint8).reshape(-1, 4) for values in (crcs, name_crcs)
        )
        return [
            (self._digits_at, fours.view(np.uint8)),
            *((at, crc) for at in self._crc_at),
            *((at, name_crc) for at in self._name_crc_at),
        ]

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
        self._name_crc = crc32(tail[name : self._digits_at] + _ZEROS)
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


_ZEROS = b"0" * _DIGITS
_DIGIT_CRCS = np.array(
    [
        [crc32(_ZEROS[:at] + b"%d" % digit + _ZEROS[at + 1 :]) for digit in range(10)]
        for at in range(_DIGITS)
    ],
    np.uint32,
) ^ np.uint32(crc32(_ZEROS))
"""By place and digit, by how much the CRC-32 of the digits differs from that of zeros."""

_DIGITS_OF = np.arange(10_000)[:, None] // (1000, 100, 10, 1) % 10 + ord("0")
_FOUR_DIGITS = _DIGITS_OF.astype(np.uint8).view(np.uint32)[:, 0]
"""By number below 10,000, its digits as text, in one element."""

_FOUR_CRCS = np.stack(
    [reduce(np.bitwise_xor.outer, four).ravel() for four in _DIGIT_CRCS.reshape(-1, 4, 10)]
)
"""By place and number below 10,000, by how much its digits change the CRC-32 of zeros."""


def _combine(seed: Any, value: Any) -> Any:
    """Return torch's running hash (``c10::hash_combine``) of checksums, integers or arrays."""
    return seed ^ ((value + 0x9E3779B9 + ((seed << 6) & _U64) + (seed >> 2)) & _U64)
