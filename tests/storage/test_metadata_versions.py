"""``.metadata`` of any torch and Python under this one; ours is read by all of them."""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter
from dcp_placements.offline import CannotLook, inspect, merge_metadata, verify
from dcp_placements.storage.metadata_file import read_metadata
from tests.offline_scenes import Run
from tests.strategies import arange

STATE = {"w": arange((4, 3)), "b": arange((5,)).to(torch.bfloat16), "step": 3}
SIXTH = len(fields(TensorProperties)) > 5


class Later(pickle._Pickler):
    """Pickles properties with further fields, and paths as Python 3.13 does."""

    strides: Any = (3, 1)
    further: tuple[Any, ...] = ()
    paths = True

    def save(self, value: Any, *args: Any, **kwargs: Any) -> None:
        if type(value) is TensorProperties:
            state = (*value.__getstate__()[:5], self.strides, *self.further)
            self.save_reduce(copyreg.__newobj__, (TensorProperties,), state, obj=value)
        else:
            super().save(value, *args, **kwargs)

    def save_global(self, value: Any, name: str | None = None) -> None:
        if self.paths and name is None and getattr(value, "__module__", "") == "pathlib":
            self.write(f"cpathlib._local\n{value.__name__}\n".encode())
            self.memoize(value)
        else:
            super().save_global(value, name)

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, type: save_global}


def rewrite(path: Path, **changes: Any) -> None:
    """Write ``.metadata`` as a later torch and Python would."""
    metadata = read_metadata(partial(open, path / ".metadata", "rb"))
    metadata.storage_data = dict(metadata.storage_data)
    buffer = io.BytesIO()
    pickler = type("Changed", (Later,), changes)(buffer, 2)
    pickler.dump(metadata)
    (path / ".metadata").write_bytes(buffer.getvalue())


def saved(path: Path, **changes: Any) -> Path:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(path))
    rewrite(path, **changes)
    return path


def load(path: Path, reader: Any) -> dict[str, Any]:
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "step": 0}
    dcp.load(state, storage_reader=reader(path))
    return state


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("changes", [{}, {"strides": None}, {"further": ("later", 7)}])
def test_our_reader_reads_a_later_torch_s(
    tmp_path: Path, restricted: bool, changes: dict[str, Any]
) -> None:
    saved(tmp_path, **changes)
    state = load(tmp_path, lambda p: PlacementFileSystemReader(p, restricted=restricted))
    assert torch.equal(state["w"], STATE["w"])
    assert torch.equal(state["b"], STATE["b"])
    assert state["step"] == 3
    opener = partial(open, tmp_path / ".metadata", "rb")
    found = read_metadata(opener, restricted=restricted)
    properties = found.state_dict_metadata["w"].properties
    assert type(properties) is TensorProperties
    assert properties.dtype == torch.float32
    assert getattr(properties, "strides", None) == (
        changes.get("strides", (3, 1)) if SIXTH else None
    )


@pytest.mark.skipif(SIXTH, reason="needs a torch before 2.15")
def test_verify_says_what_plain_torch_cannot_read_and_the_way_out(tmp_path: Path, run: Run) -> None:
    saved(tmp_path)
    with pytest.raises(ValueError, match="too many values to unpack"):
        dcp.FileSystemReader(tmp_path).read_metadata()
    ran = run("verify", tmp_path)
    assert ran.code == 0
    # A wheel's version may lack the local part of torch's.
    version = re.escape(torch.__version__.partition("+")[0])
    assert re.search(rf"torch {version}(\+\w+)? cannot read \.metadata", ran.out)
    assert "a TensorProperties of 6 fields (torch 2.15 or newer)" in ran.out
    assert f"dcp-placements merge-metadata {tmp_path} --rewrite" in ran.out
    before = inspect(tmp_path)
    assert run("merge-metadata", tmp_path, "--rewrite").code == 0
    assert inspect(tmp_path).tensors == before.tensors
    assert verify(tmp_path, contents=True).notes == ()
    assert torch.equal(load(tmp_path, dcp.FileSystemReader)["w"], STATE["w"])


def test_our_writer_writes_what_every_torch_reads(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=PlacementFileSystemWriter(tmp_path))
    data = (tmp_path / ".metadata").read_bytes()
    names = {value for opcode, value, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
    assert not any("pathlib._local" in name for name in names)
    sizes = []

    class Counting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name != "TensorProperties":
                return super().find_class(module, name)

            class Properties(TensorProperties):
                def __setstate__(self, state: Any) -> None:
                    sizes.append(len(state))

            return Properties

    Counting(io.BytesIO(data)).load()
    assert set(sizes) == {5}


def test_a_rewrite_keeps_everything_but_later_fields(tmp_path: Path) -> None:
    path = saved(tmp_path / "later")
    before = read_metadata(partial(open, path / ".metadata", "rb"))
    merge_metadata(path, rewrite=True)
    after = read_metadata(partial(open, path / ".metadata", "rb"))
    assert dict(after.storage_data) == dict(before.storage_data)
    assert after.planner_data == before.planner_data
    assert after.version == before.version
    assert str(after.storage_meta.checkpoint_id) == str(before.storage_meta.checkpoint_id)
    assert list(after.state_dict_metadata) == list(before.state_dict_metadata)
    with pytest.raises(CannotLook, match="nothing to rewrite"):
        merge_metadata(tmp_path, rewrite=True)
