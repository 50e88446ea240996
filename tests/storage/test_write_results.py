"""Ranks send what they wrote in columns, which the coordinator takes apart."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import World


def state(world: World, rank: int) -> dict[str, Any]:
    """Return a rank's part: sharded, replicated and uneven tensors, objects, its own keys."""
    coordinate = world.mesh(rank, dp=2, ep=world.size // 2).get_coordinate()
    assert coordinate is not None
    values: dict[str, Any] = {"lr": 0.1, "names": ["a"] * 50, "step": torch.tensor(3.0)}
    for layer in range(12):
        values[f"layers.{layer}.experts.w"] = torch.full((3, 4), float(coordinate[1] * 100 + layer))
        values[f"layers.{layer}.norm"] = torch.arange(5.0) + layer
        values[f"layers.{layer}.gate"] = torch.arange(6.0).reshape(2, 3).T + layer
    values[f"own.{rank}"] = torch.full((2,), float(rank))
    return values


def save(path: Path, size: int, **options: Any) -> list[Any]:
    """Save; return what the ranks report, as it arrives."""
    world = World(size)
    arrived: list[Any] = []

    class Writer(PlacementFileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            arrived.append(pickle.loads(pickle.dumps(written.value())))
            assert arrived[-1] == written.value()
            return written

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = world.mesh(rank, dp=2, ep=size // 2)
        rules = {"experts.w": CheckpointPlacement(mesh, [Replicate(), Shard(0)])}
        return PlacementSavePlanner(PlacementRules(rules))

    world.save(path, lambda rank: state(world, rank), planner, lambda rank: Writer(path, **options))
    return arrived


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}])
@pytest.mark.parametrize("size", [2, 4])
def test_what_arrives_is_what_torch_finds_in_metadata(
    tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    arrived = save(tmp_path, size, **options)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    results = [result for rank in arrived for result in rank]
    assert {result.index: result.storage_data for result in results} == stored
    assert len(results) == len(stored) > 30
    if "thread_count" in options:
        assert len({result.storage_data.relative_path for result in arrived[0]}) == 3


def test_a_writer_with_a_finish_of_its_own_gets_all_rows(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(PlacementFileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            seen.extend(result.size_in_bytes for rank in results for result in rank)
            super().finish(metadata, results)

    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {"w": torch.ones(3), f"own.{rank}": torch.zeros(2)},
        lambda rank: PlacementSavePlanner(),
        lambda rank: Counting(tmp_path),
    )
    assert len(seen) == 3
    assert all(seen)
