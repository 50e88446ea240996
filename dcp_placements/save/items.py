"""What a rank holds and is assigned, as torch's write items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dcp_placements.layout.boxes import Ints
from dcp_placements.layout.sharding import Box
from dcp_placements.storage.metadata.pickles.tensor_properties import properties_of
from dcp_placements.table.table import (
    OBJECT,
    PLAIN,
    Group,
    HeldBoxes,
    Holding,
    Table,
    unpacked_ints,
)


class Assignment(NamedTuple):
    """What the coordinator sends to one rank: what it writes.

    A *piece* is a group of a key table, or a part of one where other tables have some of its keys,
    too. The ranks that hold equal boxes of a piece each write a *run* of its keys: from one
    position among them to another.

    Attributes:
        runs: Packed: start and stop of a run for each box of each piece of each table of the rank,
            in order.
        pieces: For each table whose groups are split, packed: the piece of each key. Pieces are
            numbered in the order in which they begin.
        save_id: Names the save.
    """

    runs: bytes
    pieces: tuple[bytes, ...] = ()
    save_id: bytes = b""

    def is_written(self, holding: Holding) -> list[bool]:
        """Return for each of ``Holding.chunks`` if the rank writes it."""
        tables = holding.tables
        sizes = np.array([size for table in tables for size in table.sizes], np.int64)
        boxes = np.repeat(np.array(list(map(len, holding.boxes)), np.int64), sizes)
        piece_of = _pieces_of_keys(tables, self.pieces)
        boxes_of_piece = np.zeros(int(piece_of.max(initial=-1)) + 1, np.int64)
        boxes_of_piece[piece_of] = boxes
        first_run = (np.cumsum(boxes_of_piece) - boxes_of_piece)[piece_of]
        position = np.empty_like(piece_of)
        position[np.argsort(piece_of, kind="stable")] = _place_in_run(np.bincount(piece_of))
        run = np.repeat(first_run, boxes) + _place_in_run(boxes)
        start, stop = unpacked_ints(self.runs).reshape(-1, 2)[run].T
        position = np.repeat(position, boxes)
        is_written: list[bool] = ((start <= position) & (position < stop)).tolist()
        return is_written


def _pieces_of_keys(tables: Sequence[Table], pieces: Sequence[bytes]) -> Ints:
    """Return the piece of each key of all tables; pieces are numbered through."""
    of_tables, first = [np.zeros(0, np.int64)], 0
    for at, table in enumerate(tables):
        if pieces and pieces[at]:
            of_table = unpacked_ints(pieces[at])
        else:
            of_table = np.repeat(np.arange(len(table.groups)), np.array(table.sizes, np.int64))
        of_tables.append(of_table + first)
        first += int(of_table.max(initial=-1)) + 1
    return np.concatenate(of_tables)


def _place_in_run(lengths: Ints) -> Ints:
    """Return 0, 1, 2 ... for each of some lengths, one after another."""
    starts = np.cumsum(lengths) - lengths
    places: Ints = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return places


def assigned_items(holding: Holding, assignment: Assignment) -> list[WriteItem]:
    """Return the write items that a rank was assigned, group by group; a group's share data."""
    is_written = iter(assignment.is_written(holding))
    items: list[WriteItem] = []
    for held in holding.groups:
        group = held.group
        kind, data = _item_type(group), _write_data(group, held.boxes)
        for fqn in held.fqns:
            items += [
                WriteItem(MetadataIndex(fqn, one.chunk.offsets), kind, tensor_data=one)
                for one in data
                if next(is_written)
            ]
            if group.kind == OBJECT and next(is_written):
                items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
    return items


def _item_type(group: Group) -> WriteItemType:
    return WriteItemType.TENSOR if group.kind == PLAIN else WriteItemType.SHARD


def _write_data(group: Group, boxes: HeldBoxes) -> list[TensorWriteData]:
    """Return what write items say of the tensors of a group, box by box; nothing of objects."""
    if group.kind == OBJECT:
        return []
    size, properties = torch.Size(group.shape), tensor_properties(group)
    return [TensorWriteData(chunk_metadata(box), properties, size) for box in boxes]


def tensor_properties(group: Group) -> TensorProperties:
    """Return the properties of a group's tensors that metadata keeps."""
    assert group.dtype is not None
    layout = getattr(torch, group.layout)
    return properties_of(group.dtype, layout, group.requires_grad, group.shape)


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """Return torch's form of a box."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
