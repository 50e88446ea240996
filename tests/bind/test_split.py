"""Fused tensors on the ranks, one tensor per part in the checkpoint; files of the hub, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hazard_scenes import refusal
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
)
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Split,
)
from dcp_placements.presets import hub
from dcp_placements.testing import FakeDTensor, World, cut
from tests.strategies import arange

GATE_UP = "layers.0.mlp.experts.gate_up_proj"
DOWN = "layers.0.mlp.experts.down_proj"


def model(experts: int = 4) -> dict[str, torch.Tensor]:
    """Return a module's whole tensors."""
    return {
        GATE_UP: arange((experts, 6, 4)) + 1,
        DOWN: arange((experts, 4, 3)) + 1000,
        "layers.0.mlp.gate.weight": arange((experts, 4)) + 2000,
        "norm.weight": arange((5,)) + 3000,
    }


def hub_files(path: Path, whole: dict[str, torch.Tensor]) -> None:
    """Write what the hub has for Mixtral: a matrix per expert, in two files."""
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    base = "layers.0.block_sparse_moe"
    for number in range(len(whole[GATE_UP])):
        gate, up = whole[GATE_UP][number].chunk(2)
        files[number % 2][f"{base}.experts.{number}.w1.weight"] = gate.contiguous()
        files[0][f"{base}.experts.{number}.w3.weight"] = up.contiguous()
        files[1][f"{base}.experts.{number}.w2.weight"] = whole[DOWN][number].contiguous()
    files[0][f"{base}.gate.weight"] = whole["layers.0.mlp.gate.weight"]
    files[1]["norm.weight"] = whole["norm.weight"]
    path.mkdir()
    for number, held in enumerate(files):
        save_file(held, path / f"model-{number + 1:05}-of-00002.safetensors")


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_files_of_the_hub_fill_stacked_and_fused_experts_with_what_is_needed(
    ep: int, dim: int, tmp_path: Path
) -> None:
    whole, world = model(), World(4)
    hub_files(tmp_path / "hub", whole)
    slices: dict[int, int] = {}

    def state_dict(rank: int, fill: float | None = None) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=ep, fsdp=4 // ep)
        made: dict[str, Any] = {}
        for name, tensor in whole.items():
            local = tensor
            if "experts" in name:
                local = cut(tensor, [Shard(0)], (ep,), mesh["ep"].get_coordinate())
            at = dim if "experts" in name else 0
            made[name] = FakeDTensor.distribute(local, mesh["fsdp"], [Shard(at)])
            if fill is not None:
                made[name].to_local().fill_(fill)
        return made

    def planner(rank: int) -> PlacementLoadPlanner:
        mesh = world.mesh(rank, ep=ep, fsdp=4 // ep)
        rules = {"mlp.experts": CheckpointPlacement(mesh, {"ep": Shard(0)})}
        return PlacementLoadPlanner(PlacementRules(rules), rename=hub.mixtral)

    read = HuggingFaceStorageReader._process_read_request

    def counted(self: Any, file: Any, item: Any, planner: Any) -> None:
        slices[id(planner)] = slices.get(id(planner), 0) + item.lengths.numel()
        read(self, file, item, planner)

    with mock.patch.object(HuggingFaceStorageReader, "_process_read_request", counted):
        loaded = world.load(
            tmp_path / "hub",
            lambda rank: state_dict(rank, -1),
            planner,
            lambda rank: HuggingFaceStorageReader(str(tmp_path / "hub")),
        )
    needed = []
    for rank in range(4):
        wanted = state_dict(rank)
        for name, tensor in wanted.items():
            assert torch.equal(loaded[rank][name].to_local(), tensor.to_local()), name
        needed.append(sum(tensor.to_local().numel() for tensor in wanted.values()))
    assert sorted(slices.values()) == sorted(needed), "other elements than the needed ones are read"


def test_what_cannot_be_split_is_told(tmp_path: Path) -> None:
    for names, more in (((), {}), (("a", "b"), {"sizes": (1,)}), (("a",), {"groups": 0})):
        with pytest.raises(PlacementError, match="need a name and a size from 1 on each"):
            Split("w", names, **more)  # type: ignore[arg-type]
    message = refusal(
        lambda: World(1).save(
            tmp_path,
            lambda rank: {"w": torch.ones(5, 3), "v": torch.ones(4)},
            lambda rank: PlacementSavePlanner(
                rename=Renames(Split("w", ("a", "b")), Split("v", ("c",), dim=2))
            ),
        )
    )
    assert "w: cannot be split: 5 on dim 0 cannot be cut into 1 x (1, 1)" in message
    assert "v: cannot be split: there is no dim 2, the shape is (4,)" in message
    with pytest.raises(CheckpointException) as refused:
        World(1).save(
            tmp_path,
            lambda rank: {"w": torch.ones(4), "a": torch.ones(2)},
            lambda rank: PlacementSavePlanner(rename=Split("w", ("a", "b"))),
        )
    assert "a: rename= gives this one name" in str(refused.value.failures[0][0])
