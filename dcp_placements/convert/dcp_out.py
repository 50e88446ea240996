"""Assembled tensors as a DCP checkpoint: which file has which boxes, records, and metadata.

Everything follows from the metadata of the source and from what is declared, so that an interrupted
conversion is continued with the files that it finished.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import IO, Any

import torch
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements._torch import CURRENT_DCP_VERSION
from dcp_placements.convert.sources import Source
from dcp_placements.convert.writing import Elements, identity_of
from dcp_placements.errors import Fault, PlacementError, raise_faults
from dcp_placements.layout.boxes import as_boxes
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.names.renames import Step
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.box_reads import pieces
from dcp_placements.offline.checkpoint import StoredRecord
from dcp_placements.offline.rehearsals.world import RehearsedWorld
from dcp_placements.offline.structure import box_faults
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.checked_load import zip_problem
from dcp_placements.storage.index import index_of_places
from dcp_placements.storage.metadata_file import write_metadata
from dcp_placements.storage.provenance import RESERVED_KEY, identity, packed_record
from dcp_placements.storage.records import RecordTemplate
from dcp_placements.storage.save_ids import named
from dcp_placements.storage.torch_metadata import ChunkList, build_entries
from dcp_placements.storage.written import StoredPlace
from dcp_placements.table.world import cover_of

REFUSED = "the checkpoint cannot be rewritten for this world"
"""The opening line of refusals."""

FILE_NBYTES = 4 << 30


@dataclass
class Layout:
    """Which file has which boxes. ``(4, 3)`` experts on two ep ranks are in two files::

    Layout({0: [("experts.w", Box((0, 0), (2, 3)))], 1: [("experts.w", Box((2, 0), (2, 3)))]}, 2)

    Attributes:
        files: By rank, keys and boxes in file order. Objects are in the first file.
        world_size: Of the world that the checkpoint is for.
        cuts: How its ranks declare keys.
        renames: In force there.
    """

    files: dict[int, list[tuple[str, Box]]] = field(default_factory=lambda: {0: []})
    world_size: int = 1
    cuts: dict[str, Cuts] = field(default_factory=dict)
    renames: dict[Step, None] = field(default_factory=dict)


def whole_files(tensors: Mapping[str, AssembledTensor]) -> Layout:
    """Return whole tensors in files of up to ``FILE_NBYTES``, larger ones in several chunks."""
    layout = Layout()
    filled = 0
    for fqn, tensor in tensors.items():
        itemsize = tensor.dtype.itemsize
        for box in pieces(tensor.whole, max(FILE_NBYTES // itemsize, 1)):
            nbytes = box.numel * itemsize
            if filled and filled + nbytes > FILE_NBYTES:
                layout.files[len(layout.files)] = []
                filled = 0
            filled += nbytes
            layout.files[len(layout.files) - 1].append((fqn, box))
    return layout


def world_files(world: RehearsedWorld) -> Layout:
    """Return each box in the file of the lowest rank that holds it.

    A rank whose boxes no other holds then reads one file; replicas read that of the lowest.

    Raises:
        PlacementError: A load in that world would be refused, or its ranks do not hold everything.
    """
    raise_faults(REFUSED, list(world.faults()))
    owners_of: dict[str, dict[Box, int]] = {}
    layout = Layout({}, world.size, renames=dict.fromkeys(world.renames))
    faults: list[Fault] = []
    for piece in world.table.pieces:
        if piece.group.dtype is None:
            continue
        cover = cover_of(piece.ranks, piece.boxes)
        lowest = cover.ranks[cover.order[cover.starts[:-1]]].tolist()
        owners = dict(zip(as_boxes(cover.boxes), lowest, strict=True))
        owners_of |= dict.fromkeys(piece.fqns, owners)
        # Nothing is recorded of keys that ranks declare in several ways.
        declared = {source.group.cuts for source in piece.sources}
        layout.cuts |= dict.fromkeys(piece.fqns, declared.pop() if len(declared) == 1 else ())
        whole = Box.whole(piece.group.shape)
        for kind, message in box_faults(whole, owners) if owners and whole.numel else ():
            headline = f"the ranks of this world do not make the whole: {kind}: {message}"
            faults += [Fault(fqn, headline) for fqn in piece.fqns]
    for fqn in world.checkpoint.tensors:
        if not owners_of.get(fqn):
            likely = "likely:      rename= of the rules leaves out its number"
            faults.append(Fault(fqn, "no rank of this world has this key", (likely,)))
        for box, rank in owners_of.get(fqn, {}).items():
            layout.files.setdefault(rank, []).append((fqn, box))
    raise_faults(REFUSED, faults)
    if world.checkpoint.objects:
        layout.files.setdefault(0, [])
    layout.files = dict(sorted(layout.files.items()))
    return layout


class DcpOut:
    """Writes one file for each rank of a layout.

    Args:
        source: Has the objects, which are copied record by record with their transforms, and the
            facts that the new checkpoint keeps.
        tensors: By key, in the order of the new checkpoint.
        layout: Which file has which of their boxes.
    """

    last = ".metadata"

    def __init__(self, source: Source, tensors: dict[str, AssembledTensor], layout: Layout) -> None:
        self._source, self.tensors, self._layout = source, tensors, layout
        declared = layout.world_size, sorted(layout.cuts.items()), list(layout.renames)
        self.identity = identity_of(source, tensors, [declared, *layout.files.items()])
        self._save_id = bytes.fromhex(self.identity)[:16]
        self._boxes = {
            f"{named(f'__{rank}_', self._save_id)}0.distcp": boxes
            for rank, boxes in layout.files.items()
        }
        first = next(iter(self._boxes), "")
        self._objects = {first: list(source.objects.values())}
        self._places = [place for name in self._boxes for place in self._placed(name)]
        self.files = dict.fromkeys(self._boxes, 0)
        for place in self._places:
            self.files[place.path] += place.length

    def _placed(self, name: str) -> Iterator[StoredPlace]:
        """Yield the place of every record of a file, in file order."""
        start = 0
        for held in self._objects.get(name, ()):
            transforms = held.transforms or None
            yield StoredPlace(held.fqn, None, name, start, held.nbytes, transforms)
            start += held.nbytes
        for fqn, box in self._boxes[name]:
            length = _record_of(self.tensors[fqn].dtype, box.sizes).length
            yield StoredPlace(fqn, torch.Size(box.offsets), name, start, length)
            start += length

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one data file, or ``.metadata``."""
        if name == self.last:
            self._write_metadata(stream)
            return
        for stored in self._objects.get(name, ()):
            stream.write(self._object(stored))
            elements.advance(stored.nbytes)
        for fqn, box in self._boxes[name]:
            tensor = self.tensors[fqn]
            record = _record_of(tensor.dtype, box.sizes)
            record.write_blocks(elements.of(tensor, box), stream.write)
            elements.advance(record.length - box.numel * tensor.dtype.itemsize)

    def _object(self, stored: StoredRecord) -> bytes:
        """Return the record of an object, compared with its CRC-32 if nothing transformed it."""
        assert stored.file is not None, "the source was checked"
        with self._source.directory.open(stored.file) as file:
            file.seek(stored.start)
            record = file.read(stored.nbytes)
        problem = None
        if len(record) < stored.nbytes:
            problem = f"{stored.file} ends {stored.nbytes - len(record)} bytes too early"
        elif not stored.transforms:
            problem, _ = zip_problem(io.BytesIO(record))
        if problem is not None:
            headline = f"its record in {stored.file} is not what was written: {problem}"
            raise_faults("the checkpoint is damaged", [Fault(stored.fqn, headline)])
        return record

    def _write_metadata(self, stream: IO[bytes]) -> None:
        with quiet_gc():
            metadata = self._metadata()
            entries = build_entries(metadata.state_dict_metadata)
            metadata.storage_data = index_of_places(self._places, entries)
            write_metadata(metadata, stream)

    def _metadata(self) -> Metadata:
        """Return the metadata of the new checkpoint, without places."""
        checkpoint = self._source.checkpoint
        old = {} if checkpoint is None else checkpoint.metadata.state_dict_metadata
        boxes: dict[str, list[Box]] = {}
        for of_file in self._boxes.values():
            for fqn, box in of_file:
                boxes.setdefault(fqn, []).append(box)
        stored: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in self._source.objects}
        for fqn, tensor in self.tensors.items():
            held: Any = old.get(fqn)
            kept = held.properties if isinstance(held, TensorStorageMetadata) else None
            if kept is None or kept.dtype != tensor.dtype:
                kept = TensorProperties(tensor.dtype)
            chunks: Any = ChunkList(sorted(boxes[fqn]))
            stored[fqn] = TensorStorageMetadata(kept, torch.Size(tensor.shape), chunks)
        order = {fqn: at for at, fqn in enumerate(old)}
        ordered = {f: stored[f] for f in sorted(stored, key=lambda f: order.get(f, len(order)))}
        paths = None if checkpoint is None else checkpoint.metadata.planner_data
        data: dict[Any, Any] = {fqn: (fqn,) for fqn in ordered}
        if isinstance(paths, Mapping):
            data |= {key: path for key, path in paths.items() if key in ordered}
        data[RESERVED_KEY] = self._provenance(ordered)
        metadata = Metadata(ordered, planner_data=data)
        metadata.version = CURRENT_DCP_VERSION
        return metadata

    def _provenance(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of this save."""
        checkpoint, layout = self._source.checkpoint, self._layout
        old = {} if checkpoint is None else checkpoint.provenance or {}
        record = None if checkpoint is None else checkpoint.record
        # Those of the source still describe the keys.
        renames = ({} if record is None else dict.fromkeys(record.renames)) | layout.renames
        numbers: dict[Cuts, int] = {(): 0}
        group_of = {
            fqn: numbers.setdefault(cuts, len(numbers)) for fqn, cuts in layout.cuts.items()
        }
        provenance = identity(self._save_id, world_size=layout.world_size, step=old.get("step"))
        provenance |= packed_record(list(numbers), group_of, keys, renames)
        if "save_id" in old:
            provenance["resharded_from"] = old["save_id"]
        return provenance


class _EmptyRecord:
    """The record of a chunk without elements."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        buffer = io.BytesIO()
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), buffer)
        self._record = buffer.getvalue()
        self.length = len(self._record)

    def write_blocks(self, slabs: Iterator[memoryview], write: Any) -> None:
        """Write it."""
        write(self._record)


@lru_cache(maxsize=1 << 12)
def _record_of(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate | _EmptyRecord:
    """Return the record of chunks of this form, without their elements.

    Raises:
        PlacementError: This torch writes another format.
    """
    if not prod(shape):
        return _EmptyRecord(dtype, shape)
    try:
        return RecordTemplate(dtype, shape)
    except ValueError as error:
        raise PlacementError(f"torch {torch.__version__}: {error}") from error
