"""Which boxes go between tensors that lie alike, and who sends and receives each of them.

A *route* joins one group of source tensors to one group of target tensors. Its boxes are computed
once, in the coordinates of the common tensor, and hold for every pair of tensors of the route.
Senders follow from numbers alone, so each rank computes the same plan without the others' parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements.layout.boxes import (
    Index,
    as_array,
    as_boxes,
    expanded,
    intersect,
    numel,
    overlaps,
    unique,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.names.target import Target
from dcp_placements.storage.metadata.table import Array
from dcp_placements.transfer.holding import HeldBoxes
from dcp_placements.transfer.names import Named
from dcp_placements.transfer.world import TransferWorld

ROWS = 1 << 20
"""Messages that are computed at a time, where all of a route are: some 100 bytes each."""


class Hosts:
    """The host of every global rank, for the choice of a near sender.

    Attributes:
        size: One more than the highest global rank of both.
        count: The number of hosts of the source; 1 if hosts are unknown.
        source: The number of the host of each global rank; -1 of a rank that is not in the source.
        target: The number of the host of each global rank; -1 where the source has no such host.
    """

    def __init__(self, source: TransferWorld, target: TransferWorld) -> None:
        ranks = source.global_ranks
        self.size = 1 + max(*ranks, *target.global_ranks)
        self.source = np.full(self.size, -1)
        self.source[ranks] = 0
        self.target = np.full(self.size, -1)
        self.count = 1
        near, far = source.host_names, target.host_names
        if near is not None and far is not None:
            numbers = {host: number for number, host in enumerate(dict.fromkeys(near))}
            self.source[ranks] = [numbers[host] for host in near]
            self.target[target.global_ranks] = [numbers.get(host, -1) for host in far]
            self.count = len(numbers)

    def key(self, box: Array, host: Array, rank: Array | int) -> Array:
        """Return numbers that sort holders by box, then host, then rank."""
        return (box * (self.count + 1) + host + 1) * self.size + rank


class Holders:
    """The distinct boxes of a common tensor, and who holds them.

    Attributes:
        boxes: The distinct boxes, in the common tensor.
        box: The box of each holder, sorted.
        rank: Its global rank.
        local: The start of the box in its local tensor, ``[holders, dims of the local tensor]``.
        first: The first holder of each box, and the number of holders.
        key: ``Hosts.key`` of each holder, sorted.
    """

    def __init__(self, held: HeldBoxes, target: Target, hosts: Hosts) -> None:
        ranks, local, boxes = _as_common(held, target)
        first, box = unique(boxes)
        self.boxes = boxes[first]
        key = hosts.key(box, hosts.source[ranks], ranks)
        order = np.argsort(key, kind="stable")
        self.box, self.rank, self.local, self.key = (
            box[order],
            ranks[order],
            local[order],
            key[order],
        )
        self.first = np.searchsorted(self.box, np.arange(len(self.boxes) + 1))

    @cached_property
    def counts(self) -> Array:
        """The number of holders of each box."""
        return np.diff(self.first)


def _as_common(held: HeldBoxes, target: Target) -> HeldBoxes:
    """Return the boxes of a tensor as boxes of the common tensor; ``local`` keeps its dims."""
    found = []
    for source, common in target.boxes:
        start = np.array(source.offsets, np.int64)
        shared = intersect(held.boxes, as_array([source], len(start)))
        kept = (shared[:, 1] > 0).all(axis=1)
        shared = shared[kept]
        boxes = np.ones((len(shared), 2, len(target.dims)), np.int64)
        boxes[:, 0] = common.offsets
        for dim, origin in enumerate(target.dims):
            if origin is not None:
                boxes[:, 0, dim] += shared[:, 0, origin] - start[origin]
                boxes[:, 1, dim] = shared[:, 1, origin]
        local = held.local[kept] + shared[:, 0] - held.boxes[kept, 0]
        found.append(HeldBoxes(held.ranks[kept], local, boxes))
    return HeldBoxes(*map(np.concatenate, zip(*found, strict=True)))


class Messages(NamedTuple):
    """Messages of one route, in columns: a row is one box of one or more pairs of tensors.

    Replicas take turns tensor by tensor, so a row has every ``step``-th pair of the route.
    """

    piece: Array  # the box, as an index of ``Route.boxes``
    sender: Array  # a holder of it, as an index of ``Route.source``
    receiver: Array  # who gets it, as an index of ``Route.target``
    first: Array  # the first pair of tensors that goes this way, as an index of ``Route.members``
    step: Array  # the pairs are ``members[first::step]``

    def kept(self, mask: Array) -> Messages:
        """Return the rows where ``mask`` is true."""
        return Messages(*[column[mask] for column in self])


@dataclass(eq=False)
class Route:
    """From alike source tensors to alike target tensors."""

    source: Holders  # who holds what of the source tensors
    target: Holders  # the same of the target tensors
    source_as: Target  # a source tensor as the common tensor, for the dims
    target_as: Target  # a target tensor as the common tensor
    hosts: Hosts  # for the choice of near senders
    start: int  # where the rotation over replicas begins
    # The pairs of tensors and the key of the common one
    members: list[tuple[Named, Named, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        source, target = self.source, self.target
        # By target box, so that a receiver's are one range.
        self.to, self.of = Index(source.boxes).meeting(target.boxes)
        self.boxes = intersect(target.boxes[self.to], source.boxes[self.of])
        self.numel = numel(self.boxes)
        self._first_to = np.searchsorted(self.to, np.arange(len(target.boxes) + 1))
        self._by_of = np.argsort(self.of, kind="stable")
        boxes = np.arange(len(source.boxes) + 1)
        self._first_of = np.searchsorted(self.of[self._by_of], boxes)
        # A row of the route is one piece for one receiver; those of a piece follow each other.
        self._first_row = np.r_[0, np.cumsum(target.counts[self.to])]

    @property
    def dtype(self) -> torch.dtype:
        """Of the source's elements."""
        return self.members[0][0].dtype

    def pairs_of(self, messages: Messages) -> Array:
        """Return how many pairs of tensors each row of ``messages`` has."""
        return -(-(len(self.members) - messages.first) // messages.step)

    def overlap(self) -> tuple[Box, Box] | None:
        """Return two source boxes that share elements; None if there are none.

        Without any, no element comes to a target twice.
        """
        for pair in overlaps(self.source.boxes, 1):
            one, other = as_boxes(self.source.boxes[list(pair)])
            return one, other
        return None

    def received(self) -> Array:
        """Return the elements that come to each global rank, of one pair of tensors."""
        by_box = np.zeros(len(self.target.boxes), np.int64)
        np.add.at(by_box, self.to, self.numel)
        by_rank = np.zeros(self.hosts.size, np.int64)
        np.add.at(by_rank, self.target.rank, by_box[self.target.box])
        return by_rank

    def to_rank(self, rank: int) -> Messages:
        """Return what a rank receives, with what it has itself."""
        held = np.flatnonzero(self.target.rank == rank)
        box = self.target.box[held]
        which, piece = expanded(self._first_to[box], np.diff(self._first_to)[box])
        # In the order of a sender, so that both ends of a pair list the same messages alike.
        order = np.lexsort((held[which], piece))
        return self._sent(piece[order], held[which][order])

    def from_rank(self, rank: int) -> Messages:
        """Return what a rank sends, with what it keeps."""
        held = np.flatnonzero(self.source.rank == rank)
        box = self.source.box[held]
        which, at = expanded(self._first_of[box], np.diff(self._first_of)[box])
        row, receiver = self._receivers(self._by_of[at])
        piece, sender = self._by_of[at][row], held[which][row]
        low, count = self._candidates(piece, receiver)
        # The first pair for which it is this sender's turn.
        first = (sender - low - self._numbers(piece, receiver)) % count
        sends = (low <= sender) & (sender < low + count) & (first < len(self.members))
        messages = Messages(piece, sender, receiver, first, count).kept(sends)
        order = np.lexsort((messages.first, messages.receiver, messages.piece))
        return messages.kept(order)

    def everything(self) -> Iterator[Messages]:
        """Yield all messages of the route, ``ROWS`` or a little more at a time."""
        # A row becomes a message for each sender that takes a turn.
        step = max(ROWS // min(int(self.source.counts.max(initial=1)), len(self.members)), 1)
        starts = np.searchsorted(self._first_row, np.arange(0, self._first_row[-1], step))
        for start, stop in itertools.pairwise([*np.unique(starts).tolist(), len(self.to)]):
            row, receiver = self._receivers(np.arange(start, stop))
            yield self._sent(row + start, receiver)

    def _receivers(self, piece: Array) -> tuple[Array, Array]:
        box = self.to[piece]
        return expanded(self.target.first[box], self.target.counts[box])

    def _sent(self, piece: Array, receiver: Array) -> Messages:
        """Return the messages of these pieces and receivers, of every pair of tensors."""
        low, count = self._candidates(piece, receiver)
        ways = np.minimum(count, len(self.members))
        row, first = expanded(np.zeros_like(ways), ways)
        numbers = self._numbers(piece, receiver)[row] + first
        sender = low[row] + numbers % count[row]
        return Messages(piece[row], sender, receiver[row], first, count[row])

    def _candidates(self, piece: Array, receiver: Array) -> tuple[Array, Array]:
        """Return the first of the holders that take turns for each receiver, and their number.

        A receiver that holds the box is the only one. Otherwise they are the holders on its host,
        or all holders if there are none.
        """
        source, target, hosts = self.source, self.target, self.hosts
        box, rank = self.of[piece], target.rank[receiver]
        low = np.searchsorted(source.key, hosts.key(box, hosts.target[rank], 0))
        high = np.searchsorted(source.key, hosts.key(box, hosts.target[rank], hosts.size))
        far = low == high
        low = np.where(far, source.first[box], low)
        high = np.where(far, source.first[box + 1], high)
        own_key = hosts.key(box, hosts.source[rank], rank)
        own = np.minimum(np.searchsorted(source.key, own_key), len(source.key) - 1)
        is_own = source.key[own] == own_key
        low = np.where(is_own, own, low)
        return low, np.where(is_own, 1, high - low)

    def _numbers(self, piece: Array, receiver: Array) -> Array:
        """Return the number of the first message of each row in the rotation of its candidates."""
        if self._turns is None:
            return np.zeros(len(piece), np.int64)
        row = self._first_row[piece] + receiver - self.target.first[self.to[piece]]
        turns: Array = self._turns[row]
        return self.start + turns * len(self.members)

    @cached_property
    def _turns(self) -> Array | None:
        """The position of each row among those with the same candidates; None without replicas.

        Larger boxes come first, so the bytes of two candidates differ by one box at most.
        """
        if (self.source.counts <= 1).all():
            return None
        piece, receiver = self._receivers(np.arange(len(self.to)))
        low, count = self._candidates(piece, receiver)
        order = np.lexsort((-self.numel[piece], count, low))
        low, count = low[order], count[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (low[1:] != low[:-1]) | (count[1:] != count[:-1])
        starts = np.flatnonzero(is_first)
        turns = np.empty(len(order), np.int64)
        turns[order] = np.arange(len(order)) - starts[np.cumsum(is_first) - 1]
        return turns
