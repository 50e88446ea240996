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
from dcp_placements.offline.checkpoint import Checkpoint, StoredObject
from dcp_placements.offline.declared import MeshAxes, Progress
from dcp_placements.offline.rehearsals.costs import RankPart
from dcp_placements.offline.rehearsals.owners import Owners
from dcp_placements.offline.rehearsals.world_parts import RankParts, WorldParts
from dcp_placements.rules.matches import names_of, unmatched_faults
from dcp_placements.rules.mesh import MeshCoordinate


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What a load costs one rank. Bytes are of data files."""

    rank: int  # its number, the last axis fastest
    coordinate: tuple[int, ...]  # its position along each axis
    wanted_nbytes: int  # bytes of the elements that it needs
    memory_nbytes: int  # bytes of its tensors, padding included
    # What ``PlacementFileSystemReader`` reads for that, up to the few hundred bytes before the
    # elements of each chunk
    slices_nbytes: int
    # What torch's ``FileSystemReader`` reads for that: every chunk that it needs a part of
    chunks_nbytes: int
    # What it reads with ``exchange=True``: an even share of the boxes that other ranks need as
    # well, and all of the others
    exchange_nbytes: int
    reads: int  # read items: one per stored chunk and box of a tensor that it overlaps
    files: int  # files opened
    # Files opened if the checkpoint is rewritten by ``reshard`` for these ranks; the elements that
    # are wanted are then all that is read
    resharded_files: int = 0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Whether a checkpoint loads into a topology."""

    JSON: ClassVar[str] = (
        "loads axes faults notes missing unread unmatched replicated unique_nbytes ranks"
    )

    axes: Mapping[str, int]  # sizes by axis name
    ranks: tuple[RankRehearsal, ...]  # what it costs each rank, by rank
    faults: tuple[Fault, ...]  # what cannot be loaded
    notes: tuple[Fault, ...]  # what a load would warn about
    missing: tuple[str, ...]  # keys that are expected and not in the checkpoint, sorted
    # Keys of the checkpoint that are not expected, sorted; they are not counted
    unread: tuple[str, ...]
    replicated: int  # how many tensors no rule cuts: every rank needs all of them
    # Patterns of rules, and steps of ``rename=``, that match no key
    unmatched: tuple[str, ...]
    unique_nbytes: int  # bytes of the whole tensors that are needed, each once

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
    progress: Progress = lambda done, total: None,
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
    stored = {*checkpoint.tensors, *checkpoint.objects}
    expected = stored if expect is None else set(expect)
    world = WorldParts(checkpoint, rules, axes, fsdp, expected)
    objects = [one for fqn, one in checkpoint.objects.items() if fqn in expected]
    owners = Owners()
    ranks, held = [], []
    for one in world.ranks():
        ranks.append(_rank_costs(world, one, objects))
        held.append(one.parts)
        for part in one.parts:
            owners.add(one.rank, part)
        progress(len(ranks), world.size)
    # Objects are in the file of rank 0.
    first = frozenset({0} if objects else ())
    files = [len(first.union(*map(owners.ranks, parts))) for parts in held]
    unmatched = world.unmatched()
    return Rehearsal(
        axes=world.axes,
        ranks=tuple(replace(one, resharded_files=n) for one, n in zip(ranks, files, strict=True)),
        faults=world.refusals.faults(),
        notes=(*world.refusals.notes(), *unmatched_faults(unmatched, sorted(expected))),
        missing=tuple(sorted(expected - stored)),
        unread=tuple(sorted(stored - expected)),
        replicated=sum(len(tensors.fqns) for tensors in world.classes) - _count_cut(held),
        unmatched=names_of(unmatched),
        unique_nbytes=sum(tensors.total_nbytes for tensors in world.classes),
    )


def _count_cut(held: Iterable[Iterable[RankPart]]) -> int:
    """Return the number of tensors of which some rank holds a part only."""
    cut = {
        one.part.key: one.part
        for parts in held
        for one in parts
        if one.layout.local_shape != one.part.tensors.shape
    }
    return len({fqn for part in cut.values() for fqn in part.fqns})


def _rank_costs(
    world: WorldParts, held: RankParts, objects: Sequence[StoredObject]
) -> RankRehearsal:
    opened = np.zeros(len(world.file_numbers), bool)
    wanted = memory = slices = chunks = exchanged = reads = 0
    for one in held.parts:
        need = one.part.need(one.layout)
        wanted += need.wanted
        memory += need.memory
        slices += need.slices
        chunks += need.chunks
        exchanged += -(-need.slices // _replicas(world, one.sharding))
        reads += need.reads
        opened[need.files] = True
        world.refusals.check_stored(held.rank, one.part, need)
    for stored in objects:
        if stored.file is not None:
            opened[world.file_numbers[stored.file]] = True
            reads += 1
            slices += stored.nbytes
            chunks += stored.nbytes
            exchanged += stored.nbytes
    for name, nbytes in world.checkpoint.files.items():
        if nbytes is None and opened[world.file_numbers[name]]:
            world.refusals.add(held.rank, name, "the checkpoint lacks this file")
    files = int(opened.sum())
    return RankRehearsal(
        held.rank, held.coordinate, wanted, memory, slices, chunks, exchanged, reads, files
    )


def _replicas(world: WorldParts, sharding: Sharding) -> int:
    """Return how many ranks share the reads of a box; rows of an ``IndexShard`` are not."""
    if not sharding.is_uniform:
        return 1
    cut = {cut.axis for cut in sharding.cuts}
    return world.size // prod(sharding.axis_sizes[axis] for axis in cut)
