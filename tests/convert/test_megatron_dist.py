"""Megatron's torch_dist directories: one key per layer and expert again, or loaded as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    Renames,
    Renumber,
    Stack,
)
from dcp_placements.offline import import_checkpoint, inspect, verify
from dcp_placements.offline.element_bits import same_bits
from dcp_placements.testing import World, cut
from dcp_placements.testing.megatron import MegatronModel
from dcp_placements.testing.megatron_dist import write_torch_dist
from tests.offline_scenes import Run

ALIKE = MegatronModel(dense_layers=0)
DENSE = MegatronModel(experts=0)


def test_the_tools_look_into_it_and_execute_nothing(tmp_path: Path, run: Run) -> None:
    source = write_torch_dist(tmp_path / "source", ALIKE, tp=2)
    assert verify(source).sound
    assert list(inspect(source).objects) == ["rng_state/shard_0.0_1.1"]
    result = json.loads(run("inspect", source, "--json").out)
    weight = result["tensors"]["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert weight["shape"] == [ALIKE.layers, ALIKE.experts, ALIKE.hidden, ALIKE.moe_ffn]


@pytest.mark.parametrize("tp", [1, 2])
def test_it_loads_through_the_planner_into_numbered_layers(tp: int, tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / "source", DENSE, tp=2)
    truth, world, per_stage = DENSE.truth(), World(2 * tp), DENSE.layers // 2
    columns, rows = [Shard(1)], [Shard(0)]

    def local(rank: int) -> dict[str, tuple[str, list[Any]]]:
        """Return this stage's keys: each the whole's, and how it is cut."""
        stage = rank // tp
        found: dict[str, tuple[str, list[Any]]] = {}
        for layer in range(per_stage):
            for name, by in (
                ("mlp.linear_fc2.weight", columns),
                ("self_attention.linear_qkv.weight", rows),
                ("self_attention.linear_qkv.layer_norm_weight", []),
            ):
                whole = f"decoder.layers.{stage * per_stage + layer}.{name}"
                found[f"decoder.layers.{layer}.{name}"] = whole, by
        return found

    def part(rank: int, whole: str, by: list[Any]) -> torch.Tensor:
        return cut(truth[whole], by, (tp,) if by else (), (rank % tp,) if by else ())

    def planner(rank: int) -> PlacementLoadPlanner:
        stage = rank // tp
        mesh = world.mesh(rank, pp=2, tp=tp)
        numbers = range(stage * per_stage, (stage + 1) * per_stage)
        rename = Renames(
            Renumber("decoder.layers.{}", numbers, DENSE.layers),
            Stack("decoder.layers.{}", DENSE.layers),
        )
        rules = {
            "linear_fc2.weight": CheckpointPlacement(mesh, {"tp": Shard(2)}),
            "linear_qkv.weight": CheckpointPlacement(mesh, {"tp": Shard(1)}),
        }
        return PlacementLoadPlanner(PlacementRules(rules), rename=rename)

    held = world.load(
        source,
        lambda rank: {
            k: torch.zeros_like(part(rank, *expected)) for k, expected in local(rank).items()
        },
        planner,
        lambda rank: PlacementFileSystemReader(source),
    )
    for rank in range(world.size):
        for key, expected in local(rank).items():
            assert same_bits(held[rank][key], part(rank, *expected)), (rank, key)


def test_an_import_of_it_names_the_way_to_load_it(tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / "source", ALIKE)
    with pytest.raises(PlacementError, match=r"DCP checkpoint already.*\n.*rename=Stack"):
        import_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
