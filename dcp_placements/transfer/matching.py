"""The routes between two worlds: their tensors matched by common keys, and the proof of cover."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.boxes import as_boxes, format_box, numel, uncovered
from dcp_placements.names.target import Target
from dcp_placements.transfer.holding import Group
from dcp_placements.transfer.names import Named
from dcp_placements.transfer.routes import Holders, Hosts, Route


class _Contribution(NamedTuple):
    """A tensor of a world that is a common tensor, or a part of one."""

    group: int
    tensor: Named
    target: Target


class _RowOf(NamedTuple):
    """The dims of a common tensor that a tensor lacks, and its index along each; none if whole."""

    dims: tuple[int, ...]
    indices: tuple[int, ...]


class Matcher:
    """Matches the tensors of two worlds.

    Attributes:
        faults: Why the target tensors cannot be filled, after ``routes``.
        used: Keys of the source that a target tensor needs.
        casts: The target's keys that have another dtype than what is sent.
    """

    def __init__(self, sources: list[Group], targets: list[Group], hosts: Hosts) -> None:
        self.faults: list[Fault] = []
        self.used: set[str] = set()
        self.casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self._sources, self._targets, self._hosts = sources, targets, hosts
        # A stack may have hundreds of rows, so they are looked up by their index.
        self._by_common: dict[str, dict[_RowOf, list[_Contribution]]] = {}
        for number, group in enumerate(sources):
            for tensor in group.tensors:
                for target in tensor.targets:
                    rows = self._by_common.setdefault(target.fqn, {})
                    one = _Contribution(number, tensor, target)
                    rows.setdefault(_row_of(target), []).append(one)
        self._holders: dict[Hashable, Holders] = {}
        self._routes: list[Route] = []
        self._numbers: dict[Hashable, int] = {}
        self._turns = 0

    def routes(self) -> list[Route]:
        """Return all routes."""
        self._refuse_repeated()
        proofs: dict[Hashable, tuple[str, ...] | None] = {}
        for number, group in enumerate(self._targets):
            for tensor in group.tensors:
                routes = self._routes_to(number, tensor)
                if routes is None:
                    continue
                key = number, tuple(routes)
                if key not in proofs:
                    proofs[key] = self._lacking(group, routes)
                details = proofs[key]
                if details is not None:
                    self.faults.append(Fault(tensor.key, "no source rank holds all of it", details))
        for route in self._routes:
            self._refuse_overlaps(route)
        return self._routes

    def _refuse_repeated(self) -> None:
        """Refuse common tensors that two source tensors make the same part of."""
        for fqn, rows in self._by_common.items():
            found = list(chain.from_iterable(rows.values()))
            if len(found) == 1:
                continue
            regions = {box for one in found for _, box in one.target.boxes}
            # Rows of one stack are equal or share nothing.
            stacks = {(one.target.shape, row.dims) for row, each in rows.items() for one in each}
            whole = _RowOf((), ()) in rows
            if whole or len(stacks) > 1 or len(regions) < len(found):
                keys = format_names([one.tensor.key for one in found], 4)
                self.faults.append(
                    Fault(
                        fqn,
                        f"the source makes it, or a row of it, more than once: of {keys}",
                        ("way out:     a rename that gives every tensor a key or row of its own",),
                    )
                )

    def _routes_to(self, group: int, tensor: Named) -> list[int] | None:
        """Return the numbers of the routes to a target tensor; None, and a fault, if it has none.

        Adds the tensor to each of them.
        """
        numbers: dict[int, None] = {}
        absent = []
        for target in tensor.targets:
            rows = self._by_common.get(target.fqn)
            if rows is None:
                absent.append(target.fqn)
                continue
            stack, (first, *_) = next(iter(rows.items()))
            if first.target.shape != target.shape:
                self.faults.append(
                    Fault(
                        tensor.key,
                        f"the source has {target.fqn} in shape {first.target.shape}, the target "
                        f"in shape {target.shape}",
                    )
                )
                return None
            row = _row_of(target)
            of_row = [rows.get(row, [])] if row.dims == stack.dims else rows.values()
            for source in chain.from_iterable(of_row):
                number = self._route(source, _Contribution(group, tensor, target))
                numbers[number] = None
        if absent:
            is_same = absent == [tensor.key]
            self.faults.append(
                Fault(
                    tensor.key,
                    "the source has no such tensor"
                    if is_same
                    else f"the source has no {format_names(absent, 4)}",
                    ("way out:     rename= where the names differ; tensors= without it",),
                )
            )
            return None
        return list(numbers)

    def _route(self, source: _Contribution, target: _Contribution) -> int:
        """Add a pair of tensors to its route; return the route's number."""
        self.used.add(source.tensor.key)
        if source.tensor.dtype != target.tensor.dtype:
            self.casts[target.tensor.key] = source.tensor.dtype, target.tensor.dtype
        key = (
            (source.group, source.target.dims, source.target.boxes),
            (target.group, target.target.dims, target.target.boxes),
        )
        number = self._numbers.setdefault(key, len(self._routes))
        if number == len(self._routes):
            holders = (
                self._held("source", self._sources, source),
                self._held("target", self._targets, target),
            )
            shapes = source.target, target.target
            self._routes.append(Route(*holders, *shapes, self._hosts, self._turns))
        self._routes[number].members.append((source.tensor, target.tensor, target.target.fqn))
        self._turns += 1
        return number

    def _held(self, side: str, groups: list[Group], one: _Contribution) -> Holders:
        key = side, one.group, one.target.dims, one.target.boxes
        if key not in self._holders:
            held = groups[one.group].held
            self._holders[key] = Holders(held, one.target, self._hosts)
        return self._holders[key]

    def _lacking(self, group: Group, numbers: list[int]) -> tuple[str, ...] | None:
        """Return the details of a fault where some rank does not receive all that it needs.

        Source boxes share no element, so a rank that receives as many elements as it needs
        receives each of them once.
        """
        routes = [self._routes[number] for number in numbers]
        size = self._hosts.size
        needed = np.zeros(size, np.int64)
        np.add.at(needed, group.held.ranks, numel(group.held.boxes))
        received = np.zeros(size, np.int64)
        for route in routes:
            received += route.received()
        short = np.flatnonzero(received != needed)
        if not len(short):
            return None
        rank = int(short[0])
        details = [
            f"rank {rank} receives {received[rank]:,} of {needed[rank]:,} elements"
            + (f"; {len(short):,} ranks lack some" if len(short) > 1 else "")
        ]
        details += [f"nobody has:  {hole}" for hole in _holes(routes, rank)]
        return tuple(details)

    def _refuse_overlaps(self, route: Route) -> None:
        pair = route.overlap()
        if pair is None:
            return
        shape = route.source_as.shape
        for source, _, _ in route.members:
            self.faults.append(
                Fault(
                    source.key,
                    "source ranks hold different boxes of it that share elements",
                    (
                        f"boxes:       {format_box(pair[0], shape)}, {format_box(pair[1], shape)}",
                        "likely:      an axis that cuts it is missing from the rules of some ranks",
                    ),
                )
            )


def _row_of(target: Target) -> _RowOf:
    """Return which row of a common tensor a tensor is."""
    dims = tuple([dim for dim, origin in enumerate(target.dims) if origin is None])
    return _RowOf(dims, tuple([target.boxes[0][1].offsets[dim] for dim in dims]))


def _holes(routes: list[Route], rank: int) -> list[str]:
    """Return the first boxes of a rank's tensor that no source rank holds, as text."""
    # By common tensor, to which each source tensor has a route.
    by_common: dict[Hashable, list[Route]] = {}
    for route in routes:
        key = route.target_as.dims, route.target_as.boxes
        by_common.setdefault(key, []).append(route)
    holes: list[str] = []
    for alike in by_common.values():
        filled = np.concatenate([route.source.boxes for route in alike])
        target, shape = alike[0].target, alike[0].target_as.shape
        for needed in as_boxes(target.boxes[target.box[target.rank == rank]]):
            holes += [format_box(hole, shape) for hole in uncovered(needed, filled, 2)]
    return holes[:2]
