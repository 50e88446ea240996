"""What the data files say of themselves, against what the metadata say of them.

A record of a ``.distcp`` file is a zip file that ``torch.save`` wrote. Its first bytes tell shape
and dtype, and it has a checksum of every part, which ``torch.load`` does not look at.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import xxhash

from dcp_placements._torch import MetadataIndex
from dcp_placements.offline.checks.structure import Record
from dcp_placements.storage.digests import full_digest
from dcp_placements.storage.file_reads import CountedFile, FilePart
from dcp_placements.storage.metadata.shadow_records import packed_object
from dcp_placements.storage.tensor_record import (
    LOCAL,
    RecordHeads,
    entry_start,
    load_saved_tensor,
)

PIECE_NBYTES = 4 << 20
"""Contents are read in pieces of this size."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a record.

    Attributes:
        kind: ``wrong_record``, ``checksum`` or ``digest``.
        message: What was found.
    """

    kind: str
    message: str


class RecordChecker:
    """Checks the records of a checkpoint's files.

    Args:
        raw: Whether a record is the elements alone (safetensors).
        load: Reads a whole chunk through the library, for what is not plain.
        digest_of: The stored digest of a chunk or an object; None where there is none.
        contents: Whether to read everything and compare checksums, and digests where there are
            some.
        progress: Called with the bytes of every piece read.
        limit_nbytes: Records that cannot be checked in pieces are skipped above this size.

    Attributes:
        skipped: Names of the records that were not checked for that.
    """

    def __init__(
        self,
        *,
        raw: bool,
        load: Callable[[Record], torch.Tensor],
        digest_of: Callable[[MetadataIndex], bytes | None],
        contents: bool,
        progress: Callable[[int], None],
        limit_nbytes: int,
    ) -> None:
        self.skipped: list[str] = []
        self._raw = raw
        self._load = load
        self._digest_of = digest_of
        self._contents = contents
        self._progress = progress
        self._limit_nbytes = limit_nbytes
        self._heads = RecordHeads()

    def check(self, file: CountedFile, record: Record) -> Iterator[Finding]:
        """Yield what is wrong with a record that lies within its file."""
        part = FilePart(file, record.start, record.chunk.nbytes)
        if record.chunk.transforms:
            yield from self._check_loaded(record, part)
        elif record.tensor is None:
            yield from self._check_object(part, record)
        elif self._raw:
            yield from self._check_raw(record)
        else:
            yield from self._check_tensor(part, record)

    def _check_raw(self, record: Record) -> Iterator[Finding]:
        # A header of safetensors says where its bytes are; there is no second word on it.
        self._progress(record.chunk.nbytes)
        return iter(())

    def _check_tensor(self, part: FilePart, record: Record) -> Iterator[Finding]:
        known = self._heads.find(part, record.chunk.nbytes)
        if known is None:
            if self._contents:
                # What breaks the record is more to the point than that it cannot be read.
                broken = list(self._checksums(part, record.chunk.nbytes))
                if broken:
                    yield from broken
                    return
            yield from self._check_loaded(record, part)
            return
        yield from _mismatch(record, known.shape, known.dtype)
        if not self._contents:
            return
        nbytes = known.dtype.itemsize * prod(known.shape)
        if record.copied:
            # One digest after another, of what lies one after another.
            hasher = _Hashers(nbytes // len(record.copied))
            told = [self._digest_of(index) for index in _copied(record)]
        else:
            hasher = _Hashers(nbytes)
            told = [self._digest_of(_index(record))]
        broken = list(
            self._checksums(part, record.chunk.nbytes, (known.start, nbytes), hasher.update)
        )
        yield from broken
        if not broken and any(
            one is not None and one != found
            for one, found in zip(told, hasher.digests(), strict=False)
        ):
            yield Finding("digest", "the contents are not those that were saved")

    def _check_object(self, part: FilePart, record: Record) -> Iterator[Finding]:
        nbytes = record.chunk.nbytes
        if not self._contents:
            return
        if record.copied:
            yield from self._check_copied_objects(part, record)
            return
        hasher = xxhash.xxh3_128()
        for piece in _pieces(part, 0, nbytes):
            hasher.update(piece)
        told = self._digest_of(_index(record))
        head = bytearray(min(nbytes, len(LOCAL)))
        part.read_into(memoryview(head), 0)
        # An object may be written in any way; if it is a zip file, it has checksums.
        broken = list(self._checksums(part, nbytes)) if bytes(head) == LOCAL else []
        yield from broken
        if not broken and told is not None and hasher.digest() != told:
            yield Finding("digest", "the contents are not those that were saved")

    def _check_copied_objects(self, part: FilePart, record: Record) -> Iterator[Finding]:
        held = memoryview(bytearray(record.chunk.nbytes))
        part.read_into(held, 0)
        self._progress(held.nbytes)
        count = len(record.copied)
        for position, fqn in enumerate(record.copied):
            try:
                found = packed_object(held, position, count)
            except ValueError as error:
                yield Finding("wrong_record", str(error))
                return
            told = self._digest_of(MetadataIndex(fqn))
            if told is not None and xxhash.xxh3_128_digest(found) != told:
                yield Finding("digest", f"{fqn}: the contents are not those that were saved")

    def _check_loaded(self, record: Record, part: FilePart) -> Iterator[Finding]:
        """Check what is not plain: other strides, transforms."""
        if record.tensor is None:
            return
        if record.chunk.nbytes > self._limit_nbytes:
            self.skipped.append(record.name)
            return
        try:
            found = self._load(record) if record.chunk.transforms else _saved(part, record)
        except Exception as error:
            # Whatever a broken file makes torch.load say.
            yield Finding("wrong_record", _first_lines(error))
            return
        yield from _mismatch(record, tuple(found.shape), found.dtype)
        if self._contents:
            self._progress(record.chunk.nbytes)
            parts = list(found) if record.copied else [found]
            indices = _copied(record) if record.copied else [_index(record)]
            told = [self._digest_of(index) for index in indices]
            if any(
                one is not None and full_digest(part) != one
                for one, part in zip(told, parts, strict=False)
            ):
                yield Finding("digest", "the contents are not those that were saved")

    def _checksums(
        self,
        part: FilePart,
        nbytes: int,
        elements: tuple[int, int] = (0, 0),
        take: Callable[[memoryview], object] | None = None,
    ) -> Iterator[Finding]:
        """Yield the parts of a record that are not what its checksums say.

        Args:
            part: The record.
            nbytes: Its length.
            elements: Where its elements begin, and their length.
            take: Is given the elements, in pieces.
        """
        try:
            with zipfile.ZipFile(part.stream()) as file:
                entries = file.infolist()
            # torch.serialization.set_crc32_options(False) writes none.
            has_sums = any(entry.CRC for entry in entries)
            for entry in entries:
                start = entry_start(part.read_into, entry)
                takes = take if (start, entry.file_size) == elements else None
                total = 0
                for piece in _pieces(part, start, entry.file_size):
                    total = zlib.crc32(piece, total)
                    self._progress(piece.nbytes)
                    if takes is not None:
                        takes(piece)
                if has_sums and total != entry.CRC:
                    part_name = entry.filename.partition("/")[2]
                    what = "the elements" if takes is not None else f"its {part_name}"
                    yield Finding(
                        "checksum",
                        f"{what}: checksum {total:08x}, where {entry.CRC:08x} was saved",
                    )
        except (zipfile.BadZipFile, EOFError, struct.error, ValueError, NotImplementedError) as e:
            yield Finding("wrong_record", f"this is no whole file of torch.save: {e}")


def _saved(part: FilePart, record: Record) -> torch.Tensor:
    """Return a record as it is: what a load makes of it has the dtype that the metadata say."""
    data = bytearray(record.chunk.nbytes)
    part.read_into(memoryview(data), 0)
    return load_saved_tensor(io.BytesIO(data))


def _mismatch(record: Record, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Finding]:
    assert record.tensor is not None
    wanted = record.chunk.box.sizes
    if shape != wanted or dtype != record.tensor.dtype:
        yield Finding(
            "wrong_record",
            f"a {shape} {dtype} tensor is at byte {record.start}, where the metadata say "
            f"{wanted} {record.tensor.dtype}",
        )


def _index(record: Record) -> MetadataIndex:
    offsets = None if record.tensor is None else torch.Size(record.chunk.box.offsets)
    return MetadataIndex(record.fqn, offsets)


def _copied(record: Record) -> list[MetadataIndex]:
    """Return what the tensors of a shadow are copies of."""
    offset = torch.Size(record.chunk.box.offsets[1:])
    return [MetadataIndex(fqn, offset) for fqn in record.copied]


class _Hashers:
    """Digests of stretches of equal length, given piece by piece."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._digests: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._left = nbytes

    def update(self, piece: memoryview) -> None:
        while piece.nbytes:
            some = piece[: self._left]
            self._hasher.update(some)
            self._left -= some.nbytes
            piece = piece[some.nbytes :]
            if not self._left:
                self._digests.append(self._hasher.digest())
                self._hasher, self._left = xxhash.xxh3_128(), self._nbytes

    def digests(self) -> list[bytes]:
        return self._digests or [self._hasher.digest()]


def _pieces(part: FilePart, start: int, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(nbytes, PIECE_NBYTES)))
    for at in range(0, nbytes, PIECE_NBYTES):
        piece = buffer[: min(PIECE_NBYTES, nbytes - at)]
        part.read_into(piece, start + at)
        yield piece


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(lines[1:3] or lines[:1])
