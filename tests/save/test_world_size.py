"""What launchers leave in ``WORLD_SIZE`` where there is no process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementSavePlanner


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
