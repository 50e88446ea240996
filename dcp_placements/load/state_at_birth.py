"""Optimizer state that a load resets: to what it is before the first step of its parameter.

The values in the state dict that is loaded into are not that. They may be of another history than
the weights; and torch's ``get_optimizer_state_dict`` makes state by a step with an lr of 0, after
which ``step`` is 1, NAdam's ``mu_product`` 0.45, ASGD's ``eta`` 0 and a copy one of other weights.

The values are those of ``names/known_states.py``. A copy is of the weight after the load. An option
is that of the parameter's group after the load: the checkpoint's where the state dict asks for it,
else this rank's own.

A checkpoint without any state of ``w``, which ASGD has trained on this rank::

    optim.state.w.step   Reset("w", value=0.0)
    optim.state.w.mu     Reset("w", value=1.0)
    optim.state.w.eta    Reset("w", option="optim.param_groups.0.lr")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from dcp_placements.names.known_states import (
    KEPT_STATES,
    ZERO_AT_BIRTH,
    CopyAtBirth,
    OptionAtBirth,
)
from dcp_placements.names.optimizer_state import ParameterGroups, State, option_key


@dataclass(frozen=True, slots=True)
class Reset:
    """What a state is set to: a number, the value of an option, or a copy of the weight.

    Attributes:
        parameter: The name of its parameter.
        value: The number.
        option: The key of the option.
        weight: The key of the weight.
        stride: Distance between the elements of the weight that a flattened copy has.
        stays_if_stepped: Whether state of a parameter that was stepped on this rank stays: the
            checkpoint lacks its weight, too, which stays as well.
    """

    parameter: str
    value: float = 0.0
    option: str | None = None
    weight: str | None = None
    stride: int = 1
    stays_if_stepped: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether it is 0, as a moment is."""
        return not self.value and self.option is None and self.weight is None


def reset_of(
    state: State,
    names: Set[str],
    value: Any,
    values: Mapping[str, Any],
    groups: ParameterGroups,
    weights: Sequence[str],
    tensors: Callable[[str], Sequence[torch.Tensor]],
    weights_beside: Callable[[str, str], Sequence[torch.Tensor]],
) -> Reset | None:
    """Return what optimizer state is reset to; None where that is not known.

    Args:
        state: What its key says.
        names: The names of all state that the rank has of its parameter.
        value: The rank's own value of the state.
        values: All that the rank has, by key.
        groups: The parameters in parameter groups.
        weights: The keys on this rank that its parameter may have.
        tensors: Returns the local tensors of a key.
        weights_beside: Returns the weight of each of them, given the keys of state and weight; none
            where these are not known.
    """

    def option(name: str) -> tuple[str | None, Any]:
        key = option_key(groups, state, name)
        return key, None if key is None else values.get(key)

    of_name = [kept for kept in KEPT_STATES if state.name in kept.born and kept.is_all(names)]
    matching = [kept for kept in of_name if not kept.option or option(kept.option)[1] is not None]
    if not (matching or state.name in ZERO_AT_BIRTH) or isinstance(
        value, bool | str | list | tuple
    ):
        return None
    born = matching[0].born[state.name] if matching else 0.0

    match born:
        case OptionAtBirth(name):
            key, own = option(name)
            is_number = isinstance(own, int | float) or getattr(own, "shape", None) == ()
            return Reset(state.parameter, option=key) if is_number else None
        case CopyAtBirth(name):
            own = option(name)[1]
            stride = own if isinstance(own, int) else 1
            if len(weights) != 1:
                return None
            states, beside = tensors(state.key), weights_beside(state.key, weights[0])
            fits = [
                copy.shape == weight.shape or copy.shape == (ceil(weight.numel() / stride),)
                for copy, weight in zip(states, beside, strict=False)
            ]
            is_known = fits and all(fits) and len(states) == len(beside)
            return Reset(state.parameter, weight=weights[0], stride=stride) if is_known else None
        case _ if state.name == "momentum_buffer" and option("dampening")[1]:
            return None
        case _:
            return Reset(state.parameter, born)


def copy_of(weight: torch.Tensor, state: torch.Tensor, stride: int) -> torch.Tensor:
    """Return what a copy of a weight has, in the shape of the state."""
    return weight if weight.shape == state.shape else weight.flatten()[::stride]


def as_number(value: float, like: int | float) -> int | float:
    """Return a number of the type of another one; a fraction is no integer.

    >>> as_number(4.0, 1), as_number(0.5, 1)
    (4, 0.5)
    """
    return int(value) if isinstance(like, int) and float(value).is_integer() else float(value)
