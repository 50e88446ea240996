"""Slices of chunks that lie in a file with any strides, as in files of ``torch.save``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements.storage.file_reads import CountedFile
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.record_reads import ChunkReader, RecordRead


class OneTarget:
    """The part of a planner that a reader needs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.tensor

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is the target itself."""


Case = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]

OVERLAPPING: Case = (2, 2, 2), (3, 3, 1), (0, 0, 0), (2, 2, 2)
"""As many elements as lie between the first and the last, in another order."""


def drawn(draw: random.Random) -> Case:
    """Return the shape and strides of a chunk, the offsets and lengths of a slice."""
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
    strides = tuple(draw.choice([0, 1, 2, 3, 4, 8, 12, 16]) for _ in shape)
    offsets = tuple(draw.randrange(size) for size in shape)
    pairs = zip(shape, offsets, strict=True)
    return shape, strides, offsets, tuple(draw.randint(1, size - offset) for size, offset in pairs)


@pytest.mark.parametrize("buffer_nbytes", [16, 1 << 20])
@pytest.mark.parametrize("most_gap", [0, 1 << 12])
def test_slices_are_those_of_the_strided_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_gap: int, buffer_nbytes: int
) -> None:
    """With overlaps, gaps and strides of 0; into targets of any layout."""
    monkeypatch.setattr("dcp_placements.storage.record.BUFFER_NBYTES", buffer_nbytes)
    monkeypatch.setattr(CountedFile, "gap", lambda self, nbytes: most_gap)
    elements = torch.randint(-(1 << 15), 1 << 15, (256,), dtype=torch.int16)
    (tmp_path / "file").write_bytes(elements.numpy().tobytes())
    draw = random.Random(most_gap)
    for shape, strides, offsets, lengths in [OVERLAPPING, *(drawn(draw) for _ in range(300))]:
        dims, first = len(shape), draw.randint(0, 100)
        slices = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
        expected = elements.as_strided(shape, strides, first)[slices]
        order = draw.sample(range(dims), dims)
        target = torch.zeros([lengths[dim] for dim in order], dtype=torch.int16)
        target = target.permute([order.index(dim) for dim in range(dims)])
        index = MetadataIndex("w", torch.Size([0] * dims))
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=torch.Size([0] * dims),
            storage_index=index,
            storage_offsets=torch.Size(offsets),
            lengths=torch.Size(lengths),
        )
        record = RecordHead(torch.int16, shape, strides)
        planner: object = OneTarget(target)
        wanted = RecordRead(item, "file", 2 * first, 2 * (256 - first), record=record)
        with open(tmp_path / "file", "rb") as stream:
            ChunkReader(planner, {}).read(CountedFile(stream), [wanted])
        assert target.equal(expected), (shape, strides, offsets, lengths)
