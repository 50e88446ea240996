"""``presets.megatron_core``: on models of Megatron Core itself, and on ones marked as theirs are.

One launch of ``tests/ranks/megatron_worker.py`` builds the models of Megatron. What it takes CUDA
to build (Transformer Engine, Megatron-FSDP) is stood for by modules with the attributes that those
set.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hazard_scenes import assert_same, read_whole
from preset_scenes import filled, load, save
from torch import nn
from torch.distributed.tensor import Shard

from dcp_placements import FusedShard, PlacementError, Placements
from dcp_placements.presets import megatron_core, megatron_meshes
from dcp_placements.testing import World, cut
from tests.torchrun import ROOT, python, tail

WORKER = ROOT / "tests" / "ranks" / "megatron_worker.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what became of Megatron's own models, by the worlds of the save and the load."""
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    out = tmp_path_factory.mktemp("megatron")
    done = python(WORKER, out)
    assert done.returncode == 0, tail(done)
    result: dict[str, Any] = json.loads((out / "seen.json").read_text())
    return result


@pytest.mark.parametrize(
    "pair", ["tp2_pp2_ep2-tp4_ep2_etp2", "tp4_ep2_etp2-pp2_vpp2", "pp2_vpp2-tp2_pp2_ep2"]
)
def test_megatrons_own_models_are_whole_in_the_file_and_load(
    seen: dict[str, Any], pair: str
) -> None:
    found = seen[pair]
    assert found["warnings"] == []
    assert found["same_ranks"], "megatron_meshes() and parallel_state disagree"
    assert found["tensors"] == 54
    assert found["keys"] == []
    assert found["in_file"] == []
    assert found["after_load"] == []


@pytest.mark.parametrize(
    ("world", "files"),
    [
        ("one", "mp_rank_00"),
        (
            "tp2_pp2_ep2",
            "mp_rank_00_000_000 mp_rank_00_001_000 mp_rank_01_000_001 mp_rank_01_001_001",
        ),
        (
            "tp4_ep2_etp2",
            "mp_rank_00_000 mp_rank_01_000 mp_rank_02_001 mp_rank_03_001",
        ),
        (
            "pp2_vpp2",
            "mp_rank_00_000_000 mp_rank_00_000_001 mp_rank_00_001_000 mp_rank_00_001_001",
        ),
    ],
)
def test_megatrons_own_files_become_the_whole_model(
    seen: dict[str, Any], world: str, files: str
) -> None:
    assert seen[f"{world} imported"] == {"files": files.split(), "keys": [], "differing": []}


class Marked(nn.Module):
    """A linear module of Transformer Engine: its weights are marked as parallel whatever it is."""

    def __init__(self, mode: str | None, *, norm: bool = False, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.parallel_mode = mode
        for name, tensor in tensors.items():
            parameter = nn.Parameter(tensor)
            if name.startswith("weight"):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = 1 if mode == "row" else 0  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]
            setattr(self, name, parameter)


class Layer(nn.Module):
    def __init__(self, number: int, **children: nn.Module) -> None:
        super().__init__()
        self.layer_number = number
        for name, child in children.items():
            setattr(self, name, child)


def tree(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


CONFIG = {"gated_linear_unit": True, "num_moe_experts": 4, "num_layers": 2}
SHAPES = {
    "embedding.word_embeddings.weight": (10, 4),
    "decoder.layers.{l}.self_attention.linear_q_down_proj.weight": (6, 4),
    "decoder.layers.{l}.self_attention.linear_qkv.layer_norm_weight": (4,),
    "decoder.layers.{l}.self_attention.linear_qkv.weight": (8, 4),
    "decoder.layers.{l}.self_attention.linear_qkv.bias": (8,),
    "decoder.layers.{l}.self_attention.linear_proj.weight": (4, 8),
    "decoder.layers.{l}.self_attention.linear_proj.bias": (4,),
    "decoder.layers.{l}.mlp.experts.linear_fc1.weight{e}": (8, 4),
    "decoder.layers.{l}.mlp.experts.linear_fc2.weight{e}": (4, 8),
    "decoder.layers.{l}.mlp.experts.linear_fc1.bias{e}": (8,),
    "decoder.layers.{l}.mlp.experts.linear_fc2.bias{e}": (4,),
    "decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight": (16, 4),
    "decoder.layers.{l}.mlp.shared_experts.linear_fc2.weight": (4, 8),
}
CUTS = {
    "word_embeddings.weight": Shard(0),
    "linear_qkv.weight": Shard(0),
    "linear_qkv.bias": Shard(0),
    "linear_proj.weight": Shard(1),
    "linear_fc1.weight": FusedShard(0, 2),
    "linear_fc1.bias": FusedShard(0, 2),
    "linear_fc2.weight": Shard(1),
}


def whole_model() -> dict[str, torch.Tensor]:
    names = {
        name.format(l=layer, e=expert): shape
        for name, shape in SHAPES.items()
        for layer in (range(2) if "{l}" in name else (0,))
        for expert in (range(4) if "{e}" in name else (0,))
    }
    return filled(names, names.__getitem__)


class Job:
    """A stand-in for a Transformer Engine model: TP 2, PP 2, EP 2, ETP 2 on 8 ranks."""

    def __init__(self, *, chunks: bool, **sizes: int) -> None:
        self.chunks, self.sizes, self.world = chunks, sizes, World(8 if sizes else 1)

    def meshes(self, rank: int) -> tuple[Any, Any]:
        return megatron_meshes(rank, self.world.size, **self.sizes)

    def part(self, name: str, rank: int) -> torch.Tensor:
        """Return what ``rank`` holds of a tensor, cut by plain slicing."""
        dense, expert = self.meshes(rank)
        mesh = expert if ".experts." in name else dense
        whole = whole_model()[name]
        if "word_embeddings" in name:
            whole = torch.cat([whole, torch.full((6, 4), -1.0).double()])
        found = next((how for end, how in CUTS.items() if name.rstrip("0123").endswith(end)), None)
        if found is None:
            return whole
        return cut(whole, [found], mesh.shape[-1:], mesh.get_coordinate()[-1:])

    def layer(self, number: int, rank: int) -> Layer:
        at = f"decoder.layers.{number}"
        expert = self.meshes(rank)[1]
        each = 4 // expert.shape[2]

        def marked(where: str, mode: str | None, *names: str) -> Marked:
            return Marked(mode, **{n: self.part(f"{at}.{where}.{n}", rank) for n in names})

        def experts(where: str) -> Marked:
            # For ETP > 1 or EP > 1 Transformer Engine sees no parallelism.
            first = expert.get_coordinate()[2] * each
            return Marked(
                None,
                **{
                    f"{kind}{local}": self.part(f"{at}.{where}.{kind}{first + local}", rank)
                    for kind in ("weight", "bias")
                    for local in range(each)
                },
            )

        attention = tree(
            linear_q_down_proj=marked("self_attention.linear_q_down_proj", None, "weight"),
            linear_qkv=marked(
                "self_attention.linear_qkv", "column", "layer_norm_weight", "weight", "bias"
            ),
            linear_proj=marked("self_attention.linear_proj", "row", "weight", "bias"),
        )
        mlp = tree(
            experts=tree(
                linear_fc1=experts("mlp.experts.linear_fc1"),
                linear_fc2=experts("mlp.experts.linear_fc2"),
            ),
            shared_experts=tree(
                linear_fc1=marked("mlp.shared_experts.linear_fc1", "column", "weight"),
                linear_fc2=marked("mlp.shared_experts.linear_fc2", "row", "weight"),
            ),
        )
        return Layer(number + 1, self_attention=attention, mlp=mlp)

    def models(self, rank: int) -> list[nn.Module]:
        stages, stage = self.meshes(rank)[0].shape[0], self.meshes(rank)[0].get_coordinate()[0]
        per = [[0], [1]] if self.chunks else [list(range(2))[stage::stages]]
        if stages == 1 and not self.chunks:
            per = [[0, 1]]
        made = []
        for at, numbers in enumerate(per):
            children = {
                "decoder": tree(layers=nn.ModuleList([self.layer(n, rank) for n in numbers]))
            }
            if stage == 0 and at == 0:
                name = "embedding.word_embeddings.weight"
                weight = {"weight": self.part(name, rank)}
                children["embedding"] = tree(word_embeddings=Marked("column", **weight))
            model = tree(**children)
            model.config = SimpleNamespace(**CONFIG)
            made.append(tree(module=model))  # as DDP wraps it
        return made

    def preset(self, rank: int) -> Placements:
        models = self.models(rank)
        return megatron_core(
            models if self.chunks else models[0], *self.meshes(rank), vocab_size=10
        )

    def state_dict(self, rank: int) -> dict[str, Any]:
        models = [dict(model.module.state_dict()) for model in self.models(rank)]
        return (
            {f"model{at}": m for at, m in enumerate(models)}
            if self.chunks
            else dict(model=models[0])
        )


JOBS = {
    "one": Job(chunks=False),
    "tp2_pp2_ep2_etp2": Job(chunks=False, tp=2, pp=2, ep=2, etp=2),
    "tp4_ep4": Job(chunks=True, tp=4, ep=4, etp=1),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tp2_pp2_ep2_etp2", "tp4_ep4"), ("tp4_ep4", "one"), ("one", "tp2_pp2_ep2_etp2")],
)
def test_transformer_engines_marks_are_not_taken_at_their_word(
    saved: str, loaded: str, tmp_path: Path
) -> None:
    before, after = JOBS[saved], JOBS[loaded]
    save(tmp_path, before.world, before.state_dict, before.preset)
    wanted = {f"model.{name}": whole for name, whole in whole_model().items()}
    assert_same(read_whole(tmp_path), wanted)
    load(tmp_path, after.world, after.state_dict, after.preset)


def test_what_megatron_fsdp_says_comes_first() -> None:
    model = tree(a=Marked("column", weight=torch.zeros(4, 4)), b=Marked(None, weight=torch.ones(4)))
    model.c = Marked("row", weight=torch.zeros(4, 4))
    model.a.weight._tensor_parallel_mode = "row"
    model.b.weight._tensor_parallel_mode = "replicated"
    del model.c.parallel_mode
    model.c.weight._tp_duplicated = True
    rules = megatron_core(model, megatron_meshes(0, 2, tp=2)[0]).rules
    found = rules("model.a.weight", None)
    assert found is not None
    assert found.placements[-1] == Shard(1)
    assert rules("model.b.weight", None) is None
    assert rules("model.c.weight", None) is None


def test_a_plain_linear_fc1_is_no_fused_one_and_not_warned_of(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)

    def model(rank: int) -> nn.Module:
        part = cut(whole, [Shard(0)], (2,), (rank,))
        made = tree(mlp=tree(linear_fc1=Marked("column", weight=part)))
        made.config = SimpleNamespace(gated_linear_unit=False)
        return made

    save(
        tmp_path,
        World(2),
        lambda rank: {"model": dict(model(rank).state_dict())},
        lambda rank: megatron_core(model(rank), megatron_meshes(rank, 2, tp=2)[0]),
    )
    assert_same(read_whole(tmp_path), {"model.mlp.linear_fc1.weight": whole})


@pytest.mark.parametrize(
    ("sizes", "how", "message"),
    [
        ({"pp": 2}, "fsdp2", r"pp=2\n[^$]*one pipeline stage[^$]*way out:     pp=1"),
        ({"ep": 2}, "fsdp2", r"ep=2\n[^$]*without expert parallelism"),
        ({"pp": 2}, "megatron_fsdp", r"pp=2\n[^$]*numbered twice"),
        ({"tp": 2, "cp": 2}, "megatron_fsdp_v2", r"tp=2 and cp=2\n[^$]*and EP alone"),
    ],
)
def test_what_megatron_refuses_is_refused_with_its_reason(
    sizes: dict[str, int], how: str, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        megatron_core(nn.Module(), *megatron_meshes(0, 8, **sizes), data_parallel=how)


def test_what_cannot_be_described_is_refused() -> None:
    dense, expert = megatron_meshes(0, 2, tp=2, etp=2)
    legacy = tree(mlp=tree(experts=Marked(None, weight1=torch.zeros(4, 8))))
    with pytest.raises(PlacementError, match="GroupedMLP joins the experts"):
        megatron_core(legacy, dense, expert)
    experts = tree(experts=tree(linear_fc1=Marked(None, weight0=torch.zeros(4, 8))))
    with pytest.raises(PlacementError, match="there is no expert_mesh="):
        megatron_core(experts, dense)
    with pytest.raises(PlacementError, match="has no layer_number"):
        megatron_core(tree(decoder=tree(layers=nn.ModuleList([nn.Module()]))), dense)
    unclear = tree(a=Marked("column", weight=torch.zeros(4, 4)))
    del unclear.a.parallel_mode, unclear.a.weight.partition_dim
    with pytest.raises(PlacementError, match=r"not along which dim\n.*tensor_model_parallel"):
        megatron_core(unclear, dense)
    built = nn.Module()
    built.config = SimpleNamespace(tensor_model_parallel_size=4)
    with pytest.raises(PlacementError, match=r"tensor_model_parallel_size=4, but axis 'tp' .* 2"):
        megatron_core(built, dense)
    built.config = SimpleNamespace(num_moe_experts=3)
    with pytest.raises(PlacementError, match="num_moe_experts=3"):
        megatron_core(built, *megatron_meshes(0, 2, ep=2))
