"""Optimizer state of which the checkpoint has none: 0, once all that is read has been read.

A parameter that was never stepped before the save has no state in the checkpoint. Where the
optimizer of the load has stepped it since (a rollback in the same process), its moments are of
another history than its weights: none of its state may stay, neither a moment nor a step count. A
load that fails has reset nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from dcp_placements._torch import ShardedTensor, is_dtensor_like, local_tensor
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault, format_names
from dcp_placements.names.flat import Path, put_at

MAX_PARAMETERS = 6
"""Parameters that a message lists."""


class Resets:
    """The optimizer state keys of one load on one rank that the checkpoint has no values for.

    Args:
        parameters: By key, its parameter, of which the checkpoint has no state at all.
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
    """

    def __init__(
        self, parameters: Mapping[str, str], state_dict: Mapping[str, Any], placing: Placing
    ) -> None:
        self._parameters = parameters
        self._state_dict = state_dict
        self._placing = placing
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
        used: dict[str, None] = {}
        for fqn, parameter in parameters.items():
            value = self._state_dict[fqn]
            tensors = self._tensors(fqn, value)
            # A fresh optimizer may have counted a step, and has moments of 0.
            if not _is_step(fqn) and any(bool(tensor.any()) for tensor in tensors):
                used[parameter] = None
            for tensor in tensors:
                tensor.zero_()
            if not tensors and isinstance(value, int | float):
                put_at(state_dict, mappings.get(fqn, (fqn,)), type(value)(0))
        return [_note(list(used))] if used else []

    def _tensors(self, fqn: str, value: Any) -> list[torch.Tensor]:
        """Return the tensors of this rank that a value consists of."""
        placed = self._placing.placed.get(fqn)
        if placed is not None:
            return [tensor.detach() for tensor in placed.tensors]
        if isinstance(value, ShardedTensor):
            return [shard.tensor.detach() for shard in value.local_shards()]
        if is_dtensor_like(value):
            return [local_tensor(value).detach()]
        return [value.detach()] if isinstance(value, torch.Tensor) else []


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
