"""Faults that the metadata and the sizes of files prove: holes, overlaps, missing files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from dcp_placements.errors import format_names
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import contains, format_box, overlaps, tiles, uncovered
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredTensor
from dcp_placements.offline.readers.dcp import check_count
from dcp_placements.storage.metadata.save_ids import id_in_name

MAX_BOXES = 4
"""Boxes that a message lists."""


@dataclass(frozen=True, slots=True)
class CheckpointFault:
    """One thing wrong with a checkpoint."""

    kind: str  # what it is, in one word that stays; README.md lists them
    tensors: tuple[str, ...]  # keys that it is about, sorted
    files: tuple[str, ...]  # files that it is about, sorted
    message: str  # the numbers in the files against those declared


class Record(NamedTuple):
    """One stretch of a file, as the metadata describe it."""

    fqn: str  # the key that it belongs to
    chunk: StoredChunk  # its chunk; of an object a chunk without dims
    tensor: StoredTensor | None  # its tensor; None for an object
    copied: tuple[str, ...] = ()  # of a shadow: the keys that it holds copies of

    @property
    def start(self) -> int:
        """Where it begins in the file, in bytes."""
        return self.chunk.start

    @property
    def end(self) -> int:
        """Where it ends in the file, in bytes."""
        return self.chunk.start + self.chunk.nbytes

    @property
    def places(self) -> list[tuple[str, tuple[int, ...] | None]]:
        """Key and offset of its chunk or object; of a shadow, of those that it has copies of."""
        offsets = None if self.tensor is None else self.chunk.box.offsets
        if self.copied and offsets is not None:
            offsets = offsets[1:]  # the first is the number of the shadow's writer
        return [(fqn, offsets) for fqn in self.copied or (self.fqn,)]

    @property
    def name(self) -> str:
        """The key, with the box where it is a part of the tensor."""
        if self.copied:
            return f"the copy of {format_names(self.copied, 2)}"
        if self.tensor is None or len(self.tensor.boxes) == 1:
            return self.fqn
        return f"{self.fqn} {format_box(self.chunk.box, self.tensor.shape)}"


def records_by_file(checkpoint: Checkpoint) -> dict[str, list[Record]]:
    """Return the records of every file, in file order; files sorted by name.

    Raises:
        CannotLook: There are too many.
    """
    check_count(checkpoint.path, checkpoint.description)
    by_file: dict[str, list[Record]] = defaultdict(list)
    for fqn, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file is not None:
                by_file[chunk.file].append(Record(fqn, chunk, tensor))
    for fqn, stored in checkpoint.objects.items():
        if stored.file is not None:
            chunk = StoredChunk(Box((), ()), stored.file, stored.start, stored.nbytes)
            by_file[stored.file].append(Record(fqn, chunk, None))
    for key, pack in checkpoint.shadows.items():
        for chunk in pack.copies:
            assert chunk.file is not None
            by_file[chunk.file].append(Record(key, chunk, pack.tensor, pack.fqns))
    for records in by_file.values():
        records.sort(key=attrgetter("chunk.start", "chunk.nbytes"))
    return dict(sorted(by_file.items()))


def fqns_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the keys of what records hold, or hold copies of; sorted."""
    return tuple(sorted({fqn for record in records for fqn in record.copied or (record.fqn,)}))


def structural_faults(
    checkpoint: Checkpoint, records: dict[str, list[Record]]
) -> list[CheckpointFault]:
    """Return all that the metadata, the sizes of files and the ids of saves prove to be wrong."""
    return [
        *_tiling_faults(checkpoint),
        *_place_faults(checkpoint, records),
        *_id_faults(checkpoint),
        *_file_faults(checkpoint, records),
    ]


def _tiling_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield holes, overlaps, and chunks out of bounds: one fault for tensors that are cut alike."""
    alike: dict[tuple[tuple[int, ...], int], list[StoredTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        alike[tensor.shape, tensor.cut].append(tensor)
    for tensors in alike.values():
        names = tuple(sorted(tensor.fqn for tensor in tensors))
        for kind, message in box_faults(tensors[0].whole, tensors[0].boxes):
            yield CheckpointFault(kind, names, (), message)


def box_faults(whole: Box, boxes: Iterable[Box]) -> Iterator[tuple[str, str]]:
    """Yield ``(kind, message)`` of the holes and overlaps of boxes that should tile a tensor."""
    shape = whole.sizes
    counts = Counter(box for box in boxes if box.numel)
    if not whole.numel and not counts:
        return
    if max(counts.values(), default=0) == 1 and tiles(whole, counts):
        return
    outside = [box for box in counts if not contains(whole, box)]
    if outside:
        yield "out_of_bounds", f"{_format_boxes(outside, None)} of a {shape} tensor"
    twice = [box for box, count in counts.items() if count > 1]
    if twice:
        yield "overlap", f"{_format_boxes(twice, shape)} of {shape} is there more than once"
    pairs = overlaps(list(counts), limit=MAX_BOXES)
    if pairs:
        text = "; ".join(f"{format_box(a, shape)} and {format_box(b, shape)}" for a, b in pairs)
        yield "overlap", f"chunks of {shape} overlap: {text}"
    holes = uncovered(whole, list(counts), limit=2 * MAX_BOXES)
    if holes:
        yield "hole", f"no chunk holds {_format_boxes(holes, shape)} of {shape}"


def _place_faults(
    checkpoint: Checkpoint, records: dict[str, list[Record]]
) -> Iterator[CheckpointFault]:
    """Yield chunks without a place, places without a chunk, and keys of an index without either."""
    placed = Counter(r.fqn for in_file in records.values() for r in in_file if not r.copied)
    for fqn, tensor in checkpoint.tensors.items():
        if placed[fqn] == len(tensor.boxes):
            continue
        unplaced = [chunk.box for chunk in tensor.chunks if chunk.file is None]
        if unplaced:
            boxes = _format_boxes(unplaced, tensor.shape)
            message = f"the metadata name no file for {boxes} of {tensor.shape}"
            yield CheckpointFault("unplaced", (fqn,), (), message)
    for fqn, stored in checkpoint.objects.items():
        if stored.file is None:
            message = "the metadata name no file for this object"
            yield CheckpointFault("unplaced", (fqn,), (), message)
    for fqn, offset, file in checkpoint.unclaimed():
        at = "" if offset is None else f" at {offset}"
        message = f"{file} has a chunk{at} that the tensor's metadata do not list"
        yield CheckpointFault("unclaimed", (fqn,), (file,), message)
    for file in sorted(set(checkpoint.absent.values())):
        names = tuple(sorted(fqn for fqn, name in checkpoint.absent.items() if name == file))
        if checkpoint.directory.size(file) is None:
            yield CheckpointFault("missing_file", names, (file,), "the file is not there")
        else:
            message = "the index names this file for them, and the file lacks them"
            yield CheckpointFault("unplaced", names, (file,), message)


def _id_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield files that another save wrote, by the id that each begins with."""
    for file, record in checkpoint.id_records.items():
        if checkpoint.directory.size(file) is None:
            continue
        if record.transforms:
            continue  # transforms are undone by extensions, which are not at hand here
        try:
            with checkpoint.directory.open(file) as stream:
                stream.seek(record.start)
                fault = record.fault(stream.read(record.nbytes))
        except OSError:
            continue  # its other records cannot be read either, which is a fault of its own
        if fault is not None:
            yield CheckpointFault("mixed_generations", (), (file,), f"it {fault.headline}")


def files_without_id(checkpoint: Checkpoint) -> list[str]:
    """Return the files that have no id of the save that wrote them, sorted."""
    own = checkpoint.id_records
    return [file for file in checkpoint.files if file not in own and id_in_name(file) is None]


def _file_faults(
    checkpoint: Checkpoint, records: dict[str, list[Record]]
) -> Iterator[CheckpointFault]:
    """Yield files that are missing or too short, and records that share bytes."""
    for file, in_file in records.items():
        size = checkpoint.directory.size(file)
        if size is None:
            why = checkpoint.directory.why_barred(file) or "the file is not there"
            yield CheckpointFault("missing_file", fqns_of(in_file), (file,), why)
            continue
        beyond = [record for record in in_file if record.end > size]
        if beyond:
            needed = max(record.end for record in beyond)
            message = (
                f"{size} bytes, and {needed} are needed: {len(beyond)} of {len(in_file)} records "
                "end beyond its end"
            )
            yield CheckpointFault("truncated_file", fqns_of(beyond), (file,), message)
        reached: Record | None = None
        for record in in_file:
            # Two keys may share one whole record; that they share a part of one is a fault.
            if reached is not None and reached.start < record.start < reached.end:
                message = (
                    f"bytes {record.start}-{reached.end} belong to {reached.name} and to "
                    f"{record.name}"
                )
                names = tuple(sorted({reached.fqn, record.fqn}))
                yield CheckpointFault("shared_bytes", names, (file,), message)
            if reached is None or record.end > reached.end:
                reached = record


def _format_boxes(boxes: list[Box], shape: tuple[int, ...] | None) -> str:
    return format_names([format_box(box, shape) for box in boxes], MAX_BOXES)
