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
from dcp_placements.testing import FakeDTensor, FakeMesh


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
    text = str(caught.value.failures[0][0])
    assert "model.weight: what is read would end in a copy" in text
    assert "model.bias" not in text
    assert "way out:" in text


def test_a_state_dict_is_no_model(saved: Path) -> None:
    model = torch.nn.Linear(3, 5)
    planner = PlacementLoadPlanner(live=model.state_dict())
    with pytest.raises(CheckpointException, match="values that are no tensors: str"):
        dcp.load({"model": model.state_dict()}, checkpoint_id=saved, planner=planner)


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
    text = str(caught.value.failures[0][0])
    assert "model.weight: to_local() of this Casting makes a copy" in text


def with_rng(model: torch.nn.Module, prefix: str = "model") -> dict[str, Any]:
    """A state dict that has more than the model: CPU tensors that are no part of it."""
    return {
        prefix: model.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)},
        "loader": {"order": torch.arange(5), "losses": torch.zeros(5)},
        "step": torch.tensor(3),
    }


def test_m55_what_is_no_part_of_the_model_is_not_asked_for_in_it(tmp_path: Path) -> None:
    saved = with_rng(torch.nn.Linear(3, 5))
    dcp.save(saved, checkpoint_id=tmp_path)
    model = torch.nn.Linear(3, 5)
    state = with_rng(model)
    state["rng"]["torch"].zero_()
    planner = PlacementLoadPlanner(live=model)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    assert torch.equal(state["rng"]["torch"], saved["rng"]["torch"])
    assert torch.equal(model.weight, saved["model"]["weight"])
    assert planner.report.copies == ()


def test_m55_rng_state_is_no_copy_of_a_tensor_of_an_iterable(tmp_path: Path) -> None:
    def state(model: torch.nn.Module) -> dict[str, Any]:
        return {"model": model.state_dict(), "rng": torch.get_rng_state()}

    dcp.save(state(torch.nn.Linear(3, 5)), checkpoint_id=tmp_path)
    model = torch.nn.Linear(3, 5)
    planner = PlacementLoadPlanner(live=model.parameters())
    dcp.load(state(model), checkpoint_id=tmp_path, planner=planner)


@pytest.mark.parametrize("how", ["renamed", "wrapped", "other names", "iterable", "cast"])
def test_m55_copies_are_found_by_whatever_name(tmp_path: Path, how: str) -> None:
    """Under rename=, in a model that is wrapped, and where the state dict has names of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    live: Any = model
    copy = {key: value.clone() for key, value in model.state_dict().items()}
    options: dict[str, Any] = {}
    if how == "renamed":
        options["rename"] = lambda key: key.replace("m.0", "m.7")
    elif how == "wrapped":
        live = torch.nn.Module()
        live.module = model
    elif how == "other names":
        copy = {key.replace("0", "first"): value for key, value in copy.items()}
    elif how == "iterable":
        live = iter(list(model.parameters()))
    else:
        copy = {key: value.to(torch.bfloat16) for key, value in copy.items()}
    saved = {
        options.get("rename", str)(f"m.{key}"): torch.ones_like(value)
        for key, value in copy.items()
    }
    dcp.save(saved, checkpoint_id=tmp_path)
    planner = PlacementLoadPlanner(live=live, **options)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"m": copy}, checkpoint_id=tmp_path, planner=planner)
    assert "what is read would end in a copy" in str(caught.value.failures[0][0])


def test_m34_a_copy_of_a_model_under_a_key_state_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    dcp.save({"state": {"model": model.state_dict()}}, checkpoint_id=tmp_path)
    copy = {key: value.clone() for key, value in model.state_dict().items()}
    planner = PlacementLoadPlanner(live=model)
    with pytest.raises(CheckpointException, match="would end in a copy"):
        dcp.load({"state": {"model": copy}}, checkpoint_id=tmp_path, planner=planner)
