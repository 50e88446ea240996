"""What ``inspect`` tells, on checkpoints of every kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementSavePlanner
from dcp_placements.offline import diagnose, diff, inspect, verify
from tests.offline_scenes import (
    Run,
    save_hugging_face,
    save_sharded,
    save_torch_dist,
    wholes,
)
from tests.storage_scenes import data_file


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock-metadata"])
def test_tensors_of_a_sharded_save(tmp_path: Path, run: Run, lean: bool) -> None:
    save_sharded(tmp_path, lean=lean)
    result = run("inspect", tmp_path, "--json").json
    whole = wholes()
    assert sorted(result["tensors"]) == sorted(whole)
    for fqn, tensor in whole.items():
        found = result["tensors"][fqn]
        assert found["shape"] == list(tensor.shape)
        assert found["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert found["bytes"] == tensor.nbytes
    experts = result["tensors"]["layers.0.experts.w1"]
    assert experts["chunks"] == 4
    assert experts["ranks"] == [0, 1, 2, 3]
    assert experts["files"] == [data_file(tmp_path, rank).name for rank in range(4)]
    assert result["tensors"]["scale"]["chunks"] == 1
    assert list(result["objects"]) == ["step"]
    assert result["totals"]["bytes"] == sum(tensor.nbytes for tensor in whole.values())
    assert result["provenance"]["step"] == 1
    assert result["cuts"][0]["cuts"][0] == "Shard(0) over 'ep' of size 2"
    assert "layers.0.experts.w1" in result["cuts"][0]["keys"]
    assert result["renames"] == []
    file = data_file(tmp_path, 0)
    assert result["files"][file.name]["bytes"] == file.stat().st_size


def test_a_stock_checkpoint_says_nothing_of_its_making(tmp_path: Path) -> None:
    dcp.save(wholes(), checkpoint_id=tmp_path)
    found = inspect(tmp_path)
    assert (found.format, found.provenance) == ("dcp", None)


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, wholes())
    found = inspect(tmp_path)
    assert found.format == "safetensors"
    assert {fqn: expected.shape for fqn, expected in found.tensors.items()} == {
        fqn: tuple(tensor.shape) for fqn, tensor in wholes().items()
    }
    assert found.tensors["scale"].files == ("model-00001-of-00002.safetensors",)
    assert "model.safetensors.index.json" in found.files


def test_a_pattern_picks_keys(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    result = run("inspect", tmp_path, "--fqn", "layers.*.experts", "--json").json
    assert sorted(result["tensors"]) == ["layers.0.experts.w1", "layers.0.experts.w2"]
    assert result["objects"] == {}


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock-metadata"])
def test_the_chunks_of_one_tensor(tmp_path: Path, run: Run, lean: bool) -> None:
    save_sharded(tmp_path, lean=lean)
    places = {
        tuple(index.offset): place
        for index, place in dcp.FileSystemReader(tmp_path).read_metadata().storage_data.items()
        if index.fqn == "layers.0.experts.w1"
    }
    found = run("inspect", tmp_path, "layers.0.experts.w1", "--json").json
    assert (found["shape"], found["dtype"], found["bytes"]) == ([8, 5, 3], "float32", 480)
    assert found["cuts"][0] == "Shard(0) over 'ep' of size 2"
    assert [chunk["offsets"] for chunk in found["chunks"]] == [[row, 0, 0] for row in (0, 2, 4, 6)]
    for chunk, rank in zip(found["chunks"], range(4), strict=True):
        place = places[tuple(chunk["offsets"])]
        assert (chunk["sizes"], chunk["rank"]) == ([2, 5, 3], rank)
        assert chunk["file"] == place.relative_path == data_file(tmp_path, rank).name
        assert (chunk["start"], chunk["bytes"]) == (place.offset, place.length)
    lines = run("inspect", tmp_path, "layers.0.experts.w1").out.splitlines()
    assert lines[0].split() == ["chunk", "rank", "file", "offset", "length"]
    assert lines[2].startswith("[2:4, :, :]     1  ")
    assert "layers.0.experts.w1: (8, 5, 3) float32, 480 B in 4 chunks" in lines
    wrong = run("inspect", tmp_path, "experts.w1")
    assert (wrong.code, wrong.out) == (2, "")
    assert "likely:      layers.0.experts.w1" in wrong.err


def test_a_torch_dist_directory(tmp_path: Path, run: Run) -> None:
    tensors = save_torch_dist(tmp_path / "step")
    result = run("inspect", tmp_path / "step", "--json").json
    assert result["format"] == "torch_dist"
    assert {fqn: tuple(t["shape"]) for fqn, t in result["tensors"].items()} == {
        fqn: tuple(tensor.shape) for fqn, tensor in tensors.items()
    }
    assert sorted(result["objects"]) == ["rng_state/shard_0_2", "rng_state/shard_1_2"]
    assert result["files"]["common.pt"]["data"] is False
    # Layers are stacked in front of the experts.
    (experts,) = diagnose(tmp_path / "step").tensors.values()
    assert experts.stored == 4
    assert verify(tmp_path / "step", contents=True).faults == ()
    save_hugging_face(tmp_path / "hf", tensors)
    assert diff(tmp_path / "step", tmp_path / "hf").same


def save_numbered(path: Path, **objects: Any) -> None:
    state_dict = {
        f"layers.{layer}.experts.{expert}.w1": torch.ones(3, 2)
        for layer in range(12)
        for expert in range(4)
    }
    state_dict |= {f"layers.{layer}.norm": torch.ones(2) for layer in range(12)}
    dcp.save({**state_dict, **objects}, checkpoint_id=path, no_dist=True)


def test_the_summary_has_a_line_for_each_group_of_numbered_names(tmp_path: Path, run: Run) -> None:
    save_numbered(tmp_path, embed=torch.ones(5, 2))
    groups = run("inspect", tmp_path, "--json").json["groups"]
    assert [(group["name"], group["tensors"], group["bytes"]) for group in groups] == [
        ("embed", 1, 40),
        ("layers.0-11.experts.0-3.w1", 48, 48 * 24),
        ("layers.0-11.norm", 12, 96),
    ]
    text = run("inspect", tmp_path).out
    assert "layers.0-11.experts.0-3.w1" in text
    assert "layers.0.experts.0.w1" not in text
    keys = [line.split("  ")[0] for line in run("inspect", tmp_path, "--keys").out.splitlines()]
    assert keys.index("layers.2.norm") < keys.index("layers.10.norm")


def test_small_objects_are_shown_with_their_values(tmp_path: Path, run: Run) -> None:
    values = {"step": 7, "lr": 1e-4, "name": "run a", "betas": (0.9, 0.95), "on": True}
    save_numbered(tmp_path, **values)
    result = run("inspect", tmp_path, "--json").json["objects"]
    assert {key: result[key]["value"] for key in values} == {**values, "betas": [0.9, 0.95]}
    assert re.search(r"^step +7 ", run("inspect", tmp_path).out, re.MULTILINE)


class Trap:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('executed')",))


def test_objects_that_name_functions_or_hold_much_have_no_value(tmp_path: Path) -> None:
    objects = {"trap": Trap(), "long": list(range(5000)), "large": "x" * (1 << 17)}
    flat = PlacementSavePlanner(flatten_state_dict=False)
    dcp.save({**objects, "step": 3}, checkpoint_id=tmp_path, planner=flat, no_dist=True)
    found = inspect(tmp_path).objects
    assert {key: found[key].value for key in found} == {**dict.fromkeys(objects), "step": 3}
    assert {key: found[key].reason for key in found} == {
        "trap": "holds __builtin__.exec",
        "long": "more than 4,000 elements",
        "large": "more than 64.0 KiB",
        "step": "",
    }


def test_the_text_says_why_a_value_is_not_shown(tmp_path: Path, run: Run) -> None:
    state = {"rng": {str(rank): torch.ones(2).numpy() for rank in range(3)}, "none": None, "n": 7}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    for arguments in ((), ("--keys",)):
        text = run("inspect", tmp_path / "ckpt", *arguments).out
        assert re.search(r"^rng\.0\S* +not shown: holds numpy\S+ ", text, re.MULTILINE)
        assert re.search(r"^none +None ", text, re.MULTILINE)
        assert re.search(r"^n +7 ", text, re.MULTILINE)
    many = {f"of.{n}": n for n in range(40)}
    dcp.save(many, checkpoint_id=tmp_path / "many", no_dist=True)
    found = inspect(tmp_path / "many").objects
    assert sum(info.reason == "" for info in found.values()) == 32
    assert {info.reason for info in found.values()} == {"", "not among the first 32"}
    next((tmp_path / "many").glob("*.distcp")).unlink()
    assert {info.reason for info in inspect(tmp_path / "many").objects.values()} == {
        "its file is missing",
        "not among the first 32",
    }
