"""Experts by name on the ranks, stacked in the checkpoint, and the other way round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_same, read_whole, refusal
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Row,
    Rows,
    Stack,
    Unstack,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World


def adam(experts: Sequence[int], *, sign: int = 1, steps: Sequence[int] = ()) -> dict[str, Any]:
    """Return local experts of two numbers each; ``steps`` of those that have optimizer state."""
    held: dict[str, Any] = {}
    for local, expert in enumerate(experts):
        held[f"experts.{local}.w1"] = torch.full((2,), sign * (expert + 1.0))
        if local < len(steps):
            held[f"optim.state.experts.{local}.w1.exp_avg"] = torch.full((2,), sign * expert + 0.5)
            held[f"optim.state.experts.{local}.w1.step"] = torch.tensor(float(steps[local]))
    return held


def stack(ids: Sequence[int], total: int, **options: Any) -> Renames:
    return Renames(Renumber("experts.{}", ids, total), Stack("experts.{}", total, **options))


def save_alone(path: Path, state_dict: dict[str, Any], rename: Any, **options: Any) -> Any:
    planner = PlacementSavePlanner(rename=rename, **options)
    dcp.save(state_dict, checkpoint_id=path, planner=planner, no_dist=True)
    return planner


def load_alone(path: Path, state_dict: dict[str, Any], rename: Any, **options: Any) -> Any:
    planner = PlacementLoadPlanner(rename=rename, **options)
    dcp.load(state_dict, checkpoint_id=path, planner=planner, no_dist=True)
    return planner


def test_steps_of_their_own_are_kept_row_by_row(tmp_path: Path) -> None:
    world = World(2)
    ids = [[2, 0], [1]]
    world.save(
        tmp_path,
        lambda rank: adam(ids[rank], steps=[5 + 10 * rank, 6]),
        lambda rank: PlacementSavePlanner(rename=stack(ids[rank], 3)),
    )
    read = read_whole(tmp_path)
    assert torch.equal(read["optim.state.experts.w1.step"], torch.tensor([6.0, 15.0, 5.0]))
    assert torch.equal(
        read["optim.state.experts.w1.exp_avg"], torch.tensor([[0.5] * 2, [1.5] * 2, [2.5] * 2])
    )
    held = adam([1, 2], sign=-1, steps=[0, 0])
    load_alone(tmp_path, held, stack([1, 2], 3))
    assert_same(held, adam([1, 2], steps=[15, 5]))

    whole = {"optim.state.experts.w1.step": torch.tensor(0.0)}
    message = refusal(lambda: load_alone(tmp_path, whole, None))
    assert "step: this rank has one memory for several rows of it" in message
    assert "of optim.state.experts.w1.step, where [" in message


def three_rows() -> dict[str, torch.Tensor]:
    """Return the template of three experts in one tensor, with one step for all of them."""
    return {
        "experts.w1": torch.zeros(3, 2),
        "optim.state.experts.w1.exp_avg": torch.zeros(3, 2),
        "optim.state.experts.w1.step": torch.tensor(0.0),
    }


def test_one_step_for_all_rows_is_read_from_rows_that_agree(tmp_path: Path) -> None:
    save_alone(tmp_path, adam([0, 1, 2], steps=[4, 4, 4]), stack([0, 1, 2], 3))
    whole = three_rows()
    planner = load_alone(tmp_path, whole, None)
    assert whole["optim.state.experts.w1.step"] == 4
    assert torch.equal(whole["experts.w1"], torch.tensor([[1.0] * 2, [2.0] * 2, [3.0] * 2]))
    assert planner.report.missing == ()


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([4, 4, 7], "[4.0] of optim.state.experts.0.w1.step, where [7.0] is left"),
        ([4, 4], "step: the checkpoint has optimizer state of 2 rows"),
    ],
    ids=["do not agree", "never stepped"],
)
def test_rows_by_name_without_a_step_of_all_are_no_one_step(
    tmp_path: Path, steps: list[int], text: str
) -> None:
    save_alone(tmp_path, adam([0, 1, 2], steps=steps), None)
    assert text in refusal(lambda: load_alone(tmp_path, three_rows(), Unstack("experts.{}")))


def test_a_stack_with_a_row_that_nobody_holds_is_refused(tmp_path: Path) -> None:
    message = refusal(
        lambda: save_alone(tmp_path, adam([0, 1, 2], steps=[4, 4]), stack([0, 1, 2], 3))
    )
    assert "optim.state.experts.w1.exp_avg" in message
    assert "nobody holds all of the (3, 2) tensor" in message
    assert "a Stack of local numbers needs a Renumber before it" in message
    assert "missing:     [2:3, :] of (3, 2) (2 of 6 elements)" in message
    assert "never stepped" in message
    assert not list(tmp_path.glob("*metadata*"))


def test_state_a_tensor_per_row_beside_stacked_parameters_may_lack(tmp_path: Path) -> None:
    """The way out of a stack with rows that were never stepped, as the refusal tells it."""
    stacked = Stack("experts.{}", 3)

    def rename(key: str) -> str | Row | Rows:
        return key if ".state." in key else stacked(key)

    saved = adam([0, 1, 2], steps=[4, 4])
    save_alone(tmp_path, saved, rename)
    read = read_whole(tmp_path)
    assert torch.equal(
        read["experts.w1"], torch.stack([saved[f"experts.{i}.w1"] for i in range(3)])
    )
    assert "optim.state.experts.2.w1.exp_avg" not in read
    held = adam([0, 1, 2], sign=-1, steps=[9, 9, 9])
    with pytest.warns(UserWarning, match="was reset to 0"):
        load_alone(tmp_path, held, rename)
    assert not held["optim.state.experts.2.w1.exp_avg"].any()
    assert held["optim.state.experts.2.w1.step"] == 0
    assert all(torch.equal(held[key], value) for key, value in saved.items())


def test_objects_of_a_stack_must_be_equal(tmp_path: Path) -> None:
    def held(second: float) -> dict[str, Any]:
        groups = {f"optim.param_groups.experts.{i}.w1.lr": lr for i, lr in enumerate((0.1, second))}
        return {**adam([0, 1]), **groups}

    message = refusal(lambda: save_alone(tmp_path, held(0.2), stack([0, 1], 2)))
    assert "optim.param_groups.experts.w1.lr: one object cannot be stored for all rows" in message
    assert "experts.0.w1.lr is 0.1" in message
    assert "experts.1.w1.lr is 0.2" in message
    save_alone(tmp_path, held(0.1), stack([0, 1], 2))
    loaded = held(0.7)
    load_alone(tmp_path, loaded, stack([0, 1], 2))
    assert loaded["optim.param_groups.experts.0.w1.lr"] == 0.1
    assert loaded["optim.param_groups.experts.1.w1.lr"] == 0.1


def test_a_row_that_a_rank_holds_twice_is_written_once_and_read_twice(tmp_path: Path) -> None:
    world = World(2)
    ids = [[1, 0, 1], [2, 1]]
    planners = world.save(
        tmp_path,
        lambda rank: adam(ids[rank], steps=[3] * 3),
        lambda rank: PlacementSavePlanner(rename=stack(ids[rank], 3)),
    )
    report = planners[0].report  # type: ignore[attr-defined]
    assert report.keys["experts.w1"].unique_nbytes == 24
    loaded = world.load(
        tmp_path,
        lambda rank: adam(ids[rank], sign=-1, steps=[0] * 3),
        lambda rank: PlacementLoadPlanner(rename=stack(ids[rank], 3)),
    )
    for rank in range(2):
        assert_same(loaded[rank], adam(ids[rank], steps=[3] * 3))


def of_meshes(rank: int, *ranks: Sequence[int]) -> dict[str, Any]:
    """Return a row of eight numbers for each mesh, sharded over its ranks."""
    meshes = [FakeMesh((2,), ("fsdp",), rank=rank, ranks=torch.tensor(one)) for one in ranks]
    return {
        f"experts.{row}.w": FakeDTensor.distribute(torch.arange(8.0), mesh, [Shard(0)])
        for row, mesh in enumerate(meshes)
    }


@pytest.mark.parametrize("other", [(1, 0), (2, 3)])
def test_rows_on_meshes_in_which_a_rank_stands_elsewhere_are_refused(
    tmp_path: Path, other: tuple[int, int]
) -> None:
    world, rename = World(4), Stack("experts.{}", 2)
    path = tmp_path / "whole"
    dcp.save({"experts.w": torch.zeros(2, 8)}, checkpoint_id=path, no_dist=True)
    expected = "cannot stack rows of different dtypes, shapes or placements"

    def held(rank: int) -> dict[str, Any]:
        return of_meshes(rank, (0, 1), other) if rank in other else {}

    def saver(rank: int) -> PlacementSavePlanner:
        return PlacementSavePlanner(rename=rename)

    def loader(rank: int) -> PlacementLoadPlanner:
        return PlacementLoadPlanner(rename=rename)

    assert expected in refusal(lambda: world.save(tmp_path / "new", held, saver))
    assert expected in refusal(lambda: world.load(path, held, loader))


def test_rows_on_equal_places_of_several_meshes_are_stacked(tmp_path: Path) -> None:
    World(2).save(
        tmp_path,
        lambda rank: of_meshes(rank, (0, 1), (0, 1)),
        lambda rank: PlacementSavePlanner(rename=Stack("experts.{}", 2)),
    )
    assert torch.equal(read_whole(tmp_path)["experts.w"], torch.arange(8.0).expand(2, 8))


@pytest.mark.parametrize(
    ("held", "rename", "expected"),
    [
        (
            {"experts.0.w": torch.zeros(2), "experts.1.w": torch.zeros(3)},
            Stack("experts.{}", 2),
            "cannot stack rows of different dtypes, shapes or placements",
        ),
        (
            {"experts.0.w": torch.zeros(2), "experts.1.w": 3},
            Stack("experts.{}", 2),
            "cannot stack what is no tensor",
        ),
        (
            {"experts.0.w": torch.zeros(2), "experts.w": torch.zeros(2)},
            Stack("experts.{}", 1),
            "gives this one name to both",
        ),
        ({"experts.2.w": torch.zeros(2)}, Stack("experts.{}", 2), "beyond the 2 rows"),
        ({"w": torch.zeros(2)}, lambda key: Row(key, 3, 2), "gave row 3 of 2"),
        (
            {"a.w": torch.zeros(2), "b.w": torch.zeros(2)},
            lambda key: Row("w", 0 if key < "b" else 1, 2 if key < "b" else 3),
            "one of 2 rows on dim 0, and b.w as one of 3 rows on dim 0",
        ),
        (
            {"experts.w": torch.zeros(2)},
            Unstack("experts.{}", dim=1),
            "cannot be unstacked on dim 1: its shape is (2,)",
        ),
        (
            {"experts.0.w": torch.zeros(2)},
            Stack("experts.{}", 2, dim=2),
            "rows of shape (2,) on dim 2",
        ),
        ({"experts.w": torch.tensor(2.0)}, Unstack("experts.{}"), "its rows cannot be determined"),
        ({"experts.w.lr": 0.1}, Unstack("experts.{}"), "its rows cannot be determined"),
        (
            {"experts.w": torch.zeros(2), "experts.0.w": torch.zeros(())},
            Unstack("experts.{}.w"),
            "gives this one name to a row and to another value",
        ),
        (
            {"experts.0.w": torch.zeros(2)},
            Renames(Stack("experts.{}", 2), Unstack("w.{}")),
            "already is stacked or unstacked",
        ),
    ],
)
def test_what_cannot_be_stacked_or_unstacked_is_refused(
    tmp_path: Path, held: dict[str, Any], rename: Any, expected: str
) -> None:
    assert expected in refusal(lambda: save_alone(tmp_path, held, rename))
    assert not list(tmp_path.iterdir())


def test_a_rule_for_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    world = World(1)
    rules = PlacementRules(
        {"experts.w1": CheckpointPlacement(world.mesh(0, ep=1), [Shard(0)], global_shape=(5, 2))}
    )
    message = refusal(lambda: save_alone(tmp_path, adam([0, 1]), stack([0, 1], 2), rules=rules))
    assert "stacks 2 rows on dim 0 of a tensor of 2 dims" in message
    assert "global_shape=(5, 2)" in message


def rows_with_objects(kind: str, *, equal: bool) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for i in range(2):
        value = 1.0 if equal else float(i)
        saved[f"experts.{i}.w1"] = torch.full((3, 4), float(i))
        saved[f"optim.state.experts.{i}.w1.exp_avg"] = torch.full((3, 4), -float(i))
        saved[f"optim.state.experts.{i}.w1.extra"] = (
            np.full((2, 2), value) if kind == "arrays" else deque([torch.full((2,), value)])
        )
    return saved


@pytest.mark.parametrize(
    ("kind", "equal"), [("arrays", True), ("arrays", False), ("tensors", False)]
)
def test_objects_with_elements_are_compared_when_one_stands_for_all_rows(
    kind: str, equal: bool, tmp_path: Path
) -> None:
    saved = rows_with_objects(kind, equal=equal)
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    held: dict[str, Any] = {
        "experts.w1": torch.zeros(2, 3, 4),
        "optim.state.experts.w1.exp_avg": torch.zeros(2, 3, 4),
        "optim.state.experts.w1.extra": "",
    }
    if not equal:
        message = refusal(lambda: load_alone(tmp_path, held, Unstack("experts.{}")))
        assert "w1.extra: this rank has one object for them" in message
        return
    load_alone(tmp_path, held, Unstack("experts.{}"))
    assert np.array_equal(held["optim.state.experts.w1.extra"], np.ones((2, 2)))


def test_steps_of_two_optimizers_have_the_rows_of_their_own_moments(tmp_path: Path) -> None:
    def held(rank: int) -> dict[str, Any]:
        mine = {"exp_avg": torch.full((2, 3), 1.0 * rank), "step": torch.tensor(3.0)}
        both = {"exp_avg": torch.ones(3, 3), "step": torch.tensor(7.0)}
        return {"a.state.layers.w": mine, "b.state.layers.w": both}

    def planner(rank: int) -> PlacementSavePlanner:
        over_ep = CheckpointPlacement(World(2).mesh(rank, ep=2), {"ep": Shard(0)})
        rules = PlacementRules({"a.state": over_ep})
        return PlacementSavePlanner(rules, rename=Unstack("layers.{}.w"))

    World(2).save(tmp_path, held, planner)
    keys = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    steps = sorted(key for key in keys if key.endswith("step"))
    rows = [("a", row) for row in range(4)] + [("b", row) for row in range(3)]
    assert steps == [f"{model}.state.layers.{row}.w.step" for model, row in rows]


def test_a_name_that_ends_another_has_rows_of_its_own(tmp_path: Path) -> None:
    held = {"ema.layers.w": torch.ones(3, 2), "layers.w": torch.zeros(4, 2)}
    save_alone(tmp_path, dict(held), Unstack("layers.{}.w"))
    rows = {f"layers.{row}.w": torch.zeros(2) for row in range(4)}
    assert_same(
        read_whole(tmp_path), rows | {f"ema.layers.{row}.w": torch.ones(2) for row in range(3)}
    )


def test_a_step_that_is_a_dtensor_goes_to_every_row(tmp_path: Path) -> None:
    world = World(2)

    def state(rank: int, value: float) -> dict[str, Any]:
        mesh = world.mesh(rank, dp=2)
        rows, step = torch.full((1, 3), value), torch.tensor(value)
        return {
            "experts.w": FakeDTensor(rows, mesh, [Shard(0)], (2, 3)),
            "optim.state.experts.w.exp_avg": FakeDTensor(rows.clone(), mesh, [Shard(0)], (2, 3)),
            "optim.state.experts.w.step": FakeDTensor(step, mesh, [Replicate()], ()),
        }

    by_row = Unstack("experts.{}")
    world.save(
        tmp_path,
        lambda rank: state(rank, 3.0),
        lambda rank: PlacementSavePlanner(rename=by_row),
    )
    loaded = world.load(
        tmp_path,
        lambda rank: state(rank, 0.0),
        lambda rank: PlacementLoadPlanner(rename=by_row),
    )
    read = read_whole(tmp_path)
    assert [read[f"optim.state.experts.{row}.w.step"] for row in range(2)] == [3, 3]
    for rank in range(2):
        assert loaded[rank]["optim.state.experts.w.step"].to_local() == 3
