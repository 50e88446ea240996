"""State that a checkpoint has under another name than is asked for is not reset: it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_same, load, refusal, refused, save, without_warning

from dcp_placements import (
    PlacementLoadPlanner,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    Stack,
)
from dcp_placements.testing import World

State = dict[str, Any]


def adam(names: Any, *, start: int = 0, stepped: Any = None) -> State:
    names = list(names)
    return {
        "state": {
            name: {"step": torch.tensor(3.0), "exp_avg": arange(2, 3, start=start + 100 * at)}
            for at, name in enumerate(names)
            if stepped is None or name in stepped
        },
        "param_groups": [{"lr": 0.1, "params": names}],
    }


def trainer(weights: Any, states: Any = None, **options: Any) -> State:
    model = {name: arange(2, 3, start=7 * at) for at, name in enumerate(weights)}
    return {"model": model, "optim": adam(weights if states is None else states, **options)}


BLOCKS = [f"blocks.{i}.w" for i in range(3)]
COMPILED = [f"blocks.{i}._orig_mod.w" for i in range(3)]
EXPERTS = [f"layers.0.experts.{i}.w" for i in range(3)]
ALL = Stack("experts.{}", 3)
WEIGHTS_ALONE = Stack("model.layers.*.experts.{}", 3)

SCENES: dict[str, tuple[tuple[State, Any], tuple[State, Any], tuple[str, ...]]] = {
    "a wrapper's name in the checkpoint alone": (
        (trainer(BLOCKS, COMPILED), None),
        (trainer(BLOCKS), None),
        ("optim.state.blocks.0.w,", "optim.state.blocks.0._orig_mod.w", "'_orig_mod'"),
    ),
    "a wrapper's name in the load alone": (
        (trainer(BLOCKS), None),
        (trainer(BLOCKS, COMPILED), None),
        ("optim.state.blocks.0._orig_mod.w", 'rename=Replace("_orig_mod", "")'),
    ),
    "a wrapper around the whole model": (
        (trainer(BLOCKS, [f"module.{name}" for name in BLOCKS]), None),
        (trainer(BLOCKS), None),
        ("optim.state.module.blocks.0.w", "'module'"),
    ),
    "some of the blocks are compiled": (
        (trainer(BLOCKS, [BLOCKS[0], *COMPILED[1:]]), None),
        (trainer(BLOCKS), None),
        ("optim.state.blocks.1.w", "optim.state.blocks.1._orig_mod.w"),
    ),
    "the save stacks weights and state, the load weights alone": (
        (trainer(EXPERTS), ALL),
        (trainer(EXPERTS), WEIGHTS_ALONE),
        ("optim.state.layers.0.experts.0.w", "optim.state.layers.0.experts.w", "Stack("),
    ),
    "the save stacks weights alone, the load weights and state": (
        (trainer(EXPERTS), WEIGHTS_ALONE),
        (trainer(EXPERTS), ALL),
        ("optim.state.layers.0.experts.w", "optim.state.layers.0.experts.0.w", "Stack("),
    ),
    "a Replace of the weights alone": (
        (trainer(BLOCKS), None),
        (
            trainer([f"net.{name}" for name in BLOCKS]),
            Replace("model.net", "model"),
        ),
        ("optim.state.net.blocks.0.w", "optim.state.blocks.0.w", "'net'"),
    ),
    "other names altogether": (
        (trainer(BLOCKS, [f"param_{i}" for i in range(3)]), None),
        (trainer(BLOCKS), None),
        ("optim.state.blocks.0.w", "optim.state.param_"),
    ),
}


def flat(state: State) -> State:
    optim = state["optim"]
    held = {f"state.{n}.{k}": one for n, each in optim["state"].items() for k, one in each.items()}
    (group,) = optim["param_groups"]
    return {**state, "optim": held | {f"param_groups.{n}.lr": 0.1 for n in group["params"]}}


def saved_at(path: Path, state: State, rename: Any) -> None:
    planner = PlacementSavePlanner(rename=rename)
    dcp.save(state, checkpoint_id=path, planner=planner, no_dist=True)


@pytest.mark.parametrize("partly", [False, True], ids=["strict", "partial"])
@pytest.mark.parametrize("name", SCENES)
def test_m114_state_under_another_name_is_refused(tmp_path: Path, name: str, partly: bool) -> None:
    (saved, rename), (asked, rename_of_load), facts = SCENES[name]
    saved_at(tmp_path, saved, rename)
    planner = PlacementLoadPlanner(rename=rename_of_load, allow_partial_load=partly)
    message = refusal(
        lambda: dcp.load(asked, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    )
    for fact in facts:
        assert fact in message
    assert "it would be reset" in message


def test_m114_in_flattened_form_the_options_are_missing_as_well(tmp_path: Path) -> None:
    saved_at(tmp_path, flat(trainer(BLOCKS, COMPILED)), None)
    asked = flat(trainer(BLOCKS))
    planner = PlacementLoadPlanner(optional=["optim.param_groups"])
    message = refusal(
        lambda: dcp.load(asked, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    )
    assert "optim.state.blocks.0._orig_mod.w" in message


def test_m114_waived_it_is_reset(tmp_path: Path) -> None:
    saved_at(tmp_path, trainer(BLOCKS, COMPILED), None)
    asked = trainer(BLOCKS)
    planner = PlacementLoadPlanner(waive={"optim.state.**._orig_mod": "other weights"})
    with pytest.warns(UserWarning, match="3 parameters was reset"):
        dcp.load(asked, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert all(not one["exp_avg"].any() for one in asked["optim"]["state"].values())


def pipeline(rank: int, *, alone: bool, stepped: Any = None) -> State:
    """Two layers per stage; the second stage's second one was never stepped."""
    names = [f"layers.{2 * rank + i}.w" for i in range(2)]
    state = trainer(names, start=1000 * rank, stepped=stepped)
    return {"optim": state["optim"]} if alone else state


@pytest.mark.parametrize("alone", [False, True], ids=["with its model", "an optimizer alone"])
def test_m114_state_of_other_stages_is_no_state_under_another_name(
    tmp_path: Path, alone: bool
) -> None:
    world, stepped = World(3), [f"layers.{i}.w" for i in (0, 2, 4, 5)]
    save(world, tmp_path, lambda rank: pipeline(rank, alone=alone, stepped=stepped))

    def asked(rank: int) -> State:
        state = pipeline(rank, alone=alone)
        for held in state["optim"]["state"].values():
            held["step"].fill_(1)
            held["exp_avg"].zero_()
        return state

    with without_warning():
        loaded, reports = load(world, tmp_path, asked)
    assert [report.stateless for report in reports] == [("layers.1.w",), ("layers.3.w",), ()]
    for rank in range(3):
        for name, held in pipeline(rank, alone=alone)["optim"]["state"].items():
            found = loaded[rank]["optim"]["state"][name]
            assert torch.equal(found["exp_avg"], held["exp_avg"] * (name in stepped))
            assert found["step"] == 3 * (name in stepped)


def test_m114_an_optimizer_alone_under_other_names_is_refused_on_any_rank(tmp_path: Path) -> None:
    world = World(2)
    save(world, tmp_path, lambda rank: pipeline(rank, alone=True))

    def asked(rank: int) -> State:
        names = [f"{'net.' * rank}layers.{2 * rank + i}.w" for i in range(2)]
        return {"optim": adam(names)}

    with refused() as refusal:
        load(world, tmp_path, asked)
    refusal.says("optim.state.net.layers.2.w", "optim.state.layers.2.w", "rank 1")


def test_m114_ranks_that_each_have_the_state_of_some_parameters(tmp_path: Path) -> None:
    """As with ``ZeroRedundancyOptimizer``: every rank has all weights."""
    names = [f"w{i}" for i in range(4)]

    def held(rank: int, stepped: Any = None) -> State:
        state = trainer(names)
        optim = adam(names, stepped=stepped)
        mine = names[rank::2]
        optim["state"] = {name: one for name, one in optim["state"].items() if name in mine}
        return {**state, "optim": optim}

    save(World(2), tmp_path, lambda rank: held(rank, ["w0", "w1", "w3"]))

    def asked(rank: int) -> State:
        state = held(rank)
        for one in state["optim"]["state"].values():
            one["step"].fill_(1)
        return state

    with without_warning():
        loaded, _ = load(World(2), tmp_path, asked)
    assert_same(loaded[1]["optim"]["state"], held(1)["optim"]["state"])
    assert not loaded[0]["optim"]["state"]["w2"]["exp_avg"].any()


def test_m114_a_model_with_fewer_layers_and_a_parameter_that_was_never_stepped(
    tmp_path: Path,
) -> None:
    saved_at(tmp_path, trainer(BLOCKS, stepped=BLOCKS[1:]), None)
    asked = trainer(BLOCKS[:2])
    planner = PlacementLoadPlanner(waive={"model": "two layers", "optim": "two layers"})
    with pytest.warns(UserWarning, match="that of 1 parameter was reset"):
        dcp.load(asked, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert planner.report.stateless == (BLOCKS[0],)


def test_m120_a_model_without_optimizer_and_a_component_called_state(tmp_path: Path) -> None:
    whole = {
        "visual.proj": arange(2, 3),
        **{f"layers.{i}.state.proj.weight": arange(2, 3, start=10 * i) for i in range(2)},
    }
    (missing, *_) = [key for key in whole if "layers.1" in key]
    lacking = {key: one for key, one in whole.items() if key != missing}
    saved_at(tmp_path, lacking, None)
    asked = {key: torch.full((2, 3), -1.0) for key in whole}
    message = refusal(
        lambda: dcp.load(
            asked, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True
        )
    )
    assert f"{missing}: the checkpoint lacks this key" in message
    # Nor beside an optimizer in the form that has no level.
    optim = {"state.proj.exp_avg": arange(2, 3), "param_groups.proj.lr": 0.1, "proj": arange(2, 3)}
    saved_at(tmp_path / "2", lacking | optim, None)
    message = refusal(
        lambda: dcp.load(
            {**asked, **optim},
            checkpoint_id=tmp_path / "2",
            planner=PlacementLoadPlanner(),
            no_dist=True,
        )
    )
    assert f"{missing}: the checkpoint lacks this key" in message


@pytest.mark.parametrize("sides", ["save", "load"])
def test_m142_a_number_on_one_side_and_a_tensor_on_the_other(tmp_path: Path, sides: str) -> None:
    numbers = {
        "optim": {
            "state": {"w": {"step": 4, "exp_avg": arange(2, 3)}},
            "param_groups": [{"lr": 0.25, "eps": 1, "params": ["w"]}],
        },
        "epoch": 3,
    }
    tensors = {
        "optim": {
            "state": {"w": {"step": torch.tensor(4.0), "exp_avg": arange(2, 3)}},
            "param_groups": [
                {"lr": torch.tensor(0.25), "eps": torch.tensor(1e-8), "params": ["w"]}
            ],
        },
        "epoch": torch.tensor(3),
    }
    numbers["optim"]["param_groups"][0]["eps"] = 1e-8  # type: ignore[index]
    saved, wanted = (numbers, tensors) if sides == "save" else (tensors, numbers)
    saved_at(tmp_path, saved, None)
    for reader in (dcp.FileSystemReader, None):
        asked: State = {
            "optim": {
                "state": {"w": {"step": 9, "exp_avg": torch.zeros(2, 3)}},
                "param_groups": [{"lr": 9, "eps": 9.0, "params": ["w"]}],
            },
            "epoch": 9,
        }
        if wanted is tensors:
            asked["optim"]["state"]["w"]["step"] = torch.tensor(9.0)
            asked["optim"]["param_groups"][0] |= {"lr": torch.tensor(9.0), "eps": torch.tensor(9.0)}
            asked["epoch"] = torch.tensor(9)
        held = asked["epoch"]
        planner = PlacementLoadPlanner()
        storage = {} if reader is None else {"storage_reader": reader(tmp_path)}
        with without_warning():
            dcp.load(asked, checkpoint_id=tmp_path, planner=planner, no_dist=True, **storage)
        group = asked["optim"]["param_groups"][0]
        assert group["lr"] == 0.25
        assert group["eps"] == pytest.approx(1e-8)
        assert (asked["epoch"], asked["optim"]["state"]["w"]["step"]) == (3, 4)
        assert torch.equal(asked["optim"]["state"]["w"]["exp_avg"], arange(2, 3))
        if wanted is tensors:
            assert asked["epoch"] is held  # in place
        else:
            assert (type(asked["epoch"]), type(group["lr"])) == (int, float)
        assert set(planner.report.casts) == {
            "epoch",
            "optim.param_groups.0.eps",
            "optim.param_groups.0.lr",
            "optim.state.w.step",
        }


@pytest.mark.parametrize("value", ["nine", 2.5, True, None])
def test_m142_what_is_no_number_of_the_tensor_s_kind_is_refused(tmp_path: Path, value: Any) -> None:
    saved_at(tmp_path, {"epoch": value}, None)
    message = refusal(
        lambda: dcp.load(
            {"epoch": torch.tensor(9)},
            checkpoint_id=tmp_path,
            planner=PlacementLoadPlanner(),
            no_dist=True,
        )
    )
    assert f"epoch: the checkpoint holds {value!r}" in message


IDS = {0: [0, 1], 1: [2, 3]}
LOCAL = ["layers.0.w", "layers.1.w"]
LOCAL_EXPERTS = ["experts.0.w", "experts.1.w"]


def numbered(names: list[str], rank: int, *, empty: bool = False, parts: str = "both") -> State:
    """Return layers of a rank with its own values, under the numbers 0 and 1."""
    values = [0.0 if empty else 1.0 + number for number in IDS[rank]]
    made = {"optim": adam(names), "model": {}}
    for name, value in zip(names, values, strict=True):
        made["model"][name] = torch.full((2,), value)
        made["optim"]["state"][name] = {
            "step": torch.tensor(9.0),
            "exp_avg": torch.full((2,), value),
        }
    return made if parts == "both" else {parts: made[parts]}


@pytest.mark.parametrize("parts", ["both", "optim"])
@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (LOCAL, lambda of: ()),
        (LOCAL_EXPERTS, lambda of: (Stack("experts.{}", 4),)),
    ],
    ids=["numbers", "a stack"],
)
def test_state_that_is_not_numbered_as_its_weights_are_is_refused(
    tmp_path: Path, names: list[str], steps: Any, parts: str
) -> None:
    """Rank 1 would get the moments of rank 0's layers."""
    world, pattern = World(2), names[0].partition(".")[0] + ".{}"

    def rename(rank: int, of: str) -> Renames:
        return Renames(Renumber(f"{of}{pattern}", IDS[rank], total=4), *steps(of))

    world.save(
        tmp_path,
        lambda rank: numbered(names, rank, parts=parts),
        lambda rank: PlacementSavePlanner(rename=rename(rank, "")),
    )

    def loaded(of: str | None) -> list[State]:
        return world.load(
            tmp_path,
            lambda rank: numbered(names, rank, empty=True, parts=parts),
            lambda rank: PlacementLoadPlanner(
                rename=Renames(*steps("")) if of is None else rename(rank, of)
            ),
        )

    for rank, state in enumerate(loaded("")):
        assert_same(state, numbered(names, rank, parts=parts))
    message = refusal(lambda: loaded("model." if parts == "both" else None))
    assert "and none for" in message
    assert "optim.state." in message


def test_state_of_a_parameter_that_another_optimizer_has_now_is_refused(tmp_path: Path) -> None:
    def held(x: list[str], y: list[str], start: int) -> State:
        model = {name: arange(2, 3, start=start) for name in "abc"}
        return {"model": model, "optim": {"x": adam(x, start=start), "y": adam(y, start=start)}}

    saved = held(["a", "b"], ["c"], 1)
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)

    def loaded() -> None:
        state = held(["a"], ["b", "c"], 50)
        dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)

    message = refusal(loaded)
    assert "optim.y.state.b" in message
    assert "optim.x.state.b" in message
    assert "another optimizer has these parameters" in message


def in_groups(groups: list[tuple[str, ...]], lrs: list[float]) -> State:
    names = [name for group in groups for name in group]
    optim = adam(names)
    optim["param_groups"] = [
        {"params": [*group], "lr": lr} for group, lr in zip(groups, lrs, strict=True)
    ]
    return {"model": {name: arange(2, 3) for name in names}, "optim": optim}


@pytest.mark.parametrize(
    "groups",
    [
        [("c",), ("a", "b")],
        [("a", "b", "c")],
        [("a",), ("b", "c")],
        [("c",)],
    ],
    ids=["another order", "joined", "one moved", "a stage without the first group"],
)
def test_a_parameter_in_another_group_than_in_the_save_is_refused(
    tmp_path: Path, groups: list[tuple[str, ...]]
) -> None:
    """The options of a numbered group are read by its number: those of other parameters."""
    saved = in_groups([("a", "b"), ("c",)], [0.1, 0.01])
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    state = in_groups(groups, [0.5] * len(groups))

    def loaded(**options: Any) -> None:
        planner = PlacementLoadPlanner(**options)
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)

    message = refusal(loaded)
    assert re.search(r"optim\.param_groups\.[01]\.params: this rank lists", message)
    assert "flatten_optimizer_state_dict=True" in message
    loaded(waive={"optim.param_groups.*.params": "one lr for all"})


@pytest.mark.parametrize("stepped", [(), ("a",)], ids=["plain SGD", "c has no step"])
def test_a_joined_group_is_refused_where_its_parameters_have_no_state(
    tmp_path: Path, stepped: tuple[str, ...]
) -> None:
    """Their weights are in the checkpoint, so that they were in a group, or frozen."""

    def held(groups: list[tuple[str, ...]], lrs: list[float]) -> State:
        state = in_groups(groups, lrs)
        moments = state["optim"]["state"]
        state["optim"]["state"] = {name: moments[name] for name in stepped}
        return state

    saved = held([("a", "b"), ("c",)], [0.1, 0.01])
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)

    def loaded(**options: Any) -> None:
        planner = PlacementLoadPlanner(**options)
        state = held([("a", "b", "c")], [0.5])
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)

    message = refusal(loaded)
    assert "optim.param_groups.0.params: this rank lists c in this group" in message
    loaded(waive={"optim.param_groups.*.params": "one lr for all"})


@pytest.mark.parametrize(
    "groups",
    [[("a", "b"), ("c",)], [("b", "a"), ("c",)], [("a",), ("c",)], [("a", "b", "lora"), ("c",)]],
    ids=["the same", "in another order", "a frozen one", "a new one"],
)
def test_parameters_in_the_groups_of_the_save_load_without_a_word(
    tmp_path: Path, groups: list[tuple[str, ...]]
) -> None:
    saved = in_groups([("a", "b"), ("c",)], [0.1, 0.01])
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    state = in_groups(groups, [0.5, 0.5])
    planner = PlacementLoadPlanner(optional=["lora"], waive={"lora": "new"})
    if groups[0][-1] != "lora":
        planner = PlacementLoadPlanner()
    with without_warning():
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert [group["lr"] for group in state["optim"]["param_groups"]] == [0.1, 0.01]
    assert [tuple(group["params"]) for group in state["optim"]["param_groups"]] == groups
