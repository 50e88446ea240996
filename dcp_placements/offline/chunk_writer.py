"""A DCP checkpoint written chunk by chunk, out of whatever holds the chunks.

The files are those of the package's own writer. They come into being under another name, which
becomes the asked-for one when all is on disk: what stops half-way leaves no checkpoint, and what it
leaves behind is cleared away by the next attempt.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from dcp_placements.errors import PlacementError
from dcp_placements.interop import (
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
from dcp_placements.layout import Box
from dcp_placements.storage_writer import PlacementFileSystemWriter


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint.

    Attributes:
        shape: Whole.
        dtype: Its elements'.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a tensor, and where its elements come from.

    Attributes:
        fqn: The tensor.
        box: The chunk, in the whole tensor.
        read: Returns the elements, in the chunk's shape; asked once, when they are written.
    """

    fqn: str
    box: Box
    read: Callable[[], torch.Tensor]


def write_chunks(
    out: str | os.PathLike[str],
    targets: Mapping[str, Target],
    files: Sequence[Sequence[Piece]],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a DCP checkpoint of one file per entry of ``files``; one chunk is in memory at a time.

    Args:
        out: The checkpoint's directory, which must not be there.
        targets: By key; the pieces must tile them.
        files: The pieces of each file.
        progress: Told the bytes of each piece that is written.

    Raises:
        PlacementError: ``out`` is there, or is a URL.
    """
    target = check_absent(out)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    metadata, plans, pieces = _plans(targets, files)
    writer = PlacementFileSystemWriter(partial)
    writer.set_up_storage_writer(True)
    planner = cast(SavePlanner, _Reader(pieces, progress))
    results = []
    for plan in writer.prepare_global_plan(plans):
        written = writer.write_data(plan, planner)
        written.wait()
        results.append(written.value())
    writer.finish(metadata, results)
    # An empty directory of that name gives way to it.
    os.rename(partial, target)


def check_absent(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint is to be, which is nowhere yet, or an empty directory.

    Raises:
        PlacementError: Something is there, or it is no path of this machine.
    """
    out = Path(path)
    if "://" in os.fspath(path):
        raise PlacementError(
            f"{path}: a checkpoint appears there by renaming, which a URL cannot do\n"
            "    way out:     write it to a disk of this machine, and copy it"
        )
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty:
        raise PlacementError(
            f"{out}: is there already, and is left as it is\n"
            "    way out:     give another directory"
        )
    return out


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
            told = stored[piece.fqn]
            chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
            index = MetadataIndex(piece.fqn, chunk.offsets, len(told.chunks))
            told.chunks.append(chunk)
            pieces[index] = piece
            data = TensorWriteData(chunk, told.properties, told.size)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    # Where each key stands in a nested dict: at the top.
    metadata = Metadata(dict(stored), planner_data={fqn: (fqn,) for fqn in targets})
    return metadata, plans, pieces


class _Reader:
    """All that a storage writer asks of a planner."""

    def __init__(
        self, pieces: Mapping[MetadataIndex, Piece], progress: Callable[[int], None]
    ) -> None:
        self._pieces = pieces
        self._progress = progress

    def resolve_data(self, item: Any) -> torch.Tensor:
        """Return the elements of one item."""
        tensor = self._pieces[item.index].read()
        self._progress(tensor.numel() * tensor.itemsize)
        return tensor
