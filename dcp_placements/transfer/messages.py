"""The messages of a plan as users see them: arrays by route, or one value per message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dcp_placements.layout.boxes import Array
from dcp_placements.layout.sharding import Box
from dcp_placements.transfer.routes import Messages, Route

Slices = tuple[slice, ...]


class Transfer(NamedTuple):
    """One box of one tensor that one rank has and another needs.

    ``target[target_slices] = source[source_slices].reshape(sizes of target_slices)``: the two sides
    have the same elements in the same order, but a row of a stack has one dim less than the stack.

    Attributes:
        source_rank: The global rank that sends.
        target_rank: The global rank that receives.
        fqn: The key of the common tensor.
        source_fqn: The key of the source tensor, with global numbers.
        target_fqn: The key of the target tensor, with global numbers.
        box: The box in the common tensor, in elements.
        source_slices: The elements in the sender's local tensor, one slice per dim.
        target_slices: The elements in the receiver's local tensor, one slice per dim.
        dtype: Of the source's elements, which are what is sent.
        nbytes: Bytes, by this dtype.
    """

    source_rank: int
    target_rank: int
    fqn: str
    source_fqn: str
    target_fqn: str
    box: Box
    source_slices: Slices
    target_slices: Slices
    dtype: torch.dtype
    nbytes: int


class TransferArrays(NamedTuple):
    """Messages between tensors that lie alike, in columns.

    A row is one box that goes from one rank to another for each of the pairs of tensors
    ``tensors[first[row] :: step[row]]``.

    Attributes:
        tensors: ``(source FQN, target FQN, common FQN)`` of the pairs of tensors.
        dtype: Of the source's elements.
        first: The first pair of each row.
        step: The distance from one pair of a row to its next; 1 if all go the same way.
        source_rank: Global ranks that send.
        target_rank: Global ranks that receive.
        offsets: Start of the box in the common tensor, ``[rows, dims]``, in elements.
        sizes: Its sizes, ``[rows, dims]``.
        source_start: Start in the sender's local tensor, ``[rows, source dims]``.
        source_sizes: Sizes there; 1 along a dim that the common tensor lacks.
        target_start: Start in the receiver's local tensor, ``[rows, target dims]``.
        target_sizes: Sizes there.
    """

    tensors: list[tuple[str, str, str]]
    dtype: torch.dtype
    first: Array
    step: Array
    source_rank: Array
    target_rank: Array
    offsets: Array
    sizes: Array
    source_start: Array
    source_sizes: Array
    target_start: Array
    target_sizes: Array


class Transfers:
    """Messages of a plan: iterable as ``Transfer``, and as arrays.

    The two ranks of a pair list their common messages in the same order.
    """

    def __init__(self, blocks: Sequence[tuple[Route, Messages]]) -> None:
        self._blocks = [(route, found) for route, found in blocks if len(found.piece)]

    def __len__(self) -> int:
        return sum(int(route.pairs_of(messages).sum()) for route, messages in self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(
            int((route.numel[messages.piece] * route.pairs_of(messages)).sum())
            * route.dtype.itemsize
            for route, messages in self._blocks
        )

    def arrays(self) -> Iterator[TransferArrays]:
        """Yield the messages in columns, by tensors that lie alike."""
        for route, messages in self._blocks:
            piece = messages.piece
            boxes = route.boxes[piece]
            yield TransferArrays(
                [(one.key, other.key, fqn) for one, other, fqn in route.members],
                route.dtype,
                messages.first,
                messages.step,
                route.source.rank[messages.sender],
                route.target.rank[messages.receiver],
                boxes[:, 0],
                boxes[:, 1],
                *route.source.slices(messages.sender, boxes),
                *route.target.slices(messages.receiver, boxes),
            )

    def __iter__(self) -> Iterator[Transfer]:
        for block in self.arrays():
            nbytes = (block.sizes.prod(1) * block.dtype.itemsize).tolist()
            columns = [column.tolist() for column in block[2:]]
            rows = zip(*columns, nbytes, strict=True)
            for first, step, sender, receiver, *boxes, size in rows:
                offsets, sizes, *local = map(tuple, boxes)
                box = Box(offsets, sizes)
                slices = _slices(local[0], local[1]), _slices(local[2], local[3])
                for source_fqn, target_fqn, fqn in block.tensors[first::step]:
                    names = fqn, source_fqn, target_fqn
                    yield Transfer(sender, receiver, *names, box, *slices, block.dtype, size)


def _slices(start: Sequence[int], sizes: Sequence[int]) -> Slices:
    return tuple([slice(a, a + size) for a, size in zip(start, sizes, strict=True)])
