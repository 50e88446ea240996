"""Chunks in arrays are torch's list to every reader, at the cost of the elements that are read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_SHAPES, examples, tilings
from torch.distributed.checkpoint import ChunkStorageMetadata

from dcp_placements.layout.sharding import Box
from dcp_placements.storage.torch_metadata import ChunkList, chunk_boxes


def torchs(boxes: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


@given(SMALL_SHAPES, st.data())
@examples(50)
def test_a_chunk_list_is_the_list_in_every_respect(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    listed = torchs(boxes)
    chunks = ChunkList(chunk_boxes(listed, len(shape)))
    assert list(chunks) == listed
    assert chunks == listed
    assert listed == chunks
    assert list(chunks[1:]) == listed[1:]
    assert chunks[-1:] == listed[-1:]
    assert chunk_boxes(chunks, len(shape)) is chunks.array
    assert chunks != [*listed, listed[0]]
    assert chunks[:0] != chunks
    assert pickle.loads(pickle.dumps(chunks)) == copy.deepcopy(chunks) == listed
    for chunk in chunks:
        assert type(chunk.offsets) is type(chunk.sizes) is torch.Size
        assert all(type(number) is int for number in (*chunk.offsets, *chunk.sizes))


@pytest.mark.parametrize(
    ("chunks", "ndim", "found"),
    [
        (torchs([Box((0,), (4,))]), 2, "1 dims, of a tensor of 2"),
        (ChunkList(np.zeros((3, 2, 2))), 1, "2 dims, of a tensor of 1"),
        (torchs([Box((0,), (4,)), Box((0, 0), (4, 1))]), 1, "1 and 2 dims, of a tensor of 1"),
    ],
)
def test_chunks_of_other_dims_are_refused(chunks: Any, ndim: int, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        chunk_boxes(chunks, ndim)
