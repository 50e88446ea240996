"""``doctor --whole`` and ``verify --whole``: every key and shape against the unsharded model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    Placements,
    Renames,
    Renumber,
    contiguous,
)
from dcp_placements.errors import CannotLook
from dcp_placements.offline import diagnose, verify
from dcp_placements.testing import World

Shapes = dict[str, tuple[int, ...]]

WORLD = World(4)
LAYERS = 4


def model() -> Shapes:
    """Return the shapes of a model of four layers with four experts each."""
    shapes: Shapes = {"embed.weight": (32, 8), "head.weight": (32, 8)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.attn.qkv_proj.weight"] = (24, 8)
        shapes[f"layers.{layer}.mlp.w1.weight"] = (20, 8)
        shapes[f"layers.{layer}.norm.weight"] = (8,)
        for expert in range(4):
            shapes[f"layers.{layer}.experts.{expert}.w1"] = (6, 8)
    return shapes


def state_dict(rank: int) -> dict[str, Any]:
    """Return what a rank of pp 2 x tp 2 has, its layers and experts counted from 0."""
    pp, tp = divmod(rank, 2)
    weights: dict[str, torch.Tensor] = {}
    for key, shape in model().items():
        parts = key.split(".")
        if parts[0] == "layers":
            if int(parts[1]) // 2 != pp:
                continue
            parts[1] = str(int(parts[1]) % 2)
            if "experts" in parts:
                if int(parts[3]) // 2 != tp:
                    continue
                parts[3] = str(int(parts[3]) % 2)
            elif "norm" not in parts:
                shape = (shape[0] // 2, *shape[1:])
        elif (parts[0] == "embed") != (pp == 0):
            continue
        weights[".".join(parts)] = torch.ones(shape)
    moments = {key: {"exp_avg": value, "step": torch.tensor(1.0)} for key, value in weights.items()}
    groups = [{"params": [*weights], "lr": 0.1}]
    return {"model": weights, "optim": {"state": moments, "param_groups": groups}}


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A checkpoint by torch's planners, which have taken stages and experts for replicas."""
    path = tmp_path / "stock"
    WORLD.save(path, state_dict, lambda rank: dcp.DefaultSavePlanner())
    return path


def test_m132_every_tensor_that_a_stock_save_lost_is_named_with_its_declaration(
    stock: Path,
) -> None:
    # Without the model, the experts that are stored seem to be all; the rest is "not checked".
    counted = diagnose(stock, experts_per_layer=2)
    assert counted.healthy
    assert "not checked" in str(counted)
    assert "--whole" in str(counted)
    diagnosis = diagnose(stock, whole=model())
    assert not diagnosis.healthy
    lost = {tensor.fqn: tensor for tensor in diagnosis.lost}
    # The oracle: what plain names and shapes of the checkpoint are, key by key.
    stored = {
        key: tuple(entry.size)
        for key, entry in dcp.FileSystemReader(stock).read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    expected = {f"model.{key}": shape for key, shape in model().items()}
    differing = {key for key, shape in expected.items() if stored.get(key) != shape}
    states = {f"optim.state.{key}.exp_avg": shape for key, shape in model().items()}
    differing |= {key for key, shape in states.items() if stored.get(key, shape) != shape}
    assert set(lost) == differing
    for key, tensor in lost.items():
        assert tensor.stored == stored.get(key)
    assert lost["model.layers.0.mlp.w1.weight"].declaration == '{"tp": Shard(0)}'
    assert lost["model.layers.0.attn.qkv_proj.weight"].declaration.startswith(
        '{"tp": FusedShard(0, ('
    )
    assert lost["optim.state.layers.1.mlp.w1.weight.exp_avg"].stored == (10, 8)
    renumber = 'rename=Renumber("{}.{{}}", contiguous([...], at=rank), total=4)'
    assert lost["model.layers.2.norm.weight"].declaration == renumber.format("layers")
    assert lost["model.layers.1.experts.3.w1"].declaration == renumber.format("experts")


def test_the_declarations_hold_what_was_lost(tmp_path: Path) -> None:
    def planner(rank: int) -> Any:
        pp, tp = divmod(rank, 2)
        mesh = WORLD.mesh(rank, pp=2, tp=2)
        cut = CheckpointPlacement(mesh["tp"], {"tp": Shard(0)})
        rename = Renames(
            Renumber("layers.{}", contiguous([2, 2], at=pp), total=4),
            Renumber("experts.{}", contiguous([2, 2], at=tp), total=4),
        )
        fused = CheckpointPlacement(mesh["tp"], {"tp": FusedShard(0, 3)})
        rules = {"qkv_proj": fused, "mlp.w1": cut}
        return Placements(rules, rename=rename, whole=model()).save_planner()

    WORLD.save(tmp_path, state_dict, planner)
    diagnosis = diagnose(tmp_path, whole=model())
    assert diagnosis.healthy
    assert not diagnosis.lost
    assert str(diagnosis).splitlines()[-1].startswith("is the whole model; compared: ")
    assert verify(tmp_path, whole=model()).sound
    assert not verify(tmp_path, whole={**model(), "more.weight": (2,)}).sound


@pytest.mark.worlds(50)
def test_drawn_shapes_differ_where_plain_comparison_says_so(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        whole: Shapes = {
            f"layers.{layer}.{name}": tuple(draw.choices([2, 4, 6], k=draw.randint(1, 3)))
            for layer in range(3)
            for name in ("w", "experts.w1", "gate_up_proj.weight")
        }
        stored = {
            key: tuple(size // draw.choice([1, 1, 1, 2]) for size in shape)
            for key, shape in whole.items()
            if draw.random() < 0.8 or key == "layers.0.w"
        }
        stored["layers.0.w"] = whole["layers.0.w"]
        state = {"model": {key: torch.ones(shape) for key, shape in stored.items()}}
        path = tmp_path / str(seed)
        dcp.save(state, checkpoint_id=path)
        lost = {tensor.fqn: tensor for tensor in diagnose(path, whole=whole).lost}
        differing = {f"model.{key}" for key, shape in whole.items() if stored.get(key) != shape}
        assert set(lost) == differing, seed
        for fqn, tensor in lost.items():
            key = fqn.removeprefix("model.")
            assert (tensor.stored, tensor.whole) == (stored.get(key), whole[key])
            halved = [n for n, size in enumerate(tensor.stored or ()) if size != whole[key][n]]
            assert [f"Shard({n}" in tensor.declaration for n in halved] == [True] * len(halved)


@pytest.mark.parametrize("given", ["directory", "index", "file"])
def test_the_model_is_that_of_a_hugging_face_directory(
    stock: Path, tmp_path: Path, given: str
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    tensors = {key: torch.zeros(shape) for key, shape in model().items()}
    names = [*tensors]
    files = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    if given == "file":
        files = {"model.safetensors": names}
    for file, keys in files.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    index = folder / "model.safetensors.index.json"
    if given != "file":
        places = {key: file for file, keys in files.items() for key in keys}
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    path = {"directory": folder, "index": index, "file": folder / "model.safetensors"}[given]
    assert diagnose(stock, whole=path).lost == diagnose(stock, whole=model()).lost


def test_the_model_is_that_of_a_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=32,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path / "hub")
    own = transformers.LlamaForCausalLM(config).state_dict()
    dcp.save({"model": own}, checkpoint_id=tmp_path / "all")
    assert diagnose(tmp_path / "all", whole=tmp_path / "hub").healthy
    half = {key: value[: len(value) // 2] for key, value in own.items()}
    dcp.save({"model": half}, checkpoint_id=tmp_path / "half")
    diagnosis = diagnose(tmp_path / "half", whole=tmp_path / "hub" / "config.json")
    assert len(diagnosis.lost) == len(own)


def _fails() -> Any:
    raise RuntimeError("the user's function")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "no such file"),
        ("empty", "neither safetensors files nor config.json"),
        ("config", "names no class"),
        (_fails, "the function failed: RuntimeError"),
        (lambda: 3, "whole= is a int"),
        ({"w": "text"}, "which is no shape"),
    ],
)
def test_what_is_no_model_is_refused(stock: Path, tmp_path: Path, given: Any, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    whole = tmp_path / given if isinstance(given, str) else given
    for command in (diagnose, verify):
        with pytest.raises(CannotLook, match=message):
            command(stock, whole=whole)


def test_the_commands_take_it(stock: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stock.parent)
    (stock.parent / "the_model.py").write_text(f"def shapes():\n    return {model()!r}\n")
    ran = run("doctor", stock, "--whole", "the_model:shapes", "--json")
    assert ran.code == 1
    assert ran.json["tensors"] == {}
    expected = [
        (tensor.fqn, list(tensor.stored) if tensor.stored else None)
        for tensor in diagnose(stock, whole=model()).lost
    ]
    assert [(each["fqn"], each["stored"]) for each in ran.json["lost"]] == expected
    verified = run("verify", stock, "--whole", "the_model:shapes", "--json")
    assert verified.code == 1
    assert {fault["kind"] for fault in verified.json["faults"]} == {"whole"}
    assert run("doctor", stock, "--whole", "the_model:nothing").code == 2
    assert run("doctor", stock, "--whole", "nowhere").code == 2
