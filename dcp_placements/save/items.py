"""What a rank holds and is assigned, as torch's write items."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    MetadataIndex,
    SavePlan,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    files_by_name,
    filled,
)
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box
from dcp_placements.save.key_table import OBJECT, PLAIN, Group, KeyTable
from dcp_placements.save.local_plan import Held, Holding, offset_slices
from dcp_placements.save.packing import Ints, unpacked_ints
from dcp_placements.storage.metadata.pickles.tensor_properties import properties_of
from dcp_placements.storage.metadata.table import Offset
from dcp_placements.storage.metadata.write_results import Outline

Run = tuple[int, int]
"""``start, stop``: the positions of those keys of a piece of which a rank writes one box."""


@dataclass(slots=True)
class Assignment:
    """What the coordinator sends to one rank: what it writes.

    A *piece* is a group of a key table, or a part of one where other tables have some of its keys,
    too. The ranks that hold equal boxes of a piece each write a run of its keys.

    Attributes:
        runs: Packed: a ``Run`` for each box of each piece of each table of the rank, in order.
        pieces: For each table whose groups are split, packed: the piece of each key.
        writers: Ranks that write anything.
        in_chunks: Some keys of which one rank writes several chunks, with the rank and how many:
            files that know a tensor by its name alone cannot hold those.
        objects: Some keys that are no tensors, which files of tensors cannot hold.
        save_id: Names the save.
        shadows: Which copies the rank writes beside; None for none.
        place: The number of the rank in the names of its files.
    """

    runs: bytes
    pieces: tuple[bytes, ...] = ()
    writers: int = 1
    in_chunks: tuple[tuple[str, int, int], ...] = ()
    objects: tuple[str, ...] = ()
    save_id: bytes = b""
    shadows: Any = None
    place: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # The names of the fields do not travel.
        return Assignment, tuple([getattr(self, name) for name in self.__slots__])

    def by_key(self, holding: Holding) -> Iterator[tuple[Held, Sequence[tuple[Box, bool]]]]:
        """Yield every key of the rank with its boxes, and whether it writes each of them."""
        flat = unpacked_ints(self.runs).reshape(-1, 2).tolist()
        start = 0
        by_entry: list[list[tuple[list[list[int]], int]]] = []
        for at, table in enumerate(holding.tables):
            groups = np.repeat(np.arange(len(table.groups)), table.sizes).tolist()
            is_split = bool(self.pieces and self.pieces[at])
            pieces = unpacked_ints(self.pieces[at]).tolist() if is_split else groups
            runs_of: dict[int, list[list[int]]] = {}
            keys_of: dict[int, int] = {}
            entries = []
            # Pieces are numbered in the order in which they begin.
            for group, piece in zip(groups, pieces, strict=True):
                if piece not in runs_of:
                    stop = start + len(holding.boxes[at][group])
                    runs_of[piece] = flat[start:stop]
                    start = stop
                position = keys_of[piece] = keys_of.get(piece, -1) + 1
                entries.append((runs_of[piece], position))
            by_entry.append(entries)
        for held in holding.keys:
            entry = holding.tables[held.table].starts[held.group] + held.position
            runs, position = by_entry[held.table][entry]
            boxes = holding.boxes[held.table][held.group]
            yield (
                held,
                [
                    (box, first <= position < end)
                    for box, (first, end) in zip(boxes, runs, strict=True)
                ],
            )


def all_items(holding: Holding) -> list[WriteItem]:
    """Return the write items of all that a rank holds, in state dict order."""
    items = _Items(holding)
    return [
        item
        for held in holding.keys
        for item in items.of(held, holding.boxes[held.table][held.group])
    ]


def assigned_items(holding: Holding, assignment: Assignment) -> list[WriteItem]:
    """Return the write items that a rank was assigned, in state dict order."""
    items = _Items(holding)
    return [
        item
        for held, boxes in assignment.by_key(holding)
        for item in items.of(held, [box for box, written in boxes if written])
    ]


class Outlines:
    """Makes the outlines of plans; ranks with equal key tables share the work."""

    def __init__(self) -> None:
        self._held: dict[Any, tuple[tuple[str, ...], Ints]] = {}
        self._written: dict[Any, tuple[tuple[str, ...], bytes]] = {}
        self._slices: dict[Any, list[slice | None]] = {}

    def of_plan(
        self, boxes: bytes, tables: Sequence[KeyTable], assignment: Assignment, like: Hashable
    ) -> Outline:
        """Return the outline of a plan that was sent.

        Args:
            boxes: Those of ``LocalPlan``.
            tables: The key tables of the rank.
            assignment: What it is assigned.
            like: Equal for ranks with equal key tables.
        """
        flat = unpacked_ints(boxes).tolist()
        counts = tuple(flat[: sum([len(table.groups) for table in tables])])
        if (like, counts) not in self._slices:
            self._slices[like, counts] = offset_slices(counts, tables)
        slices = self._slices[like, counts]
        offsets = tuple([None if part is None else tuple(flat[part]) for part in slices])
        numbers = iter(counts)
        by_table = tuple([tuple(islice(numbers, len(table.groups))) for table in tables])
        return self._of(tables, by_table, offsets, assignment, like)

    def of(
        self,
        tables: Sequence[KeyTable],
        boxes: Sequence[Sequence[Sequence[Box]]],
        assignment: Assignment,
    ) -> Outline:
        """Return which chunks a rank writes, by key table; the same there and on the coordinator.

        Args:
            tables: The key tables of the rank.
            boxes: Per table and group, the boxes that it holds.
            assignment: What it is assigned.
        """
        counts = tuple([tuple([len(held) for held in by_group]) for by_group in boxes])
        offsets = [
            None if group.kind == OBJECT else box.offsets
            for table, by_group in zip(tables, boxes, strict=True)
            for group, held in zip(table.groups, by_group, strict=True)
            for box in held
        ]
        return self._of(tables, counts, tuple(offsets), assignment, None)

    def _of(
        self,
        tables: Sequence[KeyTable],
        counts: tuple[tuple[int, ...], ...],
        offsets: tuple[Offset, ...],
        assignment: Assignment,
        like: Hashable,
    ) -> Outline:
        alike = like, counts, assignment.pieces
        written = self._written.get((alike, assignment.runs))
        if written is None:
            if alike not in self._held:
                self._held[alike] = _chunks_held(tables, counts, assignment.pieces)
            fqns, (run, position, slots) = self._held[alike]
            first, end = unpacked_ints(assignment.runs).reshape(-1, 2)[run].T
            chosen = np.flatnonzero((first <= position) & (position < end))
            names = tuple([fqns[at] for at in chosen.tolist()])
            written = self._written[alike, assignment.runs] = names, slots[chosen].tobytes()
        return Outline(*written, offsets=offsets)


def _chunks_held(
    tables: Sequence[KeyTable], counts: Sequence[Sequence[int]], packed_pieces: Sequence[bytes]
) -> tuple[tuple[str, ...], Ints]:
    """Return the key of every chunk that a rank holds, and three rows of integers.

    By chunk they are the position of its run in ``Assignment.runs``, that of its key in the piece,
    and the number of its box among all of the rank.
    """
    fqns, numbers = [], []
    first_run = first_slot = 0
    for at, (table, by_group) in enumerate(zip(tables, counts, strict=True)):
        slots = np.cumsum([first_slot, *by_group]).tolist()
        groups = np.repeat(np.arange(len(table.groups)), table.sizes).tolist()
        is_split = bool(packed_pieces and packed_pieces[at])
        pieces = unpacked_ints(packed_pieces[at]).tolist() if is_split else groups
        begun: dict[int, int] = {}
        keys: dict[int, int] = {}
        # Pieces are numbered in the order in which they begin.
        for fqn, group, piece in zip(table.fqns, groups, pieces, strict=True):
            if piece not in begun:
                begun[piece] = first_run
                first_run += by_group[group]
            position = keys[piece] = keys.get(piece, -1) + 1
            for box in range(by_group[group]):
                fqns.append(fqn)
                numbers.append((begun[piece] + box, position, slots[group] + box))
        first_slot = slots[-1]
    return tuple(fqns), np.array(numbers, np.int64).reshape(-1, 3).T


class _Items:
    """Makes write items; those of tensors that lie alike share their chunks."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.data: dict[tuple[int, int, Box], TensorWriteData] = {}

    def of(self, held: Held, boxes: Sequence[Box]) -> list[WriteItem]:
        group = self.holding.tables[held.table].groups[held.group]
        if group.kind == OBJECT:
            return [WriteItem(MetadataIndex(held.fqn), WriteItemType.BYTE_IO) for _ in boxes]
        kind = WriteItemType.TENSOR if group.kind == PLAIN else WriteItemType.SHARD
        items = []
        for box in boxes:
            data = self._data(held, group, box)
            at = {"fqn": held.fqn, "offset": data.chunk.offsets, "index": None}
            index = filled(MetadataIndex, at)
            attributes = {
                "index": index,
                "type": kind,
                "bytes_io_data": None,
                "tensor_data": data,
            }
            items.append(filled(WriteItem, attributes))
        return items

    def _data(self, held: Held, group: Group, box: Box) -> TensorWriteData:
        key = (held.table, held.group, box)
        data = self.data.get(key)
        if data is None:
            chunk = chunk_metadata(box)
            size = torch.Size(group.shape)
            data = self.data[key] = TensorWriteData(chunk, tensor_properties(group), size)
        return data


def tensor_properties(group: Group) -> TensorProperties:
    """Return the properties of a group's tensors that metadata keeps."""
    assert group.dtype is not None
    layout = getattr(torch, group.layout)
    return properties_of(group.dtype, layout, group.requires_grad, group.shape)


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """Return torch's form of a box."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def writer_faults(plan: SavePlan, assignment: Assignment) -> list[Fault]:
    """Return why files that keep a tensor by its name alone cannot hold what is planned."""
    if not files_by_name(plan.storage_data):
        return []
    faults = [
        Fault(
            fqn,
            f"rank {rank} writes it in several chunks ({count}), and HuggingFaceStorageWriter "
            "would keep only the last of them in a file",
            ("way out:     save with FileSystemWriter, and dcp-placements export --to hf",),
        )
        for fqn, rank, count in assignment.in_chunks
    ]
    faults += [
        Fault(
            fqn,
            "is no tensor, and HuggingFaceStorageWriter's files hold tensors only: it would write "
            "one that nobody can read",
            ("way out:     leave it out, or save with FileSystemWriter",),
        )
        for fqn in assignment.objects
    ]
    if assignment.shadows is not None:
        faults.append(
            Fault(
                "shadows=",
                "HuggingFaceStorageWriter would write the copies as tensors of the model",
                ('way out:     shadows="off", or FileSystemWriter',),
            )
        )
    if assignment.writers > 1 and "shard_index" not in plan.storage_data:
        faults.append(
            Fault(
                "HuggingFaceStorageWriter",
                f"{assignment.writers} ranks would write files of the same names, one over the "
                "other",
                ("way out:     HuggingFaceStorageWriter(..., save_distributed=True)",),
            )
        )
    return faults
