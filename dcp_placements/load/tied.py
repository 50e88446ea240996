"""Destinations that overlap in memory: what was read into each must be there when all are read.

A model that ties its embedding and its head has one memory under two keys. If the checkpoint has
different tensors under the two, the one that is read last would stay. So each part is read into a
buffer of its own. When all are read they are put into memory, and a part that is not there then was
overwritten. This holds for equal views, for views that overlap in part, and for any stored chunks::

    Overlaps({"embed.weight": ("embed.weight", "head.weight"), "head.weight": (... the same)})

A tensor of which several elements are one memory, as ``expand`` makes it, is refused before that.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from math import gcd

import numpy as np
import torch
from torch.distributed.checkpoint import ReadItem

from dcp_placements.bind.checks import data_pointer
from dcp_placements.errors import Fault, format_names, raise_faults
from dcp_placements.storage.hashing import full_digest

MAX_KEYS = 6
"""Keys of one memory that a message lists."""


class Overlaps:
    """The keys of one load on one rank whose destinations overlap in memory.

    Args:
        groups: By key, all keys that overlap with it, directly or over others.
    """

    def __init__(self, groups: Mapping[str, tuple[str, ...]]) -> None:
        self.groups = groups
        self._unread = 0
        # Readers may call from several threads.
        self._lock = threading.Lock()
        self._read: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def expect(self, items: Iterable[ReadItem]) -> None:
        """Take what will be read."""
        if self.groups:
            self._unread = sum(item.dest_index.fqn in self.groups for item in items)

    def target(self, item: ReadItem, memory: torch.Tensor) -> torch.Tensor:
        """Return where an item is read to: its memory, or a buffer where that overlaps."""
        return torch.empty_like(memory) if item.dest_index.fqn in self.groups else memory

    def take(self, item: ReadItem, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Take in that an item was read.

        Args:
            item: The item.
            memory: Its destination.
            tensor: What ``target`` returned for it.

        Raises:
            PlacementError: It was the last one, and some have one memory, but other contents.
        """
        with self._lock:
            self._read.append((item.dest_index.fqn, memory.detach(), tensor.detach()))
            self._unread -= 1
            if self._unread:
                return
            read, self._read = self._read, []
        for _, target, buffer in read:
            target.copy_(buffer)
        lost: dict[tuple[str, ...], dict[str, None]] = {}
        for fqn, target, buffer in read:
            if full_digest(target) != full_digest(buffer):
                lost.setdefault(self.groups[fqn], {})[fqn] = None
        faults = [_fault(keys, [*fqns]) for keys, fqns in lost.items()]
        raise_faults("tensors of one memory cannot be loaded", faults)


def _fault(keys: tuple[str, ...], lost: list[str]) -> Fault:
    what = "them" if len(keys) > 1 else "several rows of it"
    # Those that were overwritten first: a long list is cut.
    return Fault(
        format_names([*dict.fromkeys((*lost, *keys))], MAX_KEYS),
        f"this rank has one memory for {what}, but the checkpoint has different contents",
        (
            f"overwritten: {format_names(lost, MAX_KEYS)}",
            "way out:     load into a model that does not tie them; or leave all keys but one "
            "out of the state dict: its contents are then those of all",
        ),
    )


Destinations = tuple[Sequence[str], Sequence[torch.Tensor]]
"""The tensors that are read into, and the key of each; a key may have several."""


def overlaps_of(destinations: Destinations, excluded: Container[str] = ()) -> Overlaps:
    """Return the keys whose tensors overlap in memory.

    Args:
        destinations: What is read into.
        excluded: Keys that are not read into their own memory.
    """
    fqns, tensors = destinations
    # Of tensors that have no memory, or none that can be seen, the start is 0.
    starts = list(map(data_pointer, tensors))
    held = [
        at
        for at, (fqn, tensor) in enumerate(zip(fqns, tensors, strict=True))
        if starts[at] and fqn not in excluded and tensor.numel()
    ]
    runs: list[list[int]] = []
    end = 0
    for at in sorted(held, key=starts.__getitem__):
        if starts[at] >= end:
            runs.append([])
        runs[-1].append(at)
        end = max(end, starts[at] + _extent(tensors[at]))
    overlapping: dict[str, tuple[str, ...]] = {}
    for run in runs:
        if len(run) == 1:
            continue
        views = [tensors[at] for at in run]
        # The extent of a column of a matrix has other columns, too.
        if all(view.is_contiguous() for view in views) or _share_memory(views):
            keys = tuple(dict.fromkeys([fqns[at] for at in sorted(run)]))
            overlapping.update(dict.fromkeys(keys, keys))
    return Overlaps(overlapping)


def self_overlap_faults(destinations: Destinations) -> list[Fault]:
    """Return the tensors of which several elements are one memory."""
    return [
        Fault(
            fqn,
            f"several elements of this {tuple(tensor.shape)} tensor are one memory: what is read "
            "would be overwritten",
            (
                f"found:       strides {tensor.stride()}, in elements",
                "way out:     put a copy into the state dict (tensor.clone() has memory of its "
                "own for each element), or the tensor that it was made from",
            ),
        )
        for fqn, tensor in zip(*destinations, strict=True)
        if tensor.layout is torch.strided and not tensor.is_contiguous() and _share_memory([tensor])
    ]


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
