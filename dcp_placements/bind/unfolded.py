"""A state dict whose renamed values become one value per key of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import is_dtensor_like
from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault
from dcp_placements.names.flat import Path, Stacked, Unstacked
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.rules.patterns import Rules


@dataclass(slots=True)
class Unfolded:
    """A flat state dict with one value per key of the checkpoint.

    Attributes:
        placing: Takes in places, faults and rules that matched.
        rules: The user's.
        stored: The checkpoint's metadata by key on a load; None on a save.
        states: Which keys are optimizer state, by the names of the stacks or of this rank's keys.
        state_dict: The values.
        mappings: The path of each key in the nested dict.
        copies: Further paths of an object that several local keys have as one.
        shared: The name of a scalar or an object whose one value stands for several keys.
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``.
    """

    placing: Placing
    rules: Rules | None
    stored: Mapping[str, Any] | None
    states: OptimizerStates
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    copies: dict[str, list[Path]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def loading(self) -> bool:
        """Whether the values are to be filled from a checkpoint."""
        return self.stored is not None

    def add(self, fqn: str, value: Any, path: Path | None) -> None:
        """Note a value under its key in the checkpoint."""
        if fqn in self.state_dict:
            self.fault(
                fqn,
                "rename= gives this one name to a row and to another value",
                "way out:     map every key of a rank to a key of its own",
            )
        self.state_dict[fqn] = value
        if path is not None:
            self.mappings[fqn] = path

    def fault(self, fqn: str, headline: str, *details: str) -> None:
        """Note a fault."""
        self.placing.faults.append(Fault(fqn, headline, details))


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or has the attributes of a DTensor."""
    return isinstance(value, torch.Tensor) or is_dtensor_like(value)


def equal_values(one: Any, other: Any) -> bool:
    """Whether two objects are equal; tensors and arrays in them by their elements.

    >>> equal_values({"betas": [torch.ones(2)]}, {"betas": [torch.ones(2)]})
    True
    """
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(equal_values(one[k], other[k]) for k in one)
        if isinstance(one, list | tuple) and type(one) is type(other):
            return len(one) == len(other) and all(map(equal_values, one, other))
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other)
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays within other objects
        return False


def states_of(state_dict: Mapping[str, Any]) -> OptimizerStates:
    """Return which keys are optimizer state, by the names of the stacks or of this rank's keys."""
    held: dict[str, Any] = {}
    names: list[str] = []
    for fqn, value in state_dict.items():
        if type(value) is Stacked:
            held[fqn] = value.rows[0].value
            names += [row.key for row in value.rows]
        elif type(value) is Unstacked:
            held[value.name.stacked] = value.value
        else:
            held[fqn] = value
    return OptimizerStates(held, names=names)
