"""What a rank holds and is assigned, as torch's write items."""

from __future__ import annotations

from itertools import islice, product, repeat
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from dcp_placements.layout.sharding import Box
from dcp_placements.runs import WriteItemOfSave, made
from dcp_placements.storage.metadata.pickles.tensor_properties import properties_of
from dcp_placements.table.table import OBJECT, PLAIN, SHARD, Group, Holding, unpacked_ints


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
        """Return for each box of each key of each group of ``holding`` if the rank writes it."""
        runs = iter(unpacked_ints(self.runs).reshape(-1, 2).tolist())
        is_written = []
        for at, groups in enumerate(holding.tables):
            of_keys = self.pieces[at] if self.pieces else b""
            split = iter(unpacked_ints(of_keys).tolist() if of_keys else ())
            # By piece, the runs of its boxes, and how many of its keys have been.
            runs_of: dict[int, list[list[int]]] = {}
            seen: dict[int, int] = {}
            for number, held in enumerate(groups):
                for _ in held.fqns:
                    piece = next(split, number)
                    if piece not in runs_of:
                        runs_of[piece] = list(islice(runs, len(held.boxes)))
                    position = seen.get(piece, 0)
                    seen[piece] = position + 1
                    is_written += [start <= position < stop for start, stop in runs_of[piece]]
        return is_written


def assigned_items(
    holding: Holding, assignment: Assignment, save: Any, *, is_known: bool = False
) -> list[WriteItem]:
    """Return the write items that a rank was assigned, group by group; a group's share data.

    Args:
        holding: What the rank has.
        assignment: What it writes of that.
        save: The state of its save, which the items know.
        is_known: Whether they know their tensors, too, where these have a place.
    """
    is_written = iter(assignment.is_written(holding))
    items: list[WriteItem] = []
    for held in holding.groups:
        boxes = [_values(held.group, box) for box in held.boxes]
        chunks = held.data() if is_known and held.group.kind == SHARD else repeat(None)
        for (fqn, (offsets, one)), chunk in zip(product(held.fqns, boxes), chunks, strict=False):
            if next(is_written):
                index = made(MetadataIndex, {"fqn": fqn, "offset": offsets, "index": None})
                values = {"index": index, **one, "run": save, "chunk": chunk}
                items.append(made(WriteItemOfSave, values))
    return items


def _values(group: Group, box: Box) -> tuple[torch.Size | None, dict[str, Any]]:
    """Return the offsets of the items of a group's box, and what these say of it."""
    if group.kind == OBJECT:
        return None, {"type": WriteItemType.BYTE_IO, "bytes_io_data": None, "tensor_data": None}
    kind = WriteItemType.TENSOR if group.kind == PLAIN else WriteItemType.SHARD
    chunk = chunk_metadata(box)
    data = TensorWriteData(chunk, tensor_properties(group), torch.Size(group.shape))
    return chunk.offsets, {"type": kind, "bytes_io_data": None, "tensor_data": data}


def tensor_properties(group: Group) -> TensorProperties:
    """Return the properties of a group's tensors that metadata keeps."""
    assert group.dtype is not None
    return properties_of(group.dtype, group.layout, group.requires_grad, group.shape)


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """Return torch's form of a box."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
