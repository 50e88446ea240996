"""The routes between two worlds: their tensors matched by common keys, and the proof of cover."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, islice

import numpy as np
import torch

from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.boxes import as_boxes, format_box, uncovered
from dcp_placements.transfer.holding import Group, Part, Row
from dcp_placements.transfer.names import Named
from dcp_placements.transfer.routes import Holders, Hosts, Route


class Matcher:
    """Matches the tensors of two worlds.

    Attributes:
        faults: Why the target tensors cannot be filled.
        used: Keys of the source that a target tensor needs.
        casts: The target's keys that have another dtype than what is sent.
        routes: By the holders of both sides.
    """

    def __init__(self, sources: Sequence[Group], targets: Sequence[Group], hosts: Hosts) -> None:
        self.faults: list[Fault] = []
        self.used: set[str] = set()
        self.casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self.routes: dict[tuple[Holders, Holders], Route] = {}
        self._hosts = hosts
        self._turns = 0
        # A stack may have hundreds of rows, so they are looked up by their index.
        self._by_common: dict[str, dict[Row, list[Part]]] = {}
        for group in sources:
            for part in chain.from_iterable(map(group.parts_of, group.tensors)):
                rows = self._by_common.setdefault(part.target.fqn, {})
                rows.setdefault(part.row, []).append(part)
        self._refuse_repeated()
        for group in targets:
            proofs: dict[Hashable, tuple[str, ...]] = {}
            for tensor in group.tensors:
                routes = self._routes_to(tensor, group.parts_of(tensor))
                if routes is None:
                    continue
                if routes not in proofs:
                    proofs[routes] = _lacking(group, routes, hosts.size)
                if details := proofs[routes]:
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
            for first, *_ in islice(rows.values(), 1):
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


def _lacking(group: Group, routes: Sequence[Route], size: int) -> tuple[str, ...]:
    """Return the details of a fault where some rank does not receive all that it needs.

    Source boxes share no element, so a rank that receives as many elements as it needs receives
    each of them once.
    """
    needed, received = np.zeros((2, size), np.int64)
    for holders in group.parts:
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
