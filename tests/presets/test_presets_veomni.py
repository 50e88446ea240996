"""``presets.veomni`` on parameters as VeOmni leaves them: in order, whatever dim FSDP cuts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import assert_same, read_whole, refusal
from preset_scenes import load, save
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import PlacementError, Placements
from dcp_placements.presets import veomni
from dcp_placements.testing import FakeMesh, World, cut, real_dtensor

EXPERTS = 8
WHOLE = {
    "model.layers.0.mlp.experts.gate_proj": torch.arange(EXPERTS * 12.0).reshape(EXPERTS, 4, 3),
    "model.layers.1.mlp.experts.gate_proj": torch.arange(EXPERTS * 12.0).reshape(EXPERTS, 4, 3)
    + 500,
    "model.layers.0.mlp.gate.weight": torch.arange(EXPERTS * 4.0).reshape(EXPERTS, 4) - 900,
    "model.embed_tokens.weight": torch.arange(36.0).reshape(9, 4) - 400,
}
MESHES = {
    "ep_fsdp2_ep2": {"ep_fsdp": 2, "ep": 2},
    "ep_fsdp1_ep4": {"ep_fsdp": 1, "ep": 4},
    "hsdp": {"ep_replicate": 2, "ep_fsdp": 2, "ep": 2},
}


@dataclass
class SpecInfo:
    """The fields of ``veomni.distributed.parallel_plan.SpecInfo`` that matter here."""

    para_name: str
    placement: Any
    fqn: str
    para_fsdp_mesh: Any
    fsdp_shard_dim: int = 1


class Job:
    def __init__(self, axes: dict[str, int], fsdp_dim: int) -> None:
        self.axes, self.fsdp_dim = axes, fsdp_dim
        self.world = World(FakeMesh(tuple(axes.values()), tuple(axes), rank=0).size())

    def mesh(self, rank: int) -> FakeMesh:
        return self.world.mesh(rank, **self.axes)

    def specs(self, rank: int) -> dict[str, SpecInfo]:
        return {
            name: SpecInfo(
                "ep", Shard(0) if "experts" in name else Replicate(), name, self.mesh(rank)
            )
            for name in WHOLE
        }

    def preset(self, rank: int) -> Placements:
        model = nn.Module()
        model._fqn2spec_info = self.specs(rank)
        return veomni(model)

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return the raw state: experts cut over ep by hand and then by FSDP2."""
        mesh, everybody = self.mesh(rank), self.world.mesh(rank, fsdp=self.world.size)
        held = {}
        for name, whole in WHOLE.items():
            own, how, part = everybody, [Shard(0)], whole
            if "experts" in name:
                names = tuple(axis for axis in self.axes if axis != "ep")
                own, how = mesh[names], [Shard(self.fsdp_dim)]
                how = [Replicate()] * (len(names) - 1) + how
                ep = mesh["ep"]
                part = cut(whole, [Shard(0)], ep.shape, ep.get_coordinate() or ())
            local = cut(part, how, own.shape, own.get_coordinate() or ())
            held[name] = real_dtensor(local, own, how, part.shape)
        return {"model": held}


@pytest.mark.parametrize("fsdp_dim", [0, 1])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("ep_fsdp2_ep2", "ep_fsdp1_ep4"), ("hsdp", "ep_fsdp2_ep2"), ("ep_fsdp1_ep4", "hsdp")],
)
def test_experts_are_in_order_on_whatever_dim_fsdp_cuts_them(
    fsdp_dim: int, saved: str, loaded: str, tmp_path: Path
) -> None:
    before, after = Job(MESHES[saved], fsdp_dim), Job(MESHES[loaded], 1 - fsdp_dim)
    save(tmp_path, before.world, before.state_dict, before.preset)
    assert_same(read_whole(tmp_path), {f"model.{name}": whole for name, whole in WHOLE.items()})
    load(tmp_path, after.world, after.state_dict, after.preset)


def test_a_map_of_specs_does_in_place_of_the_model() -> None:
    job = Job(MESHES["hsdp"], 1)
    for preset in (veomni(job.specs(3)), veomni(job.specs(3), job.mesh(3))):
        placement = preset.rules("model.layers.1.mlp.experts.gate_proj", torch.zeros(4, 4, 3))
        assert placement is not None
        assert placement.placements[-1] == Shard(0)
        assert preset.rules("model.layers.0.mlp.gate.weight", torch.zeros(8, 4)) is None
        assert preset.rename is None


def test_a_state_that_would_come_out_block_transposed_is_refused(tmp_path: Path) -> None:
    job = Job(MESHES["ep_fsdp2_ep2"], 0)

    def restored(rank: int) -> dict[str, Any]:
        name = "model.layers.0.mlp.experts.gate_proj"
        local = job.state_dict(rank)["model"][name].to_local()
        both = [Shard(0), Shard(0)]
        return {"model": {name: real_dtensor(local, job.mesh(rank), both, WHOLE[name].shape)}}

    text = refusal(lambda: save(tmp_path, job.world, restored, job.preset))
    for part in (
        "dim 0 is cut by 'ep_fsdp' and by 'ep'",
        "restore_extra_parallel_dim",
        "raw state",
    ):
        assert part in text, text
    assert not list(tmp_path.iterdir())


def test_a_model_without_specs_is_refused() -> None:
    with pytest.raises(PlacementError, match="no _fqn2spec_info"):
        veomni(nn.Module())
    job = Job(MESHES["hsdp"], 1)
    with pytest.raises(PlacementError, match="no axis 'ep'"):
        veomni(job.specs(0), FakeMesh((8,), ("fsdp",), rank=0))
