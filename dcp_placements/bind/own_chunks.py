"""Tensors that say themselves where they lie: the attributes of torch's ``CheckpointableTensor``.

A plain tensor with ``global_shape``, ``global_offsets``, ``local_offsets`` and ``local_sizes``
lists its chunks in the whole tensor. Default planners of torch 2.14 and newer store it by them;
ours do under every torch, because they are attributes and nothing else.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from dcp_placements._torch import has_hooks
from dcp_placements.bind.binding import BindError
from dcp_placements.bind.placed import Place
from dcp_placements.layout.boxes import as_array, format_box, overlaps
from dcp_placements.layout.sharding import Box, Chunk, Sharding

NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The attributes; a tensor that has only some of them is a plain tensor, as torch takes it."""


def lists_its_chunks(value: Any) -> bool:
    """Whether a value is a tensor with the attributes."""
    return (
        isinstance(value, torch.Tensor)
        and getattr(value, "global_offsets", None) is not None
        and all(getattr(value, name, None) is not None for name in NAMES)
    )


def names_its_chunks(value: Any) -> bool:
    """Whether a value says itself what is stored of it: by torch's hooks, or by the attributes."""
    return has_hooks(value) or lists_its_chunks(value)


def listed_place(tensor: Any) -> Place:
    """Return the place of a tensor that lists its chunks.

    Elements of the tensor that no chunk names are padding, and are neither saved nor loaded.

    Raises:
        BindError: Attributes that do not fit each other, the tensor or the whole.
    """
    global_shape = _ints(tensor.global_shape, "global_shape")
    local_shape = tuple(tensor.shape)
    lists = [_entries(getattr(tensor, name), name) for name in NAMES[1:]]
    if len({len(entries) for entries in lists}) != 1:
        counts = ", ".join(f"{len(one)} {name}" for one, name in zip(lists, NAMES[1:], strict=True))
        raise BindError(f"lists {counts}", "way out:     one of each per chunk")
    chunks = []
    for number, entries in enumerate(zip(*lists, strict=True)):
        offsets, local_offsets, sizes = (
            _ints(entry, f"{name}[{number}]")
            for entry, name in zip(entries, NAMES[1:], strict=True)
        )
        if len(set(map(len, (global_shape, local_shape, offsets, local_offsets, sizes)))) > 1:
            raise BindError(
                f"lists a chunk of other dims than global_shape={global_shape} and the "
                f"local tensor {local_shape}",
                f"offsets {offsets}, local offsets {local_offsets}, sizes {sizes}",
            )
        _check_inside(offsets, sizes, global_shape, "the whole tensor", "global_offsets")
        _check_inside(local_offsets, sizes, local_shape, "the local tensor", "local_offsets")
        if 0 not in sizes:
            chunks.append(Chunk(local_offsets, offsets, sizes))
    sizes_at: dict[tuple[int, ...], tuple[int, ...]] = {}
    for chunk in chunks:
        if sizes_at.setdefault(chunk.offsets, chunk.sizes) != chunk.sizes:
            raise BindError(
                f"lists two chunks that overlap: at offsets {chunk.offsets} one of sizes "
                f"{sizes_at[chunk.offsets]} and one of {chunk.sizes}",
                "way out:     list each element once, or equal chunks where copies are held",
            )
    # One element cannot be loaded from two places: the last one read would win.
    local = [Box(chunk.local_offsets, chunk.sizes) for chunk in dict.fromkeys(chunks)]
    for one, other in overlaps(as_array(local, len(local_shape)), 1):
        raise BindError(
            f"lists elements of the local tensor for two places: {format_box(local[one])} and "
            f"{format_box(local[other])}",
            "way out:     local_offsets and local_sizes that name each element once",
        )
    return Place(Sharding(global_shape), (), (), tuple(chunks), is_exact=False)


def _entries(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise BindError(f"has {name}={values!r}, which is no list") from None


def _ints(values: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple([index(value) for value in values])
    except (TypeError, ValueError):
        raise BindError(f"has {name}={values!r}, which is no tuple of integers") from None


def _check_inside(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    whole: str,
    name: str,
) -> None:
    for dim, (offset, size, room) in enumerate(zip(offsets, sizes, shape, strict=True)):
        if offset < 0 or size < 0 or offset + size > room:
            raise BindError(
                f"lists a chunk outside {whole} of shape {shape}: on dim {dim} {name} {offset} "
                f"and local_sizes {size}",
                "way out:     correct the attributes of this tensor",
            )
