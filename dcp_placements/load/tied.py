"""Destinations that overlap in memory: what was read into each must be there when all are read.

A model that ties its embedding and its head has one memory under two keys. If the checkpoint has
different tensors under the two, the one that is read last would stay. So each part is read into a
buffer of its own. When all are read they are put into memory, and a part that is not there then was
overwritten. Of two tied keys::

    tied_keys([("embed", w), ("head", w), ("bias", b)])
    {"embed": ("embed", "head"), "head": ("embed", "head")}

A tensor of which several elements are one memory, as ``expand`` makes it, is refused before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_placements._torch import facts_of, is_dtensor_like
from dcp_placements.bind.lint import data_pointer
from dcp_placements.errors import Fault, format_names, raise_faults
from dcp_placements.table.digests import full_digest

MAX_KEYS = 6
"""Keys of one memory that a message lists."""

_FEW = 4
"""Elements of a tensor that a message shows."""

UNLIKE = "what is one here differs in the checkpoint"

Buffered = Sequence[tuple[str, torch.Tensor, torch.Tensor]]
"""What was read into buffers: key, memory, buffer."""


def tied_keys(destinations: Sequence[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return the keys that overlap in memory, each with all that it overlaps, also over others.

    Args:
        destinations: The tensors that are read into, and their keys; a key may have several.
    """
    tensors = [tensor for _, tensor in destinations]
    # Of tensors that have no memory, or none that can be seen, the start is 0.
    starts = np.array([data_pointer(tensor) for tensor in tensors], np.int64)
    nbytes = np.array([_extent(one) if at else 0 for at, one in zip(starts, tensors, strict=True)])
    held = np.flatnonzero(nbytes)
    held = held[starts[held].argsort(kind="stable")]
    ends = np.maximum.accumulate((starts + nbytes)[held])
    cuts = (0, *np.flatnonzero(starts[held][1:] >= ends[:-1]) + 1, len(held))
    tied: dict[str, tuple[str, ...]] = {}
    for begin, end in pairwise(cuts):
        if end - begin < 2:
            continue
        run = held[begin:end].tolist()
        views = [tensors[at] for at in run]
        # The extent of a column of a matrix has other columns, too.
        if all(view.is_contiguous() for view in views) or _share_memory(views):
            keys = tuple(dict.fromkeys([destinations[at][0] for at in sorted(run)]))
            tied.update(dict.fromkeys(keys, keys))
    return tied


def land(buffered: Buffered) -> None:
    """Put what was read into its memory; of rows that are one number there, the first."""
    for _, memory, buffer in buffered:
        for dim in reversed(range(memory.ndim)):
            if memory.shape[dim] > 1 and not memory.stride(dim):
                memory, buffer = memory.select(dim, 0), buffer.select(dim, 0)
        memory.copy_(buffer)


def settle_tied(buffered: Buffered, tied: Mapping[str, tuple[str, ...]]) -> None:
    """Put what was read into its memory; refuse what was overwritten by another key's.

    Raises:
        PlacementError: Some have one memory, but other contents.
    """
    land(buffered)
    lost: dict[tuple[str, ...], dict[str, str]] = {}
    for fqn, memory, buffer in buffered:
        if full_digest(memory) != full_digest(buffer):
            read, left = (one.flatten()[:_FEW].tolist() for one in (buffer, memory))
            lost.setdefault(tied[fqn], {})[fqn] = f"{read} of {fqn}, where {left} is left"
    faults = [unlike_fault(keys, [*fqns], next(iter(fqns.values()))) for keys, fqns in lost.items()]
    raise_faults(UNLIKE, faults)


def unlike_fault(
    keys: tuple[str, ...], lost: Sequence[str], contents: str, kind: str = "memory"
) -> Fault:
    """Return that keys have different contents in the checkpoint, and one value here.

    Args:
        keys: All that have the one value; a single one stands for several rows.
        lost: Those whose contents are not there.
        contents: As text, where they begin.
        kind: What the one value is.
    """
    what = "them" if len(keys) > 1 else "several rows of it"
    # Those that were overwritten first: a long list is cut.
    return Fault(
        format_names([*dict.fromkeys((*lost, *keys))], MAX_KEYS),
        f"this rank has one {kind} for {what}, but the checkpoint has different contents",
        (
            f"overwritten: {format_names(lost, MAX_KEYS)}",
            f"contents:    {contents}",
            "way out:     load into a model that does not tie them, for rows with one tensor per "
            "row; or leave all keys but one out of the state dict: its contents are then those of "
            "all",
        ),
    )


def memory_faults(
    state_dict: Mapping[str, Any], destinations: Sequence[tuple[str, torch.Tensor]]
) -> list[Fault]:
    """Return the tensors whose memory does not keep what is read into it."""
    faults = []
    # Each call of to_local() may make another tensor: what is read into it is lost at the end.
    values = {fqn: state_dict[fqn] for fqn, _ in destinations}
    values = {fqn: value for fqn, value in values.items() if not isinstance(value, DTensor)}
    alike = {fqn for fqn, value in values.items() if is_dtensor_like(value)}
    starts = {(fqn, data_pointer(tensor)) for fqn, tensor in destinations if fqn in alike}
    for fqn, tensor in destinations:
        is_spread = tensor.layout is torch.strided and not tensor.is_contiguous()
        if not is_spread and fqn not in alike:
            continue
        if is_spread and _share_memory([tensor]):
            headline = (
                f"several elements of this {tuple(tensor.shape)} tensor are one memory: what is "
                "read would be overwritten"
            )
            details = (
                f"found:       strides {tensor.stride()}, in elements",
                "way out:     put a copy into the state dict (tensor.clone() has memory of its "
                "own for each element), or the tensor that it was made from",
            )
            faults.append(Fault(fqn, headline, details))
        is_new = fqn in alike and (fqn, data_pointer(facts_of(values[fqn])[0])) not in starts
        if is_new and tensor.numel():
            kind = type(values[fqn]).__name__
            headline = f"to_local() of this {kind} makes a copy: what is read would be lost"
            out = "way out:     load into the tensor that it holds, and make the copy afterwards"
            faults.append(Fault(fqn, headline, (out,)))
    return faults


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two elements, of one tensor or of two, are one memory.

    >>> _share_memory([torch.ones(3).expand(2, 3)]), _share_memory([*torch.ones(4, 6).split(3, 1)])
    (True, False)
    """
    starts = list(map(data_pointer, tensors))
    first = min(starts)
    views: list[tuple[int, int, list[int], list[int]]] = []
    unit = 0
    for start, tensor in zip(starts, tensors, strict=True):
        block = tensor.itemsize  # bytes in a row; the other dims are of such blocks
        strides: list[int] = []
        sizes: list[int] = []
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride * tensor.itemsize == block:
                block *= size
            elif stride and size > 1:
                strides.append(stride * tensor.itemsize)
                sizes.append(size)
        if tensor.numel():
            views.append((start - first, block, strides, sizes))
            unit = gcd(unit, start - first, block, *strides)
    ends = [start - first + _extent(tensor) for start, tensor in zip(starts, tensors, strict=True)]
    marks = np.zeros(max(ends) // max(unit, 1), bool)
    for offset, block, strides, sizes in views:
        shape, steps = (*sizes, block // unit), (*[stride // unit for stride in strides], 1)
        np.lib.stride_tricks.as_strided(marks[offset // unit :], shape, steps)[...] = True
    return int(marks.sum()) * unit < sum(tensor.nbytes for tensor in tensors)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize if tensor.numel() else 0
