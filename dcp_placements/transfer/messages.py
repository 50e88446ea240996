"""The messages of a plan as users see them: arrays by route, or one value per message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dcp_placements.layout.sharding import Box
from dcp_placements.names.boxes import Target
from dcp_placements.storage.metadata.table import Array
from dcp_placements.transfer.routes import Holders, Messages, Route

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
        nbytes: Bytes, by the dtype of the source.
    """

    source_rank: int
    target_rank: int
    fqn: str
    source_fqn: str
    target_fqn: str
    box: Box
    source_slices: Slices
    target_slices: Slices
    nbytes: int


class TransferArrays(NamedTuple):
    """Messages between tensors that lie alike, in columns: one row per message.

    Attributes:
        tensors: ``(source FQN, target FQN, common FQN)`` of the pairs of tensors.
        itemsize: Bytes of a source element.
        tensor: The pair of each message, an index of ``tensors``.
        source_rank: Global ranks that send.
        target_rank: Global ranks that receive.
        offsets: Start of the box in the common tensor, ``[messages, dims]``, in elements.
        sizes: Its sizes, ``[messages, dims]``.
        source_start: Start in the sender's local tensor, ``[messages, source dims]``.
        source_sizes: Sizes there; 1 along a dim that the common tensor lacks.
        target_start: Start in the receiver's local tensor, ``[messages, target dims]``.
        target_sizes: Sizes there.
    """

    tensors: list[tuple[str, str, str]]
    itemsize: int
    tensor: Array
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
        return sum(len(messages.piece) for _, messages in self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(
            int(route.sizes.prod(1)[messages.piece].sum()) * route.itemsize
            for route, messages in self._blocks
        )

    def arrays(self) -> Iterator[TransferArrays]:
        """Yield the messages in columns, by tensors that lie alike."""
        for route, messages in self._blocks:
            piece = messages.piece
            source = _local(route, route.source, route.source_as, piece, messages.sender, route.of)
            target = _local(
                route, route.target, route.target_as, piece, messages.receiver, route.to
            )
            yield TransferArrays(
                [(one.key, other.key, fqn) for one, other, fqn in route.members],
                route.itemsize,
                messages.member,
                route.source.rank[messages.sender],
                route.target.rank[messages.receiver],
                route.offsets[piece],
                route.sizes[piece],
                *source,
                *target,
            )

    def __iter__(self) -> Iterator[Transfer]:
        for block in self.arrays():
            nbytes = (block.sizes.prod(1) * block.itemsize).tolist()
            columns = [column.tolist() for column in block[2:]]
            for row, (member, sender, receiver, *boxes) in enumerate(zip(*columns, strict=True)):
                source_fqn, target_fqn, fqn = block.tensors[member]
                offsets, sizes, *local = map(tuple, boxes)
                yield Transfer(
                    sender,
                    receiver,
                    fqn,
                    source_fqn,
                    target_fqn,
                    Box(offsets, sizes),
                    _slices(local[0], local[1]),
                    _slices(local[2], local[3]),
                    nbytes[row],
                )


def _slices(start: Sequence[int], sizes: Sequence[int]) -> Slices:
    return tuple([slice(a, a + size) for a, size in zip(start, sizes, strict=True)])


def _local(
    route: Route, holders: Holders, common: Target, piece: Array, holder: Array, box_of: Array
) -> tuple[Array, Array]:
    """Return start and sizes of messages in local tensors."""
    start = holders.local[holder].copy()
    sizes = np.ones_like(start)
    moved = route.offsets[piece] - holders.offsets[box_of[piece]]
    for dim, origin in enumerate(common.dims):
        if origin is not None:
            start[:, origin] += moved[:, dim]
            sizes[:, origin] = route.sizes[piece, dim]
    return start, sizes
