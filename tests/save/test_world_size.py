"""What launchers leave in ``WORLD_SIZE`` where there is no process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import without_warning

from dcp_placements import PlacementSavePlanner
from dcp_placements.testing import World


@pytest.mark.parametrize("text", ["auto", "", "4.0", "0", "-1", "1", "²", "9" * 5000])
def test_m155_a_world_size_that_says_nothing_of_other_ranks_is_passed_over(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    weights = {"w": torch.arange(6.0)}
    dcp.save(weights, checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    assert not any("by itself" in str(one.message) for one in recwarn)
    read = {"w": torch.zeros(6)}
    dcp.load(read, checkpoint_id=tmp_path)
    assert torch.equal(read["w"], weights["w"])


@pytest.mark.parametrize("text", ["4", " 4 "])
def test_m155_a_world_size_of_several_ranks_is_warned_of(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.warns(UserWarning, match="rank 0 of 4 ranks saves by itself"):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, planner=PlacementSavePlanner())


def test_m150_workers_that_somebody_merges_have_a_directory_each_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Ray's workers save alone; what each saved is whole, and is read by torch."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    weights = {"w": torch.arange(6.0)}
    for rank in range(2):
        planner = PlacementSavePlanner(waive={"this save": "Ray merges the directories"})
        dcp.save(weights, checkpoint_id=tmp_path / str(rank), planner=planner, no_dist=True)
        assert planner.report.warnings == ()
        assert "Ray merges the directories" in str(planner.report)
        read = {"w": torch.zeros(6)}
        dcp.load(read, checkpoint_id=tmp_path / str(rank), planner=dcp.DefaultLoadPlanner())
        assert torch.equal(read["w"], weights["w"])
    assert not any("by itself" in str(one.message) for one in recwarn)
    with pytest.warns(UserWarning, match='or:          waive={"this save": reason}'):
        dcp.save(
            weights,
            checkpoint_id=tmp_path / "2",
            planner=PlacementSavePlanner(waive={"w": "of another thing"}),
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_waiver_of_this_save_serves_ranks_that_all_take_part(ranks: int, tmp_path: Path) -> None:
    world = World(ranks)
    with without_warning():
        world.save(
            tmp_path,
            lambda rank: {"w": torch.arange(6.0)},
            lambda rank: PlacementSavePlanner(waive={"this save": "Ray merges the directories"}),
        )
