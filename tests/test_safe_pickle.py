"""Metadata from anywhere: what is admitted, what is refused, and that nothing happens."""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from dcp_placements import PlacementFileSystemWriter
from dcp_placements.metadata_file import MAGIC, read_metadata
from dcp_placements.offline import CannotLook, Checkpoint
from dcp_placements.safe_pickle import RefusedGlobal, load_restricted
from fakes import damage
from tests.offline_scenes import Run, save_sharded
from tests.storage_scenes import all_kinds


def of_global(module: str, name: str, *, protocol: int = 2) -> bytes:
    """Return a pickle of a global, before its last opcode."""
    return pickle.PROTO + bytes([protocol]) + f"c{module}\n{name}\n".encode()


@pytest.mark.parametrize("lean", [True, False])
def test_what_dcp_writes_is_read_as_pickle_reads_it(tmp_path: Path, lean: bool) -> None:
    writer = PlacementFileSystemWriter(tmp_path) if lean else dcp.FileSystemWriter(tmp_path)
    dcp.save({**all_kinds(), "nested": {"a": [torch.ones(2), {"b": 3}]}}, storage_writer=writer)
    with open(tmp_path / ".metadata", "rb") as stream:
        plain = pickle.load(stream)
        found = read_metadata(stream, restricted=True)
    assert found.state_dict_metadata == plain.state_dict_metadata
    assert found.planner_data == plain.planner_data
    assert dict(found.storage_data) == plain.storage_data
    assert str(found.storage_meta.checkpoint_id) == str(plain.storage_meta.checkpoint_id)
    assert found.version == plain.version


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("os", "system"), ("posix", "mkdir"), ("builtins", "eval"), ("builtins", "__import__")),
        *(("copyreg", "_reconstructor"), ("functools", "partial"), ("operator", "attrgetter")),
        *(("torch", "load"), ("torch", "hub.load"), ("torch.serialization", "load")),
        *(("torch.distributed.checkpoint.metadata", "os"), ("subprocess", "Popen")),
        *(("torch.distributed.checkpoint.metadata", "Metadata.__init__"), ("torch", "Tensor")),
        *(("dcp_placements.storage_table", "StorageTable"), ("pathlib", "Path")),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_other_globals_are_refused_by_name(module: str, name: str, protocol: int) -> None:
    if protocol == 4:
        data = pickle.PROTO + b"\x04"
        for text in (module, name):
            data += pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()
        data += pickle.STACK_GLOBAL + b"."
    else:
        data = of_global(module, name, protocol=protocol) + b"."
    with pytest.raises(RefusedGlobal) as caught:
        load_restricted(io.BytesIO(data))
    assert caught.value.name == f"{module}.{name}"


def test_getattr_reaches_members_of_the_enumeration_only() -> None:
    encoding = "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"
    getter = of_global("builtins", "getattr")
    member = getter + b"(" + of_global(*encoding)[2:] + b"VTORCH_CHANNELS_LAST\ntR."
    assert load_restricted(io.BytesIO(member)).name == "TORCH_CHANNELS_LAST"
    for target, name in (
        (encoding, "__class__"),
        (("torch", "Size"), "__class__"),
        (("builtins", "getattr"), "__globals__"),
    ):
        data = getter + b"(" + of_global(*target)[2:] + f"V{name}\ntR.".encode()
        with pytest.raises((RefusedGlobal, KeyError)):
            load_restricted(io.BytesIO(data))


STATEFUL = [
    ("torch.distributed.checkpoint.metadata", "Metadata", Metadata),
    ("torch.distributed.checkpoint.metadata", "TensorProperties", TensorProperties),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex", MetadataIndex),
    ("pathlib", "PosixPath", pathlib.PurePosixPath),
    ("collections", "OrderedDict", collections.OrderedDict),
]


@pytest.mark.parametrize(("module", "name", "real"), STATEFUL)
def test_a_pickle_cannot_change_a_class(module: str, name: str, real: Any) -> None:
    """BUILD with ``(None, {name: value})`` sets attributes on whatever it is given."""
    before = dict(vars(real))
    state = b"N}V__eq__\nVmarked\ns\x86"
    data = of_global(module, name) + state + b"b."
    with pytest.raises(pickle.UnpicklingError, match="changes the class"):
        load_restricted(io.BytesIO(data))
    # Through a dict of the class, too.
    with pytest.raises(Exception):  # noqa: B017, PT011
        load_restricted(io.BytesIO(of_global(module, name) + b"}V__eq__\nVmarked\nsb."))
    assert dict(vars(real)) == before


def test_a_foreign_pickle_is_refused_and_nothing_executed(tmp_path: Path, run: Run) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / "checkpoint"
    save_sharded(path)
    damage.foreign_pickle(path, marker)
    for command in ("inspect", "verify"):
        ran = run(command, path)
        assert (ran.code, ran.out) == (2, "")
        assert "posix.mkdir" in ran.err
        assert "Traceback" not in ran.err
    assert not marker.exists()
    with open(path / ".metadata", "rb") as stream:
        pickle.load(stream)
    assert marker.exists(), "the pickle of the test should do something"


def lean_parts(path: Path) -> tuple[bytes, dict[str, Any], int, int]:
    """Return a lean file, its footer, and where its head and its records end."""
    data = (path / ".metadata").read_bytes()
    head_end, footer_start, magic = struct.unpack("<QQ16s", data[-32:])
    assert magic == MAGIC
    return data, pickle.loads(zlib.decompress(data[footer_start:-32])), head_end, footer_start


def with_footer(data: bytes, told: Any, head_end: int) -> bytes:
    """Return a lean file with another footer behind its pickle."""
    footer = zlib.compress(pickle.dumps(told))
    return data + footer + struct.pack("<QQ16s", head_end, len(data), MAGIC)


def test_records_that_are_code_are_refused(tmp_path: Path) -> None:
    """The fast reading never runs the records; ``pickle.load`` would, and so would torch."""
    save_sharded(tmp_path)
    data, told, head_end, footer_start = lean_parts(tmp_path)
    (_, position, _) = told["parts"][0]
    assert position == head_end
    evil = of_global("os", "system")[2:] + b"0"
    changed = data[:position] + evil + data[position + len(evil) : footer_start]
    (tmp_path / ".metadata").write_bytes(with_footer(changed, told, head_end))
    with pytest.raises(CannotLook, match="not those of chunks"):
        Checkpoint(tmp_path)
    # Between the records and the end of the pickle.
    slipped = data[: footer_start - 3] + evil + data[footer_start - 3 : footer_start]
    (tmp_path / ".metadata").write_bytes(with_footer(slipped, told, head_end))
    with pytest.raises(CannotLook, match="behind its records"):
        Checkpoint(tmp_path)
    # A footer that leaves the records out, so that nobody looks at them.
    (tmp_path / ".metadata").write_bytes(
        with_footer(changed, {**told, "parts": told["parts"][1:]}, head_end)
    )
    with pytest.raises(CannotLook):
        Checkpoint(tmp_path)


def test_a_footer_is_restricted_too(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    data, told, head_end, footer_start = lean_parts(tmp_path)
    evil = with_footer(data[:footer_start], {**told, "more": os.getcwd}, head_end)
    (tmp_path / ".metadata").write_bytes(evil)
    with pytest.raises(CannotLook, match=r"posix\.getcwd"):
        Checkpoint(tmp_path)


def test_lean_files_as_they_are_pass(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    data, told, head_end, footer_start = lean_parts(tmp_path)
    (tmp_path / ".metadata").write_bytes(with_footer(data[:footer_start], told, head_end))
    assert len(Checkpoint(tmp_path).tensors) == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"a": 1}),
        pickle.dumps(None),
        pickle.dumps(Metadata({})),
        pickle.dumps(Metadata({"a": 1}, storage_data={})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): "somewhere"})),
        b"\x80\x02" + b"(" * 1000,
        b"\x80\x02]" + b"]a" * 5000 + b".",
        MAGIC * 20,
    ],
    ids=range(10),
)
def test_broken_metadata_is_one_message(tmp_path: Path, run: Run, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    ran = run("inspect", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "no metadata of DCP's that can be read" in ran.err


def test_every_cut_of_a_lean_file_is_one_message(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    data, _, _, footer_start = lean_parts(tmp_path)
    # Without the footer the pickle is whole.
    for end in (*range(0, footer_start, max(footer_start // 60, 1)), footer_start - 1):
        (tmp_path / ".metadata").write_bytes(data[:end])
        with pytest.raises(CannotLook):
            Checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["/etc/passwd", "../elsewhere.distcp"])
def test_files_outside_of_the_checkpoint_are_refused(tmp_path: Path, file: str) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with open(tmp_path / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    for info in metadata.storage_data.values():
        info.relative_path = file
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CannotLook, match="outside of the checkpoint"):
        Checkpoint(tmp_path)
