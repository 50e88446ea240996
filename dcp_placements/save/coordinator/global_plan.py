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
from dcp_placements.layout.boxes import Ints
from dcp_placements.report import KeyReport, key_report
from dcp_placements.save.coordinator.agreement import (
    numbering_faults,
    unlike_digests,
    unlike_directories,
    unlike_steps,
)
from dcp_placements.save.coordinator.contents import Contents, held_beside_its_own
from dcp_placements.save.coordinator.faults import Faults
from dcp_placements.save.coordinator.owners import runs_of
from dcp_placements.save.items import Assignment, tensor_properties
from dcp_placements.save.local_plan import LocalPlan, Statement
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.table.cover import cover_of
from dcp_placements.table.table import OBJECT, Table, packed_ints
from dcp_placements.table.world import Piece, World


class Coordinator:
    """One save, seen from the coordinator.

    Args:
        plans: One per rank that takes part.
        size: Number of ranks that there are.
        complete: Whether the plans are all there are.
        own: As of ``World``.
        first: Keys of the plans that the metadata have first, in this order.
        waived: Patterns of keys whose numbers need not be complete.

    Attributes:
        plans: The same.
        complete: The same.
        statements: By plan, what the rank sends beside its keys.
        world: What the ranks hold.
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
        size: int,
        complete: bool,
        own: Mapping[bytes, Table] = MappingProxyType({}),
        first: Sequence[str] = (),
        waived: Sequence[re.Pattern[str]] = (),
    ) -> None:
        self.plans = plans
        self.complete = complete
        unpacked = cache(Statement.unpacked)
        self.statements = [unpacked(plan.statement) for plan in plans]
        like = [(plan.digest_kind, plan.is_folded) for plan in plans]
        self.world = World(plans, like, own)
        self.faults: list[Fault] = []
        self.conflicts: list[Fault] = []
        self.notes: list[Fault] = []
        self.uncompared = 0
        self.metadata: dict[str, Any] = dict.fromkeys(first)
        self.keys: dict[str, KeyReport] = {}
        self.objects: list[str] = []
        self.partial: dict[str, tuple[int, ...]] = {}
        self._size = size
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
                self.plans, self.statements, self.world.tables, self._waived
            )
            self.faults += unlike_steps(self.plans, self.statements)
            self.notes += unlike_directories(self.plans, self.statements)
        contents = Contents(self.world, self.plans, self._size)
        faults = Faults(self.world, contents, self.plans, self.statements, self._size)
        for piece in self.world.pieces:
            disagreement = faults.disagreement(piece)
            if disagreement:
                self.faults += disagreement
                continue
            piece.cover = cover_of(piece.ranks, piece.boxes)
            sound = piece.cover.is_whole if self.complete else piece.cover.is_apart
            if not sound(piece.group.shape):
                self.faults += faults.tiling(piece, complete=self.complete)
            self._compare(piece, contents, faults)
        self._compare_folded(contents, faults)

    def _compare(self, piece: Piece, contents: Contents, faults: Faults) -> None:
        box = held_beside_its_own(piece, self._size)
        if box is not None and 0 not in piece.group.shape:
            self.faults.append(faults.same_coordinate(piece, box))
            return
        self.uncompared += contents.uncompared(piece)
        if piece.cover.has_replicas:
            undigested = [fqn for fqn in piece.fqns if fqn in self._undigested]
            self.notes += [faults.undigested(fqn, self._undigested[fqn]) for fqn in undigested]
        differing = contents.differing_keys(piece)
        if piece.group.kind == OBJECT:
            self.notes += [faults.object_note(piece, position) for position in differing]
        else:
            self.conflicts += faults.conflicts(piece, differing)

    def _compare_folded(self, contents: Contents, faults: Faults) -> None:
        """Compare the keys that have no digests of their own, group by group."""
        for at, (table, by_group) in enumerate(
            zip(self.world.tables, self.world.rows, strict=True)
        ):
            for number, (group, held) in enumerate(zip(table.groups, by_group, strict=True)):
                if not contents.is_folded(at, number):
                    continue
                ranks = np.concatenate([rows.ranks for rows in held])
                cover = cover_of(ranks, np.concatenate([rows.boxes for rows in held]))
                fqns, holders = contents.folded_conflict(at, number, cover)
                if fqns and group.kind == OBJECT:
                    self.notes.append(faults.object_suspicion(fqns, holders))
                elif fqns:
                    self.conflicts.append(faults.suspicion(fqns, holders))

    def describe(self) -> None:
        """Make the metadata and the report of all keys."""
        lists: dict[Hashable, ChunkList] = {}
        ranks_of = cache(self._ranks_if_partial)
        for piece in self.world.pieces:
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
        counts = np.bincount(np.concatenate([self.world.members[table] for table in tables]))
        having = np.flatnonzero(counts)
        if len(having) == len(self.plans):
            return None
        return tuple([self.plans[at].rank for at in having.tolist()])

    def assign(self, *, lowest_rank: bool, save_id: bytes) -> list[Assignment]:
        """Return what each rank writes."""
        runs = runs_of(self.world.pieces, len(self.plans), lowest_rank=lowest_rank)
        packed = self._packed_runs(runs)
        split = [packed_ints(pieces) if pieces else b"" for pieces in self.world.split]
        assignments: list[Any] = [None] * len(self.plans)
        for cohort in self.world.cohorts:
            pieces = tuple([split[table] for table in cohort.tables])
            pieces = pieces if any(pieces) else ()
            for rank in cohort.ranks.tolist():
                assignments[rank] = Assignment(packed[rank], pieces, save_id)
        return assignments

    def _packed_runs(self, runs: list[Ints]) -> list[bytes]:
        """Return for each rank the runs of its tables, table after table, piece after piece."""
        # By cohort and table, the column of each piece of the table.
        columns: dict[tuple[int, int], dict[int, Ints]] = {}
        for piece, of_piece in zip(self.world.pieces, runs, strict=True):
            start = 0
            for source in piece.sources:
                for rows in source.rows:
                    stop = start + len(rows.ranks)
                    of_table = columns.setdefault((rows.cohort, source.table), {})
                    of_table[source.piece] = of_piece[start:stop]
                    start = stop
        packed = [b""] * len(self.plans)
        pack = cache(lambda row: packed_ints(np.frombuffer(row, np.int64)))
        for at, cohort in enumerate(self.world.cohorts):
            ranks = len(cohort.ranks)
            of_pieces = [
                column.reshape(ranks, -1)
                for table in cohort.tables
                for _, column in sorted(columns[at, table].items())
            ]
            matrix = np.concatenate(of_pieces or [np.zeros((ranks, 0), np.int64)], axis=1)
            for rank, row in zip(cohort.ranks.tolist(), matrix, strict=True):
                packed[rank] = pack(row.tobytes())
        return packed
