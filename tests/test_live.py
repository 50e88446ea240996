"""Reads end in the model, or the load says that they would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Replicate

from dcp_placements import PlacementLoadPlanner
from fakes import FakeDTensor, FakeMesh


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = torch.nn.Linear(3, 5)
    torch.nn.init.constant_(model.weight, 7)
    state: dict[str, Any] = {"model": model.state_dict()}
    state["optim"] = {"state": {"weight": {"exp_avg": torch.ones(5, 3)}}}
    dcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def test_the_model_s_own_tensors_are_loaded_into(saved: Path) -> None:
    model = torch.nn.Linear(3, 5)
    planner = PlacementLoadPlanner(live=model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=saved, planner=planner)
    assert bool((model.weight == 7).all())
    assert planner.report.copies == ()


def test_a_copy_of_a_parameter_is_refused(saved: Path) -> None:
    model = torch.nn.Linear(3, 5)
    state = {"weight": model.weight.detach().clone(), "bias": model.bias.detach()}
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": state}, checkpoint_id=saved, planner=PlacementLoadPlanner(live=model))
    told = str(caught.value.failures[0][0])
    assert "model.weight: what is read would end in a copy" in told
    assert "model.bias" not in told
    assert "way out:" in told


def test_copies_of_optimizer_state_are_told_of_and_let_pass(saved: Path) -> None:
    model = torch.nn.Linear(3, 5)
    moments = {"state": {"weight": {"exp_avg": torch.zeros(5, 3)}}}
    planner = PlacementLoadPlanner(live=model.parameters())
    state = {"model": model.state_dict(), "optim": moments}
    dcp.load(state, checkpoint_id=saved, planner=planner)
    assert planner.report.copies == ("optim.state.weight.exp_avg",)


def test_a_look_alike_that_makes_a_copy_each_time_is_refused(saved: Path) -> None:
    class Casting(FakeDTensor):
        def to_local(self) -> torch.Tensor:
            return super().to_local().to(torch.float32)

    mesh = FakeMesh((1,), ("dp",), rank=0)
    weight = Casting(torch.zeros(5, 3, dtype=torch.bfloat16), mesh, [Replicate()], (5, 3))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": {"weight": weight}}, checkpoint_id=saved, planner=PlacementLoadPlanner())
    told = str(caught.value.failures[0][0])
    assert "model.weight: to_local() of this Casting makes a copy" in told
