"""Records in data files, compared with the metadata and their checksums.

A record of a ``.distcp`` file is a zip file that ``torch.save`` wrote. Its first bytes tell shape
and dtype, and every part of it has a checksum, which ``torch.load`` does not compare.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator

import numpy as np
import torch

from dcp_placements._torch import check_opens
from dcp_placements.errors import CannotLook, format_error
from dcp_placements.layout.boxes import Ints
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint
from dcp_placements.offline.checks.records import FileRecords, Record, fqns_of
from dcp_placements.offline.checks.structure import CheckpointFault
from dcp_placements.offline.directory import shows_damage
from dcp_placements.storage.checked_load import BROKEN, load_saved_tensor, stored_zip
from dcp_placements.storage.fast_zlib import crc32
from dcp_placements.storage.file_reads import CountedFile, FilePart, HeldPart, Part
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.tensor_record import (
    DESCRIPTOR,
    LOCAL,
    RecordHeads,
    TensorRecord,
    behind_elements,
    entry_start,
)

PIECE_NBYTES = 4 << 20
"""Contents are read in pieces of this size."""

BLOCK_NBYTES = 256 << 10
NEAR_NBYTES = 16 << 10
"""The heads of records that begin less than this apart are read together, in blocks."""

Finding = tuple[str, str]
"""The kind of a fault, and its message without the record's name."""


class RecordChecker:
    """Checks the records of a checkpoint's files.

    Args:
        checkpoint: The checkpoint.
        contents: Whether to read everything and compare checksums.
        limit_nbytes: Records that cannot be checked in pieces are skipped above this size.
        progress: Called with the bytes checked so far, after every piece.

    Attributes:
        nbytes: Bytes of contents that were checked.
        unchecked: Records that have no checksums.
        transformed: Records that went through transforms, which are checked with contents alone.
        skipped: Names of the records above ``limit_nbytes``.
        other_types: Names of those of types that ``torch.load`` was not told to allow.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        contents: bool,
        limit_nbytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self.nbytes = self.unchecked = self.transformed = 0
        self.skipped: list[str] = []
        self.other_types: list[str] = []
        self._checkpoint = checkpoint
        self._contents = contents
        self._limit_nbytes = limit_nbytes
        self._progress = progress
        self._heads = RecordHeads()
        # How a sound record begins, by kind and length; most of a kind begin alike.
        self._sound_heads: dict[tuple[tuple[int, ...], torch.dtype, int], bytearray] = {}

    def check_file(self, file: str, records: FileRecords) -> list[CheckpointFault]:
        """Return the faults of those records of one file that lie within it.

        Raises:
            CannotLook: The file may not be read, or its service does not answer.
        """
        size = self._checkpoint.directory.size(file)
        if size is None:
            return []
        faults: list[CheckpointFault] = []
        try:
            with self._checkpoint.directory.open(file) as stream:
                counted = CountedFile(stream)
                within = np.flatnonzero(records.ends <= size)
                for at in self._suspects(counted, records, within):
                    record = records[at]
                    part = FilePart(counted, record.start, record.chunk.nbytes)
                    for kind, message in self._check(part, record):
                        message = f"{record.name} in {file}: {message}"
                        faults.append(CheckpointFault(kind, fqns_of([record]), (file,), message))
        except (OSError, EOFError) as error:
            message = f"it cannot be read: {error}"
            if not shows_damage(error):
                raise CannotLook(f"{self._checkpoint.path}/{file}: {message}") from error
            # A disk is broken, or the file was removed or cut off since its size was read.
            kind = "truncated_file" if isinstance(error, EOFError) else "missing_file"
            return [CheckpointFault(kind, fqns_of(records), (file,), message)]
        return faults

    def _suspects(self, file: CountedFile, records: FileRecords, within: Ints) -> Iterator[int]:
        """Yield the positions of the records that are to be checked one by one.

        Where contents are not read, all others begin as a tensor of their kind.
        """
        if self._contents:
            yield from within.tolist()
            return
        starts = records.starts[within].tolist()
        columns = within, records.kinds[within], (records.ends - records.starts)[within]
        rows = zip(*[column.tolist() for column in columns], starts, [*starts[1:], 0], strict=False)
        held, first = bytearray(), 0
        for at, number, nbytes, start, following in rows:
            if number < 0:
                yield at
                continue
            kind = (*records.all_kinds[number], nbytes)
            head = self._sound_heads.get(kind)
            if head is not None:
                if not first <= start <= first + len(held) - len(head):
                    # Small records follow one another.
                    wanted = BLOCK_NBYTES if 0 < following - start < NEAR_NBYTES else len(head)
                    held, first = bytearray(max(min(wanted, file.size - start), 0)), start
                    file.read_into(memoryview(held), start)
                if held.startswith(head, start - first):
                    continue
            part = FilePart(file, start, nbytes)
            record = self._heads.find(part, nbytes)
            if record is None or (record.shape, record.dtype) != kind[:2]:
                yield at
                continue
            sound = self._sound_heads[kind] = bytearray(record.start)
            part.read_into(memoryview(sound), 0)

    def _check(self, part: FilePart, record: Record) -> Iterator[Finding]:
        if record.chunk.transforms:
            yield from self._check_transformed(record)
        elif record.tensor is None:
            yield from self._check_object(part, record)
        elif self._checkpoint.format == SAFETENSORS:
            # Nothing but the header describes these bytes, and the metadata are the header.
            self._advance(record.chunk.nbytes)
        else:
            yield from self._check_tensor(part, record)

    def _check_tensor(self, part: FilePart, record: Record) -> Iterator[Finding]:
        head = self._heads.find(part, record.chunk.nbytes)
        if head is None:
            if self._contents:
                # A wrong checksum is more specific than a record that cannot be read.
                broken = list(self._checksums(part))
                if broken:
                    yield from broken
                    return
            yield from self._check_loaded(part, record)
            return
        yield from _mismatch(record, head.shape, head.dtype)
        if not self._contents:
            return
        yield from self._checksums(part, head)

    def _check_object(self, part: FilePart, record: Record) -> Iterator[Finding]:
        nbytes = record.chunk.nbytes
        if not self._contents:
            return
        start = bytearray(min(nbytes, len(LOCAL)))
        part.read_into(memoryview(start), 0)
        # An object may be written in any way; if it begins or ends as a zip file, it has checksums.
        is_zip = bytes(start) == LOCAL or zipfile.is_zipfile(part.stream())
        if is_zip:
            yield from self._checksums(part)

    def _check_transformed(self, record: Record) -> Iterator[Finding]:
        """Check what a record was before its transforms. All of it must be read for that."""
        if not self._contents:
            self.transformed += 1
            return
        try:
            content = self._checkpoint.read_record(record.fqn, record.chunk, self._limit_nbytes)
        except OSError:
            raise
        except Exception as error:
            # An extension can raise anything.
            yield "wrong_record", _reason(error)
            return
        if content is None:
            self.skipped.append(record.name)
            return
        part = HeldPart(memoryview(content))
        broken = list(self._checksums(part)) if content.startswith(LOCAL) else []
        yield from broken
        if record.tensor is not None and not broken:
            yield from self._check_loaded(part, record)

    def _check_loaded(self, part: Part, record: Record) -> Iterator[Finding]:
        """Check a tensor whose record is not plain: other strides, or transforms."""
        if record.chunk.nbytes > self._limit_nbytes:
            self.skipped.append(record.name)
            return
        # Not through a reader, which converts to the dtype of the metadata.
        content = io.BytesIO(part.stream().read())
        try:
            tensor = load_saved_tensor(content)
        except RefusedGlobal:  # of a type that this process was not told to allow
            self.other_types.append(record.name)
            return
        except Exception as error:
            # torch.load of a broken file can raise anything.
            yield "wrong_record", _reason(error)
            return
        yield from _mismatch(record, tuple(tensor.shape), tensor.dtype)

    def _advance(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._progress(self.nbytes)

    def _checksums(self, part: Part, tensor: TensorRecord | None = None) -> Iterator[Finding]:
        """Yield the parts that do not match their checksums.

        Args:
            part: The record.
            tensor: Where its elements are, if it is plain.
        """
        try:
            file = stored_zip(part.stream())
            if file is None:
                raise zipfile.BadZipFile("it is no zip file")
            entries = file.infolist()
            _check_entries(file, part)
            # torch.serialization.set_crc32_options(False) writes none.
            has_sums = any(entry.CRC for entry in entries)
            self.unchecked += not has_sums
            for entry in entries:
                start = entry_start(part.read_into, entry)
                checksum = 0
                for piece in _pieces(part, start, entry.file_size):
                    checksum = crc32(piece, checksum)
                    self._advance(piece.nbytes)
                plain = tensor and (start, entry.file_size) == (tensor.start, tensor.nbytes)
                if has_sums and checksum != entry.CRC:
                    what = "the elements" if plain else f"its {entry.filename.partition('/')[2]}"
                    message = f"{what}: checksum {checksum:08x}, where {entry.CRC:08x} was saved"
                    yield "checksum", message
                elif tensor and plain and _differs_behind(part, tensor, checksum):
                    message = f"the elements: their checksum {checksum:08x} does not follow them"
                    yield "checksum", message
        except BROKEN as error:
            yield "wrong_record", f"this is no whole file of torch.save: {_first_sentence(error)}"


def _differs_behind(part: Part, tensor: TensorRecord, checksum: int) -> bool:
    """Whether a load, which goes by what follows the elements, would refuse them."""
    if not tensor.has_crc or not tensor.nbytes:
        return False
    return behind_elements(part, tensor) != DESCRIPTOR + checksum.to_bytes(4, "little")


def _check_entries(file: zipfile.ZipFile, part: Part) -> None:
    """Refuse a record that a load cannot open, whatever its checksums say.

    Raises:
        Exception: One of ``BROKEN``.
    """
    for entry in file.infolist():
        file.open(entry).close()
    if any(entry.filename.endswith("/data.pkl") for entry in file.infolist()):
        check_opens(part.stream())


def _mismatch(record: Record, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Finding]:
    assert record.tensor is not None
    declared = record.chunk.box.sizes
    if shape != declared or dtype != record.tensor.dtype:
        message = (
            f"a {shape} {dtype} tensor is at byte {record.start}, where the metadata have "
            f"{declared} {record.tensor.dtype}"
        )
        yield "wrong_record", message


def _pieces(part: Part, start: int, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(nbytes, PIECE_NBYTES)))
    for at in range(0, nbytes, PIECE_NBYTES):
        piece = buffer[: min(PIECE_NBYTES, nbytes - at)]
        part.read_into(piece, start + at)
        yield piece


def _first_sentence(error: Exception) -> str:
    """Return a message of torch's without its advice."""
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def _reason(error: Exception) -> str:
    """Return what is wrong with a record; of torch's message without its advice."""
    text = str(error)
    _, refused, reason = text.partition("WeightsUnpickler error: ")
    if refused:
        sentence = reason.partition("\n")[0].partition(". ")[0].strip()
        return f"torch.load refuses it: {sentence or 'it is broken'}"
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(lines[1:3] or lines[:1]) or format_error(error)
