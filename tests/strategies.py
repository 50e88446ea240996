"""Random meshes, tensors and placements, for hypothesis."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import FusedShard, RaggedShard
from dcp_placements.layout.sharding import Box

MORE = int(os.environ.get("MORE_EXAMPLES", "1"))
"""``MORE_EXAMPLES=20 pytest`` looks at 20 times as many examples, other ones at every run."""

NAMES = ("w", "x", "y", "z")  # that say nothing, so that no advice by name is given


def examples(count: int) -> settings:
    """Return the settings of a test that looks at ``count`` examples.

    They are fixed: a test that fails then fails for everybody. The first one pays for imports and
    caches, so there is no deadline.
    """
    return settings(max_examples=count * MORE, deadline=None, derandomize=MORE == 1, database=None)


def arange(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose elements all differ, as far as ``dtype`` can tell them apart."""
    return torch.arange(prod(shape)).reshape(tuple(shape)).to(dtype)


def coordinates(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every coordinate of a mesh."""
    return itertools.product(*map(range, sizes))


@dataclass(frozen=True)
class Case:
    """A tensor, and how a mesh cuts it.

    Attributes:
        shape: Of the whole tensor.
        sizes: Ranks along each mesh axis.
        placements: One per axis.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple[Any, ...]


def mesh_sizes(
    *, min_axes: int = 1, max_axes: int = 4, max_ranks: int = 64
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw mesh sizes; size-1 axes among them."""

    @st.composite
    def draw_sizes(draw: st.DrawFn) -> tuple[int, ...]:
        sizes: list[int] = []
        for _ in range(draw(st.integers(min_axes, max_axes))):
            sizes.append(draw(st.integers(1, max(1, min(8, max_ranks // prod(sizes))))))
        return tuple(sizes)

    return draw_sizes()


def shapes(*, max_dims: int = 3, max_size: int = 11) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes of tensors that have dims; uneven and empty sizes among them."""
    return st.lists(st.integers(0, max_size), min_size=1, max_size=max_dims).map(tuple)


@st.composite
def placements_over(
    draw: st.DrawFn,
    shape: Sequence[int],
    sizes: Sequence[int],
    *,
    fused: bool = True,
    strided: bool = True,
    even: bool = False,
) -> tuple[Any, ...]:
    """Draw one placement per axis, each of which the sizes at hand allow.

    Args:
        shape: What is being cut.
        sizes: Ranks along each axis.
        fused: Whether to draw ``FusedShard``, and ``RaggedShard`` where any pieces will do.
        strided: Whether to draw ``_StridedShard``.
        even: Whether every cut must leave equal pieces.
    """
    # What is left of each dim, where that is the same at every coordinate; else None.
    left: list[int | None] = list(shape)
    drawn = []
    for size in sizes:
        dim = draw(st.integers(0, len(shape) - 1))
        kinds = ["replicate", "shard", "shard"] + ["strided"] * strided + ["parts"] * fused
        if fused and left[dim]:
            kinds += ["sizes"]
        total = left[dim]
        if fused and not even and total is not None:
            kinds += ["pieces"]
        kind = draw(st.sampled_from(kinds))
        if kind == "pieces":
            assert total is not None
            inner = st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1)
            ends = [0, *sorted(draw(inner)), total]
            pieces = tuple(stop - start for start, stop in itertools.pairwise(ends))
            drawn.append(RaggedShard(dim, pieces))
            left[dim] = pieces[0] if len({*pieces}) == 1 else None
            continue
        placement, parts = draw(_one(dim, left[dim], kind))
        if even and parts and not _is_even(left[dim], size, parts):
            placement, parts = Replicate(), None
        drawn.append(placement)
        if parts:
            left[dim] = (left[dim] or 0) // size if _is_even(left[dim], size, parts) else None
    return tuple(drawn)


@st.composite
def _one(draw: st.DrawFn, dim: int, left: int | None, kind: str) -> tuple[Any, Any]:
    """Draw one placement of a kind; with it, its number of parts or their sizes."""
    if kind == "replicate":
        return Replicate(), None
    if kind == "shard":
        return Shard(dim), 1
    if kind == "strided":
        parts = draw(st.integers(2, 5))
        return _StridedShard(dim, split_factor=parts), parts
    if kind == "parts":
        parts = draw(st.integers(1, 4))
        return FusedShard(dim, parts), parts
    assert left
    edges = sorted(draw(st.sets(st.integers(1, left), max_size=3)) | {left})
    ends = [0, *edges]
    each = tuple(stop - start for start, stop in itertools.pairwise(ends))
    return FusedShard(dim, each), each


def _is_even(total: int | None, ranks: int, parts: Any) -> bool:
    if total is None:
        return False
    if isinstance(parts, int):
        return total % (ranks * parts) == 0
    return all(part % ranks == 0 for part in parts)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_axes: int = 4,
    max_ranks: int = 64,
    fused: bool = True,
    strided: bool = True,
) -> Case:
    """Draw a tensor and how a mesh cuts it."""
    sizes = draw(mesh_sizes(max_axes=max_axes, max_ranks=max_ranks))
    shape = draw(shapes())
    return Case(shape, sizes, draw(placements_over(shape, sizes, fused=fused, strided=strided)))


SMALL_SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that tile ``shape``, most of them no grid: guillotine cuts."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            if size:
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim] += start
                sizes[dim] = size
                boxes.append(Box(tuple(offsets), tuple(sizes)))
    return draw(st.permutations(boxes))


def count(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    """Return how many of ``boxes`` hold each element."""
    counted = torch.zeros(shape, dtype=torch.long)
    for box in boxes:
        counted[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    return counted
