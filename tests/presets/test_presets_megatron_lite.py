"""``presets.megatron_lite`` on the parameter names of its models, in simulated worlds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import assert_same, read_whole
from preset_scenes import filled, load, save
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import FusedShard, PlacementError, Placements
from dcp_placements.presets import megatron_lite, megatron_meshes
from dcp_placements.testing import FakeMesh, World, cut, real_dtensor

LAYERS, EXPERTS, HIDDEN, WIDTH, VOCAB = 2, 4, 4, 8, 130

KIMI = ["self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight"]
KIMI += ["self_attention.linear_q_up_proj.linear.layer_norm_weight"]
KIMI += ["self_attention.linear_q_up_proj.linear.weight"]
KIMI += ["self_attention.linear_kv_up_proj.linear.weight"]
KIMI += ["self_attention.linear_proj.linear.weight", "mlp_norm.weight", "moe.router.gate.weight"]
KIMI += ["mlp.gate_up.linear.layer_norm_weight", "mlp.gate_up.linear.weight"]
KIMI += ["mlp.down.linear.weight", "moe.shared_expert.gate_up.linear.weight"]
KIMI += ["moe.shared_expert.down.linear.weight"]
KIMI += ["moe.experts.fc1.weight{}", "moe.experts.fc2.weight{}"]
KIMI_TOP = ["embed.embedding.weight", "norm.weight", "head.col.linear.weight"]
KIMI_TOP += ["mtp.layers.0.enorm.weight", "mtp.layers.0.eh_proj.linear.weight"]
KIMI_TOP += ["mtp.layers.0.transformer_layer.moe.experts.fc1.weight{}"]


def how(name: str) -> Any:
    """Return what TP, or for an expert ETP, does to a parameter; of the names alone, by hand."""
    name = re.sub(r"\d+$", "", name)
    if "layer_norm_weight" in name or "hc_head" in name or "_down_proj" in name:
        return Replicate()
    if name.endswith(("fc1.weight", "gate_up.weight", "gate_up.linear.weight")):
        return FusedShard(0, 2)
    if name.endswith(("fc2.weight", "down.weight", "down.linear.weight", "proj.linear.weight")):
        by_column = name.endswith(("up_proj.linear.weight", "eh_proj.linear.weight"))
        return Shard(0) if by_column else Shard(1)
    if "embed" in name or "head" in name or "qkv" in name:
        return Shard(0)
    return Replicate()


def shape_of(name: str) -> tuple[int, ...]:
    if "embedding" in name or "head.col" in name:
        return (VOCAB, HIDDEN)
    if how(name) == FusedShard(0, 2):
        return (2 * WIDTH, HIDDEN)
    if how(name) == Shard(1):
        return (HIDDEN, WIDTH)
    if how(name) == Shard(0):
        return (WIDTH, HIDDEN)
    return (EXPERTS, HIDDEN) if "gate.weight" in name else (HIDDEN,)


def whole_model() -> dict[str, torch.Tensor]:
    names = [*KIMI_TOP, *(f"layers.{layer}.{name}" for layer in range(LAYERS) for name in KIMI)]
    return filled(
        [
            name.format(expert)
            for name in names
            for expert in (range(EXPERTS) if "{}" in name else (0,))
        ],
        shape_of,
    )


@dataclass(frozen=True)
class Topology:
    """Sizes of a world, and how FSDP2 holds what model parallelism leaves."""

    world: int
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    fsdp: bool = False

    def meshes(self, rank: int) -> tuple[FakeMesh, FakeMesh]:
        dp = self.world // (self.pp * self.cp * self.tp)
        edp = self.world // (self.pp * self.ep * self.etp)
        names = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")
        dense = FakeMesh((self.pp, dp, self.cp, self.tp), names[0], rank=rank)
        return dense, FakeMesh((self.pp, edp, self.ep, self.etp), names[1], rank=rank)

    def layers(self, rank: int) -> range:
        stage, each = (self.meshes(rank)[0].get_coordinate() or [0])[0], LAYERS // self.pp
        return range(stage * each, (stage + 1) * each)

    def preset(self, rank: int) -> Placements:
        return megatron_lite(
            *self.meshes(rank),
            experts=EXPERTS,
            layers=self.layers(rank),
            num_layers=LAYERS,
            vocabulary=(VOCAB, HIDDEN),
            data_parallel="fsdp2" if self.fsdp else "ddp",
        )

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return what the rank holds: whole tensors cut by plain slicing, under its own names."""
        dense, expert = self.meshes(rank)
        at = dict(zip(expert.mesh_dim_names or (), expert.get_coordinate() or (), strict=True))
        each = EXPERTS // self.ep
        layers = self.layers(rank)
        held: dict[str, Any] = {}
        for name, whole in whole_model().items():
            key = name
            layer = re.match(r"layers\.(\d+)", name)
            if layer is not None:
                if int(layer[1]) not in layers:
                    continue
                key = f"layers.{int(layer[1]) - layers.start}{name[layer.end() :]}"
            elif ("embed" in name and layers.start) or (
                "embed" not in name and layers.stop < LAYERS
            ):
                continue
            mesh, tp, fsdp = dense, "tp", "dp"
            if found := re.search(r"experts\.fc\d\.weight(\d+)$", name):
                local = int(found[1]) - each * at["ep"]
                if not 0 <= local < each:
                    continue
                key = f"{key.removesuffix(found[1])}{local}"
                mesh, tp, fsdp = expert, "etp", "edp"
            size, position = mesh[tp].shape[0], (mesh[tp].get_coordinate() or [0])[0]
            if whole.shape[0] == VOCAB:  # padded to a multiple of 128
                whole = torch.cat([whole, torch.full((256 - VOCAB, HIDDEN), -1.0).double()])
            part = cut(whole, [how(name)], (size,), (position,))
            if not self.fsdp:
                held[key] = part
                continue
            own = mesh[fsdp]
            shard = cut(part, [Shard(0)], own.shape, own.get_coordinate() or ())
            held[key] = real_dtensor(shard, own, [Shard(0)], part.shape)
        stage = (dense.get_coordinate() or [0])[0]
        return {f"model_pp{stage}" if self.pp > 1 else "model": held}


TOPOLOGIES = {
    "one": Topology(1),
    "tp2_pp2_ep2": Topology(8, tp=2, pp=2, ep=2),
    "ep4_etp2": Topology(8, ep=4, etp=2, cp=2),
    "tp2_ep2_etp2_fsdp": Topology(8, tp=2, ep=2, etp=2, fsdp=True),
    "pp2_ep2_fsdp": Topology(8, pp=2, ep=2, fsdp=True),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp2_pp2_ep2", "tp2_ep2_etp2_fsdp"),
        ("tp2_ep2_etp2_fsdp", "pp2_ep2_fsdp"),
        ("pp2_ep2_fsdp", "ep4_etp2"),
        ("ep4_etp2", "one"),
    ],
)
def test_a_model_is_whole_in_the_file_and_loads_into_another_topology(
    saved: str, loaded: str, tmp_path: Path
) -> None:
    before, after = TOPOLOGIES[saved], TOPOLOGIES[loaded]
    save(tmp_path, World(before.world), before.state_dict, before.preset)
    wanted = {f"model.{name}": whole for name, whole in whole_model().items()}
    assert_same(read_whole(tmp_path), wanted)
    load(tmp_path, World(after.world), after.state_dict, after.preset)


def test_optimizer_state_has_its_parameters_number_and_place() -> None:
    preset = TOPOLOGIES["tp2_pp2_ep2"].preset(7)
    assert preset.rename is not None
    for prefix in ("optim.state.", "optim.state.model_pp1.", "optimizer.state.", "model_pp1."):
        key = preset.rename(f"{prefix}layers.0.moe.experts.fc1.weight1.exp_avg")
        assert key == f"{prefix}layers.1.moe.experts.fc1.weight3.exp_avg".replace("_pp1", "")
        found = preset.rules(key, None)
        assert found is not None
        assert found.placements[-1] == FusedShard(0, 2)
    kept = "optim.state.mtp.layers.0.enorm.weight.exp_avg"
    assert preset.rename(kept) == kept


@pytest.mark.parametrize(
    ("rank", "sizes", "files"),
    [
        # peers of one model-parallel rank, as Megatron names the files of its legacy format
        (8, {"tp": 2, "ep": 2, "etp": 2}, {(0, 0), (1, 0), (0, 1), (1, 1)}),
        (8, {"tp": 2, "ep": 2, "etp": 1}, {(0, 0), (1, 1)}),
        (8, {"tp": 2, "ep": 4, "etp": 1}, {(0, 0), (1, 1), (0, 2), (1, 3)}),
        (8, {"tp": 4, "ep": 2, "etp": 1}, {(0, 0), (1, 1), (2, 0), (3, 1)}),
    ],
)
def test_the_meshes_pair_tp_and_ep_as_megatrons_files_do(
    rank: int, sizes: dict[str, int], files: set[tuple[int, int]]
) -> None:
    found = set()
    for number in range(rank):
        dense, expert = megatron_meshes(number, rank, **sizes)
        found.add((dense.get_coordinate()[3], expert.get_coordinate()[2]))
    assert found == files


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    meshes = megatron_meshes(0, 8, tp=2, pp=2, ep=2)
    with pytest.raises(PlacementError, match=r"pp=2[^$]*reason:[^$]*way out:"):
        megatron_lite(*meshes, experts=8, data_parallel="megatron_fsdp")
    with pytest.raises(PlacementError, match="'zero3' is none of 'ddp'"):
        megatron_lite(*meshes, experts=8, data_parallel="zero3")
    with pytest.raises(PlacementError, match="experts=7 over ep=2"):
        megatron_lite(*meshes, experts=7)
    with pytest.raises(PlacementError, match="same ranks, with the same pipeline stages"):
        megatron_lite(meshes[0], megatron_meshes(0, 8, tp=2, ep=2)[1], experts=8)
    with pytest.raises(PlacementError, match="no axis 'cp'"):
        megatron_lite(FakeMesh((2, 2, 2), ("pp", "dp", "tp"), rank=0))
    with pytest.raises(PlacementError, match=r"8 ranks cannot be cut by etp x ep x pp = 2 x 3 x 1"):
        megatron_meshes(0, 8, tp=2, ep=3)
