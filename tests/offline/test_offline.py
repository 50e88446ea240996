"""Checkpoint directories without a process group."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements import PlacementError
from dcp_placements.offline import merge_metadata
from dcp_placements.testing import World
from tests.storage_scenes import blank, data_file, load, same, save_alone, sharded, wholes


def save_ranks(path: Path, size: int, ranks: Any = None, maker: Any = None) -> dict[str, Any]:
    world = World(size)
    whole = wholes(3, (2 * size + 1, 5))
    for rank in range(size) if ranks is None else ranks:
        state_dict = {**sharded(world, rank, whole, 0), "norm": torch.ones(3), "lr": 0.1}
        save_alone(path, rank, state_dict, None if maker is None else maker(path))
    return {**whole, "norm": torch.ones(3), "lr": 0.1}


@pytest.mark.parametrize("maker", [dcp.FileSystemWriter, None])
def test_merged_metadata_is_read_by_torch_in_any_world(tmp_path: Path, maker: Any) -> None:
    saved = save_ranks(tmp_path, 4, maker=maker)
    with pytest.warns(UserWarning, match="lr, norm: stored by ranks 0-3 and not compared"):
        merged = merge_metadata(tmp_path)
    loaded = load(tmp_path, blank(saved), dcp.FileSystemReader(tmp_path))
    assert all(same(saved[key], loaded[key]) for key in saved)
    with open(tmp_path / ".metadata", "rb") as file:
        expected = pickle.load(file)
    assert type(expected.storage_data) is dict
    assert expected.storage_data == merged.storage_data
    assert [path.name for path in tmp_path.glob("*.tmp")] == []
    three = World(3)
    parts = three.load(
        tmp_path,
        lambda rank: sharded(three, rank, {"layers.0.weight": saved["layers.0.weight"]}, 1),
        lambda rank: DefaultLoadPlanner(),
    )
    assert sum(part["layers.0.weight"].to_local().shape[1] for part in parts) == 5


def test_of_replicas_the_lowest_ranks_is_kept(tmp_path: Path) -> None:
    save_ranks(tmp_path, 3)
    with pytest.warns(UserWarning, match="lr, norm: stored by ranks 0-2 and not compared"):
        merged = merge_metadata(tmp_path)
    for index in (MetadataIndex("norm", (0,)), MetadataIndex("lr")):
        assert merged.storage_data[index].relative_path == data_file(tmp_path, 0).name
    assert len(merged.state_dict_metadata["norm"].chunks) == 1


def test_a_missing_rank_is_refused_and_nothing_written(tmp_path: Path) -> None:
    save_ranks(tmp_path, 4, ranks=(0, 1, 3))
    with pytest.raises(PlacementError) as caught:
        merge_metadata(tmp_path)
    message = str(caught.value)
    assert "layers.0-2.weight: no rank stored [6:9, :]" in message
    assert "the metadata of ranks 0-1, 3" in message
    assert not list(tmp_path.glob(".metadata*"))


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.zeros(2), "b": torch.zeros(3), "c": 1},
        {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(2)},
    ]
    for rank, state_dict in enumerate(states):
        save_alone(tmp_path, rank, state_dict)
    with pytest.raises(PlacementError) as caught:
        merge_metadata(tmp_path)
    message = str(caught.value)
    assert "(3 faults)" in message
    assert "a: rank 0 stored a (2,) torch.float32 tensor, rank 1 a (3,) torch.float32" in message
    assert "c: rank 0 stored an object, rank 1 a (2,)" in message


def test_ranks_of_an_older_save_are_noticed(tmp_path: Path) -> None:
    save_ranks(tmp_path, 4)
    world = World(2)
    for rank in range(2):
        save_alone(tmp_path, rank, sharded(world, rank, wholes(3, (9, 5)), 0))
    (tmp_path / ".metadata").write_bytes(b"old")
    with pytest.raises(PlacementError, match=r"rank 2 .*overlaps|overlaps"):
        merge_metadata(tmp_path)
    assert (tmp_path / ".metadata").read_bytes() == b"old"


def test_no_ranks_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="nothing to merge"):
        merge_metadata(tmp_path)
