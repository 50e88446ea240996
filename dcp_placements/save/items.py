"""What a rank holds and is assigned, as torch's write items."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

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
from dcp_placements.layout.sharding import Box
from dcp_placements.save.key_table import OBJECT, PLAIN, Group, KeyTable
from dcp_placements.save.local_plan import Boxes, Holding
from dcp_placements.save.packing import Ints, unpacked_ints
from dcp_placements.storage.metadata.pickles.tensor_properties import properties_of
from dcp_placements.storage.metadata.write_results import Outline


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
        counts = tuple(map(len, holding.boxes))
        chunks = _chunks_held(holding.tables, counts, self.pieces)
        is_written: list[bool] = _is_written(chunks, self.runs).tolist()
        return is_written


def _chunks_held(
    tables: Sequence[KeyTable], counts: Sequence[int], pieces: Sequence[bytes]
) -> Ints:
    """Return four numbers for every chunk that a rank holds, of shape (4, chunks).

    They are the number of its key among those of all tables, the position of its run in
    ``Assignment.runs``, the position of its key in the piece, and the number of its box among those
    of all groups.

    Args:
        tables: The key tables of the rank.
        counts: The number of boxes that it holds of each group of each table.
        pieces: As in ``Assignment``.
    """
    sizes = np.array([size for table in tables for size in table.sizes], np.int64)
    held = np.array(counts, np.int64)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    of_tables, first_piece = [], 0
    for at, table in enumerate(tables):
        if pieces and pieces[at]:
            of_table = unpacked_ints(pieces[at])
        else:
            of_table = np.repeat(np.arange(len(table.groups)), np.array(table.sizes, np.int64))
        of_tables.append(of_table + first_piece)
        first_piece += int(of_table.max(initial=-1)) + 1
    piece_of = np.concatenate([np.zeros(0, np.int64), *of_tables])
    boxes = held[group_of]
    boxes_of_piece = np.zeros(first_piece, np.int64)
    boxes_of_piece[piece_of] = boxes
    key = np.repeat(np.arange(len(boxes)), boxes)
    box = _place_in_run(boxes)
    run = (np.cumsum(boxes_of_piece) - boxes_of_piece)[piece_of]
    position = np.empty_like(piece_of)
    position[np.argsort(piece_of, kind="stable")] = _place_in_run(np.bincount(piece_of))
    slot = (np.cumsum(held) - held)[group_of]
    return np.stack([key, run[key] + box, position[key], slot[key] + box])


def _place_in_run(lengths: Ints) -> Ints:
    """Return 0, 1, 2 ... for each of some lengths, one after another."""
    starts = np.cumsum(lengths) - lengths
    places: Ints = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return places


def _is_written(chunks: Ints, runs: bytes) -> np.ndarray[Any, np.dtype[np.bool_]]:
    _, run, position, _ = chunks
    start, stop = unpacked_ints(runs).reshape(-1, 2)[run].T
    is_written: np.ndarray[Any, np.dtype[np.bool_]] = (start <= position) & (position < stop)
    return is_written


class Outlines:
    """Makes the outlines of plans; ranks with equal key tables share the work."""

    def __init__(self) -> None:
        self._chunks: dict[Any, tuple[list[str], Ints]] = {}
        self._written: dict[Any, tuple[tuple[str, ...], bytes]] = {}

    def of(
        self,
        tables: Sequence[KeyTable],
        boxes: Sequence[Boxes],
        assignment: Assignment,
        like: Hashable = None,
    ) -> Outline:
        """Return which chunks a rank writes, by key table; the same there and on the coordinator.

        Args:
            tables: The key tables of the rank.
            boxes: Of each group, the boxes that it holds.
            assignment: What it is assigned.
            like: Equal for ranks with equal key tables.
        """
        counts = tuple(map(len, boxes))
        key = like, counts, assignment.pieces
        if (key, assignment.runs) not in self._written:
            if key not in self._chunks:
                fqns = [fqn for table in tables for fqn in table.fqns]
                self._chunks[key] = fqns, _chunks_held(tables, counts, assignment.pieces)
            fqns, chunks = self._chunks[key]
            (written,) = _is_written(chunks, assignment.runs).nonzero()
            names = tuple(map(fqns.__getitem__, chunks[0, written].tolist()))
            self._written[key, assignment.runs] = names, chunks[3, written].tobytes()
        groups = [group for table in tables for group in table.groups]
        offsets = [
            None if group.kind == OBJECT else box.offsets
            for group, held in zip(groups, boxes, strict=True)
            for box in held
        ]
        return Outline(*self._written[key, assignment.runs], offsets=tuple(offsets))


def all_items(holding: Holding) -> list[WriteItem]:
    """Return the write items of all that a rank holds, group by group."""
    return _items(holding, repeat(True))


def assigned_items(holding: Holding, assignment: Assignment) -> list[WriteItem]:
    """Return the write items that a rank was assigned, group by group."""
    return _items(holding, iter(assignment.is_written(holding)))


def _items(holding: Holding, is_written: Iterator[bool]) -> list[WriteItem]:
    """Return the items of those chunks of a rank that are written; those of a group share data."""
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


def _write_data(group: Group, boxes: Boxes) -> list[TensorWriteData]:
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
