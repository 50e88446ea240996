"""Data files and their records: small tensors many at a time, large ones block by block.

``torch.save`` takes 100 us and more, however small the tensor, which dominates a checkpoint of many
small tensors, and its CRC-32 is a quarter of the time of writing a large one. Two records of one
dtype and shape differ in the elements, in their CRC-32, and in an id that torch derives from all
checksums and that no reader compares. So ``torch.save`` writes a record of that shape once, without
its elements, and each tensor adds its elements and their CRC-32, in the two places where a zip file
has it. Small records are made many at a time, and large ones pass through the processor's cache
once, for the checksum and for the system call. Elements are written in C order, also those of a
transposed tensor.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import groupby, islice
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import SavePlanner, WriteItem
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_placements._torch import cpu_tensors, global_rank
from dcp_placements.errors import PlacementError
from dcp_placements.layout.boxes import Array
from dcp_placements.storage.file_reads import BLOCK_NBYTES, crc32, memory_of, read_only_mapping
from dcp_placements.storage.record_head import DESCRIPTOR, DIRECTORY_CRC, DIRECTORY_NAME
from dcp_placements.storage.write_results import is_whole

BATCHED_NBYTES = 32 << 10
"""Tensors up to this size are small: their records are made in batches."""

BATCH_NBYTES = 512 << 10
"""Bytes of small records in one batch, which stays in the processor's cache."""

_AROUND_NBYTES = 3 << 9
"""The approximate bytes of a record besides its elements."""

PROVED_NBYTES = 64 << 10
"""A template with at most this many bytes of elements is tried out when it is made."""

_DIRECTORY_ENTRY = b"PK\x01\x02"
_ELEMENTS_NAME = b"archive/data/0"
"""The name of the elements, which are the only storage of a record."""


def write_items(
    items: Sequence[WriteItem],
    stream: Any,
    planner: SavePlanner,
    *,
    threads: int,
    ahead_nbytes: int,
) -> Iterator[tuple[Sequence[WriteItem], int]]:
    """Write a data file: the chunks of cut tensors, then whole tensors, then objects.

    In this order the records of cut tensors have equal positions in the files of all ranks,
    whatever else a rank writes.

    Args:
        items: Items to write.
        stream: A stream open for writing, at its beginning.
        planner: The planner, which returns the data of items.
        threads: Number of threads that write files.
        ahead_nbytes: Bytes that may be copied to the host ahead.

    Yields:
        Items as they are written, and the size of each item's record.

    Raises:
        PlacementError: A tensor of another dtype or shape than its item says.
    """
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    loaded = cpu_tensors(
        sorted(tensors, key=is_whole),
        _nbytes,
        planner.resolve_data,
        threads=threads,
        ahead_nbytes=ahead_nbytes,
    )
    for batch, written in _batches(loaded):
        yield written, save_tensors(batch, stream)
    for item in objects:
        data = planner.resolve_data(item)
        assert isinstance(data, BytesIO)
        with data.getbuffer() as contents:
            stream.write(contents)
            yield [item], contents.nbytes


def _batches(
    loaded: Iterable[tuple[torch.Tensor, WriteItem]],
) -> Iterator[tuple[list[torch.Tensor], list[WriteItem]]]:
    """Yield one tensor, or small tensors of one dtype and shape, with their items."""
    for (dtype, shape, is_plain), pairs in groupby(loaded, _kind):
        nbytes = shape.numel() * dtype.itemsize
        is_small = is_plain and nbytes <= BATCHED_NBYTES
        most = BATCH_NBYTES // (nbytes + _AROUND_NBYTES) if is_small else 1
        while batch := list(islice(pairs, most)):
            yield [tensor for tensor, _ in batch], [item for _, item in batch]


def _kind(pair: tuple[torch.Tensor, WriteItem]) -> tuple[torch.dtype, torch.Size, bool]:
    """Return dtype and shape of a tensor, and whether it is plain.

    Raises:
        PlacementError: Dtype or shape differ from those of its item.
    """
    tensor, item = pair
    check_data(tensor, item)
    return tensor.dtype, tensor.shape, _is_plain(tensor)


def check_data(tensor: torch.Tensor, item: WriteItem) -> None:
    """Compare what a planner gives for an item with what the metadata will say.

    Raises:
        PlacementError: It has another dtype or shape.
    """
    data: Any = item.tensor_data
    dtype, shape = tensor.dtype, tensor.shape
    if shape != data.chunk.sizes or dtype != data.properties.dtype:
        raise PlacementError(
            f"{item.index.fqn}, rank {global_rank()}: resolve_data() of the planner returned "
            f"{dtype} of shape {tuple(shape)}, but the metadata will say "
            f"{data.properties.dtype} of shape {tuple(data.chunk.sizes)}\n"
            "    likely:      the planner is a subclass that casts while it saves\n"
            "    way out:     cast before: dcp.save() with the tensors that are to be stored"
        )


def _nbytes(item: WriteItem) -> int:
    """Return the bytes of the elements that an item writes; 0 for objects of unknown size."""
    data = item.tensor_data
    return 0 if data is None else int(data.chunk.sizes.numel() * data.properties.dtype.itemsize)


def split_by_chunk(bins: int, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Return the items in bins of about equal bytes, the largest placed first.

    Torch's own function assumes that every chunk is as large as its whole tensor.
    """
    if bins == 1:
        return [list(items)]
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    filled = [0] * bins
    for item in sorted(items, key=_nbytes, reverse=True):
        number = filled.index(min(filled))
        buckets[number].append(item)
        filled[number] += 1 + _nbytes(item)  # so that objects are in all of them
    return buckets


def save_tensors(tensors: Sequence[torch.Tensor], stream: Any) -> int:
    """Write a record of each tensor, which ``torch.load`` reads.

    Args:
        tensors: One tensor, or small tensors of one dtype and shape.
        stream: A stream open for writing.

    Returns:
        The size of each record in bytes.
    """
    first = tensors[0]
    template = _template_of(first.dtype, first.shape) if _is_plain(first) else None
    if template is None:
        before = stream.tell()
        if first.layout == torch.strided and first.untyped_storage().nbytes() != first.nbytes:
            first = first.clone()  # torch.save would write all of the storage
        torch.save(first, stream)
        return int(stream.tell() - before)
    if first.nbytes <= BATCHED_NBYTES:
        stacked = torch.stack(list(tensors)).reshape(-1).view(torch.uint8)
        template.write(stacked.numpy().reshape(len(tensors), -1), stream)
        return template.length
    memory = memory_of(first.resolve_conj().resolve_neg().contiguous())
    assert memory is not None
    template.write_blocks([memory], stream.write)
    return template.length


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has nothing but elements, a dtype and a shape."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
    )


@lru_cache(maxsize=1024)
def _template_of(dtype: torch.dtype, shape: torch.Size) -> RecordTemplate | None:
    """Return the template of a dtype and shape; None if this torch writes another format."""
    try:
        return RecordTemplate(dtype, shape)
    except ValueError:
        return None


class RecordTemplate:
    """Writes records of tensors of one dtype and shape. For a ``(4, 3)`` tensor of float32::

        head          704 bytes: the pickle, and the header of the elements
        elements       48 bytes
        tail          825 bytes: their CRC-32, the other entries, the directory with it once more

    Args:
        dtype: Dtype of the elements.
        shape: Shape of each tensor; the record of one without elements is all head.

    Attributes:
        length: Size of a record in bytes.

    Raises:
        ValueError: This torch writes another format, or no checksums.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._nbytes = prod(shape) * dtype.itemsize
        self._crc_at: list[int] = []
        around: Any = _AroundElements()
        # A mapping takes no memory, and nothing of it is read: a head costs the same for any shape.
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        elements = read_only_mapping(-1, self._nbytes) if self._nbytes else none
        with torch.serialization.skip_data():
            torch.save(elements.view(dtype).view(tuple(shape)), around)
        self._head, *tails = map(bytes, around.parts)
        self._tail = np.frombuffer(b"".join(tails), np.uint8)
        self.length = len(self._head) + self._nbytes + len(self._tail)
        if not self._nbytes:
            return
        if around.skipped != [self._nbytes]:
            raise ValueError("torch.save writes elements in another way than in one piece")
        (tail,) = tails
        self._crc_at = [len(DESCRIPTOR), _directory_crc(tail)]
        is_blank = all(tail[start : start + 4] == bytes(4) for start in self._crc_at)
        if not (torch.serialization.get_crc32_options() and is_blank):
            raise ValueError("torch.save writes checksums in other places, or none")
        if self._nbytes <= PROVED_NBYTES:
            self._prove()

    def _prove(self) -> None:
        """Compare what torch and zipfile read of a record with what was written.

        Raises:
            ValueError: They differ.
        """
        ones = b"\x01" * self._nbytes
        record = BytesIO()
        self.write_blocks([memoryview(ones)], record.write)
        try:
            with zipfile.ZipFile(record) as file:
                broken = file.testzip()
            record.seek(0)
            loaded = torch.load(record, weights_only=True).view(-1).view(torch.uint8)
        except Exception as error:
            raise ValueError(f"torch.save writes another kind of file: {error}") from error
        if broken is not None or loaded.numpy().tobytes() != ones:
            raise ValueError("torch.save writes another kind of file")

    def _tail_of(self, checksum: int) -> bytes:
        """Return the bytes after elements with this CRC-32."""
        tail = self._tail.copy()
        for offset in self._crc_at:
            tail[offset : offset + 4] = np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)
        return tail.tobytes()

    def write_blocks(self, slabs: Iterable[memoryview], write: Callable[[memoryview], Any]) -> None:
        """Write the record of one tensor, a block of its elements at a time.

        Args:
            slabs: The bytes of the tensor, in any number of buffers.
            write: Writes bytes.
        """
        write(memoryview(self._head))
        checksum = 0
        for slab in slabs:
            for start in range(0, slab.nbytes, BLOCK_NBYTES):
                block = slab[start : start + BLOCK_NBYTES]
                checksum = crc32(block, checksum)
                write(block)
        write(memoryview(self._tail_of(checksum)))

    def write(self, data: Array, stream: Any) -> None:
        """Write the records of tensors.

        Args:
            data: Contiguous uint8: the bytes of one tensor in each row.
            stream: A stream open for writing.
        """
        start = len(self._head)
        records = np.empty((len(data), self.length), np.uint8)
        elements, tails = np.split(records, (start, start + self._nbytes), axis=1)[1:]
        records[:, :start] = np.frombuffer(self._head, np.uint8)
        elements[:] = data
        tails[:] = self._tail
        checksums = np.array(list(map(crc32, data)), "<u4").view(np.uint8).reshape(-1, 4)
        for offset in self._crc_at:
            tails[:, offset : offset + 4] = checksums
        stream.write(records.data.cast("B"))


def _directory_crc(tail: bytes) -> int:
    """Return where the directory at the end of a record has the CRC-32 of the elements.

    Raises:
        ValueError: The directory does not name the elements, or no checksum follows them.
    """
    entry = tail.rfind(_ELEMENTS_NAME) - DIRECTORY_NAME
    if not tail.startswith(DESCRIPTOR) or not tail.startswith(_DIRECTORY_ENTRY, max(entry, 0)):
        raise ValueError("torch.save writes elements under another name, or no checksum of them")
    return entry + DIRECTORY_CRC


class _AroundElements:
    """A file for ``torch.save`` that keeps the bytes before and after the elements.

    Attributes:
        parts: The bytes that were written, without those of elements between them.
        skipped: Sizes of the elements, which ``skip_data()`` passes over.
    """

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.skipped: list[int] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.parts[-1] += view
        return view.nbytes

    def seek(self, nbytes: int, whence: int) -> int:
        """Pass over elements."""
        if whence != os.SEEK_CUR:
            raise ValueError("torch.save writes a record in another order")
        self.skipped.append(nbytes)
        self.parts.append(bytearray())
        return 0

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
