"""``verify``: whether a checkpoint is whole, by its metadata and by its data files.

Metadata and the sizes of files prove holes, overlaps and missing files. A record of a ``.distcp``
file is a zip file that ``torch.save`` wrote. Its first bytes tell shape and dtype, and every entry
of it has a checksum, which ``torch.load`` does not compare.
"""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import assert_never

import torch

from dcp_placements.items import quiet_gc
from dcp_placements.layout.boxes import as_array, flaws, format_box, format_boxes
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import (
    AnySource,
    Checkpoint,
    CheckpointFault,
    ChunkBoxes,
    FileFinding,
    StoredRecord,
    StoredTensor,
    check_count,
)
from dcp_placements.offline.directory import OpenedFile, check_damage, opened_ahead, overwritten
from dcp_placements.offline.lost_tensors import compared_with_whole
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.offline.texts import Progress, short
from dcp_placements.offline.whole_shapes import ModelSource, whole_of
from dcp_placements.short_text import (
    folded_keys,
    format_count,
    format_error,
    format_names,
    format_nbytes,
    natural_key,
)
from dcp_placements.storage.file_reads import ByteRange, range_in_memory
from dcp_placements.storage.provenance import OWN_PREFIX
from dcp_placements.storage.record import Record, SoundRecords
from dcp_placements.storage.record_head import LOCAL, HeadCache, RecordHead
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.store import StorageOptions

VERIFIED_NBYTES = 2 << 30

WINDOW_NBYTES = 1 << 20
"""Small records are read so many bytes at a time."""

MAX_SHOWN = 10
"""Pairs of a file and a kind of fault that are shown by default: three lines each."""

MAX_BOXES = 4
"""Boxes that a message lists."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a checkpoint is whole."""

    path: str  # path of the checkpoint
    faults: tuple[CheckpointFault, ...]  # its faults, sorted by kind, file and key
    notes: tuple[str, ...]  # observations that prove no fault
    checked: Mapping[str, int]  # ``tensors``, their ``chunks``, ``bytes`` read and compared
    # Records that were not read; the notes name them
    unread: int = field(repr=False)
    contents: bool = field(repr=False)  # whether contents were to be read

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = MAX_SHOWN) -> str:
        """Return the faults by file and kind, the notes and the verdict.

        Args:
            most: Largest number of pairs of file and kind to show.
        """
        by_file_and_kind: dict[tuple[str, str], list[CheckpointFault]] = {}
        for fault in self.faults:
            where = short(fault.files) if fault.files else "in the metadata"
            by_file_and_kind.setdefault((where, fault.kind), []).append(fault)
        ordered = sorted(by_file_and_kind, key=lambda key: (natural_key(key[0]), key[1]))
        lines: list[str] = []
        shown = None
        for where, kind in ordered[:most]:
            faults = by_file_and_kind[where, kind]
            lines += [] if where == shown else [where]
            shown = where
            keys = folded_keys({fqn for fault in faults for fqn in fault.tensors})
            names = short([folded.name for folded in keys]) if keys else "no key"
            several = len(faults) > 1
            number = f"{format_count(len(faults), 'fault')}, " if several else ""
            lines.append(f"    {kind}: {number}{names}")
            first = " (the first)" if several else ""
            lines.append(f"        found:       {faults[0].message}{first}")
        rest = ordered[most:]
        if rest:
            number = format_count(sum(len(by_file_and_kind[key]) for key in rest), "more fault")
            count = format_count(len({where for where, _ in rest}), "place")
            lines.append(f"... and {number} in {count}; --all")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, f"{self.path}: {self._verdict()}"])

    def _verdict(self) -> str:
        tensors = format_count(self.checked["tensors"], "tensor")
        chunks, nbytes = format_count(self.checked["chunks"], "chunk"), self.checked["bytes"]
        read = f", {format_nbytes(nbytes)} read" if nbytes else ""
        if self.faults:
            verdict = f"not sound, {format_count(len(self.faults), 'fault')}"
        elif not self.contents:
            verdict = "sizes and structure sound; contents not read (--contents)"
        elif self.unread:
            verdict = f"sound but for {format_count(self.unread, 'record')} not read"
        else:
            verdict = "sound"
        return f"{verdict} ({tensors} in {chunks}{read})"


@quiet_gc()
def verify(
    path: AnySource,
    *,
    contents: bool = False,
    whole: ModelSource | None = None,
    memory: int = VERIFIED_NBYTES,
    storage_options: StorageOptions = None,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Return the faults of a checkpoint.

    Without ``contents`` only the head of every record is read. This proves that chunks tile their
    tensors, that files exist and are long enough, and that records match the metadata.

    Args:
        path: The checkpoint.
        contents: Whether to read everything and compare it with the checksums that ``torch.save``
            writes, and the pickle of ``.metadata`` that torch reads with its index.
        whole: The unsharded model, as for ``diagnose``: a key that it has and the checkpoint lacks,
            or that has another shape, is a fault.
        memory: Bytes that data may take.
        storage_options: Options that fsspec passes to the file system of a URL.
        progress: Called as files are read.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or there are faults, and a save
            has replaced its ``.metadata`` meanwhile; or ``whole`` says no shapes.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    faults = [*metadata_faults(checkpoint), *checkpoint.description_faults(contents=contents)]
    compared = None
    if whole is not None:
        compared = compared_with_whole(checkpoint, whole_of(whole, storage_options))
        faults += [
            CheckpointFault("whole", (tensor.fqn,), (), tensor.difference)
            for tensor in compared.lost
        ]
    records = records_by_file(checkpoint)
    total = sum([record.nbytes for in_file in records.values() for record in in_file])
    checks = _Checks(
        checkpoint,
        contents=contents,
        limit_nbytes=memory // 3,
        progress=lambda done: progress(min(done, total), total),
    )
    with opened_ahead(checkpoint.directory, records) as opened:
        for (file, in_file), held in zip(records.items(), opened, strict=True):
            with nullcontext() if isinstance(held, OSError) else held.stream:
                faults += file_faults(checkpoint, file, in_file)
                faults += checks.faults(file, held, in_file)
    if faults and (changed := checkpoint.changed_files()):
        raise overwritten(checkpoint.directory, changed)
    return Verification(
        path=checkpoint.path,
        faults=tuple(sorted(faults, key=lambda fault: (fault.kind, fault.files, fault.tensors))),
        notes=(*_notes(checkpoint), *checks.notes(), *(compared.notes if compared else ())),
        checked={
            "tensors": len(checkpoint.tensors),
            "chunks": sum([tensor.count for tensor in checkpoint.tensors.values()]),
            "bytes": checks.nbytes if contents else 0,
        },
        unread=len(checks.skipped) + len(checks.other_types),
        contents=contents,
    )


class _Checks:
    """Checks the records of a checkpoint's files.

    Args:
        checkpoint: The checkpoint.
        contents: Whether to read everything and compare checksums.
        limit_nbytes: Size above which records that cannot be checked in blocks are skipped.
        progress: Called with the bytes checked so far, after every block.

    Attributes:
        nbytes: Bytes of contents that were checked.
        skipped: Names of the records above ``limit_nbytes``.
        other_types: Names of records of types that ``torch.load`` was not told to allow.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        contents: bool,
        limit_nbytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self.nbytes = 0
        self.skipped: list[str] = []
        self.other_types: list[str] = []
        self._unchecked = self._transformed = 0
        self._checkpoint = checkpoint
        self._contents = contents
        self._limit_nbytes = limit_nbytes
        self._progress = progress
        self._heads = HeadCache()
        self._sound = SoundRecords()

    def notes(self) -> Iterator[str]:
        """Yield what was not checked, and why."""
        if self._contents and self._checkpoint.unproved:
            yield self._checkpoint.unproved
        if self._unchecked:
            yield (
                f"{format_count(self._unchecked, 'record')} have no checksums "
                "(torch.serialization.set_crc32_options(False)): nothing proves their contents"
            )
        if self._transformed:
            yield (
                f"{format_count(self._transformed, 'record')} went through transforms such as "
                "compression: only --contents checks them"
            )
        if self.skipped:
            names = format_names(self.skipped, 4)
            yield f"not plain, and larger than a third of --memory, so not read: {names}"
        if self.other_types:
            names = format_names(self.other_types, 4)
            yield f"of types that torch.load was not told to allow, so not read: {names}"

    def faults(
        self, file: str, held: OpenedFile | OSError, records: Sequence[StoredRecord]
    ) -> list[CheckpointFault]:
        """Return the faults of those records of one file that lie within it.

        Args:
            file: Name of the file.
            held: The file, or why it cannot be opened.
            records: Its records, in file order.

        Raises:
            CannotLook: The file may not be read, or its service does not answer.
        """
        size = self._checkpoint.directory.size(file)
        if size is None:
            return []
        faults: list[CheckpointFault] = []
        try:
            if isinstance(held, OSError):
                raise held
            opened = held.file
            if self._contents:
                whole_file = ByteRange(opened, 0, size)
                for kind, finding in self._checkpoint.verify_file(self, whole_file):
                    fault = CheckpointFault(kind, fqns_of(records), (file,), finding)
                    faults.append(fault)
            held_end = 0
            for record in records:  # in file order
                start, nbytes = record.start, record.nbytes
                if start + nbytes > size:
                    continue
                is_small = nbytes <= WINDOW_NBYTES // 16
                if is_small and start + nbytes > held_end:
                    window = bytearray(min(WINDOW_NBYTES, size - start))
                    opened.hold(memoryview(window), start)
                    held_end = start + len(window)
                byte_range = ByteRange(opened, start, nbytes)
                for kind, finding in self._checkpoint.verify_record(self, byte_range, record):
                    message = f"{record_name(self._checkpoint, record)} in {file}: {finding}"
                    faults.append(CheckpointFault(kind, (record.fqn,), (file,), message))
        except (OSError, EOFError) as error:
            check_damage(self._checkpoint.directory, file, error)
            message = f"it cannot be read: {error}"
            # A disk is broken, or the file was removed or cut off since its size was read.
            kind = "truncated_file" if isinstance(error, EOFError) else "missing_file"
            return [CheckpointFault(kind, fqns_of(records), (file,), message)]
        return faults

    def saved(self, byte_range: ByteRange, record: StoredRecord) -> Iterator[FileFinding]:
        """Yield the faults of a record of ``torch.save``: of shape, dtype and contents."""
        if record.transforms:
            if not self._contents:
                self._transformed += 1
                return
            # To undo transforms, the whole record must be read.
            try:
                content = self._checkpoint.read_record(record, self._limit_nbytes)
            except OSError:
                raise
            except Exception as error:
                # An extension can raise anything.
                yield "wrong_record", _reason(error)
                return
            if content is None:
                self.skipped.append(record_name(self._checkpoint, record))
                return
            byte_range = range_in_memory(content)
        if record.box is None:
            # An object may be written in any way: if it begins or ends as a zip file, it has sums.
            is_zip = byte_range.read(0, len(LOCAL)) == LOCAL or zipfile.is_zipfile(
                byte_range.stream()
            )
            if self._contents and is_zip:
                yield from self.checksums(byte_range)
            return
        head = None if record.transforms else self._heads.find(byte_range)
        if head is not None:
            yield from self._mismatches(record, head.shape, head.dtype)
            if not self._contents:
                return
        broken = list(self.checksums(byte_range, head)) if self._contents else []
        yield from broken
        # A wrong checksum is more specific than that it cannot be loaded.
        if head is None and not broken:
            yield from self._loaded(byte_range, record)

    def _loaded(self, byte_range: ByteRange, record: StoredRecord) -> Iterator[FileFinding]:
        """Check a tensor whose record is not plain: other strides, or transforms."""
        if record.nbytes > self._limit_nbytes:
            self.skipped.append(record_name(self._checkpoint, record))
            return
        try:
            # Not through a reader, which converts to the dtype of the metadata.
            tensor = Record(byte_range).load()
        except RefusedGlobal:  # of a type that this process was not told to allow
            self.other_types.append(record_name(self._checkpoint, record))
        except Exception as error:
            # torch.load of a broken file can raise anything.
            yield "wrong_record", _reason(error)
        else:
            yield from self._mismatches(record, tuple(tensor.shape), tensor.dtype)

    def _mismatches(
        self, record: StoredRecord, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[FileFinding]:
        assert record.box is not None, "a tensor's"
        declared = record.box.sizes, self._checkpoint.tensors[record.fqn].dtype
        if (shape, dtype) == declared:
            return []
        message = (
            f"a {shape} {dtype} tensor is at byte {record.start}, where the metadata have "
            f"{declared[0]} {declared[1]}"
        )
        return [("wrong_record", message)]

    def advance(self, nbytes: int) -> None:
        """Count bytes as checked."""
        self.nbytes += nbytes
        self._progress(self.nbytes)

    def checksums(
        self, byte_range: ByteRange, tensor: RecordHead | None = None
    ) -> Iterator[FileFinding]:
        """Yield the entries of a zip file that do not match their checksums.

        Args:
            byte_range: The record.
            tensor: The record's description, if it is plain.
        """
        check = Record(byte_range, tensor).check(self.advance, self._sound)
        self._unchecked += not check.has_crc
        yield from [("checksum", text) for text in check.differing]
        if check.broken is not None or not check.is_zip:
            yield "wrong_record", check.broken or "this is no zip file, and torch.save writes one"


def _reason(error: Exception) -> str:
    """Return the fault of a record, in the words of torch's message without its advice."""
    text = str(error)
    _, refused, reason = text.partition("WeightsUnpickler error: ")
    if refused:
        sentence = reason.partition("\n")[0].partition(". ")[0].strip()
        return f"torch.load refuses it: {sentence or 'it is broken'}"
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(lines[1:3] or lines[:1]) or format_error(error)


def _notes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield what is not read, and signs of damage that prove none."""
    yield from checkpoint.notes
    yield from checkpoint.signs()
    for name in checkpoint.other_files:
        if name.endswith((".tmp", ".partial")):
            yield f"{name} was left over by a process that was cut off"


def records_by_file(checkpoint: Checkpoint) -> dict[str, list[StoredRecord]]:
    """Return the records of every file, copies too, in file order; files sorted by name.

    Raises:
        CannotLook: There are too many.
    """
    check_count(checkpoint.path, len(checkpoint.rows))
    by_file: dict[str, list[StoredRecord]] = defaultdict(list)
    for record in checkpoint.records():
        assert record.file is not None, "records have a place"
        by_file[record.file].append(record)
    for records in by_file.values():
        records.sort(key=attrgetter("start", "nbytes"))
    return dict(sorted(by_file.items()))


def record_name(checkpoint: Checkpoint, record: StoredRecord) -> str:
    """Return the key of a record, with the box where that is a part of the tensor."""
    if record.box is None or checkpoint.tensors[record.fqn].count == 1:
        return record.fqn
    return f"{record.fqn} {format_box(record.box, checkpoint.tensors[record.fqn].shape)}"


def structural_faults(checkpoint: Checkpoint) -> list[CheckpointFault]:
    """Return all faults that the metadata, the sizes of files and the ids of saves prove."""
    faults = metadata_faults(checkpoint)
    for file, records in records_by_file(checkpoint).items():
        faults += file_faults(checkpoint, file, records)
    return faults


def metadata_faults(checkpoint: Checkpoint) -> list[CheckpointFault]:
    """Return the faults that the metadata prove, and files of another save."""
    check_count(checkpoint.path, len(checkpoint.rows))
    return [*tiling_faults(checkpoint), *_location_faults(checkpoint), *checkpoint.own_faults()]


def tiling_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield holes, overlaps, and chunks out of bounds: one fault for tensors that are cut alike."""
    by_cut: dict[tuple[tuple[int, ...], ChunkBoxes], list[StoredTensor]] = {}
    for tensor in checkpoint.tensors.values():
        by_cut.setdefault((tensor.shape, tensor.cut), []).append(tensor)
    for tensors in by_cut.values():
        for kind, message in box_faults(tensors[0].whole, tensors[0].boxes):
            names = tuple(sorted([tensor.fqn for tensor in tensors]))
            yield CheckpointFault(kind, names, (), message)


def box_faults(whole: Box, boxes: Iterable[Box]) -> Iterator[tuple[str, str]]:
    """Yield ``(kind, message)`` of the holes and overlaps of boxes that should tile a tensor."""
    shape = whole.sizes
    for kind, _, flawed in flaws(whole, as_array(boxes, len(shape)), 2 * MAX_BOXES):
        match kind:
            case "out_of_bounds":
                names = format_names([format_box(box) for box in flawed], MAX_BOXES)
                yield "out_of_bounds", f"{names} of a {shape} tensor"
            case "repeated":
                yield "overlap", f"{format_boxes(flawed, shape)} is there more than once"
            case "overlap":
                texts = [format_box(box, shape) for box in flawed[: 2 * MAX_BOXES]]
                pairs = map(" and ".join, zip(texts[::2], texts[1::2], strict=True))
                yield "overlap", f"chunks of {shape} overlap: {'; '.join(pairs)}"
            case "hole":
                yield "hole", f"no chunk holds {format_boxes(flawed, shape)}"
            case _:
                assert_never(kind)


def _location_faults(checkpoint: Checkpoint) -> Iterator[CheckpointFault]:
    """Yield chunks without a place, places without a chunk, and keys of an index without either."""
    for keys in checkpoint.key_classes:
        fqns = tuple(sorted([checkpoint.rows.fqns[key] for key in keys]))
        offsets, boxes_of = set(checkpoint.rows.offsets_of(fqns[0])), checkpoint.boxes_of(fqns[0])
        unplaced = [box for offset, box in boxes_of.items() if offset not in offsets]
        if unplaced:
            shape = checkpoint.tensors[fqns[0]].shape if fqns[0] in checkpoint.tensors else ()
            boxes = [box for box in unplaced if box is not None]
            what = format_boxes(boxes, shape) if boxes else "this object"
            yield CheckpointFault("unplaced", fqns, (), f"the metadata name no file for {what}")
        for fqn in fqns if offsets - boxes_of.keys() else ():
            if fqn.startswith(OWN_PREFIX) and not boxes_of:
                continue  # a record of this package's own, such as that of a save's id
            for offset, (file, *_) in checkpoint.locations_of(fqn).items():
                if offset not in boxes_of:
                    where = "" if offset is None else f" at {offset}"
                    message = f"{file} has a chunk{where} that the tensor's metadata do not list"
                    yield CheckpointFault("unclaimed", (fqn,), (file,), message)
    for file in sorted(set(checkpoint.absent.values())):
        names = tuple(sorted(fqn for fqn, name in checkpoint.absent.items() if name == file))
        if checkpoint.directory.size(file) is None:
            yield CheckpointFault("missing_file", names, (file,), "the file is not there")
        else:
            message = "the index names this file for them, and the file lacks them"
            yield CheckpointFault("unplaced", names, (file,), message)


def file_faults(
    checkpoint: Checkpoint, file: str, records: Sequence[StoredRecord]
) -> Iterator[CheckpointFault]:
    """Yield faults of a file that is missing or too short, and of records that share bytes."""
    size = checkpoint.directory.size(file)
    if size is None:
        why = checkpoint.directory.why_barred(file) or "the file is not there"
        yield CheckpointFault("missing_file", fqns_of(records), (file,), why)
        return
    beyond = [record for record in records if record.start + record.nbytes > size]
    if beyond:
        message = (
            f"{size} bytes, and {max(record.end for record in beyond)} are needed: "
            f"{len(beyond)} of {len(records)} records end beyond its end"
        )
        yield CheckpointFault("truncated_file", fqns_of(beyond), (file,), message)
    # Two keys may share one whole record; two records may not share some bytes.
    reached, end = records[0], records[0].end  # the earlier record that ends last
    for record in records:
        start = record.start
        if start < end and reached.start < start and not checkpoint.may_share_bytes:
            names = (record_name(checkpoint, holder) for holder in (reached, record))
            message = f"bytes {start}-{end} belong to {' and to '.join(names)}"
            yield CheckpointFault("shared_bytes", fqns_of([reached, record]), (file,), message)
        if start + record.nbytes > end:
            reached, end = record, start + record.nbytes


def fqns_of(records: Iterable[StoredRecord]) -> tuple[str, ...]:
    """Return the keys of records, sorted."""
    return tuple(sorted({record.fqn for record in records}))
