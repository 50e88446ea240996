"""Checkpoints that other versions wrote, read under this torch and Python.

Those of torch 2.10, 2.14 and 2.15, one of them under Python 3.13, are torch's own and ours.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
)
from dcp_placements.offline import CannotLook, inspect, stock_metadata, verify
from dcp_placements.storage.metadata_file import read_metadata
from tests.offline_scenes import Run
from tests.storage.checkpoints.write import HERE, STEP, WHOLE

BY_VERSION = sorted(path for path in HERE.glob("torch-*/*") if path.is_dir())


def each(paths: list[Path]) -> Any:
    names = [f"{path.parent.name}-{path.name}" for path in paths]
    return pytest.mark.parametrize("path", paths, ids=names)


def assert_read(path: Path, reader: Any, planner: Any, **left_out: Any) -> None:
    wanted = {key: value for key, value in {**WHOLE, "step": STEP}.items() if key not in left_out}
    state = {k: torch.full_like(v, -1) if hasattr(v, "dim") else None for k, v in wanted.items()}
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    for key, value in wanted.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(state[key], value) if is_tensor else state[key] == value, key


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
    assert {f"{path.parent.name}/{path.name}" for path in BY_VERSION} == {
        f"{version}/{kind}" for version in versions for kind in kinds
    }


@each(BY_VERSION)
def test_ours_has_the_older_form_whatever_torch_wrote_it(path: Path, tmp_path: Path) -> None:
    later = path.name == "stock" and path.parent.name.startswith("torch-2.15")
    assert fields_of_properties(path) == {6 if later else 5}
    dcp.save({"w": torch.ones(3)}, storage_writer=PlacementFileSystemWriter(tmp_path))
    assert fields_of_properties(tmp_path) == {5}


@each(BY_VERSION)
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, PlacementLoadPlanner])
def test_our_reader_reads_them(path: Path, restricted: bool, planner: Any) -> None:
    assert_read(path, PlacementFileSystemReader(path, restricted=restricted), planner())


@each([path for path in BY_VERSION if path.name == "placements"])
def test_plain_torch_reads_ours(path: Path) -> None:
    assert_read(path, dcp.FileSystemReader(path), dcp.DefaultLoadPlanner())


@each(BY_VERSION)
def test_they_are_sound_and_plain_torch_reads_all_once_they_are_rewritten(
    path: Path, tmp_path: Path, run: Run
) -> None:
    copy = Path(shutil.copytree(path, tmp_path / path.parent.name))
    before = inspect(copy)
    assert verify(copy, contents=True).faults == ()
    if max(fields_of_properties(copy)) > len(fields(TensorProperties)):
        with pytest.raises(ValueError, match="too many values to unpack"):
            dcp.FileSystemReader(copy).read_metadata()
        ran = run("verify", copy)
        assert ran.code == 0
        # A wheel's version may lack the local part of torch's.
        version = re.escape(torch.__version__.partition("+")[0])
        assert re.search(rf"torch {version}(\+\w+)? cannot read \.metadata", ran.out)
        assert "a TensorProperties of 6 fields (torch 2.15 or newer)" in ran.out
        assert f"dcp-placements stock-metadata {copy}" in ran.out
    assert run("stock-metadata", copy).code == 0
    assert inspect(copy).tensors == before.tensors
    found = verify(copy, contents=True)
    assert found.faults == ()
    assert not any("cannot read" in note for note in found.notes)
    assert_read(copy, dcp.FileSystemReader(copy), dcp.DefaultLoadPlanner())


@each(BY_VERSION)
def test_export_and_import_write_what_plain_torch_reads(
    path: Path, tmp_path: Path, run: Run
) -> None:
    assert run("export", path, tmp_path / "hf").code == 0
    assert run("import", tmp_path / "hf", tmp_path / "out").code == 0
    assert fields_of_properties(tmp_path / "out") == {5}
    reader = dcp.FileSystemReader(tmp_path / "out")
    assert_read(tmp_path / "out", reader, dcp.DefaultLoadPlanner(), step=None)


class Later(pickle._Pickler):
    """Pickles properties with fields that no torch has yet."""

    def save(self, value: Any, *args: Any, **kwargs: Any) -> None:
        if type(value) is TensorProperties:
            state = (*value.__getstate__()[:5], None, "later", 7)
            self.save_reduce(copyreg.__newobj__, (TensorProperties,), state, obj=value)
        else:
            super().save(value, *args, **kwargs)


@pytest.mark.parametrize("restricted", [False, True])
def test_our_reader_reads_a_later_torch_s(tmp_path: Path, restricted: bool) -> None:
    dcp.save({**WHOLE, "step": STEP}, checkpoint_id=tmp_path, no_dist=True)
    opener = partial(open, tmp_path / ".metadata", "rb")
    metadata = read_metadata(opener)
    metadata.storage_data = dict(metadata.storage_data)
    buffer = io.BytesIO()
    Later(buffer, 2).dump(metadata)
    (tmp_path / ".metadata").write_bytes(buffer.getvalue())
    reader = PlacementFileSystemReader(tmp_path, restricted=restricted)
    assert_read(tmp_path, reader, PlacementLoadPlanner())
    assert_whole_after_a_rewrite(tmp_path, opener)


def assert_whole_after_a_rewrite(path: Path, opener: Any) -> None:
    """A rewrite keeps everything but later fields."""
    before = read_metadata(opener)
    stock_metadata(path)
    after = read_metadata(opener)
    assert dict(after.storage_data) == dict(before.storage_data)
    assert after.planner_data == before.planner_data
    assert after.version == before.version
    assert str(after.storage_meta.checkpoint_id) == str(before.storage_meta.checkpoint_id)
    assert list(after.state_dict_metadata) == list(before.state_dict_metadata)
    assert fields_of_properties(path) == {5}
    with pytest.raises(CannotLook, match="no complete checkpoint"):
        stock_metadata(path.parent)
