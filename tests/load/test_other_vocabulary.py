"""A vocabulary that has grown, has shrunk or is numbered anew, under FSDP and HSDP.

The checkpoint has the old rows, and the trainer's tensors are DTensors of the new ones. What is
loaded is what plain slicing of the old tensor gives; rows that it lacks are the trainer's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, refused, without_warning
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import CheckpointPlacement, IndexShard, Placements
from dcp_placements.testing import FakeDTensor, FakeMesh, World

WIDTH = 3
DECLARE = Callable[[FakeMesh], CheckpointPlacement]


def pieces(rows: Sequence[int], mesh: FakeMesh) -> Sequence[int]:
    """Return the rows of a rank, of which ``torch.chunk`` makes as many for each as it can."""
    axis = mesh["fsdp"]
    step, (position,) = -(-len(rows) // axis.size()), axis.get_coordinate()
    return rows[position * step : (position + 1) * step]


def listed(old: int, rows: Sequence[int]) -> DECLARE:
    def declare(mesh: FakeMesh) -> CheckpointPlacement:
        by = {"fsdp": IndexShard(0, pieces(rows, mesh))}
        return CheckpointPlacement(mesh, by, global_shape=(old, WIDTH))

    return declare


def padded(old: int, new: int) -> DECLARE:
    shapes = {"global_shape": (old, WIDTH), "padded_shape": (new, WIDTH)}
    return lambda mesh: CheckpointPlacement(mesh, {"fsdp": Shard(0)}, **shapes)


def state(weight: torch.Tensor, moment: torch.Tensor, mesh: FakeMesh | None) -> dict[str, Any]:
    """Return a trainer's state dict; of whole tensors, or of DTensors over a mesh."""

    def held(whole: torch.Tensor) -> Any:
        if mesh is None:
            return whole.clone()
        return FakeDTensor.distribute(whole, mesh, [Replicate(), Shard(0)])

    name = "embed.weight"
    moments = {"step": torch.tensor(3.0), "exp_avg": held(moment)}
    groups = [{"lr": 0.1, "params": [name]}]
    return {
        "model": {name: held(weight)},
        "optim": {"state": {name: moments}, "param_groups": groups},
    }


def draw(kind: str, seed: int) -> tuple[int, int, list[int], DECLARE]:
    """Return the old and the new number of rows, the old number of each new row (-1: none)."""
    numbers = random.Random(f"{kind} {seed}")
    old = numbers.randint(1, 12)
    if kind == "grown":
        new = old + numbers.randint(1, 9)
        return old, new, [*range(old), *[-1] * (new - old)], padded(old, new)
    new = old if kind == "numbered anew" else numbers.randint(1, old)
    rows = numbers.sample(range(old), new) if kind == "numbered anew" else [*range(new)]
    return old, new, rows, listed(old, rows)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["grown", "shrunk", "numbered anew"])
def test_another_vocabulary_is_what_plain_slicing_gives(
    kind: str, seed: int, tmp_path: Path
) -> None:
    old, new, rows, declare = draw(kind, seed)
    weight, moment = arange(old, WIDTH), arange(old, WIDTH, start=1000)
    dcp.save(state(weight, moment, None), checkpoint_id=tmp_path, no_dist=True)
    axes = [(1, 1), (1, 2), (1, 4), (2, 3)][seed % 4]
    world = World(axes[0] * axes[1])
    meshes = [world.mesh(rank, dp=axes[0], fsdp=axes[1]) for rank in range(world.size)]
    own = arange(new, WIDTH, start=5000), arange(new, WIDTH, start=6000)
    # Replicas ask for the same rows, and nobody for the rest.
    waive = {"embed": "fewer tokens"} if kind == "shrunk" and axes[0] > 1 else None
    with without_warning():
        loaded = world.load(
            tmp_path,
            lambda rank: state(*own, meshes[rank]),
            lambda rank: Placements({"embed": declare(meshes[rank])}).load_planner(waive=waive),
        )
    wanted = []
    for stored, mine in zip((weight, moment), own, strict=True):
        wanted.append(
            torch.stack([mine[n] if row < 0 else stored[row] for n, row in enumerate(rows)])
        )
    for mesh, found in zip(meshes, loaded, strict=True):
        of_rank = list(pieces(range(new), mesh))
        assert torch.equal(found["model"]["embed.weight"].to_local(), wanted[0][of_rank])
        moments = found["optim"]["state"]["embed.weight"]
        assert torch.equal(moments["exp_avg"].to_local(), wanted[1][of_rank])


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1, 2, 3, 4]])
def test_a_list_of_another_length_than_the_shard_is_refused(
    rows: list[int], tmp_path: Path
) -> None:
    weight = arange(6, WIDTH)
    dcp.save(state(weight, weight, None), checkpoint_id=tmp_path, no_dist=True)
    world = World(1)
    mesh = world.mesh(0, dp=1, fsdp=1)
    own = arange(4, WIDTH)
    with refused() as refusal:
        world.load(
            tmp_path,
            lambda rank: state(own, own, mesh),
            lambda rank: Placements({"embed": listed(6, rows)(mesh)}).load_planner(),
        )
    refusal.says(f"({len(rows)}, 3) was declared", "holds a (4, 3) tensor")


def test_a_save_by_such_rows_is_in_the_order_of_the_list(tmp_path: Path) -> None:
    """The inverse: the trainer's numbers are new, those of the file the old ones."""
    rows, weight = [5, 0, 3, 1, 2, 4], arange(6, WIDTH)
    world = World(2)
    meshes = [world.mesh(rank, dp=1, fsdp=2) for rank in range(2)]
    with without_warning():
        world.save(
            tmp_path,
            lambda rank: state(weight[rows], 10 * weight[rows], meshes[rank]),
            lambda rank: Placements({"embed": listed(6, rows)(meshes[rank])}).save_planner(),
        )
    read = {"model.embed.weight": torch.zeros(6, WIDTH)}
    dcp.load(read, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(read["model.embed.weight"], weight)
