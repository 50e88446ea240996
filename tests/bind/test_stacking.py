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
    Split,
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


def three_rows() -> dict[str, torch.Tensor]:
    """Return the template of three experts in one tensor, with one step for all of them."""
    return {
        "experts.w1": torch.zeros(3, 2),
        "optim.state.experts.w1.exp_avg": torch.zeros(3, 2),
        "optim.state.experts.w1.step": torch.tensor(0.0),
    }


def test_one_step_for_all_rows_is_not_read_from_steps_of_rows(tmp_path: Path) -> None:
    save_alone(tmp_path / "stack", adam([0, 1, 2], steps=[4, 4, 4]), stack([0, 1, 2], 3))
    message = refusal(lambda: load_alone(tmp_path / "stack", three_rows(), None))
    assert "step: the checkpoint holds a (3,) tensor, but () is needed" in message
    assert "one number for all experts" in message
    save_alone(tmp_path / "names", adam([0, 1, 2], steps=[4, 4, 4]), None)
    message = refusal(lambda: load_alone(tmp_path / "names", three_rows(), Unstack("experts.{}")))
    assert "optim.state.experts.w1.step: is a scalar, and rename= makes several tensors" in message
    assert "leave it out" in message


def test_a_step_of_each_row_is_not_read_from_one_for_all(tmp_path: Path) -> None:
    save_alone(tmp_path, three_rows(), None)
    held = adam([0, 1, 2], steps=[9, 9, 9])
    message = refusal(lambda: load_alone(tmp_path, held, stack([0, 1, 2], 3)))
    assert "step: the checkpoint holds a () tensor, but (3,) is needed" in message
    assert "one number for all experts" in message


def test_weights_without_their_optimizer_state_change_their_form(tmp_path: Path) -> None:
    """The way out of the refusals above, as they tell it."""
    save_alone(tmp_path / "names", adam([0, 1, 2]), None)
    whole = {"experts.w1": torch.zeros(3, 2)}
    load_alone(tmp_path / "names", whole, Unstack("experts.{}"))
    assert torch.equal(whole["experts.w1"], torch.tensor([[1.0] * 2, [2.0] * 2, [3.0] * 2]))
    save_alone(tmp_path / "whole", whole, None)
    held = adam([0, 1, 2], sign=-1)
    load_alone(tmp_path / "whole", held, stack([0, 1, 2], 3))
    assert_same(held, adam([0, 1, 2]))


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

    groups = {"optim.param_groups.0.params": [f"experts.{i}.w1" for i in range(3)]}
    saved = adam([0, 1, 2], steps=[4, 4])
    save_alone(tmp_path, saved | groups, rename)
    read = read_whole(tmp_path)
    assert torch.equal(
        read["experts.w1"], torch.stack([saved[f"experts.{i}.w1"] for i in range(3)])
    )
    assert "optim.state.experts.2.w1.exp_avg" not in read
    held = adam([0, 1, 2], sign=-1, steps=[9, 9, 9]) | groups
    with pytest.warns(UserWarning, match="was reset to its beginning"):
        load_alone(tmp_path, held, rename)
    assert not held["optim.state.experts.2.w1.exp_avg"].any()
    assert held["optim.state.experts.2.w1.step"] == 0
    assert all(torch.equal(held[key], value) for key, value in saved.items())


@pytest.mark.parametrize(
    "value",
    [0.1, "adam", [0.9, 0.99], np.ones(2), deque([1])],
    ids=["float", "text", "list", "array", "deque"],
)
def test_objects_are_no_rows_of_a_stack(tmp_path: Path, value: Any) -> None:
    options = {f"optim.param_groups.experts.{i}.w1.lr": value for i in range(2)}
    held = {**adam([0, 1]), **options}
    message = refusal(lambda: save_alone(tmp_path, held, stack([0, 1], 2)))
    assert "optim.param_groups.experts.w1.lr: optim.param_groups.experts.0.w1.lr is an" in message
    assert "flatten_optimizer_state_dict" in message
    assert not list(tmp_path.iterdir())
    save_alone(tmp_path, adam([0, 1]), stack([0, 1], 2))
    held = {**adam([0, 1]), **options}
    assert "lr is an object" in refusal(lambda: load_alone(tmp_path, held, stack([0, 1], 2)))


def test_options_of_a_group_are_no_rows_of_a_stack(tmp_path: Path) -> None:
    """The nested form of optimizer state, which has one lr for a group, beside a ``Stack``."""

    def held(factor: float) -> dict[str, Any]:
        names = ["experts.0.w1", "experts.1.w1"]
        state = {
            name: {"exp_avg": torch.full((2,), factor * at), "step": torch.tensor(factor)}
            for at, name in enumerate(names)
        }
        model = {name: torch.full((2,), factor + at) for at, name in enumerate(names)}
        optim = {"state": state, "param_groups": [{"lr": 0.1 * factor, "params": names}]}
        return {"model": model, "optim": optim}

    save_alone(tmp_path, held(3.0), Stack("experts.{}", 2))
    loaded = held(0.0)
    load_alone(tmp_path, loaded, Stack("experts.{}", 2))
    expected = held(3.0)
    assert loaded["optim"]["param_groups"] == expected["optim"]["param_groups"]
    assert_same(loaded["model"], expected["model"])
    for name, state in expected["optim"]["state"].items():
        assert_same(loaded["optim"]["state"][name], state)


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


def test_rows_on_meshes_in_which_a_rank_stands_elsewhere_are_refused(tmp_path: Path) -> None:
    world, rename = World(2), Stack("experts.{}", 2)
    path = tmp_path / "whole"
    dcp.save({"experts.w": torch.zeros(2, 8)}, checkpoint_id=path, no_dist=True)
    expected = "cannot stack rows of different dtypes, shapes or placements"

    def held(rank: int) -> dict[str, Any]:
        return of_meshes(rank, (0, 1), (1, 0))

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
        ({"experts.w": torch.tensor(2.0)}, Unstack("experts.{}"), "experts.w: is a scalar"),
        ({"experts.w.lr": 0.1}, Unstack("experts.{}"), "experts.w.lr: is an object"),
        ({"w": torch.tensor(2.0)}, Split("w", ("a", "b")), "w: is a scalar"),
        ({"w": "text"}, Split("w", ("a", "b")), "w: is an object"),
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


def test_a_name_that_ends_another_has_rows_of_its_own(tmp_path: Path) -> None:
    held = {"ema.layers.w": torch.ones(3, 2), "layers.w": torch.zeros(4, 2)}
    save_alone(tmp_path, dict(held), Unstack("layers.{}.w"))
    rows = {f"layers.{row}.w": torch.zeros(2) for row in range(4)}
    assert_same(
        read_whole(tmp_path), rows | {f"ema.layers.{row}.w": torch.ones(2) for row in range(3)}
    )


def test_a_step_that_is_a_dtensor_has_no_rows(tmp_path: Path) -> None:
    world = World(2)

    def state(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, dp=2)
        return {
            "experts.w": FakeDTensor(torch.ones(1, 3), mesh, [Shard(0)], (2, 3)),
            "optim.state.experts.w.step": FakeDTensor(torch.tensor(3.0), mesh, [Replicate()], ()),
        }

    message = refusal(
        lambda: world.save(
            tmp_path, state, lambda rank: PlacementSavePlanner(rename=Unstack("experts.{}"))
        )
    )
    assert "optim.state.experts.w.step: is a scalar" in message
