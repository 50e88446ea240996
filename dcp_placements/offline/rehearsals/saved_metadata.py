"""What the metadata of a save take, if all ranks of a rehearsal saved what they load.

The index is written to memory and read back, so its sizes are those of a real one, but for the
order of small tensors in a file: a save writes them by group, which takes some more bytes. Of stock
metadata only the bytes are counted, since they are gigabytes for thousands of ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.rehearsals.costs import Part, RankPart
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.index.building import Written, build_index
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.index.stored_entries import StoredEntries, entries_of
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.file import read_metadata, write_metadata
from dcp_placements.storage.metadata.pickles.stock_body import Body
from dcp_placements.storage.metadata.pickles.stock_pickle import pickled_head
from dcp_placements.storage.metadata.table import ROW, Array, Offset, Rows
from dcp_placements.storage.metadata.write_results import Outline, WriteResults

STOCK_LIMIT_NBYTES = 1 << 30
"""Stock metadata beyond this are better left out: every process of a stock load reads them all."""

_RECORD_NBYTES = 1200
"""About what a record has besides its elements."""

_ROW_NBYTES, _WIDE_ROW_NBYTES = 52, 62
"""Of a row in stock metadata; the latter in those of files of 2 GiB and more."""

_PATH_NBYTES = 10
"""Of a file in stock metadata, beside its name."""


@dataclass(frozen=True, slots=True)
class SavedMetadata:
    """The metadata of a save by all ranks, with ``PlacementFileSystemWriter``."""

    rows: int  # chunks, of all ranks
    stock_nbytes: int  # what plain DCP reads, on each rank. Left out by ``stock_metadata=False``
    index_nbytes: int  # the index, which ``PlacementFileSystemReader`` reads in part
    sent_nbytes: int  # what a rank sends to the coordinator after writing, at most
    read_nbytes: int  # what a rank in the middle of the world reads of the index to load again

    @property
    def is_large(self) -> bool:
        """Whether ``stock_metadata=False`` is better."""
        return self.stock_nbytes > STOCK_LIMIT_NBYTES


class _Run(NamedTuple):
    """Boxes of all keys of a part, as one rank has them."""

    part: Part
    boxes: tuple[Box, ...]


class SavedRows:
    """Collects what each rank writes: of equal boxes the first rank's."""

    def __init__(self, metadata: Metadata, ranks: int) -> None:
        self._metadata = metadata
        self._reader = ranks // 2
        self._parts: dict[Hashable, tuple[Part, dict[Box, None]]] = {}
        self._runs: dict[int, list[_Run]] = {}
        self._contents: set[Hashable] = set()
        self._read: list[_Run] = []

    def add(self, rank: int, held: RankPart) -> None:
        """Add the tensors of a part that a rank holds."""
        if held.content in self._contents and rank != self._reader:
            return
        self._contents.add(held.content)
        boxes = tuple([chunk.box for chunk in held.layout.chunks()])
        if rank == self._reader:
            self._read.append(_Run(held.part, boxes))
        part, of_part = self._parts.setdefault(held.part.key, (held.part, {}))
        written = tuple([box for box in boxes if box not in of_part])
        if written:
            of_part.update(dict.fromkeys(written))
            self._runs.setdefault(rank, []).append(_Run(part, written))

    def metadata(self) -> SavedMetadata:
        """Return the sizes."""
        with quiet_gc():
            stored: dict[str, Any] = {
                fqn: entry
                for fqn, entry in self._metadata.state_dict_metadata.items()
                if not isinstance(entry, TensorStorageMetadata)
            }
            for part, boxes in self._parts.values():
                shape = part.tensors.shape
                table = np.array(list(boxes), np.int64).reshape(len(boxes), 2, len(shape))
                entry = TensorStorageMetadata(
                    TensorProperties(part.tensors.dtype),
                    torch.Size(shape),
                    ChunkList(table[:, 0], table[:, 1]),  # type: ignore[arg-type]
                )
                stored.update(dict.fromkeys(part.fqns, entry))
            order = {fqn: at for at, fqn in enumerate(stored)}
            templates: dict[Hashable, Rows] = {}
            written = [_written(rank, runs, order, templates) for rank, runs in self._runs.items()]
            entries = entries_of(stored)
            index = build_index(written, entries)
            saved = Metadata(
                StoredEntries(entries),  # type: ignore[arg-type]
                planner_data=self._metadata.planner_data,
                storage_data=StorageTable(index),
            )
            stream = io.BytesIO()
            write_metadata(saved, stream, stock_metadata=False)
            most = max(written, key=lambda one: len(_rows(one)), default=None)
            return SavedMetadata(
                len(index),
                _stock_nbytes(saved, written, len(index)),
                len(stream.getbuffer()),
                0 if most is None else _sent_nbytes(most),
                self._read_nbytes(stream.getvalue()),
            )

    def _read_nbytes(self, data: bytes) -> int:
        reads: list[int] = []

        class Stream(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                part = super().read(size)
                reads.append(len(part))
                return part

        metadata = read_metadata(lambda: Stream(data))
        for part, boxes in self._read:
            for fqn in part.fqns:
                entry = metadata.state_dict_metadata[fqn]
                assert isinstance(entry, TensorStorageMetadata)
                places = [MetadataIndex(fqn, torch.Size(box.offsets)) for box in boxes]
                # What is looked up is read.
                _ = entry.chunks[:1], [metadata.storage_data[place] for place in places]
        return sum(reads)


def _written(
    rank: int, runs: Sequence[_Run], order: dict[str, int], templates: dict[Hashable, Rows]
) -> Written:
    """Return what a rank writes into one file; ranks that write alike share a template."""
    like = tuple([(run.part.key, tuple([box.sizes for box in run.boxes])) for run in runs])
    if like not in templates:
        templates[like] = _template(runs, order)
    offsets = [box.offsets for run in runs for box in run.boxes]
    return Written(like, lambda: templates[like], offsets, (f"__{rank}_0.distcp",))


def _template(runs: Sequence[_Run], order: dict[str, int]) -> Rows:
    """Return the rows of a file, in the order of the keys."""
    fqns: list[str] = []
    columns = []
    first_slot = 0
    for part, boxes in runs:
        keys = np.arange(len(fqns), len(fqns) + len(part.members))
        fqns += part.fqns
        itemsize = part.tensors.dtype.itemsize
        lengths = [box.numel * itemsize + _RECORD_NBYTES for box in boxes]
        slots = np.arange(first_slot, first_slot + len(boxes))
        first_slot += len(boxes)
        each = np.repeat(keys, len(boxes)), np.tile(slots, len(keys)), np.tile(lengths, len(keys))
        columns.append(np.stack(each))
    key, slot, length = np.concatenate(columns, axis=1)
    ordered = np.argsort(np.array([order[fqn] for fqn in fqns])[key], kind="stable")
    rows = np.zeros(len(ordered), ROW)
    rows["fqn"], rows["offset"], rows["length"] = key[ordered], slot[ordered], length[ordered]
    rows["start"] = np.cumsum(rows["length"]) - rows["length"]
    return Rows(tuple(fqns), (), (), (None,), rows)


def _stock_nbytes(saved: Metadata, written: Sequence[Written], rows: int) -> int:
    """Return the bytes of stock metadata; all but the rows and files are made."""
    entries = entries_of(saved.state_dict_metadata)
    no_rows = build_index([], entries)
    head = pickled_head(saved, entries, no_rows)
    nbytes = len(head.data) + sum(map(len, Body(head.memo, entries, no_rows).pieces()))
    ends = [int((held["start"] + held["length"]).max()) for held in map(_rows, written)]
    row = _WIDE_ROW_NBYTES if max(ends, default=0) >= 1 << 31 else _ROW_NBYTES
    paths = sum(len(path) + _PATH_NBYTES for one in written for path in one.paths)
    return nbytes + row * rows + paths


def _rows(written: Written) -> Array:
    return written.rows().rows


def _sent_nbytes(written: Written) -> int:
    """Return the bytes of the write results of a rank that wrote what it was assigned."""
    offsets: tuple[Offset, ...] = tuple(written.offsets)
    rows = replace(written.rows(), offsets=offsets, paths=tuple(written.paths))
    fqns = tuple([rows.fqns[at] for at in rows.rows["fqn"].tolist()])
    outline = Outline(fqns, rows.rows["offset"].astype(np.int64).tobytes(), offsets)
    return len(pickle.dumps(WriteResults(rows, lambda: outline)))
