"""Writes the records of one new file, from elements that are read slab by slab.

A chunk that the source has as it is, in a record as this torch writes it, is copied from file to
file. All else goes through memory once: the next slab is read while one is summed and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import IO

import torch

from dcp_placements.layout.sharding import Box
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredObject, StoredTensor
from dcp_placements.offline.resharding.target import Entry, empty_record, template_of
from dcp_placements.storage.file_reads import write_all
from dcp_placements.storage.record_reads import memory_of

SMALL_NBYTES = 64 << 10
"""Elements up to this are read and written, which compares them with their checksum."""

SLAB_NBYTES = 8 << 20
REMOTE_SLAB_NBYTES = 32 << 20
"""Of a URL, where a request takes long."""

COPY_NBYTES = 256 << 20
"""Copied in one call, between two steps of the progress."""


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Writes records. Keeps files of the source open; close it.

    Attributes:
        copied_nbytes: Bytes of records copied from file to file.
    """

    def __init__(self, checkpoint: Checkpoint, advance: Callable[[int], None]) -> None:
        self.copied_nbytes = 0
        self._reader = BoxReader(checkpoint, check_crc=True)
        self._advance = advance
        is_local = checkpoint.directory.local("") is not None
        self._slab_nbytes = SLAB_NBYTES if is_local else REMOTE_SLAB_NBYTES
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._pool = ThreadPoolExecutor(1)

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        self._reader.close()

    def write(self, entry: Entry, stream: IO[bytes]) -> None:
        """Append one record to a file that is open without a buffer of its own.

        Raises:
            PlacementError: A file of the source is missing, too short, or holds something else, or
                a record that was read whole is not what was written.
        """
        tensor, box = entry.source, entry.box
        if isinstance(tensor, StoredObject):
            assert tensor.file is not None, "the source was checked"
            self._copy(tensor.file, tensor.start, tensor.nbytes, stream)
            return
        assert box is not None
        if not box.numel:
            write_all(stream, memoryview(empty_record(tensor.dtype, box.sizes)))
            self._advance(entry.length)
        elif (chunk := self._as_it_is(tensor, box, entry.length)) is not None:
            self._copy(chunk.file or "", chunk.start, chunk.nbytes, stream)
            self.copied_nbytes += chunk.nbytes
        else:
            self._write_slabs(tensor, box, stream)

    def _as_it_is(self, tensor: StoredTensor, box: Box, length: int) -> StoredChunk | None:
        """Return the stored chunk whose record is that of a new one; None for none."""
        chunk = self._reader.chunk_at(tensor, box)
        is_small = box.numel * tensor.dtype.itemsize <= SMALL_NBYTES
        if is_small or chunk is None or chunk.nbytes != length:
            return None
        runs = self._reader.runs(tensor, box)
        return chunk if runs is not None and len(runs) == 1 else None

    def _copy(self, file: str, start: int, nbytes: int, stream: IO[bytes]) -> None:
        for at in range(start, start + nbytes, COPY_NBYTES):
            some = min(COPY_NBYTES, start + nbytes - at)
            self._reader.copy(file, at, some, stream)
            self._advance(some)

    def _write_slabs(self, tensor: StoredTensor, box: Box, stream: IO[bytes]) -> None:
        template = template_of(tensor.dtype, box.sizes)
        template.write_blocks(self._slabs(tensor, box), partial(write_all, stream))
        self._advance(template.length - box.numel * tensor.dtype.itemsize)

    def _slabs(self, tensor: StoredTensor, box: Box) -> Iterator[memoryview]:
        """Yield the elements of a box; the next slab is read while one is used."""
        slabs = list(pieces(box, self._slab_nbytes // tensor.dtype.itemsize))
        data = self._read(tensor, slabs[0], 0)
        for number, following in enumerate([*slabs[1:], None], 1):
            ahead = following and self._pool.submit(self._read, tensor, following, number)
            yield data
            self._advance(data.nbytes)
            if ahead is not None:
                data = ahead.result()

    def _read(self, tensor: StoredTensor, piece: Box, number: int) -> memoryview:
        """Return the elements of a piece, in one of the buffers."""
        nbytes = piece.numel * tensor.dtype.itemsize
        at = number % len(self._buffers)
        if self._buffers[at].numel() < nbytes:
            self._buffers[at] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        into = self._buffers[at][:nbytes].view(tensor.dtype).view(piece.sizes)
        memory = memory_of(self._reader.read(tensor, piece, into=into))
        assert memory is not None
        return memory
