"""Checkpoints of an earlier version, whose ranks wrote copies beside what other ranks wrote.

The copies are records of their own in ``storage_data``. ``stock`` has what plain DCP reads and
``index`` has not; two ranks saved each: ``w`` is sharded over both, all else is on both.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementFileSystemReader, PlacementLoadPlanner
from dcp_placements.offline import verify
from tests.offline_scenes import Run

HERE = Path(__file__).parent / "checkpoints" / "with_copies"
WHOLE = {
    "w": torch.arange(24.0).reshape(8, 3),
    **{f"norm.{i}": torch.arange(4.0) + i for i in range(6)},
    "b": torch.arange(5).to(torch.bfloat16),
}
OBJECTS = {"step": 3, "name": "adamw"}

each = pytest.mark.parametrize("name", ["stock", "index"])


def blank() -> dict[str, Any]:
    return {key: torch.full_like(whole, -1) for key, whole in WHOLE.items()} | dict.fromkeys(
        OBJECTS
    )


def assert_read(state: dict[str, Any]) -> None:
    for key, whole in WHOLE.items():
        assert torch.equal(state[key], whole), key
    assert {key: state[key] for key in OBJECTS} == OBJECTS


@each
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, PlacementLoadPlanner])
def test_tensors_and_objects_are_read(name: str, restricted: bool, planner: Any) -> None:
    state = blank()
    reader = PlacementFileSystemReader(HERE / name, restricted=restricted)
    dcp.load(state, storage_reader=reader, planner=planner(), no_dist=True)
    assert_read(state)


@each
def test_verify_finds_no_fault(name: str) -> None:
    result = verify(HERE / name, contents=True)
    assert result.faults == ()


@each
def test_plain_torch_reads_what_is_rewritten(name: str, tmp_path: Path, run: Run) -> None:
    path = shutil.copytree(HERE / name, tmp_path / "copy")
    assert run("merge-metadata", path, "--rewrite").code == 0
    state = blank()
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert_read(state)
    assert verify(path, contents=True).faults == ()


@each
def test_a_file_that_lacks_bytes_of_a_tensor_is_a_fault(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(HERE / name, tmp_path / "copy")
    file = next(path.glob("__0_*.distcp"))
    file.write_bytes(file.read_bytes()[:5000])
    assert "truncated_file" in {fault.kind for fault in verify(path).faults}
