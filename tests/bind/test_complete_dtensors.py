"""torchtitan and NeMo AutoModel put every axis into the DTensor: no rule is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_same, read_whole
from preset_scenes import load, save
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import CheckpointPlacement, PlacementRules, Placements
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

EXPERTS = 8
COMPLETE = {
    # torchtitan: fsdp 4 or tp 2 with ep 2; ep 4; more shards than experts; HSDP
    "titan_ep2": ({"efsdp": 2, "ep": 2}, (_StridedShard(0, split_factor=2), Shard(0))),
    "titan_ep4": ({"efsdp": 1, "ep": 4}, (_StridedShard(0, split_factor=4), Shard(0))),
    "titan_wide": ({"efsdp": 2, "ep": 4}, (Shard(1), Shard(0))),
    "titan_hsdp": (
        {"dp_replicate": 2, "efsdp": 2, "ep": 2},
        (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
    ),
    # NeMo AutoModel: EP on dim 0, FSDP of the experts on dim 1
    "automodel": ({"ep_shard": 2, "ep": 2}, (Shard(1), Shard(0))),
    "automodel_hsdp": (
        {"ep_replicate": 2, "ep_shard": 2, "ep": 2},
        (Replicate(), Shard(1), Shard(0)),
    ),
}


@pytest.mark.parametrize("rule", ["none", "both axes", "ep alone"])
@pytest.mark.parametrize("case", COMPLETE)
def test_complete_dtensors_need_no_rule_and_a_rule_changes_nothing(
    case: str, rule: str, tmp_path: Path
) -> None:
    axes, how = COMPLETE[case]
    names = {
        "titan": "layers.1.moe.routed_experts.inner_experts.w1_EFD",
        "automodel": "model.layers.1.mlp.experts.gate_and_up_projs",
    }
    name = names[case.split("_")[0]]
    whole = torch.arange(EXPERTS * 12.0).reshape(EXPERTS, 4, 3)
    dense = torch.arange(36.0).reshape(9, 4)
    bias = torch.arange(float(EXPERTS))
    world = World(FakeMesh(tuple(axes.values()), tuple(axes), rank=0).size())

    def state_dict(rank: int) -> dict[str, Any]:
        mesh, everybody = world.mesh(rank, **axes), world.mesh(rank, fsdp=world.size)
        local = cut(whole, how, mesh.shape, mesh.get_coordinate() or ())
        row = cut(dense, [Shard(0)], everybody.shape, everybody.get_coordinate() or ())
        held = {
            name: real_dtensor(local, mesh, how, whole.shape),
            "tok_embeddings.weight": real_dtensor(row, everybody, [Shard(0)], dense.shape),
            "layers.1.moe.expert_bias_E": bias.clone(),
        }
        return held | {f"optimizer.state.{name}.exp_avg": held[name]}

    def preset(rank: int) -> Placements:
        mesh = world.mesh(rank, **axes)
        ruled = {
            "none": {},
            "both axes": dict(zip(axes, how, strict=True)),
            "ep alone": {"ep": Shard(0)},
        }
        if not ruled[rule]:
            return Placements(PlacementRules({}))
        return Placements(PlacementRules({name: CheckpointPlacement(mesh, ruled[rule])}))

    save(tmp_path / "ours", world, state_dict, preset)
    world.save(tmp_path / "stock", state_dict, lambda rank: dcp.DefaultSavePlanner())
    truth = {
        name: whole,
        "tok_embeddings.weight": dense,
        "layers.1.moe.expert_bias_E": bias,
        f"optimizer.state.{name}.exp_avg": whole,
    }
    assert_same(read_whole(tmp_path / "ours"), truth)
    assert_same(read_whole(tmp_path / "stock"), truth)
    chunks = [
        {
            key: sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if all(c.sizes))
            for key, entry in dcp.FileSystemReader(tmp_path / kind)
            .read_metadata()
            .state_dict_metadata.items()
        }
        for kind in ("ours", "stock")
    ]
    assert chunks[0] == chunks[1]
    load(tmp_path / "ours", world, state_dict, preset)


@pytest.mark.parametrize("strided", ["w", "optim.state.w.exp_avg"])
def test_state_that_is_cut_otherwise_than_its_parameter_keeps_its_own_place(
    strided: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some versions of torch a ``_StridedShard`` equals the ``Shard`` of its dim."""
    monkeypatch.setattr(
        _StridedShard, "__eq__", lambda self, other: self.dim == getattr(other, "dim", None)
    )
    whole, world, names = torch.arange(24.0).reshape(8, 3), World(4), ("w", "optim.state.w.exp_avg")

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, outer=2, inner=2)
        held: dict[str, Any] = {}
        for name in names:
            first = _StridedShard(0, split_factor=2) if name == strided else Shard(0)
            how = (first, Shard(0))
            local = cut(whole, how, mesh.shape, mesh.get_coordinate())
            held[name] = FakeDTensor(local, mesh, how, tuple(whole.shape))
        return held

    def preset(rank: int) -> Placements:
        placement = CheckpointPlacement(world.mesh(rank, outer=2, inner=2), {"inner": Shard(0)})
        return Placements(PlacementRules({re.compile("^w$"): placement}))

    save(tmp_path, world, state_dict, preset)
    assert_same(read_whole(tmp_path), dict.fromkeys(names, whole))


def test_a_factored_moment_is_cut_as_the_dims_are_that_it_has(tmp_path: Path) -> None:
    """It is a DTensor over the same mesh with the same placements, of one dim less."""
    whole, axes = torch.arange(24.0).reshape(8, 3), {"ep": 2, "fsdp": 2}
    world, row = World(4), torch.arange(4.0)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, **axes)
        part = whole.chunk(2)[mesh["ep"].get_local_rank()]

        def over_fsdp(value: torch.Tensor) -> Any:
            return FakeDTensor.distribute(value, mesh["fsdp"], [Shard(0)])

        rows = row + 10 * mesh["ep"].get_local_rank()
        moments = {"exp_avg": over_fsdp(-part), "row": over_fsdp(rows)}
        optim = {"state": {"w": moments}, "param_groups": [{"params": ["w"]}]}
        return {"model": {"w": over_fsdp(part)}, "optim": optim}

    def placements(rank: int) -> Placements:
        placement = CheckpointPlacement(world.mesh(rank, **axes), {"ep": Shard(0)})
        return Placements({re.compile(r"^model\.w$"): placement})

    world.save(tmp_path, state_dict, lambda rank: placements(rank).save_planner())
    stored = read_whole(tmp_path)
    assert torch.equal(stored["model.w"], whole)
    assert torch.equal(stored["optim.state.w.exp_avg"], -whole)
    assert torch.equal(stored["optim.state.w.row"], torch.cat([row, row + 10]))


def test_a_tensor_that_makes_its_own_items_is_refused_a_rule(tmp_path: Path) -> None:
    class Hooked(torch.Tensor):
        def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
            raise NotImplementedError

    placement = CheckpointPlacement(World(1).mesh(0, ep=1), {"ep": Shard(0)})
    planner = Placements({"w": placement}).save_planner()
    with pytest.raises(dcp.CheckpointException, match="w: holds a Hooked, which names its chunks"):
        dcp.save({"w": torch.ones(2).as_subclass(Hooked)}, checkpoint_id=tmp_path, planner=planner)
