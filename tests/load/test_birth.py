"""State that a checkpoint lacks is what each optimizer makes before its first step.

The oracle is the optimizer itself, with the function that updates parameters taken out: its
``step()`` then makes the state, and leaves it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_same, refusal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner, Stack


@dataclass(frozen=True)
class Kind:
    """An optimizer of torch.

    Attributes:
        module: In torch.optim, with the function that updates parameters, of the module's name.
        name: Its class.
        options: Beside the lr.
    """

    module: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(
            parameters, lr=lr, **self.options
        )
        return made

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        module = import_module(f"torch.optim.{self.module}")
        function = self.module.removeprefix("_")
        with mock.patch.object(module, function):
            yield

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, self.options)])


KINDS = [
    Kind("adadelta", "Adadelta"),
    Kind("_adafactor", "Adafactor"),
    Kind("adagrad", "Adagrad", {"initial_accumulator_value": 0.25}),
    Kind("adam", "Adam", {"weight_decay": 0.1}),
    Kind("adam", "AdamW", {"amsgrad": True}),
    Kind("adamax", "Adamax"),
    Kind("asgd", "ASGD"),
    Kind("nadam", "NAdam"),
    Kind("radam", "RAdam"),
    Kind("rmsprop", "RMSprop", {"momentum": 0.9, "centered": True}),
    Kind("rprop", "Rprop"),
    Kind("_muon", "Muon"),
]
SGD = Kind("sgd", "SGD", {"momentum": 0.9})
Forms = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])


class Model(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.embed = nn.Parameter(arange(4, 3, start=start) / 10)
        self.head = nn.Parameter(arange(5, 4, start=start) / 20)


def stepped(model: Model, optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> None:
    for name in names:
        parameter = model.get_parameter(name)
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape)
    optimizer.step()
    optimizer.zero_grad()


def state_dict(model: Model, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    """Return what a trainer saves; state that a parameter lacks is left out."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    names = [name for name, one in model.named_parameters() if one in optimizer.state]
    if len(names) != 1:  # torch makes a dummy step where there is none
        optim = get_optimizer_state_dict(model, optimizer, options=options)
    else:
        optim = {
            f"state.{n}.{k}": one for n in names for k, one in state_of(model, optimizer, n).items()
        }
        if not flat:
            optim = {"state": {name: state_of(model, optimizer, name) for name in names}}
        whole = get_optimizer_state_dict(
            model, type(optimizer)(model.parameters(), **own(optimizer)), options=options
        )
        optim |= {key: one for key, one in whole.items() if key.startswith("param_groups")}
    return {"model": model.state_dict(), "optim": optim}


def own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer, as its class takes them."""
    known = type(optimizer).__init__.__code__.co_varnames
    group = optimizer.param_groups[0]
    return {key: one for key, one in group.items() if key in known and key != "params"}


def state_of(model: Model, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Any]:
    return dict(optimizer.state[model.get_parameter(name)])


def state_in(loaded: dict[str, Any], name: str, *, flat: bool) -> dict[str, Any]:
    optim, start = loaded["optim"], f"state.{name}."
    if not flat:
        return dict(optim["state"][name])
    return {key.removeprefix(start): one for key, one in optim.items() if key.startswith(start)}


@Forms
@pytest.mark.parametrize("steps", [0, 3], ids=["torch's dummy step", "stepped"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_m115_state_is_reset_to_what_the_optimizer_makes(
    tmp_path: Path, kind: Kind, steps: int, flat: bool
) -> None:
    saved = Model(1)
    trained = kind(saved.parameters(), lr=0.02)
    stepped(saved, trained, ("embed",))
    whole = state_dict(saved, trained, flat=flat)
    dcp.save(whole, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)

    other = Model(50)
    warm = kind(other.parameters(), lr=0.5)
    for _ in range(steps):
        stepped(other, warm, ("embed", "head"))
    found = state_dict(other, warm, flat=flat)
    planner = PlacementLoadPlanner()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(found, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    is_lacking = kind.name != "Adagrad"  # which makes its state with itself
    texts = [str(one.message) for one in caught if "was reset" in str(one.message)]
    assert len(texts) == (is_lacking and steps > 0)
    assert planner.report.stateless == (("head",) if is_lacking else ())

    fresh = kind(saved.parameters(), lr=0.02)
    with kind.without_updates():
        stepped(saved, fresh, ("embed", "head"))
    assert_same(state_in(found, "head", flat=flat), state_of(saved, fresh, "head"))
    assert_same(state_in(found, "embed", flat=flat), state_of(saved, trained, "embed"))


@Forms
def test_m115_momentum_of_sgd_begins_as_none(tmp_path: Path, flat: bool) -> None:
    """From 0, as from none, the first step makes the gradient of it, unless it is dampened."""
    saved, other = Model(1), Model(50)
    trained, warm = SGD(saved.parameters(), lr=0.02), SGD(other.parameters(), lr=0.5)
    stepped(saved, trained, ("embed",))
    stepped(other, warm, ("embed", "head"))
    whole = state_dict(saved, trained, flat=flat)
    dcp.save(whole, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    found = state_dict(other, warm, flat=flat)
    with pytest.warns(UserWarning, match="that of 1 parameter was reset"):
        dcp.load(found, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    assert not state_in(found, "head", flat=flat)["momentum_buffer"].any()


def known_state(**state: Any) -> dict[str, Any]:
    options = state.pop("options", {})
    return {
        "model": {"w": arange(4, 3, start=1), "v": arange(4, 3, start=100)},
        "optim": {"state": state, "param_groups": [{"params": ["w", "v"], **options}]},
    }


WEIGHT = arange(4, 3, start=1)
MOMENT = torch.full((4, 3), 9.0)
Kept = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""What an optimizer keeps of a parameter, what of it is not 0 at birth, and options."""
OTHERS: dict[str, Kept] = {
    "Schedule-Free": (
        {"z": MOMENT, "exp_avg_sq": MOMENT},
        {"z": WEIGHT},
        {"train_mode": True},
    ),
    "Schedule-Free by SGD": ({"z": MOMENT}, {"z": WEIGHT}, {}),
    "D-Adaptation by SGD": (
        {"z": MOMENT, "s": MOMENT, "x0": MOMENT},
        {"z": WEIGHT, "x0": WEIGHT},
        {"d0": 1e-6},
    ),
    "D-Adaptation by Adagrad": (
        {"alphak": MOMENT, "sk": MOMENT, "x0": MOMENT},
        {"alphak": torch.full((4, 3), 1e-6), "x0": WEIGHT},
        {},
    ),
    "Prodigy": (
        {"step": 1, "p0": MOMENT[:, 0], "s": MOMENT[:, 0], "exp_avg_sq": MOMENT},
        {"p0": WEIGHT.flatten()[::3]},
        {"slice_p": 3},
    ),
    "FusedAdam": (
        {"exp_avg": MOMENT, "exp_avg_sq": MOMENT, "master_param": MOMENT.double()},
        {"master_param": WEIGHT.double()},
        {},
    ),
    "Yogi": (
        {"step": 1, "exp_avg": MOMENT, "exp_avg_sq": MOMENT},
        {"exp_avg": torch.full((4, 3), 1e-3), "exp_avg_sq": torch.full((4, 3), 1e-3)},
        {"initial_accumulator": 1e-3},
    ),
    "RMSprop of timm": (
        {"square_avg": MOMENT, "momentum_buffer": MOMENT},
        {"square_avg": torch.ones(4, 3)},
        {"lr_in_momentum": True},
    ),
    "Adafactor": ({"step": 1, "exp_avg_sq_row": MOMENT[:, 0], "RMS": 9.0}, {}, {}),
    "ASGD": (
        {"step": 1, "ax": MOMENT, "mu": 9.0, "eta": 9.0},
        {"mu": 1.0, "eta": 0.02},
        {"lr": 0.02},
    ),
    "Rprop of complex numbers": (
        {"step": 1, "prev": MOMENT, "step_size": MOMENT.to(torch.complex64)},
        {"step_size": torch.full((4, 3), 0.02 + 0.02j)},
        {"lr": 0.02},
    ),
}


@pytest.mark.filterwarnings("ignore:look at this load")
@pytest.mark.parametrize("name", OTHERS)
def test_m115_state_of_other_optimizers(tmp_path: Path, name: str) -> None:
    held, wanted, options = OTHERS[name]
    saved = known_state(v={"step": 3}, options=options)
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    found = known_state(
        v={"step": 0},
        w={key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in held.items()},
        options={key: one if key == "slice_p" else 7 for key, one in options.items()},
    )
    found["model"]["w"].fill_(-1)
    dcp.load(found, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    state = found["optim"]["state"]
    zeros = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in held.items()}
    assert_same(state["w"], zeros | wanted)
    assert state["v"]["step"] == 3


def unknown_name() -> dict[str, Any]:
    return {"state1": torch.ones(4, 3), "exp_avg": torch.ones(4, 3)}


def another_shape() -> dict[str, Any]:
    return {"p0": torch.tensor(0.0), "step": 1, "s": MOMENT.clone(), "exp_avg_sq": MOMENT.clone()}


def no_lr() -> dict[str, Any]:
    return {"eta": torch.tensor(0.5), "step": 1, "ax": MOMENT.clone(), "mu": 1.0}


def mu_alone() -> dict[str, Any]:
    return {"mu": torch.tensor(0.5)}


def mu_and_step() -> dict[str, Any]:
    return {"mu": torch.tensor(0.5), "step": 1}


def a_z_of_another_optimizer() -> dict[str, Any]:
    return {"z": torch.ones(4, 3), "step": 1}


def a_text() -> dict[str, Any]:
    return {"step": "three"}


@pytest.mark.parametrize(
    "make",
    [unknown_name, another_shape, no_lr, a_text, mu_alone, mu_and_step, a_z_of_another_optimizer],
)
def test_m115_what_is_not_known_is_refused_and_stays_where_it_is_optional(
    tmp_path: Path, make: Callable[[], dict[str, Any]]
) -> None:
    saved = known_state(v={"exp_avg": arange(4, 3)})
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    name = next(iter(make()))

    def found() -> dict[str, Any]:
        return known_state(v={"exp_avg": torch.zeros(4, 3)}, w=make())

    def loaded(**options: Any) -> dict[str, Any]:
        state = found()
        planner = PlacementLoadPlanner(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        return state

    message = refusal(loaded)
    assert f"optim.state.w.{name}: " in message
    assert "before a first step is not known" in message
    state = loaded(optional=[f"optim.state.w.{name}"])["optim"]["state"]
    assert_same(state["w"][name], make()[name])
    others = {"exp_avg", "step", "ax"} & make().keys() - {name}
    assert not any(torch.as_tensor(state["w"][key]).any() for key in others)
    assert_same(state["v"], saved["optim"]["state"]["v"])


@pytest.mark.parametrize("rows", [(0,), (1,), (1, 0), (0, 1)])
def test_a_copy_is_that_of_its_own_row_of_a_stack(rows: tuple[int, ...], tmp_path: Path) -> None:
    """A frozen expert has no state, so that a rank may have the state of the second one alone."""
    whole = arange(2, 4, 3)
    groups = [{"lr": 0.1, "params": ["experts.w"]}]
    saved = {"model": {"experts.w": whole}, "optim": {"state": {}, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    names = [f"experts.{row}.w" for row in rows]
    states = {
        name: {"z": torch.full((4, 3), 9.0), "exp_avg_sq": torch.ones(4, 3)} for name in names
    }
    state: dict[str, Any] = {
        "model": {f"experts.{row}.w": torch.zeros(4, 3) for row in range(2)},
        "optim": {"state": states, "param_groups": [{"lr": 0.1, "params": names}]},
    }
    planner = PlacementLoadPlanner(rename=Stack("experts.{}", total=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    for row, name in zip(rows, names, strict=True):
        assert torch.equal(state["optim"]["state"][name]["z"], whole[row]), name


def test_m123_weights_that_optional_leaves_as_they_are_are_listed(tmp_path: Path) -> None:
    saved = {"model": {"embed": arange(4, 3)}, "rng": {"0": torch.zeros(3, dtype=torch.uint8)}}
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)

    def load(**options: Any) -> list[str]:
        state = {
            "model": {"embed": torch.zeros(4, 3), "head": torch.ones(4, 3), "bias": torch.ones(())},
            "rng": {"0": torch.zeros(3, dtype=torch.uint8), "1": torch.ones(3, dtype=torch.uint8)},
        }
        planner = PlacementLoadPlanner(**options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert set(planner.report.missing) == {"model.head", "model.bias", "rng.1"}
        return [str(one.message) for one in caught if "look at this load" in str(one.message)]

    optional = ["model.head", "model.bias", "rng"]
    (text,) = load(optional=optional)
    assert "model.head: not in the checkpoint: left as it was" in text
    assert "rng" not in text
    # On purpose: torch's own option, that and the names, or a reason.
    assert load(allow_partial_load=True) == []
    assert load(optional=optional, allow_partial_load=True) == []
    assert load(optional=optional, waive={"model.head": "new"}) == []
