"""Which boxes go between tensors that lie alike, and who sends and receives each of them.

A *route* joins one group of source tensors to one group of target tensors. Its boxes are computed
once, in the coordinates of the common tensor, and hold for every pair of tensors of the route.
Senders follow from numbers alone, so each rank computes the same plan without the others' parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements.layout.boxes import (
    Array,
    Boxes,
    Index,
    as_array,
    as_boxes,
    expanded,
    intersect,
    numel,
    overlaps,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.names.stacks_and_parts import Target
from dcp_placements.table.world import cover_of
from dcp_placements.transfer.cutting import HeldBoxes
from dcp_placements.transfer.names import Named
from dcp_placements.transfer.world import TransferWorld

ROWS = 1 << 20
"""Messages that are computed at a time, where all of a route are: some 100 bytes each."""


class Hosts:
    """The order of ranks as senders: by host, then by rank.

    Attributes:
        size: One more than the highest global rank of both worlds.
        number: The number of each global rank in this order, from 1 up; 0 if it is not in the
            source.
        near: For each global rank the numbers ``first .. stop`` of the source's ranks on its host,
            ``[size, 2]``; an empty range where there are none, or hosts are unknown.
    """

    def __init__(self, source: TransferWorld, target: TransferWorld) -> None:
        self.size = 1 + max(*source.global_ranks, *target.global_ranks)
        self.number = np.zeros(self.size, np.int64)
        self.near = np.zeros((self.size, 2), np.int64)
        names, far = source.host_names, target.host_names
        if names is None or far is None:
            names, far = [0] * source.size, [None] * target.size
        on_host: dict[Hashable, list[int]] = {host: [] for host in names}
        for rank, host in zip(source.global_ranks, names, strict=True):
            on_host[host].append(rank)
        ranges: dict[Hashable, tuple[int, int]] = {}
        stop = 1
        for host, ranks in on_host.items():
            first, stop = stop, stop + len(ranks)
            self.number[sorted(ranks)] = np.arange(first, stop)
            ranges[host] = first, stop
        self.near[target.global_ranks] = [ranges.get(host, (0, 0)) for host in far]


class Holders:
    """Who holds which box of a common tensor, in the order of ``Hosts`` for each box.

    Attributes:
        shape: Of the common tensor.
        dims: For each of its dims that of the local tensor; None if that has none.
        boxes: The different boxes, in the common tensor.
        numel: Their elements.
        first: By box, its first holder; the number of holders last.
        box: By holder, the box, ascending.
        rank: By holder, the global rank.
        local: By holder, the start of the box in its local tensor.
        key: By holder, box and number of the rank as one number, ascending.
    """

    def __init__(self, held: HeldBoxes, target: Target, hosts: Hosts) -> None:
        self.shape, self.dims = target.shape, target.dims
        ranks, local, boxes = as_common(held, target)
        cover = cover_of(hosts.number[ranks], boxes)
        self.boxes, self.numel, self.first = cover.boxes, cover.numel, cover.starts
        self.box, self.rank = cover.box_of[cover.order], ranks[cover.order]
        self.local = local[cover.order]
        self.key = self.box * (hosts.size + 1) + cover.ranks[cover.order]
        self._has = np.zeros(hosts.size, bool)
        self._has[ranks] = True

    @cached_property
    def counts(self) -> Array:
        """The number of holders of each box."""
        return np.diff(self.first)

    @cached_property
    def overlap(self) -> tuple[Box, Box] | None:
        """Two of the boxes that share elements; None if there are none."""
        for pair in overlaps(self.boxes, 1):
            one, other = as_boxes(self.boxes[list(pair)])
            return one, other
        return None

    def holds(self, rank: int) -> bool:
        """Whether a global rank holds a box."""
        return 0 <= rank < len(self._has) and bool(self._has[rank])

    def by_rank(self, numel: Array) -> Array:
        """Return sums by global rank of what each box has."""
        sums = np.zeros(len(self._has), np.int64)
        np.add.at(sums, self.rank, numel[self.box])
        return sums

    def slices(self, holder: Array, boxes: Boxes) -> tuple[Array, Array]:
        """Return start and sizes in local tensors of parts of what holders have.

        Args:
            holder: By row, the holder.
            boxes: By row, the part of its box, in the common tensor.
        """
        start = self.local[holder]
        sizes = np.ones_like(start)
        moved = boxes[:, 0] - self.boxes[self.box[holder], 0]
        for dim, origin in enumerate(self.dims):
            if origin is not None:
                start[:, origin] += moved[:, dim]
                sizes[:, origin] = boxes[:, 1, dim]
        return start, sizes


def as_common(held: HeldBoxes, target: Target) -> HeldBoxes:
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

    def received(self) -> Array:
        """Return the elements that come to each global rank, of one pair of tensors."""
        by_box = np.zeros(len(self.target.boxes), np.int64)
        np.add.at(by_box, self.to, self.numel)
        return self.target.by_rank(by_box)

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
        source, hosts = self.source, self.hosts
        box, rank = self.of[piece], self.target.rank[receiver]
        key = box * (hosts.size + 1)
        low, high = [np.searchsorted(source.key, key + near) for near in hosts.near[rank].T]
        far = low == high
        low = np.where(far, source.first[box], low)
        high = np.where(far, source.first[box + 1], high)
        own_key = key + hosts.number[rank]
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
        candidates = low * (len(self.source.rank) + 1) + count
        order = np.lexsort((-self.numel[piece], candidates))
        candidates = candidates[order]
        turns = np.empty(len(order), np.int64)
        turns[order] = np.arange(len(order)) - np.searchsorted(candidates, candidates)
        return turns
