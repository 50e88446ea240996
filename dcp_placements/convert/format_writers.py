"""The end of every conversion: files written block by block in a format, an output, a report.

The files of an output follow from its identity: a digest of the source's files, by their versions,
and of all that is written. So an interrupted conversion continues, if source and arguments are the
same, after the files that it finished, and writes the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import IO, Any

import torch
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements._torch import CURRENT_DCP_VERSION
from dcp_placements.errors import (
    CannotLook,
    Fault,
    PlacementError,
    raise_faults,
)
from dcp_placements.items import quiet_gc
from dcp_placements.layout.boxes import as_boxes
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.names.recorded_numbers import Numberings
from dcp_placements.names.renames import Step
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.box_reads import BoxReader, sub_boxes
from dcp_placements.offline.checkpoint import Checkpoint, LeftOut, StoredRecord
from dcp_placements.offline.directory import check_versions
from dcp_placements.offline.output import Output
from dcp_placements.offline.rehearsals.rehearsed_world import RehearsedWorld
from dcp_placements.offline.safetensors_files import NAMED_DTYPES, RENAMED, write_header
from dcp_placements.offline.texts import Progress
from dcp_placements.short_text import (
    folded_names,
    format_count,
    format_name,
    format_names,
    format_nbytes,
    format_ranks,
)
from dcp_placements.storage.file_reads import memory_of, range_in_memory
from dcp_placements.storage.index import index_of_locations
from dcp_placements.storage.metadata_file import write_metadata
from dcp_placements.storage.provenance import (
    RESERVED_KEY,
    doubts_of,
    identity,
    packed_doubts,
    packed_record,
)
from dcp_placements.storage.record import Record
from dcp_placements.storage.record_writes import RecordTemplate
from dcp_placements.storage.save_ids import name_with_id
from dcp_placements.storage.torch_metadata import ChunkList, StoredLocation, build_entries
from dcp_placements.table.proof_faults import Holders, proof_faults
from dcp_placements.table.prove import Compared, prove

NOT_REWRITTEN = "the checkpoint cannot be rewritten for this world"
"""The opening line of refusals."""

_HOLD_ALL = (
    "way out:     rules, a mesh and renames by which the ranks of this world together hold it all"
)

FILE_NBYTES = 4 << 30

INDEX = "model.safetensors.index.json"

LEAST_NBYTES = 1 << 20
"""The least size of a slab, whatever the memory."""

_BESIDES_NBYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote; with ``dry_run``, what it would write."""

    source: str  # the source's directory or URL
    out: str  # the output's directory or URL
    is_written: bool
    files: Mapping[str, int]  # by name: bytes of a checkpoint's file, or of a file's tensors
    keys: tuple[str, ...] = field(repr=False)  # keys of the tensors, in order
    nbytes: int  # bytes of the tensors' elements
    kept: tuple[str, ...]  # files of an earlier attempt
    beside: tuple[LeftOut, ...]  # other contents of ranks' files, with the reasons
    # Bytes of ranks' files that are not written, by what became of them
    accounted: Mapping[str, int]
    notes: tuple[str, ...]  # other remarks
    objects: int = 0  # number of keys that are no tensors
    prefix: str = ""  # the prefix that was removed from the names
    left_out: tuple[str, ...] = ()  # keys or files of the source that are not written
    # Names that ``rename`` left as they are; empty without a rename
    unchanged: tuple[str, ...] = ()
    # Names of tensors that are equal to another one and were not written
    tied: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return len(self.keys)

    def __str__(self) -> str:
        count, files = format_count(self.tensors, "tensor"), format_count(len(self.files), "file")
        verb = "" if self.is_written else "would be written: "
        lines = [f"{verb}{count}, {format_nbytes(self.nbytes)}, in {files}: {self.out}"]
        if self.prefix:
            lines.append(f"    without the prefix {self.prefix}.")
        lines += [f"    {what}: {format_nbytes(n)}" for what, n in self.accounted.items()]
        listed = {
            "not renamed": self.unchanged,
            "tied, written once": self.tied,
            "kept of an earlier attempt": self.kept,
            "left out": self.left_out,
        }
        lines += [
            f"    {what}: {format_names(names, 3)}" for what, names in listed.items() if names
        ]
        for why in dict.fromkeys(entry.why for entry in self.beside):
            entries = [entry for entry in self.beside if entry.why == why]
            nbytes = format_nbytes(sum(entry.nbytes for entry in entries))
            names = format_names([entry.what for entry in entries], 4)
            lines.append(f"    left out: {names} ({nbytes}): {why}")
        lines += [f"    note: {note}" for note in self.notes]
        return "\n".join(map(format_name, lines))


class Elements(AbstractContextManager["Elements"]):
    """Reads the elements of boxes in blocks: the next block is read while one is written.

    Records that are read whole are compared with their CRC-32.

    Args:
        reader: Reader of the source.
        memory: Bytes that data may take.
        progress: Called with the bytes written, and those to write.
        total: Bytes to write.
    """

    def __init__(self, reader: Any, memory: int, progress: Progress, total: int) -> None:
        self._reader = reader
        # A slab takes four times its bytes: it is read, joined, cast, and written.
        self._limit = max((memory - _BESIDES_NBYTES) // 4, LEAST_NBYTES)
        self._progress = progress
        self._total = total
        self._done = 0
        self._pool = ThreadPoolExecutor(1)

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown()

    def advance(self, nbytes: int) -> None:
        """Report progress."""
        self._done += nbytes
        self._progress(self._done, self._total)

    def of(self, tensor: AssembledTensor, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of a box in C order."""
        blocks = self._blocks(tensor, box)
        block = next(blocks, None)
        while block is not None:
            following = self._pool.submit(next, blocks, None)
            yield block
            self.advance(block.nbytes)
            block = following.result()

    def _blocks(self, tensor: AssembledTensor, box: Box) -> Iterator[memoryview]:
        if not box.numel:
            return
        stretches = tensor.stretches(self._reader, box)
        if stretches is None:
            sources = [block.source.dtype.itemsize for block in tensor.blocks]
            for small in sub_boxes(box, self._limit // max([*sources, tensor.dtype.itemsize])):
                slab = tensor.read(self._reader, small)
                data = memory_of(slab.contiguous())
                assert data is not None, "it was read from a file"
                yield data
            return
        for stretch in stretches:
            yield from self._reader.blocks(stretch)


class Writer:
    """Writes tensors in a format.

    Args:
        source: Checkpoint of the tensors.
        tensors: Tensors to write, by key.
        described: All that decides the bytes of the files beside the tensors.

    Attributes:
        tensors: Tensors to write, by key.
        identity: Digest of the source's files, by their versions, and of all that is written.
        files: Bytes by file, in the order of writing.
        last: The file that completes the output; its index if it is none of these.
    """

    files: dict[str, int]
    last: str

    def __init__(
        self, source: Checkpoint, tensors: dict[str, AssembledTensor], described: Iterable[object]
    ) -> None:
        self.tensors = tensors
        digest = hashlib.sha256(json.dumps(sorted(source.versions.items())).encode())
        blocks = (
            (
                t.fqn,
                t.shape,
                t.dtype,
                [(b.box, b.source.origin, b.stored_box, b.dims) for b in t.blocks],
            )
            for t in tensors.values()
        )
        of_all = source.path, torch.__version__, *source.identity()
        for line in chain(of_all, blocks, described):
            digest.update(f"{line}\n".encode("utf-8", "surrogatepass"))
        self.identity = digest.hexdigest()

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one of the files, or the last one."""
        raise NotImplementedError


def write_output(
    output: Output,
    source: Checkpoint,
    writer: Writer,
    memory: int,
    dry_run: bool,
    progress: Progress,
) -> Converted:
    """Write tensors of a source, whose file versions were noted before any data was read.

    Args:
        output: The output to create.
        source: Checkpoint of the tensors.
        writer: Writer of a format, with the tensors.
        memory: Bytes that data may take.
        dry_run: Whether to plan only.
        progress: Called as files are written.
    """
    # All that is asked of the source for the result, before the output is complete.
    kept, notes = [], [*source.notes]
    beside, accounted = tuple(source.left_out), source.accounted
    total = sum(writer.files.values())
    # The last one comes last, whether it is among the others or not.
    names = [*[name for name in writer.files if name != writer.last], writer.last]
    with output, _room_for(output, total):
        if not dry_run:
            with (
                output.directory(names, writer.identity),
                BoxReader(source, check_crc=True) as reader,
                Elements(reader, memory, progress, total) as elements,
            ):
                for name in names:
                    if name in writer.files and output.has(name):
                        kept.append(name)
                        elements.advance(writer.files[name])
                        continue
                    with output.file(name) as stream:
                        writer.write(name, stream, elements)
                        if name == writer.last:
                            check_versions(source.directory, source.versions)
                for what, keys in (
                    ("read in part, so not compared with checksums", reader.uncompared),
                    ("without checksums, so that nothing proves the contents", reader.unproved),
                ):
                    if keys:
                        notes.append(f"{what}: {format_names(folded_names(sorted(keys)), 4)}")
    return Converted(
        source=source.path,
        out=str(output.path),
        is_written=not dry_run,
        files=dict(writer.files),
        keys=tuple(writer.tensors),
        nbytes=sum(tensor.nbytes for tensor in writer.tensors.values()),
        kept=tuple(kept),
        beside=beside,
        accounted=accounted,
        notes=tuple(notes),
    )


@contextmanager
def _room_for(output: Output, nbytes: int) -> Iterator[None]:
    """Name the bytes needed, where a disk, a quota, or a limit on files ends the block."""
    output.check_room(nbytes)
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise CannotLook(
            f"{output.path}: {error}\n"
            f"    needed:      {format_nbytes(nbytes)} in all, and room for metadata\n"
            "    way out:     make room, and give the same command again, which goes on from here"
        ) from error


class SafetensorsOut(Writer):
    """Writes files of up to ``max_shard_size`` bytes; a larger tensor has a file to itself.

    The last file is the index, if there are several.

    Args:
        source: Checkpoint of the tensors.
        tensors: Tensors to write, by key.
        max_shard_size: Most bytes of tensors in a file.
        renamed: Names before the rename by names after it, which the files keep.

    Raises:
        PlacementError: The format has no such dtype.
    """

    def __init__(
        self,
        source: Checkpoint,
        tensors: dict[str, AssembledTensor],
        max_shard_size: int,
        renamed: Mapping[str, str],
    ) -> None:
        super().__init__(source, tensors, [max_shard_size, *renamed.items()])
        self._notes = {"format": "pt"}
        if renamed:
            self._notes[RENAMED] = json.dumps(renamed)
        unknown = [
            tensor for tensor in tensors.values() if tensor.dtype not in NAMED_DTYPES.values()
        ]
        faults = [Fault(t.fqn, f"safetensors files have no dtype {t.dtype}") for t in unknown]
        raise_faults("the checkpoint cannot be exported", faults)
        shards: list[list[AssembledTensor]] = [[]]
        filled = 0
        for tensor in tensors.values():
            if shards[-1] and filled + tensor.nbytes > max_shard_size:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.nbytes
        count = len(shards)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        self._shards = dict(zip(names, shards, strict=True))
        self.files = {name: sum(t.nbytes for t in held) for name, held in self._shards.items()}
        self.last = INDEX if count > 1 else names[0]

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one file of tensors, those with the largest elements first; or the index."""
        if name == INDEX:
            weights = {t.fqn: file for file, tensors in self._shards.items() for t in tensors}
            index = {
                "metadata": {"total_size": sum(self.files.values())},
                "weight_map": dict(sorted(weights.items())),
            }
            stream.write((json.dumps(index, indent=2) + "\n").encode())
            return
        tensors = sorted(self._shards[name], key=lambda tensor: -tensor.dtype.itemsize)
        entries = [(tensor.fqn, tensor.dtype, tensor.shape) for tensor in tensors]
        stream.write(write_header(entries, self._notes))
        for tensor in tensors:
            for block in elements.of(tensor, tensor.whole):
                stream.write(block)


@dataclass
class Layout:
    """Which file has which boxes. ``(4, 3)`` experts on two ep ranks are in two files::

    Layout({0: [("experts.w", Box((0, 0), (2, 3)))], 1: [("experts.w", Box((2, 0), (2, 3)))]}, 2)

    Attributes:
        files: By rank, keys and boxes in file order. Objects are in the first file.
        world_size: Number of ranks that the checkpoint is for.
        cuts: Cuts that these ranks declare, by key.
        renames: Renames of these ranks.
        numberings: Lists of keys to which the renames give numbers.
    """

    files: dict[int, list[tuple[str, Box]]] = field(default_factory=lambda: {0: []})
    world_size: int = 1
    cuts: dict[str, Cuts] = field(default_factory=dict)
    renames: dict[Step, None] = field(default_factory=dict)
    numberings: Numberings = field(default_factory=dict)


def whole_files(tensors: Mapping[str, AssembledTensor]) -> Layout:
    """Return whole tensors in files of up to ``FILE_NBYTES``, larger ones in several chunks."""
    layout = Layout()
    filled = 0
    for fqn, tensor in tensors.items():
        itemsize = tensor.dtype.itemsize
        for box in sub_boxes(tensor.whole, max(FILE_NBYTES // itemsize, 1)):
            nbytes = box.numel * itemsize
            if filled and filled + nbytes > FILE_NBYTES:
                layout.files[len(layout.files)] = []
                filled = 0
            filled += nbytes
            layout.files[len(layout.files) - 1].append((fqn, box))
    return layout


def world_files(world: RehearsedWorld) -> Layout:
    """Return each box in the file of the lowest rank that holds it.

    A rank whose boxes no other rank holds then reads one file; replicas read the lowest rank's.

    Raises:
        PlacementError: A load in that world would be refused, or its ranks do not hold everything.
    """
    raise_faults(NOT_REWRITTEN, list(world.faults()))
    owners_of: dict[str, dict[Box, int]] = {}
    renames, given = dict.fromkeys(world.renames), world.numberings()
    layout = Layout({}, world.size, renames=renames, numberings=given)
    ranks = Holders(format_ranks, "rank", "on", world.size, missing=_HOLD_ALL)
    faults: list[Fault] = []
    for finding in prove(world.table):
        # Keys that no rank has are named below.
        if not isinstance(finding, Compared) and len(finding.piece.ranks):
            faults += proof_faults(finding, world.table, ranks)
    for piece in world.table.pieces:
        if piece.group.dtype is None:
            continue
        cover = piece.cover
        lowest = cover.ranks[cover.order[cover.starts[:-1]]].tolist()
        owners = dict(zip(as_boxes(cover.boxes), lowest, strict=True))
        owners_of |= dict.fromkeys(piece.fqns, owners)
        # No cuts are recorded of keys that ranks declare in several ways.
        declared = {source.group.cuts for source in piece.sources}
        layout.cuts |= dict.fromkeys(piece.fqns, declared.pop() if len(declared) == 1 else ())
    for fqn in world.checkpoint.tensors:
        if not owners_of.get(fqn):
            likely = "likely:      rename= of the rules leaves out its number"
            faults.append(Fault(fqn, "no rank of this world has this key", (likely,)))
        for box, rank in owners_of.get(fqn, {}).items():
            layout.files.setdefault(rank, []).append((fqn, box))
    raise_faults(NOT_REWRITTEN, faults)
    if world.checkpoint.objects:
        layout.files.setdefault(0, [])
    layout.files = dict(sorted(layout.files.items()))
    return layout


class DcpOut(Writer):
    """Writes one file for each rank of a layout.

    Args:
        source: Checkpoint of the objects, which are copied record by record with their transforms,
            and of the facts that the new checkpoint keeps.
        tensors: Tensors by key, in the order of the new checkpoint.
        layout: Which file has which boxes of the tensors.
    """

    last = ".metadata"

    def __init__(
        self, source: Checkpoint, tensors: dict[str, AssembledTensor], layout: Layout
    ) -> None:
        self._source, self._layout = source, layout
        declared = layout.world_size, sorted(layout.cuts.items()), list(layout.renames)
        super().__init__(source, tensors, [declared, *layout.files.items()])
        self._save_id = bytes.fromhex(self.identity)[:16]
        self._boxes = {
            f"{name_with_id(f'__{rank}_', self._save_id)}0.distcp": boxes
            for rank, boxes in layout.files.items()
        }
        first = next(iter(self._boxes), "")
        self._objects = {first: list(source.objects.values())}
        self._locations = [location for name in self._boxes for location in self._placed(name)]
        self.files = dict.fromkeys(self._boxes, 0)
        for location in self._locations:
            self.files[location.path] += location.length

    def _placed(self, name: str) -> Iterator[StoredLocation]:
        """Yield the place of every record of a file, in file order."""
        start = 0
        for held in self._objects.get(name, ()):
            transforms = held.transforms or None
            yield StoredLocation(held.fqn, None, name, start, held.nbytes, transforms)
            start += held.nbytes
        for fqn, box in self._boxes[name]:
            length = _record_of(self.tensors[fqn].dtype, box.sizes).length
            yield StoredLocation(fqn, torch.Size(box.offsets), name, start, length)
            start += length

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one data file, or ``.metadata``."""
        if name == self.last:
            with quiet_gc():
                metadata = self._metadata()
                entries = build_entries(metadata.state_dict_metadata)
                metadata.storage_data = index_of_locations(self._locations, entries)
                write_metadata(metadata, stream)
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
            problem = Record(range_in_memory(record)).check().problem
        if problem is not None:
            headline = f"its record in {stored.file} is not what was written: {problem}"
            raise_faults("the checkpoint is damaged", [Fault(stored.fqn, headline)])
        return record

    def _metadata(self) -> Metadata:
        """Return the metadata of the new checkpoint, without places."""
        metadata = self._source.metadata
        old, paths = metadata.state_dict_metadata, metadata.planner_data
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
        order = {fqn: index for index, fqn in enumerate(old)}
        ordered = {f: stored[f] for f in sorted(stored, key=lambda f: order.get(f, len(order)))}
        data: dict[Any, Any] = {fqn: (fqn,) for fqn in ordered}
        if isinstance(paths, Mapping):
            data |= {key: path for key, path in paths.items() if key in ordered}
        data[RESERVED_KEY] = self._provenance(ordered)
        metadata = Metadata(ordered, planner_data=data)
        metadata.version = CURRENT_DCP_VERSION
        return metadata

    def _provenance(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of this save."""
        old, record, layout = self._source.provenance or {}, self._source.record, self._layout
        # The source's renames still describe the keys.
        renames = ({} if record is None else dict.fromkeys(record.renames)) | layout.renames
        numberings = {**({} if record is None else record.numberings), **layout.numberings}
        numbers: dict[Cuts, int] = {(): 0}
        cut_of = {fqn: numbers.setdefault(cuts, len(numbers)) for fqn, cuts in layout.cuts.items()}
        provenance = identity(self._save_id, world_size=layout.world_size, step=old.get("step"))
        provenance |= packed_record(list(numbers), cut_of, keys, renames, numberings)
        provenance |= packed_doubts(doubts_of(old, self._source.metadata.state_dict_metadata), keys)
        if "save_id" in old:
            provenance["resharded_from"] = old["save_id"]
        return provenance


@lru_cache(maxsize=1 << 12)
def _record_of(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate:
    """Return the record of chunks of this form, without their elements.

    Raises:
        PlacementError: This torch writes another format.
    """
    try:
        return RecordTemplate(dtype, shape)
    except ValueError as error:
        raise PlacementError(f"torch {torch.__version__}: {error}") from error
