"""Which file of a new DCP checkpoint has which boxes: files of whole tensors, or those of a world.

Everything here follows from the metadata of the source and from what is declared, so that an
interrupted conversion is continued with the files that it finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.layout.boxes import as_boxes
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.names.renames import Step
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.box_reads import pieces
from dcp_placements.offline.rehearsals.world import RehearsedWorld
from dcp_placements.offline.structure import box_faults
from dcp_placements.storage.torch_metadata import ChunkList
from dcp_placements.table.world import cover_of

REFUSED = "the checkpoint cannot be rewritten for this world"
"""The opening line of refusals."""

FILE_NBYTES = 4 << 30


class Declared(NamedTuple):
    """What a checkpoint records of the world that it is written for."""

    world_size: int
    cuts: Mapping[str, Cuts]  # by key
    renames: Mapping[Step, None]


class Layout(Protocol):
    """Which file has which boxes. ``(4, 3)`` experts on two ep ranks are in two files::

    boxes(0)  ("experts.w", Box((0, 0), (2, 3)))
    boxes(1)  ("experts.w", Box((2, 0), (2, 3)))
    """

    ranks: list[int]
    declared: Declared

    def boxes(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Yield the boxes in a rank's file, in file order."""

    def chunks(self, fqn: str) -> ChunkList:
        """Return all boxes of a tensor."""


class WholeFiles:
    """Whole tensors in files of up to ``FILE_NBYTES``, larger ones in several chunks."""

    def __init__(self, tensors: Mapping[str, AssembledTensor]) -> None:
        self._files: list[list[tuple[str, Box]]] = [[]]
        self._chunks: dict[str, ChunkList] = {}
        self.declared = Declared(1, {}, {})
        filled = 0
        for fqn, tensor in tensors.items():
            itemsize = tensor.dtype.itemsize
            boxes = list(pieces(tensor.whole, max(FILE_NBYTES // itemsize, 1)))
            self._chunks[fqn] = ChunkList(boxes)
            for box in boxes:
                nbytes = box.numel * itemsize
                if filled and filled + nbytes > FILE_NBYTES:
                    self._files.append([])
                    filled = 0
                filled += nbytes
                self._files[-1].append((fqn, box))
        self.ranks = list(range(len(self._files)))

    def boxes(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Yield the boxes in a file, in file order."""
        yield from self._files[rank]

    def chunks(self, fqn: str) -> ChunkList:
        """Return all boxes of a tensor."""
        return self._chunks[fqn]


@dataclass(slots=True, eq=False)
class OwnedTensors:
    """Tensors of which the same ranks own the same boxes.

    A box goes into the file of the lowest rank that holds it. A rank whose boxes no other holds
    then reads one file; replicas read that of the lowest among them.
    """

    shape: tuple[int, ...]  # of the whole tensors
    dtype: torch.dtype  # of their elements
    fqns: list[str]  # their keys
    owners: dict[Box, int]  # the rank by box; empty for tensors that no rank has


class WorldFiles:
    """Each rank's boxes in its own file, objects in that of rank 0.

    Raises:
        CannotLook: A function of the rules fails.
        PlacementError: A load in that world would be refused, or its ranks do not hold everything.
    """

    def __init__(self, world: RehearsedWorld) -> None:
        self._checkpoint = world.checkpoint
        cuts: dict[str, Cuts] = {}
        raise_faults(REFUSED, list(world.faults()))
        groups = list(self._owned(world, cuts))
        raise_faults(REFUSED, [fault for group in groups for fault in _cover_faults(group)])
        self._by_rank: dict[int, list[tuple[OwnedTensors, list[Box]]]] = {}
        self._group_of: dict[str, OwnedTensors] = {}
        for group in groups:
            self._group_of.update(dict.fromkeys(group.fqns, group))
            boxes: dict[int, list[Box]] = {}
            for box, rank in group.owners.items():
                boxes.setdefault(rank, []).append(box)
            for rank, owned in boxes.items():
                self._by_rank.setdefault(rank, []).append((group, owned))
        if world.checkpoint.objects:
            self._by_rank.setdefault(0, [])
        self.ranks = sorted(self._by_rank)
        self.declared = Declared(world.size, cuts, dict.fromkeys(world.renames))

    def boxes(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Yield the boxes in a rank's file, in file order: the keys as the source lists them."""
        held = [
            (self._order[fqn], fqn, boxes)
            for group, boxes in self._by_rank[rank]
            for fqn in group.fqns
        ]
        for _, fqn, boxes in sorted(held, key=lambda one: one[0]):
            for box in boxes:
                yield fqn, box

    def chunks(self, fqn: str) -> ChunkList:
        """Return all boxes of a tensor; one object for tensors with the same."""
        return self._chunks[self._group_of[fqn]]

    @cached_property
    def _order(self) -> dict[str, int]:
        return {fqn: at for at, fqn in enumerate(self._checkpoint.metadata.state_dict_metadata)}

    @cached_property
    def _chunks(self) -> dict[OwnedTensors, ChunkList]:
        groups = dict.fromkeys(self._group_of.values())
        return {group: ChunkList(sorted(group.owners)) for group in groups}

    def _owned(self, world: RehearsedWorld, cuts: dict[str, Cuts]) -> Iterator[OwnedTensors]:
        """Yield all tensors with their owners; note in ``cuts`` how they are declared."""
        lacking: dict[str, Any] = dict(world.checkpoint.tensors)
        for piece in world.table.pieces:
            if piece.group.dtype is None:
                continue
            cover = cover_of(piece.ranks, piece.boxes)
            lowest = cover.ranks[cover.order[cover.starts[:-1]]].tolist()
            owners = dict(zip(as_boxes(cover.boxes), lowest, strict=True))
            yield OwnedTensors(piece.group.shape, piece.group.dtype, piece.fqns, owners)
            # Nothing is recorded of keys that ranks declare in several ways.
            declared = {source.group.cuts for source in piece.sources}
            cuts.update(dict.fromkeys(piece.fqns, declared.pop() if len(declared) == 1 else ()))
            for fqn in piece.fqns:
                del lacking[fqn]
        for fqn, tensor in lacking.items():
            yield OwnedTensors(tensor.shape, tensor.dtype, [fqn], {})


def _cover_faults(group: OwnedTensors) -> Iterator[Fault]:
    """Yield what the ranks lack of tensors, or hold in boxes that overlap."""
    shape = group.shape
    if not group.owners:
        headline = "no rank of this world has this key"
        likely = "likely:      rename= of the rules leaves out its number"
        yield from (Fault(fqn, headline, (likely,)) for fqn in group.fqns)
        return
    if prod(shape) == 0:
        return
    for kind, message in box_faults(Box.whole(shape), group.owners):
        headline = f"the ranks of this world do not make the whole: {kind}: {message}"
        yield from (Fault(fqn, headline) for fqn in group.fqns)
