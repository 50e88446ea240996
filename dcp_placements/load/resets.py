"""Optimizer state of which the checkpoint has none: 0, once all that is read has been read.

A parameter that was never stepped before the save has no state in the checkpoint. Where the
optimizer of the load has stepped it since (a rollback in the same process), its moments are of
another history than its weights: none of its state may stay, neither a moment nor a step count. A
load that fails has reset nothing. Memory that was read under another key, as that of tied
parameters or of one ``step`` for all, keeps what was read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import ShardedTensor, is_dtensor_like, local_tensor
from dcp_placements.bind.aliases import data_pointers
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, format_names
from dcp_placements.load.overlaps import extent
from dcp_placements.load.request import Group
from dcp_placements.names.flat import Path, put_at
from dcp_placements.storage.hashing import full_digest

MAX_PARAMETERS = 6
"""Parameters that a message lists."""


class Resets:
    """The optimizer state keys of one load on one rank that the checkpoint has no values for.

    Args:
        parameters: By key, its parameter, of which the checkpoint has no state at all.
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        groups: The keys that are read.
    """

    def __init__(
        self,
        parameters: Mapping[str, str],
        state_dict: Mapping[str, Any],
        placing: Placing,
        groups: Sequence[Group] = (),
    ) -> None:
        self._parameters = parameters
        self._state_dict = state_dict
        self._placing = placing
        self._groups = groups
        self._unread = 0
        # Readers may call from several threads.
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def expect(self, items: int) -> None:
        """Take how many items will be read."""
        self._unread = items

    def are_due(self) -> bool:
        """Take in that an item was read; return whether it was the last one."""
        with self._lock:
            self._unread -= 1
            return not self._unread

    def apply(self, state_dict: dict[str, Any], mappings: Mapping[str, Path]) -> list[Fault]:
        """Reset the state, once; return a note if some of it was other than 0.

        Args:
            state_dict: The user's, nested; takes in numbers.
            mappings: Where each key stands in it.
        """
        with self._lock:
            parameters, self._parameters = self._parameters, {}
        if not parameters:
            return []
        read = _Memory([t for g in self._groups for fqn in g.fqns for t in self._tensors(fqn)])
        used: dict[str, None] = {}
        for fqn, parameter in parameters.items():
            value = self._state_dict[fqn]
            tensors = self._tensors(fqn)
            changed = [_zero(tensor, read.meeting(tensor)) for tensor in tensors]
            # A fresh optimizer may have counted a step, and has moments of 0.
            if any(changed) and not _is_step(fqn):
                used[parameter] = None
            if not tensors and isinstance(value, int | float):
                put_at(state_dict, mappings.get(fqn, (fqn,)), type(value)(0))
        return [_note(list(used))] if used else []

    def _tensors(self, fqn: str) -> list[torch.Tensor]:
        """Return the tensors of this rank that a value consists of."""
        value = self._state_dict[fqn]
        placed = self._placing.placed.get(fqn)
        if placed is not None:
            return [tensor.detach() for tensor in placed.tensors]
        if isinstance(value, ShardedTensor):
            return [shard.tensor.detach() for shard in value.local_shards()]
        if is_dtensor_like(value):
            return [local_tensor(value).detach()]
        return [value.detach()] if isinstance(value, torch.Tensor) else []


class _Memory:
    """The memory of tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        starts = data_pointers(tensors)
        sizes = [extent(each) if at else 0 for each, at in zip(tensors, starts, strict=True)]
        self._tensors = tensors
        self._starts = np.array(starts, np.int64)
        self._stops = self._starts + np.array(sizes, np.int64)

    def meeting(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors whose memory may overlap that of another tensor."""
        (start,) = data_pointers([tensor])
        stop = start + extent(tensor) if start else 0
        met = np.flatnonzero((self._starts < stop) & (self._stops > start))
        return [self._tensors[at] for at in met.tolist()]


def _zero(tensor: torch.Tensor, read: Sequence[torch.Tensor]) -> bool:
    """Set a tensor to 0, except for the memory of those read; return whether that changed it."""
    if not bool(tensor.any()):
        return False
    before = full_digest(tensor) if read else None
    values = [(each, each.clone()) for each in read]
    tensor.zero_()
    for each, value in values:
        each.copy_(value)
    return not read or full_digest(tensor) != before


def _is_step(fqn: str) -> bool:
    return fqn.rpartition(".")[2] == "step"


def _note(parameters: list[str]) -> Fault:
    count = len(parameters)
    return Fault(
        "optimizer state",
        f"that of {count} parameter{'' if count == 1 else 's'} was reset to 0: the checkpoint has "
        "none",
        (
            f"parameters:  {format_names(parameters, MAX_PARAMETERS)}",
            "likely:      they were stepped for the first time after the checkpoint was saved",
            "reason:      moments and step counts of later steps do not belong to the weights that "
            "were read",
        ),
    )
