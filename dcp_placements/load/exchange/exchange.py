"""Each byte is read by one rank of a replica set, and sent to the others when all have read.

The ranks claim their replica sets with the plan, so planning costs no collective of its own. After
the reads all ranks agree that none failed; only then are tensors broadcast, in batches, straight
into their destinations. All ranks go through sets, axes and sources in one order, so no two ranks
wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dcp_placements._torch import Metadata, MetadataIndex, ReadItem, global_rank, group_device
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, PlacementError, format_faults, format_ranks
from dcp_placements.load.exchange.broadcast import Buffers, Line, Sender
from dcp_placements.load.exchange.replica_sets import (
    ReplicaSet,
    Target,
    clipped,
    destinations,
    replica_sets,
)
from dcp_placements.load.exchange.shares import Claims, Share, Verdict, shares
from dcp_placements.report import LoadReport, Traffic


class ExchangeBroken(PlacementError):
    """An exchange that was cut off: a rank is gone, or too slow.

    Torch would gather it from all ranks, wait for the rank that is gone, and end with an error
    about that. It cannot be pickled: pickling raises it, at once.
    """

    def __reduce__(self) -> NoReturn:
        raise self


class Exchange:
    """One load's exchange, on one rank.

    Args:
        group: The process group that the load runs on; None for the default one.

    Attributes:
        verdict: The coordinator's answer.
        failure: What kept this rank from planning its reads.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._world = Line.of(group)
        self._sets: list[ReplicaSet] = []
        self._granted: list[tuple[ReplicaSet, list[list[Share]]]] = []
        self._buffers: Buffers = {}
        self.verdict = Verdict(False)
        self.failure: Exception | None = None

    def claims(
        self,
        state_dict: Mapping[str, Any],
        placing: Placing,
        metadata: Metadata,
        excluded: Callable[[str], bool],
    ) -> Claims:
        """Return what this rank could share, one claim per replica set.

        Args:
            state_dict: Flat, with the checkpoint's keys.
            placing: Its tensors' places.
            metadata: The checkpoint's.
            excluded: Whether this rank reads a key for itself alone.
        """
        world = self._world
        self._sets = replica_sets(state_dict, placing, metadata, world=world, excluded=excluded)
        claims = tuple([replicas.claim() for replicas in self._sets])
        return Claims(world.hash(""), len(world.ranks), world.position, claims)

    def share(self, items: Sequence[ReadItem], metadata: Metadata) -> list[ReadItem]:
        """Return this rank's part of the reads, by the sets that the coordinator granted."""
        reads: dict[tuple[str, int], list[ReadItem]] = {}
        for item in items:
            reads.setdefault((item.dest_index.fqn, item.dest_index.index or 0), []).append(item)
        granted = [
            (number, replicas)
            for number, replicas in zip(self.verdict.numbers, self._sets, strict=True)
            if number >= 0
        ]
        for _, replicas in sorted(granted, key=lambda each: each[0]):
            boxes = destinations(replicas, reads, metadata)
            parts = shares(boxes, math.prod(replicas.sizes))
            self._granted.append((replicas, parts))
            for target, split in zip(replicas.targets, parts, strict=True):
                own = [share for share in split if share.member == replicas.member]
                whole = reads[target.fqn, target.at]
                clips = [clipped(item, target.dim, share) for share in own for item in whole]
                reads[target.fqn, target.at] = [item for item in clips if item is not None]
        return [item for kept in reads.values() for item in kept]

    def finish(
        self,
        error: BaseException | None,
        lookup: Callable[[MetadataIndex], torch.Tensor],
        report: LoadReport,
    ) -> None:
        """Agree that all ranks have read, and send each other what was read.

        Args:
            error: What went wrong on this rank before.
            lookup: Returns a destination's memory on this rank.
            report: This rank's; takes in the bytes exchanged.

        Raises:
            PlacementError: On all ranks, where one could not read or is gone.
        """
        error = self.failure or error
        received = 0 if error is not None else self._received_nbytes()
        opens, nbytes = report.traffic.opens, report.traffic.storage_nbytes
        try:
            failed, *totals = self._summed(error is not None, opens, nbytes, received)
            failures = self._failures(error) if failed else []
        except Exception as cause:
            raise self._broken(cause, error) from cause
        if failures:
            raise PlacementError(self._refusal(failures)) from error
        try:
            with torch.no_grad():
                for replicas, parts in self._granted:
                    self._send(replicas, parts, lookup)
            self._summed(False)
        except Exception as cause:
            raise self._broken(cause, None) from cause
        self._buffers.clear()
        report.traffic = Traffic(opens, nbytes, received)
        report.all_traffic = Traffic(*totals)

    def _summed(self, *numbers: int) -> list[int]:
        device = group_device(self._group, torch.device("cpu"))
        tensor = torch.tensor([int(number) for number in numbers], device=device)
        dist.all_reduce(tensor, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def _failures(self, error: BaseException | None) -> list[Fault]:
        """Return a fault per rank that could not read; a collective call."""
        text = None
        if error is not None:
            kind = "" if isinstance(error, PlacementError) else f"{type(error).__name__}: "
            text = f"{kind}{error}".splitlines()
        texts: list[list[str] | None] = [None] * len(self._world.ranks)
        dist.all_gather_object(texts, text, group=self._group)
        return [
            Fault(
                "this load",
                f"could not read: {lines[0] if lines else 'no reason given'}",
                tuple([line.strip() for line in lines[1:]]),
                ranks=(rank,),
            )
            for rank, lines in zip(self._world.ranks, texts, strict=True)
            if lines is not None
        ]

    def _refusal(self, failures: Sequence[Fault]) -> str:
        """Return the text of the error; that of the first rank has the reasons of all."""
        opening = "nothing can be exchanged, since not all ranks could read"
        first = self._world.ranks[0]
        if global_rank() == first:
            return format_faults(opening, failures)
        return f"{opening}: rank {first} has the reasons"

    def _broken(self, cause: Exception, error: BaseException | None) -> ExchangeBroken:
        details = [f"torch says:  {(str(cause).splitlines() or [''])[0]}"]
        if error is not None:
            details.append(f"this rank:   {type(error).__name__}: {error}")
        details += [
            "likely:      a rank was killed (out of memory?), or takes longer than the timeout of "
            "the process group; the launcher tells which",
            "way out:     load again: tensors may be half filled now",
        ]
        ranks = format_ranks(self._world.ranks)
        fault = Fault("load", f"{ranks} could not exchange what they read", tuple(details))
        return ExchangeBroken(format_faults("the exchange was broken off", [fault]))

    def _received_nbytes(self) -> int:
        return sum(
            target.nbytes(share)
            for replicas, parts in self._granted
            for target, split in zip(replicas.targets, parts, strict=True)
            for share in split
            if share.member != replicas.member
        )

    def _send(
        self,
        replicas: ReplicaSet,
        parts: Sequence[Sequence[Share]],
        lookup: Callable[[MetadataIndex], torch.Tensor],
    ) -> None:
        """Broadcast a set's shares along one axis after the other.

        After the first axis each line has its own members' shares, after the second those of all
        lines that it crosses, and so on: a rank sends on what it has received by then.
        """
        by_reader: dict[tuple[int, ...], list[tuple[Target, Share]]] = {}
        for target, split in zip(replicas.targets, parts, strict=True):
            for share in split:
                reader = replicas.coordinate_of(share.member)
                by_reader.setdefault(reader, []).append((target, share))
        here = replicas.coordinate
        for axis, line in enumerate(replicas.lines):
            sender = Sender(line, self._buffers)
            for source in range(len(line.ranks)):
                sent = [
                    target.view(share, lookup)
                    for reader in sorted(by_reader)
                    if reader[axis] == source and reader[axis + 1 :] == here[axis + 1 :]
                    for target, share in by_reader[reader]
                ]
                sender.send(source, sent)
            sender.drain()
