"""Tensors without memory: a save or a load of one would end the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner, Stack
from dcp_placements.testing import FakeMesh, real_dtensor


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: freed(torch.ones(3, 4)),
    "parameter": lambda: torch.nn.Parameter(freed(torch.ones(3, 4))),
    "large": lambda: freed(torch.ones(300, 400)),
    "strided": lambda: freed(torch.ones(4, 3).t()),
    "view": lambda: freed(torch.ones(100)[40:52].view(3, 4)),
    "far view": lambda: freed(torch.empty(1 << 21, 4)[(1 << 21) - 3 :]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_freed_tensor_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, kind: str
) -> None:
    state = {"kept": torch.ones(2), "model": {"gone": KINDS[kind]()}}
    with pytest.raises(
        dcp.CheckpointException, match=r"model\.gone: the storage of this \(.*freed"
    ):
        dcp.save(state, checkpoint_id=tmp_path / "c", planner=PlacementSavePlanner(), no_dist=True)
    assert not list((tmp_path / "c").glob("*.distcp"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_into_a_freed_tensor_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    shape = KINDS[kind]().shape
    dcp.save({"w": torch.full(shape, 7.0), "v": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"w": KINDS[kind](), "v": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match=r"w: the storage of this \(.*freed"):
        dcp.load(state, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    assert not state["v"].any()


def test_a_freed_row_of_a_stack_is_refused(tmp_path: Path) -> None:
    state = {f"experts.{number}.w": torch.ones(3) for number in range(4)}
    freed(state["experts.2.w"])
    planner = PlacementSavePlanner(rename=Stack("experts.{}", 4))
    with pytest.raises(dcp.CheckpointException, match=r"experts\.w: the storage of this \(3,\)"):
        dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)


def test_a_dtensor_with_a_freed_shard_is_refused(tmp_path: Path) -> None:
    mesh = FakeMesh((1,), ("fsdp",), rank=0)
    state = {"w": real_dtensor(torch.ones(3, 4), mesh, [Shard(0)], (3, 4))}
    freed(state["w"].to_local())
    with pytest.raises(dcp.CheckpointException, match=r"w: the storage of this \(3, 4\)"):
        dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)


def test_tensors_without_elements_are_not_taken_for_freed_ones(tmp_path: Path) -> None:
    state = {"none": torch.ones(0, 3), "end": freed(torch.ones(4)[4:]), "w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    target = {"none": torch.empty(0, 3), "end": freed(torch.ones(4)[4:]), "w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    assert target["w"].tolist() == [1.0, 1.0]
