"""Whether a checkpoint loads into a topology, and at what cost: only planning, for every rank.

There is no model, so what a rank needs is derived from the checkpoint: each of its tensors, cut
over the mesh by the rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Sharding
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import MeshAxes
from dcp_placements.offline.rehearsals.costs import Part
from dcp_placements.offline.rehearsals.owners import Owners
from dcp_placements.offline.rehearsals.saved_metadata import SavedMetadata, SavedRows
from dcp_placements.offline.rehearsals.world_parts import RankParts, WorldParts
from dcp_placements.rules.mesh import MeshCoordinate


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
        resharded_files: Files opened if the checkpoint is rewritten by ``reshard`` for these ranks;
            the elements that are wanted are then all that is read.
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
    resharded_files: int = 0


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
        metadata: What the metadata of a save by all ranks take.
    """

    JSON: ClassVar[str] = (
        "loads axes faults notes missing unread unmatched replicated unique_nbytes metadata ranks"
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
    metadata: SavedMetadata

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
    progress: Callable[[int, int], None] = lambda done, total: None,
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
        progress: Called with the number of ranks planned, and of all.

    Returns:
        The costs and the faults of all ranks.

    Raises:
        CannotLook: There is no checkpoint, an axis in ``fsdp`` is unknown, or ``rules`` fails.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    return _Rehearser(checkpoint, rules, axes, fsdp, expect).rehearsal(progress)


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
        self._world = WorldParts(checkpoint, function, axes, fsdp, expected)
        self._missing = tuple(sorted(expected - stored))
        self._unread = tuple(sorted(stored - expected))
        self._files = checkpoint.files
        self._objects = [o for fqn, o in checkpoint.objects.items() if fqn in expected]
        self._owners = Owners()
        self._cut_parts: dict[Any, Part] = {}
        self._saved = SavedRows(checkpoint.metadata, prod(axes.values()))

    def rehearsal(self, progress: Callable[[int, int], None]) -> Rehearsal:
        """Plan the load of every rank."""
        world = self._world
        ranks = []
        held = []
        for one in world.ranks():
            ranks.append(self._rank_costs(one))
            held.append(one.parts)
            for part in one.parts:
                self._owners.add(one.rank, part)
            progress(len(ranks), world.size)
        for at, parts in enumerate(held):
            owners = frozenset[int]().union(*map(self._owners.ranks, parts))
            # Objects are in the file of rank 0.
            files = len(owners | {0} if self._objects else owners)
            ranks[at] = replace(ranks[at], resharded_files=files)
        cut = {fqn for part in self._cut_parts.values() for fqn in part.fqns}
        return Rehearsal(
            axes=world.axes,
            ranks=tuple(ranks),
            faults=world.refusals.faults(),
            notes=world.refusals.notes(),
            missing=self._missing,
            unread=self._unread,
            replicated=sum(len(tensors.fqns) for tensors in world.classes) - len(cut),
            unmatched=tuple(p for p, is_matched in world.is_matched.items() if not is_matched),
            unique_nbytes=sum(tensors.total_nbytes for tensors in world.classes),
            metadata=self._saved.metadata(),
        )

    def _rank_costs(self, held: RankParts) -> RankRehearsal:
        numbers = self._world.file_numbers
        opened = np.zeros(len(numbers), bool)
        wanted = memory = slices = chunks = exchanged = reads = 0
        for one in held.parts:
            if one.layout.local_shape != one.part.tensors.shape:
                self._cut_parts[one.part.tensors, one.part.members.tobytes()] = one.part
            need = one.part.need(one.layout)
            self._saved.add(held.rank, one.part, one.layout)
            wanted += need.wanted
            memory += need.memory
            slices += need.slices
            chunks += need.chunks
            exchanged += -(-need.slices // self._replicas(one.sharding))
            reads += need.reads
            opened[need.files] = True
            self._world.refusals.check_stored(held.rank, one.part, need)
        for stored in self._objects:
            if stored.file is not None:
                opened[numbers[stored.file]] = True
                reads += 1
                slices += stored.nbytes
                chunks += stored.nbytes
                exchanged += stored.nbytes
        for name, nbytes in self._files.items():
            if nbytes is None and opened[numbers[name]]:
                self._world.refusals.add(held.rank, name, "the checkpoint lacks this file")
        files = int(opened.sum())
        return RankRehearsal(
            held.rank, held.coordinate, wanted, memory, slices, chunks, exchanged, reads, files
        )

    def _replicas(self, sharding: Sharding) -> int:
        """Return how many ranks share the reads of a box; rows of an ``IndexShard`` are not."""
        if not sharding.is_uniform:
            return 1
        cut = {cut.axis for cut in sharding.cuts}
        return self._world.size // prod(sharding.axis_sizes[axis] for axis in cut)
