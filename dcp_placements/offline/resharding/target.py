"""The checkpoint that is written: which file holds which records, and where.

Everything here follows from the metadata of the source and the rules of the target, so that an
interrupted attempt is continued with the files that it finished.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.layout.boxes import as_boxes
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.names.renames import Step
from dcp_placements.offline.checkpoint import StoredObject, StoredTensor
from dcp_placements.offline.rehearsals.world import RehearsedWorld
from dcp_placements.offline.structure import box_faults
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.record import RESERVED_KEY, identity, packed_record
from dcp_placements.storage.metadata.save_ids import named
from dcp_placements.storage.records import Template
from dcp_placements.table.world import cover_of

REFUSED = "the checkpoint cannot be rewritten for this world"
"""The opening line of refusals."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a new file."""

    index: MetadataIndex  # its key and offsets
    length: int  # its bytes
    source: StoredTensor | StoredObject  # the stored tensor or object that has the contents
    box: Box | None = None  # of a tensor, the chunk

    @property
    def transforms(self) -> tuple[str, ...] | None:
        """Those that its bytes went through: of an object, whose record is copied as it is."""
        return (self.source.transforms or None) if isinstance(self.source, StoredObject) else None


@lru_cache(maxsize=1 << 12)
def template_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """Return the template of chunks with elements.

    Raises:
        PlacementError: This torch writes another format.
    """
    try:
        return Template(dtype, shape)
    except ValueError as error:
        raise PlacementError(f"torch {torch.__version__}: {error}") from error


def empty_record(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Return the record of a chunk without elements."""
    buffer = io.BytesIO()
    torch.save(torch.empty(tuple(shape), dtype=dtype, device="cpu"), buffer)
    return buffer.getvalue()


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


class Target:
    """What is to be written.

    Raises:
        CannotLook: A function of the rules fails.
        PlacementError: A load in that world would be refused, or its ranks do not hold everything.
    """

    def __init__(self, world: RehearsedWorld) -> None:
        self._world = world
        self._checkpoint = checkpoint = world.checkpoint
        self._cuts: dict[str, Cuts] = {}
        faults = list(world.faults())
        raise_faults(REFUSED, faults)
        groups = list(self._owned())
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
        if checkpoint.objects:
            self._by_rank.setdefault(0, [])
        self._order = {fqn: at for at, fqn in enumerate(checkpoint.metadata.state_dict_metadata)}

    def _owned(self) -> Iterator[OwnedTensors]:
        """Yield all tensors with their owners; take in how they are declared."""
        lacking = dict(self._checkpoint.tensors)
        for piece in self._world.table.pieces:
            if piece.group.dtype is None:
                continue
            cover = cover_of(piece.ranks, piece.boxes)
            lowest = cover.ranks[cover.order[cover.starts[:-1]]].tolist()
            owners = dict(zip(as_boxes(cover.boxes), lowest, strict=True))
            yield OwnedTensors(piece.group.shape, piece.group.dtype, piece.fqns, owners)
            # Nothing is recorded of keys that ranks declare in several ways.
            cuts = {source.group.cuts for source in piece.sources}
            self._cuts.update(dict.fromkeys(piece.fqns, cuts.pop() if len(cuts) == 1 else ()))
            for fqn in piece.fqns:
                del lacking[fqn]
        for fqn, tensor in lacking.items():
            yield OwnedTensors(tensor.shape, tensor.dtype, [fqn], {})

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file."""
        return sorted(self._by_rank)

    def nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's file."""
        total = sum(
            len(group.fqns) * sum(self._length(group, box) for box in boxes)
            for group, boxes in self._by_rank[rank]
        )
        return total + sum(stored.nbytes for stored in self._objects(rank))

    def entries(self, rank: int) -> Iterator[Entry]:
        """Yield the records of a rank's file, in file order: the keys as the source lists them."""
        tensors = self._checkpoint.tensors
        held = [
            (self._order[fqn], fqn, group, boxes)
            for group, boxes in self._by_rank[rank]
            for fqn in group.fqns
        ]
        for stored in self._objects(rank):
            yield Entry(MetadataIndex(stored.fqn), stored.nbytes, stored)
        for _, fqn, group, boxes in sorted(held, key=lambda one: one[0]):
            for box in boxes:
                index = MetadataIndex(fqn, torch.Size(box.offsets))
                yield Entry(index, self._length(group, box), tensors[fqn], box)

    def _objects(self, rank: int) -> list[StoredObject]:
        return list(self._checkpoint.objects.values()) if rank == 0 else []

    def _length(self, group: OwnedTensors, box: Box) -> int:
        dtype = group.dtype
        if not box.numel:
            return len(empty_record(dtype, box.sizes))
        return template_of(dtype, box.sizes).length

    def file_name(self, rank: int, save_id: bytes) -> str:
        """Return the name of a rank's file."""
        return f"{named(f'__{rank}_', save_id)}0.distcp"

    def identity(self, versions: Mapping[str, str]) -> str:
        """Return a digest of the source's files, by their versions, and of what is written."""
        digest = hashlib.sha256(json.dumps([sorted(versions.items()), self._world.axes]).encode())
        for group in dict.fromkeys(self._group_of.values()):
            text = f"{group.fqns} {sorted(group.owners.items())}\n"
            digest.update(text.encode("utf-8", "surrogatepass"))
        declared = sorted(self._cuts.items()), list(self._world.renames)
        digest.update(f"{declared} {torch.__version__}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def metadata(self, save_id: bytes) -> Metadata:
        """Return the metadata of the new checkpoint, without places."""
        source = self._checkpoint.metadata
        chunks: dict[OwnedTensors, Any] = {}
        stored: dict[str, Any] = {}
        for fqn, entry in source.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                stored[fqn] = BytesStorageMetadata()
                continue
            group = self._group_of[fqn]
            if group not in chunks:
                boxes = sorted(group.owners)
                chunks[group] = ChunkList(boxes)
            stored[fqn] = TensorStorageMetadata(entry.properties, entry.size, chunks[group])
        paths = source.planner_data
        data: dict[Any, Any] = {fqn: (fqn,) for fqn in stored}
        if isinstance(paths, Mapping):
            data = {key: path for key, path in paths.items() if key != RESERVED_KEY}
        data[RESERVED_KEY] = self._provenance(save_id, stored)
        return Metadata(stored, planner_data=data)

    def _provenance(self, save_id: bytes, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of this save."""
        old = self._checkpoint.provenance or {}
        provenance = identity(save_id, world_size=self._world.size, step=old.get("step"))
        numbers: dict[Cuts, int] = {(): 0}
        group_of = {fqn: numbers.setdefault(cuts, len(numbers)) for fqn, cuts in self._cuts.items()}
        # Those of the source still describe the keys.
        record = self._checkpoint.record
        renames: dict[Step, None] = {} if record is None else dict.fromkeys(record.renames)
        renames |= self._world.renames
        provenance |= packed_record(list(numbers), group_of, keys, renames)
        if "save_id" in old:
            provenance["resharded_from"] = old["save_id"]
        return provenance


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
    whole = Box.whole(shape)
    for kind, message in box_faults(whole, group.owners):
        headline = f"the ranks of this world do not make the whole: {kind}: {message}"
        yield from (Fault(fqn, headline) for fqn in group.fqns)
