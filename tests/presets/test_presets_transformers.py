"""``presets.transformers`` on random-weight models of transformers, on four real gloo ranks.

One launch of ``tests/ranks/transformers_worker.py`` runs all models and writes what it saw; nothing
is fetched from a hub.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from dcp_placements import FusedShard, MeshCoordinate, PlacementError
from dcp_placements.presets import transformers
from tests.torchrun import forked, tail

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "ranks" / "transformers_worker.py"
MODELS = ["mixtral", "qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank saw, by model."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    out = tmp_path_factory.mktemp("transformers")
    modeling = [f"transformers.models.{name}.modeling_{name}" for name in MODELS]
    done = forked(WORKER, out, modules=",".join(modeling))
    # Judged by what was written: gloo's threads sometimes abort a process that is done.
    files = [out / f"{rank}.json" for rank in range(4)]
    assert all(file.exists() for file in files), tail(done)
    result = [json.loads(file.read_text()) for file in files]
    for rank in result:
        assert "failed" not in rank, rank["failed"]
    return result


@pytest.mark.dist
@pytest.mark.parametrize("model", MODELS)
def test_ep2_x_fsdp2_is_the_models_own_state_dict(ranks: list[dict[str, Any]], model: str) -> None:
    seen = ranks[0][model]["alone"]
    assert seen["keys"] == []
    assert seen["unequal"] == []
    assert seen["forward_says_something"]
    assert seen["forward_equal"], "the logits differ"
    assert seen["moments"] == 0, "moments of other parameters than the model's"
    assert seen["unequal_moments"] == []


@pytest.mark.dist
@pytest.mark.parametrize("model", MODELS)
def test_ep2_x_fsdp2_loads_into_other_topologies(ranks: list[dict[str, Any]], model: str) -> None:
    for rank in ranks:
        assert rank["warnings"] == []
        assert rank[model]["report"] == []
        assert rank[model]["differing_ep4"] == []
        assert rank[model]["differing_ep1"] == []
        assert rank[model]["patterns"] == [
            "model.layers.*.mlp.experts.gate_up_proj",
            "model.layers.*.mlp.experts.down_proj",
        ]


@pytest.mark.dist
@pytest.mark.parametrize("model", MODELS)
def test_export_is_what_from_pretrained_reads_and_the_hubs_files_fill_the_ranks(
    ranks: list[dict[str, Any]], model: str
) -> None:
    seen = ranks[0][model]["alone"]
    assert seen["exported_names"] == [], "other names than save_pretrained has"
    assert seen["exported_info"] == [], "keys missing or unexpected"
    assert seen["exported_equal"], "the logits differ"
    assert [rank[model]["differing_hub"] for rank in ranks] == [[], [], [], []]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dtensor", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_that_transformers_cut_over_tp_are_whole_in_the_file(
    ranks: list[dict[str, Any]], model: str, kind: str
) -> None:
    assert ranks[0][model]["tp"][kind] == {"keys": [], "unequal": [], "report": []}


class Model(nn.Module):
    """Has of a model of transformers what the preset asks for."""

    def __init__(self, tp_plan: dict[str, str], ep_plan: dict[str, str]) -> None:
        super().__init__()
        self.tp_plan, self.ep_plan = tp_plan, ep_plan
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for layer in self.layers:
            layer.proj = nn.Linear(4, 4)
            layer.experts = nn.Module()
            layer.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
            layer.experts.scale = nn.Parameter(torch.zeros(2, 4))


def placements(model: Model, **axes: int) -> dict[str, Any]:
    mesh = MeshCoordinate(tuple(axes), tuple(axes.values()), (0,) * len(axes))
    rules = transformers(model, mesh).rules
    found = {name: rules(name, None) for name, _ in model.named_parameters()}
    return {
        name.removeprefix("layers.1."): placement and placement.placements
        for name, placement in found.items()
        if name.startswith("layers.1.")
    }


def test_expert_parallelism_is_asked_before_tensor_parallelism() -> None:
    model = Model(
        {
            "layers.*.proj": "rowwise",
            "layers.*.experts.gate_up_proj": "packed_colwise",
            "layers.*.experts.scale": "colwise",
        },
        {
            "layers.*.experts.gate_up_proj": "grouped_gemm",
            "layers.*.experts": "ep_dispatch_experts",
        },
    )
    both = placements(model, ep=2, tp=2)
    assert both["proj.weight"][1] == Shard(-1)
    assert both["proj.bias"] is None
    assert both["experts.gate_up_proj"][0] == Shard(0)
    assert both["experts.gate_up_proj"][1].is_replicate()
    assert both["experts.scale"] is None
    alone = placements(model, fsdp=2, tp=2)
    assert alone["experts.gate_up_proj"][1] == FusedShard(-2, 2)
    assert alone["experts.scale"][1] == Shard(-2)
    assert set(placements(model, fsdp=4).values()) == {None}


def test_what_the_model_has_no_plan_for_is_refused() -> None:
    with pytest.raises(
        PlacementError, match="'ep' of the mesh has 2 ranks, but Model has no ep_plan"
    ):
        placements(Model({}, {}), ep=2)
    with pytest.raises(PlacementError, match=r"proj.weight: style 'diagonal'.*not known"):
        placements(Model({"layers.*.proj": "diagonal"}, {}), tp=2)
    with pytest.raises(PlacementError, match="no axis names"):
        transformers(Model({}, {}), type("Unnamed", (), {"shape": (2,), "mesh_dim_names": None})())
