"""What ``inspect`` tells, on checkpoints of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements.offline import inspect
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock-metadata"])
def test_tensors_of_a_sharded_save(tmp_path: Path, run: Run, lean: bool) -> None:
    save_sharded(tmp_path, lean=lean)
    told = run("inspect", tmp_path, "--json").json
    whole = wholes()
    assert sorted(told["tensors"]) == sorted(whole)
    for fqn, tensor in whole.items():
        found = told["tensors"][fqn]
        assert found["shape"] == list(tensor.shape)
        assert found["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert found["bytes"] == tensor.nbytes
    experts = told["tensors"]["layers.0.experts.w1"]
    assert experts["chunks"] == 4
    assert experts["ranks"] == [0, 1, 2, 3]
    assert experts["files"] == [f"__{rank}_0.distcp" for rank in range(4)]
    assert experts["rule"] == "'experts'"
    assert told["tensors"]["scale"]["chunks"] == 1
    assert list(told["objects"]) == ["step"]
    assert told["totals"]["bytes"] == sum(tensor.nbytes for tensor in whole.values())
    assert told["provenance"]["step"] == 1
    assert told["provenance"]["axes"] == {"ep": 2, "fsdp": 2}
    assert told["files"]["__0_0.distcp"]["bytes"] == (tmp_path / "__0_0.distcp").stat().st_size


def test_a_stock_checkpoint_says_nothing_of_its_making(tmp_path: Path) -> None:
    dcp.save(wholes(), checkpoint_id=tmp_path)
    found = inspect(tmp_path)
    assert (found.format, found.provenance, found.digests) == ("dcp", None, 0)


def test_a_save_without_collectives_is_seen_as_one(tmp_path: Path) -> None:
    save_sharded(tmp_path, collectives=False)
    found = inspect(tmp_path)
    assert found.tensors["layers.0.experts.w1"].chunks == 4


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, wholes())
    found = inspect(tmp_path)
    assert found.format == "safetensors"
    assert {fqn: told.shape for fqn, told in found.tensors.items()} == {
        fqn: tuple(tensor.shape) for fqn, tensor in wholes().items()
    }
    assert found.tensors["scale"].files == ("model-00001-of-00002.safetensors",)
    assert "model.safetensors.index.json" in found.files


def test_a_pattern_picks_keys(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    told = run("inspect", tmp_path, "--fqn", "layers.*.experts", "--json").json
    assert sorted(told["tensors"]) == ["layers.0.experts.w1", "layers.0.experts.w2"]
    assert told["objects"] == {}


def test_experts_gaps_and_doubles(tmp_path: Path, run: Run) -> None:
    state_dict = {
        **{f"layers.0.experts.{i}.w{n}": torch.ones(2) for i in (0, 1, 3) for n in (1, 2)},
        "layers.0.experts.2.w1": torch.ones(2),
        "layers.0.shared_experts.w1": torch.ones(2),
        "layers.1.mlp.experts.w1": torch.ones(6, 2),
    }
    dcp.save(state_dict, checkpoint_id=tmp_path)
    told = run("inspect", tmp_path, "--experts", "--json").json["experts"]
    assert sorted(told) == ["layers.0.experts", "layers.1.mlp.experts"]
    assert told["layers.0.experts"]["experts"] == [0, 1, 3]
    assert told["layers.0.experts"]["gaps"] == [2, 4, 5]
    assert told["layers.1.mlp.experts"] == {
        "stacked": True,
        "tensors": ["w1"],
        "experts": [0, 1, 2, 3, 4, 5],
        "gaps": [],
        "doubles": [],
    }
    ran = run("inspect", tmp_path, "--experts")
    assert "layers.1.mlp.experts (stacked)  0-5" in ran.out
