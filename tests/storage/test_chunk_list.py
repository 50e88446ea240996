"""Chunks in arrays are torch's list to every reader, at the cost of the elements that are read."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_SHAPES, arange, boxes_in, examples, tilings
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements._torch import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.testing import World


def torchs(boxes: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


class InArrays(FileSystemReader):
    """Torch's reader, whose metadata have chunks in arrays."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        for fqn, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                chunks = ChunkList.of(entry.chunks, len(entry.size))
                metadata.state_dict_metadata[fqn] = replace(entry, chunks=chunks)
        return metadata


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_torch_plans_the_same_reads_from_arrays_and_from_its_list(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    chunks = torchs(data.draw(tilings(shape)))
    listed = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
    arrays = replace(listed, chunks=ChunkList.of(chunks, len(shape)))  # type: ignore[arg-type]
    wanted = torchs(data.draw(boxes_in(shape)))
    expected = create_read_items_for_chunk_list("w", listed, wanted)
    assert create_read_items_for_chunk_list("w", arrays, wanted) == expected


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_a_chunk_list_is_the_list_in_every_respect(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    listed = torchs(boxes)
    chunks = ChunkList.of(listed, len(shape))
    assert list(chunks) == listed
    assert chunks == listed
    assert listed == chunks
    assert list(chunks[1:]) == listed[1:]
    assert chunks[-1:] == listed[-1:]
    assert chunks.boxes() == tuple(boxes)
    assert chunks == ChunkList.of(listed, len(shape))
    assert chunks != [*listed, listed[0]]
    assert chunks[:0] != chunks
    assert pickle.loads(pickle.dumps(chunks)) == copy.deepcopy(chunks) == listed
    for chunk in chunks:
        assert type(chunk.offsets) is type(chunk.sizes) is torch.Size
        assert all(type(number) is int for number in (*chunk.offsets, *chunk.sizes))


def test_pickles_name_no_class_of_this_package() -> None:
    chunks = ChunkList(np.array([[0, 0], [2, 0]]), np.array([[2, 3], [2, 3]]))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), chunks)  # type: ignore[arg-type]
    data = pickle.dumps(entry)
    assert b"dcp_placements" not in data
    assert type(pickle.loads(data).chunks) is list


@pytest.mark.parametrize(
    ("chunks", "ndim", "found"),
    [
        (torchs([Box((0,), (4,))]), 2, "1 dims, of a tensor of 2"),
        (ChunkList(np.zeros((3, 2)), np.ones((3, 2))), 1, "2 dims, of a tensor of 1"),
        (torchs([Box((0,), (4,)), Box((0, 0), (4, 1))]), 1, "1 and 2 dims, of a tensor of 1"),
    ],
)
def test_chunks_of_other_dims_are_refused(chunks: Any, ndim: int, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        ChunkList.of(chunks, ndim)


@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, PlacementLoadPlanner])
def test_a_checkpoint_is_loaded_from_arrays_whole_and_in_part(
    tmp_path: Path, planner: type[dcp.DefaultLoadPlanner]
) -> None:
    wholes = {"experts.w": arange((7, 5)), "norm": arange((5,)), "step": torch.tensor(3.0)}
    world = World(4)

    def part(rank: int, size: int) -> dict[str, torch.Tensor]:
        return wholes | {"experts.w": wholes["experts.w"].chunk(size)[rank].clone()}

    def rules(rank: int, size: int) -> PlacementRules:
        mesh = World(size).mesh(rank, ep=size)
        placement = CheckpointPlacement(mesh, {"ep": Shard(0)}, global_shape=(7, 5))
        return PlacementRules({"w": placement})

    world.save(
        tmp_path,
        lambda rank: part(rank, 4),
        lambda rank: PlacementSavePlanner(rules(rank, 4)),
    )
    for size in (1, 2, 4):

        def rank_planner(rank: int, size: int = size) -> dcp.DefaultLoadPlanner:
            return planner() if size == 1 else PlacementLoadPlanner(rules(rank, size))

        filled = World(size).load(
            tmp_path,
            lambda rank, size=size: {fqn: one * 0 - 1 for fqn, one in part(rank, size).items()},
            rank_planner,
            lambda rank: InArrays(tmp_path),
        )
        for rank, state_dict in enumerate(filled):
            for fqn, expected in part(rank, size).items():
                assert torch.equal(state_dict[fqn], expected)
    tensors = Checkpoint(tmp_path).tensors
    assert [box.sizes for box in tensors["experts.w"].boxes] == [(2, 5)] * 3 + [(1, 5)]
