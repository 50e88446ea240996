"""What a rank holds and is assigned, as torch's write items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    filled,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.save.key_table import OBJECT, PLAIN, Group
from dcp_placements.save.local_plan import Held, Holding
from dcp_placements.save.packing import Ints, unpacked_ints

Run = tuple[int, int]
"""``start, stop``: the positions of those keys of a piece of which a rank writes one box."""


@dataclass(frozen=True, slots=True)
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

    def by_key(self, holding: Holding) -> Iterator[tuple[Held, Sequence[tuple[Box, bool]]]]:
        """Yield every key of the rank with its boxes, and whether it writes each of them."""
        flat = unpacked_ints(self.runs).reshape(-1, 2).tolist()
        tables, start = [], 0
        for at in range(len(holding.tables)):
            table = _Runs(holding, at, flat, start, self.pieces[at] if self.pieces else b"")
            tables.append(table)
            start = table.stop
        for held in holding.keys:
            yield held, tables[held.table].of(held)


class _Runs:
    """The runs of one table, by piece."""

    def __init__(
        self, holding: Holding, at: int, flat: list[list[int]], start: int, pieces: bytes
    ) -> None:
        self.table = holding.tables[at]
        self.boxes = holding.boxes[at]
        self.split: list[int] | None = unpacked_ints(pieces).tolist() if pieces else None
        self.positions: list[int] = []
        group_of = list(range(len(self.table.groups)))
        if self.split is not None:
            counts = dict[int, int]()
            for piece in self.split:
                self.positions.append(counts.setdefault(piece, 0))
                counts[piece] += 1
            of_piece = {
                piece: group
                for group, (start, stop) in enumerate(pairwise(self.table.starts))
                for piece in self.split[start:stop]
            }
            group_of = [of_piece[piece] for piece in range(len(of_piece))]
        self.runs: list[list[list[int]]] = []
        for group in group_of:
            count = len(self.boxes[group])
            self.runs.append(flat[start : start + count])
            start += count
        self.stop = start

    def of(self, held: Held) -> Sequence[tuple[Box, bool]]:
        piece, position = held.group, held.position
        if self.split is not None:
            entry = self.table.starts[held.group] + held.position
            piece, position = self.split[entry], self.positions[entry]
        return [
            (box, start <= position < stop)
            for box, (start, stop) in zip(self.boxes[held.group], self.runs[piece], strict=True)
        ]


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
        return [
            WriteItem(
                MetadataIndex(held.fqn, torch.Size(box.offsets)),
                kind,
                tensor_data=self._data(held, group, box),
            )
            for box in boxes
        ]

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
    return TensorProperties(group.dtype, getattr(torch, group.layout), group.requires_grad)


class Chunks:
    """Makes torch's form of boxes; equal boxes are one object."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, ...], ChunkStorageMetadata] = {}
        self._size = cache(torch.Size)

    def of(self, boxes: Ints) -> list[ChunkStorageMetadata]:
        """Return the chunks of boxes, ``(n, 2 * ndim)``: offsets, then sizes."""
        ndim = boxes.shape[1] // 2
        chunks, size = self._chunks, self._size
        rows = list(map(tuple, boxes.tolist()))
        for row in rows:
            if row not in chunks:
                parts = {"offsets": size(row[:ndim]), "sizes": size(row[ndim:])}
                chunks[row] = filled(ChunkStorageMetadata, parts)
        return [chunks[row] for row in rows]


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """Return torch's form of a box."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
