"""Destinations that overlap in memory: what was read into each must be there when all are read.

A model that ties its embedding and its head has one memory under two keys. If the checkpoint has
different tensors under the two, the one that is read last would stay. So each part is digested when
it was read, and again in memory when all parts were read: where the digests differ, the part was
overwritten. This holds for equal views, for views that overlap in part, and for any stored chunks.

A tensor of which several elements are one memory, as ``expand`` makes it, is refused before that.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from dcp_placements._torch import ReadItem
from dcp_placements.bind.aliases import data_pointers
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, format_names, raise_faults
from dcp_placements.load.request import Group
from dcp_placements.storage.hashing import full_digest

Ints = npt.NDArray[np.int64]

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
        self._direct: ReadItem | None = None
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._digests: list[tuple[str, torch.Tensor, bytes | None]] = []

    def expect(self, items: Iterable[ReadItem]) -> None:
        """Take what will be read."""
        if self.groups:
            self._unread = sum(item.dest_index.fqn in self.groups for item in items)

    def target(self, item: ReadItem, memory: torch.Tensor) -> torch.Tensor:
        """Return where an item is read to: its memory, or a buffer while another one is read."""
        if item.dest_index.fqn not in self.groups:
            return memory
        with self._lock:
            if self._direct is None or self._direct is item:
                self._direct = item
                return memory
        return torch.empty_like(memory)

    def take(self, item: ReadItem, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Take in that an item was read.

        Args:
            item: The item.
            memory: Its destination.
            tensor: What ``target`` returned for it.

        Raises:
            PlacementError: It was the last one, and some were overwritten with other contents.
        """
        memory = memory.detach()
        digest = full_digest(tensor)
        with self._lock:
            if tensor.data_ptr() == memory.data_ptr():
                self._direct = None
            else:
                self._waiting.append((memory, tensor.detach()))
            self._digests.append((item.dest_index.fqn, memory, digest))
            self._unread -= 1
            if self._direct is None or not self._unread:
                for target, buffer in self._waiting:
                    target.copy_(buffer)
                self._waiting.clear()
            if not self._unread:
                self._check()

    def _check(self) -> None:
        overwritten = {
            fqn: None for fqn, memory, digest in self._digests if full_digest(memory) != digest
        }
        self._digests.clear()
        lost: dict[tuple[str, ...], list[str]] = {}
        for fqn in overwritten:
            lost.setdefault(self.groups[fqn], []).append(fqn)
        raise_faults(
            "tensors of one memory cannot be loaded",
            [self._fault(keys, fqns) for keys, fqns in lost.items()],
        )

    def _fault(self, keys: tuple[str, ...], lost: list[str]) -> Fault:
        what = "them" if len(keys) > 1 else "several rows of it"
        # Those that were overwritten first: a long list is cut.
        ordered = [*lost, *(fqn for fqn in keys if fqn not in lost)]
        return Fault(
            format_names(ordered, MAX_KEYS),
            f"this rank has one memory for {what}, but the checkpoint has different contents",
            (
                f"overwritten: {format_names(lost, MAX_KEYS)}",
                "likely:      this model ties what the model that was saved did not",
                "way out:     load into a model that does not tie them; or leave all keys but one "
                "out of the state dict: its contents are then those of all",
            ),
        )


def overlaps_of(groups: Iterable[Group], placing: Placing, excluded: Container[str]) -> Overlaps:
    """Return the keys whose tensors overlap in memory.

    Args:
        groups: What is read.
        placing: The tensors' places.
        excluded: Keys that are not read into their own memory.
    """
    fqns, tensors = _destinations(groups, placing)
    # Of tensors that have no memory, or none that can be seen, both are 0.
    starts = data_pointers(tensors)
    extents = [
        extent(tensor) if start and fqn not in excluded else 0
        for fqn, tensor, start in zip(fqns, tensors, starts, strict=True)
    ]
    overlapping: dict[str, tuple[str, ...]] = {}
    for run in _runs(np.array(starts, np.int64), np.array(extents, np.int64)):
        keys = tuple(dict.fromkeys([fqns[at] for at in run]))
        overlapping.update(dict.fromkeys(keys, keys))
    return Overlaps(overlapping)


def _destinations(
    groups: Iterable[Group], placing: Placing
) -> tuple[list[str], list[torch.Tensor]]:
    """Return the tensors that are read into, and the key of each; a key may have several."""
    fqns: list[str] = []
    tensors: list[torch.Tensor] = []
    for group in groups:
        if group.placed is not None and group.placed.parts:
            for fqn in group.fqns:
                parts = placing.placed[fqn].parts
                fqns += [fqn] * len(parts)
                tensors += parts
        elif group.tensors:
            fqns += group.fqns
            tensors += group.tensors
    return fqns, tensors


def self_overlap_faults(groups: Iterable[Group], placing: Placing) -> list[Fault]:
    """Return the tensors of which several elements are one memory.

    Args:
        groups: What is read.
        placing: The tensors' places.
    """
    return [
        Fault(
            fqn,
            f"several elements of this {tuple(tensor.shape)} tensor are one memory: what is read "
            "would be overwritten",
            (
                f"found:       strides {tensor.stride()}, in elements",
                "likely:      it was made by expand(), unfold() or as_strided()",
                "way out:     put a copy into the state dict (tensor.clone() has memory of its "
                "own for each element), or the tensor that it was made from",
            ),
        )
        for fqn, tensor in zip(*_destinations(groups, placing), strict=True)
        if tensor.layout is torch.strided and not tensor.is_contiguous() and _repeats(tensor)
    ]


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor are one memory.

    >>> [_repeats(t) for t in (torch.ones(3).expand(2, 3), torch.ones(2, 3).t()[1:])]
    [True, False]
    """
    dims = [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1]
    if not tensor.numel() or not dims:
        return False
    if min(dims)[0] == 0:
        return True
    last = 0
    for stride, size in sorted(dims):
        if stride <= last:
            break
        last += (size - 1) * stride
    else:
        return False
    # Dims may interleave without meeting, as of sizes (2, 2) and strides (2, 3): all are marked.
    strides, sizes = zip(*dims, strict=True)
    marks = np.zeros(1 + sum((size - 1) * stride for stride, size in dims), bool)
    np.lib.stride_tricks.as_strided(marks, sizes, strides)[...] = True
    return int(marks.sum()) < tensor.numel()


def _runs(starts: Ints, extents: Ints) -> list[list[int]]:
    """Return the positions of spans that overlap, directly or over others, in ascending order."""
    held = np.flatnonzero(extents)
    order = held[np.argsort(starts[held], kind="stable")]
    starts = starts[order]
    stops = np.maximum.accumulate(starts + extents[order])
    begins = starts[1:] >= stops[:-1]
    if begins.all():
        return []
    parts = np.split(order, np.flatnonzero(begins) + 1)
    return [sorted(part.tolist()) for part in parts if len(part) > 1]


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last.

    The columns of a matrix lie within the extent of others. They are then compared without need.
    """
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize
