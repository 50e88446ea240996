"""``transfer_plan``: which rank of one world sends which box to which rank of another."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements.errors import Fault, PlacementError, format_faults, raise_faults
from dcp_placements.layout.boxes import Array
from dcp_placements.layout.sharding import Box
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.rules.patterns import unmatched_faults
from dcp_placements.transfer.holding import Hosts, Whole, held_parts
from dcp_placements.transfer.routes import Matcher, Messages, Route
from dcp_placements.transfer.world import TransferWorld

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


@dataclass(frozen=True, slots=True)
class TransferPart:
    """What one rank does in a transfer."""

    rank: int  # the global rank
    sends: Transfers  # what it sends to other ranks
    receives: Transfers  # what other ranks send to it
    copies: Transfers  # what it has already, and copies into its target tensors


class Pairs(NamedTuple):
    """Bytes by pair of ranks, sorted, in columns; a rank paired with itself copies."""

    source_rank: Array  # global ranks that send
    target_rank: Array  # global ranks that receive
    nbytes: Array  # bytes, by the dtype of the source
    messages: Array  # how many boxes of single tensors


@dataclass(frozen=True, eq=False, repr=False)
class TransferPlan:
    """Which rank sends which box to which, between two worlds.

    Every element of every target tensor is filled exactly once: this was proved when the plan was
    made. A rank that holds a replica of what it needs copies its own.

    Attributes:
        source: The world that sends.
        target: The world that receives.
        unused: Keys of the source that no target tensor needs.
        casts: ``{target key: (dtype that is sent, its own)}`` where these differ: the receiver
            casts.
        unmatched: Patterns that a world declares and none of its tensors' keys matches, after
            ``"source: "`` or ``"target: "``; each is also warned of.
    """

    source: TransferWorld
    target: TransferWorld
    unused: list[str]
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]]
    unmatched: tuple[str, ...]
    _routes: list[Route]

    def part(self, rank: int) -> TransferPart:
        """Return what one rank does. The parts of other ranks are not computed.

        Args:
            rank: A global rank; one that is in neither world does nothing.
        """
        sends, receives, copies = [], [], []
        for route in self._routes:
            if route.source.holds(rank):
                sent = route.from_rank(rank)
                sends.append((route, sent.kept(route.target.rank[sent.receiver] != rank)))
            if route.target.holds(rank):
                received = route.to_rank(rank)
                own = route.source.rank[received.sender] == rank
                receives.append((route, received.kept(~own)))
                copies.append((route, received.kept(own)))
        return TransferPart(rank, Transfers(sends), Transfers(receives), Transfers(copies))

    def everything(self) -> Transfers:
        """Return the messages of all ranks, copies within a rank among them."""
        return Transfers(
            [(route, messages) for route in self._routes for messages in route.everything()]
        )

    def pairs(self) -> Pairs:
        """Return the bytes of each pair of ranks that have something to do with each other."""
        size = 1 + max(*self.source.global_ranks, *self.target.global_ranks)
        none = np.zeros(0, np.int64)
        totals = none, none, none
        for route in self._routes:
            for messages in route.everything():
                pair = route.source.rank[messages.sender] * size
                pair += route.target.rank[messages.receiver]
                count = route.pairs_of(messages)
                nbytes = route.numel[messages.piece] * count * route.dtype.itemsize
                more = _summed(pair, nbytes, count)
                totals = _summed(*map(np.concatenate, zip(totals, more, strict=True)))
        pair, nbytes, count = totals
        return Pairs(pair // size, pair % size, nbytes, count)


def _summed(key: Array, nbytes: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Return the distinct keys, sorted, with the sums of both values."""
    keys, at = np.unique(key, return_inverse=True)
    totals = np.zeros((2, len(keys)), np.int64)
    np.add.at(totals[0], at, nbytes)
    np.add.at(totals[1], at, counts)
    return keys, totals[0], totals[1]


def transfer_plan(
    source: TransferWorld, target: TransferWorld, *, rename: Rename | None = None
) -> TransferPlan:
    """Return which rank sends which box of which tensor to which, between two worlds.

    Integers only: nothing is sent, and no process group is needed. The tensors of both worlds are
    matched by common keys, which are those of a checkpoint that either world would save. The plan
    of one rank does not need those of the others, and is the same wherever it is computed. Replicas
    take turns as senders; those on the receiver's host come first if both worlds have ``hosts``.

    A ``(4, 6)`` tensor, ``Shard(0)`` over two ranks, for two others that have it as ``Shard(1)``:

    >>> import torch
    >>> from torch.distributed.tensor import Shard
    >>> from dcp_placements import CheckpointPlacement, TransferWorld, transfer_plan
    >>> def sharded(dim):
    ...     return lambda mesh: {"w": CheckpointPlacement(mesh, {"tp": Shard(dim)})}
    >>> tensors = {"w": torch.empty(4, 6, device="meta")}
    >>> rows = TransferWorld({"tp": 2}, sharded(0), tensors)
    >>> columns = TransferWorld({"tp": 2}, sharded(1), ranks=[2, 3])
    >>> for one in transfer_plan(rows, columns).part(2).receives:
    ...     print(one.source_rank, one.source_slices, one.target_slices)
    0 (slice(0, 2, None), slice(0, 3, None)) (slice(0, 2, None), slice(0, 3, None))
    1 (slice(0, 2, None), slice(0, 3, None)) (slice(2, 4, None), slice(0, 3, None))

    Args:
        source: The world that has the tensors; it needs ``tensors``, their whole shapes.
        target: The world that gets them. Without ``tensors`` it gets all of the source's, under
            their common keys.
        rename: Maps a key of the source, as its rules see it, to the common key, where the names
            differ: a function, ``Replace``, ``Stack``, ``Unstack``, ``Split`` or ``Renames``.

    Returns:
        The plan. Slices are in elements of local tensors.

    Raises:
        PlacementError: A rule that does not fit its tensor; a target tensor that the source lacks,
            or has in another shape; elements that no source rank holds, or two hold differently.
        CannotLook: A function of the rules fails, or an FSDP axis is not in its mesh.
    """
    faults: list[Fault] = []
    if source.tensors is None:
        raise PlacementError("the source of a transfer needs tensors=, its whole tensors by key")
    hosts = Hosts(source, target)
    sources, of_source = held_parts(source, source.tensors, rename, hosts, faults)
    wanted = target.tensors
    if wanted is None:  # what the source's tensors make
        wanted = {
            part.target.fqn: Whole(part.target.shape, part.tensor.dtype)
            for part in chain.from_iterable(sources)
        }
    targets, of_target = held_parts(target, wanted, None, hosts, faults)
    raise_faults("the transfer cannot be planned", faults)
    matcher = Matcher(sources, targets, hosts)
    raise_faults("the transfer cannot be planned", matcher.faults)
    unmatched: list[str] = []
    of_source_keys = [parts[0].tensor.key for parts in sources]
    of_target_keys = [parts[0].tensor.key for parts in targets]
    for side, declared, keys in (
        ("source", of_source, of_source_keys),
        ("target", of_target, of_target_keys),
    ):
        if notes := unmatched_faults(declared, keys):
            warnings.warn(format_faults(f"look at the {side}", notes, "note"), stacklevel=2)
        unmatched += [f"{side}: {name}" for name in declared]
    unused = [key for key in of_source_keys if key not in matcher.used]
    routes = list(matcher.routes.values())
    return TransferPlan(source, target, unused, matcher.casts, tuple(unmatched), routes)
