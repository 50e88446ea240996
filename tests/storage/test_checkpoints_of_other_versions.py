"""Checkpoints that torch 2.10 and 2.15 and Python 3.13 wrote, read under this torch and Python."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements import PlacementFileSystemReader, PlacementLoadPlanner
from dcp_placements.offline import verify
from tests.offline_scenes import Run
from tests.storage.checkpoints.write import HERE, STEP, WHOLE

WRITTEN = sorted(path for path in HERE.glob("torch-*/*") if path.is_dir())
each = pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}-{path.name}")


def assert_read(path: Path, reader: Any, planner: Any) -> None:
    state = {name: torch.full_like(tensor, -1) for name, tensor in WHOLE.items()} | {"step": -1}
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    for name, tensor in WHOLE.items():
        assert torch.equal(state[name], tensor), name
    assert state["step"] == STEP


class CountsProperties(pickle.Unpickler):
    """Plain unpickling under any Python; notes how many fields a ``TensorProperties`` has."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "TensorProperties":
            counts = self.counts = set[int]()

            class Properties(TensorProperties):
                def __setstate__(self, state: tuple[Any, ...]) -> None:
                    counts.add(len(state))

            return Properties
        return super().find_class(module.removesuffix("._local"), name)


def fields_of_properties(path: Path) -> set[int]:
    with open(path / ".metadata", "rb") as stream:
        unpickler = CountsProperties(stream)
        unpickler.load()
    return unpickler.counts


def test_all_versions_are_here() -> None:
    versions = {"torch-2.10.0-py3.11", "torch-2.14.1-py3.13", "torch-2.15.0-py3.11"}
    kinds = {"stock", "placements"}
    assert {f"{path.parent.name}/{path.name}" for path in WRITTEN} == {
        f"{version}/{kind}" for version in versions for kind in kinds
    }


@each
def test_ours_has_the_older_form_whatever_torch_wrote_it(path: Path) -> None:
    later = path.name == "stock" and path.parent.name.startswith("torch-2.15")
    assert fields_of_properties(path) == {6 if later else 5}


@each
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, PlacementLoadPlanner])
def test_our_reader_reads_them(path: Path, restricted: bool, planner: Any) -> None:
    assert_read(path, PlacementFileSystemReader(path, restricted=restricted), planner())


@each
def test_verify_reads_them_and_finds_no_fault(path: Path) -> None:
    report = verify(path, contents=True)
    assert report.faults == ()


@pytest.mark.parametrize("version", sorted({path.parent.name for path in WRITTEN}))
def test_plain_torch_reads_ours(version: str) -> None:
    path = HERE / version / "placements"
    assert_read(path, dcp.FileSystemReader(path), dcp.DefaultLoadPlanner())


@each
def test_plain_torch_reads_all_once_they_are_rewritten(
    path: Path, tmp_path: Path, run: Run
) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    assert run("merge-metadata", copy, "--rewrite").code == 0
    assert_read(copy, dcp.FileSystemReader(copy), dcp.DefaultLoadPlanner())


@each
def test_export_and_import_write_what_plain_torch_reads(
    path: Path, tmp_path: Path, run: Run
) -> None:
    assert run("export", path, tmp_path / "hf", "--to", "hf").code == 0
    assert (
        run(
            "import",
            tmp_path / "hf",
            tmp_path / "out",
        ).code
        == 0
    )
    assert fields_of_properties(tmp_path / "out") == {5}
    state = {name: torch.full_like(tensor, -1) for name, tensor in WHOLE.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, tensor in WHOLE.items():
        assert torch.equal(state[name], tensor), name
