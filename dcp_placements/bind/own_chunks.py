"""Tensors that list their own chunks: the attributes of torch's ``CheckpointableTensor``.

A plain tensor with ``global_shape``, ``global_offsets``, ``local_offsets`` and ``local_sizes``
lists its chunks in the whole tensor. Default planners of torch 2.14 and newer store it by them;
ours do under every torch, because they are attributes and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import has_hooks
from dcp_placements.bind.rule_and_dtensor import Place
from dcp_placements.errors import CannotPlace
from dcp_placements.layout.boxes import (
    Index,
    as_array,
    format_box,
    intersect,
    numel,
    overlaps,
    within,
)
from dcp_placements.layout.sharding import Box, Chunk, Sharding

LISTS = ("global_offsets", "local_offsets", "local_sizes")
"""A tensor with only some of these attributes is a plain one, as in torch."""

_CORRECT = "way out:     correct the attributes of this tensor, which name each element once"


def lists_its_chunks(value: Any) -> bool:
    """Whether a value is a tensor with the attributes."""
    if getattr(value, "global_shape", None) is None or not isinstance(value, torch.Tensor):
        return False
    return all(getattr(value, name, None) is not None for name in LISTS)


def names_its_chunks(value: Any) -> bool:
    """Whether a value lists its own chunks, by torch's hooks or by the attributes."""
    return has_hooks(value) or lists_its_chunks(value)


def listed_place(tensor: Any) -> Place:
    """Return the place of a tensor that lists its chunks.

    Elements of the tensor that no chunk names are padding, and are neither saved nor loaded.

    Raises:
        CannotPlace: The attributes do not fit each other, the tensor or the whole.
    """
    name = "global_shape"
    lists = []
    try:
        whole = Box.whole(tuple(map(index, tensor.global_shape)))
        for name in LISTS:
            lists.append([tuple(map(index, entry)) for entry in getattr(tensor, name)])
    except (TypeError, ValueError):
        headline = f"has {name}={getattr(tensor, name)!r}, which is no list of integers, per chunk"
        raise CannotPlace(headline, _CORRECT) from None
    local = Box.whole(tuple(tensor.shape))
    if len(set(map(len, lists))) > 1:
        counts = ", ".join(f"{len(of)} {name}" for of, name in zip(lists, LISTS, strict=True))
        raise CannotPlace(f"lists {counts}", _CORRECT)
    chunks = []
    sizes_at: dict[tuple[int, ...], tuple[int, ...]] = {}
    for offsets, local_offsets, sizes in zip(*lists, strict=True):
        if len({len(whole.sizes), *map(len, (local.sizes, offsets, local_offsets, sizes))}) > 1:
            raise CannotPlace(
                f"lists a chunk of other dims than global_shape={whole.sizes} and the local tensor "
                f"{local.sizes}",
                f"offsets {offsets}, local offsets {local_offsets}, sizes {sizes}",
            )
        for of, box in ((whole, Box(offsets, sizes)), (local, Box(local_offsets, sizes))):
            if min(sizes, default=0) < 0 or not within(of, as_array([box], len(sizes))).all():
                kind = "whole" if of is whole else "local"
                headline = f"lists a chunk outside the {kind} tensor of shape {of.sizes}: "
                raise CannotPlace(f"{headline}{format_box(box)}", _CORRECT)
        if 0 in sizes:
            continue
        chunks.append(Chunk(local_offsets, offsets, sizes))
        if (first := sizes_at.setdefault(offsets, sizes)) != sizes:
            texts = f"one of sizes {first} and one of {sizes}"
            headline = f"lists two chunks that overlap: at offsets {offsets} {texts}"
            raise CannotPlace(headline, _CORRECT)
    # One element cannot be loaded from two places: the last one read would win.
    boxes = [Box(chunk.local_offsets, chunk.sizes) for chunk in dict.fromkeys(chunks)]
    for first_box, other in overlaps(as_array(boxes, len(local.sizes)), 1):
        texts = f"{format_box(boxes[first_box])} and {format_box(boxes[other])}"
        raise CannotPlace(f"lists elements of the local tensor for two places: {texts}", _CORRECT)
    return Place(Sharding(whole.sizes), (), tuple(chunks), is_exact=False)


def have_same_elements(chunks: Sequence[Chunk], others: Sequence[Chunk]) -> bool:
    """Return whether two lists of chunks of one tensor name the same elements, each once.

    A tensor may list adjacent rows as one chunk where a cut leaves several: ``FusedShard`` with
    copies does.

    Args:
        chunks: Of which no two share an element of the local tensor, but for equal ones.
        others: Of which no two share one.
    """
    if sorted(chunks) == sorted(others):
        return True
    if not chunks or not others or len({*chunks}) < len(chunks):
        return False
    if any(chunk.strides for chunk in (*chunks, *others)):
        return False
    ndim = len(chunks[0].sizes)
    local, other_local = (
        as_array([Box(chunk.local_offsets, chunk.sizes) for chunk in each], ndim)
        for each in (chunks, others)
    )
    shifts, other_shifts = (
        np.array([chunk.offsets for chunk in each]) - boxes[:, 0]
        for each, boxes in ((chunks, local), (others, other_local))
    )
    rows, other_rows = Index(other_local).meeting(local)
    shared = numel(intersect(local[rows], other_local[other_rows])).sum()
    is_shared = shared == numel(local).sum() == numel(other_local).sum()
    return bool(is_shared and (shifts[rows] == other_shifts[other_rows]).all())
