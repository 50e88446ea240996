"""From the records of one data file to where their contents belong.

Small records are read with their neighbours, in one call; of large ones the wanted bytes alone,
straight into the tensor where that is possible. What is not plain goes through ``torch.load``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements._torch import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    StorageInfo,
    TensorStorageMetadata,
    narrow_tensor_by_index,
)
from dcp_placements.errors import Fault, PlacementError, format_faults
from dcp_placements.layout.byte_ranges import Gap, halves, segments
from dcp_placements.storage.copies import Packed
from dcp_placements.storage.file_reads import CountedFile, FilePart, HeldPart
from dcp_placements.storage.metadata.shadow_records import packed_object
from dcp_placements.storage.metadata.table import Starts
from dcp_placements.storage.tensor_record import (
    CHECK_NBYTES,
    HEADS_NBYTES,
    RecordHeads,
    TensorRecord,
    is_check,
    load_saved_tensor,
)

SMALL_NBYTES = 64 << 10
"""A record up to this is read with its neighbours, where most of it is wanted."""

NEIGHBOUR_NBYTES = 2 << 10
"""Records this near to each other are neighbours. What ``torch.save`` puts between small tensors
lies in pages that are fetched anyhow: 500 tensors of 4 KiB are 2.8 MB from the disk in one call or
in 500, and one call takes a quarter of the time."""

SPAN_NBYTES = 2 << 20
"""Neighbours are read together up to this: it is what a load takes in memory beyond torch's."""

EXACT_NBYTES = 1 << 10
"""Tensors of this size, on average, and more are read without the heads between them, where their
writer told where elements begin and heads are more than a tenth of all. Of smaller ones the calls
would cost more than the bytes."""

NEAR_NBYTES = 64 << 10
"""Reads this near to each other are announced, so that the pages between come along: to fetch them
takes less time than a second request."""

BUFFER_NBYTES = 16 << 20
"""What cannot be read to where it belongs goes through a buffer of this size at most."""

Part = FilePart | HeldPart
"""The bytes of a record."""


def cheap_gap(run_nbytes: int) -> int:
    """Return how many bytes between two runs cost less to read than another call.

    Short runs are many: to read each for itself takes more time than bytes are worth.

    >>> cheap_gap(16), cheap_gap(2048)
    (4096, 512)
    """
    return 4096 if run_nbytes < 512 else 512


def _any_gap(run_nbytes: int) -> int:
    """Return that any gap will do: what is between is in memory already."""
    return SMALL_NBYTES


@dataclass(slots=True)
class Record:
    """A stored chunk or object, and what is wanted of it.

    Attributes:
        info: Where it is.
        items: The reads.
        packed: Where in the record the chunk of each item is; None where it is all of it.
    """

    info: StorageInfo
    items: list[ReadItem] = field(default_factory=list)
    packed: list[Packed | None] = field(default_factory=list)

    def add(self, item: ReadItem, packed: Packed | None = None) -> None:
        """Add a read."""
        self.items.append(item)
        self.packed.append(packed)

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return int(self.info.offset + self.info.length)


class ChunkReader:
    """Reads records into a planner's tensors, file after file.

    Args:
        planner: Says where to.
        stored: The metadata of what is stored, by key.
        transformed: Undoes the transforms of a record's stream.
        starts: Where elements begin in small records, as the writer told.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        stored: Mapping[str, Any],
        transformed: Callable[[ReadItem, Sequence[str], Any], Any],
        starts: Starts | None = None,
    ) -> None:
        self._starts = starts or {}
        self._check = memoryview(bytearray(CHECK_NBYTES))
        self._planner = planner
        self._stored = stored
        self._transformed = transformed
        self._buffer = memoryview(bytearray())
        self._span = memoryview(bytearray())
        self._heads = RecordHeads()

    def read(self, file: CountedFile, path: str, records: Sequence[Record]) -> None:
        """Read what is wanted of a file.

        Args:
            file: The file.
            path: Its name in the checkpoint, for messages.
            records: In file order.

        Raises:
            PlacementError: The file does not hold what the metadata says.
        """
        faults = [
            Fault(
                record.items[0].storage_index.fqn,
                f"{path} ends before it: {file.size} bytes, {record.end} needed",
                _DAMAGED,
            )
            for record in records
            if record.end > file.size
        ]
        if faults:
            raise PlacementError(format_faults("the checkpoint is damaged", faults))
        for span in self._spans(records):
            if len(span) == 1 and not self._is_small(span[0]):
                self._read_alone(file, path, span[0])
                continue
            if file.is_plain and self._reads_exactly(file, path, span):
                continue
            start = span[0].info.offset
            held = self._span_room(span[-1].end - start)
            file.read_into(held, start)
            for record in span:
                at = record.info.offset - start
                self._read_small(path, record, held[at : at + record.info.length])

    def _reads_exactly(self, file: CountedFile, path: str, span: Sequence[Record]) -> bool:
        """Read the elements of a span alone; False where there is not much beside them."""
        if not self._starts:
            return False
        wanted = []
        for record in span:
            known = self._told_start(record)
            if known is None:
                return False
            wanted.append(known)
        nbytes = span[-1].end - span[0].info.offset
        needed = sum(known.nbytes for known in wanted)
        if needed < EXACT_NBYTES * len(span) or 1.1 * needed >= nbytes:
            return False
        file.announce(span[0].info.offset, nbytes)
        for record, known in zip(span, wanted, strict=True):
            if not self._read_exactly(file, path, record, known):
                held = self._span_room(record.info.length)
                file.read_into(held, record.info.offset)
                self._read_small(path, record, held)
        return True

    def _told_start(self, record: Record) -> TensorRecord | None:
        """Return where the elements of a record are that is wanted whole, by what its writer told.

        Tensors of one dtype and shape have records of one length, unless they are not plain.
        """
        item, packed = record.items[0], record.packed[0]
        if len(record.items) > 1 or packed is not None or item.type == LoadItemType.BYTE_IO:
            return None
        told, index = self._stored.get(item.storage_index.fqn), item.storage_index.index
        if not isinstance(told, TensorStorageMetadata) or index is None:
            return None
        chunk = told.chunks[index] if index < len(told.chunks) else None
        if chunk is None or chunk.offsets != item.storage_index.offset or any(item.storage_offsets):
            return None
        dtype, sizes = told.properties.dtype, tuple(chunk.sizes)
        if tuple(item.lengths) != sizes:
            return None
        start = self._starts.get((str(dtype), sizes, record.info.length))
        return None if start is None else TensorRecord(dtype, sizes, start)

    def _read_exactly(
        self, file: CountedFile, path: str, record: Record, known: TensorRecord
    ) -> bool:
        """Read the elements, and what stands behind them to prove it; False where it does not."""
        item = record.items[0]
        target = self._target(item, known.shape, path)
        memory = _memory(target) if target.dtype == known.dtype else None
        data = self._room(known.nbytes)[: known.nbytes] if memory is None else memory
        file.read_both(data, self._check, record.info.offset + known.start)
        if not is_check(self._check, data):
            return False
        if memory is None:
            target.copy_(torch.frombuffer(data, dtype=known.dtype).reshape(known.shape))
        self._planner.commit_tensor(item, target)
        return True

    def _spans(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Yield records that are read in one call."""
        span: list[Record] = []
        for record in records:
            if span and not (
                self._is_small(record)
                and self._is_small(span[-1])
                and record.info.offset - span[-1].end <= NEIGHBOUR_NBYTES
                and record.end - span[0].info.offset <= SPAN_NBYTES
                and record.items[0].type == span[-1].items[0].type
            ):
                yield span
                span = []
            span.append(record)
        if span:
            yield span

    def _is_small(self, record: Record) -> bool:
        info = record.info
        limit = SMALL_NBYTES if record.packed[0] is None else SPAN_NBYTES
        if info.length > limit or info.transform_descriptors:
            return False
        wanted = HEADS_NBYTES[0]
        for item in record.items:
            told = self._stored.get(item.storage_index.fqn)
            if item.type == LoadItemType.BYTE_IO or not isinstance(told, TensorStorageMetadata):
                return True
            wanted += item.lengths.numel() * told.properties.dtype.itemsize
        return bool(2 * wanted >= info.length)

    def _read_small(self, path: str, record: Record, held: memoryview) -> None:
        part = HeldPart(held)
        self._deliver(path, record, self.tensor_record(record, part), part, _any_gap)

    def _read_alone(self, file: CountedFile, path: str, record: Record) -> None:
        info = record.info
        part = FilePart(file, info.offset, info.length)
        known = None if info.transform_descriptors else self.tensor_record(record, part)
        self._deliver(path, record, known, part, cheap_gap)

    def tensor_record(self, record: Record, part: Part) -> TensorRecord | None:
        """Return where the elements of a record are; None where it is not plain."""
        if all(item.type == LoadItemType.BYTE_IO for item in record.items):
            return None
        return self._heads.find(part, record.info.length)

    def _deliver(
        self,
        path: str,
        record: Record,
        known: TensorRecord | None,
        part: Part,
        gap: Gap,
    ) -> None:
        """Give a record's contents to the planner, item by item."""
        loaded: torch.Tensor | None = None
        objects: memoryview | None = None
        for item, packed in zip(record.items, record.packed, strict=True):
            if item.type == LoadItemType.BYTE_IO:
                if packed is None:
                    plain = self._plain_stream(record, item, part)
                    self._planner.load_bytes(item, io.BytesIO(plain.read(-1)))
                    continue
                if objects is None:
                    objects = memoryview(self._plain_stream(record, item, part).read(-1))
                self._planner.load_bytes(item, _object(objects, packed, item, path))
                continue
            offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
            if packed is not None:
                offsets, lengths = (packed.position, *offsets), (1, *lengths)
            if known is None or len(known.shape) != len(lengths):
                if loaded is None:
                    loaded = _load(self._plain_stream(record, item, part), item, path)
                if packed is not None and packed.count != len(loaded):
                    raise _misfit(item, tuple(loaded.size()), path)
                held = loaded if packed is None else loaded[packed.position]
                found = narrow_tensor_by_index(held, item.storage_offsets, item.lengths)
                target = self._target(item, tuple(found.size()), path)
                target.copy_(found)
            else:
                ends = zip(offsets, lengths, known.shape, strict=True)
                if any(offset + length > size for offset, length, size in ends):
                    raise _misfit(item, known.shape, path)
                if packed is not None and packed.count != known.shape[0]:
                    raise _misfit(item, known.shape, path)
                target = self._target(item, tuple(item.lengths), path)
                if target.numel():
                    to = target if packed is None else target.unsqueeze(0)
                    self._fill(to, offsets, lengths, known, part, gap)
            self._planner.commit_tensor(item, target)

    def _plain_stream(self, record: Record, item: ReadItem, part: Part) -> Any:
        return self._transformed(item, record.info.transform_descriptors or (), part.stream())

    def _target(self, item: ReadItem, found: tuple[int, ...], path: str) -> torch.Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.size()) != found:
            raise _misfit(item, found, path, wanted=tuple(target.size()))
        return target

    def _fill(
        self,
        target: torch.Tensor,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        known: TensorRecord,
        part: Part,
        gap: Gap,
    ) -> None:
        """Read a slice of a plain record into ``target``."""
        itemsize = known.dtype.itemsize
        memory = _memory(target) if target.dtype == known.dtype else None
        if memory is not None and lengths == known.shape:
            part.read_into(memory, known.start)
            return
        todo = [(offsets, lengths)]
        while todo:
            at, sizes = todo.pop()
            plan = segments(known.shape, offsets=at, lengths=sizes, itemsize=itemsize, gap=gap)
            direct = memory is not None and plan.exact and sizes == lengths
            if not direct and plan.total_nbytes > BUFFER_NBYTES:
                todo += reversed(halves(at, sizes))
                continue
            buffer = memory if direct else self._room(plan.total_nbytes)
            assert buffer is not None
            near = 0 < plan.distance <= NEAR_NBYTES
            part.read_each(buffer, plan.nbytes, plan.positions(known.start), near=near)
            if not direct:
                read = torch.frombuffer(
                    buffer, dtype=known.dtype, count=plan.total_nbytes // itemsize
                )
                place = zip(at, offsets, sizes, strict=True)
                block = target[tuple(slice(a - o, a - o + n) for a, o, n in place)]
                block.copy_(read.as_strided(sizes, plan.strides))

    def _span_room(self, nbytes: int) -> memoryview:
        if self._span.nbytes < nbytes:
            self._span = memoryview(bytearray(nbytes))
        return self._span[:nbytes]

    def _room(self, nbytes: int) -> memoryview:
        if self._buffer.nbytes < nbytes:
            self._buffer = memoryview(bytearray(nbytes))
        return self._buffer


_DAMAGED = (
    "likely:      the file was damaged or cut short, or a later save into the same directory was "
    "cut off and left files of two saves",
    "way out:     load an older checkpoint; this one is not sound",
)


def _memory(tensor: torch.Tensor) -> memoryview | None:
    """Return the bytes of a tensor's elements where they lie; None where they are not in a row."""
    plain = (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )
    if not plain:
        return None
    # A tensor of one element is contiguous with any stride; a row of bytes needs stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _load(stream: Any, item: ReadItem, path: str) -> torch.Tensor:
    """Return the tensor of a record by way of ``torch.load``."""
    seekable = stream if stream.seekable() else io.BytesIO(stream.read(-1))
    try:
        return load_saved_tensor(seekable)
    except Exception as error:
        # Only the first sentence: torch goes on with advice that is not for this case.
        said = f"found:       {type(error).__name__}: {_first_sentence(error)}"
        fault = Fault(
            item.storage_index.fqn, f"what {path} holds of it is no tensor", (said, *_DAMAGED)
        )
        raise PlacementError(format_faults("the checkpoint is damaged", [fault])) from error


def _object(record: memoryview, packed: Packed, item: ReadItem, path: str) -> io.BytesIO:
    try:
        return io.BytesIO(packed_object(record, packed.position, packed.count))
    except ValueError as error:
        told = f"what {path} holds of it is no copy: {error}"
        fault = Fault(item.storage_index.fqn, told, _DAMAGED)
        raise PlacementError(format_faults("the checkpoint is damaged", [fault])) from error


def _first_sentence(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].partition(". ")[0]


def _misfit(
    item: ReadItem,
    found: tuple[int, ...],
    path: str,
    *,
    wanted: tuple[int, ...] | None = None,
) -> PlacementError:
    offsets = tuple(item.storage_offsets)
    told = (
        f"a {found} tensor was read, where {wanted} is to be filled"
        if wanted is not None
        else f"{path} holds a {found} tensor, where the metadata says that "
        f"{tuple(item.lengths)} can be read at {offsets}"
    )
    fault = Fault(item.storage_index.fqn, told, _DAMAGED)
    return PlacementError(format_faults("the checkpoint is not what it says", [fault]))
