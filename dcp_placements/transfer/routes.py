"""Which boxes go between tensors that lie alike, who sends and receives each, and the proof.

A *route* joins one group of source tensors to one group of target tensors. Its boxes are computed
once, in the coordinates of the common tensor, and hold for every pair of tensors of the route.
Senders follow from numbers alone, so each rank computes the same plan without the others' parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.boxes import (
    Array,
    Index,
    as_boxes,
    expanded,
    format_box,
    intersect,
    numel,
    uncovered,
)
from dcp_placements.transfer.holding import Holders, Hosts, Named, Part, RowAt

ROWS = 1 << 20
"""Messages that are computed at a time, where all of a route are: some 100 bytes each."""


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


class Matcher:
    """Matches the tensors of two worlds.

    Attributes:
        faults: Why the target tensors cannot be filled.
        used: Keys of the source that a target tensor needs.
        casts: The target's keys that have another dtype than what is sent.
        routes: By the holders of both sides.
    """

    def __init__(
        self, sources: Sequence[list[Part]], targets: Sequence[list[Part]], hosts: Hosts
    ) -> None:
        self.faults: list[Fault] = []
        self.used: set[str] = set()
        self.casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self.routes: dict[tuple[Holders, Holders], Route] = {}
        self._hosts = hosts
        self._turns = 0
        # A stack may have hundreds of rows, so they are looked up by their index.
        self._by_common: dict[str, dict[RowAt, list[Part]]] = {}
        for part in chain.from_iterable(sources):
            rows = self._by_common.setdefault(part.target.fqn, {})
            rows.setdefault(part.row, []).append(part)
        self._refuse_repeated()
        proofs: dict[Hashable, tuple[str, ...]] = {}
        for parts in targets:
            tensor, holders = parts[0].tensor, tuple([part.holders for part in parts])
            routes = self._routes_to(tensor, parts)
            if routes is None:
                continue
            if (holders, routes) not in proofs:
                proofs[holders, routes] = _lacking(holders, routes, hosts.size)
            if details := proofs[holders, routes]:
                self.faults.append(Fault(tensor.key, "no source rank holds all of it", details))
        for route in self.routes.values():
            self._refuse_overlaps(route)

    def _refuse_repeated(self) -> None:
        """Refuse common tensors that two source tensors make the same part of."""
        for fqn, rows in self._by_common.items():
            parts = list(chain.from_iterable(rows.values()))
            if len(parts) == 1:
                continue
            regions = {box for part in parts for _, box in part.target.boxes}
            # Rows of one stack are equal or share nothing.
            stacks = {(part.target.shape, part.target.dims) for part in parts}
            if () in rows or len(stacks) > 1 or len(regions) < len(parts):
                keys = format_names([part.tensor.key for part in parts], 4)
                headline = f"the source makes it, or a row of it, more than once: of {keys}"
                way_out = "way out:     a rename that gives every tensor a key or row of its own"
                self.faults.append(Fault(fqn, headline, (way_out,)))

    def _routes_to(self, tensor: Named, parts: Sequence[Part]) -> tuple[Route, ...] | None:
        """Add a target tensor to its routes; return them, or None, and a fault, if it has none."""
        absent = [part.target.fqn for part in parts if part.target.fqn not in self._by_common]
        pairs = []
        for part in parts:
            rows = self._by_common.get(part.target.fqn, {})
            if not rows:
                continue
            first = next(iter(rows.values()))[0]
            if first.target.shape != part.target.shape:
                headline = (
                    f"the source has {part.target.fqn} in shape {first.target.shape}, the "
                    f"target in shape {part.target.shape}"
                )
                self.faults.append(Fault(tensor.key, headline))
                return None
            is_row = part.row and first.target.dims == part.target.dims
            sources = [rows.get(part.row, [])] if is_row else rows.values()
            pairs += [(source, part) for source in chain.from_iterable(sources)]
        if absent:
            names = "such tensor" if absent == [tensor.key] else format_names(absent, 4)
            way_out = "way out:     rename= where the names differ; tensors= without it"
            self.faults.append(Fault(tensor.key, f"the source has no {names}", (way_out,)))
            return None
        return tuple(dict.fromkeys([self._route(*pair) for pair in pairs]))

    def _route(self, source: Part, target: Part) -> Route:
        """Add a pair of tensors to its route; return it."""
        self.used.add(source.tensor.key)
        if source.tensor.dtype != target.tensor.dtype:
            self.casts[target.tensor.key] = source.tensor.dtype, target.tensor.dtype
        holders = source.holders, target.holders
        if holders not in self.routes:
            self.routes[holders] = Route(*holders, self._hosts, self._turns)
        route = self.routes[holders]
        route.members.append((source.tensor, target.tensor, target.target.fqn))
        self._turns += 1
        return route

    def _refuse_overlaps(self, route: Route) -> None:
        if (pair := route.source.overlap) is None:
            return
        one, other = [format_box(box, route.source.shape) for box in pair]
        details = (
            f"boxes:       {one}, {other}",
            "likely:      an axis that cuts it is missing from the rules of some ranks",
        )
        headline = "source ranks hold different boxes of it that share elements"
        self.faults += [Fault(source.key, headline, details) for source, _, _ in route.members]


def _lacking(needs: Sequence[Holders], routes: Sequence[Route], size: int) -> tuple[str, ...]:
    """Return the details of a fault where some rank does not receive all that it needs.

    Source boxes share no element, so a rank that receives as many elements as it needs receives
    each of them once.
    """
    needed, received = np.zeros((2, size), np.int64)
    for holders in needs:
        needed += holders.by_rank(holders.numel)
    for route in routes:
        received += route.received()
    short = np.flatnonzero(received != needed)
    if not len(short):
        return ()
    rank = int(short[0])
    details = [
        f"rank {rank} receives {received[rank]:,} of {needed[rank]:,} elements"
        + (f"; {len(short):,} ranks lack some" if len(short) > 1 else "")
    ]
    # Of each common tensor what its sources have, whichever of their tensors it comes from.
    by_target: dict[Holders, list[Route]] = {}
    for route in routes:
        by_target.setdefault(route.target, []).append(route)
    for target, alike in by_target.items():
        filled = np.concatenate([route.source.boxes for route in alike])
        for box in as_boxes(target.boxes[target.box[target.rank == rank]]):
            holes = uncovered(box, filled, 2)
            details += [f"nobody has:  {format_box(hole, target.shape)}" for hole in holes]
    return tuple(details[:3])
