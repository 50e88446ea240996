"""Tensors of meshes that this rank is no part of, as those of other pipeline stages."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner, Replace, Stack
from dcp_placements.bind.place import place
from dcp_placements.testing import FakeDTensor, FakeMesh, World


class Counted(str):
    """A key that counts how often it is compared with another one."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__ne__(self, other)

    __hash__ = str.__hash__


def stages(tensors: int, period: int) -> dict[str, Any]:
    """Return tensors of two stages, of which rank 0 is in the first; every ``period``-th is its."""
    meshes = [
        FakeMesh((2,), ("fsdp",), rank=0, ranks=torch.tensor(one)) for one in ([0, 1], [2, 3])
    ]
    return {
        Counted(f"layers.{at}.w"): FakeDTensor(
            torch.zeros(0 if at % period else 2, 2), meshes[bool(at % period)], [Shard(0)], (4, 2)
        )
        for at in range(tensors)
    }


def comparisons(tensors: int, period: int) -> int:
    state = stages(tensors, period)
    Counted.compared = 0
    placing = place(state, None)
    mine = [key for at, key in enumerate(state) if not at % period]
    assert list(placing.placed) == mine
    assert placing.absent == state.keys() - set(mine)
    assert not placing.faults
    return Counted.compared


def test_m155_tensors_of_other_stages_cost_as_much_each_however_many_there_are() -> None:
    for period in (2, 3, 7):
        few, many = comparisons(50, period), comparisons(400, period)
        assert many <= 16 * (few + 50), period


WHOLE = torch.arange(12.0).reshape(4, 3) + 1
ROWS = torch.stack([WHOLE, WHOLE + 20])
STAGES = ([0, 1], [2, 3])


def on_stage(whole: torch.Tensor, stage: int, rank: int) -> FakeDTensor:
    """Return a tensor of the two ranks of a stage, as any rank sees it."""
    mesh = FakeMesh((2,), ("fsdp",), rank=rank, ranks=torch.tensor(STAGES[stage]))
    return FakeDTensor.distribute(whole, mesh, [Shard(0)])


@pytest.mark.parametrize("order", [*permutations(("embed.w", "head.w"))])
@pytest.mark.parametrize("first_stage_has_both", [False, True])
def test_a_name_of_several_values_is_of_those_that_the_rank_has(
    order: tuple[str, ...], first_stage_has_both: bool, tmp_path: Path
) -> None:
    """An embedding and a head, of which each stage has one, are stored under one name."""

    def state_dict(rank: int, whole: torch.Tensor = WHOLE) -> dict[str, Any]:
        stage_of = {"embed.w": 0, "head.w": 1}
        keys = order if rank > 1 or first_stage_has_both else ["embed.w"]
        return {key: on_stage(whole, stage_of[key], rank) for key in keys}

    def zeros(rank: int) -> dict[str, Any]:
        return {**state_dict(rank, torch.zeros(4, 3)), "norm": torch.zeros(2)}

    world, rename = World(4), Replace("head", "embed")
    world.save(
        tmp_path,
        lambda rank: {**state_dict(rank), "norm": torch.ones(2)},
        lambda rank: PlacementSavePlanner(rename=rename),
    )
    found = {"embed.w": torch.zeros(4, 3)}
    dcp.load(found, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(found["embed.w"], WHOLE)
    loaded = world.load(tmp_path, zeros, lambda rank: PlacementLoadPlanner(rename=rename))
    for rank, state in enumerate(loaded):
        own = state["embed.w" if rank < 2 else "head.w"].to_local()
        assert torch.equal(own, WHOLE.chunk(2)[rank % 2]), rank


@pytest.mark.parametrize("order", [*permutations((0, 1))])
def test_a_stack_has_the_rows_that_the_rank_has(order: tuple[int, ...], tmp_path: Path) -> None:
    def state_dict(rank: int, rows: torch.Tensor = ROWS) -> dict[str, Any]:
        return {f"experts.{row}.w": on_stage(rows[row], row, rank) for row in order}

    world, rename = World(4), Stack("experts.{}", total=2)
    world.save(tmp_path, state_dict, lambda rank: PlacementSavePlanner(rename=rename))
    found = {"experts.w": torch.zeros(2, 4, 3)}
    dcp.load(found, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(found["experts.w"], ROWS)
    loaded = world.load(
        tmp_path,
        lambda rank: state_dict(rank, torch.zeros_like(ROWS)),
        lambda rank: PlacementLoadPlanner(rename=rename),
    )
    for rank, state in enumerate(loaded):
        row, half = divmod(rank, 2)
        own = state[f"experts.{row}.w"].to_local()
        assert torch.equal(own, ROWS[row].chunk(2)[half]), rank
