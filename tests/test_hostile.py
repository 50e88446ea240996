"""Checkpoints of unknown origin: no hang, no way out of the directory, one line, little memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
)
from dcp_placements.offline import Checkpoint, verify
from tests.offline_scenes import Run, save_hugging_face, save_sharded


def replaced_by_link(path: Path, outside: Path) -> str:
    """Move a data file out of a checkpoint, and leave a link to it."""
    name = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size).name
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    return name


def test_links_out_of_the_checkpoint_are_not_followed(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "ckpt")
    name = replaced_by_link(tmp_path / "ckpt", tmp_path / "outside")
    found = verify(tmp_path / "ckpt", contents=True)
    assert {(fault.kind, fault.files) for fault in found.faults} == {("missing_file", (name,))}
    assert f"leads out of the directory, to {tmp_path / 'outside'}" in found.faults[0].message
    ran = run("export", tmp_path / "ckpt", tmp_path / "out", "--to", "hf", "--prefix", "")
    assert ran.code in (1, 2)
    assert not (tmp_path / "out").exists()
    (tmp_path / "ckpt" / ".metadata").rename(tmp_path / "metadata")
    (tmp_path / "ckpt" / ".metadata").symlink_to(tmp_path / "metadata")
    ran = run("inspect", tmp_path / "ckpt")
    assert (ran.code, ran.out) == (2, "")
    assert "leads out of the directory" in ran.err


def test_links_within_a_checkpoint_or_to_it_are_followed(tmp_path: Path) -> None:
    save_sharded(tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").glob("*.distcp"))
    (tmp_path / "ckpt" / "kept").mkdir()
    file.rename(tmp_path / "ckpt" / "kept" / "data")
    file.symlink_to(Path("kept") / "data")
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    assert verify(tmp_path / "link", digests=True).sound


def test_a_snapshot_of_the_hubs_cache_is_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    save_hugging_face(snapshot, {"a": torch.ones(2), "b": torch.ones(3)})
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert sorted(Checkpoint(snapshot).tensors) == ["a", "b"]
    assert verify(snapshot).sound


@pytest.mark.parametrize("command", ["inspect", "verify", "doctor"])
def test_a_fifo_does_not_hang(tmp_path: Path, run: Run, command: str) -> None:
    save_sharded(tmp_path)
    name = max(tmp_path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    name.unlink()
    os.mkfifo(name)
    ran = run(command, tmp_path)
    assert ran.code in (0, 1, 2)
    if command == "verify":
        assert "no plain file" in ran.out
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    ran = run(command, tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "no plain file" in ran.err


class Marks:
    """What makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def load(path: Path, state_dict: dict[str, Any], *, planner: Any = None) -> dict[str, Any]:
    """Load with the restricted reader."""
    reader = PlacementFileSystemReader(path, restricted=True)
    dcp.load(state_dict, storage_reader=reader, planner=planner, no_dist=True)
    return state_dict


def refusal(path: Path, state_dict: dict[str, Any], *, planner: Any = None) -> str:
    """Return what a load with the restricted reader says."""
    with pytest.raises(dcp.CheckpointException) as caught:
        load(path, state_dict, planner=planner)
    return str(caught.value.failures[0][0])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_the_restricted_reader_loads_what_runs_nothing(
    tmp_path: Path, lean: bool, planner: Any
) -> None:
    """M65."""
    writer = PlacementFileSystemWriter(tmp_path) if lean else dcp.FileSystemWriter(tmp_path)
    held = {"w": torch.arange(12.0).reshape(3, 4), "step": 3, "nested": {"lr": [0.1, "a"]}}
    dcp.save(held, storage_writer=writer, no_dist=True)
    found = load(
        tmp_path,
        {"w": torch.zeros(3, 4), "step": 0, "nested": {"lr": [0.0, ""]}},
        planner=planner(),
    )
    assert torch.equal(found["w"], held["w"])  # type: ignore[arg-type]
    assert (found["step"], found["nested"]) == (3, {"lr": [0.1, "a"]})


@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_the_restricted_reader_runs_no_object(tmp_path: Path, planner: Any) -> None:
    marker = tmp_path / "executed"
    held = {"w": torch.ones(3), "object": Marks(marker)}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    told = refusal(tmp_path / "ckpt", {"w": torch.zeros(3), "object": 0}, planner=planner())
    assert told.startswith("object: this object is not loaded")
    assert not marker.exists()
    found = load(tmp_path / "ckpt", {"w": torch.zeros(3)}, planner=planner())
    assert torch.equal(found["w"], torch.ones(3))
    dcp.load({"w": torch.zeros(3), "object": 0}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert marker.exists(), "the object of the test should do something"


def test_the_restricted_reader_runs_no_metadata(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with open(tmp_path / "ckpt" / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    metadata.planner_data = Marks(marker)
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "posix.mkdir" in refusal(tmp_path / "ckpt", {"w": torch.zeros(3)})
    assert not marker.exists()


@pytest.mark.parametrize("how", ["link", "path", "fifo"])
def test_the_restricted_reader_stays_in_its_directory(tmp_path: Path, how: str) -> None:
    path = tmp_path / "ckpt"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    if how == "fifo":
        (path / "__0_0.distcp").unlink()
        os.mkfifo(path / "__0_0.distcp")
    elif how == "link":
        replaced_by_link(path, tmp_path / "outside")
    else:
        (path / "__0_0.distcp").rename(tmp_path / "outside")
        with open(path / ".metadata", "rb") as stream:
            metadata = pickle.load(stream)
        for info in metadata.storage_data.values():
            info.relative_path = "../outside"
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    told = refusal(path, {"w": torch.zeros(3)})
    assert ("no plain file" if how == "fifo" else "leads out of the directory") in told
