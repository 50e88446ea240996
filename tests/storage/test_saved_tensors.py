"""Records that ask ``torch.load`` for more memory than they have bytes are refused before it."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import verify
from dcp_placements.storage.record_head import parse_record
from dcp_placements.storage.torch_load import load_saved_tensor
from dcp_placements.testing import FakeDTensor, World
from tests.offline_scenes import Run
from tests.storage_scenes import stock_metadata


def saved(value: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


def rewritten(
    data: bytes, *, pickled: bytes | None = None, method: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a record with another pickle, or compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", method) as target:
        for entry in source.infolist():
            replaced = pickled is not None and entry.filename.endswith("/data.pkl")
            target.writestr(entry.filename, pickled if replaced else source.read(entry))
    return out.getvalue()


class _Call:
    def __init__(self, called: Any, *arguments: Any) -> None:
        self.called = called, arguments

    def __reduce__(self) -> Any:
        return self.called


def compressed() -> bytes:
    """16 MiB of zeros in some KiB."""
    return rewritten(saved(torch.zeros(4 << 20)), method=zipfile.ZIP_DEFLATED)


def stride_0() -> bytes:
    """A terabyte in 4 bytes."""
    return saved(torch.ones(1).expand(1 << 19, 1 << 19))


def calls(*called: Any) -> Callable[[], bytes]:
    """A pickle that makes something of a size."""
    return lambda: rewritten(saved(torch.ones(2)), pickled=pickle.dumps(_Call(*called), protocol=2))


def storage_longer_than_its_entry() -> bytes:
    """16 elements are named, and 2 are there."""
    data = saved(torch.arange(2.0))
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        (name,) = (name for name in source.namelist() if name.endswith("/data.pkl"))
        pickled = source.read(name)
    # BININT1 2: first the storage's count, then the shape.
    assert pickled.count(b"K\x02") == 2
    pickled = pickled.replace(b"K\x02", b"K\x10").replace(b"K\x01\x85", b"K\x02\x85")
    return rewritten(data, pickled=pickled)


def with_entry(name: str, *, last: bool) -> Callable[[], bytes]:
    """A second pickle, which makes something of a size, under a name like the first one's."""

    def make() -> bytes:
        bomb = pickle.dumps(_Call(bytearray, 1 << 24), protocol=2)
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(saved(torch.ones(2)))) as source:
            entries = [(entry.filename, source.read(entry)) for entry in source.infolist()]
        root = entries[0][0].partition("/")[0]
        entries.insert(len(entries) if last else 0, (f"{root}/{name}", bomb))
        with zipfile.ZipFile(out, "w") as target, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for entry in entries:
                target.writestr(*entry)
        return out.getvalue()

    return make


def two_directories() -> bytes:
    """``zipfile`` searches the directory before the end; ``torch.load`` where the end says."""
    bomb = pickle.dumps(_Call(bytearray, 1 << 24), protocol=2)[:-1] + b"N0" * 400 + b"."
    bomb, good = rewritten(saved(torch.ones(2)), pickled=bomb), rewritten(saved(torch.ones(2)))
    bomb_end, good_end = bomb[-22:], good[-22:]
    (start,) = struct.unpack("<16xI2x", bomb_end)
    (good_start,) = struct.unpack("<16xI2x", good_end)
    directory = bytearray(good[good_start:-22])
    at = 0
    while at < len(directory):
        lengths = struct.unpack_from("<HHH", directory, at + 28)
        (offset,) = struct.unpack_from("<I", directory, at + 42)
        struct.pack_into("<I", directory, at + 42, offset + start - good_start)
        at += 46 + sum(lengths)
    return bomb[:-22] + good[:good_start] + bytes(directory) + bomb_end


def storage_key(key: bytes) -> Callable[[], bytes]:
    """A tensor whose storage has something else than a text for its name."""
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        + key
        + b"X\x03\0\0\0cpuK\x02tQK\0K\x02\x85K\x01\x85\x89NtR."
    )
    return lambda: rewritten(saved(torch.ones(2)), pickled=pickled)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a second pickle before": with_entry("data.pkl", last=False),
    "a second pickle behind": with_entry("data.pkl", last=True),
    "a second pickle in capitals": with_entry("DATA.PKL", last=True),
    "two directories": two_directories,
    "a zip file behind something else": lambda: b"x" * 64 + saved(torch.ones(2)),
    "a name that unfolds": storage_key(
        b"N\x85" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(40))
    ),
    "a deep name": storage_key(b"N" + b"\x85" * 5000),
    "a compressed entry": compressed,
    "stride 0": stride_0,
    "a bytearray of a size": calls(bytearray, 1 << 24),
    "a tensor of a size": calls(torch.Tensor, 1 << 22),
    "a storage of a size": calls(torch.UntypedStorage, 1 << 24),
    "a storage longer than its entry": storage_longer_than_its_entry,
    "a dict of tensors": lambda: saved({"a": torch.ones(2)}),
    "a deep tuple": lambda: rewritten(
        saved(torch.ones(2)), pickled=b"\x80\x02)" + b"\x85" * 100_000 + b"."
    ),
    "the legacy format": lambda: pickle.dumps(torch.ones(2)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_one_tensor_of_its_size_never_reaches_torch_load(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = HOSTILE[name]()
    if name != "stride 0":
        # A view takes no memory before it is copied; it is refused after it was made.
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    with pytest.raises((ValueError, pickle.UnpicklingError, zipfile.BadZipFile)):
        load_saved_tensor(io.BytesIO(data))


@pytest.mark.parametrize("name", ["a name that unfolds", "a deep name"])
def test_such_a_record_has_no_elements_to_read_in_place(name: str) -> None:
    data = HOSTILE[name]()
    assert parse_record(data, len(data)) is None


PLAIN: dict[str, torch.Tensor] = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "conjugate": torch.arange(6).reshape(2, 3).to(torch.complex64).conj(),
    "negative": torch.arange(4).to(torch.complex64).conj().imag.clone(),
    "parameter": torch.nn.Parameter(torch.arange(4.0)),
    "float8": torch.arange(6.0).reshape(2, 3).to(torch.float8_e4m3fn).t(),
    "complex128": torch.arange(6).reshape(2, 3).to(torch.complex128).t(),
    "empty": torch.empty(0, 3).t(),
    "repeated within its storage": torch.arange(6.0)[:3].expand(2, 3),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_torch_saves_of_one_tensor_is_loaded(name: str) -> None:
    tensor = PLAIN[name]
    found = load_saved_tensor(io.BytesIO(saved(tensor)))
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert found.tolist() == tensor.tolist()


def with_record(path: Path, data: bytes) -> None:
    """Save a tensor of two elements, and put this record in its place."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    metadata = stock_metadata(path)
    (info,) = metadata.storage_data.values()
    (path / info.relative_path).write_bytes(data)
    info.offset, info.length = 0, len(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


NO_TENSORS: dict[str, Any] = {
    "posix.system": _Call(os.system, "exit"),
    "__builtin__.bytearray": bytearray(b"abc"),
    "__builtin__.set": {1, 2},
    "collections.Counter": Counter("abc"),
}


@pytest.mark.skipif(os.name != "posix", reason="names os.system as this system does")
@pytest.mark.parametrize("name", NO_TENSORS)
@pytest.mark.parametrize("contents", [False, True])
def test_what_can_be_no_tensor_is_a_wrong_record(tmp_path: Path, name: str, contents: bool) -> None:
    with_record(tmp_path, saved(NO_TENSORS[name]))
    found = verify(tmp_path, contents=contents)
    assert [fault.kind for fault in found.faults] == ["wrong_record"]
    assert f"it begins with {name}, which makes no tensor" in found.faults[0].message
    with pytest.raises(CheckpointException, match=r"what __0_0[.]distcp holds of it is no tensor"):
        dcp.load(
            {"w": torch.zeros(2)},
            storage_reader=PlacementFileSystemReader(tmp_path),
            no_dist=True,
        )


class Other(torch.Tensor):
    """A type that ``torch.load`` is not told to allow."""


class ByMethod(torch.Tensor):
    """Such a type, which is pickled as a call of its method."""

    @classmethod
    def made(cls) -> ByMethod:
        return torch.ones(2).as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ByMethod.made, ()


@pytest.mark.parametrize("kind", [Other, ByMethod])
def test_what_is_of_another_type_is_not_called_sound(tmp_path: Path, run: Run, kind: Any) -> None:
    with_record(tmp_path, saved(torch.ones(2).as_subclass(kind)))
    found = verify(tmp_path, contents=True)
    assert (found.faults, found.unread) == ((), 1)
    ran = run("verify", tmp_path, "--contents")
    assert ran.code == 0
    assert "sound but for 1 record not read" in ran.out


@pytest.mark.parametrize("name", ["a compressed entry", "stride 0"])
def test_a_load_and_verify_refuse_such_a_record(tmp_path: Path, name: str) -> None:
    shape = (4 << 20,) if name == "a compressed entry" else (1 << 19, 1 << 19)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    data = HOSTILE[name]()
    metadata = stock_metadata(tmp_path)
    ((index, info),) = metadata.storage_data.items()
    (tmp_path / info.relative_path).write_bytes(data)
    info.offset, info.length = 0, len(data)
    held = metadata.state_dict_metadata["w"]
    held.size = held.chunks[0].sizes = torch.Size(shape)
    held.chunks[0].offsets = torch.Size([0] * len(shape))
    metadata.storage_data = {dataclasses.replace(index, offset=held.chunks[0].offsets): info}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))

    report = verify(tmp_path)
    assert [fault.kind for fault in report.faults] == ["wrong_record"]
    if name == "a compressed entry":
        with pytest.raises(CheckpointException, match="compressed entry"):
            dcp.load(
                {"w": torch.zeros(shape)},
                storage_reader=PlacementFileSystemReader(tmp_path),
                no_dist=True,
            )


def test_a_record_whose_head_was_changed_is_refused(tmp_path: Path) -> None:
    value = torch.arange(16.0).reshape(4, 4)
    dcp.save({"w": value.t()}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"K\x01K\x04\x86", b"K\x04K\x01\x86"))
    target, reader = {"w": torch.zeros(4, 4)}, PlacementFileSystemReader(tmp_path)
    with pytest.raises(CheckpointException, match=r"data\.pkl: their CRC-32 is [0-9a-f]{8}, where"):
        dcp.load(target, storage_reader=reader, planner=PlacementLoadPlanner(), no_dist=True)
    assert not target["w"].any()


@pytest.mark.parametrize("make", [dcp.FileSystemWriter, PlacementFileSystemWriter])
@pytest.mark.parametrize("bit", range(8))
def test_slices_do_not_move_with_the_length_of_what_pads_a_record(
    tmp_path: Path, make: Any, bit: int
) -> None:
    value = torch.arange(9100.0).reshape(130, 70)
    dcp.save({"w": value}, storage_writer=make(tmp_path), planner=PlacementSavePlanner())
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(value.numpy().tobytes())
    data[data.rindex(b"PK\x03\x04", 0, at) + 28] ^= 1 << bit
    file.write_bytes(data)
    world = World(2)

    def half(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=2)
        return {"w": FakeDTensor(torch.zeros(65, 70), mesh, [Shard(0)], (130, 70))}

    with pytest.raises(CheckpointException):
        world.load(
            tmp_path,
            half,
            lambda rank: PlacementLoadPlanner(),
            lambda rank: PlacementFileSystemReader(tmp_path),
        )
