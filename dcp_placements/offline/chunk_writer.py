"""A DCP checkpoint written chunk by chunk, from any source of chunks.

The package's own writer writes the files, into a directory that appears when all is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from dcp_placements._torch import DEFAULT_SUFFIX
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.remote_output import AnyOutput
from dcp_placements.storage.writer import PlacementFileSystemWriter


class Target(NamedTuple):
    """A tensor of the checkpoint: its whole shape, and the dtype of its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Piece(NamedTuple):
    """One chunk of a tensor, and its source."""

    fqn: str  # the key
    box: Box  # the chunk, in the whole tensor
    file: Hashable  # of the source; pieces of one file are written into one
    nbytes: int  # bytes of the elements
    # Returns the elements, in the chunk's shape; called once, when they are written
    read: Callable[[], torch.Tensor]


def write_chunks(
    output: AnyOutput,
    targets: Mapping[str, Target],
    pieces: Iterable[Piece],
    progress: Progress,
    check: Callable[[], None],
) -> None:
    """Write a DCP checkpoint; one chunk is in memory at a time.

    Args:
        output: Of the checkpoint.
        targets: The tensors by key.
        pieces: The chunks, which must not overlap.
        progress: Called with the bytes written, and those to write, after each chunk is read.
        check: Called when all pieces are read, before the output appears; refuses a source that was
            overwritten.

    Raises:
        CannotLook: There is no room, or something else appeared at the path meanwhile.
    """
    metadata, plans, by_index = _plans(targets, pieces)
    output.check_room(sum(piece.nbytes for piece in by_index.values()))
    # The path of each key in a nested dict, as torch's planner stores it: all are at its top.
    metadata.planner_data = {fqn: (fqn,) for fqn in metadata.state_dict_metadata}
    writer = PlacementFileSystemWriter(output.path)
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan(plans)
    # One thread writes one file of each plan.
    names = [f"{cast(Any, plan.storage_data).prefix}0{DEFAULT_SUFFIX}" for plan in plans]
    with output.directory([*names, ".metadata"]) as folder:
        writer.reset(folder.path)
        planner = cast(SavePlanner, _Reader(by_index, progress))
        results = []
        for plan in plans:
            written = writer.write_data(plan, planner)
            written.wait()
            results.append(written.value())
        check()
        folder.begin_last()
        writer.finish(metadata, results)


def _plans(
    targets: Mapping[str, Target], pieces: Iterable[Piece]
) -> tuple[Metadata, list[SavePlan], dict[MetadataIndex, Piece]]:
    properties = {
        dtype: TensorProperties(dtype) for dtype in {target.dtype for target in targets.values()}
    }
    stored: dict[str, Any] = {
        fqn: TensorStorageMetadata(properties[target.dtype], torch.Size(target.shape), [])
        for fqn, target in targets.items()
    }
    by_index: dict[MetadataIndex, Piece] = {}
    by_file: dict[Hashable, list[WriteItem]] = {}
    for piece in pieces:
        tensor, sizes = stored[piece.fqn], torch.Size(piece.box.sizes)
        chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), sizes)
        index = MetadataIndex(piece.fqn, chunk.offsets, len(tensor.chunks))
        tensor.chunks.append(chunk)
        data = TensorWriteData(chunk, tensor.properties, tensor.size)
        item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        by_file.setdefault(piece.file, []).append(item)
        by_index[index] = piece
    return Metadata(stored), [SavePlan(items) for items in by_file.values()], by_index


class _Reader:
    """The part of a planner that a storage writer needs."""

    def __init__(self, pieces: Mapping[MetadataIndex, Piece], progress: Progress) -> None:
        self._pieces = pieces
        self._progress = progress
        self._total_nbytes = sum(piece.nbytes for piece in pieces.values())
        self._nbytes = 0

    def resolve_data(self, item: Any) -> torch.Tensor:
        """Return the elements of one item."""
        piece = self._pieces[item.index]
        data = piece.read()
        self._nbytes += piece.nbytes
        self._progress(self._nbytes, self._total_nbytes)
        return data
