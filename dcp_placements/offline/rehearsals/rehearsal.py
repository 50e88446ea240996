"""Whether a checkpoint loads into a topology, and at what cost: only planning, for every rank.

There is no model, so what a rank needs is derived from the checkpoint: each of its tensors, cut
over the mesh by the rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np

from dcp_placements.errors import Fault, PlacementError
from dcp_placements.layout.sharding import LayoutError, Sharding
from dcp_placements.names.rename_record import holder
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import MeshAxes, rules_at
from dcp_placements.offline.rehearsals.costs import Part, parts_by_rule, tensor_classes
from dcp_placements.offline.rehearsals.refusals import RankPart, Refusals
from dcp_placements.offline.views.cutting import fsdp_axes, in_mesh_order, layout_at, whole_sharding
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules, Rules, rule_name
from dcp_placements.rules.placement import CheckpointPlacement


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What a load costs one rank. Bytes are of data files.

    Attributes:
        rank: Its number, the last axis fastest.
        coordinate: Its position along each axis.
        wanted_nbytes: Bytes of the elements that it needs.
        memory_nbytes: Bytes of its tensors, padding included.
        slices_nbytes: What ``PlacementFileSystemReader`` reads for that, up to the few hundred
            bytes before the elements of each chunk.
        chunks_nbytes: What torch's ``FileSystemReader`` reads for that: every chunk that it needs
            a part of.
        exchange_nbytes: What it reads with ``exchange=True``: an even share of the boxes that
            other ranks need as well, and all of the others.
        reads: Read items: one per stored chunk and box of a tensor that it overlaps.
        files: Files opened.
    """

    rank: int
    coordinate: tuple[int, ...]
    wanted_nbytes: int
    memory_nbytes: int
    slices_nbytes: int
    chunks_nbytes: int
    exchange_nbytes: int
    reads: int
    files: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Whether a checkpoint loads into a topology.

    Attributes:
        axes: Sizes by axis name.
        ranks: What it costs each rank, by rank.
        faults: What cannot be loaded.
        notes: What a load would warn about.
        missing: Keys that are expected and not in the checkpoint, sorted.
        unread: Keys of the checkpoint that are not expected, sorted; they are not counted.
        replicated: How many tensors no rule cuts: every rank needs all of them.
        unmatched: Patterns of the rules that match no key.
        unique_nbytes: Bytes of the whole tensors that are needed, each once.
    """

    JSON: ClassVar[str] = (
        "loads axes faults notes missing unread unmatched replicated unique_nbytes ranks"
    )

    axes: Mapping[str, int]
    ranks: tuple[RankRehearsal, ...]
    faults: tuple[Fault, ...]
    notes: tuple[Fault, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]
    replicated: int
    unmatched: tuple[str, ...]
    unique_nbytes: int

    @property
    def loads(self) -> bool:
        """Whether every rank can load it."""
        return not self.faults and not self.missing


def rehearse(
    path: str | os.PathLike[str] | Checkpoint,
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Sequence[str] = (),
    expect: Iterable[str] | None = None,
) -> Rehearsal:
    """Plan a load on every rank of a world that need not exist.

    Args:
        path: The checkpoint that is to be loaded.
        rules: Called with each rank's place in the mesh. Returns ``Placements``, or what
            ``Placements`` takes as rules. There are no DTensors, so the rules have to cover
            every axis that cuts a tensor but ``fsdp``; every rank needs all of a tensor without a
            rule. From a ``Renumber`` (``Renames``) follows which experts and layers a rank has;
            with any other rename, every rank has all keys.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Axes over which FSDP cuts dim 0 of every tensor (of one dim or more), inside what
            the rules cut, as one flattened axis without the axes that a tensor's rule cuts over.
        expect: The keys that the model has; None for those of the checkpoint.

    Returns:
        The costs and the faults of all ranks.

    Raises:
        CannotLook: There is no checkpoint, an axis in ``fsdp`` is unknown, or ``rules`` fails.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    return _Rehearser(checkpoint, rules, axes, fsdp, expect).rehearsal()


class _Rehearser:
    """One rehearsal, rank after rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        function: Callable[[MeshCoordinate], Any],
        axes: MeshAxes,
        fsdp: Sequence[str],
        expect: Iterable[str] | None,
    ) -> None:
        stored = {*checkpoint.tensors, *checkpoint.objects}
        expected = stored if expect is None else set(expect)
        self._function = function
        self._axes = dict(axes)
        self._fsdp = in_mesh_order(axes, fsdp)
        self._missing = tuple(sorted(expected - stored))
        self._unread = tuple(sorted(stored - expected))
        self._files = checkpoint.files
        self._file_numbers = {name: number for number, name in enumerate(checkpoint.files)}
        self._classes = tensor_classes(checkpoint, expected, self._file_numbers)
        self._objects = [o for fqn, o in checkpoint.objects.items() if fqn in expected]
        self._refusals = Refusals(checkpoint.metadata, self._axes)
        self._parts: dict[tuple[tuple[str, ...], str], list[Part]] = {}
        self._shardings: dict[Any, Sharding] = {}
        self._is_matched: dict[str, bool] = {}  # by pattern
        self._cut_parts: dict[Any, Part] = {}

    def rehearsal(self) -> Rehearsal:
        """Plan the load of every rank."""
        ranks = []
        for rank, coordinate in enumerate(product(*map(range, self._axes.values()))):
            rules, rename, waive = rules_at(self._function, self._axes, rank)
            parts = self._parts_of(rules, rename)
            held = [p for part in parts if (p := self._rank_part(rank, coordinate, part, rules))]
            for one in held:
                self._refusals.check_local_shape(rank, coordinate, one, renamed=rename is not None)
            ranks.append(self._rank_costs(rank, coordinate, held))
            self._refusals.compare_with_save(rank, parts, held, rename, waive)
        cut = {fqn for part in self._cut_parts.values() for fqn in part.fqns}
        return Rehearsal(
            axes=self._axes,
            ranks=tuple(ranks),
            faults=self._refusals.faults(),
            notes=self._refusals.notes(),
            missing=self._missing,
            unread=self._unread,
            replicated=sum(len(tensors.fqns) for tensors in self._classes) - len(cut),
            unmatched=tuple(p for p, is_matched in self._is_matched.items() if not is_matched),
            unique_nbytes=sum(tensors.total_nbytes for tensors in self._classes),
        )

    def _parts_of(self, rules: Rules, rename: Any) -> list[Part]:
        """Return the tensors that a rank has, by class and rule."""
        holds = holder(rename)
        if not isinstance(rules, PlacementRules):
            return parts_by_rule(
                self._classes, lambda fqn, tensors: _signature(rules(fqn, tensors.example)), holds
            )
        # Ranks with equal patterns and equal numbers have equal parts.
        key = (rules.patterns, "" if holds is None else repr(rename))
        if key not in self._parts:
            parts = parts_by_rule(self._classes, lambda fqn, _: rules.pattern_of(fqn), holds)
            matched = {rules.pattern_of(part.fqn) for part in parts if part.tensors.shape}
            for pattern in rules.patterns:
                is_matched = pattern in matched or self._is_matched.get(pattern, False)
                self._is_matched[pattern] = is_matched
            self._parts[key] = parts
        return self._parts[key]

    def _rank_part(
        self, rank: int, coordinate: Sequence[int], part: Part, rules: Rules
    ) -> RankPart | None:
        """Return how a rank holds a part; None, and a fault, if its rule does not fit."""
        shape = part.tensors.shape
        placement = rules(part.fqn, part.tensors.example) if shape else None
        rule = None if placement is None else rule_name(rules, part.fqn)
        own = fsdp_axes(shape, placement, self._fsdp)
        key = (part.tensors, _signature(placement))
        try:
            if key not in self._shardings:
                self._shardings[key] = whole_sharding(shape, placement, self._axes, own)
            sharding = self._shardings[key]
            layout = layout_at(sharding, placement, self._axes, own, coordinate)
        except (PlacementError, LayoutError) as error:
            detail = f"by rule:     {rule_name(rules, part.fqn)}"
            for fqn in part.fqns:
                self._refusals.add(rank, fqn, str(error), detail)
            return None
        if layout.local_shape != shape:
            self._cut_parts[part.tensors, part.members.tobytes()] = part
        return RankPart(part, placement, rule, key, own, sharding, layout)

    def _rank_costs(
        self, rank: int, coordinate: tuple[int, ...], held: Sequence[RankPart]
    ) -> RankRehearsal:
        opened = np.zeros(len(self._file_numbers), bool)
        wanted = memory = slices = chunks = exchanged = reads = 0
        for one in held:
            need = one.part.need(one.layout)
            wanted += need.wanted
            memory += need.memory
            slices += need.slices
            chunks += need.chunks
            exchanged += -(-need.slices // self._replicas(one.sharding))
            reads += need.reads
            opened[need.files] = True
            self._refusals.check_stored(rank, one.part, need)
        for stored in self._objects:
            if stored.file is not None:
                opened[self._file_numbers[stored.file]] = True
                reads += 1
                slices += stored.nbytes
                chunks += stored.nbytes
                exchanged += stored.nbytes
        for name, nbytes in self._files.items():
            if nbytes is None and opened[self._file_numbers[name]]:
                self._refusals.add(rank, name, "the checkpoint lacks this file")
        files = int(opened.sum())
        return RankRehearsal(
            rank, coordinate, wanted, memory, slices, chunks, exchanged, reads, files
        )

    def _replicas(self, sharding: Sharding) -> int:
        """Return how many ranks share the reads of a box; rows of an ``IndexShard`` are not."""
        if not sharding.is_uniform:
            return 1
        cut = {cut.axis for cut in sharding.cuts}
        return prod(self._axes.values()) // prod(sharding.axis_sizes[axis] for axis in cut)


def _signature(placement: CheckpointPlacement | None) -> Any:
    """Return what decides how a placement cuts, whatever its rank."""
    if placement is None:
        return None
    mesh = placement.mesh
    return (
        tuple(mesh.shape),
        mesh.mesh_dim_names,
        placement.placements,
        placement.global_shape,
        placement.padded_shape,
    )
