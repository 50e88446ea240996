"""Public reports, rebuilt without their projects' code: what a rank holds, and the lines that help.

Each scene cuts whole tensors as the reported trainer does, by plain slicing. Torch's own planners
read what our planner saves, in one process, and every world loads what another one saved.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    IndexShard,
    PlacementError,
    PlacementFileSystemReader,
    Placements,
    RaggedShard,
    Renames,
    Renumber,
    Replace,
    Transpose,
    contiguous,
)
from dcp_placements.offline import import_checkpoint
from dcp_placements.testing import FakeMesh, World, real_dtensor
from tests.offline_scenes import save_hugging_face

HIDDEN = 6
BLANK = -1.0


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    """Return a tensor of which no two elements are equal, nor equal to those of another family."""
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float32).reshape(shape)


EXPERTS = numbered(8, HIDDEN, 4)
MOMENTS = numbered(8, HIDDEN, 4, first=1000)


class Rank:
    """One rank of a world, as its trainer sees it.

    Attributes:
        mesh: Over all axes of the world.
        at: Its position along each axis; 0 along those that the world does not have.
        size: The ranks along each axis; 1 along those.
    """

    def __init__(self, mesh: FakeMesh) -> None:
        self.mesh = mesh
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        self.at = dict(zip(names, coordinate, strict=True))
        self.size = dict(zip(names, mesh.shape, strict=True))

    def part(self, whole: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
        """Return the ``torch.chunk`` piece of this rank along an axis; empty beyond the last."""
        pieces = whole.chunk(self.size[axis], dim)
        if self.at[axis] < len(pieces):
            return pieces[self.at[axis]].clone()
        return whole.narrow(dim, 0, 0).clone()

    def sharded(self, held: torch.Tensor, **dims: int | None) -> torch.Tensor:
        """Return what ``fully_shard`` makes of a tensor: a DTensor over these axes alone.

        Args:
            held: Whole for these axes.
            dims: By axis, the dim that it shards; None: it replicates.
        """
        local = held
        for axis, dim in dims.items():
            local = local if dim is None else self.part(local, dim, axis)
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims.values()]
        return real_dtensor(local.clone(), self.mesh[tuple(dims)], placements, held.shape)

    def rule(self, **placements: Any) -> CheckpointPlacement:
        """Return a rule of the whole mesh."""
        return CheckpointPlacement(self.mesh, placements)


@dataclass(frozen=True)
class Report:
    """A scene.

    Attributes:
        worlds: Axes and sizes of the worlds that save and load.
        wholes: What a checkpoint has to hold, by key.
        state: What a rank holds.
        lines: The declaration of a rank: the lines that its user writes.
    """

    worlds: tuple[dict[str, int], ...]
    wholes: Callable[[], dict[str, torch.Tensor]]
    state: Callable[[Rank], dict[str, Any]]
    lines: Callable[[Rank], dict[str, Any]]


def experts_by_number() -> dict[str, torch.Tensor]:
    weights = {f"model.experts.{i}.w": EXPERTS[i].clone() for i in range(8)}
    moments = {f"optim.state.experts.{i}.w.exp_avg": MOMENTS[i].clone() for i in range(8)}
    return weights | moments


def pruned(rank: Rank) -> dict[str, Any]:
    """Each rank has its own experts alone, counted from 0, and FSDP2 over the rest."""

    def mine(whole: torch.Tensor) -> list[torch.Tensor]:
        return [rank.sharded(one, fsdp=0) for one in rank.part(whole, 0, "ep")]

    return {
        "model": {f"experts.{i}.w": one for i, one in enumerate(mine(EXPERTS))},
        "optim": {
            "state": {f"experts.{i}.w": {"exp_avg": one} for i, one in enumerate(mine(MOMENTS))}
        },
    }


def numbers(rank: Rank) -> dict[str, Any]:
    ids = contiguous([8 // rank.size["ep"]] * rank.size["ep"], at=rank.at["ep"])
    return {"rules": None, "rename": Renumber("experts.{}", ids, total=8)}


def stacked_experts() -> dict[str, torch.Tensor]:
    return {"model.experts.w": EXPERTS, "optim.state.experts.w.exp_avg": MOMENTS}


def stacked(make: Callable[[Rank, torch.Tensor], torch.Tensor]) -> Callable[[Rank], dict[str, Any]]:
    def state(rank: Rank) -> dict[str, Any]:
        return {
            "model": {"experts.w": make(rank, EXPERTS)},
            "optim": {"state": {"experts.w": {"exp_avg": make(rank, MOMENTS)}}},
        }

    return state


def by_rule(**placements: Any) -> Callable[[Rank], dict[str, Any]]:
    return lambda rank: {"rules": {"experts": rank.rule(**placements)}}


UNEVEN = numbered(10, HIDDEN)
SWIGLU = numbered(16, HIDDEN)
QKV = numbered(24, HIDDEN)
EMBEDDING = numbered(10, HIDDEN)
SLOTS = {0: [0, 3, 5], 1: [1, 2, 4, 5]}


def swiglu(rank: Rank) -> dict[str, Any]:
    gate, up = SWIGLU.chunk(2)
    held = torch.cat([rank.part(gate, 0, "tp"), rank.part(up, 0, "tp")])
    return {"mlp.fc1": rank.sharded(held, fsdp=0)}


def qkv(rank: Rank) -> dict[str, Any]:
    return {"qkv": torch.cat([rank.part(one, 0, "tp") for one in QKV.split([16, 4, 4])])}


def padded(rank: Rank) -> dict[str, Any]:
    rows = -(-10 // rank.size["tp"]) * rank.size["tp"]
    whole = torch.cat([EMBEDDING, torch.full((rows - 10, HIDDEN), BLANK)])
    return {"embedding": rank.part(whole, 0, "tp")}


def padding(rank: Rank) -> dict[str, Any]:
    rows = -(-10 // rank.size["tp"]) * rank.size["tp"]
    shapes = {"global_shape": (10, HIDDEN), "padded_shape": (rows, HIDDEN)}
    return {"rules": {"embedding": CheckpointPlacement(rank.mesh, {"tp": Shard(0)}, **shapes)}}


def layers() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.w": EXPERTS[i].clone() for i in range(8)}


def stage(rank: Rank) -> dict[str, Any]:
    return {f"layers.{i}.w": one for i, one in enumerate(rank.part(EXPERTS, 0, "pp"))}


def stages(rank: Rank) -> dict[str, Any]:
    ids = contiguous([8 // rank.size["pp"]] * rank.size["pp"], at=rank.at["pp"])
    return {"rules": None, "rename": Renumber("layers.{}", ids, total=8)}


def slots(rank: Rank) -> dict[str, Any]:
    return {"experts.w": EXPERTS[SLOTS[rank.at["ep"]]] if rank.size["ep"] == 2 else EXPERTS[:6]}


def slot_map(rank: Rank) -> dict[str, Any]:
    held = SLOTS[rank.at["ep"]] if rank.size["ep"] == 2 else range(6)
    rows = {"ep": IndexShard(0, held)}
    shape = (6, *EXPERTS.shape[1:])
    return {"rules": {"experts": CheckpointPlacement(rank.mesh, rows, global_shape=shape)}}


def amax(rank: Rank) -> dict[str, Any]:
    held = rank.part(EXPERTS[:, :1, 0], 0, "ep")
    return {f"experts.{i}.quantizer._amax": one for i, one in enumerate(held)}


RAGGED = {2: (7, 3), 4: (5, 0, 3, 2), 1: (10,)}
OWNED = {2: (0, 10), 4: (0, 0, 10, 0), 1: (10,)}
FLAT = {2: (37, 23), 4: (20, 0, 31, 9), 1: (60,)}
MTP = numbered(4, HIDDEN, first=500)
WEIGHT = numbered(6, 8)
MOMENTUM = numbered(6, 8, first=100)
NEURONS = numbered(6, 1, first=200)


def shards(sizes: dict[int, tuple[int, ...]]) -> Callable[[Rank], dict[str, Any]]:
    return lambda rank: {"w": UNEVEN.split(sizes[rank.size["dp"]])[rank.at["dp"]].clone()}


def by_sizes(sizes: dict[int, tuple[int, ...]]) -> Callable[[Rank], dict[str, Any]]:
    return lambda rank: {"rules": {"w": rank.rule(dp=RaggedShard(0, sizes[rank.size["dp"]]))}}


def flat_range(rank: Rank) -> dict[str, Any]:
    return {"w": UNEVEN.flatten().split(FLAT[rank.size["dp"]])[rank.at["dp"]].clone()}


def by_ranges(rank: Rank) -> dict[str, Any]:
    ranges, shape = {"dp": FlatShard(FLAT[rank.size["dp"]])}, (10, HIDDEN)
    return {"rules": {"w": CheckpointPlacement(rank.mesh, ranges, global_shape=shape)}}


def few_heads(rank: Rank) -> dict[str, Any]:
    """Return rows of Q, K and V, of which the latter two have two heads for all ranks."""
    q, *others = QKV.split([16, 4, 4])
    heads = min(rank.size["tp"], 2)
    head = rank.at["tp"] * heads // rank.size["tp"]
    held = [rank.part(q, 0, "tp"), *[part.chunk(heads)[head] for part in others]]
    return {"qkv": torch.cat(held)}


def by_heads(rank: Rank) -> dict[str, Any]:
    copies = max(rank.size["tp"] // 2, 1)
    by = FusedShard(0, (16, 4, 4), copies=(1, copies, copies))
    return {"rules": {"qkv": rank.rule(tp=by)}}


def normuon(rank: Rank) -> dict[str, Any]:
    """Return columns of a weight; the second moment has one number for each row."""
    momenta = {"momentum": rank.part(MOMENTUM, 1, "tp"), "variance_neuron": NEURONS.clone()}
    optim = {"state": {"w": momenta}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    return {"model": {"w": rank.part(WEIGHT, 1, "tp")}, "optim": optim}


def draft_stage(rank: Rank) -> dict[str, Any]:
    """Return decoder layers and those that draft tokens, both counted from 0 on each stage."""
    stages = {"decoder": rank.part(EXPERTS, 0, "pp"), "mtp": rank.part(MTP, 0, "pp")}
    return {
        f"{name}.layers.{number}.w": weight.clone()
        for name, weights in stages.items()
        for number, weight in enumerate(weights)
    }


def draft_stages(rank: Rank) -> dict[str, Any]:
    size, at = rank.size["pp"], rank.at["pp"]
    steps = [
        Renumber(f"{name}.layers.{{}}", contiguous([total // size] * size, at=at), total=total)
        for name, total in (("decoder", 8), ("mtp", 4))
    ]
    return {"rules": None, "rename": Renames(*steps)}


REPORTS = {
    "dion #19, #71": Report(
        ({"tp": 2}, {"tp": 4}, {"tp": 1}),
        lambda: {
            "model.w": WEIGHT,
            "optim.state.w.momentum": MOMENTUM,
            "optim.state.w.variance_neuron": NEURONS,
        },
        normuon,
        lambda rank: {"rules": {"w": rank.rule(tp=Shard(1))}},
    ),
    "Megatron-LM #5329": Report(
        ({"pp": 2}, {"pp": 4}, {"pp": 1}),
        lambda: {
            **{f"decoder.layers.{i}.w": EXPERTS[i].clone() for i in range(8)},
            **{f"mtp.layers.{i}.w": MTP[i].clone() for i in range(4)},
        },
        draft_stage,
        draft_stages,
    ),
    "torchtitan #3239, uneven": Report(
        ({"dp": 2}, {"dp": 4}, {"dp": 1}), lambda: {"w": UNEVEN}, shards(RAGGED), by_sizes(RAGGED)
    ),
    "torchtitan #3402, owned": Report(
        ({"dp": 2}, {"dp": 4}, {"dp": 1}), lambda: {"w": UNEVEN}, shards(OWNED), by_sizes(OWNED)
    ),
    "hyper-parallel #594, flat": Report(
        ({"dp": 2}, {"dp": 4}, {"dp": 1}), lambda: {"w": UNEVEN}, flat_range, by_ranges
    ),
    "transformers #48307, #47811": Report(
        ({"tp": 4}, {"tp": 2}, {"tp": 8}, {"tp": 1}), lambda: {"qkv": QKV}, few_heads, by_heads
    ),
    "Megatron-LM #7161": Report(
        ({"tp": 2, "gtp": 2}, {"tp": 4, "gtp": 1}, {"tp": 1, "gtp": 4}),
        lambda: {"mlp.fc1": SWIGLU},
        lambda rank: {
            "mlp.fc1": rank.part(
                torch.cat([rank.part(part, 0, "tp") for part in SWIGLU.chunk(2)]), 0, "gtp"
            )
        },
        lambda rank: {"rules": {"fc1": rank.rule(tp=FusedShard(0, 2), gtp=Shard(0))}},
    ),
    "torchtitan #3554, #4373; transformers #47031": Report(
        ({"ep": 4}, {"ep": 2}, {"ep": 1}),
        lambda: {"experts.w": EXPERTS},
        lambda rank: {"experts.w": rank.part(EXPERTS.mT, 0, "ep").contiguous()},
        lambda rank: {
            "rules": {"experts": rank.rule(ep=Shard(0))},
            "rename": Transpose("experts"),
        },
    ),
    "KempnerForge #202, pruned": Report(
        ({"ep": 2, "fsdp": 2}, {"ep": 4, "fsdp": 1}, {"ep": 1, "fsdp": 1}),
        experts_by_number,
        pruned,
        numbers,
    ),
    "KempnerForge #202, packed": Report(
        ({"ep": 4}, {"ep": 2}),
        stacked_experts,
        stacked(lambda rank, whole: rank.part(whole, 0, "ep")),
        by_rule(ep=Shard(0)),
    ),
    "UniRL #158, twinkle #116, VeOmni #228": Report(
        ({"ep": 2, "fsdp": 2}, {"ep": 8, "fsdp": 1}, {"ep": 1, "fsdp": 2}),
        stacked_experts,
        stacked(lambda rank, whole: rank.sharded(rank.part(whole, 0, "ep"), fsdp=1)),
        by_rule(ep=Shard(0)),
    ),
    "transformers #48237": Report(
        ({"ep": 2, "fsdp": 4}, {"ep": 1, "fsdp": 4}),
        lambda: {"experts.w": UNEVEN},
        lambda rank: {"experts.w": rank.sharded(rank.part(UNEVEN, 0, "ep"), fsdp=0)},
        by_rule(ep=Shard(0)),
    ),
    "Megatron-LM #2769": Report(
        ({"tp": 2, "fsdp": 2}, {"tp": 1, "fsdp": 4}, {"tp": 4, "fsdp": 1}),
        lambda: {"mlp.fc1": SWIGLU},
        swiglu,
        lambda rank: {"rules": {"fc1": rank.rule(tp=FusedShard(0, 2))}},
    ),
    "Megatron-LM #1836": Report(
        ({"ep": 2, "etp": 2}, {"ep": 1, "etp": 4}),
        stacked_experts,
        stacked(lambda rank, whole: rank.part(rank.part(whole, 0, "ep"), 2, "etp")),
        by_rule(ep=Shard(0), etp=Shard(2)),
    ),
    "DeepSpeed #8544, prime-rl #3583": Report(
        ({"ep": 2}, {"ep": 1}),
        lambda: {"experts.w": EXPERTS[:6].clone()},
        slots,
        slot_map,
    ),
    "Megatron-LM #7293": Report(
        ({"tp": 4}, {"tp": 2}, {"tp": 3}),
        lambda: {"embedding": EMBEDDING},
        padded,
        padding,
    ),
    "pytorch #149701": Report(
        ({"tp": 2}, {"tp": 4}, {"tp": 1}),
        lambda: {"qkv": QKV},
        qkv,
        lambda rank: {"rules": {"qkv": rank.rule(tp=FusedShard(0, (16, 4, 4)))}},
    ),
    "Automodel #3250": Report(({"pp": 2}, {"pp": 4}, {"pp": 1}), layers, stage, stages),
    "Model-Optimizer #2209": Report(
        ({"ep": 2}, {"ep": 4}),
        lambda: {f"experts.{i}.quantizer._amax": EXPERTS[i, :1, 0].clone() for i in range(8)},
        amax,
        numbers,
    ),
}


def world_of(axes: dict[str, int]) -> tuple[World, list[Rank]]:
    world = World(torch.Size(axes.values()).numel())
    return world, [Rank(world.mesh(rank, **axes)) for rank in range(world.size)]


def read_by_torch(path: Path, wholes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    read = {key: torch.full_like(whole, BLANK) for key, whole in wholes.items()}
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return read


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def locals_of(state: Any) -> list[torch.Tensor]:
    """Return the local tensors of a state dict, in its order."""
    if isinstance(state, dict):
        return [one for value in state.values() for one in locals_of(value)]
    if not isinstance(state, torch.Tensor):
        return []
    return [state.to_local() if hasattr(state, "to_local") else state]


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with other values in its tensors."""
    for local in locals_of(state):
        local.fill_(BLANK)
    return state


@pytest.mark.parametrize("name", REPORTS)
def test_the_lines_make_it_right_in_every_topology(name: str, tmp_path: Path) -> None:
    report, wholes = REPORTS[name], REPORTS[name].wholes()
    worlds = [world_of(axes) for axes in report.worlds]
    for number, (world, ranks) in enumerate(worlds):
        path = tmp_path / str(number)
        world.save(
            path,
            lambda rank, ranks=ranks: report.state(ranks[rank]),  # type: ignore[misc]
            lambda rank, ranks=ranks: Placements(**report.lines(ranks[rank])).save_planner(),  # type: ignore[misc]
        )
        assert equal([*read_by_torch(path, wholes).values()], [*wholes.values()])
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        assert {key for key in stored if "param_groups" not in key} == wholes.keys()
    for number, (world, ranks) in enumerate(worlds):
        loaded = world.load(
            tmp_path / str((number + 1) % len(worlds)),
            lambda rank, ranks=ranks: blank(report.state(ranks[rank])),  # type: ignore[misc]
            lambda rank, ranks=ranks: Placements(**report.lines(ranks[rank])).load_planner(),  # type: ignore[misc]
        )
        for rank, state in zip(ranks, loaded, strict=True):
            assert equal(locals_of(state), locals_of(report.state(rank)))


# Reports of what stock planners saved, and a model that asks for something else.


@dataclass(frozen=True)
class Resumed:
    """A scene of one rank.

    Attributes:
        stored: What torch's planner saved.
        state: What the model has before the load.
        wanted: What it has to have after it, made of ``stored`` without a checkpoint.
        lines: Of ``Placements`` and of ``load_planner``.
    """

    stored: dict[str, Any]
    state: Callable[[], dict[str, Any]]
    wanted: dict[str, Any]
    lines: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


def tied() -> dict[str, Any]:
    weight = torch.full_like(WEIGHT, BLANK)
    return {"embed_tokens.weight": weight, "lm_head.weight": weight}


def untied() -> dict[str, Any]:
    names = ("embed_tokens.weight", "lm_head.weight")
    return {name: torch.full_like(WEIGHT, BLANK) for name in names}


def upcycled() -> dict[str, Any]:
    experts = {f"layers.0.experts.{i}.w": torch.full_like(WEIGHT, BLANK) for i in range(4)}
    return experts | {"layers.0.router.w": torch.full((4, 8), 0.5)}


def adam(lr: Any, **state: Any) -> dict[str, Any]:
    groups = [{"lr": lr, "params": ["w"]}]
    return {
        "model": {"w": WEIGHT.clone()},
        "optim": {"state": {"w": state} if state else {}, "param_groups": groups},
    }


MLP = {"layers.0.mlp.w": WEIGHT}
BOTH = {"embed_tokens.weight": WEIGHT, "lm_head.weight": WEIGHT}
ROUTER = {"optional": ["router"], "waive": {"router": "new, and initialised here"}}
EXTRA = {"optional": ["_extra_state"]}
WRAPPED = {"layers.0._orig_mod.w": WEIGHT, "layers.1._orig_mod.w": MOMENTUM}

RESUMED = {
    "Automodel #3616, tied": Resumed({"embed_tokens.weight": WEIGHT}, tied, BOTH),
    "Automodel #3665, two stages": Resumed(
        {"embed_tokens.weight": WEIGHT},
        untied,
        BOTH,
        ({"rename": Replace("lm_head", "embed_tokens")}, {}),
    ),
    "marin #1366, OLMoE #9": Resumed(
        MLP,
        upcycled,
        {f"layers.0.experts.{i}.w": WEIGHT for i in range(4)}
        | {"layers.0.router.w": torch.full((4, 8), 0.5)},
        ({"rename": Replace("experts.*", "mlp")}, ROUTER),
    ),
    "TransformerEngine #1860; Megatron-LM #6509": Resumed(
        {"fc1.w": WEIGHT, "fc1._extra_state": torch.zeros(50, dtype=torch.uint8)},
        lambda: {
            "fc1.w": torch.full_like(WEIGHT, BLANK),
            "fc1._extra_state": torch.ones(25, dtype=torch.uint8),
        },
        {"fc1.w": WEIGHT, "fc1._extra_state": torch.ones(25, dtype=torch.uint8)},
        ({}, EXTRA),
    ),
    "torchtitan #2622": Resumed(
        {"layers.0.w": WEIGHT, "layers.1.w": MOMENTUM},
        lambda: {name: torch.full_like(weight, BLANK) for name, weight in WRAPPED.items()},
        WRAPPED,
        ({"rename": Replace("_orig_mod", "")}, {}),
    ),
    "Megatron-Bridge #5680": Resumed(
        adam(0.1),
        lambda: adam(0.1, step=torch.tensor(1.0), exp_avg=torch.ones(6, 8)),
        adam(0.1, step=torch.tensor(0.0), exp_avg=torch.zeros(6, 8)),
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_the_lines_resume_what_stock_planners_saved(name: str, tmp_path: Path) -> None:
    scene = RESUMED[name]
    dcp.save(scene.stored, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(), no_dist=True)
    declared, options = scene.lines
    state = scene.state()
    planner = Placements(**({"rules": None} | declared)).load_planner(**options)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert equal(locals_of(state), locals_of(scene.wanted))


@pytest.mark.parametrize("is_tensor_here", [False, True])
def test_pytorch_139575_a_rate_may_be_a_tensor_on_one_side(
    is_tensor_here: bool, tmp_path: Path
) -> None:
    saved, own = (0.5, torch.tensor(0.1)) if is_tensor_here else (torch.tensor(0.5), 0.1)
    dcp.save({"lr": saved, "w": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)
    state = {"lr": own, "w": torch.zeros(6, 8)}
    planner = Placements(None).load_planner()
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert float(state["lr"]) == 0.5
    assert isinstance(state["lr"], torch.Tensor) == is_tensor_here


def test_unsloth_6200_transformers_47145_fp8_is_numbers_by_one_command(tmp_path: Path) -> None:
    """``dcp-placements import hf ckpt --dequantize bfloat16``."""
    codes = (torch.arange(200 * 130).reshape(200, 130) % 7 - 3).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    save_hugging_face(tmp_path / "hf", {"up.weight": codes, "up.weight_scale_inv": scales})
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", dequantize=torch.bfloat16)
    state = {"up.weight": torch.zeros(200, 130, dtype=torch.bfloat16)}
    planner = Placements(None).load_planner()
    dcp.load(state, checkpoint_id=tmp_path / "ckpt", planner=planner, no_dist=True)
    of_blocks = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    assert torch.equal(state["up.weight"], (codes.float() * of_blocks).to(torch.bfloat16))


def test_sglang_36438_files_of_an_engines_ranks_are_refused_by_name(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    names = [f"model-0000{rank}-TP-000.safetensors" for rank in range(4)]
    for name, part in zip(names, EXPERTS.chunk(4), strict=True):
        save_file({"experts.w": part.clone()}, hf / name)
    index = {"weight_map": {"experts.w": names[0]}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlacementError) as refusal:
        import_checkpoint(hf, tmp_path / "ckpt")
    assert names[1] in str(refusal.value)
    assert not (tmp_path / "ckpt" / ".metadata").exists()


def test_open_instruct_1809_places_of_olmo_cores_class_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have three fields, and the class is not importable where the checkpoint is read."""
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    module = ModuleType("olmo_core_filesystem")
    kind = type("_StorageInfo", (), {"__module__": module.__name__})
    monkeypatch.setattr(module, "_StorageInfo", kind, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    places = {}
    for index, place in metadata.storage_data.items():
        places[index] = kind()
        for name in ("relative_path", "offset", "length"):
            setattr(places[index], name, getattr(place, name))
    metadata.storage_data = places
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.undo()
    state = {"w": torch.zeros_like(WEIGHT)}
    reader = PlacementFileSystemReader(tmp_path)
    planner = Placements(None).load_planner()
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert torch.equal(state["w"], WEIGHT)
