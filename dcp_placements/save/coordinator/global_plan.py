"""The coordinator's work: proof, comparison, assignment and metadata, piece by piece.

The boxes of all ranks that have a piece stand side by side in one integer array: equal boxes are
replicas, the different ones must tile the whole. The answer to a rank is, per piece and box,
the run of keys that it writes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorStorageMetadata,
)
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.report import KeyReport, key_report
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.contents import (
    differing_buckets,
    differing_keys,
    held_beside_its_own,
    rows_of,
    uncompared,
)
from dcp_placements.save.coordinator.cover import Cover, cover_of, makes_whole
from dcp_placements.save.coordinator.faults import Faults
from dcp_placements.save.coordinator.owners import BALANCE, SMALL_NBYTES, divide
from dcp_placements.save.coordinator.pieces import Piece, Pieces, pieces_of
from dcp_placements.save.items import Assignment, chunk_metadata, tensor_properties
from dcp_placements.save.key_table import OBJECT
from dcp_placements.save.local_plan import Ints, LocalPlan, packed_ints
from dcp_placements.save.statement import Statement


@dataclass(slots=True)
class WorldPlan:
    """What the plans of all ranks come to.

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
        statements: What each rank says beside its keys.
    """

    def __init__(self, plans: Sequence[LocalPlan], *, world: int, complete: bool) -> None:
        self.plans = plans
        self.complete = complete
        self.world_plan = WorldPlan()
        unpacked: dict[bytes, Statement] = {}
        for plan in plans:
            if plan.statement not in unpacked:
                unpacked[plan.statement] = Statement.unpacked(plan.statement)
        self.statements = [unpacked[plan.statement] for plan in plans]
        self.cohorts = Cohorts(plans, world)
        self.pieces = Pieces()
        self.covers: list[Cover] = []
        self._cover_memo: dict[tuple[bytes, bytes, tuple[int, ...]], tuple[Cover, bool]] = {}

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
                self.covers.append(_NOTHING)
                continue
            cover, whole = self._cover(*rows_of(self.cohorts, piece), piece.group.shape)
            self.covers.append(cover)
            if not whole:
                self.world_plan.faults += faults.tiling(piece)
            self._compare(piece, cover, faults)
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

    def _cover(self, plans: Ints, boxes: Ints, shape: tuple[int, ...]) -> tuple[Cover, bool]:
        """Return who holds what, and whether the boxes make the whole.

        Args:
            plans: By row, the position of the plan that holds a box.
            boxes: By row, offsets and sizes.
            shape: Of the whole tensor.
        """
        # A function of these values; most pieces lie like another one.
        key = (plans.tobytes(), boxes.tobytes(), shape)
        result = self._cover_memo.get(key)
        if result is None:
            cover = cover_of(plans, boxes, shape)
            whole = makes_whole(cover, shape, complete=self.complete)
            result = self._cover_memo[key] = cover, whole
        return result

    def _compare(self, piece: Piece, cover: Cover, faults: Faults) -> None:
        world_plan, group = self.world_plan, piece.group
        box = held_beside_its_own(self.cohorts, piece, cover)
        if box is not None and 0 not in group.shape:
            world_plan.faults.append(faults.same_coordinate(piece, cover, box))
            return
        world_plan.uncompared += uncompared(self.cohorts, piece, cover)
        for position in differing_keys(self.cohorts, piece, cover):
            if group.kind == OBJECT:
                world_plan.notes.append(faults.object_note(piece, position))
            else:
                world_plan.conflicts.append(faults.conflict(piece, position))

    def _compare_buckets(self, faults: Faults) -> None:
        for table, groups in enumerate(self.cohorts.groups):
            for number, held in enumerate(groups):
                if not any(rows.digests and rows.cohort.buckets for rows in held.rows):
                    continue
                group = self.cohorts.tables[table].groups[number]
                plans = np.concatenate([rows.plans for rows in held.rows])
                boxes = np.concatenate([rows.boxes for rows in held.rows])
                cover, _ = self._cover(plans, boxes, group.shape)
                for suspects in differing_buckets(self.cohorts, table, number, cover):
                    if group.kind == OBJECT:
                        self.world_plan.notes.append(faults.object_suspicion(suspects))
                    else:
                        self.world_plan.conflicts.append(faults.suspicion(suspects))

    def describe(self, left: Collection[str] = ()) -> None:
        """Make the metadata and the report of all keys."""
        world_plan = self.world_plan
        memo: dict[tuple[Any, ...], ChunkStorageMetadata] = {}
        lists: dict[tuple[tuple[int, ...], bytes], list[ChunkStorageMetadata]] = {}
        for piece, cover in zip(self.pieces.all, self.covers, strict=True):
            if piece.fqns[0] in left:
                continue
            ranks = {source.table: self.cohorts.members[source.table] for source in piece.sources}
            having = np.unique(np.concatenate(list(ranks.values())))
            if len(having) < len(self.plans):
                partial = tuple([self.plans[at].rank for at in having.tolist()])
                world_plan.partial.update(dict.fromkeys(piece.fqns, partial))
            group = piece.group
            if group.kind == OBJECT:
                world_plan.metadata.update({fqn: BytesStorageMetadata() for fqn in piece.fqns})
                world_plan.objects += piece.fqns
                continue
            # Without their shape, no boxes are the same bytes as that of a scalar.
            key = cover.boxes.shape, cover.boxes.tobytes()
            chunks = lists.get(key)
            if chunks is None:
                chunks = lists[key] = _chunks(cover, memo)
            stored = TensorStorageMetadata(
                tensor_properties(group), torch.Size(group.shape), chunks
            )
            numel = cover.numel
            unique = prod(group.shape) if self.complete else int(numel.sum())
            held = int(numel[cover.box_of].sum())
            report = key_report(group.shape, group.dtype, len(chunks), unique, held)
            world_plan.metadata.update(dict.fromkeys(piece.fqns, stored))
            world_plan.keys.update(dict.fromkeys(piece.fqns, report))

    def assign(self, *, lowest_rank: bool, left: Collection[str], save_id: bytes) -> None:
        """Assign to every rank what it writes."""
        runs = self._runs(lowest_rank, left)
        writes = np.zeros(len(self.plans), bool)
        for piece_runs, cover in zip(runs, self.covers, strict=True):
            writes[cover.ranks[piece_runs[:, 0] < piece_runs[:, 1]]] = True
        packed = self._packed_runs(runs)
        in_chunks = self._in_chunks(runs)
        writers = int(writes.sum())
        objects = tuple(self.world_plan.objects[:_MOST_NAMED])
        split = [packed_ints(split) if split else b"" for split in self.pieces.split]
        by_tables: dict[tuple[int, ...], tuple[bytes, ...]] = {}
        assignments: list[Assignment | None] = [None] * len(self.plans)
        for cohort in self.cohorts.cohorts:
            pieces = by_tables.get(cohort.tables)
            if pieces is None:
                pieces = tuple([split[table] for table in cohort.tables])
                pieces = by_tables[cohort.tables] = pieces if any(pieces) else ()
            for plan in cohort.plans.tolist():
                assignments[plan] = Assignment(
                    runs=packed[plan],
                    pieces=pieces,
                    writers=writers,
                    in_chunks=in_chunks,
                    objects=objects,
                    save_id=save_id,
                    place=plan,
                )
        self.world_plan.assignments = [one for one in assignments if one is not None]

    def _runs(self, lowest_rank: bool, left: Collection[str]) -> list[Ints]:
        """Return for each piece, by row, the run of keys that the rank writes of the box."""
        runs = [np.zeros((len(cover.ranks), 2), np.int64) for cover in self.covers]
        load = np.zeros(len(self.plans), np.int64)
        shared: dict[bytes, list[tuple[int, int, int]]] = {}
        total = 0
        for at, (piece, cover) in enumerate(zip(self.pieces.all, self.covers, strict=True)):
            if piece.fqns[0] in left:
                continue
            count = len(piece.fqns)
            of_key = cover.numel * piece.group.itemsize
            nbytes = of_key * count
            total += int(nbytes.sum())
            first = cover.order[cover.starts[:-1]]
            alone = (np.diff(cover.starts) == 1) | (lowest_rank or piece.group.kind == OBJECT)
            runs[at][first[alone], 1] = count
            np.add.at(load, cover.ranks[first[alone]], nbytes[alone])
            for box in np.flatnonzero(~alone).tolist():
                held = (int(of_key[box]), at, box)
                shared.setdefault(cover.holders(box).tobytes(), []).append(held)
        mean = total / max(len(self.plans), 1)
        limit = max(BALANCE * mean, float(load.max(initial=0)), SMALL_NBYTES)
        # The smaller a group of replicas, the fewer ranks can make up for what it writes.
        for group in sorted(shared, key=len):
            self._divide(np.frombuffer(group, np.int64), shared[group], runs, load, limit)
        return runs

    def _divide(
        self,
        holders: Ints,
        boxes: list[tuple[int, int, int]],
        runs: list[Ints],
        load: Ints,
        limit: float,
    ) -> None:
        """Divide what a replica group holds among its ranks.

        Args:
            holders: Positions of their plans.
            boxes: Bytes of one key, position of the piece, and the box there.
            runs: What ``_runs`` returns.
            load: Bytes that each rank writes already.
            limit: Bytes that none ought to write more than.
        """
        # The smallest stay together, with the lowest rank.
        boxes = sorted(boxes)
        pieces = [(len(self.pieces.all[at].fqns), nbytes) for nbytes, at, _ in boxes]
        divided = divide(pieces, load[holders].tolist(), limit)
        for (nbytes, at, box), cuts in zip(boxes, divided, strict=True):
            cover = self.covers[at]
            rows = cover.order[cover.starts[box] :][: len(cuts) - 1]
            runs[at][rows, 0] = cuts[:-1]
            runs[at][rows, 1] = cuts[1:]
            load[holders[: len(cuts) - 1]] += np.diff(cuts) * nbytes

    def _packed_runs(self, runs: list[Ints]) -> list[bytes]:
        """Return for each rank the runs of its tables, table after table, piece after piece."""
        starts = [0] * len(self.pieces.all)
        packed = [b""] * len(self.plans)
        # Rows of a piece stand source after source, and cohort after cohort within each.
        parts: dict[tuple[int, int, int], Ints] = {}
        for at, piece in enumerate(self.pieces.all):
            for source in piece.sources:
                for number, rows in enumerate(self.cohorts.groups[source.table][source.group].rows):
                    stop = starts[at] + len(rows.plans)
                    parts[source.table, source.number, number] = runs[at][starts[at] : stop]
                    starts[at] = stop
        seen = [0] * len(self.cohorts.tables)
        for cohort in self.cohorts.cohorts:
            ranks = len(cohort.plans)
            columns = []
            for table in cohort.tables:
                for number in range(len(self.pieces.groups[table])):
                    columns.append(parts[table, number, seen[table]].reshape(ranks, -1))
                seen[table] += 1
            matrix = np.concatenate(columns, axis=1) if columns else np.zeros((ranks, 0), np.int64)
            memo: dict[bytes, bytes] = {}
            for plan, row in zip(cohort.plans.tolist(), matrix, strict=True):
                key = row.tobytes()
                found = memo.get(key)
                if found is None:
                    found = memo[key] = packed_ints(row)
                packed[plan] = found
        return packed

    def _in_chunks(self, runs: list[Ints]) -> tuple[tuple[str, int, int], ...]:
        """Return some keys of which one rank writes several chunks."""
        found = []
        for piece, cover, piece_runs in zip(self.pieces.all, self.covers, runs, strict=True):
            written = piece_runs[:, 0] < piece_runs[:, 1]
            if not written.any():
                continue
            counts = np.bincount(cover.ranks[written])
            most = int(counts.argmax())
            if counts[most] > 1:
                mine = piece_runs[written & (cover.ranks == most)]
                for position in range(int(mine[:, 0].min()), int(mine[:, 1].max())):
                    inside = int(((mine[:, 0] <= position) & (position < mine[:, 1])).sum())
                    if inside > 1:
                        found.append((piece.fqns[position], self.plans[most].rank, inside))
                        break
            if len(found) == _MOST_NAMED:
                break
        return tuple(found)


_MOST_NAMED = 8
_NO_INTS = np.zeros(0, np.int64)
_NOTHING = Cover(np.zeros((0, 0), np.int64), _NO_INTS, _NO_INTS, _NO_INTS, np.zeros(1, np.int64))


def _chunks(
    cover: Cover, memo: dict[tuple[Any, ...], ChunkStorageMetadata]
) -> list[ChunkStorageMetadata]:
    """Return torch's form of the boxes; equal ones of all pieces are one object."""
    chunks = []
    for box in cover.as_boxes():
        chunk = memo.get(box)
        if chunk is None:
            chunk = memo[box] = chunk_metadata(box)
        chunks.append(chunk)
    return chunks
