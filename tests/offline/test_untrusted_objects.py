"""Objects and names of some hundred bytes that would take gigabytes or hours."""

from __future__ import annotations

import collections
import io
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementError, PlacementFileSystemReader, PlacementLoadPlanner
from dcp_placements.cli.memory_limit import limited_memory
from dcp_placements.convert.torch_files import load_torch_file
from dcp_placements.errors import CannotLook
from dcp_placements.offline import diff, inspect, verify
from dcp_placements.storage.metadata_pickle import load_safely
from dcp_placements.storage.torch_load import load_plain
from tests.offline_scenes import Run


def saved(pickled: bytes) -> bytes:
    """Return a file as ``torch.save`` writes it, with this pickle."""
    buffer = io.BytesIO()
    torch.save(0, buffer)
    with zipfile.ZipFile(buffer) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in entries.items():
            file.writestr(name, pickled if name.endswith("/data.pkl") else data)
    return buffer.getvalue()


PAIRS = b"K\x01\x85" + b"q\x00h\x00\x86" * 45
"""A tuple that is short in a file, and 2**45 values when it is hashed."""

LISTS = b"]" + b"q\x00]h\x00ah\x00a" * 45
"""The same of lists, when they are looked at or printed."""

HOSTILE = {
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85R.",
    "dict": b"\x80\x02}" + PAIRS + b"K\x01s.",
    "set": b"\x80\x02cbuiltins\nset\n]" + PAIRS + b"a\x85R.",
    "Counter": b"\x80\x02ccollections\nCounter\n}" + PAIRS + b"K\x01s\x85R.",
    "OrderedDict": b"\x80\x02ccollections\nOrderedDict\n)R" + PAIRS + b"K\x01s.",
    "lists": b"\x80\x02" + LISTS + b".",
    "storage": b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x05\x00\x00\x00\x00\x01\x85R.",
    "name": b"\x80\x02X\x00\x02\x00\x00" + b"a" * 512 + b"q\x00(" + b"h\x00h\x00\x93" * 9 + b"t.",
    "number": b"\x80\x02}\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"Ns.",
    "again": b"\x80\x02(" + b"N" * 300 + b"t\x85q\x00cbuiltins\ndict\nq\x01"
    b"(" + b"h\x01h\x00R" * 250 + b"t.",
    "a call of no function": b"\x80\x02" + PAIRS + b")R.",
    "an instance of no class": b"\x80\x02" + PAIRS + b")\x81.",
    "quantizer": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n(NK\x00))" + PAIRS + b"NNtR.",
    "layout": b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n" + PAIRS + b"N\x86R.",
    "name of a layout": b"\x80\x02ctorch.serialization\n_get_layout\n" + PAIRS + b"\x85R.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_m101_objects_that_take_far_more_than_their_size_are_refused(
    tmp_path: Path, name: str
) -> None:
    data = saved(HOSTILE[name])
    begun = time.process_time()
    with pytest.raises(
        Exception, match=r"key|bytearray|far more of itself|by a number|name of|it calls"
    ):
        load_plain(io.BytesIO(data))
    (tmp_path / "model_optim_rng.pt").write_bytes(data)
    with pytest.raises(CannotLook):
        load_torch_file(tmp_path / "model_optim_rng.pt")
    assert time.process_time() - begun < 20


_PATH = b"cpathlib\nPosixPath\n(" + b"\x8c\x00" * 20000 + b"tR"

HOSTILE_METADATA = {
    "fields": b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}("
    + b"".join(b"\x8c\x02f%cN" % letter for letter in range(33, 126))
    + b"ub",
    "path": _PATH,
    "size": b"ctorch\nSize\n\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"\x85\x85R",
    "name": b"\x8c\xff" + b"a" * 255 + b"\x8c\x01a\x93",
}


@pytest.mark.parametrize("name", HOSTILE_METADATA)
def test_m101_metadata_that_take_far_more_than_their_size_are_refused(name: str) -> None:
    pickled = b"\x80\x04" + HOSTILE_METADATA[name] + b"."
    with pytest.raises(pickle.UnpicklingError, match=r"very many|short text|more elements than"):
        load_safely(io.BytesIO(pickled))


def test_m101_a_large_memo_slot_takes_no_memory_and_is_refused() -> None:
    data = saved(b"\x80\x02]r\x00\x00\x00\x04.")
    tracemalloc.start()
    try:
        with pytest.raises(pickle.UnpicklingError, match="a slot of the memo"):
            load_plain(io.BytesIO(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("name", HOSTILE)
def test_m101_a_restricted_load_and_commands_end_on_such_objects(tmp_path: Path, name: str) -> None:
    for path, value in ((tmp_path / "a", 1), (tmp_path / "b", 2)):
        dcp.save({"object": b"x" * 2000, "w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
        metadata = dcp.FileSystemReader(path).read_metadata()
        (info,) = [i for at, i in metadata.storage_data.items() if at.fqn == "object"]
        data = bytearray((path / info.relative_path).read_bytes())
        record = saved(HOSTILE[name] + bytes([value]))
        data[info.offset : info.offset + info.length] = record + bytes(info.length - len(record))
        (path / info.relative_path).write_bytes(data)
        inspect(path)
        verify(path, contents=True)
        with pytest.raises(dcp.CheckpointException):
            dcp.load(
                {"object": b""},
                storage_reader=PlacementFileSystemReader(path, restricted=True),
                no_dist=True,
            )
    assert not diff(tmp_path / "a", tmp_path / "b").same


@pytest.mark.parametrize(
    "value",
    [
        {"a": {("b", 1): [1.5, None]}, 3: {"x"}},
        collections.OrderedDict(a=torch.arange(3), b=torch.float32),
        collections.Counter("abc"),
        bytearray(b"abc"),
        [torch.Size((1, 2)), b"bytes", 1 << 80],
    ],
)
def test_plain_objects_are_loaded(value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    found = load_plain(buffer)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def made(path: str) -> str:
    """Make a directory, where an unpickler calls what a file names."""
    Path(path).mkdir()
    return path


class Makes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return made, (str(self.path),)


@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
def test_a_planner_gets_the_object_that_was_checked_and_not_the_bytes_in_the_file(
    tmp_path: Path, planner: Any
) -> None:
    marker = tmp_path / "executed"
    dcp.save({"object": Makes(marker)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    found = {"object": ""}
    reader = PlacementFileSystemReader(tmp_path / "ckpt", restricted=True)
    # With this the two unpicklers of torch.load read one object as two values.
    with torch.serialization.safe_globals([(str.upper, f"{__name__}.made")]):
        dcp.load(found, storage_reader=reader, planner=planner(), no_dist=True)
    assert found["object"] == str(marker).upper()
    assert not marker.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_m101_a_command_that_takes_more_memory_than_it_may_ends_with_one_message(
    tmp_path: Path,
) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    program = (
        "import sys\n"
        "from dcp_placements import offline\n"
        "from dcp_placements.cli import main\n"
        "offline.verify = lambda *args, **kwargs: bytearray(1 << 30)\n"
        f"sys.exit(main(['--most-memory', '256MiB', 'verify', {str(tmp_path)!r}]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "more memory is needed than a command may take" in ran.stderr


def test_a_metadata_file_that_claims_more_than_it_has_is_damaged(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    assert data[2:3] == pickle.FRAME
    left = len(data) - 11
    data[7] ^= 1 << 5
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CannotLook, match=rf"a frame of 137,4.* bytes, where {left} are left"):
        verify(tmp_path, contents=True)
    found = r"found: .*, in \d+ bytes\n"
    if sys.platform == "linux":
        found = rf"found: +MemoryError: it asks for more memory than there is, in {len(data)} bytes"
    with limited_memory(1 << 28), pytest.raises(PlacementError, match=found):
        PlacementFileSystemReader(tmp_path).read_metadata()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_a_metadata_file_larger_than_memory_is_told_so(tmp_path: Path, run: Run) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    os.truncate(tmp_path / ".metadata", 1 << 40)
    err = run.fails("--most-memory", "256MiB", "verify", tmp_path, "--contents")
    assert "found:       it asks for more memory than there is\n" in err


def test_the_limit_of_memory_is_lifted_when_a_command_ends(tmp_path: Path, run: Run) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert run("--most-memory", "4GiB", "verify", tmp_path).code == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
