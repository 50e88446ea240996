"""The first load of a checkpoint that torch's planner wrote says what ``doctor`` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.program_watch import lost_experts

EXPERTS, HIDDEN, WIDTH = 4, 6, 10


class Packed(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, WIDTH, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(count, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eoh,ehi,bi->bo", self.w2, self.w1, x)


class Each(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


class Block(nn.Module):
    """A layer with some of the experts, and a router for all."""

    def __init__(self, count: int, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        is_packed = kind == "packed"
        self.experts = Packed(count) if is_packed else nn.ModuleList([Each() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules = [self.experts] if isinstance(self.experts, Packed) else list(self.experts)
        out = sum(module(self.norm(x)) for module in modules)
        return x + out * self.gate(x).sum(-1, keepdim=True)


def trained(count: int, kind: str, *, flat: bool) -> dict[str, Any]:
    """Return the state of one rank with some of the experts, after a step of AdamW."""
    model = nn.Module()
    model.layers = nn.ModuleList([Block(count, kind) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(3, HIDDEN)
    for layer in model.layers:
        x = layer(x)
    x.square().sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": moments, "step": 1}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("kind", ["packed", "list"])
def test_what_a_stock_save_lost_is_told_of(tmp_path: Path, kind: str, flat: bool) -> None:
    """A list is numbered from 0 on each rank. The moments are told of with the weights."""
    state = trained(EXPERTS // 2, kind, flat=flat)
    dcp.save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(), no_dist=True)
    planner = PlacementLoadPlanner()
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    text = lost_experts(str(tmp_path), planner)
    assert text is not None
    assert f"{tmp_path} was written without some experts" in text
    assert "2 of 4 experts stored; the router says 4" in text
    first = text.splitlines()[1]
    assert "model.layers.0-1.experts" in first
    assert "optim.state" in first
    assert lost_experts(str(tmp_path), object()) == text  # a planner of another kind


@pytest.mark.parametrize("kind", ["packed", "list"])
def test_nothing_is_said_of_a_checkpoint_with_all_experts(tmp_path: Path, kind: str) -> None:
    state = trained(EXPERTS, kind, flat=True)
    for name, saver in ("stock", dcp.DefaultSavePlanner()), ("ours", PlacementSavePlanner()):
        path = tmp_path / name
        dcp.save(state, checkpoint_id=path, planner=saver, no_dist=True)
        planner = PlacementLoadPlanner()
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
        assert lost_experts(str(path), planner) is None
