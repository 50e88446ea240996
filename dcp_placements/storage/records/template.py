"""The records of tensors of one dtype and shape, by one that ``torch.save`` wrote.

Two such records differ in the elements, in their CRC-32, and in an id that torch derives from all
checksums and that no reader compares. So a record is that of zeros with other elements, and with
their CRC-32 in the two places where a zip file has it.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements.storage.byte_ranges import c_strides
from dcp_placements.storage.records.fast_zlib import crc32
from dcp_placements.storage.tensor_record import DESCRIPTOR

Array = np.ndarray[Any, Any]

BLOCK_NBYTES = 256 << 10
"""So many bytes are written in one call, while they are in the processor's cache."""

PROVED_NBYTES = 64 << 10
"""A template with at most so many bytes of elements is tried out when it is made."""

_DIRECTORY_ENTRY = b"PK\x01\x02"


class Template:
    """Writes records of tensors of one dtype and shape. Of a ``(4, 3)`` tensor of float32::

        head          704 bytes: the pickle, and the header of the elements
        elements       48 bytes
        tail          825 bytes: their CRC-32, the other entries, the directory with it once more

    Args:
        dtype: Of the elements.
        shape: Without a dim of size 0.
        strides: Of tensors that fill their storage in another order than C.

    Attributes:
        head: What stands before the elements.

    Raises:
        ValueError: This torch writes another format, or no checksums.
    """

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> None:
        self._nbytes = prod(shape) * dtype.itemsize
        # Pages of zeros that nothing writes to take no memory.
        zeros = torch.from_numpy(np.zeros(self._nbytes, np.uint8))
        around: Any = _AroundElements(zeros)
        strides = c_strides(tuple(shape)) if strides is None else strides
        torch.save(zeros.view(dtype).as_strided(tuple(shape), tuple(strides)), around)
        if len(around.parts) != 2:
            raise ValueError("torch.save writes elements in another way than one call")
        self.head, tail = map(bytes, around.parts)
        self._tail = np.frombuffer(tail, np.uint8)
        crc = tail[4:8]
        self._crc_at = [at for at in range(len(tail) - 3) if tail.startswith(crc, at)]
        if not (
            tail.startswith(DESCRIPTOR)
            and len(self._crc_at) == 2
            and tail.startswith(_DIRECTORY_ENTRY, self._crc_at[1] - 16)
        ):
            raise ValueError("torch.save writes checksums in other places, or none")
        if self._nbytes <= PROVED_NBYTES:
            self._prove()

    def _prove(self) -> None:
        """Compare what torch and zipfile read of a record with what was written.

        Raises:
            ValueError: They differ.
        """
        ones = b"\x01" * self._nbytes
        record = io.BytesIO(b"".join(self.parts(ones)))
        try:
            with zipfile.ZipFile(record) as file:
                broken = file.testzip()
            record.seek(0)
            loaded = torch.load(record, weights_only=True).untyped_storage()
            values = torch.empty(0, dtype=torch.uint8).set_(loaded)
        except Exception as error:
            raise ValueError(f"torch.save writes another kind of file: {error}") from error
        if broken is not None or values.numpy().tobytes() != ones:
            raise ValueError("torch.save writes another kind of file")

    @property
    def start(self) -> int:
        """Where the elements begin."""
        return len(self.head)

    @property
    def length(self) -> int:
        """Bytes of a record."""
        return len(self.head) + self._nbytes + len(self._tail)

    def parts(self, data: bytes) -> list[bytes]:
        """Return the record of a tensor with these bytes, in parts."""
        return [self.head, data, self.tail(crc32(data))]

    def tail(self, checksum: int) -> bytes:
        """Return what follows elements with this CRC-32."""
        tail = self._tail.copy()
        for at in self._crc_at:
            tail[at : at + 4] = np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)
        return tail.tobytes()

    def write(self, data: Array, stream: Any) -> None:
        """Write the records of tensors, a block of them at a time.

        Args:
            data: The bytes of a tensor in each row, contiguous uint8.
            stream: Open for writing.
        """
        rows = min(len(data), max(BLOCK_NBYTES // self.length, 1))
        records = np.empty((rows, self.length), np.uint8)
        elements, tails = np.split(records, (self.start, self.start + self._nbytes), axis=1)[1:]
        records[:, : self.start] = np.frombuffer(self.head, np.uint8)
        tails[:] = self._tail
        checksums = np.array(list(map(crc32, data)), "<u4").view(np.uint8).reshape(-1, 4)
        for first in range(0, len(data), rows):
            count = min(rows, len(data) - first)
            elements[:count] = data[first : first + count]
            for at in self._crc_at:
                tails[:count, at : at + 4] = checksums[first : first + count]
            stream.write(records[:count].data.cast("B"))


class _AroundElements:
    """A file that ``torch.save`` writes to, of which what stands around the elements is held.

    Args:
        elements: The storage that is saved, as bytes.
    """

    def __init__(self, elements: torch.Tensor) -> None:
        self.parts = [bytearray()]
        self._elements = elements

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # torch.save passes the storage's own memory.
        if view.nbytes == self._elements.nbytes and self._is_their_memory(view):
            self.parts.append(bytearray())
        else:
            self.parts[-1] += view
        return view.nbytes

    def _is_their_memory(self, view: memoryview) -> bool:
        return np.frombuffer(view, np.uint8).ctypes.data == self._elements.data_ptr()

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
