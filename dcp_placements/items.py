"""Layouts as torch's plan items: what a rank writes, what it reads.

Items of tensors that lie alike share their chunk objects, here and so in the pickled plan.
"""

from __future__ import annotations

from typing import Any

import torch

from dcp_placements.interop import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dcp_placements.layout import Chunk
from dcp_placements.placing import Placed


class WriteItems:
    """Makes the write items of placed tensors."""

    def __init__(self) -> None:
        self._properties: dict[Any, TensorProperties] = {}
        self._data: dict[Any, list[tuple[torch.Size, TensorWriteData]]] = {}

    def of(self, placed: Placed) -> list[WriteItem]:
        """Return one item per chunk; none where this rank holds no element.

        A tensor without elements keeps its key by one empty item at the origin.
        """
        tensor = placed.tensor
        looks = (tensor.dtype, tensor.layout, tensor.requires_grad)
        key = (id(placed.binding), looks)
        data = self._data.get(key)
        if data is None:
            properties = self._properties.get(looks)
            if properties is None:
                properties = TensorProperties.create_from_tensor(tensor)
                self._properties[looks] = properties
            size = torch.Size(placed.global_shape)
            data = self._data[key] = [
                (
                    torch.Size(chunk.offsets),
                    TensorWriteData(chunk_metadata(chunk.offsets, chunk.sizes), properties, size),
                )
                for chunk in written_chunks(placed)
            ]
        return [
            WriteItem(MetadataIndex(placed.fqn, offsets), WriteItemType.SHARD, tensor_data=part)
            for offsets, part in data
        ]


def written_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a placed tensor is written as."""
    if 0 in placed.global_shape:
        origin = (0,) * len(placed.global_shape)
        return (Chunk(origin, origin, placed.global_shape),)
    # A rank may hold one row twice (IndexShard): it is written once.
    by_offsets = {chunk.offsets: chunk for chunk in reversed(placed.chunks)}
    if len(by_offsets) < len(placed.chunks):
        return tuple(reversed(by_offsets.values()))
    return placed.chunks


def written_data(placed: Placed, chunk: Chunk) -> torch.Tensor:
    """Return the data of a written chunk: a view of the local tensor."""
    if 0 in placed.global_shape:
        return placed.tensor.detach().new_empty(placed.global_shape)
    return placed.view(chunk)


def chunk_metadata(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    """Return torch's form of a box."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
