"""What a save let through is kept with the checkpoint, and a load warns of just these keys.

Replicas that differed (``on_conflict="warn"``), that were not compared (``digests="off"``), and
parameter groups that differ by stage.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    blank,
    load,
    read_whole,
    refused_save,
    same_bits,
    save,
    warned,
    without_warning,
)
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementFileSystemReader,
    PlacementRules,
    Placements,
    PlacementSavePlanner,
    Renumber,
)
from dcp_placements.offline import reshard
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.testing import World

WORLD = World(2)
NAMES = [f"layers.{layer}.experts.w{part}" for layer in range(20) for part in (1, 2)]
DIFFERED = "the ranks had different contents of it when it was saved"
UNCOMPARED = "it was not compared"


def experts(rank: int) -> dict[str, Any]:
    """Experts of each rank's own under one name, and a norm that is the same everywhere."""
    own = {name: arange(2, 3, start=100 * rank + 7 * at) for at, name in enumerate(NAMES)}
    return {**own, "norm": torch.ones(3), "step": torch.tensor(4.0)}


def empty(rank: int) -> dict[str, Any]:
    return blank(experts(rank))  # type: ignore[no-any-return]


def test_a_load_warns_of_replicas_that_differed(tmp_path: Path) -> None:
    with warned() as texts:
        save(WORLD, tmp_path, experts, on_conflict="warn")
    with warned() as texts:
        _, reports = load(WORLD, tmp_path, empty)
    (text,) = texts
    assert DIFFERED in text
    assert "layers.0-19.experts.w1" in text
    assert "norm" not in text
    assert len(text) < 2000
    assert len(reports[0].warnings) == len(NAMES)
    with without_warning():  # of what it does not read, and of what is waived
        load(WORLD, tmp_path, lambda _: {"norm": torch.zeros(3)})
        load(WORLD, tmp_path, empty, waive={"experts.*": "one of them will do"})


def test_copies_on_one_rank_that_differed_are_warned_of_as_well(tmp_path: Path) -> None:
    def rows(rank: int) -> Any:
        mesh = WORLD.mesh(rank, ep=2)
        listed = [[0, 1, 1], [2, 3]][rank]
        placement = CheckpointPlacement(mesh, {"ep": IndexShard(0, listed)}, global_shape=(4, 2))
        return PlacementRules({"w": placement})

    def state(rank: int) -> dict[str, Any]:
        return {"w": arange(3 - rank, 2, start=10 * rank), "b": torch.ones(2)}

    with warned():
        save(WORLD, tmp_path, state, rows, on_conflict="warn")
    with warned() as texts:
        load(WORLD, tmp_path, lambda rank: blank(state(rank)), rows)
    assert any(f"w: {DIFFERED}" in text for text in texts)


def test_a_load_warns_of_replicas_that_were_not_compared_and_have_no_rule(tmp_path: Path) -> None:
    def rules(rank: int) -> Any:
        mesh = WORLD.mesh(rank, ep=2)
        return PlacementRules({"layers.*.experts.w1": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    with without_warning():
        save(WORLD, tmp_path, experts, rules, digests="off")
    with warned() as texts:
        load(WORLD, tmp_path, empty, rules)
    (text,) = texts
    assert UNCOMPARED in text
    assert "layers.0-19.experts.w2" in text
    assert "w1" not in text
    assert "step" not in text
    with without_warning():
        load(WORLD, tmp_path, empty, rules, waive={"experts.w2": "replicas", "norm": "replicas"})


def test_saves_without_replicas_and_of_equal_ones_leave_no_doubt(tmp_path: Path) -> None:
    with without_warning():
        save(World(1), tmp_path / "a", experts, digests="off")
        load(World(1), tmp_path / "a", empty)
        save(WORLD, tmp_path / "b", lambda _: experts(0), on_conflict="warn")
        load(WORLD, tmp_path / "b", empty)
        save(WORLD, tmp_path / "c", lambda _: experts(0))
        load(WORLD, tmp_path / "c", empty)


def test_what_is_kept_is_small_and_damage_of_it_is_no_doubt(tmp_path: Path) -> None:
    def many(rank: int) -> dict[str, Any]:
        return {f"layers.{at}.w": torch.full((2,), rank * 1.0) for at in range(800)}

    with warned():
        save(WORLD, tmp_path, many, on_conflict="warn")
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    kept = metadata.planner_data[RESERVED_KEY]["doubts"]
    assert len(pickle.dumps(kept)) < 500
    for damaged in ({"keys": kept["keys"], "differed": b"x"}, {"keys": (1, 2)}, {}, 3):
        metadata.planner_data[RESERVED_KEY]["doubts"] = damaged
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with without_warning():
            state = {"layers.4.w": torch.zeros(2)}
            load(WORLD, tmp_path, lambda _, state=state: state, allow_partial_load=True)


def test_a_rewritten_checkpoint_keeps_its_doubts(tmp_path: Path) -> None:
    with warned():
        save(WORLD, tmp_path / "a", experts, on_conflict="warn")
    reshard(tmp_path / "a", tmp_path / "b", lambda _: Placements({}), {"dp": 1})
    with warned() as texts:
        load(WORLD, tmp_path / "b", empty)
    assert DIFFERED in texts[0]


def stage(rank: int, lr: tuple[float, float] = (0.1, 0.1)) -> dict[str, Any]:
    """Two pipeline stages with torch's default form of optimizer state."""
    name = f"layers.{rank}.w"
    groups = [{"lr": lr[rank], "betas": (0.9, 0.99), "params": [name]}]
    if rank:
        groups.append({"lr": 0.5, "betas": (0.9, 0.99), "params": ["head.w"]})
    state = {name: {"step": torch.tensor(3.0), "exp_avg": arange(3, start=rank)}}
    return {
        "model": {name: arange(3, start=rank)},
        "optim": {"state": state, "param_groups": groups},
    }


def test_parameter_groups_that_differ_by_stage_are_refused(tmp_path: Path) -> None:
    with refused_save(tmp_path) as caught:
        save(WORLD, tmp_path, lambda rank: stage(rank, (0.1, 0.2)))
    caught.says("optim.param_groups.0.lr", "flatten_optimizer_state_dict=True", "rank 0", "rank 1")
    assert "betas" not in caught.text


def test_options_that_are_dicts_and_differ_by_stage_are_refused(tmp_path: Path) -> None:
    def held(rank: int) -> dict[str, Any]:
        made = stage(rank)
        made["optim"]["param_groups"][0]["schedule"] = {"warmup": {"steps": 10 * rank}, "kind": "x"}
        return made

    with refused_save(tmp_path) as caught:
        save(WORLD, tmp_path, held)
    caught.says("optim.param_groups.0.schedule.warmup.steps", "rank 0", "rank 1")
    assert "kind" not in caught.text


def test_parameter_groups_that_differ_by_stage_and_are_let_through_are_warned_of(
    tmp_path: Path,
) -> None:
    with warned() as texts:
        save(WORLD, tmp_path, lambda rank: stage(rank, (0.1, 0.2)), on_conflict="warn")
    assert "optim.param_groups.0.lr" in texts[0]
    with warned() as texts:
        load(WORLD, tmp_path, stage)
    assert f"optim.param_groups.0.lr: {DIFFERED}" in texts[0]


def test_a_group_lists_the_parameters_of_all_ranks_as_plain_values(tmp_path: Path) -> None:
    with without_warning():
        save(WORLD, tmp_path, stage)
    state: Any = {"optim": {"param_groups": [{"params": None, "lr": None}, {"params": None}]}}
    dcp.load(state, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert state["optim"]["param_groups"][0]["params"] == ["layers.0.w", "layers.1.w"]
    assert state["optim"]["param_groups"][1]["params"] == ["head.w"]
    for names in state["optim"]["param_groups"]:
        assert type(names["params"]) is list
    # A rank keeps its own.
    with without_warning():
        loaded, _ = load(WORLD, tmp_path, stage)
    assert [one["optim"]["param_groups"][0]["params"] for one in loaded] == [
        ["layers.0.w"],
        ["layers.1.w"],
    ]


@pytest.mark.parametrize("empty", [0, 1])
def test_a_group_without_parameters_on_one_rank_is_joined_and_stays_empty_there(
    tmp_path: Path, empty: int
) -> None:
    """As where a stage has no bias, which does not decay."""

    def held(rank: int) -> dict[str, Any]:
        state = stage(rank)
        listed = [] if rank == empty else ["head.w"]
        state["optim"]["param_groups"][1:] = [{"lr": 0.5, "params": listed}]
        return state

    with without_warning():
        save(WORLD, tmp_path, held)
        loaded, _ = load(WORLD, tmp_path, held)
    state: Any = {"optim": {"param_groups": [{"params": None}, {"params": None}]}}
    dcp.load(state, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert state["optim"]["param_groups"][1]["params"] == ["head.w"]
    assert [one["optim"]["param_groups"][1]["params"] for one in loaded] == [
        held(rank)["optim"]["param_groups"][1]["params"] for rank in range(2)
    ]


def test_lists_of_renamed_parameters_are_joined_under_the_names_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    def local(rank: int) -> dict[str, Any]:
        return {
            "experts.0.w": arange(3, start=rank),
            "optim": {
                "state": {"experts.0.w": {"exp_avg": arange(3, start=rank)}},
                "param_groups": [{"lr": 0.1, "params": ["experts.0.w"]}],
            },
        }

    World(2).save(
        tmp_path,
        local,
        lambda rank: PlacementSavePlanner(rename=Renumber("experts.{}", [rank], total=2)),
    )
    state: Any = {"optim": {"param_groups": [{"params": None}]}}
    dcp.load(state, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert state["optim"]["param_groups"][0]["params"] == ["experts.0.w", "experts.1.w"]


def test_stored_lists_are_read_by_readers_that_admit_plain_values_alone(tmp_path: Path) -> None:
    save(WORLD, tmp_path, stage)
    state: Any = {"optim": {"param_groups": [{"params": None}, {"params": None}]}}
    reader = PlacementFileSystemReader(tmp_path, restricted=True)
    planner = dcp.DefaultLoadPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert state["optim"]["param_groups"][0]["params"] == ["layers.0.w", "layers.1.w"]
    assert state["optim"]["param_groups"][1]["params"] == ["head.w"]
    assert same_bits(read_whole(tmp_path)["model.layers.1.w"], arange(3, start=1))
