"""Megatron's torch_dist directories: one key per layer and expert again, or loaded as they are."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    Renames,
    Renumber,
    Stack,
)
from dcp_placements.offline import CannotLook, import_megatron, inspect, megatron_layout, verify
from dcp_placements.offline.differences.comparing import same_bits
from dcp_placements.testing import World, cut
from dcp_placements.testing.megatron import MegatronModel, Wholes, padded
from dcp_placements.testing.megatron_dist import write_torch_dist
from tests.offline_scenes import Run, overwriting

ALIKE = MegatronModel(dense_layers=0)
DENSE = MegatronModel(experts=0)


def assert_holds(path: Path, truth: Wholes) -> None:
    """Compare a checkpoint, as torch's own planner reads it, with the whole."""
    held = {key: torch.full_like(whole, 77) for key, whole in truth.items()}
    dcp.load(held, checkpoint_id=path, planner=DefaultLoadPlanner(), no_dist=True)
    assert [key for key, whole in truth.items() if not same_bits(held[key], whole)] == []
    assert set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata) == set(truth)


@pytest.mark.parametrize("singletons", [False, True], ids=["stacked", "singletons"])
@pytest.mark.parametrize(
    "model", [ALIKE, replace(ALIKE, bias=True), DENSE], ids=["moe", "biases", "dense"]
)
def test_layers_and_experts_get_keys_of_their_own(
    model: MegatronModel, singletons: bool, tmp_path: Path
) -> None:
    source = write_torch_dist(
        tmp_path / "source", model, tp=3, optimizer=True, singletons=singletons
    )
    stored = set(inspect(source).tensors)
    assert ("decoder.layers.self_attention.linear_qkv.weight" in stored) != singletons
    assert ("decoder.layers.0.mlp.linear_fc1.weight_w" in stored) == (
        singletons and not model.experts
    )
    report = import_megatron(source, tmp_path / "out")
    moments = replace(model, dtype=torch.float32).truth(1)
    truth = model.truth() | {f"optimizer.state.{k}.exp_avg": m for k, m in moments.items()}
    assert_holds(tmp_path / "out", truth)
    assert verify(tmp_path / "out").sound
    assert report.nbytes == sum(whole.nbytes for whole in truth.values())
    assert [part.what for part in report.left_out] == ["rng_state/shard_0.0_1.1", "common.pt"]


def test_padding_of_the_vocabulary_is_left_out_where_it_is_told(tmp_path: Path) -> None:
    model = padded(replace(ALIKE, vocab=21), 8)
    source = write_torch_dist(tmp_path / "source", replace(model, vocab=24), tp=2, optimizer=True)
    report = import_megatron(source, tmp_path / "out", vocab_size=21)
    moments = replace(model, dtype=torch.float32).truth(1)
    truth = model.truth() | {f"optimizer.state.{k}.exp_avg": m for k, m in moments.items()}
    assert_holds(tmp_path / "out", truth)
    # Of the embedding and the output layer, and a moment of each.
    assert report.padding == 2 * 3 * model.hidden * (2 + 4)


def test_the_flat_optimizer_is_left_out_with_the_reason(tmp_path: Path) -> None:
    whole = {"optimizer.distributed.dp_group_idx_0.exp_avg": torch.ones(9), "w": torch.ones(2)}
    dcp.save(whole, checkpoint_id=tmp_path / "source", no_dist=True)
    (tmp_path / "source" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    report = import_megatron(tmp_path / "source", tmp_path / "out")
    assert report.keys == ("w",)
    assert (report.left_out[0].nbytes, report.source_nbytes) == (36, 44)
    assert "gradient buckets" in report.left_out[0].why
    with pytest.raises(PlacementError, match="gradient buckets"):
        import_megatron(tmp_path / "source", tmp_path / "all", optimizer=True)


def test_the_tools_look_into_it_and_execute_nothing(tmp_path: Path, run: Run) -> None:
    source = write_torch_dist(tmp_path / "source", ALIKE, tp=2)
    assert megatron_layout(source).format == "torch_dist"
    assert verify(source).sound
    assert list(inspect(source).objects) == ["rng_state/shard_0.0_1.1"]
    result = json.loads(run("inspect", source, "--json").out)
    weight = result["tensors"]["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert weight["shape"] == [ALIKE.layers, ALIKE.experts, ALIKE.hidden, ALIKE.moe_ffn]


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_hostile_metadata_is_refused_and_nothing_runs(tmp_path: Path, run: Run) -> None:
    source = write_torch_dist(tmp_path / "source", ALIKE)
    (source / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(CannotLook, match=r"posix\.system"):
        import_megatron(source, tmp_path / "out")
    for command in (("import", source, tmp_path / "out", "--from", "megatron"), ("verify", source)):
        assert run(*command).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("tp", [1, 2])
def test_it_loads_through_the_planner_into_numbered_layers(tp: int, tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / "source", DENSE, tp=2)
    truth, world, per_stage = DENSE.truth(), World(2 * tp), DENSE.layers // 2
    columns, rows = [Shard(1)], [Shard(0)]

    def local(rank: int) -> dict[str, tuple[str, list[Any]]]:
        """Return this stage's keys: each the whole's, and how it is cut."""
        stage = rank // tp
        found: dict[str, tuple[str, list[Any]]] = {}
        for layer in range(per_stage):
            for name, by in (
                ("mlp.linear_fc2.weight", columns),
                ("self_attention.linear_qkv.weight", rows),
                ("self_attention.linear_qkv.layer_norm_weight", []),
            ):
                whole = f"decoder.layers.{stage * per_stage + layer}.{name}"
                found[f"decoder.layers.{layer}.{name}"] = whole, by
        return found

    def part(rank: int, whole: str, by: list[Any]) -> torch.Tensor:
        return cut(truth[whole], by, (tp,) if by else (), (rank % tp,) if by else ())

    def planner(rank: int) -> PlacementLoadPlanner:
        stage = rank // tp
        mesh = world.mesh(rank, pp=2, tp=tp)
        numbers = range(stage * per_stage, (stage + 1) * per_stage)
        rename = Renames(
            Renumber("decoder.layers.{}", numbers, DENSE.layers),
            Stack("decoder.layers.{}", DENSE.layers),
        )
        rules = {
            "linear_fc2.weight": CheckpointPlacement(mesh, {"tp": Shard(2)}),
            "linear_qkv.weight": CheckpointPlacement(mesh, {"tp": Shard(1)}),
        }
        return PlacementLoadPlanner(PlacementRules(rules), rename=rename)

    held = world.load(
        source,
        lambda rank: {
            k: torch.zeros_like(part(rank, *expected)) for k, expected in local(rank).items()
        },
        planner,
        lambda rank: PlacementFileSystemReader(source),
    )
    for rank in range(world.size):
        for key, expected in local(rank).items():
            assert same_bits(held[rank][key], part(rank, *expected)), (rank, key)


def test_stacked_experts_of_numbered_layers_load_through_the_planner(tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / "source", ALIKE, tp=2)
    truth, world = ALIKE.truth(), World(2)
    name = "decoder.layers.{}.mlp.experts.experts.linear_fc1.weight"

    def wanted(rank: int, layer: int) -> torch.Tensor:
        mine = range(2 * rank, 2 * rank + 2)
        key = f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight"
        return torch.stack([truth[f"{key}{expert}"] for expert in mine])

    def blank(rank: int) -> dict[str, Any]:
        layers = range(ALIKE.layers)
        return {name.format(at): torch.zeros_like(wanted(rank, at)) for at in layers}

    def planner(rank: int) -> PlacementLoadPlanner:
        by = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(1)})
        rename = Stack("decoder.layers.{}", ALIKE.layers)
        return PlacementLoadPlanner(PlacementRules({"experts.linear_fc1": by}), rename=rename)

    held = world.load(source, blank, planner, lambda rank: PlacementFileSystemReader(source))
    for rank in range(2):
        for layer in range(ALIKE.layers):
            assert same_bits(held[rank][name.format(layer)], wanted(rank, layer))


def test_a_source_that_is_overwritten_meanwhile_is_refused(tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / "source", ALIKE, tp=2)
    with pytest.raises(CannotLook, match="it was overwritten while it was read"):
        import_megatron(source, tmp_path / "out", progress=overwriting(source, "*.distcp"))
    assert not (tmp_path / "out").exists()
