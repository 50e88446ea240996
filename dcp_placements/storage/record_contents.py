"""The contents of one record, delivered to a planner: only the bytes that are wanted.

Elements go straight into the planner's tensor where its memory allows that, otherwise through a
buffer of bounded size. A record that is not plain goes through ``torch.load``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements._torch import StorageInfo, narrow_tensor_by_index
from dcp_placements.errors import Fault, PlacementError, format_error, format_faults
from dcp_placements.storage.byte_ranges import Gap, halves, segments
from dcp_placements.storage.checked_load import load_saved_tensor
from dcp_placements.storage.checksums import Checksums
from dcp_placements.storage.file_reads import HeldPart, Part
from dcp_placements.storage.protocols import TakesMany
from dcp_placements.storage.records.fast_zlib import crc32
from dcp_placements.storage.records.rows import fill_each, values_of
from dcp_placements.storage.safe_pickle import RefusedGlobal
from dcp_placements.storage.tensor_record import TensorRecord

NEAR_NBYTES = 64 << 10
"""Reads this near to each other are announced, so that the pages between come along: to fetch them
takes less time than a second request."""

BUFFER_NBYTES = 16 << 20
"""The largest buffer for elements that cannot be read in place."""

Array = np.ndarray[Any, Any]

Transformed = Callable[[ReadItem, Sequence[str], Any], Any]
"""Undoes the transforms of a record's stream."""

StoredSizes = Callable[[ReadItem], tuple[int, ...] | None]
"""Returns the sizes of the chunk that an item is read from, by the metadata; None where they do not
say."""

DAMAGED = (
    "likely:      the file was damaged or cut short, or a later save into the same directory was "
    "cut off and left files of two saves",
    "way out:     load an older checkpoint; this one is not sound",
)


@dataclass(slots=True)
class Record:
    """A stored chunk or object, and what is wanted of it.

    Attributes:
        info: Where it is.
        items: What is read of it; all of one type.
    """

    info: StorageInfo
    items: list[ReadItem] = field(default_factory=list)

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


def every_gap(run_nbytes: int) -> int:
    """Return that any gap will do: the bytes between are in memory already."""
    return NEAR_NBYTES


class Delivery:
    """Delivers the contents of records to a planner.

    Args:
        planner: The planner.
        transformed: Undoes the transforms of a record's stream.
        stored_sizes: Of chunks.
        checksums: Compares what is read whole; None for no comparison.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        transformed: Transformed,
        stored_sizes: StoredSizes,
        checksums: Checksums | None = None,
    ) -> None:
        self._planner = planner
        # Of its class: what passes other calls on to a planner may have hooks of its own.
        is_asked_once = issubclass(type(planner), TakesMany)
        self._many = cast(TakesMany, planner) if is_asked_once else None
        self._checksums = checksums
        self._transformed = transformed
        self._stored_sizes = stored_sizes
        self._buffer = memoryview(bytearray())

    def deliver(
        self, record: Record, tensor: TensorRecord | None, part: Part, gap: Gap, path: str
    ) -> None:
        """Deliver a record, item by item.

        Args:
            record: The record.
            tensor: Where its elements are; None where it is not plain.
            part: Its bytes.
            gap: How many bytes between two runs cost less to read than another call.
            path: Name of its file, for messages.

        Raises:
            PlacementError: It does not hold what the metadata says.
        """
        if record.is_object:
            self._deliver_objects(record, part, path)
        elif tensor is None or len(tensor.shape) != len(record.item.lengths):
            self._deliver_loaded(record, part, path)
        else:
            for item in record.items:
                self._deliver_plain(record, item, tensor, part, gap, path)

    def deliver_alike(
        self, records: Sequence[Record], tensor: TensorRecord, rows: Array, path: str
    ) -> None:
        """Deliver records whose heads are equal.

        Args:
            records: Each wanted by one item.
            tensor: Where their elements are.
            rows: The records, one in each row of bytes.
            path: Name of their file, for messages.

        Raises:
            PlacementError: They do not hold what the metadata says.
        """
        items, places, targets, is_whole = [], [], [], np.ones(len(records), bool)
        begin = (0,) * len(tensor.shape)
        for at, record in enumerate(records):
            item = record.items[0]
            if item.lengths != tensor.shape or item.storage_offsets != begin:
                part = HeldPart(rows[at].data)
                self.deliver(record, tensor, part, every_gap, path)
                is_whole[at] = False
                continue
            items.append(item)
            places.append((path, record.info.offset))
        if items:
            targets = self._targets(items, tensor.shape)
            whole = rows[is_whole]
            if self._checksums is not None:
                self._checksums.check_alike(items, tensor, whole, places)
            fill_each(targets, values_of(whole, tensor))
            self._commit(items, targets)

    def target(self, item: ReadItem, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the planner's tensor for an item of which elements of these sizes were read."""
        return self._checked(item, self._planner.resolve_tensor(item), sizes)

    def _targets(self, items: Sequence[ReadItem], sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the planner's tensors for items of which elements of these sizes were read."""
        if self._many is None:
            resolved = [self._planner.resolve_tensor(item) for item in items]
        else:
            resolved = self._many.resolve_tensors(items)
        return [
            self._checked(item, target, sizes)
            if target.requires_grad or target.shape != sizes
            else target
            for item, target in zip(items, resolved, strict=True)
        ]

    def _commit(self, items: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> None:
        if self._many is not None:
            self._many.commit_tensors(items, targets)
            return
        for item, target in zip(items, targets, strict=True):
            self._planner.commit_tensor(item, target)

    def _checked(
        self, item: ReadItem, target: torch.Tensor, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        if target.shape != sizes:
            problem = f"a {sizes} tensor was read, where {tuple(target.shape)} is to be filled"
            raise damaged(item, problem, NOT_AS_DESCRIBED)
        return target.detach()

    def buffer(self, nbytes: int) -> memoryview:
        """Return a buffer, used again by every call."""
        if self._buffer.nbytes < nbytes:
            self._buffer = memoryview(bytearray(nbytes))
        return self._buffer[:nbytes]

    def _deliver_objects(self, record: Record, part: Part, path: str) -> None:
        contents = memoryview(self._stream(record, part).read(-1))
        if self._checksums is not None:
            place = path, record.info.offset
            self._checksums.check_zip(record.item, io.BytesIO(contents), place)
        for item in record.items:
            self._planner.load_bytes(item, io.BytesIO(contents))

    def _deliver_loaded(self, record: Record, part: Part, path: str) -> None:
        stream = self._stream(record, part)
        if not stream.seekable():
            stream = io.BytesIO(stream.read(-1))
        if self._checksums is not None:
            self._checksums.check_zip(record.item, stream, (path, record.info.offset))
        loaded = _load(stream, record.item, path)
        for item in record.items:
            source = narrow_tensor_by_index(loaded, item.storage_offsets, item.lengths)
            target = self.target(item, tuple(source.size()))
            target.copy_(source)
            self._planner.commit_tensor(item, target)

    def _deliver_plain(
        self,
        record: Record,
        item: ReadItem,
        tensor: TensorRecord,
        part: Part,
        gap: Gap,
        path: str,
    ) -> None:
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if lengths != tensor.shape:
            sizes = self._stored_sizes(item)
            if sizes not in (None, tensor.shape):
                problem = (
                    f"{path} holds a {tensor.shape} tensor, where the metadata says that it is a "
                    f"chunk of {sizes}"
                )
                raise damaged(item, problem, NOT_AS_DESCRIBED)
        ends = zip(offsets, lengths, tensor.shape, strict=True)
        if any(offset + length > size for offset, length, size in ends):
            problem = (
                f"{path} holds a {tensor.shape} tensor, where the metadata says that {lengths} can "
                f"be read at {offsets}"
            )
            raise damaged(item, problem, NOT_AS_DESCRIBED)
        target = self.target(item, lengths)
        if self._checksums is None or lengths != tensor.shape or not target.numel():
            if target.numel():
                self._fill(target, offsets, lengths, tensor, part, gap)
        else:
            checksum = self._fill_whole(target, tensor, part)
            if tensor.has_crc:
                place = path, record.info.offset
                self._checksums.check(item, tensor, checksum, part, place)
            else:
                self._checksums.unchecked += 1
        self._planner.commit_tensor(item, target)

    def _stream(self, record: Record, part: Part) -> Any:
        transforms = record.info.transform_descriptors or ()
        return self._transformed(record.item, transforms, part.stream())

    def _fill(
        self,
        target: torch.Tensor,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        tensor: TensorRecord,
        part: Part,
        gap: Gap,
    ) -> None:
        """Read a slice of a plain record into ``target``."""
        itemsize = tensor.dtype.itemsize
        memory = memory_of(target) if target.dtype == tensor.dtype else None
        if memory is not None and lengths == tensor.shape:
            part.read_into(memory, tensor.start)
            return
        todo = [(offsets, lengths)]
        while todo:
            at, sizes = todo.pop()
            plan = segments(tensor.shape, offsets=at, lengths=sizes, itemsize=itemsize, gap=gap)
            direct = memory is not None and plan.exact and sizes == lengths
            if not direct and plan.total_nbytes > BUFFER_NBYTES:
                todo += reversed(halves(at, sizes))
                continue
            buffer = memory if direct else self.buffer(plan.total_nbytes)
            assert buffer is not None
            near = 0 < plan.distance <= NEAR_NBYTES
            part.read_each(buffer, plan.nbytes, plan.positions(tensor.start), near=near)
            if not direct:
                elements = torch.frombuffer(buffer, dtype=tensor.dtype)
                place = zip(at, offsets, sizes, strict=True)
                block = target[tuple(slice(a - o, a - o + n) for a, o, n in place)]
                block.copy_(elements.as_strided(sizes, plan.strides))

    def _fill_whole(self, target: torch.Tensor, tensor: TensorRecord, part: Part) -> int:
        """Read a plain record into ``target``; return the CRC-32 of the elements."""
        memory = memory_of(target) if target.dtype == tensor.dtype else None
        if memory is not None:
            return part.read_summed(memory, tensor.start)
        checksum = 0
        position = tensor.start
        todo = [((0,) * len(tensor.shape), tensor.shape)]
        while todo:
            at, sizes = todo.pop()
            nbytes = prod(sizes) * tensor.dtype.itemsize
            if nbytes > BUFFER_NBYTES:
                # Along the first dim that can be cut: the parts follow one another in the record.
                todo += reversed(halves(at, sizes))
                continue
            buffer = self.buffer(nbytes)
            part.read_into(buffer, position)
            position += nbytes
            checksum = crc32(buffer, checksum)
            elements = torch.frombuffer(buffer, dtype=tensor.dtype)
            block = target[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))]
            block.copy_(elements.view(sizes))
        return checksum


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """Return the memory of a tensor's elements; None where they are not contiguous host memory."""
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
    try:
        return load_saved_tensor(stream)
    except RefusedGlobal as error:
        fault = Fault(
            item.storage_index.fqn,
            f"is of a type that torch.load does not allow: {error.name}",
            (
                f"found:       in {path}",
                "way out:     torch.serialization.add_safe_globals([the type]) before the load, if "
                "the checkpoint is trusted",
            ),
        )
        raise PlacementError(format_faults("the checkpoint holds another type", [fault])) from error
    except Exception as error:
        # Only the first sentence: torch goes on with advice for other situations.
        sentence = (str(error).splitlines() or [format_error(error)])[0].partition(". ")[0]
        fault = Fault(
            item.storage_index.fqn,
            f"what {path} holds of it is no tensor",
            (f"found:       {type(error).__name__}: {sentence}", *DAMAGED),
        )
        raise PlacementError(format_faults("the checkpoint is damaged", [fault])) from error


NOT_AS_DESCRIBED = "the checkpoint is not what it says"


def damaged(
    item: ReadItem, problem: str, headline: str = "the checkpoint is damaged"
) -> PlacementError:
    """Return the error for a record that does not hold what the metadata says."""
    return PlacementError(
        format_faults(headline, [Fault(item.storage_index.fqn, problem, DAMAGED)])
    )
