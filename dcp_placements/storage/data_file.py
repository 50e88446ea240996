"""One data file: which items it has, and how they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heapreplace
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlanner, WriteItem
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_placements._torch import cpu_tensors, global_rank
from dcp_placements.errors import PlacementError
from dcp_placements.storage.records import batches, save_tensors
from dcp_placements.storage.written import RowsBuilder, is_whole


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that is to be written.

    Attributes:
        name: Of the file.
        items: What it is to hold.
    """

    name: str
    items: Sequence[WriteItem]

    def write(
        self,
        stream: Any,
        planner: SavePlanner,
        builder: RowsBuilder,
        *,
        threads: int,
        ahead_nbytes: int,
    ) -> None:
        """Write the chunks of cut tensors, then whole tensors, then objects.

        The records of cut tensors are so where they are in the files of other ranks, whatever this
        rank alone has besides.

        Args:
            stream: Open for writing, at its beginning.
            planner: Gives the data of items.
            builder: Takes a row for each of what is written.
            threads: That write files.
            ahead_nbytes: Bytes that may be copied to the host ahead.

        Raises:
            PlacementError: A tensor of another dtype or shape than its item says.
        """
        objects = [item for item in self.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in self.items if item.type != WriteItemType.BYTE_IO]
        loaded = cpu_tensors(
            sorted(tensors, key=is_whole),
            chunk_nbytes,
            planner.resolve_data,
            threads=threads,
            ahead_nbytes=ahead_nbytes,
        )
        for batch, items in batches(map(_as_planned, loaded)):
            length = save_tensors(batch, stream)
            builder.append(items, path=self.name, length=length)
        for item in objects:
            data = planner.resolve_data(item)
            assert isinstance(data, BytesIO)
            with data.getbuffer() as contents:
                stream.write(contents)
                builder.append([item], path=self.name, length=contents.nbytes)


def _as_planned(loaded: tuple[torch.Tensor, WriteItem]) -> tuple[torch.Tensor, WriteItem]:
    """Return a tensor and its item, which say the same of dtype and shape."""
    tensor, item = loaded
    data = item.tensor_data
    assert data is not None
    if tensor.shape != data.chunk.sizes or tensor.dtype != data.properties.dtype:
        raise PlacementError(
            f"{item.index.fqn}, rank {global_rank()}: resolve_data() of the planner returned "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}, but the metadata will say "
            f"{data.properties.dtype} of shape {tuple(data.chunk.sizes)}\n"
            "    likely:      the planner is a subclass that casts while it saves\n"
            "    way out:     cast before: dcp.save() with the tensors that are to be stored"
        )
    return loaded


def chunk_nbytes(item: WriteItem) -> int:
    """Return the bytes of the elements that an item writes."""
    assert item.tensor_data is not None
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)


def split_by_chunk(bins: int, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Return the items in bins of about equal bytes, the largest placed first.

    Torch's own function takes every chunk to be as large as its whole tensor.
    """
    if bins == 1:
        return [list(items)]
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    for number, item in enumerate(objects):
        buckets[number % bins].append(item)
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    sized = sorted(((chunk_nbytes(item), item) for item in tensors), key=lambda s: -s[0])
    filled = [(0, number) for number in range(bins)]
    heapify(filled)
    for nbytes, item in sized:
        held, number = filled[0]
        buckets[number].append(item)
        heapreplace(filled, (held + nbytes, number))
    return buckets


@contextmanager
def errors_of(path: Any) -> Iterator[None]:
    """Raise the system's error for a file that is being written, with the file's name.

    ``torch.save`` closes its zip file when a write fails, which fails as well, over positions that
    do not fit; the reason is what that error came after.
    """
    try:
        yield
    except PlacementError:
        raise  # of what is read
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__
        if reason is None or reason.filename is not None or (reason is error and not error.errno):
            raise
        if reason.errno is None:
            raise reason from error
        raise OSError(reason.errno, os.strerror(reason.errno), os.fspath(path)) from error
