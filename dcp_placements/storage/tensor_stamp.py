"""Writes a tensor as ``torch.save`` does, from the file of an earlier one with its dtype and shape.

``torch.save`` takes 100 us and more, however small the tensor, which dominates a checkpoint of many
small tensors. The files of two tensors of one dtype and shape differ only in the elements and a few
checksums.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements.storage.file_reads import SeekableRaw
from dcp_placements.storage.tensor_record import DESCRIPTOR, entry_start, local_header

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
    def of(cls, dtype: torch.dtype, shape: Sequence[int]) -> Stamp:
        """Return the stamp of contiguous tensors; the memory of one is not needed.

        Args:
            dtype: Of the elements.
            shape: Without a dim of size 0.

        Raises:
            ValueError: This torch writes another format.
        """
        nbytes = prod(shape) * dtype.itemsize
        # Pages of zeros that nothing writes to take no memory.
        zeros = torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).reshape(tuple(shape))
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
        return [self.head, data, self.tail(zlib.crc32(data))]

    def tail(self, checksum: int) -> bytes:
        """Return what follows elements with this CRC-32."""
        data_crc = struct.pack("<I", checksum)
        combined = _combine(self._before, checksum)
        for other in self._after:
            combined = _combine(combined, other)
        name = b"%020d" % combined
        name_crc = struct.pack("<I", zlib.crc32(name, self._name_crc))
        after_data, after_crc, after_name, after_name_crc, after_dir, rest = self._fixed
        return b"".join(
            [
                *(after_data, data_crc, after_crc, name, after_name, name_crc),
                *(after_name_crc, data_crc, after_dir, name_crc, rest),
            ]
        )

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
        middle, end = name + 20, name + 40
        crc = len(DESCRIPTOR)
        spots = [
            (crc, crc + 4),
            (middle, end),
            (end + 4, end + 8),
            (crc_at["data/0"], crc_at["data/0"] + 4),
            (crc_at[order[-1]], crc_at[order[-1]] + 4),
        ]
        fixed = []
        position = 0
        for start, stop in spots:
            fixed.append(tail[position:start])
            position = stop
        self._fixed = (*fixed, tail[position:])
        crcs = [entry.CRC for entry in entries]
        self._before = 0
        for value in crcs[:at]:
            self._before = _combine(self._before, value)
        self._after = crcs[at + 1 : -1]
        self._name_crc = zlib.crc32(tail[name:middle])
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


def _combine(seed: int, value: int) -> int:
    """Return torch's running hash of checksums (``c10::hash_combine``)."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _U64)


class TensorSaver:
    """Writes the files of tensors; of small ones with equal dtype and shape by ``Stamp``.

    Args:
        small_nbytes: The largest small tensor; checksums of larger ones cost more than is saved.
    """

    def __init__(self, small_nbytes: int = 32 * 1024) -> None:
        self.small_nbytes = small_nbytes
        self._stamps: dict[Any, Stamp | None] = {}

    def save(self, tensor: torch.Tensor, stream: Any) -> int | None:
        """Write what ``torch.save(tensor, stream)`` writes.

        Returns:
            Where the elements begin, in C order; None where that is unknown.
        """
        if not self._is_small_and_plain(tensor):
            torch.save(tensor, stream)
            return None
        key = (tensor.dtype, tensor.shape, tensor.stride())
        data = _storage_bytes(tensor)
        if key not in self._stamps:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            saved = buffer.getvalue()
            try:
                self._stamps[key] = Stamp.of_file(saved, len(data))
            except ValueError:
                self._stamps[key] = None
            stream.write(saved)
        elif (stamp := self._stamps[key]) is None:
            torch.save(tensor, stream)
        else:
            stream.write(b"".join(stamp.parts(data)))
        stamp = self._stamps[key]
        return None if stamp is None or not tensor.is_contiguous() else stamp.start

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
