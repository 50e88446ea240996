"""The coordinator's work: proof, comparison, assignment and metadata, piece by piece.

The boxes of all ranks that have a piece stand side by side in one integer array: equal boxes are
replicas, the different ones must tile the whole. The answer to a rank is, per piece and box,
the run of keys that it writes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import BytesStorageMetadata, TensorStorageMetadata
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.report import KeyReport, key_report
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.contents import (
    differing_buckets,
    differing_keys,
    held_beside_its_own,
    uncompared,
)
from dcp_placements.save.coordinator.cover import Covers
from dcp_placements.save.coordinator.faults import Faults
from dcp_placements.save.coordinator.owners import BALANCE, SMALL_NBYTES, divide
from dcp_placements.save.coordinator.pieces import Piece, Pieces, pieces_of
from dcp_placements.save.items import Assignment, tensor_properties
from dcp_placements.save.key_table import OBJECT
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.save.packing import Ints, packed_ints
from dcp_placements.save.rank_notes import Statement
from dcp_placements.storage.metadata.chunk_list import ChunkList


@dataclass(slots=True)
class WorldPlan:
    """One plan of all ranks.

    Attributes:
        assignments: One per rank.
        metadata: By key.
        keys: The report on each tensor.
        objects: Keys that are no tensors.
        partial: Ranks that have a key, where not all have it.
        uncompared: Keys of which replicas were not compared, because their digests are folded and
            the ranks that hold them have other keys beside them.
        faults: What cannot be saved.
        conflicts: Replicas that differ.
        notes: What is saved with a warning.
    """

    assignments: list[Assignment] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, KeyReport] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    partial: dict[str, tuple[int, ...]] = field(default_factory=dict)
    uncompared: int = 0
    faults: list[Fault] = field(default_factory=list)
    conflicts: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)


class Coordinator:
    """One save, seen from the coordinator.

    Args:
        plans: One per rank that takes part.
        world: Number of ranks that there are.
        complete: Whether the plans are all there are.

    Attributes:
        world_plan: The plan that they make.
        statements: By plan, what the rank sends beside its keys.
        cohorts: The plans side by side.
        pieces: The groups of all ranks.
    """

    def __init__(self, plans: Sequence[LocalPlan], *, world: int, complete: bool) -> None:
        self.plans = plans
        self.complete = complete
        self.world_plan = WorldPlan()
        unpacked = cache(Statement.unpacked)
        self.statements = [unpacked(plan.statement) for plan in plans]
        self.cohorts = Cohorts(plans, world)
        self.pieces = Pieces()
        self._covers = Covers(complete)

    def plan(
        self, *, left: Collection[str] = (), lowest_rank: bool = False, save_id: bytes = b""
    ) -> WorldPlan:
        """Return the plan of a save: who writes what, and the metadata; or what is wrong.

        Args:
            left: For a rank that plans alone: keys that it leaves to other ranks.
            lowest_rank: Leave every replica to its lowest rank.
            save_id: Names the save.
        """
        self.check(left)
        if not self.world_plan.faults:
            self.describe(left)
            self.assign(lowest_rank=lowest_rank, left=left, save_id=save_id)
        return self.world_plan

    def check(self, left: Collection[str] = ()) -> None:
        """Prove that the plans make a checkpoint, and compare replicas."""
        unlike = self._unlike_digests()
        if unlike is not None:
            self.world_plan.faults.append(unlike)
            return
        self.pieces = pieces_of(self.cohorts, left)
        faults = Faults(self.cohorts, self.statements, self.complete)
        for piece in self.pieces.all:
            disagreement = faults.disagreement(piece)
            if disagreement:
                self.world_plan.faults += disagreement
                continue
            piece.cover, whole = self._covers.of(piece.plans, piece.boxes, piece.group.shape)
            if not whole:
                self.world_plan.faults += faults.tiling(piece)
            self._compare(piece, faults)
        self._compare_buckets(faults)

    def _unlike_digests(self) -> Fault | None:
        kinds: dict[str, list[int]] = {}
        for plan in self.plans:
            kinds.setdefault(plan.digest_kind, []).append(plan.rank)
        if len(kinds) < 2:
            return None
        text = "; ".join(f"{kind!r} on {format_ranks(ranks)}" for kind, ranks in kinds.items())
        return Fault(
            "this save",
            f"the ranks do not agree on digests=: {text}",
            ("way out:     give every rank's PlacementSavePlanner the same options",),
        )

    def _compare(self, piece: Piece, faults: Faults) -> None:
        world_plan, group = self.world_plan, piece.group
        box = held_beside_its_own(piece, self.cohorts.world)
        if box is not None and 0 not in group.shape:
            world_plan.faults.append(faults.same_coordinate(piece, box))
            return
        world_plan.uncompared += uncompared(piece)
        for position in differing_keys(piece):
            if group.kind == OBJECT:
                world_plan.notes.append(faults.object_note(piece, position))
            else:
                world_plan.conflicts.append(faults.conflict(piece, position))

    def _compare_buckets(self, faults: Faults) -> None:
        """Compare the keys that have no digests of their own, group by group."""
        for table, by_group in zip(self.cohorts.tables, self.cohorts.rows, strict=True):
            for number, (group, held) in enumerate(zip(table.groups, by_group, strict=True)):
                if not any(rows.slots is not None and rows.slots.folded for rows in held):
                    continue
                plans = np.concatenate([rows.plans for rows in held])
                boxes = np.concatenate([rows.boxes for rows in held])
                cover, _ = self._covers.of(plans, boxes, group.shape)
                for suspects in differing_buckets(held, table.keys(number), cover):
                    if group.kind == OBJECT:
                        self.world_plan.notes.append(faults.object_suspicion(suspects))
                    else:
                        self.world_plan.conflicts.append(faults.suspicion(suspects))

    def describe(self, left: Collection[str] = ()) -> None:
        """Make the metadata and the report of all keys."""
        world_plan = self.world_plan
        lists: dict[Hashable, Any] = {}
        partial: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        for piece in self.pieces.all:
            if piece.fqns[0] in left:
                continue
            tables = tuple([source.table for source in piece.sources])
            if tables not in partial:
                partial[tables] = self._ranks_if_partial(tables)
            ranks = partial[tables]
            if ranks is not None:
                world_plan.partial.update(dict.fromkeys(piece.fqns, ranks))
            group, cover = piece.group, piece.cover
            if group.kind == OBJECT:
                world_plan.metadata.update({fqn: BytesStorageMetadata() for fqn in piece.fqns})
                world_plan.objects += piece.fqns
                continue
            # Without their shape, no boxes are the same bytes as that of a scalar.
            key = cover.boxes.shape, cover.boxes.tobytes()
            if key not in lists:
                ndim = len(group.shape)
                lists[key] = ChunkList(cover.boxes[:, :ndim], cover.boxes[:, ndim:])
            stored = TensorStorageMetadata(
                tensor_properties(group), torch.Size(group.shape), lists[key]
            )
            unique = prod(group.shape) if self.complete else int(cover.numel.sum())
            held = int(cover.numel[cover.box_of].sum())
            report = key_report(group.shape, group.dtype, len(lists[key]), unique, held)
            world_plan.metadata.update(dict.fromkeys(piece.fqns, stored))
            world_plan.keys.update(dict.fromkeys(piece.fqns, report))

    def _ranks_if_partial(self, tables: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the ranks that have any of some tables; None where all have."""
        # np.unique would import numpy.ma, which takes longer than all of this.
        counts = np.bincount(np.concatenate([self.cohorts.members[table] for table in tables]))
        having = np.flatnonzero(counts)
        if len(having) == len(self.plans):
            return None
        return tuple([self.plans[at].rank for at in having.tolist()])

    def assign(self, *, lowest_rank: bool, left: Collection[str], save_id: bytes) -> None:
        """Assign to every rank what it writes."""
        runs = self._runs(lowest_rank, left)
        writes = np.zeros(len(self.plans), bool)
        for piece, piece_runs in zip(self.pieces.all, runs, strict=True):
            writes[piece.plans[piece_runs[:, 0] < piece_runs[:, 1]]] = True
        packed = self._packed_runs(runs)
        in_chunks = self._in_chunks(runs)
        writers = int(writes.sum())
        objects = tuple(self.world_plan.objects[:_MOST_NAMED])
        split = [packed_ints(split) if split else b"" for split in self.pieces.split]
        assignments: list[Any] = [None] * len(self.plans)
        for cohort in self.cohorts.cohorts:
            pieces = tuple([split[table] for table in cohort.tables])
            pieces = pieces if any(pieces) else ()
            for plan in cohort.plans.tolist():
                assignments[plan] = Assignment(
                    packed[plan], pieces, writers, in_chunks, objects, save_id, place=plan
                )
        self.world_plan.assignments = assignments

    def _runs(self, lowest_rank: bool, left: Collection[str]) -> list[Ints]:
        """Return for each piece, by row, the run of keys that the rank writes of the box."""
        pieces = self.pieces.all
        covers = [piece.cover for piece in pieces]
        ends = np.cumsum([len(cover.ranks) for cover in covers])
        # Rows and boxes of all pieces, one after another.
        ranks = np.concatenate([_NO_INTS, *[cover.ranks for cover in covers]])
        order = np.concatenate(
            [
                _NO_INTS,
                *[
                    cover.order + end - len(cover.order)
                    for cover, end in zip(covers, ends, strict=True)
                ],
            ]
        )
        holders = np.concatenate([_NO_INTS, *[np.diff(cover.starts) for cover in covers]])
        starts = np.cumsum(holders) - holders
        of_piece = np.repeat(np.arange(len(pieces)), [len(cover.boxes) for cover in covers])
        of_key = [
            cover.numel * piece.group.itemsize for piece, cover in zip(pieces, covers, strict=True)
        ]
        nbytes = np.concatenate([_NO_INTS, *of_key])
        is_left = np.array([piece.fqns[0] in left for piece in pieces], bool)[of_piece]
        is_object = np.array([piece.group.kind == OBJECT for piece in pieces], bool)[of_piece]
        counts = np.where(is_left, 0, np.array([len(p.fqns) for p in pieces], np.int64)[of_piece])
        runs = np.zeros((len(ranks), 2), np.int64)
        load = np.zeros(len(self.plans), np.int64)
        alone = (holders == 1) | lowest_rank | is_object
        first = order[starts[alone]]
        runs[first, 1] = counts[alone]
        np.add.at(load, ranks[first], (counts * nbytes)[alone])
        mean = int((counts * nbytes).sum()) / max(len(self.plans), 1)
        limit = max(BALANCE * mean, float(load.max(initial=0)), SMALL_NBYTES)
        shared: dict[bytes, list[int]] = {}
        in_order = ranks[order]
        for box in np.flatnonzero(~alone & ~is_left).tolist():
            group = in_order[starts[box] : starts[box] + holders[box]]
            shared.setdefault(group.tobytes(), []).append(box)
        divided = cache(divide)
        # The smaller a group of replicas, the fewer ranks can make up for what it writes.
        for key in sorted(shared, key=len):
            group = np.frombuffer(key, np.int64)
            boxes = np.array(shared[key])
            # The smallest stay together, with the lowest rank.
            boxes = boxes[np.argsort(nbytes[boxes], kind="stable")]
            shares = tuple(zip(counts[boxes].tolist(), nbytes[boxes].tolist(), strict=True))
            cuts = np.array(divided(shares, tuple(load[group].tolist()), limit))
            rows = order[starts[boxes][:, None] + np.arange(cuts.shape[1] - 1)]
            runs[rows, 0] = cuts[:, :-1]
            runs[rows, 1] = cuts[:, 1:]
            load[group[: cuts.shape[1] - 1]] += nbytes[boxes] @ np.diff(cuts, axis=1)
        return np.split(runs, ends[:-1]) if pieces else []

    def _packed_runs(self, runs: list[Ints]) -> list[bytes]:
        """Return for each rank the runs of its tables, table after table, piece after piece."""
        columns: dict[tuple[int, int, int], Ints] = {}
        for piece, piece_runs in zip(self.pieces.all, runs, strict=True):
            start = 0
            for source in piece.sources:
                for rows in source.rows:
                    stop = start + len(rows.plans)
                    columns[rows.cohort, source.table, source.number] = piece_runs[start:stop]
                    start = stop
        packed = [b""] * len(self.plans)
        pack = cache(lambda row: packed_ints(np.frombuffer(row, np.int64)))
        for cohort in self.cohorts.cohorts:
            ranks = len(cohort.plans)
            of_pieces = [
                columns[cohort.number, table, number].reshape(ranks, -1)
                for table in cohort.tables
                for number in range(self.pieces.counts[table])
            ]
            matrix = np.concatenate(of_pieces or [np.zeros((ranks, 0), np.int64)], axis=1)
            for plan, row in zip(cohort.plans.tolist(), matrix, strict=True):
                packed[plan] = pack(row.tobytes())
        return packed

    def _in_chunks(self, runs: list[Ints]) -> tuple[tuple[str, int, int], ...]:
        """Return some keys of which one rank writes several chunks."""
        named = []
        for piece, piece_runs in zip(self.pieces.all, runs, strict=True):
            written = piece_runs[:, 0] < piece_runs[:, 1]
            if not written.any():
                continue
            counts = np.bincount(piece.plans[written])
            most = int(counts.argmax())
            if counts[most] > 1:
                mine = piece_runs[written & (piece.plans == most)]
                for position in range(int(mine[:, 0].min()), int(mine[:, 1].max())):
                    inside = int(((mine[:, 0] <= position) & (position < mine[:, 1])).sum())
                    if inside > 1:
                        named.append((piece.fqns[position], self.plans[most].rank, inside))
                        break
            if len(named) == _MOST_NAMED:
                break
        return tuple(named)


_MOST_NAMED = 8
_NO_INTS = np.zeros(0, np.int64)
