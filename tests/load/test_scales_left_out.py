"""Which keys a load refuses since they are quantized: by the scales of each, not of a neighbour."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import refused
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import World

CODES = torch.arange(12.0).reshape(4, 3).to(torch.float8_e4m3fn)
STORED = {
    "m.plain.weight": CODES,
    "m.scaled.weight": CODES,
    "m.scaled.weight_scale_inv": torch.full((1, 1), 0.5),
    "m.asked.weight": CODES,
    "m.asked.weight_scale_inv": torch.full((1, 1), 2.0),
}
ASKED = "m.plain.weight", "m.scaled.weight", "m.asked.weight"
"""Keys of one layout; the scales of the last are asked for as well."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save(
        {key: tensor.clone() for key, tensor in STORED.items()},
        checkpoint_id=tmp_path,
        planner=PlacementSavePlanner(),
        no_dist=True,
    )
    return tmp_path


def wanted(order: tuple[str, ...], rows: int) -> dict[str, Any]:
    state = {key: torch.zeros(rows, 3, dtype=torch.bfloat16) for key in order}
    return {**state, "m.asked.weight_scale_inv": torch.zeros(1, 1)}


@pytest.mark.parametrize("order", [*permutations(ASKED)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_quantized_tensor_beside_one_without_scales_is_refused(
    order: tuple[str, ...], ranks: int, checkpoint: Path
) -> None:
    world = World(ranks)

    def planner(rank: int) -> PlacementLoadPlanner:
        placement = CheckpointPlacement(world.mesh(rank, ep=ranks), {"ep": Shard(0)})
        return PlacementLoadPlanner(PlacementRules({"weight": placement}))

    with refused() as refusal:
        world.load(checkpoint, lambda rank: wanted(order, 4 // ranks), planner)
    text = refusal.text
    assert "m.scaled.weight: is quantized" in text
    assert "m.plain.weight" not in text
    assert "m.asked.weight: " not in text


@pytest.mark.parametrize("order", [*permutations(ASKED)])
def test_a_waiver_is_for_the_keys_that_it_names(order: tuple[str, ...], checkpoint: Path) -> None:
    planner = PlacementLoadPlanner(waive={"plain.weight": "numbers"})
    with refused() as refusal:
        World(1).load(checkpoint, lambda rank: wanted(order, 4), lambda rank: planner)
    assert "m.scaled.weight: is quantized" in refusal.text


@pytest.mark.parametrize("order", [*permutations(ASKED)])
def test_the_note_names_the_keys_without_scales_alone(
    order: tuple[str, ...], checkpoint: Path
) -> None:
    planner = PlacementLoadPlanner(waive={"scaled.weight": "multiplied later"})
    with pytest.warns(UserWarning, match="m.plain.weight: loaded without scales"):
        World(1).load(checkpoint, lambda rank: wanted(order, 4), lambda rank: planner)
