"""The coordinator's half of a save: the ranks' plans are proved, compared, and assigned.

The boxes of all ranks that have a piece stand side by side in one integer array: equal boxes are
replicas, and the different ones must tile the whole. The answer to a rank says of each key and box
whether the rank writes it. The coordinator needs no tensor data. Two ep ranks that hold half of the
experts each, and both hold a norm::

    piece                        boxes                       a rank writes keys
    experts.w1, experts.w2       [0:2, :] on rank 0          0: both
                                 [2:4, :] on rank 1          1: both
    norm                         [0:3] on ranks 0 and 1      0: norm; 1: none
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements import _torch
from dcp_placements.errors import (
    Fault,
    format_faults,
    raise_faults,
)
from dcp_placements.layout.boxes import Ints
from dcp_placements.layout.sharding import Cuts
from dcp_placements.names.known_names import EXPERT_AXIS, NAMES_EXPERT
from dcp_placements.names.optimizer_state import OptimizerStates, states_among
from dcp_placements.report import KeyReport, SaveReport, Shapes
from dcp_placements.rules.named_axes import NamedAxes, named_axes_of
from dcp_placements.rules.patterns import (
    compile_pattern,
    matched_nowhere,
    matches_any,
    unmatched_faults,
)
from dcp_placements.save.copied_states import copied_states
from dcp_placements.save.local_plan import COPIED, Assignment, LocalPlan
from dcp_placements.save.replica_conflicts import (
    conflicts_of,
    drift_faults,
    reduced_axes,
    undigested,
    with_declaration,
)
from dcp_placements.short_text import format_names, format_nbytes, format_ranks
from dcp_placements.storage.provenance import (
    DIFFERED,
    UNCOMPARED,
    packed_doubts,
    packed_record,
)
from dcp_placements.storage.torch_metadata import (
    PORTABLE_PROPERTIES,
    PROPERTIES,
    ChunkList,
)
from dcp_placements.table.digests import digests_by_cell
from dcp_placements.table.families import numbering_faults
from dcp_placements.table.must_agree import disagreements
from dcp_placements.table.owners import runs_of
from dcp_placements.table.proof_faults import ALL_RANKS, Holders, is_uneven, proof_faults
from dcp_placements.table.prove import Compared, prove
from dcp_placements.table.statement import listed_parameters, stated
from dcp_placements.table.table import OBJECT, Group
from dcp_placements.table.whole import WholeModel, compare_with_whole
from dcp_placements.table.world import NO_RULE, Piece, World

logger = logging.getLogger(__name__)


Copies = str | int | Sequence[str]
"""``"off"``, bytes, or patterns, as for the planner."""

NOT_PLACED = "cannot be placed in the checkpoint"


THIS_SAVE = "this save"
"""What a waiver names where no key is meant, but that a rank saves by itself."""


class Coordinator:
    """One save, seen from the coordinator.

    Args:
        plans: One per rank that takes part.
        size: Number of ranks in all.
        waived: The planner's ``waive=``.
        strict: Whether replicas that differ refuse the save.
        whole: The unsharded model, which the keys and shapes are compared with.
        meshes: Meshes of the state dict and of the declaration, beside those that are recorded.
        axes: By rank, position and size of axes that its plan does not have.
        has_rename: Whether keys are renamed.

    Attributes:
        plans: The plans.
        complete: Whether all ranks are seen. A rank that saves by itself (``no_dist=True``) may
            hold shards, and does not see those of others.
        stated: The different statements with their ranks, by their packed form.
        statements: The different statements.
        world: The tables and boxes of the ranks.
        report: The report on all ranks together.
    """

    def __init__(
        self,
        plans: Sequence[LocalPlan],
        *,
        size: int,
        waived: Mapping[str, str],
        strict: bool,
        whole: WholeModel | None = None,
        meshes: Sequence[Any] = (),
        axes: Sequence[Mapping[str, tuple[int, int]]] = (),
        has_rename: bool = False,
    ) -> None:
        self.plans = plans
        self._has_rename = has_rename
        self.complete = len(plans) > 1 or size == 1
        self._size, self._whole = size, whole
        self._meshes, self._more_axes = meshes, axes
        self.stated = stated([(plan.rank, plan.statement) for plan in plans])
        self.statements = [statement for statement, _ in self.stated.values()]
        self.world = World([plan.sent for plan in plans])
        self.report = SaveReport(ranks=len(plans), waived=dict(waived))
        self._strict = strict
        self._faults: list[Fault] = []
        self._notes: list[Fault] = []
        # The keys of replicas that are saved although they differ, or were not compared.
        self._doubts: dict[str, set[str]] = {DIFFERED: set(), UNCOMPARED: set()}
        self._undigested: dict[str, list[int]] = {}
        # Whether there are faults that no rule mends.
        self._open = False
        # What else would be said of keys whose copies drifted apart.
        self._conflicts: dict[str, Fault] = {}
        for position, plan in enumerate(plans):
            for fqn in plan.undigested:
                self._undigested.setdefault(fqn, []).append(position)

    def prove(self) -> None:
        """Prove that the plans make a checkpoint, and compare replicas.

        Raises:
            PlacementError: All faults.
        """
        if len(self.stated) > 1:
            self._faults, self._notes = disagreements(self.stated.values(), THIS_SAVE)
            self._open = bool(self._faults)
        waived = [compile_pattern(pattern) for pattern in self.report.waived]
        if self.complete and not self._faults:
            given = [each.numberings for each in self.statements if each.numberings]
            if given:
                self._faults += numbering_faults(self.world, given, waived)
        if not self._faults:
            self._prove_boxes()
        if self._whole is not None:
            compared = compare_with_whole(
                self._whole, self.world, self._states, waived, complete=self.complete
            )
            self.report.whole = compared.text
            self._faults += compared.faults
            self._notes += compared.notes
        matches = [
            patterns
            for statement in self.statements
            for patterns in (statement.matched, statement.declared)
        ]
        # A rank that plans alone cannot see what the patterns match on others.
        if self.complete and (unmatched := matched_nowhere(matches)):
            self.report.unmatched = unmatched
            keys = [fqn for piece in self.world.pieces for fqn in piece.fqns]
            # With the faults, too: a mistake in a pattern is their likely cause.
            (self._faults or self._notes).extend(unmatched_faults(unmatched, keys))
        if self._faults:
            ending, is_declared = self._handed_over()
            faults = self._faults
            if is_declared:
                faults = [self._conflicts.get(fault.fqn, fault) for fault in faults]
                faults = [with_declaration(fault) for fault in faults]
            raise_faults("the ranks' plans do not make a checkpoint", faults, ending)
        if self.complete and any(plan.doubtful for plan in self.plans):
            doubtful = [plan.doubtful for plan in self.plans]
            self._notes += copied_states(doubtful, self.world, self._holders, waived)
        axes = {name for each in self.statements for name in each.axis_sizes}
        axes.update(*[mesh.mesh_dim_names or () for mesh in _torch.recorded_meshes()])
        has_equal_experts = any(map(EXPERT_AXIS.match, axes)) and any(
            piece.cover.has_replicas and any(map(NAMES_EXPERT.search, piece.fqns))
            for piece in self.world.pieces
            if piece.group.shape
        )
        if self.complete and has_equal_experts and not self._doubts[DIFFERED]:
            from dcp_placements.advice.equal_experts import equal_experts

            is_stepped = any((statement.step or 0) > 0 for statement in self.statements)
            self._notes += equal_experts(self.facts(), waived=waived, is_stepped=is_stepped)

    def _handed_over(self) -> tuple[str, bool]:
        """Return what a refusal hands over, and whether it is a declaration that passes."""
        is_compared = not any(each.digests == "off" for each in self.statements)
        if not self.complete or not is_compared or self._open:
            return "", False
        is_added = self._has_rename or any(
            each.matched or each.declared or each.renames for each in self.statements
        )
        from dcp_placements.advice.handed_over import handed_over

        try:
            refused = {fault.fqn for fault in self._faults} if is_added else None
            facts, drifted = self.facts(), self._conflicts
            return handed_over(facts, self._whole, drifted=drifted, refused=refused)
        except Exception as error:  # the refusal is what counts
            logger.exception("no declaration is proposed: %s", error)
            return "", False

    def facts(self) -> Any:
        """Return what all ranks hold: the ``FactsOfRanks`` of a proposal."""
        from dcp_placements.advice.handed_over import facts_of

        digests = [plan.digests for plan in self.plans]
        stated = self.stated.values()
        ranks = [plan.rank for plan in self.plans]
        return facts_of(self.world, digests, self._size, stated, self._named_axes, ranks)

    def _axes_of_ranks(self) -> list[dict[str, tuple[int, int]]]:
        """Return by rank position and size of each axis that it knows."""
        axes = []
        for plan in self.plans:
            sizes = self.stated[plan.statement].statement.axis_sizes
            both = zip(plan.coordinate, sizes.values(), strict=True)
            axes.append(dict(zip(sizes, both, strict=True)))
        for own, more in zip(axes, self._more_axes, strict=False):
            own.update(more)
        return axes

    def _prove_boxes(self) -> None:
        """Prove that the boxes of all ranks make wholes, and compare replicas."""
        world = self.world
        digests = digests_by_cell(world, [plan.digests for plan in self.plans], self._size)
        fqns = [fqn for piece in world.pieces for fqn in piece.fqns]
        lists = {fqn for fqn in fqns if fqn.endswith(".params")}
        compared: list[Compared] = []
        for finding in prove(
            world, lambda piece: piece.take(digests), complete=self.complete, size=self._size
        ):
            if isinstance(finding, Compared):
                compared.append(finding)
            else:
                self._open = self._open or not is_uneven(finding)
                self._faults += proof_faults(finding, world, self._holders)
        for piece, *_ in compared:
            self._doubts[UNCOMPARED].update(self._uncompared(piece))
            for fqn in piece.fqns if self._undigested else ():
                if fqn in self._undigested:
                    ranks = self._holders.name(self._undigested[fqn])
                    self._notes.append(undigested(fqn, ranks))
        differing = [finding for finding in compared if finding.positions]
        reduced = reduced_axes(world, self._states) if differing else {}
        conflicts = [
            conflict
            for finding in differing
            for conflict in conflicts_of(
                finding, world, self._holders, reduced=reduced, lists=lists
            )
        ]
        drift: Mapping[str, Fault] = {}
        if conflicts:
            pieces = [finding.piece for finding in compared]
            drift = drift_faults(conflicts, pieces, world)
            self._conflicts = {
                conflict.fault.fqn: conflict.fault
                for conflict in conflicts
                if conflict.fault.fqn in drift
            }
        for conflict in conflicts:
            fault = conflict.fault
            if conflict.is_own:
                self._notes.append(fault)
                continue
            self._doubts[DIFFERED].add(fault.fqn)
            vetoes = self._faults if self._strict else self._notes
            vetoes.append(drift.get(fault.fqn, fault))

    @cached_property
    def _states(self) -> OptimizerStates:
        """Return which keys of all ranks are optimizer state."""
        keys = chain.from_iterable([piece.fqns for piece in self.world.pieces])
        return states_among(keys, listed_parameters(self.stated.values()))

    @cached_property
    def _named_axes(self) -> NamedAxes:
        """Return the axes that have one meaning on all ranks."""
        ranks = [plan.rank for plan in self.plans]
        meshes = [*self._meshes, *_torch.recorded_meshes()]
        return named_axes_of(ranks, self._axes_of_ranks(), meshes)

    @cached_property
    def _holders(self) -> Holders:
        """The ranks as the holders that messages name."""

        sent = self._axes_of_ranks()

        def coordinate(position: int) -> dict[str, int]:
            own = {name: along for name, (along, _) in sent[position].items()}
            axes = self._named_axes.axes.items() if self.complete else ()
            return {**{name: axis.positions[position] for name, axis in axes}, **own}

        return Holders(
            name=lambda positions: format_ranks(
                [self.plans[position].rank for position in positions]
            ),
            noun="rank",
            inside="on",
            count=len(self.plans),
            missing=ALL_RANKS,
            coordinate=coordinate,
            axis_sizes={
                **self._named_axes.sizes,
                **{name: size for axes in sent for name, (_, size) in axes.items()},
            },
        )

    def _uncompared(self, piece: Piece) -> list[str]:
        """Return the keys of a piece with replicas that no rank compares and no rule declares.

        The rules are never asked about scalars.
        """
        group = piece.group
        is_compared = any(statement.digests != "off" for statement in self.statements)
        if is_compared or group.kind == OBJECT or not prod(group.shape) or not group.shape:
            return []
        rules = [self.world.rules(piece, position) for position in range(len(piece.fqns))]
        return [fqn for fqn, rule in zip(piece.fqns, rules, strict=True) if rule == NO_RULE]

    def _joined_lists(self) -> dict[int, tuple[tuple[str, tuple[str, ...]], ...]]:
        """Map ranks to the lists of parameters of all ranks that they write, where ranks differ."""
        lists: dict[int, tuple[tuple[str, tuple[str, ...]], ...]] = {}
        for fqn, names in listed_parameters(self.stated.values()).items():
            having = (each for each in self.stated.values() if fqn in each.statement.lists)
            statement, (rank, *_) = next(having)  # those of the lowest rank come first
            if len(names) > len(statement.lists[fqn]):
                lists[rank] = (*lists.get(rank, ()), (fqn, tuple(names)))
        return lists

    def metadata(self, first: Sequence[str]) -> dict[str, Any]:
        """Return the ``.metadata`` entry of each key, and fill the report on all keys.

        Args:
            first: The first keys of the result, in this order.
        """
        metadata: dict[str, Any] = dict.fromkeys(first)
        lists: dict[Hashable, ChunkList] = {}
        ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        partial: dict[str, tuple[int, ...]] = {}
        for piece in self.world.pieces:
            group, boxes = piece.group, piece.cover.boxes
            tables = tuple([source.table for source in piece.sources])
            if tables not in ranks_of:
                positions = {
                    position for table in tables for position in self.world.members[table].tolist()
                }
                ranks_of[tables] = tuple(
                    [self.plans[position].rank for position in sorted(positions)]
                )
            if len(ranks_of[tables]) < len(self.plans):
                partial.update(dict.fromkeys(piece.fqns, ranks_of[tables]))
            if group.kind == OBJECT:
                metadata.update({fqn: BytesStorageMetadata() for fqn in piece.fqns})
                continue
            # The bytes alone do not tell no boxes from the box of a scalar.
            key = boxes.shape, boxes.tobytes()
            if key not in lists:
                lists[key] = ChunkList(boxes)
            stored = TensorStorageMetadata(
                tensor_properties(group),
                torch.Size(group.shape),
                lists[key],  # type: ignore[arg-type]
            )
            metadata.update(dict.fromkeys(piece.fqns, stored))
        report_keys(self.report, self.world.pieces, complete=self.complete)
        self.report.partial_keys = partial
        return metadata

    def assign(
        self, *, lowest_rank: bool, save_id: bytes, copies: Copies = "off"
    ) -> list[Assignment]:
        """Return what each rank writes.

        Args:
            lowest_rank: Whether the lowest rank writes every replica.
            save_id: The id of the save.
            copies: What every rank writes that holds it, as for the planner.
        """
        world = self.world
        runs = runs_of(
            [piece.cover for piece in world.pieces],
            [len(piece.fqns) for piece in world.pieces],
            [piece.group.itemsize for piece in world.pieces],
            ranks=len(self.plans),
            undivided=[lowest_rank or piece.group.kind == OBJECT for piece in world.pieces],
        )
        copied = {} if copies == "off" else self._copied(copies)
        kinds = np.zeros(world.count, np.uint8)
        for number, (piece, of_piece) in enumerate(zip(world.pieces, runs, strict=True)):
            keys, (start, stop) = np.arange(len(piece.fqns)), of_piece.T[:, :, None]
            is_written = ((start <= keys) & (keys < stop)).astype(np.uint8)
            is_written[:, copied.get(number, [])] = COPIED
            piece.put(kinds, is_written)
        has_lists = any(statement.lists for statement in self.statements)
        lists = self._joined_lists() if has_lists else {}
        return [
            Assignment(
                np.packbits(of_rank > 0).tobytes(),
                save_id,
                np.packbits(of_rank == COPIED).tobytes() if copied else b"",
                lists.get(plan.rank, ()),
            )
            for plan, of_rank in zip(self.plans, world.by_rank(kinds), strict=True)
        ]

    def _copied(self, copies: Copies) -> dict[int, list[int]]:
        """Map pieces to the positions of the keys that every rank writes that holds them.

        ``copies`` as a number of bytes is room on each rank, which the smallest keys fill first. A
        key takes the bytes of its replicated boxes on every rank that holds them, also on the rank
        that writes them in any case.
        """
        copied: dict[int, list[int]] = {}
        patterns = {} if isinstance(copies, str | int) else {p: compile_pattern(p) for p in copies}
        unmatched = set(patterns)
        room = np.full(len(self.plans), copies if isinstance(copies, int) else 0, np.int64)
        nbytes: list[tuple[int, Piece, Ints]] = []
        for number, piece in enumerate(self.world.pieces):
            cover = piece.cover
            if cover.has_replicas and piece.group.kind != OBJECT:
                replicated = cover.numel * (np.diff(cover.starts) > 1) * piece.group.itemsize
                more = np.zeros_like(room)
                np.add.at(more, cover.ranks, replicated[cover.box_of])
                nbytes.append((number, piece, more))
        for number, piece, more in sorted(nbytes, key=lambda of_piece: int(of_piece[2].max())):
            if isinstance(copies, int):
                has = more > 0
                count = int((room[has] // more[has]).min(initial=len(piece.fqns)))
                copied[number] = list(range(min(count, len(piece.fqns))))
                room -= more * len(copied[number])
                continue
            copied[number] = []
            for position, fqn in enumerate(piece.fqns):
                if matching := {
                    p for p, compiled in patterns.items() if compiled.search(f".{fqn}")
                }:
                    copied[number].append(position)
                    unmatched -= matching
        if unmatched:
            names = format_names(sorted(unmatched), 4)
            warnings.warn(f"copies=: no replicated tensor matches {names}", stacklevel=4)
        return copied

    def record(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the record of the cuts and renames of these keys, as plain values."""
        numbers: dict[Cuts, int] = {(): 0}
        number_of: dict[str, int] = {}
        for piece in self.world.pieces:
            cuts = {source.group.cuts for source in piece.sources}
            # Keys that ranks declare in several ways have no cuts in the record.
            here = numbers.setdefault(cuts.pop() if len(cuts) == 1 else (), len(numbers))
            number_of.update(dict.fromkeys(piece.fqns, here))
        statements = self.statements
        renames = dict.fromkeys(step for statement in statements for step in statement.renames)
        numberings = {
            family: numbering
            for statement in statements
            for family, numbering in statement.numberings.items()
        }
        for statement in statements:
            self._doubts[DIFFERED].update(statement.unequal)
        record = packed_record(list(numbers), number_of, keys, renames, numberings)
        if any(self._doubts.values()):
            record |= packed_doubts(self._doubts, keys)
        return record

    def finish_report(self) -> None:
        """Put the ranks' statements into the report; warn of what may be wrong."""
        rules: dict[str, int] = {}
        shapes: dict[str, dict[Shapes, None]] = {}
        statements = self.statements
        for statement in statements:
            for rule, count in statement.matched.items():
                rules[rule] = max(rules.get(rule, 0), count)
            for rule, pairs in statement.shapes.items():
                shapes.setdefault(rule, {}).update(dict.fromkeys(pairs))
        self.report.rules = {rule: count for rule, count in rules.items() if count}
        self.report.shapes = {rule: tuple(pairs) for rule, pairs in shapes.items()}
        stateless = dict.fromkeys(name for statement in statements for name in statement.stateless)
        self.report.stateless = tuple(stateless)
        # Equal notes of several ranks are given once.
        of_ranks = dict.fromkeys(note for statement in statements for note in statement.notes)
        notes = [*self._notes, *of_ranks]
        size, ranks = self._size, [plan.rank for plan in self.plans]
        if not dist.is_initialized():
            with suppress(ValueError):  # some launchers leave a text there, such as "auto"
                size = max(size, int(os.environ.get("WORLD_SIZE", "")))
        lacking = len(ranks) < size
        if not self.complete:
            # Rank 0 alone with whole tensors is a complete checkpoint.
            lacking = ranks[0] > 0 or self.report.unique_nbytes < self.report.whole_nbytes
        waived = map(compile_pattern, self.report.waived)
        if lacking and not matches_any([*waived], THIS_SAVE):
            notes.append(_not_all_ranks(self.report, ranks, size))
        self.report.warnings = tuple(map(str, notes))
        if notes:
            warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=3)


def report_keys(report: SaveReport, pieces: Sequence[Piece], *, complete: bool) -> None:
    """Put all keys into a report.

    Args:
        report: The report.
        pieces: The pieces of the ranks.
        complete: Whether the boxes make the whole.
    """
    for piece in pieces:
        group, cover = piece.group, piece.cover
        if group.kind == OBJECT:
            report.objects += tuple(piece.fqns)
            continue
        whole, size = prod(group.shape), group.itemsize
        key = KeyReport(
            shape=group.shape,
            dtype=str(group.dtype).removeprefix("torch."),
            chunks=len(cover.boxes),
            unique_nbytes=(whole if complete else int(cover.numel.sum())) * size,
            whole_nbytes=whole * size,
            held_nbytes=int(cover.numel[cover.box_of].sum()) * size,
        )
        report.keys.update(dict.fromkeys(piece.fqns, key))


def tensor_properties(group: Group) -> TensorProperties:
    """Return the properties of a group's tensors that metadata keeps.

    Strides, where torch has them, are those of C order; torch's planner stores those of the first
    rank's shard.
    """
    assert group.dtype is not None
    properties = TensorProperties(group.dtype, group.layout, group.requires_grad)
    if PROPERTIES > PORTABLE_PROPERTIES:
        vars(properties)["strides"] = torch.empty(group.shape, device="meta").stride()
    return properties


def _not_all_ranks(report: SaveReport, ranks: Sequence[int], size: int) -> Fault:
    """Return a fault saying that some ranks take no part in a save.

    Args:
        report: The report on what is saved.
        ranks: The ranks that take part.
        size: Number of ranks in all.
    """
    headline = f"{len(ranks)} of {size} ranks take part"
    if len(ranks) == 1:
        headline = f"rank {ranks[0]} of {size} ranks saves by itself"
    details, keys = [], report.keys
    lacking = [fqn for fqn, key in keys.items() if key.unique_nbytes < key.whole_nbytes]
    if lacking:
        key = keys[lacking[0]]
        details.append(
            f"missing:     parts of {len(lacking)} of {len(keys)} tensors, as of {lacking[0]}: "
            f"{format_nbytes(key.unique_nbytes)} of {format_nbytes(key.whole_nbytes)} are saved"
        )
    details += [
        "reason:      what only other ranks hold is not saved; and if they save into the same "
        "directory, they overwrite files and .metadata of each other",
        "way out:     dcp.save on all ranks after init_process_group(), without no_dist=True; or "
        "a directory for each group",
        f'or:          waive={{"{THIS_SAVE}": reason}} where each has a directory of its own, as '
        "workers that somebody merges",
    ]
    return Fault(THIS_SAVE, headline, tuple(details))
