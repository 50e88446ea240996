"""What the metadata alone prove: whether chunks tile their tensors, and files hold them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dcp_placements.errors import format_names
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import contains, format_box, overlaps, tiles, uncovered
from dcp_placements.offline.checkpoint import Checkpoint, StoredChunk, StoredTensor
from dcp_placements.storage.metadata.save_ids import id_in_name

BOXES_TOLD = 4


@dataclass(frozen=True, slots=True)
class CheckpointFault:
    """One thing wrong with a checkpoint.

    Attributes:
        kind: What it is, in one word that stays; README.md lists them.
        tensors: Keys that it is about, sorted.
        files: Files that it is about, sorted.
        message: What was found against what was declared.
    """

    kind: str
    tensors: tuple[str, ...]
    files: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """What the metadata say of one stretch of a file.

    Attributes:
        fqn: The key that it belongs to.
        chunk: Its chunk; of an object a chunk without dims.
        tensor: Its tensor; None for an object.
        copied: The keys of what it holds copies of, where it is a shadow.
    """

    fqn: str
    chunk: StoredChunk
    tensor: StoredTensor | None
    copied: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """Where it begins in the file, in bytes."""
        return self.chunk.start

    @property
    def end(self) -> int:
        """Where it ends in the file, in bytes."""
        return self.chunk.start + self.chunk.nbytes

    @property
    def name(self) -> str:
        """The key, and which part of the tensor where it is not all of it."""
        if self.copied:
            return f"the copy of {format_names(self.copied, 2)}"
        if self.tensor is None or len(self.tensor.boxes) == 1:
            return self.fqn
        return f"{self.fqn} {format_box(self.chunk.box, self.tensor.shape)}"


def records_by_file(checkpoint: Checkpoint) -> dict[str, list[Record]]:
    """Return what every file holds, in file order; files sorted by name."""
    found: dict[str, list[Record]] = defaultdict(list)
    for fqn, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file is not None:
                found[chunk.file].append(Record(fqn, chunk, tensor))
    for fqn, told in checkpoint.objects.items():
        if told.file is not None:
            chunk = StoredChunk(Box((), ()), told.file, told.start, told.nbytes)
            found[told.file].append(Record(fqn, chunk, None))
    for key, pack in checkpoint.shadows.items():
        for chunk in pack.copies:
            assert chunk.file is not None
            found[chunk.file].append(Record(key, chunk, pack.tensor, pack.fqns))
    for records in found.values():
        records.sort(key=lambda record: (record.start, record.end))
    return dict(sorted(found.items()))


def tiling_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield holes, overlaps, and chunks out of bounds; tensors that are cut alike are told once."""
    alike: dict[tuple[tuple[int, ...], int], list[StoredTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        alike[tensor.shape, tensor.cut].append(tensor)
    for tensors in alike.values():
        names = tuple(sorted(tensor.fqn for tensor in tensors))
        for kind, message in box_faults(tensors[0].whole, tensors[0].boxes):
            yield CheckpointFault(kind, names, (), message)


def box_faults(whole: Box, boxes: Iterable[Box]) -> Iterator[tuple[str, str]]:
    """Yield ``(kind, message)`` of what keeps boxes from covering a tensor once."""
    shape = whole.sizes
    counts = Counter(box for box in boxes if box.numel)
    if not whole.numel and not counts:
        return
    if max(counts.values(), default=0) == 1 and tiles(whole, counts):
        return
    outside = [box for box in counts if not contains(whole, box)]
    if outside:
        yield "out_of_bounds", f"{_told(outside, None)} of a {shape} tensor"
    twice = [box for box, count in counts.items() if count > 1]
    if twice:
        yield "overlap", f"{_told(twice, shape)} of {shape} is there more than once"
    pairs = overlaps(list(counts), limit=BOXES_TOLD)
    if pairs:
        told = "; ".join(f"{format_box(a, shape)} and {format_box(b, shape)}" for a, b in pairs)
        yield "overlap", f"chunks of {shape} overlap: {told}"
    holes = uncovered(whole, list(counts), limit=2 * BOXES_TOLD)
    if holes:
        yield "hole", f"no chunk holds {_told(holes, shape)} of {shape}"


def place_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield chunks without a place, places without a chunk, and what an index names in vain."""
    for fqn, tensor in checkpoint.tensors.items():
        lost = [chunk.box for chunk in tensor.chunks if chunk.file is None]
        if lost:
            told = f"the metadata say of no file that it holds {_told(lost, tensor.shape)}"
            yield CheckpointFault("unplaced", (fqn,), (), f"{told} of {tensor.shape}")
    for fqn, told_object in checkpoint.objects.items():
        if told_object.file is None:
            message = "the metadata say of no file that it holds this object"
            yield CheckpointFault("unplaced", (fqn,), (), message)
    for fqn, offset, file in checkpoint.unclaimed():
        at = "" if offset is None else f" at {offset}"
        message = f"{file} has a chunk{at} that the tensor's metadata do not know"
        yield CheckpointFault("unclaimed", (fqn,), (file,), message)
    for file in sorted(set(checkpoint.absent.values())):
        names = tuple(sorted(fqn for fqn, name in checkpoint.absent.items() if name == file))
        if checkpoint.directory.size(file) is None:
            yield CheckpointFault("missing_file", names, (file,), "the file is not there")
        else:
            message = "the index says that the file has them, and it has not"
            yield CheckpointFault("unplaced", names, (file,), message)


def id_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield files that another save wrote, by the ids that they begin with."""
    for file, record in checkpoint.id_records.items():
        if checkpoint.directory.size(file) is None:
            continue
        if record.info.transform_descriptors:
            continue  # what undoes them is not known here
        try:
            with checkpoint.directory.open(file) as stream:
                stream.seek(record.info.offset)
                fault = record.fault(stream.read(record.nbytes))
        except OSError:
            continue  # told of where its other records are read
        if fault is not None:
            yield CheckpointFault("mixed_generations", (), (file,), f"it {fault.headline}")


def files_without_id(checkpoint: Checkpoint) -> list[str]:
    """Return the files that do not say which save wrote them, sorted."""
    own = checkpoint.id_records
    return [file for file in checkpoint.files if file not in own and id_in_name(file) is None]


def file_faults(
    checkpoint: Checkpoint, records: dict[str, list[Record]]
) -> Iterator[CheckpointFault]:
    """Yield files that are missing or too short, and records that share bytes."""
    for file, held in records.items():
        size = checkpoint.directory.size(file)
        if size is None:
            why = checkpoint.directory.why_barred(file) or "the file is not there"
            yield CheckpointFault("missing_file", _names(held), (file,), why)
            continue
        beyond = [record for record in held if record.end > size]
        if beyond:
            needed = max(record.end for record in beyond)
            message = (
                f"{size} bytes, and {needed} are needed: {len(beyond)} of {len(held)} records end "
                "beyond its end"
            )
            yield CheckpointFault("truncated_file", _names(beyond), (file,), message)
        reached: Record | None = None
        for record in held:
            # Two keys of one record may be meant so; of a part of one they are not.
            if reached is not None and reached.start < record.start < reached.end:
                message = (
                    f"bytes {record.start}-{reached.end} belong to {reached.name} and to "
                    f"{record.name}"
                )
                names = tuple(sorted({reached.fqn, record.fqn}))
                yield CheckpointFault("shared_bytes", names, (file,), message)
            if reached is None or record.end > reached.end:
                reached = record


def _names(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(sorted({fqn for record in records for fqn in record.copied or (record.fqn,)}))


def _told(boxes: list[Box], shape: tuple[int, ...] | None) -> str:
    return format_names([format_box(box, shape) for box in boxes], BOXES_TOLD)
