"""What any world saves, torch's default planner reads back whole, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, World


def read_whole(path: Path, **templates: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a checkpoint as torch's default planner reads it in one process."""
    dcp.load(templates, checkpoint_id=path, no_dist=True)
    return templates


def expert_rules(world: World, rank: int, **axes: int) -> PlacementRules:
    mesh = world.mesh(rank, **axes)
    return PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def test_experts_of_all_ep_ranks_are_in_the_file(tmp_path: Path) -> None:
    whole = torch.arange(8 * 3 * 2, dtype=torch.float32).reshape(8, 3, 2)
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, edp=2)
        part = whole.chunk(2)[mesh.get_coordinate()[0]]
        return {"experts": {"w1": FakeDTensor.distribute(part, mesh["edp"], [Shard(1)])}}

    world.save(
        tmp_path,
        state_dict,
        lambda rank: PlacementSavePlanner(expert_rules(world, rank, ep=2, edp=2)),
    )
    read = read_whole(tmp_path, **{"experts.w1": torch.zeros_like(whole)})
    assert torch.equal(read["experts.w1"], whole)

    other = World(4)

    def template(rank: int) -> dict[str, Any]:
        part = torch.zeros(2, 3, 2)
        return {"experts": {"w1": part}}

    loaded = other.load(
        tmp_path,
        template,
        lambda rank: PlacementLoadPlanner(expert_rules(other, rank, ep=4)),
    )
    for rank in range(4):
        assert torch.equal(loaded[rank]["experts"]["w1"], whole[2 * rank : 2 * rank + 2])
