"""Saves to URLs and loads from them, in memory: what is asked of the service, and what is not."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
)
from dcp_placements.errors import CannotLook
from dcp_placements.offline import diff, export_safetensors, open_source, verify
from dcp_placements.storage import store, writer
from dcp_placements.storage.remote import TRIES
from dcp_placements.storage.store import READ_AHEAD_NBYTES, UrlStore
from tests.remote_scenes import Flaky, FsspecReader, FsspecWriter, failures_of, names, save
from tests.storage_scenes import all_kinds, blank, load, same


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_all_kinds_are_saved_and_loaded(memory: str, options: dict[str, Any]) -> None:
    saved = dict(list(all_kinds().items())[-40:])
    save(memory, saved, **options)
    for reader in (
        PlacementFileSystemReader(memory),
        PlacementFileSystemReader(memory, restricted=True),
        PlacementFileSystemReader(memory, thread_count=1),
        FsspecReader(memory),
    ):
        loaded = load(Path("none"), blank(saved), reader)
        assert [key for key in saved if not same(saved[key], loaded[key])] == []


def test_a_url_is_no_local_folder(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(memory, {"w": torch.arange(4)})
    # The path of a save may be given to dcp.save, and replaces that of the writer, and back.
    writer, reader = PlacementFileSystemWriter("local"), PlacementFileSystemReader("local")
    for path in (f"{memory}/again", tmp_path / "local", f"{memory}/again/"):
        state = {"w": torch.arange(5)}
        dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
        read = {"w": torch.zeros(5, dtype=torch.int64)}
        dcp.load(read, checkpoint_id=path, storage_reader=reader, no_dist=True)
        assert torch.equal(read["w"], state["w"])
    assert [path.name for path in tmp_path.iterdir()] == ["local"]


def test_metadata_is_the_last_and_is_put_directly(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("pipe_file", "mv", "cp_file", "rm_file"):
        monkeypatch.setattr(
            f"fsspec.implementations.memory.MemoryFileSystem.{name}",
            lambda self, path, *a, n=name, **k: done.append(f"{n} {path.rpartition('/')[2]}"),
        )
    monkeypatch.setattr(os, "sync", lambda: done.append("sync"))
    monkeypatch.setattr(os, "fsync", lambda number: done.append("fsync"))
    save(memory, {"w": torch.arange(4), "step": 3}, thread_count=2)
    assert done == ["pipe_file .metadata"]
    assert all(name.endswith(".distcp") for name in names(memory))


def test_an_interrupted_save_leaves_the_older_checkpoint(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = {"w": torch.arange(6.0), "step": 1}
    save(memory, older)
    before = names(memory)

    class Stopped(PlacementFileSystemWriter):
        def _write_metadata(self, metadata: Any, results: Any) -> None:
            raise OSError("cut off")

    with pytest.raises(dcp.CheckpointException):
        dcp.save({"w": torch.zeros(6), "step": 2}, storage_writer=Stopped(memory), no_dist=True)
    assert set(before) < set(names(memory))
    read = load(Path("none"), {"w": torch.ones(6), "step": 0}, PlacementFileSystemReader(memory))
    assert torch.equal(read["w"], older["w"])
    assert read["step"] == 1
    save(memory, {"w": torch.zeros(6), "step": 3})
    assert not set(before[1:]) & set(names(memory)), "the older files are removed"


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("files", [1, 5])
def test_threads_read_what_one_reads(memory: str, threads: int, files: int) -> None:
    saved = {f"layers.{n}.w": torch.arange(30_000.0) + n for n in range(23)} | {"step": 7}
    save(memory, saved, thread_count=files)
    for planner in (PlacementLoadPlanner(), DefaultLoadPlanner()):
        reader = PlacementFileSystemReader(memory, thread_count=threads)
        read = {key: torch.zeros(30_000) for key in saved} | {"step": 0}
        dcp.load(read, storage_reader=reader, planner=planner, no_dist=True)
        assert [key for key in saved if not same(saved[key], read[key])] == []
        # A file of 2.8 MB is read in parts by up to three threads.
        assert reader.opens == (min(threads, 3) if files == 1 else files)
        assert reader.bytes_read > 23 * 30_000 * 4


def test_a_planner_is_called_by_one_thread_at_a_time(memory: str) -> None:
    saved = {f"w{n}": torch.arange(40_000.0) for n in range(16)}
    save(memory, saved, thread_count=4)
    busy = threading.Lock()
    used: set[int] = set()

    class Alone(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            assert busy.acquire(blocking=False)
            used.add(threading.get_ident())
            tensor = super().resolve_tensor(read_item)
            busy.release()
            return tensor

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            assert busy.acquire(blocking=False)
            busy.release()

    read = {key: torch.zeros(40_000) for key in saved}
    reader = PlacementFileSystemReader(memory)
    dcp.load(read, storage_reader=reader, planner=Alone(), no_dist=True)
    assert threading.get_ident() not in used
    assert all(torch.equal(saved[key], read[key]) for key in saved)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_one_thread_is_the_error_of_the_load(memory: str, threads: int) -> None:
    saved = {f"w{n}": torch.arange(40_000.0) for n in range(16)}
    save(memory, saved, thread_count=4)
    (victim, *_) = [name for name in names(memory) if name.endswith("_2.distcp")]
    fsspec.filesystem("memory").rm(f"{memory}/{victim}")
    reader = PlacementFileSystemReader(memory, thread_count=threads)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(blank(saved), storage_reader=reader, no_dist=True)
    assert victim in str(failures_of(caught.value))


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("late"), OSError(5)])
def test_a_request_that_fails_is_repeated(
    flaky: type[Flaky], error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"w": torch.arange(70_000.0), "step": 3}
    flaky.failures = [error] * (TRIES - 1)
    save("flaky://bucket/ckpt", saved)
    flaky.failures = [error] * (TRIES - 1)
    reader = PlacementFileSystemReader("flaky://bucket/ckpt")
    read = load(Path("none"), {"w": torch.zeros(70_000), "step": 0}, reader)
    assert torch.equal(read["w"], saved["w"])
    flaky.failures = [error] * 100
    with pytest.raises(OSError, match="flaky://bucket/ckpt"):
        reader.read_metadata()
    assert len(flaky.failures) == 100 - TRIES
    monkeypatch.setattr("dcp_placements.storage.remote.PATIENCE_S", -1.0)
    with pytest.raises(OSError, match="flaky://bucket/ckpt"):
        reader.read_metadata()
    assert len(flaky.failures) == 100 - TRIES - 1, "a library has waited long enough"


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), FileNotFoundError("no bucket")])
def test_an_answer_is_not_asked_for_again(error: OSError, flaky: type[Flaky]) -> None:
    flaky.failures = [error, OSError("asked again")]
    with pytest.raises(type(error), match="flaky://bucket/file"):
        UrlStore("flaky://bucket").open("file")
    assert len(flaky.failures) == 1


@pytest.mark.parametrize("stock", [True, False])
def test_metadata_that_arrive_in_part_are_requested_again(
    flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch, stock: bool
) -> None:
    url = "flaky://bucket/ckpt"
    writer = PlacementFileSystemWriter(url, stock_metadata=stock)
    dcp.save({"w": torch.arange(4.0)}, storage_writer=writer)
    lengths = [0, 100, -10]
    whole = Flaky.cat_file

    def part(self: Any, path: str, **span: Any) -> bytes:
        data: bytes = whole(self, path, **span)
        return data[: lengths.pop(0)] if lengths else data

    monkeypatch.setattr(Flaky, "cat_file", part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(PlacementFileSystemReader(url).read_metadata().state_dict_metadata) == ["w"]
    lengths += [-10] * TRIES
    with pytest.raises(OSError, match=r"ckpt/.metadata: the service returned \d+ bytes of \d+"):
        PlacementFileSystemReader(url).read_metadata()


@pytest.mark.parametrize("whole_nbytes", [16 << 20, 0])
def test_small_metadata_are_read_with_one_request(
    flaky: type[Flaky], whole_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save may replace them meanwhile; all of what is read is then of one save."""
    monkeypatch.setattr("dcp_placements.storage.store.WHOLE_NBYTES", whole_nbytes)
    url = "flaky://bucket/ckpt"
    state = {f"layers.{n}.weight.{'x' * 900}": torch.arange(4.0) for n in range(1500)}
    save(url, state)
    reader = PlacementFileSystemReader(url)
    flaky.calls.clear()
    metadata = reader.read_metadata()
    assert fsspec.filesystem("flaky").info(f"{url}/.metadata")["size"] > READ_AHEAD_NBYTES
    if whole_nbytes:
        fsspec.filesystem("flaky").rm_file(f"{url}/.metadata")
    assert len(metadata.state_dict_metadata) == 1500
    assert metadata.storage_data is not None
    assert len({info.offset for info in metadata.storage_data.values()}) == 1500
    assert (flaky.calls.count("cat_file") == 1) == bool(whole_nbytes)


def test_errors_of_an_upload_name_the_url(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Any, data: Any) -> int:
        raise ValueError("no such upload")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.write", write)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(memory, {"w": torch.arange(4.0), "step": 3})
    error = failures_of(caught.value)
    assert isinstance(error, OSError)
    assert re.fullmatch(rf"{memory}/__0_\w+_0.distcp: ValueError: no such upload", str(error))
    assert names(memory) == []


def test_a_path_that_was_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("s3://bucket/run1")
    writer, reader = PlacementFileSystemWriter(tmp_path), PlacementFileSystemReader(tmp_path)
    state = {"w": torch.arange(4)}
    for act in (
        lambda: PlacementFileSystemWriter(path),
        lambda: PlacementFileSystemReader(path),
        lambda: dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True),
        lambda: dcp.load(state, checkpoint_id=path, storage_reader=reader, no_dist=True),
        lambda: open_source(path),
        lambda: export_safetensors(path, "out"),
        lambda: export_safetensors(tmp_path, path),
    ):
        with pytest.raises((CannotLook, dcp.CheckpointException)) as caught:
            act()
        text = str(failures_of(caught.value))
        assert text.startswith("s3:/bucket/run1: this is neither a URL nor an absolute path")
        assert "give the URL as a str: s3://bucket/run1" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["C:", "run:10", "a://b", "s3:/x", "C:/x", "C://x"])
def test_local_names_like_a_url_are_local(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.arange(4)}
    paths = [f"{tmp_path}/{name}", f"./{name}", f"file://{tmp_path}/{name}"]
    for path in [*paths, name] if name.startswith(("C:", "run")) else paths:
        save(path, state)
        assert os.path.isfile(f"{tmp_path}/{name}/.metadata")
        read = {"w": torch.zeros(4, dtype=torch.int64)}
        dcp.load(read, storage_reader=PlacementFileSystemReader(path), no_dist=True)
        assert torch.equal(read["w"], state["w"])
        assert len(open_source(path).tensors) == 1
        shutil.rmtree(tmp_path / name)


def test_a_restricted_reader_of_a_file_url_follows_no_link_out(tmp_path: Path) -> None:
    save(f"file://{tmp_path}/ckpt", {"w": torch.arange(4)})
    [file] = (tmp_path / "ckpt").glob("*.distcp")
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    reader = PlacementFileSystemReader(f"file://{tmp_path}/ckpt", restricted=True)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(4, dtype=torch.int64)}, storage_reader=reader, no_dist=True)
    assert "it leads out of the directory" in str(failures_of(caught.value))


def test_protocols_that_are_not_known_are_one_line() -> None:
    with pytest.raises(CannotLook, match="nothing://x/y: Protocol not known: nothing"):
        PlacementFileSystemWriter("nothing://x/y")


def test_options_reach_the_file_system(memory: str) -> None:
    url = memory.replace("memory://", "dir://")
    options = {"path": memory, "target_protocol": "memory"}
    path = memory.removeprefix("memory:/")
    assert PlacementFileSystemWriter(url, storage_options=options).store.fs.path == path
    assert PlacementFileSystemReader(url, storage_options=options).store.fs.path == path


def test_metadata_of_single_ranks_at_a_url_are_refused(memory: str) -> None:
    dcp.save({"w": torch.arange(6.0)}, storage_writer=FsspecWriter(memory), use_collectives=False)
    assert names(memory)[0] == "__0.metadata"
    with pytest.raises(FileNotFoundError, match=r"(?s)describes its own part alone.*__0\.metadata"):
        PlacementFileSystemReader(memory).read_metadata()


@pytest.mark.parametrize("older", [PlacementFileSystemWriter, FsspecWriter])
def test_m95_older_files_are_removed_in_one_request(
    memory: str, monkeypatch: pytest.MonkeyPatch, older: Any
) -> None:
    saved = {f"w{n}": torch.arange(40.0) for n in range(16)}
    dcp.save(saved, storage_writer=older(memory, thread_count=16), no_dist=True)
    before = set(names(memory)) - {".metadata"}
    asked: list[str] = []
    request = store.request

    def noted(url: str, *args: Any, **options: Any) -> Any:
        asked.append(url)
        return request(url, *args, **options)

    monkeypatch.setattr(store, "request", noted)
    save(memory, {"w": torch.arange(4)})
    assert len(before) == 16
    assert not before & set(names(memory))
    assert len(asked) < 16


def test_m95_ranks_do_not_wait_for_the_removal_of_older_files(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(memory, {"w": torch.arange(4)})
    before = set(names(memory)) - {".metadata"}
    proceed, threads = threading.Event(), threading.enumerate()
    rm = MemoryFileSystem.rm

    def slow(self: Any, *args: Any, **options: Any) -> None:
        proceed.wait()
        rm(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "rm", slow)
    monkeypatch.setattr(writer, "REMOVAL_S", 0.0)
    save(memory, {"w": torch.arange(5)})
    assert before < set(names(memory))
    proceed.set()
    for thread in set(threading.enumerate()).difference(threads):
        thread.join()
    assert not before & set(names(memory))


def test_small_files_are_opened_several_at_a_time(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"layers.{n}.w": torch.arange(6.0) + n for n in range(20)}
    save(memory, state, single_file_per_rank=False)
    running, most, lock = 0, 0, threading.Lock()

    def slowed(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.01)
            try:
                return method(*args, **kwargs)
            finally:
                with lock:
                    running -= 1

        return call

    for name in ("info", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, slowed(getattr(MemoryFileSystem, name)))
    assert verify(memory, contents=True).sound
    # The main thread reads one file while the next ones are opened.
    assert 4 <= most <= store.READING_THREADS + 1
    most = 0
    assert export_safetensors(memory, tmp_path / "out", prefix="").is_written
    assert 4 <= most <= store.READING_THREADS + 1
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[key], value) for key, value in state.items())
    most = 0
    assert diff(memory, tmp_path / "out").same
    assert 4 <= most <= store.READING_THREADS + 1
    removed = [name for name in names(memory) if name.endswith(".distcp")][3:5]
    for name in removed:
        fsspec.filesystem("memory").rm(f"{memory}/{name}")
    assert {fault.files for fault in verify(memory).faults} == {(name,) for name in removed}
    lost = [found for found in diff(memory, tmp_path / "out").differences]
    assert [found.kind for found in lost] == ["unreadable"] * 2
