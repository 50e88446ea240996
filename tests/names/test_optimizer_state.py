"""Optimizer state follows its parameter, in every form that torch produces."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import FILL, assert_same, blank, refusal
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_map_with_path

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
    contiguous,
)
from dcp_placements.names.optimizer_state import OptimizerStates, parameter_groups_in
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut

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


def trained() -> tuple[Model, torch.optim.AdamW]:
    """Return a model and its AdamW; every element of the moments differs from every other."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
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
        "optimizers": [
            {"state": {k: v}, "param_groups": [{"lr": 0.01, "params": [k]}]}
            for k, v in whole["state"].items()
        ],
    }


FORMS: list[Callable[..., dict[str, Any]]] = [nested, flattened, side_by_side, in_lists]


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


def read_by_torch(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = blank(like)
    dcp.load(read, checkpoint_id=path, no_dist=True)
    return read


def rules(rank: int, pattern: str = "experts.*") -> PlacementRules:
    mesh = World(RANKS).mesh(rank, ep=RANKS)
    return PlacementRules({pattern: CheckpointPlacement(mesh, {"ep": Shard(0)})})


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
    assert_same(read_by_torch(tmp_path, whole), whole)
    loaded = world.load(
        tmp_path,
        lambda rank: part_of(whole, rank, fill=-5),
        lambda rank: PlacementLoadPlanner(rules(rank)),
    )
    for rank in range(RANKS):
        assert_same(loaded[rank], part_of(whole, rank))


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
    assert_same(read_by_torch(tmp_path, {"app": whole}), {"app": whole})
    # One process may load what is one rank's part of a larger world.
    app = State(part_of(whole, 0, fill=-5))
    dcp.load(
        {"app": app}, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(rules(0)), no_dist=True
    )
    assert app.loaded is not None
    assert_same(app.loaded, part_of(whole, 0))


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
    assert_same(nested(other, fresh), nested(model, optimizer))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = two.grad = torch.ones_like(one)
    optimizer.step()
    fresh.step()
    assert_same(nested(other, fresh), nested(model, optimizer))


# M34: the word `state` in a key proves nothing.


def under_state(*missing: str) -> dict[str, Any]:
    """A whole trainer's state under a key ``state``: the model, its optimizer, and counters."""
    model, optimizer = trained()
    held = {
        "state": {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
            "trainer": {"step": torch.tensor(9.0), "tokens": torch.arange(3)},
        },
        "train_state": {"state": {"loop": {"step": 7, "seen": torch.tensor(5)}}},
    }
    return {key: value for key, value in flatten_state_dict(held)[0].items() if key not in missing}


@pytest.mark.parametrize(
    "missing",
    [
        "state.model.experts.w1",
        "state.model.norm",
        "state.trainer.step",
        "state.trainer.tokens",
        "train_state.state.loop.step",
    ],
)
def test_m34_what_stands_under_a_key_state_must_be_in_the_checkpoint(
    missing: str, tmp_path: Path
) -> None:
    dcp.save(under_state(missing), checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    message = refusal(
        lambda: dcp.load(
            blank(under_state()),
            checkpoint_id=tmp_path,
            planner=PlacementLoadPlanner(),
            no_dist=True,
        )
    )
    assert f"{missing}: the checkpoint lacks this key" in message
    assert message.count("the checkpoint lacks") == 1


def test_m34_a_module_called_state_has_weights_and_no_optimizer_state(tmp_path: Path) -> None:
    """Of a mixer's ``state.proj`` another tensor of the model has the name of its last part."""
    whole = {
        "model.mixer.state.proj.weight": torch.arange(6.0).reshape(2, 3),
        "model.mixer.state.norm.weight": torch.arange(3.0),
        "model.other.proj": torch.arange(24.0).reshape(2, 3, 4),
        "optim.state.other.proj.exp_avg": torch.arange(24.0).reshape(2, 3, 4),
        "optim.param_groups.other.proj.lr": 0.1,
    }
    lacking = {k: v for k, v in whole.items() if "state.proj" not in k}
    dcp.save(lacking, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=r"mixer\.state\.proj\.weight: the check"):
        dcp.load(blank(whole), checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)


@pytest.mark.filterwarnings("ignore:(?s).*was reset")
def test_m34_a_partial_load_resets_no_step_but_an_optimizer_s(tmp_path: Path) -> None:
    dropped = [key for key in under_state() if "bias" in key and "optim" in key]
    dropped += ["state.trainer.step", "train_state.state.loop.step"]
    dcp.save(under_state(*dropped), checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    found = blank(under_state())
    planner = PlacementLoadPlanner(allow_partial_load=True)
    dcp.load(found, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert planner.report.stateless == ("experts.bias",)
    assert float(found["state.optim.state.experts.bias.step"]) == 0
    assert float(found["state.trainer.step"]) == FILL
    assert found["train_state.state.loop.step"] is None


def test_m34_numbered_modules_under_state_are_no_counted_optimizer_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = {"state": model.state_dict(), "other": torch.ones(3, 3)}
    world = World(2)

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(0)})
        return PlacementRules({"other": placement})

    def held(rank: int) -> dict[str, Any]:
        return {**state, "other": torch.ones(3, 3) + rank}

    world.save(tmp_path, held, lambda rank: PlacementSavePlanner(rules(rank)))
    renamed = PlacementSavePlanner(rename=lambda key: key.replace("state", "model"))
    dcp.save(state, checkpoint_id=tmp_path / "renamed", planner=renamed, no_dist=True)


def test_m34_a_first_save_of_a_model_under_state_lists_no_parameter_as_stateless(
    tmp_path: Path,
) -> None:
    model = Model()
    state = {
        "state": {"model": get_model_state_dict(model)},
        "optim": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["norm", "experts.w1"]}]},
    }
    planner = PlacementSavePlanner()
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert planner.report.stateless == ()


@pytest.mark.parametrize("value", [torch.arange(3.0), ["a", "b"], 7])
def test_what_is_called_params_in_a_group_with_a_name_is_saved_as_it_is(
    tmp_path: Path, value: Any
) -> None:
    """It is no list of the names that a parameter group has."""
    key = "model.param_groups.decoder.params"
    same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
    dcp.save({key: value}, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    for planner in (dcp.DefaultLoadPlanner(), PlacementLoadPlanner()):
        found = {key: torch.zeros(3) if isinstance(value, torch.Tensor) else type(value)()}
        dcp.load(found, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert same(found[key], value)


# M33: a rule that names the state itself speaks for it.

EP_FSDP = World(4)


def moment_state(rank: int, moment: Callable[[int], Any]) -> dict[str, Any]:
    """A parameter of (8, 3) over ep and fsdp, and what stands for its moment."""
    mesh = EP_FSDP.mesh(rank, ep=2, fsdp=2)
    part = cut(torch.arange(24.0).reshape(8, 3), [Shard(0)], [2], [mesh.get_coordinate()[0]])
    weight = FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])
    optim = {"state": {"w": {"m": moment(rank)}}, "param_groups": [{"params": ["w"]}]}
    return {"model": {"w": weight}, "optim": optim}


def by_ep(rank: int) -> CheckpointPlacement:
    return CheckpointPlacement(EP_FSDP.mesh(rank, ep=2, fsdp=2), {"ep": Shard(0)})


def by_columns(rank: int) -> CheckpointPlacement:
    mesh = EP_FSDP.mesh(rank, ep=2, fsdp=2)
    return CheckpointPlacement(mesh, {"ep": Shard(1), "fsdp": Shard(1)})


def own_rule(rank: int) -> Any:
    return PlacementRules({"state.w.m": by_columns(rank), "model.w": by_ep(rank)})


def own_rule_given(rank: int) -> Any:
    return lambda fqn, tensor: by_columns(rank) if "state" in fqn else by_ep(rank)


def no_rule_given(rank: int) -> Any:
    return lambda fqn, tensor: None if "state" in fqn else by_ep(rank)


def one_rule_given(rank: int) -> Any:
    mesh = EP_FSDP.mesh(rank, ep=2, fsdp=2)
    return lambda fqn, tensor: CheckpointPlacement(mesh, {"ep": Shard(0)})


def none_rule(rank: int) -> Any:
    return PlacementRules({"state.w.m": None, "model.w": by_ep(rank)})


MOMENT = torch.arange(24.0).reshape(2, 12) + 100


def saved_moment(
    path: Path, rules: Callable[[int], Any], moment: Callable[[int], Any]
) -> torch.Tensor:
    """Save and load under the rules; return what torch's own planner finds in the file."""

    def state(rank: int) -> dict[str, Any]:
        return moment_state(rank, moment)

    EP_FSDP.save(path, state, lambda rank: PlacementSavePlanner(rules(rank)))
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["optim.state.w.m"]
    read = {"optim.state.w.m": torch.full(tuple(stored.size), -3.0)}
    dcp.load(read, checkpoint_id=path, no_dist=True)

    def template(rank: int) -> dict[str, Any]:
        made = state(rank)
        held = made["optim"]["state"]["w"]["m"]
        (held.to_local() if isinstance(held, FakeDTensor) else held).fill_(-3)
        return made

    loaded = EP_FSDP.load(path, template, lambda rank: PlacementLoadPlanner(rules(rank)))
    for rank in range(4):
        found, wanted = (made["optim"]["state"]["w"]["m"] for made in (loaded[rank], state(rank)))
        if isinstance(found, FakeDTensor):
            found, wanted = found.to_local(), wanted.to_local()
        assert torch.equal(found, wanted), rank
    return read["optim.state.w.m"]


@pytest.mark.parametrize("rules", [own_rule, own_rule_given])
def test_m33_a_rule_that_names_the_state_itself_speaks_for_it(
    rules: Callable[[int], Any], tmp_path: Path
) -> None:
    whole = MOMENT

    def moment(rank: int) -> torch.Tensor:
        return whole[:, 3 * rank : 3 * rank + 3].clone()

    assert tuple(moment(0).shape) == (2, 3)  # the parameter's local shape
    assert torch.equal(saved_moment(tmp_path, rules, moment), whole)


def test_m33_none_for_the_state_itself_leaves_it_whole(tmp_path: Path) -> None:
    whole = MOMENT[:, :3]
    found = saved_moment(tmp_path, none_rule, lambda rank: whole.clone())
    assert torch.equal(found, whole)


@pytest.mark.parametrize("rules", [no_rule_given, one_rule_given])
def test_m33_state_of_which_the_rules_say_nothing_of_its_own_follows(
    rules: Callable[[int], Any], tmp_path: Path
) -> None:
    """A callable has no patterns: an equal placement for both is one rule for both."""
    whole = torch.arange(24.0).reshape(8, 3) + 100
    found = saved_moment(tmp_path, rules, lambda rank: whole[2 * rank : 2 * rank + 2].clone())
    assert torch.equal(found, whole)


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_m33_a_stack_s_state_has_the_place_that_its_own_rule_says(
    own: bool, fsdp: bool, tmp_path: Path
) -> None:
    """A rank has two experts' rows, and a half of each: of its rows, or of its columns."""
    world = World(4)
    weights = torch.arange(4 * 4 * 4.0).reshape(4, 4, 4)
    moments = torch.arange(4 * 2 * 8.0).reshape(4, 2, 8) + 100 if own else weights + 100

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, ep=2, tp=2)
        named = {"model.experts.w": CheckpointPlacement(mesh, {"ep": Shard(0), "tp": Shard(1)})}
        if own:
            columns = CheckpointPlacement(mesh, {"ep": Shard(0), "tp": Shard(2)})
            named = {"state.experts.w.m": columns, **named}
        return PlacementRules(named)

    def held(rank: int) -> dict[str, Any]:
        ep, tp = divmod(rank, 2)
        made = {}
        for i in range(2):
            dim = 1 if own else 0
            weight = weights[2 * ep + i].chunk(2)[tp].clone()
            moment = moments[2 * ep + i].chunk(2, dim)[tp].clone()
            made[f"model.experts.{i}.w"] = sharded(rank, weight)
            made[f"optim.state.experts.{i}.w.m"] = sharded(rank, moment)
        made["optim.param_groups.0.params"] = ["experts.0.w", "experts.1.w"]
        return made

    def sharded(rank: int, part: torch.Tensor) -> Any:
        mesh = FakeMesh((1,), ("fsdp",), rank=rank, ranks=torch.tensor([rank]))
        return FakeDTensor.distribute(part, mesh, [Shard(0)]) if fsdp else part

    def rename(rank: int) -> Any:
        ids = contiguous([2, 2], rank // 2)
        return Renames(Renumber("experts.{}", ids, total=4), Stack("experts.{}", total=4))

    world.save(tmp_path, held, lambda rank: PlacementSavePlanner(rules(rank), rename=rename(rank)))
    read = {"optim.state.experts.w.m": torch.full(moments.shape, -3.0)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["optim.state.experts.w.m"], moments)


# M52: moments that lie over FSDP as their parameter does.


def parameter_only(rank: int) -> Any:
    return PlacementRules({"model.w": by_ep(rank)})


def dtensor_moment(whole: torch.Tensor) -> Callable[[int], Any]:
    def moment(rank: int) -> FakeDTensor:
        mesh = EP_FSDP.mesh(rank, ep=2, fsdp=2)
        part = cut(whole, [Shard(0)], [2], [mesh.get_coordinate()[0]])
        return FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])

    return moment


@pytest.mark.parametrize("step", [0, 1])
def test_m52_dtensor_moments_follow_a_rule_that_names_the_parameter_only(
    step: int, tmp_path: Path
) -> None:
    whole = (torch.arange(24.0).reshape(8, 3) + 100) * step
    checked = EP_FSDP.check(
        lambda rank: moment_state(rank, dtensor_moment(whole)),
        lambda rank: PlacementSavePlanner(parameter_only(rank)),
    )
    assert isinstance(checked, PlacementSavePlanner)
    assert checked.report.keys["optim.state.w.m"].shape == (8, 3)
    assert checked.report.warnings == ()
    assert torch.equal(saved_moment(tmp_path, parameter_only, dtensor_moment(whole)), whole)


@pytest.mark.parametrize(
    ("rules", "placement", "count"),
    [(none_rule, Shard(0), 1), (parameter_only, Replicate(), 2), (parameter_only, Shard(1), 2)],
)
def test_m52_dtensor_moments_say_themselves_how_fsdp_cuts_them_and_follow_what_rules_say(
    rules: Callable[[int], Any], placement: Any, count: int, tmp_path: Path
) -> None:
    part = torch.arange(12.0).reshape(4, 3)

    def moment(rank: int) -> FakeDTensor:
        mesh = EP_FSDP.mesh(rank, ep=2, fsdp=2)
        own = part + 100 * (mesh["ep"].get_local_rank() if count > 1 else 0)
        return FakeDTensor.distribute(own, mesh["fsdp"], [placement])

    parts = [part + 100 * number for number in range(count)]
    assert torch.equal(saved_moment(tmp_path, rules, moment), torch.cat(parts))


@pytest.mark.parametrize("has_lists", [True, False], ids=["a state dict", "metadata"])
def test_an_option_that_is_a_dict_names_no_parameter_of_a_numbered_group(has_lists: bool) -> None:
    """As some optimizers have; module 0 of a ``Sequential`` has a name of its own."""
    values = {
        "optim.param_groups.0.params": ["w"] if has_lists else object(),
        "optim.param_groups.0.cfg.rank": 4,
        "optim.param_groups.0.cfg.params": ["a"] if has_lists else object(),
        "flat.param_groups.0.weight.lr": 0.1,
    }
    assert parameter_groups_in(values) == {
        "optim.": {"w": "optim.param_groups.0.params"} if has_lists else {},
        "flat.": {"0.weight": "flat.param_groups.0.weight.lr"},
    }
    state = OptimizerStates(values).of("optim.state.w.exp_avg")
    assert state is not None
    assert state.parameter == "w"


def test_a_parameter_with_a_number_for_its_name_stands_beside_others() -> None:
    flat = {"o.param_groups.0.lr": 1, "o.param_groups.bias.lr": 1, "o.state.0.exp_avg": 1}
    assert parameter_groups_in(flat)["o."].keys() == {"0", "bias"}
    assert OptimizerStates(flat).of("o.state.0.exp_avg") == ("o.", "0", "exp_avg")
    nested = {"o.param_groups.0.lr": 1, "o.param_groups.0.params": ["bias"]}
    assert parameter_groups_in(nested)["o."].keys() == {"bias"}


def test_options_that_are_dicts_make_no_parameters_in_the_flattened_form() -> None:
    flat = {"param_groups.a.w.lr": 1, "param_groups.a.w.schedule.lr": 1, "param_groups.b.lr": 1}
    assert parameter_groups_in(flat)[""].keys() == {"a.w", "b"}


@pytest.mark.parametrize(
    ("head", "names", "keys", "wanted"),
    [
        ("optim.", ["w", "block.w"], ["model.w", "model.block.w"], ["model.w"]),
        ("optim.", ["w", "b"], ["model.w", "model.b", "model.block.w"], ["model.w"]),
        ("optim.", ["w"], ["nets.student.w", "ema.w"], ["nets.student.w", "ema.w"]),
        ("optim.gen.", ["w"], ["model.gen.w", "model.critic.w"], ["model.gen.w"]),
        ("gen_optim.", ["w"], ["gen.w", "critic.w"], ["gen.w", "critic.w"]),
        ("gen_optim.", ["w", "b"], ["gen.w", "gen.b", "critic.w"], ["gen.w"]),
    ],
)
def test_the_weights_of_a_parameter_are_in_the_level_with_most_of_its_optimizer_s_names(
    head: str, names: list[str], keys: list[str], wanted: list[str]
) -> None:
    states = OptimizerStates({f"{head}param_groups.0.params": names})
    assert states.weights_of([(head, "w")], keys) == {(head, "w"): wanted}
