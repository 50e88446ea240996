"""Optimizer state follows its parameter, in every form that torch produces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_with_path

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.optimizer_state import parameters_of, stateless_parameters
from fakes import FakeDTensor, World, cut

EXPERTS, RANKS = 4, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.arange(EXPERTS * 3 * 5.0).reshape(EXPERTS, 3, 5) / 50)
        self.bias = nn.Parameter(torch.arange(EXPERTS * 5.0).reshape(EXPERTS, 5) / 20)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.norm = nn.Parameter(torch.arange(5.0) / 5)


def trained(steps: int = 2) -> tuple[Model, torch.optim.AdamW]:
    """Return a model and its AdamW; every element of the moments differs from every other."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for parameter in model.parameters():
            grad = torch.arange(float(parameter.numel())).reshape(parameter.shape)
            parameter.grad = (grad + step) / parameter.numel() + parameter.dim()
        optimizer.step()
    return model, optimizer


def nested(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def flattened(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }


def side_by_side(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        **get_optimizer_state_dict(model, optimizer, options=options),
    }


def in_lists(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Several optimizers, as trainers with one per group of parameters keep them."""
    whole = get_optimizer_state_dict(model, optimizer)
    return {
        "app": {"model": get_model_state_dict(model)},
        "optimizers": [{"state": {k: v}} for k, v in whole["state"].items()],
    }


FORMS: list[Callable[..., dict[str, Any]]] = [nested, flattened, side_by_side, in_lists]


def flat(state_dict: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return dict(flatten_state_dict(state_dict)[0])


def is_of_experts(path: Any) -> bool:
    return any("experts" in str(key) for key in path)


def part_of(state_dict: dict[str, Any], rank: int, *, fill: float | None = None) -> dict[str, Any]:
    """Return what ``rank`` of ``RANKS`` holds: its rows of all that is of experts."""

    def held(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        whole = value.detach() if fill is None else torch.full_like(value, fill)
        if not whole.dim() or not is_of_experts(path):
            return whole.clone()
        return cut(whole, [Shard(0)], [RANKS], [rank])

    result: dict[str, Any] = tree_map_with_path(held, state_dict)
    return result


def rules(rank: int, pattern: str = "experts.*") -> PlacementRules:
    mesh = World(RANKS).mesh(rank, ep=RANKS)
    return PlacementRules({pattern: CheckpointPlacement(mesh, {"ep": Shard(0)})})


def read_by_torch(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = tree_map_with_path(
        lambda _, v: torch.full_like(v, -3) if isinstance(v, torch.Tensor) else v, like
    )
    dcp.load(read, checkpoint_id=path, no_dist=True)
    return read


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> int:
    """Compare two state dicts bit for bit; return the number of tensors."""
    one, other = flat(found), flat(expected)
    assert set(one) == set(other)
    tensors = 0
    for key, value in other.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(one[key], value), key
            tensors += 1
        else:
            assert one[key] == value, key
    return tensors


@pytest.mark.parametrize("form", FORMS)
def test_moments_are_saved_whole_and_loaded_by_rank_in_every_form(
    form: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    whole = form(*trained())
    world = World(RANKS)
    world.save(
        tmp_path,
        lambda rank: part_of(whole, rank),
        lambda rank: PlacementSavePlanner(rules(rank)),
    )
    # Three parameters, with a step and two moments each.
    assert assert_equal(read_by_torch(tmp_path, whole), whole) >= 3 + 3 * 3
    loaded = world.load(
        tmp_path,
        lambda rank: part_of(whole, rank, fill=-5),
        lambda rank: PlacementLoadPlanner(rules(rank)),
    )
    for rank in range(RANKS):
        assert_equal(loaded[rank], part_of(whole, rank))


@pytest.mark.parametrize("form", FORMS)
def test_one_pattern_names_a_parameter_and_its_moments_in_every_form(
    form: Callable[..., dict[str, Any]],
) -> None:
    pattern = PlacementRules({"experts.w1": None})
    matched = {key for key in flat(form(*trained())) if pattern.pattern_of(key)}
    tails = {key[key.index("experts.w1") + len("experts.w1") :] for key in matched}
    assert {"", ".exp_avg", ".exp_avg_sq", ".step"} <= tails
    assert not any("bias" in key or "norm" in key for key in matched)


@pytest.mark.parametrize("form", FORMS)
def test_steps_and_hyperparameters_are_left_alone(
    form: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    whole = form(*trained(3))
    asked: set[str] = set()

    def asking(fqn: str, tensor: Any) -> None:
        asked.add(fqn)

    dcp.save(whole, checkpoint_id=tmp_path, planner=PlacementSavePlanner(asking), no_dist=True)
    asked_for = {key.rpartition(".")[2] for key in asked}
    assert {"exp_avg", "exp_avg_sq"} <= asked_for
    assert not asked_for & {"step", "lr", "betas", "eps", "params"}
    read = flat(read_by_torch(tmp_path, whole))
    steps = {key: float(value) for key, value in read.items() if key.endswith(".step")}
    assert len(steps) == 3
    assert set(steps.values()) == {3.0}


class State:
    """A Stateful, as applications wrap a model and its optimizer."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_stateful_wrappers_are_saved_and_loaded_through_their_own_methods(tmp_path: Path) -> None:
    whole = nested(*trained())
    dcp.save(
        {"app": State(whole)},
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(PlacementRules({"experts.*": None})),
        no_dist=True,
    )
    assert_equal(read_by_torch(tmp_path, {"app": whole}), {"app": whole})
    # One process may load what is one rank's part of a larger world.
    app = State(part_of(whole, 0, fill=-5))
    dcp.load(
        {"app": app}, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(rules(0)), no_dist=True
    )
    assert app.loaded is not None
    assert_equal(app.loaded, part_of(whole, 0))


def test_real_optimizer_continues_from_loaded_moments(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save(
        nested(model, optimizer),
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(),
        no_dist=True,
    )
    other = Model()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    state = nested(other, fresh)
    dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    set_optimizer_state_dict(other, fresh, optim_state_dict=state["optim"])
    assert_equal(nested(other, fresh), nested(model, optimizer))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = two.grad = torch.ones_like(one)
    optimizer.step()
    fresh.step()
    assert_equal(nested(other, fresh), nested(model, optimizer))


def fsdp_state(world: World, rank: int, whole: torch.Tensor, fill: float | None) -> Any:
    """Return a parameter over ep and fsdp as DTensor, its moments plain, and its step."""
    mesh = world.mesh(rank, ep=2, fsdp=2)
    position = (mesh.get_coordinate() or ())[0]

    def local(source: torch.Tensor) -> FakeDTensor:
        if fill is not None:
            source = torch.full_like(source, fill)
        part = cut(source, [Shard(0)], [2], [position])
        return FakeDTensor.distribute(part, mesh["fsdp"], [Shard(1)])

    return {
        "model": {"layers": [{"experts": {"w1": local(whole)}}]},
        "optim": {
            "state": {
                "layers.0.experts.w1": {
                    "exp_avg": local(whole + 1000).to_local(),
                    "max_exp_avg_sq": local(whole + 2000).to_local(),
                    "step": torch.tensor(7.0 if fill is None else -1.0),
                    "row_means": torch.full((3,), 5.0),
                }
            }
        },
    }


def test_plain_moments_of_the_local_shape_take_the_parameter_s_layout(tmp_path: Path) -> None:
    """Hand-written optimizers keep plain moments of DTensor parameters."""
    whole = torch.arange(4 * 5 * 3.0).reshape(4, 5, 3)
    world = World(4)

    def ep_rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        # Of the moments nothing is said: the pattern names the parameter itself only.
        return PlacementRules(
            {
                "state.**.row_means": None,
                "model.layers.0.experts.w1": CheckpointPlacement(mesh, {"ep": Shard(0)}),
            }
        )

    planners = world.save(
        tmp_path,
        lambda rank: fsdp_state(world, rank, whole, None),
        lambda rank: PlacementSavePlanner(ep_rules(rank)),
    )
    prefix = "optim.state.layers.0.experts.w1."
    assert isinstance(planners[0], PlacementSavePlanner)
    assert planners[0].report.keys[prefix + "exp_avg"].shape == (4, 5, 3)
    assert planners[0].report.keys[prefix + "step"].shape == ()
    assert planners[0].report.keys[prefix + "row_means"].shape == (3,)
    read = {
        "model.layers.0.experts.w1": torch.zeros(4, 5, 3),
        prefix + "exp_avg": torch.zeros(4, 5, 3),
        prefix + "max_exp_avg_sq": torch.zeros(4, 5, 3),
        prefix + "step": torch.tensor(0.0),
    }
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["model.layers.0.experts.w1"], whole)
    assert torch.equal(read[prefix + "exp_avg"], whole + 1000)
    assert torch.equal(read[prefix + "max_exp_avg_sq"], whole + 2000)
    assert float(read[prefix + "step"]) == 7.0

    loaded = world.load(
        tmp_path,
        lambda rank: fsdp_state(world, rank, whole, -1.0),
        lambda rank: PlacementLoadPlanner(ep_rules(rank)),
    )
    for rank in range(4):
        expected = fsdp_state(world, rank, whole, None)["optim"]["state"]["layers.0.experts.w1"]
        found = loaded[rank]["optim"]["state"]["layers.0.experts.w1"]
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (rank, name)


@pytest.mark.parametrize(
    ("fqn", "parameters"),
    [
        ("optim.state.layers.0.w.exp_avg", ["layers.0.w"]),
        ("state.layers.0.w.exp_avg", ["layers.0.w"]),
        ("optimizers.1.state.layers.0.w.exp_avg", ["layers.0.w"]),
        ("optim.state.state.w.exp_avg", ["state.w", "w"]),
        ("optim.state.mamba.state.w.exp_avg", ["mamba.state.w", "w"]),
        ("model.layers.0.w", []),
        ("model.real_state.w.b", []),
        ("optim.param_groups.layers.0.w.lr", []),
        ("state.step", []),
        ("state", []),
    ],
)
def test_parameter_of_a_state_key(fqn: str, parameters: list[str]) -> None:
    assert parameters_of(fqn) == parameters


@pytest.mark.parametrize("form", [nested, flattened, side_by_side])
def test_parameters_without_state_are_found_in_every_form(
    form: Callable[..., dict[str, Any]],
) -> None:
    """A frozen or unused parameter has no moments until its first step."""
    model, optimizer = trained()
    assert stateless_parameters(flat(form(model, optimizer))) == []
    state_dict = flat(form(model, optimizer))
    without = {k: v for k, v in state_dict.items() if "state.experts.bias." not in k}
    assert len(without) == len(state_dict) - 3
    assert stateless_parameters(without) == ["experts.bias"]
