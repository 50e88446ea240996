"""The stored chunks of a tensor as an array.

At thousands of ranks a list of torch's objects has thousands of elements for each way in which
tensors are cut, and a rank needs few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import ChunkStorageMetadata

from dcp_placements.layout.boxes import Boxes, Ints, as_array, as_boxes
from dcp_placements.layout.sharding import Box


class ChunkList(Sequence[ChunkStorageMetadata]):
    """What ``TensorStorageMetadata.chunks`` lists, as an array of boxes that must not change.

    Torch's object is created for each element that is read. Equal to any sequence of equal chunks.
    Its pickle is that of torch's list, so that every reader of DCP loads it.

    Args:
        array: ``int64[chunks, 2, ndim]``, as ``layout/boxes`` has it.

    Raises:
        ValueError: An array of another shape.
    """

    __slots__ = ("array",)

    def __init__(self, array: npt.ArrayLike) -> None:
        self.array: Boxes = np.asarray(array, np.int64)
        if self.array.ndim != 3 or self.array.shape[1] != 2:
            raise ValueError(f"an array of {self.array.shape}: it has to be (chunks, 2, ndim)")

    @staticmethod
    def of(chunks: Sequence[ChunkStorageMetadata], ndim: int) -> ChunkList:
        """Return ``chunks`` in an array; itself if it is a ``ChunkList``.

        Args:
            chunks: Torch's list, or any sequence.
            ndim: Of the tensor.

        Raises:
            ValueError: Chunks of other dims.
        """
        boxes: list[Box] = []
        if isinstance(chunks, ChunkList):
            dims = {chunks.array.shape[2]}
        else:
            boxes = [Box(chunk.offsets, chunk.sizes) for chunk in chunks]
            dims = {len(row) for box in boxes for row in box}
        if not dims <= {ndim}:
            found = " and ".join(map(str, sorted(dims)))
            raise ValueError(f"chunks of {found} dims, of a tensor of {ndim} dims")
        return chunks if isinstance(chunks, ChunkList) else ChunkList(as_array(boxes, ndim))

    @property
    def offsets(self) -> Ints:
        """Where each chunk begins, ``(chunks, ndim)``."""
        return self.array[:, 0]

    @property
    def sizes(self) -> Ints:
        """The sizes of each chunk, ``(chunks, ndim)``."""
        return self.array[:, 1]

    def boxes(self) -> tuple[Box, ...]:
        """Return all chunks as boxes."""
        return tuple(as_boxes(self.array))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> ChunkList: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | ChunkList:
        if isinstance(index, slice):
            return ChunkList(self.array[index])
        offsets, sizes = self.array[index].tolist()
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkList):
            return np.array_equal(self.array, other.array)
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(
            one == another for one, another in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkList({len(self)} chunks)"

    def __reduce__(self) -> tuple[Any, ...]:
        # Equal sizes are one object, which is pickled once.
        size = cache(torch.Size)
        rows = [ChunkStorageMetadata(*map(size, box)) for box in as_boxes(self.array)]
        return list, (rows,)
