"""The bytes that are written: boxes of assembled tensors, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch

from dcp_placements.layout.sharding import Box
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.declared import Progress


class Elements(AbstractContextManager["Elements"]):
    """Gives the elements of boxes of tensors, in blocks; the next is read while one is written.

    Records that are read whole are compared with their CRC-32 on the way.

    Args:
        reader: Of the source.
        memory: Bytes that data may take.
        progress: Called with the bytes written, and those to write.
        total: Bytes to write.
    """

    def __init__(self, reader: Any, memory: int, progress: Progress, total: int) -> None:
        self._reader = reader
        # A slab takes four times its bytes: what is read, joined, cast, and written.
        self._limit = max((memory - _BESIDES_NBYTES) // 4, LEAST_NBYTES)
        self._progress = progress
        self._total = total
        self._done = 0
        self._pool = ThreadPoolExecutor(1)

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown()

    def advance(self, nbytes: int) -> None:
        """Report progress."""
        self._done += nbytes
        self._progress(self._done, self._total)

    def of(self, tensor: AssembledTensor, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of a box in C order."""
        for block in self._ahead(self._blocks(tensor, box)):
            yield block
            self.advance(block.nbytes)

    def _blocks(self, tensor: AssembledTensor, box: Box) -> Iterator[memoryview]:
        if not box.numel:
            return
        runs = tensor.runs(self._reader, box)
        if runs is None:
            for slab in tensor.slabs(self._reader, box, self._limit):
                yield slab.reshape(-1).view(torch.uint8).numpy().data
            return
        for run in runs:
            yield from self._reader.blocks(run)

    def _ahead(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield blocks; where there are several, the next is read meanwhile."""
        block = next(blocks, None)
        while block is not None:
            following = self._pool.submit(next, blocks, None)
            yield block
            block = following.result()


_BESIDES_NBYTES = 64 << 20
LEAST_NBYTES = 1 << 20
"""The least size of a slab, whatever the memory."""
