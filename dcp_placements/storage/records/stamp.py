"""Writes tensors of one dtype and shape as ``torch.save`` does, by the file of one of them.

The files of two such tensors differ only in the elements, a few checksums, and an id derived from
these; all but the elements stand after them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements.layout.byte_ranges import c_strides
from dcp_placements.storage.file_reads import SeekableRaw
from dcp_placements.storage.tensor_record import DESCRIPTOR, crc32, entry_start, local_header

Array = np.ndarray[Any, Any]

BLOCK_NBYTES = 1 << 20
"""So many bytes of files are made at a time."""

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
        count, nbytes = data.shape
        rows = min(count, max(BLOCK_NBYTES // self.length, 1))
        files = np.empty((rows, self.length), np.uint8)
        files[:, : self.start] = np.frombuffer(self.head, np.uint8)
        files[:, self.start + nbytes :] = self._tail
        flat = data.data.cast("B")
        for first in range(0, count, len(files)):
            block = files[: count - first]
            stop = first + len(block)
            block[:, self.start : self.start + nbytes] = data[first:stop]
            places = range(first * nbytes, stop * nbytes, nbytes)
            checksums = [crc32(flat[at : at + nbytes]) for at in places]
            self._stamp(block[:, self.start + nbytes :], checksums)
            stream.write(block.data.cast("B"))

    def tail(self, checksum: int) -> bytes:
        """Return what follows elements with this CRC-32."""
        tails = self._tail.copy()
        self._stamp(tails[None], [checksum])
        return tails.tobytes()

    def _stamp(self, tails: Array, checksums: Sequence[int]) -> None:
        """Put what depends on the elements into what follows them.

        Args:
            tails: A row for each tensor.
            checksums: The CRC-32 of the elements of each.
        """
        crcs = np.array(checksums, np.uint64)
        combined = _combine(self._before, crcs)
        for other in self._after:
            combined = _combine(combined, other)
        fours = np.empty((len(crcs), _DIGITS // 4), np.intp)
        for column in reversed(range(_DIGITS // 4)):
            fours[:, column] = combined % 10_000
            combined = combined // 10_000
        digits = _FOUR_DIGITS[fours].view(np.uint8)
        tails[:, self._digits_at : self._digits_at + _DIGITS] = digits
        # A CRC is linear: that of a text is those of its digits, each at its place.
        of_digits = _DIGIT_CRCS[np.arange(_DIGITS), digits - ord("0")]
        name_crcs = np.bitwise_xor.reduce(of_digits, axis=1, initial=self._name_crc)
        for values, places in ((crcs, self._crc_at), (name_crcs, self._name_crc_at)):
            fields = values.astype("<u4").view(np.uint8).reshape(-1, 4)
            for at in places:
                tails[:, at : at + 4] = fields

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

_DIGITS_OF = np.stack([np.arange(10_000) // power % 10 for power in (1000, 100, 10, 1)], axis=1)
_FOUR_DIGITS = (_DIGITS_OF + ord("0")).astype(np.uint8).view(np.uint32)[:, 0]
"""By number below 10,000, its digits as text, in one element."""


def _combine(seed: Any, value: Any) -> Any:
    """Return torch's running hash (``c10::hash_combine``) of checksums, integers or arrays."""
    return seed ^ ((value + 0x9E3779B9 + ((seed << 6) & _U64) + (seed >> 2)) & _U64)
