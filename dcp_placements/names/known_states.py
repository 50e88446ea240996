"""The state of known optimizers by its name, and what it is before the first step of its parameter.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

STEP = "step"


class OptionAtBirth(NamedTuple):
    """The value of an option of the parameter's group."""

    name: str


class CopyAtBirth(NamedTuple):
    """The weight, or where it is flattened every so many elements of it."""

    stride: str = "slice_p"


ZERO_AT_BIRTH = frozenset(
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
"""State that is 0 at birth, of each optimizer that ``KEPT_STATES`` does not name."""


class KeptStates(NamedTuple):
    """What an optimizer keeps of a parameter, where not all of it is 0 at birth.

    Attributes:
        born: The state that is not 0 at birth, by name.
        zeros: The names of the state that is 0.
        seldom: The names of state that some options of the optimizer add.
        option: An option that only this optimizer has, where others keep the same names.
    """

    born: Mapping[str, float | OptionAtBirth | CopyAtBirth]
    zeros: frozenset[str] = frozenset()
    seldom: frozenset[str] = frozenset()
    option: str = ""

    def is_all(self, names: Set[str]) -> bool:
        """Whether names are those of one parameter's state."""
        return names - self.seldom == self.born.keys() | self.zeros


KEPT_STATES = (
    KeptStates({"mu_product": 1.0}, frozenset({STEP, "exp_avg", "exp_avg_sq"})),  # NAdam
    KeptStates({"mu": 1.0, "eta": OptionAtBirth("lr")}, frozenset({STEP, "ax"})),  # ASGD
    KeptStates({"step_size": OptionAtBirth("lr")}, frozenset({STEP, "prev"})),  # Rprop
    KeptStates({"sum": OptionAtBirth("initial_accumulator_value")}, frozenset({STEP})),  # Adagrad
    KeptStates({"z": CopyAtBirth()}, seldom=frozenset({"exp_avg_sq"})),  # Schedule-Free
    KeptStates(
        {"p0": CopyAtBirth()}, frozenset({STEP, "s", "exp_avg_sq"}), frozenset({"exp_avg"})
    ),  # Prodigy
    KeptStates({"x0": CopyAtBirth(), "z": CopyAtBirth()}, frozenset({"s"})),  # D-Adaptation by SGD
    KeptStates({"x0": CopyAtBirth(), "alphak": 1e-6}, frozenset({"sk"})),  # by Adagrad
    KeptStates({"master_param": CopyAtBirth()}, frozenset({"exp_avg", "exp_avg_sq"})),  # FusedAdam
    KeptStates(  # Yogi
        dict.fromkeys(("exp_avg", "exp_avg_sq"), OptionAtBirth("initial_accumulator")),
        frozenset({STEP}),
        option="initial_accumulator",
    ),
    KeptStates(  # RMSpropTF of timm
        {"square_avg": 1.0},
        seldom=frozenset({STEP, "momentum_buffer", "grad_avg"}),
        option="lr_in_momentum",
    ),
)

KNOWN_STATES = ZERO_AT_BIRTH.union(*[kept.born for kept in KEPT_STATES])
"""The names of all this state: with the shape of its parameter it is cut as that is."""
