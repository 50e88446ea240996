"""The elements of any box of any tensor, read with bounded memory, whatever the format."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements.errors import PlacementError, fault_error
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import (
    Checkpoint,
    StoredRecord,
    StoredTensor,
)
from dcp_placements.offline.directory import OpenedFile, check_damage, opened_ahead
from dcp_placements.storage.file_reads import ByteRange, CountedFile, c_strides
from dcp_placements.storage.record import Record
from dcp_placements.storage.record_head import BEHIND, RecordHead, wrong_crc
from dcp_placements.storage.record_reads import IS_DAMAGED, ChunkReader, RecordRead
from dcp_placements.storage.store import READ_AHEAD_NBYTES

MAX_OPEN_FILES = 32
"""The most files of this machine that are open."""

HELD_NBYTES = 256 << 20
"""The most bytes that open files at URLs hold: of each it is up to ``READ_AHEAD_NBYTES``. A tensor
that is cut over 256 ranks is in as many files, and the next one in the same again."""

BOX_NBYTES = 8 << 20
REMOTE_BLOCK_NBYTES = 32 << 20
"""Size of a block that is read at a URL, where a request takes long."""


@dataclass
class _Target:
    """The part of a planner that the reader needs; every item goes into ``tensor``."""

    tensor: torch.Tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        spans = zip(item.dest_offsets, item.lengths, strict=True)
        return self.tensor[tuple(slice(start, start + size) for start, size in spans)]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: ``resolve_tensor`` returned a view."""


class Stretch(NamedTuple):
    """Bytes of a file that are elements of a box, one after another in C order."""

    start: int  # offset in the box, in bytes from its first element
    fqn: str  # the tensor's key
    file: str  # the file's name
    begin: int  # offset in the file, in bytes
    nbytes: int  # length in bytes
    is_summed: bool  # whether it is all elements of a record, whose CRC-32 follows them


class BoxReader(AbstractContextManager["BoxReader"]):
    """Reads boxes of a checkpoint's tensors. Keeps files open; close it.

    Args:
        checkpoint: The checkpoint to read.
        check_crc: Whether records are compared with their CRC-32: as they are read, or before
            their first part is.

    Attributes:
        nbytes: Bytes read so far.
        uncompared: Keys of which a record was read in part at a URL, and so not compared.
        unproved: Keys of which a record has no CRC-32 to compare.
    """

    def __init__(self, checkpoint: Checkpoint, *, check_crc: bool = False) -> None:
        self.nbytes = 0
        self.uncompared: set[str] = set()
        self.unproved: set[str] = set()
        self._checkpoint = checkpoint
        # Files that were compared as a conversion began have no need of it.
        self._compares = check_crc and not (checkpoint.is_compared or checkpoint.unproved)
        self._compared: dict[str, bytearray] = {}
        # The chunks of the tensor that was read last: a tensor is read in many boxes.
        self._last: tuple[StoredTensor, tuple[StoredRecord, ...]] | None = None
        self._names = tuple(dict.fromkeys(checkpoint.rows.files))
        self._files: OrderedDict[str, OpenedFile] = OrderedDict()
        self._held_nbytes = 0
        self._target = _Target(torch.empty(0, device="cpu"))
        planner: Any = self._target
        stored = checkpoint.metadata.state_dict_metadata
        # Torch's reader serves to undo the transforms of streams.
        undone = FileSystemReader(".").transforms.transform_load_stream
        self._reader = ChunkReader(planner, stored, undone, check_crc=check_crc, as_declared=True)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for held in self._files.values():
            held.stream.close()
        self._files.clear()
        self._held_nbytes = 0

    def read(
        self, tensor: StoredTensor, box: Box, *, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the elements of a box; elements that no chunk covers are zeros.

        Args:
            tensor: A tensor of the checkpoint.
            box: The box, within the tensor. Reading takes its bytes and 20 MiB of memory.
            into: A contiguous tensor of the box's sizes to fill instead; elements that no chunk
                covers stay as they are.

        Raises:
            CannotLook: A file may not be read, or its service does not answer.
            PlacementError: A file is missing, too short, or holds something else, also of another
                dtype; with ``check_crc``, a record that was read whole is not what was written.
        """
        if into is None:
            # As bytes, since torch fills no dtype of less than a byte per element.
            zeros = torch.zeros(box.numel * tensor.dtype.itemsize, dtype=torch.uint8, device="cpu")
            into = zeros.view(tensor.dtype).view(box.sizes)
        self._target.tensor = into
        by_file: dict[str, list[RecordRead]] = {}
        chunks = self._chunks(tensor)
        for number, _, shared in tensor.cut.overlaps(box):
            chunk = chunks[number]
            if chunk.file is not None:
                wanted = self._wanted(tensor, number, shared, box)
                by_file.setdefault(chunk.file, []).append(wanted)
        for name, records in sorted(by_file.items()):
            records.sort(key=attrgetter("start"))
            file = self._open(name, tensor.fqn)
            before, unchecked = file.nbytes, self._reader.unchecked
            try:
                self._reader.read(file, records)
                if self._compares and self._reader.unchecked > unchecked:
                    self.unproved.add(tensor.fqn)
            except PlacementError:
                raise
            except Exception as error:
                # Extensions undo the transforms of streams, and can raise anything.
                if not any(record.transforms for record in records):
                    check_damage(self._checkpoint.directory, name, error)
                reason = f"{type(error).__name__}: {error}"
                raise _unread(tensor.fqn, name, reason) from error
            finally:
                self.nbytes += file.nbytes - before
        return into

    def stretches(self, tensor: StoredTensor, box: Box) -> list[Stretch] | None:
        """Return the stretches of file bytes that a box consists of.

        Returns:
            None where some elements are in no stretch: what a chunk shares with the box is not
            contiguous in both, or a record is not plain.

        Raises:
            PlacementError: A file is missing or too short.
        """
        itemsize = tensor.dtype.itemsize
        chunks = self._chunks(tensor)
        stretches = []
        for number, held, shared in tensor.cut.overlaps(box):
            chunk = chunks[number]
            if chunk.file is None or chunk.transforms:
                return None
            if not all(is_contiguous(shared.sizes, around.sizes) for around in (held, box)):
                return None
            file = self._open(chunk.file, tensor.fqn)
            if chunk.start + chunk.nbytes > file.size:
                raise _unread(tensor.fqn, chunk.file, "it ends too early")
            wanted = self._wanted(tensor, number, shared, box)
            try:
                head = self._reader.tensor_record(
                    wanted, ByteRange(file, chunk.start, chunk.nbytes)
                )
            except EOFError as error:  # it was cut off since it was opened
                raise _unread(tensor.fqn, chunk.file, str(error)) from error
            declared = tensor.dtype, held.sizes, True
            if head is None or (head.dtype, head.shape, head.is_contiguous) != declared:
                return None
            skipped = position(_minus(shared, held), held.sizes) * itemsize
            start = position(_minus(shared, box), box.sizes) * itemsize
            begin, nbytes = chunk.start + head.start + skipped, shared.numel * itemsize
            self._note_unproved(tensor, head)
            is_summed = head.has_crc and shared == held
            stretches.append(Stretch(start, tensor.fqn, chunk.file, begin, nbytes, is_summed))
        return stretches

    def blocks(self, stretch: Stretch) -> Iterator[memoryview]:
        """Yield the bytes of a stretch; each block is valid until the next but one is asked for.

        Raises:
            PlacementError: The file is missing or too short, or the elements of a whole record are
                not those of its CRC-32.
        """
        file = self._open(stretch.file, stretch.fqn)
        most = min(stretch.nbytes, BOX_NBYTES if file.is_local else REMOTE_BLOCK_NBYTES)
        buffers = [memoryview(bytearray(most)) for _ in range(1 if most == stretch.nbytes else 2)]
        checksum = 0
        try:
            for number, offset in enumerate(range(0, stretch.nbytes, max(most, 1))):
                block = buffers[number % 2][: stretch.nbytes - offset]
                if stretch.is_summed:
                    checksum = file.read_summed(block, stretch.begin + offset, checksum)
                else:
                    file.read_into(block, stretch.begin + offset)
                self.nbytes += block.nbytes
                yield block
            if stretch.is_summed:
                behind = memoryview(bytearray(BEHIND))
                file.read_into(behind, stretch.begin + stretch.nbytes)
        except EOFError as error:
            raise _unread(stretch.fqn, stretch.file, str(error)) from error
        if stretch.is_summed and (wrong := wrong_crc(checksum, behind)):
            reason = f"its elements at byte {stretch.begin} are not what was written: {wrong}"
            raise _unread(stretch.fqn, stretch.file, reason)

    def _wanted(self, tensor: StoredTensor, number: int, shared: Box, box: Box) -> RecordRead:
        chunk = self._chunks(tensor)[number]
        assert chunk.box is not None, "a tensor's"
        assert chunk.file is not None
        index = MetadataIndex(tensor.fqn, torch.Size(chunk.box.offsets), number)
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=_minus(shared, box),
            storage_index=index,
            storage_offsets=_minus(shared, chunk.box),
            lengths=torch.Size(shared.sizes),
        )
        record = self._checkpoint.head(tensor, chunk)
        read = RecordRead(item, chunk.file, chunk.start, chunk.nbytes, chunk.transforms, record)
        if shared != chunk.box and self._compares:
            self._compare_whole(tensor, number, read)
        return read

    def _compare_whole(self, tensor: StoredTensor, number: int, read: RecordRead) -> None:
        """Compare a record of which a part is read with its CRC-32, before the first part.

        At a URL all of it would be downloaded once more.

        Raises:
            PlacementError: The file is missing or too short, or the elements are not those that
                were written.
        """
        if not self._checkpoint.directory.is_local:
            self.uncompared.add(tensor.fqn)
            return
        compared = self._compared.setdefault(tensor.fqn, bytearray(tensor.count))
        if compared[number]:
            return
        compared[number] = True
        part = ByteRange(self._open(read.file, tensor.fqn), read.start, read.nbytes)
        try:
            head = self._reader.tensor_record(read, part)
            # A record that is not plain is compared as it is read.
            wrong = None if head is None else Record(part, head).wrong_elements()
            self._note_unproved(tensor, head)
        except EOFError as error:
            raise _unread(tensor.fqn, read.file, str(error)) from error
        self.nbytes += read.nbytes
        if wrong is not None:
            start = part.start + (head.start if head else 0)
            reason = f"its elements at byte {start} are not what was written: {wrong}"
            raise _unread(tensor.fqn, read.file, reason)

    def _note_unproved(self, tensor: StoredTensor, head: RecordHead | None) -> None:
        """Note a record whose elements have no CRC-32."""
        if self._compares and head is not None and head.nbytes and not head.has_crc:
            self.unproved.add(tensor.fqn)

    def _chunks(self, tensor: StoredTensor) -> tuple[StoredRecord, ...]:
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, tensor.chunks
        return self._last[1]

    def _open(self, name: str, fqn: str) -> CountedFile:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name].file
        directory = self._checkpoint.directory
        names = [name] if directory.is_local else self._neighbours(name)
        with opened_ahead(directory, names) as opened:
            for near, held in zip(names, opened, strict=True):
                if not isinstance(held, OSError):
                    self._make_room(_held_nbytes(held.file))
                    self._files[near] = held
                elif near == name:
                    check_damage(directory, name, held)
                    raise _unread(fqn, name, str(held)) from held
        self._files.move_to_end(name)
        return self._files[name].file

    def _make_room(self, nbytes: int) -> None:
        """Close the files that were not read for longest, until another one may hold as much."""
        is_local = self._checkpoint.directory.is_local
        while self._files and (
            len(self._files) >= MAX_OPEN_FILES
            if is_local
            else self._held_nbytes + nbytes > HELD_NBYTES
        ):
            _, closed = self._files.popitem(last=False)
            self._held_nbytes -= _held_nbytes(closed.file)
            closed.stream.close()
        self._held_nbytes += nbytes

    def _neighbours(self, name: str) -> list[str]:
        """Return a file to open; if it is small, also small ones after it in the metadata's order.

        Tensors are mostly read in that order, and small files are read whole.
        """
        sizes, first = self._checkpoint.files, self._names.index(name)
        near = self._names[first : first + self._checkpoint.directory.reading_threads]
        small = [n for n in near if n not in self._files and (sizes[n] or 0) <= READ_AHEAD_NBYTES]
        return small if name in small else [name]


def _held_nbytes(file: CountedFile) -> int:
    """Return the most bytes of a file that are held while it is open."""
    return 0 if file.is_local else min(file.size, READ_AHEAD_NBYTES)


def is_contiguous(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box's elements follow each other in a tensor of ``shape`` in C order.

    >>> is_contiguous((1, 2, 5), (4, 3, 5)), is_contiguous((2, 2, 5), (4, 3, 5))
    (True, False)
    """
    rest = list(zip(sizes, shape, strict=True))
    while rest and rest[0][0] == 1:
        rest.pop(0)
    return all(size == extent for size, extent in rest[1:])


def position(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Return the index in C order of the element at ``offsets`` of a tensor of ``shape``."""
    return sum(a * b for a, b in zip(offsets, c_strides(tuple(shape)), strict=True))


def _minus(box: Box, origin: Box) -> torch.Size:
    return torch.Size([a - b for a, b in zip(box.offsets, origin.offsets, strict=True)])


def _unread(fqn: str, name: str, reason: str) -> PlacementError:
    return fault_error(IS_DAMAGED, fqn, f"{name} cannot be read: {reason}")


def sub_boxes(box: Box, limit: int) -> Iterator[Box]:
    """Yield boxes of up to ``limit`` elements each that tile a box, in C order.

    >>> [small.offsets for small in sub_boxes(Box((0, 4), (3, 2)), 4)]
    [(0, 4), (2, 4)]
    """
    if box.numel <= max(limit, 1):
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    row = box.numel // box.sizes[dim]
    step = max(limit // row, 1)
    for start in range(0, box.sizes[dim], step):
        size = min(step, box.sizes[dim] - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        yield from sub_boxes(Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])), limit)
