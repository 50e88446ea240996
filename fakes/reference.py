"""The truth: a shard is the whole tensor cut by torch's own operators.

This module imports nothing of the library and works on elements instead of intervals, so that an
error in one is no error in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def cut(
    whole: torch.Tensor,
    placements: Sequence[Any],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> torch.Tensor:
    """Return what one coordinate of a mesh holds of ``whole``; a tensor of its own.

    Args:
        whole: The whole tensor.
        placements: One per mesh axis, applied left to right: torch's, ``FusedShard``,
            ``RaggedShard``, ``FlatShard`` or ``IndexShard``.
        sizes: Number of ranks along each axis.
        coordinate: The position along each axis.

    Raises:
        ValueError: A placement is of another class, or of a subclass of these.
    """
    held = whole
    for placement, size, position in zip(placements, sizes, coordinate, strict=True):
        cls = type(placement)
        match cls.__module__.partition(".")[0], cls.__name__:
            case "dcp_placements", "IndexShard":
                rows = torch.tensor(placement.indices, dtype=torch.long)
                held = held.index_select(placement.dim, rows)
            case "dcp_placements", "FlatShard":
                held = held.reshape(-1).split(list(placement.sizes))[position]
            case "dcp_placements", "RaggedShard":
                held = held.split(list(placement.sizes), placement.dim)[position]
            case "dcp_placements", "FusedShard":
                held = _fused(held, placement, size, position)
            case "torch", "_StridedShard":
                strides = _chunks(held, placement.split_factor, placement.dim)
                held = torch.cat(
                    [_chunks(s, size, placement.dim)[position] for s in strides], placement.dim
                )
            case "torch", "Shard":
                held = _chunks(held, size, placement.dim)[position]
            case "torch", "Replicate" | "Partial":
                pass
            case _:
                raise ValueError(
                    f"{placement!r} is a {cls.__module__}.{cls.__qualname__}: how that cuts a "
                    "tensor is not known here"
                )
    return held.clone()


def _fused(held: torch.Tensor, placement: Any, size: int, position: int) -> torch.Tensor:
    dim = placement.dim
    parts = (
        _chunks(held, placement.parts, dim)
        if isinstance(placement.parts, int)
        else list(held.split(placement.parts, dim))
    )
    copies = placement.copies or [1] * len(parts)
    return torch.cat(
        [
            _chunks(part, size // count, dim)[position // count]
            for part, count in zip(parts, copies, strict=False)
        ],
        dim,
    )


def _chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Return ``torch.chunk`` with the empty chunks that it leaves out."""
    chunks = list(torch.chunk(tensor, count, dim)) if tensor.shape[dim] else []
    empty = tensor.narrow(dim, 0, 0)
    return chunks + [empty] * (count - len(chunks))


def numbered(shape: Sequence[int], padded: Sequence[int] | None = None) -> torch.Tensor:
    """Return the number of each element of a whole tensor, and -1 in the padding around it."""
    numel = int(torch.Size(shape).numel())
    numbers = torch.arange(numel).reshape(tuple(shape))
    if padded is None:
        return numbers
    around = numbers.new_full(tuple(padded), -1)
    around[tuple(slice(0, size) for size in shape)] = numbers
    return around


def part(
    whole: torch.Tensor, which: int, dim: int, sizes: Sequence[int], groups: int = 1
) -> torch.Tensor:
    """Return one part of a fused tensor, whose parts follow each other in groups.

    Args:
        whole: The fused tensor.
        which: Number of the part.
        dim: The dim that the parts lie along.
        sizes: Sizes of the parts, in proportion to each other.
        groups: Number of times that the sequence of parts repeats.
    """
    unit = whole.shape[dim] // (sum(sizes) * groups)
    blocks = whole.split([size * unit for size in sizes] * groups, dim)
    return torch.cat(blocks[which :: len(sizes)], dim)
