"""One record of a data file: its head, the elements of a slice, all of it, and whether it is sound.

Of ``w1`` on ep rank 0, a ``(4, 3)`` tensor of float32 that begins at byte 0 of ``__0_0.distcp``::

    Record(part=ByteRange(file, 0, 1577),
           head=RecordHead(torch.float32, (4, 3), (3, 1), start=704, has_crc=True))

Rows 2 and 3 are the 24 bytes from 728 on. The CRC-32 of all elements is at byte 756, and again in
the zip file's directory. ``wrong_crcs`` compares every CRC-32 with what was read.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import check_opens, copy_into
from dcp_placements.layout.boxes import Array
from dcp_placements.storage.file_reads import ByteRange, CountedFile, crc32, memory_of, segments
from dcp_placements.storage.record_head import (
    BEHIND,
    DESCRIPTOR,
    DIRECTORY_CRC,
    DIRECTORY_NAME,
    RecordHead,
    crc_entry,
    entry_start,
    wrong_crc,
)
from dcp_placements.storage.torch_load import BROKEN, load_saved_tensor, stored_zip

BUFFER_NBYTES = 16 << 20
"""The largest buffer for elements that cannot be read in place."""

SUMMED_NBYTES = 4 << 20
"""Contents that are only compared are read so many bytes at a time."""

SIMILAR_NBYTES = 64 << 10
"""``SoundRecords`` keeps what records up to this size have in common."""

Buffer = Callable[[int], memoryview]
"""Returns memory of a number of bytes."""


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """A record, compared with its checksums.

    Attributes:
        differing: The entries that are not what was written, and the checksums of each.
        broken: Why it is no zip file of ``torch.save``; None if it is one.
        is_zip: Whether it begins like a zip file; nothing is compared of another.
        has_crc: Whether it has checksums.
    """

    differing: tuple[str, ...] = ()
    broken: str | None = None
    is_zip: bool = True
    has_crc: bool = True

    @property
    def problem(self) -> str | None:
        """Why it is not what was written; None for a sound record, and for what is no zip file."""
        return self.broken or next(iter(self.differing), None)


class Record(NamedTuple):
    """One tensor or object as ``torch.save`` wrote it."""

    part: ByteRange  # its bytes
    head: RecordHead | None = None  # where the elements are; None if it is no plain tensor

    @staticmethod
    def of_stream(stream: Any) -> Record:
        """Return all of a seekable stream as a record."""
        file = CountedFile(stream)
        return Record(ByteRange(file, 0, file.size))

    def read_slice(
        self, target: torch.Tensor, offsets: tuple[int, ...], buffer: Buffer, *, is_summed: bool
    ) -> str | None:
        """Read the elements of a non-empty slice of a plain tensor.

        Args:
            target: The tensor to fill, of the slice's shape; of another dtype, they are cast.
            offsets: Offsets of the slice in the tensor.
            buffer: Returns memory for elements that cannot be read in place.
            is_summed: Whether the slice is all of the tensor, and is compared with its CRC-32.

        Returns:
            How the elements differ from those that were written; None if they are not compared or
            do not.

        Raises:
            EOFError: The file ends before.
        """
        head = self.head
        assert head is not None, "a plain tensor"
        if not head.is_contiguous:
            head, dims = head.in_order()
            target, offsets = target.permute(dims), tuple([offsets[dim] for dim in dims])
        checksum = _fill(target, offsets, head, self.part, buffer, 0 if is_summed else None)
        return None if checksum is None else self._wrong_elements(head, checksum)

    def load(self) -> torch.Tensor:
        """Return a tensor of any kind, as ``load_saved_tensor`` does."""
        return load_saved_tensor(self.part.stream())

    def check(
        self,
        advance: Callable[[int], object] = lambda nbytes: None,
        sound: SoundRecords | None = None,
    ) -> RecordCheck:
        """Read all entries of the zip file, and compare each with its checksum.

        Args:
            advance: Called with the bytes of each block that was read.
            sound: Records that were checked before.
        """
        if sound is not None and (nbytes := sound.nbytes_like(self)) is not None:
            advance(nbytes)
            return RecordCheck()
        differing = []
        try:
            file = stored_zip(self.part.stream())
            if file is None:
                return RecordCheck(is_zip=False)
            entries = file.infolist()
            # torch.load uses the header before an entry; this compares it with the directory.
            for entry in entries:
                if entry.external_attr & _IS_DIRECTORY:
                    raise zipfile.BadZipFile(f"{entry.filename} is marked as a directory")
                file.open(entry).close()
            # What a load cannot open is refused, whatever the checksums say.
            if any(entry.filename.endswith("/data.pkl") for entry in entries):
                check_opens(self.part.stream())
            # torch.serialization.set_crc32_options(False) writes none.
            has_crc = any(entry.CRC for entry in entries)
            for entry in entries:
                start = entry_start(self.part.read_into, entry)
                checksum = self._sum(start, entry.file_size, advance)
                wrong = wrong_crc(checksum, crc_entry(entry.CRC)) if has_crc else None
                what, head = entry.filename.partition("/")[2], self.head
                if head is not None and (start, entry.file_size) == (head.start, head.nbytes):
                    what = "the elements"
                    if wrong is None and head.has_crc and head.nbytes:
                        # A load goes by what follows the elements.
                        wrong = self._wrong_elements(head, checksum)
                if wrong is not None:
                    differing.append(f"{what}: {wrong}")
        except BROKEN as error:
            sentence = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
            return RecordCheck(tuple(differing), f"this is no whole file of torch.save: {sentence}")
        if sound is not None and has_crc and not differing:
            sound.add(self, file)
        return RecordCheck(tuple(differing), has_crc=has_crc)

    def wrong_elements(self) -> str | None:
        """Return how the elements of a plain tensor differ from those that were written.

        None if they do not, or have no CRC-32.

        Raises:
            EOFError: The file ends before.
        """
        head = self.head
        assert head is not None, "a plain tensor"
        if not (head.has_crc and head.nbytes):
            return None
        checksum = self._sum(head.start, head.nbytes, lambda nbytes: None)
        return self._wrong_elements(head, checksum)

    def _wrong_elements(self, head: RecordHead, checksum: int) -> str | None:
        behind = self.part.read(head.start + head.nbytes, BEHIND)
        return wrong_crc(checksum, behind)

    def _sum(self, start: int, nbytes: int, advance: Callable[[int], object]) -> int:
        """Return the CRC-32 of bytes of the record."""
        buffer, checksum = memoryview(bytearray(min(nbytes, SUMMED_NBYTES))), 0
        for offset in range(0, nbytes, SUMMED_NBYTES):
            block = buffer[: nbytes - offset]
            position = self.part.start + start + offset
            checksum = self.part.file.read_summed(block, position, checksum)
            advance(block.nbytes)
        return checksum


class _Common(NamedTuple):
    """What sound records of one size have in common."""

    is_fixed: Array  # which bytes are equal in all: all but the next, and their checksums
    fixed: Array  # these bytes
    summed: tuple[tuple[int, int, tuple[int, ...]], ...]  # start, stop, and where each CRC-32 is
    nbytes: int  # bytes of all entries


class SoundRecords:
    """Small records of plain tensors that were checked, by what they have in common.

    Two records of one dtype and shape differ in the elements, in an id of the record, and in the
    two CRC-32 of each. So of the second, these are compared, and all other bytes with the first;
    that takes a tenth of reading it as a zip file.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, _Common] = {}

    def nbytes_like(self, record: Record) -> int | None:
        """Return the bytes of all entries of a record that is sound as one before; else None."""
        common = None if record.head is None else self._by_size.get(record.part.size)
        if common is None:
            return None
        data = record.part.read(0, record.part.size)
        if not (np.frombuffer(data, np.uint8)[common.is_fixed] == common.fixed).all():
            return None
        for start, stop, places in common.summed:
            checksum = crc32(data[start:stop])
            for place in places:
                if wrong_crc(checksum, DESCRIPTOR + data[place : place + 4]) is not None:
                    return None
        return common.nbytes

    def add(self, record: Record, file: zipfile.ZipFile) -> None:
        """Keep what a sound record has in common with those like it.

        Args:
            record: The record.
            file: The record as a zip file.
        """
        head, part = record.head, record.part
        if head is None or not head.has_crc or not head.nbytes or part.size > SIMILAR_NBYTES:
            return
        data = part.read(0, part.size)
        is_fixed, summed, entry_at = np.ones(part.size, bool), [], file.start_dir
        entries = file.infolist()
        for entry in entries:
            start = entry_start(part.read_into, entry)
            stop = start + entry.file_size
            # The CRC-32 behind the contents, and that of the directory.
            places = stop + len(DESCRIPTOR), entry_at + DIRECTORY_CRC
            entry_at += DIRECTORY_NAME + sum(struct.unpack_from("<3H", data, entry_at + 28))
            if start != head.start and not entry.filename.endswith(_ID):
                continue
            if data[stop : stop + len(DESCRIPTOR)] != DESCRIPTOR:
                return
            for first, last in ((start, stop), *((place, place + 4) for place in places)):
                is_fixed[first:last] = False
            summed.append((start, stop, places))
        fixed = np.frombuffer(data, np.uint8)[is_fixed]
        nbytes = sum(entry.file_size for entry in entries)
        self._by_size[part.size] = _Common(is_fixed, fixed, tuple(summed), nbytes)


_IS_DIRECTORY = 0x10
"""An attribute of MS-DOS in a zip file's directory. Torch's reader does not read the name of such
an entry and uses memory that nothing was written to: a load succeeds or fails by chance."""

_ID = "/.data/serialization_id"
"""The end of the name of an entry whose contents follow from the checksums of the others."""


def _fill(
    target: torch.Tensor,
    offsets: tuple[int, ...],
    head: RecordHead,
    part: ByteRange,
    take: Buffer,
    checksum: int | None,
) -> int | None:
    """Read a slice of a plain tensor, whose strides descend, into ``target``.

    Args:
        target: The tensor to fill.
        offsets: Offsets of the slice in the chunk.
        head: Where the elements are in the record.
        part: The record.
        take: Returns memory for elements that cannot be read in place.
        checksum: The CRC-32 of the elements before the slice; None if not all are read.

    Returns:
        The CRC-32 up to the end of the slice.
    """
    file, chunk, sizes = part.file, part.start + head.start, tuple(target.shape)
    slices = segments(
        head.strides, offsets=offsets, lengths=sizes, itemsize=head.dtype.itemsize, gap=file.gap
    )
    is_direct = target.dtype == head.dtype and slices.exact
    memory = memory_of(target) if is_direct else None
    if memory is None and slices.total_nbytes > BUFFER_NBYTES:
        # Halves along the first dim that can be cut: a whole tensor is then read in order.
        dim = next(dim for dim, size in enumerate(sizes) if size > 1)
        half = sizes[dim] // 2
        for begin, size in ((0, half), (half, sizes[dim] - half)):
            moved = (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :])
            checksum = _fill(target.narrow(dim, begin, size), moved, head, part, take, checksum)
        return checksum
    buffer = take(slices.total_nbytes) if memory is None else memory
    if checksum is not None:
        checksum = file.read_summed(buffer, chunk + slices.start, checksum)
    else:
        file.read_segments(buffer, slices, chunk)
    if memory is None:
        elements = torch.frombuffer(buffer, dtype=head.dtype)
        copy_into(target, elements.as_strided(sizes, slices.strides))
    return checksum
