"""Ready-made renames: what they make of keys, and what worlds of many ranks make of them."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import refusal
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    Split,
    Stack,
    Unstack,
    contiguous,
)
from dcp_placements.names.rename_results import Rename
from dcp_placements.testing import World


@pytest.mark.parametrize(
    ("pattern", "key", "renamed"),
    [
        ("experts.{}", "layers.3.mlp.experts.2.w1.weight", "layers.3.mlp.experts.12.w1.weight"),
        ("experts.{}", "experts.2", "experts.12"),
        (
            "experts.{}",
            "optim.state.layers.3.mlp.experts.2.w1.weight.exp_avg",
            "optim.state.layers.3.mlp.experts.12.w1.weight.exp_avg",
        ),
        (
            "experts.{}",
            "optim.param_groups.layers.3.mlp.experts.0.w1.lr",
            "optim.param_groups.layers.3.mlp.experts.10.w1.lr",
        ),
        ("experts.{}", "shared_experts.2.w1", "shared_experts.2.w1"),
        ("experts.{}", "layers.3.mlp.experts.w1", "layers.3.mlp.experts.w1"),
        (
            "experts.linear_fc*.weight{}",
            "layers.3.mlp.experts.linear_fc1.weight2",
            "layers.3.mlp.experts.linear_fc1.weight12",
        ),
        (
            "experts.*.weight{}",
            "s.layers.0.mlp.experts.fc2.weight0.exp_avg",
            "s.layers.0.mlp.experts.fc2.weight10.exp_avg",
        ),
        ("experts.**.w*{}", "experts.a.b.weight2", "experts.a.b.weight12"),
        ("experts.w*{}", "experts.w2", "experts.w12"),
        ("decoder.layers.{}", "decoder.layers.1.w.layers.0", "decoder.layers.11.w.layers.0"),
        ("decoder.layers.{}", "mtp.layers.1.w", "mtp.layers.1.w"),
        ("expert{}_up", "mlp.expert1_up.w", "mlp.expert11_up.w"),
    ],
)
def test_the_number_is_found_anywhere_in_a_key(pattern: str, key: str, renamed: str) -> None:
    assert Renumber(pattern, range(10, 13), total=None)(key) == renamed


def test_each_layer_can_have_a_map_of_its_own() -> None:
    rename = Renumber("layers.{layer}.experts.{}", {0: [0, 3], "1": [2, 1]}, total=4)
    assert rename("layers.0.experts.1.w") == "layers.0.experts.3.w"
    assert rename("layers.1.experts.1.w") == "layers.1.experts.1.w"
    assert rename("layers.1.experts.0.w") == "layers.1.experts.2.w"
    with pytest.raises(
        PlacementError, match=r"layers\.\{layer\}\.experts\.\{\} has no ids for 7, only for 0, 1"
    ):
        rename("layers.7.experts.0.w")


def test_a_local_number_that_no_id_is_for_is_refused_with_what_there_is() -> None:
    rename = Renumber("experts.{}", range(4, 7), total=8)
    with pytest.raises(PlacementError) as refused:
        rename("layers.0.experts.3.w1")
    message = "experts.{} has 3 ids on this rank, none for local number 3 and up"
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "ids", "total", "message"),
    [
        ("experts", [0], 1, "must have one {}"),
        ("layers.{}.experts.{}", [0], 1, "must have one {}"),
        ("{a}.{b}.{}", [0], 1, "at most one {name}"),
        ("layers.{layer}.experts.{}", [0], 1, "needs ids by what {name} stands for"),
        ("experts.{}", {0: [0]}, 1, "needs ids as a list"),
        ("experts.{}", [8], 8, "number 8 of 'experts.{}' is not among 0 .. 7"),
        ("experts.{}", [-1], None, "number -1 of 'experts.{}' is not among 0 and up"),
        ("experts..{}", [0], 1, "empty component"),
    ],
)
def test_what_cannot_be_meant_is_refused(pattern: str, ids: Any, total: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(message)):
        Renumber(pattern, ids, total)


def test_parts_that_follow_each_other() -> None:
    assert [contiguous([3, 0, 2], at) for at in range(3)] == [range(3), range(3, 3), range(3, 5)]
    assert contiguous(torch.tensor([2, 2]), at=1) == range(2, 4)  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="no part 3 of 3"):
        contiguous([3, 0, 2], 3)


def test_a_prefix_is_replaced_or_dropped_wherever_it_stands() -> None:
    assert Replace("model_pp*", "model")("optim.state.model_pp3.w.exp_avg") == (
        "optim.state.model.w.exp_avg"
    )
    assert Replace("model*", "")("model0.decoder.w") == "decoder.w"
    assert Replace("a.b", "")("x.a.b") == "x"
    assert Replace("a.b", "c.d.e")("a.b.w") == "c.d.e.w"
    assert Replace("a.b", "c")("a.bb.w") == "a.bb.w"


RENAMES: list[Rename] = [
    Renumber("experts.{}", [6, 1], total=8),
    Renumber("layers.{layer}.experts.{}", {0: range(2), 1: [3]}, total=8),
    Replace("model*", "model"),
    Renames(Renumber("model{chunk}.layers.{}", {0: [0], 1: [2]}, total=4), Replace("model*", "")),
    Stack("layers.{}", 4, dim=-1),
    Renames(Unstack("experts.{}", dim=1), Replace("model*", "model")),
    Split("qkv", ["q", "k", "v"], sizes=[4, 1, 1]),
]


def test_renames_of_equal_options_are_equal() -> None:
    assert Renumber("e.{}", [1, 0], total=2) == Renumber("e.{}", (1, 0), total=2)
    assert Renumber("e.{}", [1, 0], total=2) != Renumber("e.{}", [0, 1], total=2)
    assert Split("w", ["a", "b"]) == Split("w", ("a", "b"), sizes=(1, 1))
    assert len({*RENAMES, *RENAMES}) == len(RENAMES)


@pytest.mark.parametrize("rename", RENAMES, ids=repr)
def test_renames_can_be_pickled_and_seen(rename: Any) -> None:
    again = pickle.loads(pickle.dumps(rename))
    assert (again, hash(again), repr(again)) == (rename, hash(rename), repr(rename))
    for key in ("model1.layers.0.w", "layers.0.experts.0.w", "other"):
        assert again(key) == rename(key)


class Suffixed(Renames):
    """Does more than its steps."""

    def __call__(self, key: str) -> Any:
        name = super().__call__(key)
        assert isinstance(name, str)
        return f"{name}.saved"


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_subclass_of_renames_does_beside_its_steps_is_kept(
    nested: bool, tmp_path: Path
) -> None:
    rename: Any = Suffixed(Replace("module", "model"), Renumber("layers.{}", [3], total=None))
    if nested:
        rename = Renames(Replace("wrapper", ""), rename)
    whole = torch.arange(4.0)
    dcp.save(
        {"wrapper.module.layers.0.w" if nested else "module.layers.0.w": whole},
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(rename=rename),
    )
    read = {"model.layers.3.w.saved": torch.zeros(4)}
    dcp.load(read, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert torch.equal(read["model.layers.3.w.saved"], whole)


def test_a_load_tells_all_keys_that_have_no_number(tmp_path: Path) -> None:
    whole = {
        f"{level}.layers.{layer}.experts.{expert}.w1{tail}": torch.ones(2)
        for level, tail in (("model", ""), ("optim.state", ".exp_avg"), ("optim.state", ".step"))
        for layer in range(2)
        for expert in range(4)
    }
    rename = Renumber("experts.{}", range(4), total=4)
    dcp.save(whole, checkpoint_id=tmp_path, planner=PlacementSavePlanner(rename=rename))
    with pytest.raises(CheckpointException) as refused:
        dcp.load(
            dict(whole),
            checkpoint_id=tmp_path,
            planner=PlacementLoadPlanner(rename=Renumber("experts.{}", [1, 2], total=4)),
        )
    error = refused.value.failures[0][0]
    assert isinstance(error, PlacementError)
    assert "rank 0 cannot be loaded from this checkpoint (1 fault of 12 keys)" in str(error)
    assert "model.layers.0-1.experts.2-3.w1" in str(error)
    assert "experts.{} has 2 ids on this rank, none for local number 2 and up" in str(error)


def counted(model: torch.nn.Module) -> dict[str, Any]:
    """Return an optimizer's own state dict, after one step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


@pytest.mark.parametrize("side", ["save", "load"])
def test_optimizer_state_by_position_is_refused_where_keys_are_renamed(
    tmp_path: Path, side: str
) -> None:
    state_dict = counted(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    rename = Renumber("model.{}", [4], total=None)
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=PlacementSavePlanner())

    def run() -> None:
        if side == "save":
            planner = PlacementSavePlanner(rename=rename)
            dcp.save(state_dict, checkpoint_id=tmp_path, planner=planner)
        else:
            reader = PlacementLoadPlanner(rename=rename, allow_partial_load=True)
            dcp.load(state_dict, checkpoint_id=tmp_path, planner=reader)

    message = refusal(lambda: run())
    assert "optim.state.0: names its parameter by its position in the optimizer" in message
    assert "flatten_optimizer_state_dict=True" in message


def test_optimizer_state_by_position_is_refused_where_a_rule_shards_its_parameter(
    tmp_path: Path,
) -> None:
    world = World(2)

    def held(rank: int) -> dict[str, Any]:
        return counted(torch.nn.Sequential(torch.nn.Linear(3, 2)))

    def rules(rank: int, size: int) -> PlacementRules:
        mesh = world.mesh(rank, ep=size, dp=2 // size)
        placement = CheckpointPlacement(mesh, {"ep": Shard(0)})
        return PlacementRules({"0.weight": placement, "0.bias": None})

    message = refusal(
        lambda: world.save(tmp_path, held, lambda rank: PlacementSavePlanner(rules(rank, 2)))
    )
    assert "optim.state.0: names its parameter by its position in the optimizer" in message
    assert "get_optimizer_state_dict" in message

    torch.manual_seed(0)
    same = held(0)
    world.save(tmp_path, lambda rank: same, lambda rank: PlacementSavePlanner(rules(rank, 1)))


def test_optimizer_state_by_position_passes_where_nothing_says_that_it_is_wrong(
    tmp_path: Path,
) -> None:
    state_dict = counted(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    dcp.load(state_dict, checkpoint_id=tmp_path, planner=PlacementLoadPlanner())


def test_a_parameter_that_is_called_by_a_number_is_no_position(tmp_path: Path) -> None:
    state_dict = {
        "model": {"0": torch.ones(2), "1": torch.ones(2)},
        "optim": {"state": {"0": {"exp_avg": torch.ones(2)}, "1": {"exp_avg": torch.ones(2)}}},
    }
    rename = Renames(Renumber("model.{}", [1, 0], total=2), Renumber("state.{}", [1, 0], total=2))
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=PlacementSavePlanner(rename=rename))


def nested(experts: Sequence[int], start: float) -> dict[str, Any]:
    """Return weights and torch's default form of optimizer state of some experts, from number 0."""
    names = [f"layers.0.experts.{at}.w" for at in range(len(experts))]
    values = [torch.full((2, 3), start + expert) for expert in experts]
    state = {
        name: {"exp_avg": value + 100, "step": torch.tensor(7.0)}
        for name, value in zip(names, values, strict=True)
    }
    groups = [
        {"lr": torch.tensor(0.1), "params": names[::2]},
        {"lr": torch.tensor(0.2), "params": names[1::2]},
    ]
    optim = {"state": state, "param_groups": groups}
    return {"model": dict(zip(names, values, strict=True)), "optim": optim}


def test_m81_parameter_groups_that_list_renamed_parameters(tmp_path: Path) -> None:
    """Experts numbered from 0 on each of two ep ranks, and resumed where one rank has all."""
    held = [range(2), range(2, 4)]
    world = World(2)

    def renumber(rank: int) -> Renumber:
        return Renumber("experts.{}", held[rank], total=4)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.save(
            tmp_path,
            lambda rank: nested(held[rank], 1.0),
            lambda rank: PlacementSavePlanner(rename=renumber(rank)),
        )
        loaded = world.load(
            tmp_path,
            lambda rank: nested([-1, -1], 0.0),
            lambda rank: PlacementLoadPlanner(rename=renumber(rank)),
        )
    whole = nested([-1] * 4, 0.0)
    dcp.load(whole, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    for rank, state_dict in enumerate(loaded):
        assert_equal(state_dict, nested(held[rank], 1.0))
    assert_equal(whole, nested(range(4), 1.0))
    # Torch's own planner finds the checkpoint's names, those of both ranks.
    stock = nested([-1] * 4, 0.0)
    dcp.load(stock, checkpoint_id=tmp_path, no_dist=True)
    listed = [group["params"] for group in stock["optim"]["param_groups"]]
    assert [*map(type, listed)] == [list, list]
    assert listed == [[f"layers.0.experts.{at}.w" for at in of] for of in ((0, 2), (1, 3))]
    for group, own in zip(
        stock["optim"]["param_groups"], whole["optim"]["param_groups"], strict=True
    ):
        group["params"] = own["params"]
    assert_equal(stock, nested(range(4), 1.0))


def test_a_group_lists_every_row_of_a_parameter_that_is_unstacked(tmp_path: Path) -> None:
    """Also of one that has no state; a tensor that is fused has two names per row."""
    names = ["layers.0.experts.w", "layers.0.experts.gate_up", "experts.w"]
    optim = {
        "state": {name: {"momentum_buffer": torch.ones(3, 2, 4)} for name in names[:2]},
        "param_groups": [{"lr": 0.1, "params": [*names]}],
    }
    model = {name: torch.ones(2 if name == names[2] else 3, 2, 4) for name in names}
    rename = Renames(Unstack("experts.{}"), Split("gate_up", ("gate", "up")))
    planner = PlacementSavePlanner(rename=rename)
    state_dict = {"model": model, "optim": optim}
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    stored: dict[str, Any] = {"optim.param_groups.0.params": None}
    dcp.load(stored, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(), no_dist=True)
    kept = {key.removeprefix("model.") for key in planner.report.keys if key.startswith("model.")}
    assert set(stored["optim.param_groups.0.params"]) == kept
    assert optim["param_groups"][0]["params"] == names


def assert_equal(one: Any, other: Any) -> None:
    for pair in zip(facts_of(one), facts_of(other), strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=0)
    lists = [[group["params"] for group in of["optim"]["param_groups"]] for of in (one, other)]
    assert lists[0] == lists[1]


def facts_of(state_dict: Any) -> list[Any]:
    optim = state_dict["optim"]
    return [state_dict["model"], optim["state"], [group["lr"] for group in optim["param_groups"]]]


def test_a_rename_that_does_not_take_a_listed_parameter_is_refused(tmp_path: Path) -> None:
    keys = {
        "w": "v",
        "param_groups.0.lr": "param_groups.0.lr",
        "param_groups.0.params": "param_groups.0.params",
    }
    state_dict = {
        "w": torch.ones(2),
        "param_groups": [{"lr": torch.tensor(1.0), "params": ["w", "x"]}],
    }
    planner = PlacementSavePlanner(rename=keys.__getitem__)
    with pytest.raises(CheckpointException, match=r"rename= does not take 'w', which it lists"):
        dcp.save(state_dict, checkpoint_id=tmp_path, planner=planner, no_dist=True)


def test_a_rename_that_raises_is_a_fault_with_its_key(tmp_path: Path) -> None:
    planner = PlacementSavePlanner(rename={"a": "b"}.__getitem__)
    with pytest.raises(CheckpointException, match=r"w: the rename fails: KeyError: 'w'"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)


def test_a_number_in_place_of_numbers_is_named() -> None:
    for make in (lambda: contiguous(8, at=0), lambda: Renumber("experts.{}", 4, total=8)):  # type: ignore[arg-type]
        with pytest.raises(PlacementError, match=r"counts=8|ids=4 is one number"):
            make()
