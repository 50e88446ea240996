"""The storage writer: torch's files, whoever reads them."""

from __future__ import annotations

import errno
import io
import os
import pickle
import pickletools
import re
import resource
import zipfile
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import WriteItem

from dcp_placements import PlacementError, PlacementSavePlanner
from dcp_placements.storage import record_writes
from dcp_placements.storage.metadata_file import read_metadata
from dcp_placements.storage.record_writes import RecordTemplate, save_tensors
from dcp_placements.storage.writer import PlacementFileSystemWriter
from dcp_placements.testing import World
from tests.storage_scenes import (
    Flipped,
    all_kinds,
    blank,
    data_file,
    flipped_registry,
    load,
    same,
    saved_by_torch,
    sharded,
    stock_metadata,
    wholes,
)


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_torch_reads_what_it_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = all_kinds()
    if "single_file_per_rank" in options:
        saved = dict(list(saved.items())[-12:])
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path, **options))
    loaded = load(tmp_path, blank(saved), dcp.FileSystemReader(tmp_path))
    assert [key for key in saved if not same(saved[key], loaded[key])] == []


def test_small_tensors_are_written_in_any_memory_format(tmp_path: Path) -> None:
    """Tensors in channels_last stacked are in none."""
    whole = torch.arange(24.0).view(2, 3, 2, 2)
    saved = {str(n): (whole + n).to(memory_format=torch.channels_last) for n in range(3)}
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path))
    loaded = load(tmp_path, blank(saved), dcp.FileSystemReader(tmp_path))
    assert all(torch.equal(loaded[str(n)], whole + n) for n in range(3))


def test_a_torch_that_writes_otherwise_is_left_to_write_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_writes, "_template_of", record_writes._template_of.__wrapped__)
    tensor = torch.full((5,), 2.0)

    def written() -> bytes:
        ours = io.BytesIO()
        save_tensors([tensor], ours)
        return ours.getvalue()

    stock = saved_by_torch(tensor)
    assert written() != stock
    monkeypatch.setattr(record_writes, "DESCRIPTOR", b"PK\x07\x09")
    assert written() == stock
    monkeypatch.undo()
    monkeypatch.setattr(record_writes, "_template_of", record_writes._template_of.__wrapped__)
    monkeypatch.setattr(torch, "load", lambda *_, **__: tensor)  # other elements
    assert written() == stock


def test_records_without_checksums_are_written_as_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_writes, "_template_of", record_writes._template_of.__wrapped__)
    torch.serialization.set_crc32_options(False)
    try:
        ours = io.BytesIO()
        save_tensors([torch.arange(5.0)], ours)
        assert ours.getvalue() == saved_by_torch(torch.arange(5.0))
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("shape", [(1 << 20, 3), (5, 1 << 30), (1 << 41,)], ids=str)
def test_m154_the_head_of_a_record_needs_no_data_of_its_shape(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """The elements are a hole in the file; above 4 GiB a zip file has other headers."""
    template, around = RecordTemplate(torch.uint8, shape), list[bytes]()
    template.write_blocks([], lambda data: around.append(bytes(data)))
    head, tail = around
    assert template.length == len(head) + prod(shape) + len(tail) < prod(shape) + (4 << 10)
    if prod(shape) > 5 << 30:
        return  # larger than the files of some systems
    with open(tmp_path / "w", "wb") as stream:
        stream.write(head)
        stream.seek(prod(shape), os.SEEK_CUR)
        stream.write(tail)
    with zipfile.ZipFile(tmp_path / "w") as file:
        assert file.getinfo("archive/data/0").file_size == prod(shape)
    loaded = torch.load(tmp_path / "w", mmap=True, weights_only=True)
    assert (loaded.shape, loaded.dtype) == (shape, torch.uint8)


def test_a_failure_in_a_thread_is_a_failure(tmp_path: Path) -> None:
    saved = {f"w{n}": torch.randn(3, 5) for n in range(40)}
    writer = PlacementFileSystemWriter(tmp_path, thread_count=4)
    dcp.save(saved, storage_writer=writer)

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.index.fqn == "w39":
                raise OSError("disk full")
            return super().resolve_data(write_item)

    before = (tmp_path / ".metadata").read_bytes()
    with pytest.raises(dcp.api.CheckpointException, match="disk full"):
        dcp.save(saved, storage_writer=writer, planner=Failing())
    assert (tmp_path / ".metadata").read_bytes() == before


def test_extensions_go_torchs_own_way(tmp_path: Path) -> None:
    saved = {"w": torch.randn(300, 50), "n": torch.zeros(3), "lr": 0.1}
    dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path, _extensions=[Flipped()]))
    loaded = load(tmp_path, blank(saved), dcp.FileSystemReader(tmp_path, flipped_registry()))
    assert all(same(saved[key], loaded[key]) for key in saved)
    infos = stock_metadata(tmp_path).storage_data.values()
    assert [info.transform_descriptors for info in infos] == [["flipped"]] * 3


# What stands in .metadata.


def test_metadata_names_torchs_classes_only(tmp_path: Path) -> None:
    world, whole = World(4), wholes(5, (9, 5))
    world.save(
        tmp_path,
        lambda rank: {**sharded(world, rank, whole, 0), "norm": torch.ones(4), "lr": 0.1},
        lambda rank: DefaultSavePlanner(),
        lambda rank: PlacementFileSystemWriter(tmp_path),
    )
    raw = (tmp_path / ".metadata").read_bytes()
    named = {arg for code, arg, _ in pickletools.genops(raw) if code.name == "GLOBAL"}
    assert {str(name).split()[0].split(".")[0] for name in named} <= {"torch", "pathlib"}
    # And Python's own unpickler, which is stricter.
    assert pickle._loads(raw) == stock_metadata(tmp_path)  # type: ignore[attr-defined]


def test_what_a_save_returns_can_be_looked_at_like_torchs(tmp_path: Path) -> None:
    saved = {"w": torch.randn(3, 5), "lr": 0.1}
    ours = dcp.save(saved, storage_writer=PlacementFileSystemWriter(tmp_path))
    assert isinstance(ours, Metadata)
    assert ours.storage_data == stock_metadata(tmp_path).storage_data
    assert MetadataIndex("w", (0, 0), 7) in ours.storage_data
    assert MetadataIndex("w", (1, 0)) not in ours.storage_data
    assert MetadataIndex("x", (0, 0)) not in ours.storage_data
    assert ours.storage_data[MetadataIndex("lr")].relative_path == data_file(tmp_path, 0).name
    assert pickle.loads(pickle.dumps(ours.storage_data)) == ours.storage_data


def test_an_empty_checkpoint_has_metadata(tmp_path: Path) -> None:
    dcp.save({}, storage_writer=PlacementFileSystemWriter(tmp_path))
    assert stock_metadata(tmp_path).storage_data == {}
    assert len(read_metadata(partial(open, tmp_path / ".metadata", "rb")).storage_data) == 0


@pytest.mark.parametrize("kind", ["small", "large", "object"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EFBIG])
def test_an_error_of_the_system_names_its_reason_and_the_file(
    tmp_path: Path, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M64: torch's serializer would tell of positions that do not fit."""

    class Broken(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 2000:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    held: dict[str, Any] = {"small": {f"w{n}": torch.ones(4) for n in range(20)}}
    held |= {"large": {"w": torch.ones(100_000)}, "object": {"o": "x" * 10_000}}
    writer = PlacementFileSystemWriter(tmp_path)
    monkeypatch.setattr("dcp_placements.storage.store.open", Broken, raising=False)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(held[kind], storage_writer=writer, no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, OSError)
    assert error.errno == number
    assert os.strerror(number) in str(error)
    assert re.search(r"__0_.*\.distcp", str(error))
    assert "unexpected pos" not in str(error)


def test_a_file_that_grows_too_large_names_the_reason(tmp_path: Path) -> None:
    """The system's own error, and nothing half-written is a checkpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = PlacementFileSystemWriter(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save({"w": torch.ones(1 << 20)}, storage_writer=writer, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(caught.value.failures[0][0])
    assert not (tmp_path / ".metadata").exists()


def test_a_format_that_no_reader_reads_is_refused(tmp_path: Path) -> None:
    """Torch's reader takes each record for a file of torch.save, whatever the writer's format."""
    path = tmp_path / "ckpt"
    stock = dcp.FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.ones(3)}, storage_writer=stock, no_dist=True)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    with pytest.raises(PlacementError, match="no reader, torch's included"):
        PlacementFileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)


@pytest.mark.parametrize("hook", ["create_global_plan", "finish_plan"])
def test_a_change_of_the_working_directory_does_not_divide_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """Another run's checkpoint has the same relative path from there; it stays as it was."""
    first, second = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        dcp.save(first, storage_writer=PlacementFileSystemWriter(tmp_path / run / "step-1"))

    class Moving(DefaultSavePlanner):
        def __getattribute__(self, name: str) -> Any:
            if name == hook:
                os.chdir(tmp_path / "two")
            return super().__getattribute__(name)

    monkeypatch.chdir(tmp_path / "one")
    dcp.save(second, storage_writer=PlacementFileSystemWriter("step-1"), planner=Moving())
    assert Path.cwd() == tmp_path / "two"
    for run, saved in ("one", second), ("two", first):
        path = tmp_path / run / "step-1"
        read = load(path, {"w": torch.zeros(3)}, dcp.FileSystemReader(path))
        assert torch.equal(read["w"], saved["w"])


def index_nbytes(path: Path, keys: int, *, own: bool) -> int:
    """Save shards on 8 ranks, and a key of each rank's own; return the bytes of the index."""
    world, whole = World(8), wholes(keys, (32, 3))
    world.save(
        path,
        lambda rank: {**sharded(world, rank, whole, 0), **({f"rng.{rank}": "x"} if own else {})},
        lambda rank: DefaultSavePlanner(),
        lambda rank: PlacementFileSystemWriter(path, stock_metadata=False),
    )
    return (path / ".metadata").stat().st_size


def test_m93_keys_of_a_rank_s_own_take_the_same_room_whatever_else_it_holds(tmp_path: Path) -> None:
    few, many = (
        index_nbytes(tmp_path / f"own{keys}", keys, own=True)
        - index_nbytes(tmp_path / f"none{keys}", keys, own=False)
        for keys in (20, 120)
    )
    assert many <= few + 64


def test_m94_an_overwrite_does_not_unpickle_the_older_metadata(tmp_path: Path) -> None:
    dcp.save(all_kinds(), storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(metadata[:20] + bytes(len(metadata) - 20))
    dcp.save(all_kinds(), storage_writer=PlacementFileSystemWriter(tmp_path))
    assert not (tmp_path / "__0_0.distcp").exists()


def test_m95_overwrites_leave_no_files_behind(tmp_path: Path) -> None:
    world = World(4)
    for _ in range(3):
        world.save(
            tmp_path,
            lambda rank: {"w": torch.ones(3)},
            lambda rank: PlacementSavePlanner(),
            lambda rank: PlacementFileSystemWriter(tmp_path),
        )
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_writer_with_a_finish_of_its_own_gets_all_rows(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(PlacementFileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            seen.extend(result.size_in_bytes for rank in results for result in rank)
            super().finish(metadata, results)

    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {"w": torch.ones(3), f"own.{rank}": torch.zeros(2)},
        lambda rank: PlacementSavePlanner(),
        lambda rank: Counting(tmp_path),
    )
    assert len(seen) == 3
    assert all(seen)
