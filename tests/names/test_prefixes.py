"""Keys that a checkpoint lacks as a whole: another prefix, another optimizer form, another path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner


def refusal(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    dcp.save(dict(saved), checkpoint_id=path, planner=PlacementSavePlanner())
    with pytest.raises(CheckpointException) as refused:
        dcp.load(dict(asked), checkpoint_id=path, planner=PlacementLoadPlanner())
    return str(refused.value.failures[0][0])


def weights(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.arange(3.0) for name in names}


@pytest.mark.parametrize("asked", ["", "modell.", "module.model."])
def test_another_prefix_is_told_once_for_all_keys(tmp_path: Path, asked: str) -> None:
    names = "layers.0.norm", "layers.0.w", "layers.1.norm"
    saved = weights(*(f"model.{name}" for name in names))
    text = refusal(tmp_path, saved, weights(*(f"{asked}{name}" for name in names)))
    assert "it has:      model.layers.0.norm" in text
    assert text.count("the checkpoint lacks this key") == 1


@pytest.mark.parametrize("flat_at_save", [True, False])
def test_an_optimizer_that_is_flattened_on_one_side_is_named(
    tmp_path: Path, flat_at_save: bool
) -> None:
    flat = {"optim": {"param_groups.a.lr": 0.1, "param_groups.b.lr": 0.1}}
    counted = {"optim": {"param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}}
    saved, asked = (flat, counted) if flat_at_save else (counted, flat)
    text = refusal(tmp_path, saved, asked)
    assert "flatten_optimizer_state_dict=" in text
    assert text.count("the checkpoint lacks this key") == 1


def test_a_source_without_any_key_is_told_of_once(tmp_path: Path) -> None:
    dcp.save(weights("a", "b"), checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    with pytest.raises(CheckpointException) as refused:
        dcp.load(weights("a", "b"), storage_reader=reader, planner=PlacementLoadPlanner())
    text = str(refused.value.failures[0][0])
    assert "has no tensor and no object, but the state dict asks for a and 1 more" in text
    assert "(1 fault)" in text


def test_m110_all_levels_that_have_the_names_are_named(tmp_path: Path) -> None:
    weights = {f"layers.{number}.w": torch.ones(2) for number in range(3)}
    dcp.save({"ema": weights, "model": weights}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException) as refused:
        dcp.load(
            dict(weights), checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True
        )
    message = str(refused.value.failures[0][0])
    assert "it has:      ema.layers.0.w, model.layers.0.w (of layers.0.w)" in message


def test_a_weight_that_is_missing_is_not_told_of_optimizer_state(tmp_path: Path) -> None:
    names = "layers.0.experts.w1", "layers.1.experts.w1"
    state = {name: {"exp_avg": torch.ones(3), "step": torch.ones(())} for name in names}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [*names]}]}
    saved = {"model": weights(*names), "optim": optim}
    asked = {"model": weights(*names, "layers.2.experts.w1")}
    text = refusal(tmp_path, saved, asked)
    assert "model.layers.2.experts.w1: the checkpoint lacks this key" in text
    assert "optim.state" not in text
