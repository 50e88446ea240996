"""Which records of one data file are read together.

Small records are read with their neighbours, in one call; of a large one only the bytes wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint import LoadPlanner, ReadItem, TensorStorageMetadata

from dcp_placements.errors import Fault, raise_faults
from dcp_placements.storage.checksums import Checksums
from dcp_placements.storage.file_reads import CountedFile, FilePart, HeldPart, Part
from dcp_placements.storage.metadata.save_ids import IdRecord
from dcp_placements.storage.record_contents import (
    DAMAGED,
    Delivery,
    Record,
    Transformed,
    every_gap,
)
from dcp_placements.storage.tensor_record import HEADS_NBYTES, RecordHeads, TensorRecord

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


def cheap_gap(run_nbytes: int) -> int:
    """Return how many bytes between two runs cost less to read than another call.

    Where runs begin less than a page apart, all pages are fetched anyway, and a call takes longer
    than to copy a page.

    >>> cheap_gap(16), cheap_gap(512), cheap_gap(4096)
    (4080, 3584, 512)
    """
    return max(4096 - run_nbytes, 512)


PART_NBYTES = 1 << 20
"""Parts of a file that different threads read are about this large, or larger."""


@dataclass(frozen=True, slots=True)
class Job:
    """Records of one file, read by one thread in file order.

    Attributes:
        path: Name of the file.
        records: The records.
        id_record: The id of the save that wrote the file, if it is checked here.
    """

    path: str
    records: Sequence[Record]
    id_record: IdRecord | None


def jobs_of(
    wanted: Mapping[str, Mapping[tuple[int, int], Record]],
    ids: Mapping[str, IdRecord],
    threads: int,
) -> Iterator[Job]:
    """Yield what is wanted by file; large files are divided if they are fewer than the threads."""
    paths = sorted({*wanted, *ids})
    most = max(threads // max(len(paths), 1), 1)
    for path in paths:
        places = wanted.get(path, {})
        records = [places[place] for place in sorted(places)]
        parts = min(most, 1 + sum(record.info.length for record in records) // PART_NBYTES)
        step = max(-(-len(records) // parts), 1)
        for start in range(0, max(len(records), 1), step):
            yield Job(path, records[start : start + step], ids.get(path))


class ChunkReader:
    """Reads records into a planner's tensors, file after file.

    Args:
        planner: Gives the tensors to fill.
        stored: The metadata of what is stored, by key.
        transformed: Undoes the transforms of a record's stream.
        checksums: Compares what is read whole; None for no comparison.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        stored: Mapping[str, Any],
        transformed: Transformed,
        checksums: Checksums | None = None,
    ) -> None:
        self._stored = stored
        self._delivery = Delivery(planner, transformed, self._stored_sizes, checksums)
        self._span = bytearray()
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
        outside = [
            record for record in records if not 0 <= record.info.offset <= record.end <= file.size
        ]
        # One number for all of them, so that they are one fault.
        needed = max((record.end for record in outside), default=0)
        faults = [
            Fault(record.item.storage_index.fqn, _beyond(record, path, file.size, needed), DAMAGED)
            for record in outside
        ]
        raise_faults("the checkpoint is damaged", faults)
        for span in self._spans(records):
            if len(span) == 1 and not self._is_small(span[0]):
                info = span[0].info
                part = FilePart(file, info.offset, info.length)
                tensor = None if info.transform_descriptors else self.tensor_record(span[0], part)
                self._delivery.deliver(span[0], tensor, part, cheap_gap, path)
            else:
                self._read_span(file, path, span)

    def tensor_record(self, record: Record, part: Part) -> TensorRecord | None:
        """Return where the elements of a record are; None where it is not plain."""
        return None if record.is_object else self._heads.find(part, record.info.length)

    def _held(self, nbytes: int) -> bytearray:
        """Return a buffer of so many bytes or more, used again by every call."""
        if len(self._span) < nbytes:
            self._span = bytearray(nbytes)
        return self._span

    def _read_span(self, file: CountedFile, path: str, span: Sequence[Record]) -> None:
        """Read neighbours in one call."""
        start, nbytes = span[0].info.offset, span[-1].end - span[0].info.offset
        held = memoryview(self._held(nbytes))[:nbytes]
        file.read_into(held, start)
        for records in _alike(span):
            first = records[0].info.offset - start
            part = HeldPart(held[first : records[0].end - start])
            tensor = self.tensor_record(records[0], part)
            if len(records) > 1 and tensor is not None:
                rows = np.frombuffer(held[first : records[-1].end - start], np.uint8)
                rows = rows.reshape(len(records), -1)
                if tensor.nbytes and (rows[:, : tensor.start] == rows[0, : tensor.start]).all():
                    self._delivery.deliver_alike(records, tensor, rows, path)
                    continue
            for record in records:
                part = HeldPart(held[record.info.offset - start : record.end - start])
                tensor = self.tensor_record(record, part)
                self._delivery.deliver(record, tensor, part, every_gap, path)

    def _stored_sizes(self, item: ReadItem) -> tuple[int, ...] | None:
        """Return the sizes of the chunk that an item is read from; None where they are unknown."""
        stored, index = self._stored.get(item.storage_index.fqn), item.storage_index.index
        if not isinstance(stored, TensorStorageMetadata) or index is None:
            return None
        chunk = stored.chunks[index] if index < len(stored.chunks) else None
        if chunk is None or chunk.offsets != item.storage_index.offset:
            return None
        return tuple(chunk.sizes)

    def _spans(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Yield records that are read in one call."""
        span: list[Record] = []
        start = end = 0
        kind: tuple[bool, bool] | None = None
        for record in records:
            offset, before = record.info.offset, kind
            kind = is_small, _ = self._is_small(record), record.is_object
            if span and not (
                is_small
                and kind == before
                and offset - end <= NEIGHBOUR_NBYTES
                and offset + record.info.length - start <= SPAN_NBYTES
            ):
                yield span
                span = []
            if not span:
                start = offset
            span.append(record)
            end = offset + record.info.length
        if span:
            yield span

    def _is_small(self, record: Record) -> bool:
        info = record.info
        if info.length > SMALL_NBYTES or info.transform_descriptors:
            return False
        if info.length <= _PAGE_NBYTES or record.is_object:
            return True
        wanted = HEADS_NBYTES[0]
        for item in record.items:
            stored = self._stored.get(item.storage_index.fqn)
            if not isinstance(stored, TensorStorageMetadata):
                return True
            wanted += item.lengths.numel() * stored.properties.dtype.itemsize
        return bool(2 * wanted >= info.length)


def _beyond(record: Record, path: str, nbytes: int, needed: int) -> str:
    """Return why a record does not lie within its file of ``nbytes``, which lacks some."""
    start, end = record.info.offset, record.end
    if 0 <= start <= end:
        return f"{path} ends before it: {nbytes} bytes, {needed} needed"
    return f"{path} has no bytes from {start} to {end}, where the metadata has it"


def _alike(span: Sequence[Record]) -> Iterator[list[Record]]:
    """Yield records of a span in runs of equal lengths without gaps, each wanted by one item."""
    run: list[Record] = []
    end = length = 0
    for record in span:
        info, is_shared = record.info, len(record.items) > 1
        if run and (info.length != length or info.offset != end or is_shared):
            yield run
            run = []
        run.append(record)
        # Nothing follows a record that several items want.
        end, length = info.offset + info.length, -1 if is_shared else info.length
    yield run
