"""Records of one data file, read in file order into a planner's tensors: only the wanted bytes.

Small records are read with their neighbours, in one call; of a large one only the wanted slices,
straight into the planner's tensor where its memory allows that, otherwise through a buffer of
bounded size. A record that is not plain goes through ``torch.load``.

What is read whole is compared with its CRC-32, which stands behind the bytes of each entry of a zip
file, also in files of torch's writer. So damage after a save is found by the load, wherever the
planner puts the elements.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlanner, ReadItem, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements._torch import StorageInfo, narrow_tensor_by_index
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_error,
    format_faults,
    format_name,
    raise_faults,
)
from dcp_placements.storage.byte_ranges import halves, segments
from dcp_placements.storage.checked_load import load_plain, load_saved_tensor, zip_problem
from dcp_placements.storage.file_reads import CountedFile, Part, crc32, part_of
from dcp_placements.storage.index import with_copies
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.tensor_record import (
    BEHIND,
    DESCRIPTOR,
    HEADS_NBYTES,
    RecordHeads,
    TensorRecord,
    behind_elements,
)

SMALL_NBYTES = 64 << 10
"""A record up to this is read with its neighbours, where most of it is wanted."""

NEIGHBOUR_NBYTES = 2 << 10
"""Records this near to each other are neighbours. What ``torch.save`` puts between small tensors
lies in pages that are fetched anyhow: 500 tensors of 4 KiB are 2.8 MB from the disk in one call or
in 500, and one call takes a quarter of the time."""

SPAN_NBYTES = 2 << 20
"""Neighbours are read together up to this: it is what a load takes in memory beyond torch's."""

_PAGE_NBYTES = 4 << 10
"""A record up to this is small, whatever is wanted of it: its page is fetched anyhow."""

BUFFER_NBYTES = 16 << 20
"""The largest buffer for elements that cannot be read in place."""

Array = np.ndarray[Any, Any]

Transformed = Callable[[ReadItem, Sequence[str], Any], Any]
"""Undoes the transforms of a record's stream."""

IS_DAMAGED = "the checkpoint is damaged"
_IS_OTHER = "the checkpoint is not what it says"
_NO_EXTENSION = (
    "likely:      it was saved with an extension that this process lacks, or the file was damaged",
    "way out:     PlacementFileSystemReader(_extension_registry=...) with that extension",
)
DAMAGED = (
    "likely:      the file was damaged or cut short, or a later save into the same directory was "
    "cut off and left files of two saves",
    "way out:     load an older checkpoint; this one is not sound",
)
_OTHER_SUM = (
    "likely:      the file was damaged after it was written: by a disk, a copy, a transfer",
    "way out:     copy the file again, or load an older checkpoint; dcp-placements verify "
    "--contents lists all that is damaged",
    "             PlacementFileSystemReader(check_crc=False) reads it as it is",
)


def is_read_whole(nbytes: Any, wanted_nbytes: Any) -> Any:
    """Whether all of a record is read, by its length and that of the elements that are wanted."""
    most = 2 * (wanted_nbytes + HEADS_NBYTES[0]) >= nbytes
    return (nbytes <= SMALL_NBYTES) & ((nbytes <= _PAGE_NBYTES) | most)


@dataclass(slots=True)
class Record:
    """A stored chunk or object, and what is wanted of it.

    Attributes:
        info: Where it is.
        items: What is read of it; all of one type.
        places: Of all chunks, for the message that names another copy.
    """

    info: StorageInfo
    items: list[ReadItem] = field(default_factory=list)
    places: Mapping[MetadataIndex, StorageInfo] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return int(self.info.offset + self.info.length)

    @property
    def item(self) -> ReadItem:
        """The first item."""
        return self.items[0]

    @property
    def is_object(self) -> bool:
        """Whether it is no tensor."""
        return self.items[0].type is LoadItemType.BYTE_IO

    def fault(self, problem: str, details: Sequence[str] = DAMAGED) -> Fault:
        """Return that this record is not as it should be."""
        fault = Fault(self.items[0].storage_index.fqn, problem, tuple(details))
        return with_copies(fault, self.places, self.item, self.info.relative_path)


class ChunkReader:
    """Reads records into a planner's tensors, file after file.

    Args:
        planner: Gives the tensors to fill.
        stored: The metadata of what is stored, by key.
        transformed: Undoes the transforms of a record's stream.
        check_crc: Whether what is read whole is compared with its checksum.
        restricted: Whether objects that name more than plain values are refused.
        lock: Held while the planner is called, where several threads read for it.

    Attributes:
        unchecked: Records that were read whole and have no checksum.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        stored: Mapping[str, Any],
        transformed: Transformed,
        *,
        check_crc: bool = False,
        restricted: bool = False,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.unchecked = 0
        self._planner = planner
        self._stored = stored
        self._transformed = transformed
        self._check_crc = check_crc
        self._restricted = restricted
        self._lock = lock or nullcontext()
        self._heads = RecordHeads()
        self._span, self._elements = _Buffer(), _Buffer()

    def read(self, file: CountedFile, records: Sequence[Record]) -> None:
        """Read what is wanted of a file.

        Args:
            file: The file.
            records: In file order.

        Raises:
            PlacementError: The file does not hold what the metadata says.
        """
        outside = [
            record for record in records if not 0 <= record.info.offset <= record.end <= file.size
        ]
        # One number for all of them, so that they are one fault.
        needed = max((record.end for record in outside), default=0)
        raise_faults(IS_DAMAGED, [_beyond(record, file.size, needed) for record in outside])
        for span in self._spans(records):
            if len(span) == 1 and not self._is_small(span[0]):
                self._read_record(span[0], Part(file, span[0].info.offset, span[0].info.length))
            else:
                self._read_span(file, span)

    def tensor_record(self, record: Record, part: Part) -> TensorRecord | None:
        """Return where the elements of a record are; None where it is not plain."""
        if record.is_object or record.info.transform_descriptors:
            return None
        return self._heads.find(part)

    def _spans(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Yield records that are read in one call: small ones of one type, near to each other."""
        span: list[Record] = []
        kind: tuple[bool, bool] | None = None
        for record in records:
            before, kind = kind, (self._is_small(record), record.is_object)
            if span and not (
                kind == before == (True, record.is_object)
                and record.info.offset - span[-1].end <= NEIGHBOUR_NBYTES
                and record.end - span[0].info.offset <= SPAN_NBYTES
            ):
                yield span
                span = []
            span.append(record)
        if span:
            yield span

    def _is_small(self, record: Record) -> bool:
        info, wanted = record.info, 0
        if info.length > SMALL_NBYTES or info.transform_descriptors:
            return False
        if info.length <= _PAGE_NBYTES or record.is_object:
            return True
        for item in record.items:
            stored = self._stored.get(item.storage_index.fqn)
            if not isinstance(stored, TensorStorageMetadata):
                return True
            wanted += item.lengths.numel() * stored.properties.dtype.itemsize
        return bool(is_read_whole(info.length, wanted))

    def _read_span(self, file: CountedFile, span: Sequence[Record]) -> None:
        """Read neighbours in one call."""
        start = span[0].info.offset
        held = self._span.take(span[-1].end - start)
        file.read_into(held, start)
        for records in _alike(span):
            data = held[records[0].info.offset - start : records[-1].end - start]
            rows = np.frombuffer(data, np.uint8).reshape(len(records), -1)
            tensor = self.tensor_record(records[0], part_of(rows[0].data))
            if tensor is not None and self._are_whole(records, tensor, rows):
                self._read_alike(records, tensor, rows)
                continue
            for record, row in zip(records, rows, strict=True):
                self._read_record(record, part_of(row.data))

    def _are_whole(self, records: Sequence[Record], tensor: TensorRecord, rows: Array) -> bool:
        """Whether records have elements and begin alike, and one item wants all of each."""
        heads, begin = rows[:, : tensor.start], (0,) * len(tensor.shape)
        return (
            tensor.nbytes > 0
            and all(
                len(record.items) == 1
                and record.item.lengths == tensor.shape
                and record.item.storage_offsets == begin
                for record in records
            )
            and bool((heads == heads[0]).all())
        )

    def _read_alike(self, records: Sequence[Record], tensor: TensorRecord, rows: Array) -> None:
        """Deliver records whose heads are equal.

        Args:
            records: Each wanted whole, by one item.
            tensor: Where their elements are.
            rows: The records, one in each row of bytes.
        """
        items = [record.items[0] for record in records]
        with self._lock:
            resolved = [self._planner.resolve_tensor(item) for item in items]
        pairs = zip(records, resolved, strict=True)
        targets = [_checked(record, target, tensor.shape) for record, target in pairs]
        end = tensor.start + tensor.nbytes
        # A copy is aligned, as torch takes it to be; a single row would be a view.
        elements = rows[:, tensor.start : end].copy()
        if self._check_crc:
            behind = [row.tobytes() for row in rows[:, end : end + BEHIND]]
            self._check(records, tensor, list(map(crc32, elements)), behind)
        values = torch.from_numpy(elements).view(-1).view(tensor.dtype).view(-1, *tensor.shape)
        for target, value in zip(targets, values.unbind(), strict=True):
            target.copy_(value)
        with self._lock:
            for item, target in zip(items, targets, strict=True):
                self._planner.commit_tensor(item, target)

    def _check(
        self,
        records: Sequence[Record],
        tensor: TensorRecord,
        checksums: Sequence[int],
        behind: Sequence[bytes],
    ) -> None:
        """Compare the checksums of elements with those behind them.

        Args:
            records: They begin alike.
            tensor: Where the elements are in each.
            checksums: Those of what was read.
            behind: What is behind the elements of each.

        Raises:
            PlacementError: Some differ.
        """
        if not tensor.has_crc:
            self.unchecked += len(records)
            return
        faults = []
        for record, checksum, stored in zip(records, checksums, behind, strict=True):
            if stored == DESCRIPTOR + checksum.to_bytes(4, "little"):
                continue
            what = f"{int.from_bytes(stored[4:], 'little'):08x} was written"
            if not stored.startswith(DESCRIPTOR):
                what = "no checksum follows any more"
            place = f"byte {record.info.offset + tensor.start} of {record.info.relative_path}"
            problem = (
                f"its elements at {place} are not what was written: their CRC-32 is "
                f"{checksum:08x}, where {what}"
            )
            faults.append(record.fault(problem, _OTHER_SUM))
        raise_faults(IS_DAMAGED, faults)

    def _read_record(self, record: Record, part: Part) -> None:
        """Deliver a record, item by item.

        Raises:
            PlacementError: It does not hold what the metadata says.
        """
        tensor = self.tensor_record(record, part)
        if tensor is not None and len(tensor.shape) == len(record.item.lengths):
            for item in record.items:
                self._read_item(record, item, tensor, part)
            return
        transforms = record.info.transform_descriptors or ()
        try:
            stream = self._transformed(record.item, transforms, part.stream())
        except ValueError as error:  # of torch's registry of extensions
            raise_faults(_IS_OTHER, [record.fault(f"it cannot be decoded: {error}", _NO_EXTENSION)])
        if record.is_object or not stream.seekable():
            stream = io.BytesIO(stream.read(-1))
        if self._check_crc:
            problem, has_crc = zip_problem(stream)
            self.unchecked += not has_crc
            if problem is not None:
                info = record.info
                place = f"the record at byte {info.offset} of {info.relative_path}"
                text = f"{place} is not what was written: {problem}"
                raise_faults(IS_DAMAGED, [record.fault(text, _OTHER_SUM)])
        if record.is_object:
            for item in record.items:
                data = io.BytesIO(stream.getbuffer())
                value = _plain(item, data) if self._restricted else data
                with self._lock:
                    self._planner.load_bytes(item, value)
            return
        loaded = _load(stream, record)
        for item in record.items:
            source = narrow_tensor_by_index(loaded, item.storage_offsets, item.lengths)
            with self._lock:
                resolved = self._planner.resolve_tensor(item)
            target = _checked(record, resolved, source.shape)
            target.copy_(source)
            with self._lock:
                self._planner.commit_tensor(item, target)

    def _read_item(self, record: Record, item: ReadItem, tensor: TensorRecord, part: Part) -> None:
        """Read a slice of a plain record."""
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        is_whole = lengths == tensor.shape
        sizes = None if is_whole else self._stored_sizes(item)
        holds = f"{record.info.relative_path} holds a {tensor.shape} tensor, where the metadata say"
        if sizes not in (None, tensor.shape):
            raise_faults(_IS_OTHER, [record.fault(f"{holds}s that it is a chunk of {sizes}")])
        ends = zip(offsets, lengths, tensor.shape, strict=True)
        if any(offset + length > size for offset, length, size in ends):
            text = f"{holds}s that {lengths} can be read at {offsets}"
            raise_faults(_IS_OTHER, [record.fault(text)])
        with self._lock:
            resolved = self._planner.resolve_tensor(item)
        target = _checked(record, resolved, lengths)
        if target.numel():
            summed = is_whole and self._check_crc
            checksum = self._fill(target, offsets, lengths, tensor, part, summed=summed)
            if summed:
                behind = behind_elements(part, tensor) if tensor.has_crc else b""
                self._check([record], tensor, [checksum], [behind])
        with self._lock:
            self._planner.commit_tensor(item, target)

    def _stored_sizes(self, item: ReadItem) -> tuple[int, ...] | None:
        """Return the sizes of the chunk that an item is read from; None where they are unknown."""
        stored, index = self._stored.get(item.storage_index.fqn), item.storage_index.index
        if not isinstance(stored, TensorStorageMetadata) or index is None:
            return None
        chunk = stored.chunks[index] if index < len(stored.chunks) else None
        if chunk is None or chunk.offsets != item.storage_index.offset:
            return None
        return tuple(chunk.sizes)

    def _fill(
        self,
        target: torch.Tensor,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        tensor: TensorRecord,
        part: Part,
        *,
        summed: bool,
    ) -> int:
        """Read a slice of a plain record into ``target``.

        Returns:
            The CRC-32 of the elements, if ``summed``: they are read whole then.
        """
        file, chunk, checksum = part.file, part.start + tensor.start, 0
        memory = memory_of(target) if target.dtype == tensor.dtype else None
        todo = [(offsets, lengths)]
        while todo:
            at, sizes = todo.pop()
            itemsize = tensor.dtype.itemsize
            slices = segments(
                tensor.shape, offsets=at, lengths=sizes, itemsize=itemsize, gap=file.gap
            )
            direct = memory is not None and slices.exact and sizes == lengths
            if not direct and slices.total_nbytes > BUFFER_NBYTES:
                # Along the first dim that can be cut: of a whole tensor the parts are in order.
                todo += reversed(halves(at, sizes))
                continue
            buffer = memory if direct else self._elements.take(slices.total_nbytes)
            assert buffer is not None
            if summed:
                checksum = file.read_summed(buffer, chunk + slices.start, checksum)
            else:
                file.read_segments(buffer, slices, chunk)
            if not direct:
                elements = torch.frombuffer(buffer, dtype=tensor.dtype)
                place = zip(at, offsets, sizes, strict=True)
                block = target[tuple(slice(a - o, a - o + n) for a, o, n in place)]
                block.copy_(elements.as_strided(sizes, slices.strides))
        return checksum


class _Buffer:
    """Memory that every use takes again."""

    def __init__(self) -> None:
        self._held = memoryview(bytearray())

    def take(self, nbytes: int) -> memoryview:
        if self._held.nbytes < nbytes:
            self._held = memoryview(bytearray(nbytes))
        return self._held[:nbytes]


def _beyond(record: Record, nbytes: int, needed: int) -> Fault:
    """Return that a record does not lie within its file of ``nbytes``, which lacks some."""
    path, start, end = record.info.relative_path, record.info.offset, record.end
    if 0 <= start <= end:
        return record.fault(f"{path} ends before it: {nbytes} bytes, {needed} needed")
    return record.fault(f"{path} has no bytes from {start} to {end}, where the metadata has it")


def _alike(span: Sequence[Record]) -> Iterator[list[Record]]:
    """Yield records of a span in runs of equal lengths without gaps, each wanted by one item."""
    run: list[Record] = []
    for record in span:
        info = record.info
        if run and not (
            len(record.items) == len(run[-1].items) == 1
            and (info.offset, info.length) == (run[-1].end, run[-1].info.length)
        ):
            yield run
            run = []
        run.append(record)
    yield run


def _checked(record: Record, target: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return a planner's tensor, which is to be filled with elements of these sizes."""
    if target.shape != sizes:
        problem = f"a {tuple(sizes)} tensor was read, where {tuple(target.shape)} is to be filled"
        raise_faults(_IS_OTHER, [record.fault(problem)])
    # A detached view takes writes also where it is of a parameter, or of an inference tensor.
    return target.detach()


def _load(stream: Any, record: Record) -> torch.Tensor:
    """Return the tensor of a record by way of ``torch.load``."""
    path = record.info.relative_path
    try:
        return load_saved_tensor(stream)
    except RefusedGlobal as error:
        details = (
            f"found:       in {path}",
            "way out:     torch.serialization.add_safe_globals([the type]) before the load, if the "
            "checkpoint is trusted",
        )
        problem = f"is of a type that torch.load does not allow: {error.name}"
        text = format_faults("the checkpoint holds another type", [record.fault(problem, details)])
        raise PlacementError(text) from error
    except Exception as error:
        # Only the first sentence: torch goes on with advice for other situations.
        sentence = (str(error).splitlines() or [format_error(error)])[0].partition(". ")[0]
        found = f"found:       {type(error).__name__}: {sentence}"
        fault = record.fault(f"what {path} holds of it is no tensor", (found, *DAMAGED))
        raise PlacementError(format_faults(IS_DAMAGED, [fault])) from error


def _plain(item: ReadItem, data: io.BytesIO) -> io.BytesIO:
    """Return an object that ``torch.load`` accepts with ``weights_only``, saved again.

    Planners load objects with ``weights_only=False``, by an unpickler that may read the same bytes
    otherwise: so they get the value that was checked, and not the bytes.

    Raises:
        PlacementError: Its pickle names more than plain values.
    """
    checked = io.BytesIO()
    try:
        torch.save(load_plain(data), checked)
    except Exception as error:
        # Of any type, by what is in the pickle.
        reason = format_name((str(error).strip() or type(error).__name__).splitlines()[0])
        raise PlacementError(
            f"{format_name(item.storage_index.fqn)}: this object is not loaded with "
            "restricted=True, since torch.load(weights_only=True) does not\n"
            f"    torch says:  {reason}\n"
            "    way out:     torch.serialization.add_safe_globals for what you trust, or "
            "leave the key out of the state dict"
        ) from error
    checked.seek(0)
    return checked


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """Return the memory of a tensor's elements; None where they are not contiguous host memory."""
    if not (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
    ):
        return None
    # A tensor of one element is contiguous with any stride; a row of bytes needs stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
