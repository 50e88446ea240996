"""The stored chunks of a tensor as two arrays.

At thousands of ranks a list of torch's objects has thousands of elements for each way in which
tensors are cut, and a rank needs few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from dcp_placements._torch import ChunkStorageMetadata
from dcp_placements.layout.sharding import Box

Ints = npt.NDArray[np.int64]


class ChunkList(Sequence[ChunkStorageMetadata]):
    """What ``TensorStorageMetadata.chunks`` lists, in arrays that must not change.

    Torch's object is created for each element that is read. Equal to any sequence of equal chunks.
    Its pickle is that of torch's list, so that every reader of DCP loads it.

    Args:
        offsets: ``(chunks, ndim)``, in elements of the whole tensor.
        sizes: ``(chunks, ndim)``.

    Raises:
        ValueError: Arrays of other shapes.
    """

    __slots__ = ("offsets", "sizes")

    def __init__(self, offsets: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        self.offsets: Ints = np.asarray(offsets, np.int64)
        self.sizes: Ints = np.asarray(sizes, np.int64)
        if self.offsets.ndim != 2 or self.offsets.shape != self.sizes.shape:
            raise ValueError(
                f"offsets of shape {self.offsets.shape} and sizes of shape {self.sizes.shape}: "
                "both have to be (chunks, ndim)"
            )

    @staticmethod
    def of(chunks: Sequence[ChunkStorageMetadata], ndim: int) -> ChunkList:
        """Return ``chunks`` in arrays; itself if it is a ``ChunkList``.

        Args:
            chunks: Torch's list, or any sequence.
            ndim: Of the tensor.

        Raises:
            ValueError: Chunks of other dims.
        """
        if isinstance(chunks, ChunkList):
            dims = {chunks.offsets.shape[1]}
        else:
            rows = [row for chunk in chunks for row in (chunk.offsets, chunk.sizes)]
            dims = set(map(len, rows))
        if not dims <= {ndim}:
            found = " and ".join(map(str, sorted(dims)))
            raise ValueError(f"chunks of {found} dims, of a tensor of {ndim} dims")
        if isinstance(chunks, ChunkList):
            return chunks
        # np.array takes several times as long for a list of tuples.
        table = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * ndim)
        table = table.reshape(len(chunks), 2, ndim)
        return ChunkList(table[:, 0], table[:, 1])

    def boxes(self) -> tuple[Box, ...]:
        """Return all chunks as boxes."""
        rows = zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return tuple([Box(tuple(offsets), tuple(sizes)) for offsets, sizes in rows])

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> ChunkList: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | ChunkList:
        if isinstance(index, slice):
            return ChunkList(self.offsets[index], self.sizes[index])
        offsets, sizes = self.offsets[index].tolist(), self.sizes[index].tolist()
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkList):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(
                self.sizes, other.sizes
            )
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
        rows = zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return list, ([ChunkStorageMetadata(size(tuple(o)), size(tuple(s))) for o, s in rows],)
