"""Optimizer state that a load resets: to what it is before the first step of its parameter.

The values in the state dict that is loaded into are not that. They may be of another history than
the weights; and torch's ``get_optimizer_state_dict`` makes state by a step with an lr of 0, after
which ``step`` is 1, NAdam's ``mu_product`` 0.45, ASGD's ``eta`` 0 and a copy one of other weights.

The values come from where the optimizers make their state:

| optimizer | state at birth |
| --- | --- |
| all of torch.optim (``torch/optim/*.py``, where ``len(state) == 0``) | 0, except the following |
| torch.optim.NAdam | ``mu_product`` 1 |
| torch.optim.ASGD | ``mu`` 1, ``eta`` the lr |
| torch.optim.Rprop | ``step_size`` the lr |
| torch.optim.Adagrad | ``sum`` the option ``initial_accumulator_value`` |
| torch.optim.SGD | ``momentum_buffer`` none; 0 is the same where ``dampening`` is 0 |
| Schedule-Free (``schedulefree``) | ``z`` the weight, ``exp_avg_sq`` 0 |
| Prodigy (``prodigyopt``) | ``p0`` every ``slice_p``-th element of the weight, ``s`` 0 |
| D-Adaptation (``dadaptation``) | ``x0``, ``z`` the weight, ``s``, ``sk`` 0, ``alphak`` 1e-6 |
| FusedAdam of Transformer Engine | ``master_param`` the weight |
| Adafactor of Transformers and fairseq, CAME | rows, columns and ``RMS`` 0 |
| AdEMAMix, NorMuon | 0 |
| Yogi (``torch_optimizer``) | moments the option ``initial_accumulator`` |
| RMSpropTF of timm | ``square_avg`` 1, the rest 0 |

What is not 0 is known by all that an optimizer keeps of a parameter, not by one name: ``mu`` beside
``step`` alone is not ASGD's. Any other state is not known, and is not reset.

A copy is of the weight after the load. An option is that of the parameter's group after the load:
the checkpoint's where the state dict asks for it, else this rank's own.

A checkpoint without any state of ``w``, which ASGD has trained on this rank::

    optim.state.w.step   Reset("w", value=0.0)
    optim.state.w.mu     Reset("w", value=1.0)
    optim.state.w.eta    Reset("w", option="optim.param_groups.0.lr")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch

from dcp_placements.names.optimizer_state import ParameterGroups, State, option_key

STEP = "step"


class _Option(NamedTuple):
    """The value of an option of the parameter's group."""

    name: str


class _Copy(NamedTuple):
    """The weight, or where it is flattened every so many elements of it."""

    stride: str = "slice_p"


_ZERO = frozenset(
    [
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "square_avg",
        "acc_delta",
        "grad_avg",
        "momentum_buffer",
        "ax",
        "prev",
        "row_var",
        "col_var",
        "variance",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "RMS",
        "exp_avg_res_row",
        "exp_avg_res_col",
        "exp_avg_fast",
        "exp_avg_slow",
        "second_momentum_buffer",
        "s",
        "sk",
    ]
)
"""State that is 0 at birth, of each optimizer that ``_KEPT`` does not name."""


class _Kept(NamedTuple):
    """What an optimizer keeps of a parameter, where not all of it is 0 at birth.

    Attributes:
        born: The state that is not 0 at birth, by name.
        zeros: The names of the state that is 0.
        seldom: The names of state that some options of the optimizer add.
        option: An option that only this optimizer has, where others keep the same names.
    """

    born: Mapping[str, float | _Option | _Copy]
    zeros: frozenset[str] = frozenset()
    seldom: frozenset[str] = frozenset()
    option: str = ""

    def is_all(self, names: Set[str]) -> bool:
        """Whether names are those of one parameter's state."""
        return names - self.seldom == self.born.keys() | self.zeros


_KEPT = (
    _Kept({"mu_product": 1.0}, frozenset({STEP, "exp_avg", "exp_avg_sq"})),  # NAdam
    _Kept({"mu": 1.0, "eta": _Option("lr")}, frozenset({STEP, "ax"})),  # ASGD
    _Kept({"step_size": _Option("lr")}, frozenset({STEP, "prev"})),  # Rprop
    _Kept({"sum": _Option("initial_accumulator_value")}, frozenset({STEP})),  # Adagrad
    _Kept({"z": _Copy()}, seldom=frozenset({"exp_avg_sq"})),  # Schedule-Free
    _Kept({"p0": _Copy()}, frozenset({STEP, "s", "exp_avg_sq"}), frozenset({"exp_avg"})),  # Prodigy
    _Kept({"x0": _Copy(), "z": _Copy()}, frozenset({"s"})),  # D-Adaptation by SGD
    _Kept({"x0": _Copy(), "alphak": 1e-6}, frozenset({"sk"})),  # by Adagrad
    _Kept({"master_param": _Copy()}, frozenset({"exp_avg", "exp_avg_sq"})),  # FusedAdam
    _Kept(  # Yogi
        dict.fromkeys(("exp_avg", "exp_avg_sq"), _Option("initial_accumulator")),
        frozenset({STEP}),
        option="initial_accumulator",
    ),
    _Kept(  # RMSpropTF of timm
        {"square_avg": 1.0},
        seldom=frozenset({STEP, "momentum_buffer", "grad_avg"}),
        option="lr_in_momentum",
    ),
)


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
    """

    def option(name: str) -> tuple[str | None, Any]:
        key = option_key(groups, state, name)
        return key, None if key is None else values.get(key)

    of_name = [kept for kept in _KEPT if state.name in kept.born and kept.is_all(names)]
    matching = [kept for kept in of_name if not kept.option or option(kept.option)[1] is not None]
    if not (matching or state.name in _ZERO) or isinstance(value, bool | str | list | tuple):
        return None
    born = matching[0].born[state.name] if matching else 0.0

    match born:
        case _Option(name):
            key, own = option(name)
            is_number = isinstance(own, int | float) or getattr(own, "shape", None) == ()
            return Reset(state.parameter, option=key) if is_number else None
        case _Copy(name):
            own = option(name)[1]
            stride = own if isinstance(own, int) else 1
            if len(weights) != 1:
                return None
            pairs = zip(*map(tensors, (state.key, weights[0])), strict=False)
            fits = [
                copy.shape == weight.shape or copy.shape == (ceil(weight.numel() / stride),)
                for copy, weight in pairs
            ]
            is_known = fits and all(fits)
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
