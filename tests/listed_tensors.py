"""Tensors of random worlds that list their chunks, as torch's ``CheckpointableTensor`` does."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from tests.random_worlds import Tile


def annotate(tensor: Any, global_shape: torch.Size, tiles: tuple[Tile, ...]) -> None:
    """Set the attributes."""
    tensor.global_shape = global_shape
    tensor.global_offsets = tuple(tile.offsets for tile in tiles)
    tensor.local_offsets = tuple(tile.local_offsets for tile in tiles)
    tensor.local_sizes = tuple(tile.sizes for tile in tiles)


def tiled(whole: torch.Tensor, tiles: tuple[Tile, ...]) -> torch.Tensor:
    """Return a rank's tensor that has these boxes of a whole one, and -1 around them."""
    shape = [0] * whole.dim()
    for tile in tiles:
        ends = map(sum, zip(tile.local_offsets, tile.sizes, strict=True))
        shape = [max(pair) for pair in zip(shape, ends, strict=True)]
    held = whole.new_full(shape, -1)
    for tile in tiles:
        held[_slices(tile.local_offsets, tile.sizes)] = whole[_slices(tile.offsets, tile.sizes)]
    return held


def _slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def tiles_of(where: torch.Tensor, shape: torch.Size, by_row: set[int]) -> tuple[Tile, ...]:
    """Return the boxes that a rank has of a tensor which was cut dim by dim.

    Args:
        where: The number in the whole of each element of the rank's tensor, -1 of padding.
        shape: Of the whole.
        by_row: Dims on which each row is a box of its own.
    """
    inside = (where >= 0).nonzero()
    if not len(inside):
        return ()
    runs: list[list[tuple[int, int, int]]] = []  # per dim: offset, size, local offset
    for dim, size in enumerate(shape):
        line = where[tuple(slice(None) if d == dim else i for d, i in enumerate(inside[0]))]
        rows = torch.where(line < 0, -1, line // shape[dim + 1 :].numel() % size).tolist()
        runs.append([])
        for local, row in enumerate(rows):
            if local and row and row == rows[local - 1] + 1 and dim not in by_row:
                offset, length, start = runs[-1].pop()
                runs[-1].append((offset, length + 1, start))
            elif row >= 0:
                runs[-1].append((row, 1, local))
    return tuple(Tile(*(zip(*box, strict=True) if box else [()] * 3)) for box in product(*runs))
