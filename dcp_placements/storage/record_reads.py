"""Records of one data file, read in file order into a planner's tensors: only the requested bytes.

One call reads a small record together with its neighbours. Of a large record only the requested
slices are read, straight into the planner's tensor where its memory allows that, otherwise through
a buffer of bounded size. ``torch.load`` reads records that are not plain.

Records that are read whole are compared with their CRC-32, which follows the bytes of each entry of
a zip file, also in files of torch's writer. So a load finds damage that happened after the save.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlanner, ReadItem, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements._torch import (
    PLAIN_TYPES,
    StorageInfo,
    are_plain,
    copy_all,
    copy_into,
    narrow_tensor_by_index,
)
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
    raise_faults,
)
from dcp_placements.layout.boxes import Array
from dcp_placements.short_text import format_error, format_name
from dcp_placements.storage.file_reads import ByteRange, CountedFile, crc32, range_in_memory
from dcp_placements.storage.index import with_copies
from dcp_placements.storage.record import Record
from dcp_placements.storage.record_head import (
    BEHIND,
    HEADS_NBYTES,
    HeadCache,
    RecordHead,
    wrong_crcs,
)
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.torch_load import load_plain

SMALL_NBYTES = 64 << 10
"""A record up to this size is read with its neighbours, if most of it is requested."""

NEIGHBOUR_NBYTES = 2 << 10
"""Records at most this far apart are neighbours. The bytes that ``torch.save`` puts between small
tensors are in pages that are fetched anyway: 500 tensors of 4 KiB are 2.8 MB from the disk in one
call or in 500, and one call takes a quarter of the time."""

SPAN_NBYTES = 2 << 20
"""The most bytes of neighbours in one call: the memory that a load takes beyond torch's."""

_PAGE_NBYTES = 4 << 10
"""A record up to this size is small, whatever is requested of it: its page is fetched anyway."""


Transformed = Callable[[ReadItem, Sequence[str], Any], Any]
"""Undoes the transforms of a record's stream."""

IS_DAMAGED = "the checkpoint is damaged"
_IS_OTHER = "the checkpoint is not what it says"
NO_EXTENSION = (
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
    "             check_crc=False, of the reader or the resharder, reads it as it is",
)


def is_read_whole(nbytes: Any, wanted_nbytes: Any) -> Any:
    """Whether all of a record is read, by its size and that of the requested elements."""
    most = 2 * (wanted_nbytes + HEADS_NBYTES[0]) >= nbytes
    return (nbytes <= SMALL_NBYTES) & ((nbytes <= _PAGE_NBYTES) | most)


class RecordRead(NamedTuple):
    """A read of a stored chunk or object: an item, and where its record is."""

    item: ReadItem
    file: str
    start: int
    nbytes: int
    transforms: Sequence[str] | None = None
    record: RecordHead | None = None  # where its elements are; None if its head says it

    @property
    def is_object(self) -> bool:
        """Whether the record is an object, not a tensor."""
        return self.item.type is LoadItemType.BYTE_IO


class ChunkReader:
    """Reads records into a planner's tensors, file after file.

    Args:
        planner: The planner, which returns the tensors to fill.
        stored: Metadata of stored tensors and objects, by key.
        transformed: Undoes the transforms of a record's stream.
        storage_data: Locations of all chunks, for messages that name another copy.
        check_crc: Whether records that are read whole are compared with their checksums.
        restricted: Whether objects that name more than plain values are refused.
        as_declared: Whether a record of another dtype or other sizes than the metadata say is
            refused instead of cast, because it is written again by these metadata.
        lock: A lock to hold while the planner is called, if several threads read for it.

    Attributes:
        unchecked: Number of records that were read whole and have no checksum.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        stored: Mapping[str, Any],
        transformed: Transformed = lambda item, descriptors, stream: stream,
        *,
        storage_data: Mapping[MetadataIndex, StorageInfo] | None = None,
        check_crc: bool = False,
        restricted: bool = False,
        as_declared: bool = False,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.unchecked = 0
        self._planner = planner
        self._stored = stored
        self._transformed = transformed
        self._storage_data = storage_data or {}
        self._check_crc = check_crc
        self._restricted = restricted
        self._as_declared = as_declared
        self._lock = lock or nullcontext()
        self._heads = HeadCache()
        self._span, self._elements = _Buffer(), _Buffer()

    def read(self, file: CountedFile, reads: Sequence[RecordRead]) -> None:
        """Read records of a file.

        Args:
            file: The file.
            reads: Reads in file order.

        Raises:
            PlacementError: The file does not hold what the metadata say.
        """
        if len(reads) < 2:
            for read in reads:
                self._read_alone(file, read)
            return
        starts = np.array([read.start for read in reads], np.int64)
        nbytes = np.array([read.nbytes for read in reads], np.int64)
        ends = starts + nbytes
        self._check_inside(file, reads, starts, nbytes)
        is_small = self._are_small(reads, starts, nbytes)
        # Between breaks, records have one size and no gaps.
        breaks = np.flatnonzero((starts[1:] != ends[:-1]) | (nbytes[1:] != nbytes[:-1])) + 1
        for first, last in _spans(is_small, starts, ends):
            is_held = is_small[first]
            held_nbytes = int(ends[first:last].max() - starts[first]) if is_held else 0
            file.hold(self._span.take(held_nbytes), int(starts[first]))
            cuts = breaks[slice(*breaks.searchsorted((first + 1, last)))].tolist()
            for begin, end in pairwise((first, *cuts, last)):
                batch = reads[begin:end]
                if is_held and self._read_alike(file, batch):
                    continue
                for read in batch:
                    self._read_one(file, read)
        file.hold(memoryview(b""), 0)

    def _read_alone(self, file: CountedFile, read: RecordRead) -> None:
        """Read one record, as ``read`` does; commands ask for one small tensor after another."""
        self._check_inside(file, [read], read.start, read.nbytes)
        is_small = is_read_whole(read.nbytes, self._elements_nbytes(read))
        file.hold(self._span.take(read.nbytes if is_small else 0), read.start)
        self._read_one(file, read)
        file.hold(memoryview(b""), 0)

    def _check_inside(
        self, file: CountedFile, reads: Sequence[RecordRead], starts: Any, nbytes: Any
    ) -> None:
        """Refuse records that are not inside the file, by the start and the bytes of each.

        Raises:
            PlacementError: There are some.
        """
        is_outside = (starts < 0) | (nbytes < 0) | (nbytes > file.size - starts)
        outside = [reads[index] for index in np.flatnonzero(is_outside).tolist()]
        # One number for all of them makes their texts equal, so that they become one fault.
        needed = max([read.start + read.nbytes for read in outside], default=0)
        faults = [self._fault(read, _beyond(read, file.size, needed)) for read in outside]
        raise_faults(IS_DAMAGED, faults)

    def tensor_record(self, read: RecordRead, part: ByteRange) -> RecordHead | None:
        """Return where the elements of a record are; None where it is not plain."""
        if read.record is not None:
            return read.record
        if read.is_object or read.transforms:
            return None
        return self._heads.find(part)

    def _are_small(self, reads: Sequence[RecordRead], starts: Array, nbytes: Array) -> Array:
        """Return which records are read with their neighbours."""
        elements = np.zeros(len(reads), np.int64)
        is_doubtful = (nbytes > _PAGE_NBYTES) & (nbytes <= SMALL_NBYTES)
        for index in np.flatnonzero(is_doubtful).tolist():
            elements[index] = self._elements_nbytes(reads[index])
        # All items of a record count.
        record = np.cumsum(np.diff(starts, prepend=-1) != 0)
        is_small: Array = is_read_whole(nbytes, np.bincount(record, elements)[record])
        return is_small

    def _elements_nbytes(self, read: RecordRead) -> int:
        """Return the bytes of the elements that a read asks for; of an object a large number."""
        stored = self._stored.get(read.item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return SMALL_NBYTES  # all of an object
        return int(read.item.lengths.numel()) * stored.properties.dtype.itemsize

    def _read_alike(self, file: CountedFile, reads: Sequence[RecordRead]) -> bool:
        """Deliver small records if all are read whole and their heads are equal.

        Args:
            file: The file, which holds their bytes in memory.
            reads: Reads of adjacent records of one size.

        Returns:
            Whether the records were delivered.
        """
        start, nbytes = reads[0].start, reads[0].nbytes
        tensor = self.tensor_record(reads[0], ByteRange(file, start, nbytes))
        if tensor is None or not tensor.nbytes or not tensor.is_contiguous:
            return False
        record, shape, begin = reads[0].record, tensor.shape, (0,) * len(tensor.shape)
        if not all(
            [
                read.record == record
                and not read.transforms
                and read.item.lengths == shape
                and read.item.storage_offsets == begin
                for read in reads
            ]
        ):
            return False
        held: Any = file.held(start, nbytes * len(reads))
        rows = np.frombuffer(held, np.uint8).reshape(-1, nbytes)
        if not (rows[:, : tensor.start] == rows[0, : tensor.start]).all():
            return False
        for read in reads if self._as_declared else ():
            self._check_declared(read, tensor.dtype, tensor.shape)
        targets, is_plain = self._targets(reads, tensor.shape)
        end = tensor.start + tensor.nbytes
        # Torch assumes aligned memory, as that of a copy; a single row would be a view.
        elements = rows[:, tensor.start : end].copy()
        if self._is_summed(tensor, len(reads)):
            sums = list(map(crc32, elements))
            behind = rows[:, end : end + BEHIND].tobytes()
            damaged = [(reads[n], wrong) for n, wrong in wrong_crcs(sums, behind)]
            self._raise_damaged(damaged, tensor)
        values = torch.from_numpy(elements).view(-1).view(tensor.dtype).view(-1, *tensor.shape)
        if targets[0].is_cuda:
            values = values.to(targets[0].device)  # in one transfer
        copy_all(targets, values.unbind(), is_plain=is_plain)
        self._commit(reads, targets)
        return True

    def _is_summed(self, tensor: RecordHead, records: int = 1) -> bool:
        """Whether records that are read whole are compared; count those without checksums."""
        if self._check_crc and not tensor.has_crc:
            self.unchecked += records
        return self._check_crc and tensor.has_crc

    def _raise_damaged(self, damaged: Sequence[tuple[RecordRead, str]], tensor: RecordHead) -> None:
        """Refuse records with equal heads whose elements are not what was written.

        Raises:
            PlacementError: There are some.
        """
        faults = []
        for read, wrong in damaged:
            where = f"its elements at byte {read.start + tensor.start} of {read.file}"
            text = f"{where} are not what was written: {wrong}"
            faults.append(self._fault(read, text, _OTHER_SUM))
        raise_faults(IS_DAMAGED, faults)

    def _read_one(self, file: CountedFile, read: RecordRead) -> None:
        """Deliver an item.

        Raises:
            PlacementError: The record does not hold what the metadata say.
        """
        item, part = read.item, ByteRange(file, read.start, read.nbytes)
        tensor = self.tensor_record(read, part)
        if tensor is not None and len(tensor.shape) == len(item.lengths):
            if self._as_declared:
                self._check_declared(read, tensor.dtype, tensor.shape)
            self._read_slice(read, tensor, part)
            return
        record = self._decode(read, part)
        if read.is_object:
            data = io.BytesIO(record.part.read(0, record.part.size))
            value = _plain(item, data) if self._restricted else data
            with self._lock:
                self._planner.load_bytes(item, value)
            return
        decoded = self._load(record, read)
        if self._as_declared:
            self._check_declared(read, decoded.dtype, tuple(decoded.shape))
        try:
            source = narrow_tensor_by_index(decoded, item.storage_offsets, item.lengths)
            targets, _ = self._targets([read], source.shape)
            copy_into(targets[0], source)
        except Exception as error:
            if type(decoded) in PLAIN_TYPES:
                raise
            raise self._uncut(read, decoded, error) from error
        self._commit([read], targets)

    def _uncut(self, read: RecordRead, stored: torch.Tensor, error: Exception) -> PlacementError:
        """Return the refusal of a slice of a tensor of codes, whose type does not make it."""
        item, kind = read.item, type(stored).__name__
        fault = self._fault(
            read,
            f"it is stored as {kind}, of which this part cannot be read: {format_error(error)}",
            (
                f"found:       a chunk {tuple(stored.shape)} in {read.file}",
                f"this load:   {tuple(item.lengths)} at {tuple(item.storage_offsets)} of it",
                "likely:      the part begins or ends within a block of elements of one scale, or "
                "is cut along another dim than the first",
                "way out:     cut it as the save did; or leave it out of the state dict, where the "
                "optimizer may make it anew",
            ),
        )
        return PlacementError(format_faults("a part of a chunk cannot be read", [fault]))

    def _decode(self, read: RecordRead, part: ByteRange) -> Record:
        """Return a record without its transforms, compared with its checksums; objects in memory.

        Raises:
            PlacementError: It cannot be decoded, or is not what was written.
        """
        stored = part.stream()
        try:
            stream = self._transformed(read.item, read.transforms or (), stored)
        except ValueError as error:  # of torch's registry of extensions
            raise self._refused(read, f"it cannot be decoded: {error}", NO_EXTENSION) from error
        if read.is_object or not stream.seekable():
            record = Record(range_in_memory(stream.read(-1)))
        else:
            record = Record(part) if stream is stored else Record.of_stream(stream)
        if self._check_crc:
            check = record.check()
            self.unchecked += not check.has_crc
            if check.problem is not None:
                text = f"the record at byte {read.start} of {read.file} is not what was written: "
                raise_faults(IS_DAMAGED, [self._fault(read, text + check.problem, _OTHER_SUM)])
        return record

    def _load(self, record: Record, read: RecordRead) -> torch.Tensor:
        """Return the tensor of a record by way of ``torch.load``."""
        try:
            return record.load()
        except RefusedGlobal as error:
            details = (
                f"found:       in {read.file}",
                "way out:     torch.serialization.add_safe_globals([the type]) before the load, if "
                "the checkpoint is trusted",
            )
            problem = f"is of a type that torch.load does not allow: {error.name}"
            opening, fault = (
                "the checkpoint holds another type",
                self._fault(read, problem, details),
            )
            raise PlacementError(format_faults(opening, [fault])) from error
        except Exception as error:
            # Torch's further sentences are advice for other situations.
            sentence = (str(error).splitlines() or [format_error(error)])[0].partition(". ")[0]
            cause = f"found:       {type(error).__name__}: {sentence}"
            problem = f"what {read.file} holds of it is no tensor"
            fault = self._fault(read, problem, (cause, *DAMAGED))
            raise PlacementError(format_faults(IS_DAMAGED, [fault])) from error

    def _read_slice(self, read: RecordRead, tensor: RecordHead, part: ByteRange) -> None:
        """Read a slice of a plain record."""
        item, shape = read.item, tensor.shape
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        is_whole = lengths == shape
        sizes = None if is_whole else self._stored_sizes(item)
        holds = f"{read.file} holds a {shape} tensor, where the metadata says"
        if sizes not in (None, shape):
            raise self._refused(read, f"{holds} that it is a chunk of {sizes}")
        ends = zip(offsets, lengths, shape, strict=True)
        if any(offset + length > size for offset, length, size in ends):
            raise self._refused(read, f"{holds} that {lengths} can be read at {offsets}")
        targets, _ = self._targets([read], lengths)
        if targets[0].numel():
            is_summed, target = is_whole and self._is_summed(tensor), targets[0]
            record = Record(part, tensor)
            wrong = record.read_slice(target, offsets, self._elements.take, is_summed=is_summed)
            if wrong is not None:
                self._raise_damaged([(read, wrong)], tensor)
        self._commit([read], targets)

    def _check_declared(self, read: RecordRead, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Refuse a record that is of another dtype, or of other sizes, than the metadata says."""
        stored = self._stored.get(read.item.storage_index.fqn)
        if read.record is not None:
            return  # no head says it
        assert isinstance(stored, TensorStorageMetadata), "a tensor's"
        declared = stored.properties.dtype, self._stored_sizes(read.item)
        if declared != (dtype, shape):
            holds = f"{read.file} holds a {shape} {dtype} tensor at byte {read.start}"
            says = f"where the metadata says {declared[1]} {declared[0]}"
            raise self._refused(read, f"{holds}, {says}")

    def _stored_sizes(self, item: ReadItem) -> tuple[int, ...] | None:
        """Return the sizes of the chunk that an item is read from; None where they are unknown."""
        stored, index = self._stored.get(item.storage_index.fqn), item.storage_index.index
        if not isinstance(stored, TensorStorageMetadata) or index is None:
            return None
        chunk = stored.chunks[index] if index < len(stored.chunks) else None
        if chunk is None or chunk.offsets != item.storage_index.offset:
            return None
        return tuple(chunk.sizes)

    def _targets(
        self, reads: Sequence[RecordRead], sizes: Sequence[int]
    ) -> tuple[list[torch.Tensor], bool]:
        """Return a planner's tensors to fill, checked to be of these sizes.

        The boolean says whether all of them are plain elements in memory.
        """
        with self._lock:
            targets = [self._planner.resolve_tensor(read.item) for read in reads]
        for read, target in zip(reads, targets, strict=True):
            if target.shape != sizes:
                text = f"a {tuple(sizes)} tensor was read, where {tuple(target.shape)} is to be"
                raise self._refused(read, f"{text} filled")
        # Detached views can be written even if they are of parameters or of inference tensors; and
        # the scale of a quantized one is set on the view only, so that the planner can compare it.
        is_plain = are_plain(targets)
        return targets if is_plain else [target.detach() for target in targets], is_plain

    def _commit(self, reads: Sequence[RecordRead], targets: Sequence[torch.Tensor]) -> None:
        with self._lock:
            for read, target in zip(reads, targets, strict=True):
                self._planner.commit_tensor(read.item, target)

    def _refused(
        self, read: RecordRead, problem: str, details: Sequence[str] = DAMAGED
    ) -> PlacementError:
        return PlacementError(format_faults(_IS_OTHER, [self._fault(read, problem, details)]))

    def _fault(self, read: RecordRead, problem: str, details: Sequence[str] = DAMAGED) -> Fault:
        """Return a fault of a record, with where other copies are."""
        fault = Fault(read.item.storage_index.fqn, problem, tuple(details))
        return with_copies(fault, self._storage_data, read.item, read.file)


class _Buffer:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._held = memoryview(bytearray())

    def take(self, nbytes: int) -> memoryview:
        if self._held.nbytes < nbytes:
            self._held = memoryview(bytearray(nbytes))
        return self._held[:nbytes]


def _spans(is_small: Array, starts: Array, ends: Array) -> Iterator[tuple[int, int]]:
    """Yield ``(first, stop)`` of the records that one call reads: small neighbours, or one."""
    is_near = starts[1:] - ends[:-1] <= NEIGHBOUR_NBYTES
    cuts = np.flatnonzero(~(is_near & is_small[1:] & is_small[:-1])) + 1
    for first, last in pairwise((0, *cuts.tolist(), len(starts))):
        while first < last:
            # Records that overlap may have any order of ends.
            up_to = int(ends[first:last].searchsorted(starts[first] + SPAN_NBYTES, "right"))
            stop = min(first + max(up_to, 1), last)
            yield first, stop
            first = stop


def _beyond(read: RecordRead, nbytes: int, needed: int) -> str:
    """Return a text saying that a record is beyond the ``nbytes`` of its file."""
    if 0 <= read.start <= read.start + read.nbytes:
        return f"{read.file} ends before it: {nbytes} bytes, {needed} needed"
    end = read.start + read.nbytes
    return f"{read.file} has no bytes from {read.start} to {end}, where the metadata has it"


def _plain(item: ReadItem, data: io.BytesIO) -> io.BytesIO:
    """Return an object that ``torch.load`` accepts with ``weights_only``, saved again.

    Planners load objects with ``weights_only=False``, by an unpickler that may read the same bytes
    differently: so they get the value that was checked, and not the bytes.

    Raises:
        PlacementError: The object's pickle names more than plain values.
    """
    checked = io.BytesIO()
    try:
        torch.save(load_plain(data), checked)
    except Exception as error:
        # The contents of the pickle decide the type of the error.
        reason = format_name((str(error).strip() or type(error).__name__).splitlines()[0])
        raise PlacementError(
            f"{format_name(item.storage_index.fqn)}: this object is not loaded with "
            "restricted=True, since torch.load(weights_only=True) does not\n"
            f"    torch says:  {reason}\n"
            "    way out:     torch.serialization.add_safe_globals for what you trust, or "
            "leave the key out of the state dict"
        ) from None  # whose text is as untrusted as the object
    checked.seek(0)
    return checked
