"""Whether a checkpoint loads into a topology, and at what cost: only planning, for every rank.

There is no model, so what a rank needs is derived from the checkpoint: each of its tensors, cut
over the mesh by the rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np

from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import Ints, as_boxes
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import Progress, matching_keys
from dcp_placements.offline.rehearsals.costs import COLUMNS, Costs
from dcp_placements.offline.rehearsals.text import rehearsal_text
from dcp_placements.offline.rehearsals.world import RehearsedWorld
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import unmatched_faults
from dcp_placements.table.table import OBJECT
from dcp_placements.table.world import cover_of
from dcp_placements.transfer.world import Fsdp, MeshAxes


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What a load costs one rank. Bytes are of data files."""

    rank: int  # its number, the last axis fastest
    coordinate: tuple[int, ...]  # its position along each axis
    memory_nbytes: int  # bytes of its tensors, padding included
    files: int  # files opened
    wanted_nbytes: int  # bytes of the elements that it needs
    # What ``PlacementFileSystemReader`` reads for that, up to the few hundred bytes before the
    # elements of each chunk
    slices_nbytes: int
    # What torch's ``FileSystemReader`` reads for that: every chunk that it needs a part of
    chunks_nbytes: int
    # What it reads with ``exchange=True``: an even share of the boxes that other ranks need as
    # well, and all of the others
    exchange_nbytes: int
    reads: int  # read items: one per stored chunk and box of a tensor that it overlaps


@dataclass(frozen=True, slots=True)
class Request:
    """A box of one tensor that ranks ask for."""

    JSON: ClassVar[str] = "fqn box ranks files"

    fqn: str  # the key in the checkpoint
    box: Box  # in the checkpoint's tensor
    ranks: tuple[int, ...]  # who asks for it
    files: tuple[str, ...]  # names of the files that hold any of it, sorted
    shape: tuple[int, ...]  # of the checkpoint's tensor


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Whether a checkpoint loads into a topology."""

    JSON: ClassVar[str] = (
        "loads axes faults notes missing unread unmatched replicated unique_nbytes ranks requests"
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
    requests: tuple[Request, ...] = ()  # who asks for what of the tensors that ``fqn`` names

    @property
    def loads(self) -> bool:
        """Whether every rank can load it."""
        return not self.faults and not self.missing

    def text(self, width: int | None = None) -> str:
        """Return it as text; the table is folded to the width of a terminal."""
        return rehearsal_text(self, width)

    def __str__(self) -> str:
        return self.text()


def rehearse(
    path: str | os.PathLike[str] | Checkpoint,
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Fsdp = (),
    expect: Iterable[str] | None = None,
    fqn: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Rehearsal:
    """Plan a load on every rank of a world that need not exist.

    Args:
        path: The checkpoint that is to be loaded.
        rules: Called with each rank's place in the mesh. Returns ``Placements``, or what
            ``Placements`` takes as rules. There are no DTensors, so the rules have to cover
            every axis that cuts a tensor but ``fsdp``; every rank needs all of a tensor without a
            rule. From its rename follows which of the checkpoint's tensors a rank has, and how:
            from ``Renumber`` its experts and layers. With a function of the user's in it, every
            rank has all keys of the checkpoint as they are.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Axes over which FSDP cuts dim 0 of every tensor (of one dim or more), inside what
            the rules cut, as one flattened axis without the axes that a tensor's rule cuts over.
            Or such axes by pattern: ``{"experts": ["edp"], "**": ["edp", "ep"]}``; the first
            pattern that matches the checkpoint's key counts.
        expect: The keys that the model has; None for those of the checkpoint.
        fqn: Pattern of the tensors whose ``requests`` are listed.
        progress: Called with the number of ranks planned, and of all.

    Returns:
        The costs and the faults of all ranks.

    Raises:
        CannotLook: There is no checkpoint, an axis in ``fsdp`` is unknown, ``rules`` fails,
            or no tensor matches ``fqn``.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    stored = {*checkpoint.tensors, *checkpoint.objects}
    expected = stored if expect is None else set(expect)
    shown = set() if fqn is None else matching_keys(fqn, checkpoint.tensors)
    world = RehearsedWorld(checkpoint, rules, axes, fsdp, expected, progress)
    costs = Costs(checkpoint, world.size)
    memory = np.zeros(world.size, np.int64)
    for lot in world.lots:
        memory[lot.ranks] = lot.memory
        costs.add_objects(lot.ranks, lot.objects)
    cut: set[str] = set()
    for piece in world.table.pieces:
        ndims = {len(source.group.shape) for source in piece.sources}
        if piece.group.kind == OBJECT or len(ndims) > 1:
            continue  # it is refused
        cover = cover_of(piece.ranks, piece.boxes)
        costs.add(piece.fqns, cover)
        if cover.boxes[:, 1].tolist() != [list(piece.group.shape)]:
            cut.update(piece.fqns)
    opened = costs.files()
    _add_faults(world, costs, opened)
    unmatched = world.unmatched()
    columns = [memory, np.bincount(opened[:, 0], minlength=world.size)]
    columns += [costs.of_rank[name] for name in COLUMNS]
    coordinates = product(*map(range, world.axes.values()))
    ranks = [
        RankRehearsal(rank, at, *numbers)
        for rank, (at, numbers) in enumerate(
            zip(coordinates, np.stack(columns, axis=1).tolist(), strict=True)
        )
    ]
    tensors = [one for fqn, one in checkpoint.tensors.items() if fqn in expected]
    return Rehearsal(
        axes=world.axes,
        ranks=tuple(ranks),
        faults=world.faults(),
        notes=(*world.notes(), *unmatched_faults(unmatched, sorted(expected))),
        missing=tuple(sorted(expected - stored)),
        unread=tuple(sorted(stored - expected)),
        replicated=sum(one.fqn not in cut for one in tensors),
        unmatched=unmatched,
        unique_nbytes=sum(one.nbytes for one in tensors),
        requests=tuple(_requests(world, shown)),
    )


def _requests(world: RehearsedWorld, fqns: set[str]) -> Iterator[Request]:
    """Yield which boxes ranks ask for of some tensors, and the files that hold them."""
    for piece in world.table.pieces:
        for fqn in sorted(fqns.intersection(piece.fqns)):
            stored = world.checkpoint.tensors[fqn]
            cover, chunks = cover_of(piece.ranks, piece.boxes), stored.chunks
            of_box: list[set[str]] = [set() for _ in cover.boxes]
            pairs = map(np.ndarray.tolist, stored.cut.index.meeting(cover.boxes))
            for box, chunk in zip(*pairs, strict=True):
                of_box[box].add(chunks[chunk].file or "")
            for at, box in enumerate(as_boxes(cover.boxes)):
                ranks, files = tuple(cover.holders(at).tolist()), tuple(sorted(of_box[at]))
                yield Request(fqn, box, ranks, files, stored.shape)


def _add_faults(world: RehearsedWorld, costs: Costs, opened: Ints) -> None:
    """Add what no planner sees: files that are missing, and chunks without a file."""
    for number, (name, nbytes) in enumerate(world.checkpoint.files.items()):
        if nbytes is None and len(ranks := opened[opened[:, 1] == number, 0]):
            world.add_fault(Fault(name, "the checkpoint lacks this file"), ranks.tolist())
    for fqn, ranks_of in costs.placeless.items():
        headline = "the metadata names no file for a chunk that is needed"
        world.add_fault(Fault(fqn, headline), ranks_of)
