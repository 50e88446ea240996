"""The coordinator's work: proof, comparison, assignment and metadata, piece by piece.

The boxes of all ranks that have a piece stand side by side in one integer array: equal boxes are
replicas, the different ones must tile the whole. The answer to a rank is, per piece and box,
the run of keys that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import BytesStorageMetadata, TensorStorageMetadata
from dcp_placements.errors import Fault
from dcp_placements.report import KeyReport, key_report
from dcp_placements.save.coordinator.agreement import (
    numbering_faults,
    unlike_digests,
    unlike_directories,
    unlike_steps,
)
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.contents import (
    differing_keys,
    folded_conflict,
    held_beside_its_own,
    uncompared,
)
from dcp_placements.save.coordinator.cover import Covers
from dcp_placements.save.coordinator.faults import Faults
from dcp_placements.save.coordinator.owners import runs_of
from dcp_placements.save.coordinator.pieces import Piece, Pieces, pieces_of
from dcp_placements.save.items import Assignment, tensor_properties
from dcp_placements.save.key_table import OBJECT, KeyTable
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.save.packing import Ints, packed_ints
from dcp_placements.save.rank_notes import Statement
from dcp_placements.storage.metadata.chunk_list import ChunkList


class Coordinator:
    """One save, seen from the coordinator.

    Args:
        plans: One per rank that takes part.
        world: Number of ranks that there are.
        complete: Whether the plans are all there are.
        own: As of ``Cohorts``.
        first: Keys of the plans that the metadata have first, in this order.
        waived: Patterns of keys whose numbers need not be complete.

    Attributes:
        plans: The same.
        complete: The same.
        statements: By plan, what the rank sends beside its keys.
        cohorts: The plans side by side.
        pieces: The groups of all ranks.
        faults: What cannot be saved.
        conflicts: Replicas that differ.
        notes: What is saved with a warning.
        uncompared: Keys of which replicas were not compared, because their digests are folded and
            the ranks that hold them have other keys beside them.
        metadata: By key; None before it is made.
        keys: The report on each tensor.
        objects: Keys that are no tensors.
        partial: Ranks that have a key, where not all have it.
    """

    def __init__(
        self,
        plans: Sequence[LocalPlan],
        *,
        world: int,
        complete: bool,
        own: Mapping[bytes, KeyTable] = MappingProxyType({}),
        first: Sequence[str] = (),
        waived: Sequence[re.Pattern[str]] = (),
    ) -> None:
        self.plans = plans
        self.complete = complete
        unpacked = cache(Statement.unpacked)
        self.statements = [unpacked(plan.statement) for plan in plans]
        self.cohorts = Cohorts(plans, world, own)
        self.pieces = Pieces()
        self.faults: list[Fault] = []
        self.conflicts: list[Fault] = []
        self.notes: list[Fault] = []
        self.uncompared = 0
        self.metadata: dict[str, Any] = dict.fromkeys(first)
        self.keys: dict[str, KeyReport] = {}
        self.objects: list[str] = []
        self.partial: dict[str, tuple[int, ...]] = {}
        self._covers = Covers(complete)
        self._undigested: dict[str, list[int]] = {}
        for at, plan in enumerate(plans):
            for fqn in plan.undigested:
                self._undigested.setdefault(fqn, []).append(at)
        self._waived = waived

    def plan(self, *, lowest_rank: bool = False, save_id: bytes = b"") -> list[Assignment]:
        """Return what each rank writes, with the metadata made; nothing where there are faults.

        Args:
            lowest_rank: Leave every replica to its lowest rank.
            save_id: Names the save.
        """
        self.check()
        if self.faults:
            return []
        self.describe()
        return self.assign(lowest_rank=lowest_rank, save_id=save_id)

    def check(self) -> None:
        """Prove that the plans make a checkpoint, and compare replicas."""
        self.faults += unlike_digests(self.plans)
        if self.faults:
            return
        if self.complete:
            self.faults += numbering_faults(
                self.plans, self.statements, self.cohorts.tables, self._waived
            )
            self.faults += unlike_steps(self.plans, self.statements)
            self.notes += unlike_directories(self.plans, self.statements)
        self.pieces = pieces_of(self.cohorts)
        faults = Faults(self.cohorts, self.statements, self.complete)
        for piece in self.pieces.all:
            disagreement = faults.disagreement(piece)
            if disagreement:
                self.faults += disagreement
                continue
            piece.cover, is_whole = self._covers.of(piece.plans, piece.boxes, piece.group.shape)
            if not is_whole:
                self.faults += faults.tiling(piece)
            self._compare(piece, faults)
        self._compare_folded(faults)

    def _compare(self, piece: Piece, faults: Faults) -> None:
        box = held_beside_its_own(piece, self.cohorts.world)
        if box is not None and 0 not in piece.group.shape:
            self.faults.append(faults.same_coordinate(piece, box))
            return
        self.uncompared += uncompared(piece)
        if piece.cover.has_replicas:
            undigested = [fqn for fqn in piece.fqns if fqn in self._undigested]
            self.notes += [faults.undigested(fqn, self._undigested[fqn]) for fqn in undigested]
        for position in differing_keys(piece):
            if piece.group.kind == OBJECT:
                self.notes.append(faults.object_note(piece, position))
            else:
                self.conflicts.append(faults.conflict(piece, position))

    def _compare_folded(self, faults: Faults) -> None:
        """Compare the keys that have no digests of their own, group by group."""
        for table, by_group in zip(self.cohorts.tables, self.cohorts.rows, strict=True):
            for number, (group, held) in enumerate(zip(table.groups, by_group, strict=True)):
                if not any(rows.slots is not None and rows.slots.folded for rows in held):
                    continue
                plans = np.concatenate([rows.plans for rows in held])
                boxes = np.concatenate([rows.boxes for rows in held])
                boxes = boxes.reshape(len(boxes), 2, len(group.shape))
                cover, _ = self._covers.of(plans, boxes, group.shape)
                fqns, holders = folded_conflict(held, table.keys(number), cover)
                if fqns and group.kind == OBJECT:
                    self.notes.append(faults.object_suspicion(fqns, holders))
                elif fqns:
                    self.conflicts.append(faults.suspicion(fqns, holders))

    def describe(self) -> None:
        """Make the metadata and the report of all keys."""
        lists: dict[Hashable, ChunkList] = {}
        ranks_of = cache(self._ranks_if_partial)
        for piece in self.pieces.all:
            group, cover = piece.group, piece.cover
            ranks = ranks_of(tuple([source.table for source in piece.sources]))
            if ranks is not None:
                self.partial.update(dict.fromkeys(piece.fqns, ranks))
            if group.kind == OBJECT:
                self.metadata.update({fqn: BytesStorageMetadata() for fqn in piece.fqns})
                self.objects += piece.fqns
                continue
            # Without their shape, no boxes are the same bytes as that of a scalar.
            key = cover.boxes.shape, cover.boxes.tobytes()
            if key not in lists:
                lists[key] = ChunkList(cover.boxes)
            stored = TensorStorageMetadata(
                tensor_properties(group),
                torch.Size(group.shape),
                lists[key],  # type: ignore[arg-type]
            )
            unique = prod(group.shape) if self.complete else int(cover.numel.sum())
            held = int(cover.numel[cover.box_of].sum())
            report = key_report(group.shape, group.dtype, len(lists[key]), unique, held)
            self.metadata.update(dict.fromkeys(piece.fqns, stored))
            self.keys.update(dict.fromkeys(piece.fqns, report))

    def _ranks_if_partial(self, tables: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the ranks that have any of some tables; None where all have."""
        # np.unique would import numpy.ma, which takes longer than all of this.
        counts = np.bincount(np.concatenate([self.cohorts.members[table] for table in tables]))
        having = np.flatnonzero(counts)
        if len(having) == len(self.plans):
            return None
        return tuple([self.plans[at].rank for at in having.tolist()])

    def assign(self, *, lowest_rank: bool, save_id: bytes) -> list[Assignment]:
        """Return what each rank writes."""
        runs = runs_of(self.pieces.all, len(self.plans), lowest_rank=lowest_rank)
        packed = self._packed_runs(runs)
        split = [packed_ints(pieces) if pieces else b"" for pieces in self.pieces.split]
        assignments: list[Any] = [None] * len(self.plans)
        for cohort in self.cohorts.cohorts:
            pieces = tuple([split[table] for table in cohort.tables])
            pieces = pieces if any(pieces) else ()
            for plan in cohort.plans.tolist():
                assignments[plan] = Assignment(packed[plan], pieces, save_id)
        return assignments

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
