"""Broadcasts of many tensors along a line of ranks, in batches.

A tensor that fills a batch by itself is sent from, and received into, its own memory; smaller ones
travel together in a buffer. Every rank forms the same batches in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from dcp_placements._torch import group_device

BATCH_NBYTES = 8 << 20
"""The most bytes of one broadcast. Two are under way at a time, so an exchange takes twice this in
memory. Below a few MiB a broadcast costs latency alone."""

ALIGNED_NBYTES = 16
"""Tensors in one buffer begin at multiples of this."""

Buffers = dict[tuple[torch.device, int], torch.Tensor]
"""Two buffers per device."""


class Line(NamedTuple):
    """The ranks along one axis of a replica set, this rank among them."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    position: int
    name: str

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Line:
        """Return the line of a process group; None stands for the default one."""
        ranks = tuple(dist.get_process_group_ranks(group))
        name = "" if group is None else str(getattr(group, "group_name", ""))
        return Line(group, ranks, dist.get_rank(group), name)

    def hash(self, label: str) -> int:
        """Return a hash that identifies the line: its ranks and its group."""
        return xxhash.xxh3_64_intdigest(repr((label, self.name, self.ranks)).encode())


class Sender:
    """Broadcasts tensors along a line, two batches under way at a time.

    Args:
        line: The ranks.
        buffers: For all tensors that are not sent from their own memory.
    """

    def __init__(self, line: Line, buffers: Buffers) -> None:
        self._line = line
        self._buffers = buffers
        self._turn = 0
        self._under_way: deque[tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = deque()

    def send(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the tensors of one member into those of the others."""
        for batch in batches(tensors):
            while len(self._under_way) >= 2:
                self._settle()
            self._start(source, batch)

    def drain(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._settle()

    def _start(self, source: int, batch: Sequence[torch.Tensor]) -> None:
        is_source = source == self._line.position
        device = group_device(self._line.group, batch[0].device)
        received: list[tuple[torch.Tensor, torch.Tensor]] = []
        if len(batch) == 1 and batch[0].is_contiguous() and batch[0].device == device:
            flat = batch[0].as_strided((batch[0].numel(),), (1,)).view(torch.uint8)
        else:
            buffer = self._buffer(device)
            start = 0
            for tensor in batch:
                start = _aligned(start)
                part = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                if is_source:
                    part.copy_(tensor)
                else:
                    received.append((tensor, part))
                start += tensor.nbytes
            flat = buffer[:start]
        work = dist.broadcast(
            flat, src=self._line.ranks[source], group=self._line.group, async_op=True
        )
        self._under_way.append((work, received))

    def _settle(self) -> None:
        work, received = self._under_way.popleft()
        work.wait()
        for tensor, part in received:
            tensor.copy_(part)

    def _buffer(self, device: torch.device) -> torch.Tensor:
        self._turn = 1 - self._turn
        key = (device, self._turn)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(BATCH_NBYTES, dtype=torch.uint8, device=device)
        return self._buffers[key]


def batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in batches that fit a buffer; the same on all ranks, whatever the strides."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for whole in tensors:
        for tensor in _pieces(whole):
            end = _aligned(nbytes) + tensor.nbytes
            if batch and (end > BATCH_NBYTES or tensor.device != batch[0].device):
                yield batch
                batch, end = [], tensor.nbytes
            batch.append(tensor)
            nbytes = end
    if batch:
        yield batch


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor that fit a buffer, in C order."""
    if tensor.nbytes <= BATCH_NBYTES:
        yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    rows = max(BATCH_NBYTES * size // tensor.nbytes, 1)
    for start in range(0, size, rows):
        yield from _pieces(tensor.narrow(dim, start, min(rows, size - start)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES
