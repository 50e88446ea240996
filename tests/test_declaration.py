"""``Placements``: both planners are made of one declaration, and cannot differ in it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    Placements,
    PlacementSavePlanner,
    RaggedShard,
    Renumber,
    check,
)
from dcp_placements.testing import FakeMesh, World

WORLD = World(2)
MESH = MeshCoordinate(("ep",), (2,), (1,))
BY_EP = CheckpointPlacement(MESH, {"ep": Shard(0)})


def by_function(fqn: str, tensor: Any) -> CheckpointPlacement | None:
    return BY_EP if "experts" in fqn else None


def both(placements: Placements, **options: Any) -> tuple[Any, Any]:
    return placements.save_planner(**options), placements.load_planner(**options)


def test_a_mapping_becomes_rules() -> None:
    placements = Placements({"experts.w1": BY_EP, "experts": None})
    assert isinstance(placements.rules, PlacementRules)
    assert placements.rules.patterns == ("experts.w1", "experts")
    assert placements.rules("layers.0.experts.w1") is BY_EP
    with pytest.raises(PlacementError, match="rule 'w' gives 3, which is no CheckpointPlacement"):
        Placements({"w": 3})  # type: ignore[dict-item]


def test_options_are_those_of_the_planners() -> None:
    placements = Placements(None)
    saver = placements.save_planner(digests="full", step=7)
    assert (saver.digests, saver.step) == ("full", 7)
    assert placements.load_planner(cast="error").cast == "error"
    with pytest.raises(PlacementError, match="digests='half'"):
        placements.save_planner(digests="half")
    with pytest.raises(TypeError, match="digest"):
        placements.load_planner(digest="full")


@pytest.mark.parametrize("side", ["save_planner", "load_planner"])
@pytest.mark.parametrize("option", ["rules", "rename"])
def test_a_side_has_no_rules_or_rename_of_its_own(side: str, option: str) -> None:
    with pytest.raises(TypeError, match=rf"multiple values for.*{option}"):
        getattr(Placements(None), side)(**{option: None})


def test_waivers_are_declared_once_and_added_to() -> None:
    placements = Placements(None, waive={"linear_fc1": "one tensor"})
    for planner in both(placements):
        assert planner.waive == {"linear_fc1": "one tensor"}
    for planner in both(placements, waive={"qkv": "by head"}):
        assert planner.waive == {"linear_fc1": "one tensor", "qkv": "by head"}
    assert placements.waive == {"linear_fc1": "one tensor"}
    with pytest.raises(PlacementError, match="needs a reason"):
        Placements(None, waive={"w": ""})


def test_what_is_waived_is_silent_on_both_sides(tmp_path: Path) -> None:
    """A plain cut of a name that is fused elsewhere: a lint of saves and of loads."""

    def on(rank: int) -> Placements:
        placement = CheckpointPlacement(WORLD.mesh(rank, tp=2), {"tp": Shard(0)})
        return Placements({"linear_fc1": placement}, waive={"linear_fc1": "one tensor"})

    def held(rank: int) -> dict[str, torch.Tensor]:
        return {"mlp.linear_fc1.weight": arange(4, 2, start=8 * rank)}

    with without_warning():
        WORLD.save(tmp_path, held, lambda rank: on(rank).save_planner())
        WORLD.load(tmp_path, held, lambda rank: on(rank).load_planner())
    bare = [Placements(on(rank).rules) for rank in range(2)]
    with pytest.warns(UserWarning, match="linear_fc1"):
        WORLD.save(tmp_path, held, lambda rank: bare[rank].save_planner())
    with pytest.warns(UserWarning, match="linear_fc1"):
        WORLD.load(tmp_path, held, lambda rank: bare[rank].load_planner())


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: PlacementSavePlanner(digests="some"), "digests='some': choose one of ('sampled'"),
        (lambda: PlacementSavePlanner(on_conflict="x"), "on_conflict='x': choose one of ('error'"),
        (lambda: PlacementLoadPlanner(cast="never"), "cast='never': choose one of ('error'"),
        (lambda: PlacementLoadPlanner(optional=["a..b"]), "empty component"),
        (lambda: PlacementSavePlanner({"w": None}), "rules= is dict: give"),
        (lambda: PlacementLoadPlanner("w"), "rules= is str: give"),
        (lambda: PlacementSavePlanner(rename={"a": "b"}), "is no function of a key"),
        (lambda: PlacementLoadPlanner(rename="experts"), "is no function of a key"),
        (lambda: PlacementSavePlanner(waive={"w": ""}), "needs a reason"),
        (lambda: PlacementSavePlanner(waive={"**": "all"}), "names some keys, not all"),
        (lambda: Placements(None, rename=Renumber), "Renumber'> is no function of a key"),
        (lambda: Placements(None, waive=["x"]), "must be {pattern: reason}, not list"),
        (lambda: Placements(None).save_planner(waive=["x"]), "must be {pattern: reason}, not list"),
        (lambda: Placements(None).save_planner(step="five"), "step='five': give a number"),
        (lambda: Placements(None).load_planner(optional=5), "optional=5: give patterns"),
        (lambda: Placements(None).load_planner(optional=[None]), "a pattern of keys is a str"),
        (lambda: Placements(None).load_planner(exchange="yes"), "exchange='yes': give True"),
        (lambda: CheckpointPlacement(MESH, Shard(0)), "to which axis of mesh"),
        (lambda: CheckpointPlacement({"ep": 2}, {"ep": Shard(0)}), "dict is no mesh"),
    ],
)
def test_an_argument_of_another_kind_is_refused_where_it_is_given(declare: Any, text: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(text)):
        declare()


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Placements(None).rename = str.lower  # type: ignore[misc]
    waive = {"w": "a reason"}
    placements = Placements(None, waive=waive)
    waive["v"] = "another"
    assert placements.waive == {"w": "a reason"}


def test_it_can_be_pickled() -> None:
    rename = Renumber("experts.{}", [2, 3], total=4)
    placements = Placements({"experts": BY_EP}, rename=rename, waive={"w": "a reason"})
    copied = pickle.loads(pickle.dumps(placements))
    assert repr(copied) == repr(placements)
    assert copied.load_planner().rename("experts.1.w") == "experts.3.w"
    by_call = pickle.loads(pickle.dumps(Placements(by_function)))
    assert by_call.rules is by_function


def test_check_takes_it_in_place_of_rules() -> None:
    one = MeshCoordinate(("ep",), (1,), (0,))
    placements = Placements({"experts": CheckpointPlacement(one, {"ep": Shard(0)})})
    assert check({"experts.w": arange(4, 2)}, placements).rules == {"'experts'": 1}
    report = check({"e.0.w": arange(4)}, Placements(None, rename=lambda key: f"model.{key}"))
    assert set(report.keys) == {"model.e.0.w"}
    with pytest.raises(TypeError, match=r"multiple values for.*rename"):
        check({"w": arange(4)}, placements, rename=str.lower)
    with pytest.raises(PlacementError, match="rules= is dict"):
        check({"w": arange(4)}, {"w": None})  # type: ignore[arg-type]
    assert check({"w": arange(4)}, Placements(None), digests="full").warnings == ()


PLACEMENTS = Placements({"experts": None})


@pytest.mark.parametrize(
    ("state_dict", "rules", "message"),
    [
        (torch.nn.Linear(2, 2), PLACEMENTS, "state_dict= is a Linear: pass {key: value}"),
        ([1], PLACEMENTS, "state_dict= is a list: pass {key: value}"),
        (PLACEMENTS, {"w": 1}, "state_dict= is a Placements: pass {key: value}"),
        ({"w": 1}, PLACEMENTS.save_planner(), "rules= is PlacementSavePlanner: give"),
        ({"w": 1}, PLACEMENTS.load_planner(), "rules= is PlacementLoadPlanner: give"),
    ],
)
def test_check_says_which_argument_is_wrong(state_dict: Any, rules: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(message)):
        check(state_dict, rules)


def test_a_simulated_world_says_that_it_runs_no_exchange(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a simulated world has no process group"):
        WORLD.load(
            tmp_path, lambda rank: {}, lambda rank: PLACEMENTS.load_planner(exchange=rank == 1)
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Placements(PlacementRules), "the class PlacementRules: give"),  # type: ignore[arg-type]
        (
            lambda: Placements(FakeMesh((1,), ("ep",), rank=0)),
            "FakeMesh: give PlacementRules({pattern: ",
        ),  # type: ignore[arg-type]
        (lambda: Placements([("w", None)]), "list: give PlacementRules({pattern: "),  # type: ignore[arg-type]
        (lambda: check({"w": 1}, Placements), "the class Placements: give"),
        (lambda: FusedShard(0, ("gate", "up")), "parts=('gate', 'up') must be numbers"),  # type: ignore[arg-type]
        (lambda: RaggedShard(0, 8), "sizes=8 must be numbers of rows"),  # type: ignore[arg-type]
        (lambda: RaggedShard(0, (2.5, 1)), "sizes=(2.5, 1) must be numbers of rows"),  # type: ignore[arg-type]
        (lambda: FlatShard(8), "sizes=8 must be counts of elements"),  # type: ignore[arg-type]
        (lambda: IndexShard(0, 3), "indices=3 must be numbers of rows"),  # type: ignore[arg-type]
        (lambda: IndexShard(0, {7, 2}), "must be numbers of rows, in their order"),  # type: ignore[arg-type]
        (lambda: FusedShard(0, (2.5, 1)), "parts=(2.5, 1) must be numbers of rows"),  # type: ignore[arg-type]
        (lambda: Renumber("e.{}", {7, 2}, 8), "must be numbers of rows, in their order"),  # type: ignore[arg-type]
        (lambda: Renumber("e.{}", [3.5], 8), "ids=[3.5] must be numbers of rows"),  # type: ignore[list-item]
    ],
)
def test_m113_what_is_of_a_wrong_type_is_named_in_one_line(
    wrong: Callable[[], Any], message: str
) -> None:
    with pytest.raises(PlacementError) as refusal:
        wrong()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
