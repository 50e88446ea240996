"""A DCP checkpoint written chunk by chunk, from any source of chunks.

The package's own writer writes the files, into a directory that appears when all is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch

from dcp_placements._torch import (
    DEFAULT_SUFFIX,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    SavePlan,
    SavePlanner,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.remote_output import AnyOutput
from dcp_placements.storage.writer import PlacementFileSystemWriter


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a tensor, and the source of its elements.

    Attributes:
        fqn: The tensor.
        box: The chunk, in the whole tensor.
        read: Returns the elements, in the chunk's shape; called once, when they are written.
    """

    fqn: str
    box: Box
    read: Callable[[], torch.Tensor]


def write_chunks(
    output: AnyOutput,
    targets: Mapping[str, Target],
    files: Sequence[Sequence[Piece]],
    progress: Callable[[int, int], None],
    check: Callable[[], None],
) -> None:
    """Write a DCP checkpoint of one file per entry of ``files``; one chunk is in memory at a time.

    Args:
        output: Of the checkpoint.
        targets: By key; the pieces must tile them.
        files: The pieces of each file.
        progress: Called with the bytes written, and those to write, after each piece is read.
        check: Called when all pieces are read, before the output appears; refuses a source that was
            overwritten.

    Raises:
        CannotLook: Something else appeared at the path meanwhile.
    """
    metadata, plans, pieces = _plans(targets, files)
    total = sum(prod(target.shape) * target.dtype.itemsize for target in targets.values())
    writer = PlacementFileSystemWriter(output.path)
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan(plans)
    # One thread writes one file of each plan.
    names = [f"{cast(Any, plan.storage_data).prefix}0{DEFAULT_SUFFIX}" for plan in plans]
    with output.directory([*names, ".metadata"]) as folder:
        writer.reset(folder.path)
        planner = cast(SavePlanner, _Reader(pieces, progress, total))
        results = []
        for plan in plans:
            written = writer.write_data(plan, planner)
            written.wait()
            results.append(written.value())
        check()
        folder.begin_last()
        writer.finish(metadata, results)


def _plans(
    targets: Mapping[str, Target], files: Sequence[Sequence[Piece]]
) -> tuple[Metadata, list[SavePlan], dict[MetadataIndex, Piece]]:
    properties = {
        dtype: TensorProperties(dtype) for dtype in {target.dtype for target in targets.values()}
    }
    stored = {
        fqn: TensorStorageMetadata(properties[target.dtype], torch.Size(target.shape), [])
        for fqn, target in targets.items()
    }
    pieces: dict[MetadataIndex, Piece] = {}
    plans = []
    for held in files:
        items = []
        for piece in held:
            tensor = stored[piece.fqn]
            chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
            index = MetadataIndex(piece.fqn, chunk.offsets, len(tensor.chunks))
            tensor.chunks.append(chunk)
            pieces[index] = piece
            data = TensorWriteData(chunk, tensor.properties, tensor.size)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    # The path of each key in a nested dict, as torch's planner stores it.
    metadata = Metadata(dict(stored), planner_data={fqn: (fqn,) for fqn in targets})
    return metadata, plans, pieces


class _Reader:
    """The part of a planner that a storage writer needs."""

    def __init__(
        self,
        pieces: Mapping[MetadataIndex, Piece],
        progress: Callable[[int, int], None],
        total_nbytes: int,
    ) -> None:
        self._pieces = pieces
        self._progress = progress
        self._total_nbytes = total_nbytes
        self._nbytes = 0

    def resolve_data(self, item: Any) -> torch.Tensor:
        """Return the elements of one item."""
        tensor = self._pieces[item.index].read()
        self._nbytes += tensor.nbytes
        self._progress(self._nbytes, self._total_nbytes)
        return tensor
