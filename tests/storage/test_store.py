"""The files of a directory: what a file system cannot do, and what fails on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)
from dcp_placements.offline import CannotLook, diff, export_safetensors, verify
from dcp_placements.offline.directory import OpenedFile, opened_ahead
from dcp_placements.storage import metadata_file, store, writer
from dcp_placements.storage.store import LocalStore, Locked, UrlStore, is_unfinished, open_store
from tests.offline_scenes import Run, save_hugging_face, save_sharded
from tests.remote_scenes import failures_of
from tests.storage_scenes import load

ROUNDS = int(os.environ.get("DCP_PLACEMENTS_ROUNDS", "40"))

UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

OLD, NEW = {"w": torch.arange(6.0), "step": 1}, {"w": torch.arange(7.0) + 50, "step": 2}


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_reported", set())


def save(path: Path, state: dict[str, Any]) -> None:
    made = PlacementFileSystemWriter(path)
    dcp.save(dict(state), storage_writer=made, planner=PlacementSavePlanner(), no_dist=True)


def held(path: Path) -> dict[str, Any]:
    """Return what torch's reader and this package's read, which is one of the two states."""
    keys = PlacementFileSystemReader(path).read_metadata().state_dict_metadata
    size = int(keys["w"].size[0])  # type: ignore[union-attr]
    reads = [
        load(path, {"w": torch.zeros(size), "step": 0}, reader)
        for reader in (PlacementFileSystemReader(path), dcp.FileSystemReader(path))
    ]
    (state,) = [state for state in (OLD, NEW) if len(state["w"]) == size]
    for read in reads:
        assert torch.equal(read["w"], state["w"])
        assert read["step"] == state["step"]
    return state


def is_directory(descriptor: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{descriptor}")


def no_directory_syncs(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync

    def refused(descriptor: int) -> None:
        if is_directory(descriptor):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_m152_a_save_where_directories_cannot_be_synced_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, OLD)
    older = {path.name for path in tmp_path.glob("*.distcp")}
    no_directory_syncs(monkeypatch, number)
    with pytest.warns(UserWarning, match="cannot sync a directory") as warned:
        save(tmp_path, NEW)
    (text,) = [str(w.message) for w in warned if "file system cannot" in str(w.message)]
    assert os.strerror(number) in text
    assert not older & {path.name for path in tmp_path.iterdir()}, "the older files are removed"
    assert held(tmp_path) is NEW
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*file system cannot")  # it is said once
        save(tmp_path, OLD)
    assert held(tmp_path) is OLD


def test_m152_a_directory_that_may_be_written_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.warns(UserWarning, match="cannot sync a directory"):
        save(tmp_path, NEW)
    assert held(tmp_path) is NEW


def test_a_disk_that_fails_at_the_last_step_keeps_the_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names may not be on the disk: after a power cut the older metadata may be there again."""
    save(tmp_path, OLD)
    older = {path.name for path in tmp_path.glob("*.distcp")}
    no_directory_syncs(monkeypatch, errno.EIO)
    with pytest.warns(UserWarning, match=r"all is written, but the disk failed"):
        save(tmp_path, NEW)
    assert older < {path.name for path in tmp_path.iterdir()}
    assert held(tmp_path) is NEW


def test_where_no_thread_can_be_started_a_complete_save_ends_and_removes_the_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD)
    older = {path.name for path in tmp_path.glob("*.distcp")}

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    save(tmp_path, NEW)
    monkeypatch.undo()
    assert held(tmp_path) is NEW
    assert not older & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.ENOLCK])
def test_m152_a_command_without_syncs_and_locks_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, run: Run
) -> None:
    save_sharded(tmp_path / "ckpt")

    def refused(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    monkeypatch.setattr("fcntl.flock", refused)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = run("export", tmp_path / "ckpt", tmp_path / "out")
        assert ran.code == 0, ran.err
        assert ran.err.count("cannot lock a file") == 1
        assert ran.err.count("cannot sync a directory") == 1
        assert ran.err.count("cannot sync a file") == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
        ran = run("stock-metadata", tmp_path / "ckpt")
        assert (ran.code, ran.err) == (0, "")
    assert run("verify", tmp_path / "ckpt").code == 0


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.EEXIST])
def test_a_file_system_that_renames_over_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, OLD)
    real = os.replace

    def refused(source: Any, target: Any) -> None:
        if os.path.lexists(target):
            raise OSError(number, os.strerror(number), source)
        real(source, target)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.warns(UserWarning, match="cannot rename a file over another one"):
        save(tmp_path, NEW)
    assert held(tmp_path) is NEW
    assert not list(tmp_path.glob(".metadata.*"))


def test_where_nothing_can_be_renamed_the_older_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD)

    def refused(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        patch.setattr(os, "rename", refused)
        with pytest.raises(dcp.CheckpointException):
            save(tmp_path, NEW)
    assert held(tmp_path) is OLD
    assert not list(tmp_path.glob(".metadata.*"))


@pytest.mark.parametrize("is_copied", [True, False])
def test_an_older_file_is_back_or_the_message_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    """The file system renames over no file, and fails after the first rename."""
    save(tmp_path, OLD)
    real = os.rename

    def no_replace(source: Any, target: Any) -> None:
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), source)

    def once(source: Any, target: Any) -> None:
        if str(target).endswith(".metadata"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        real(source, target)

    def no_copy(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_replace)
        patch.setattr(os, "rename", once)
        if not is_copied:
            patch.setattr(shutil, "copyfileobj", no_copy)
        with pytest.raises(dcp.CheckpointException) as caught:
            save(tmp_path, NEW)
    text = str(failures_of(caught.value))
    assert ("way out:     mv " in text) != is_copied
    if not is_copied:
        assert not (tmp_path / ".metadata").exists()
        subprocess.run(text.partition("way out:")[2].strip(), shell=True, check=True)
    assert held(tmp_path) is OLD
    assert not list(tmp_path.glob(".metadata.*"))


OPERATIONS = ("open", "write", "fsync", "close", "replace", "rename", "unlink", "lock")


class Faults:
    """Fails one call of the system, by its number among those of a kind."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, count: int, number: int) -> None:
        self.kind, self.left, self.number = kind, count, number
        patch.setattr("fcntl.flock", self.failing("lock", fcntl.flock))
        for name in ("fsync", "replace", "rename", "unlink"):
            real = getattr(os, name)
            patch.setattr(os, name, self.failing(name, real))
        real_close = os.close

        def closed(descriptor: int) -> None:
            real_close(descriptor)
            self.fail("close")

        patch.setattr(os, "close", closed)
        real_open = os.open
        patch.setattr(os, "open", self.failing("open", real_open))
        patch.setattr(store, "open", self.opened, raising=False)

    def fail(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left == -1:
                raise OSError(self.number, os.strerror(self.number))

    def failing(self, kind: str, real: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            self.fail(kind)
            return real(*given, **options)

        return call

    def opened(self, path: Any, mode: str) -> Any:
        if "w" not in mode:
            return open(path, mode)
        self.fail("open")
        faults = self

        stream = open(path, mode)  # noqa: SIM115

        class Stream:
            def __enter__(self) -> Stream:
                return self

            def __exit__(self, *raised: object) -> None:
                self.close()

            def write(self, data: Any) -> int:
                faults.fail("write")
                return stream.write(data)

            def close(self) -> None:
                if not stream.closed:
                    stream.close()
                    faults.fail("close")

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

        return Stream()


def cases() -> list[tuple[str, int, int]]:
    drawn = random.Random(0)
    numbers = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ESTALE)
    return [
        (drawn.choice(OPERATIONS), drawn.randrange(4), drawn.choice(numbers)) for _ in range(ROUNDS)
    ]


@pytest.mark.parametrize(("kind", "count", "number"), cases())
def test_after_any_fault_of_the_system_the_checkpoint_is_the_old_or_the_new_one(
    tmp_path: Path, kind: str, count: int, number: int
) -> None:
    save(tmp_path, OLD)
    failed, text = False, ""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Faults(patch, kind, count, number)
        try:
            save(tmp_path, NEW)
        except dcp.CheckpointException as error:
            failed, text = True, str(failures_of(error))
    assert os.strerror(number) in text or not failed
    assert held(tmp_path) is (OLD if failed else NEW)
    assert not list(tmp_path.glob(".metadata.*")), "nothing unfinished is left"
    save(tmp_path, NEW)
    assert held(tmp_path) is NEW


@pytest.mark.parametrize(("kind", "count", "number"), cases())
def test_after_any_fault_of_the_system_an_output_is_whole_or_not_there(
    tmp_path: Path, kind: str, count: int, number: int
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_hugging_face(source, {"w": torch.arange(7.0)})
    failed = False
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Faults(patch, kind, count, number)
        try:
            export_safetensors(source, out)
        except (OSError, CannotLook):
            failed = True
    assert out.exists() is not failed
    if failed:
        export_safetensors(source, out)
    assert diff(source, out).same
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors"]


# Links.


def test_m150_links_that_lead_out_are_refused_with_the_way_out(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "ckpt"
    save(path, NEW)
    (file,) = path.glob("*.distcp")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    for command in (("verify", path), ("export", path, tmp_path / "out"), ("diff", path, path)):
        ran = run(*command)
        assert ran.code != 0
        assert "leads out of the directory" in ran.out + ran.err
        assert "cp -rL" in ran.out + ran.err
    assert held(path) is NEW, "a trainer's load follows it"
    os.system(f"cp -rL {path} {tmp_path / 'copy'}")
    assert verify(tmp_path / "copy", contents=True).sound
    assert held(tmp_path / "copy") is NEW


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "memory://other/x"])
def test_a_name_outside_of_a_url_is_refused(memory: str, name: str) -> None:
    with pytest.raises(PermissionError, match="outside of"):
        open_store(memory, restricted=True).open(name)


# An overwrite.


def test_m153_an_overwrite_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD)
    older = {path.name for path in tmp_path.glob("*.distcp")}

    def refused(*given: Any, **options: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load_safely", "load_metadata_pickle", "unpacked_index"):
        monkeypatch.setattr(metadata_file, name, refused)
    names = writer.read_file_names(LocalStore(tmp_path).opener(".metadata"))
    assert names == older
    save(tmp_path, NEW)
    monkeypatch.undo()
    assert held(tmp_path) is NEW
    assert not older & {path.name for path in tmp_path.iterdir()}


# Small things.


def test_of_two_locks_one_is_held(tmp_path: Path) -> None:
    files = LocalStore(tmp_path)
    with files.lock("a"), pytest.raises(Locked), files.lock("a"):
        pass
    with files.lock("a"):
        pass
    assert files.names() == []


def test_a_replacement_of_any_name_is_known_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalStore(tmp_path)
    for length in (1, 200, 241, 242, 255):
        name = "n" * length
        with files.replace(name) as stream:
            (unfinished,) = set(files.names()) - {"n" * n for n in (1, 200, 241, 242, 255)}
            assert is_unfinished(unfinished, name)
            assert set(files.states_of(name)) == {unfinished}
            stream.write(b"x")
        assert files.size(name) == 1
    assert len(files.names()) == 5


def test_a_change_of_any_kind_changes_the_entry(tmp_path: Path) -> None:
    files = LocalStore(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    before = files.entries()["a"]
    (tmp_path / "b").write_bytes(b"2")
    os.utime(tmp_path / "b", ns=(os.stat(tmp_path / "a").st_mtime_ns,) * 2)
    os.replace(tmp_path / "b", tmp_path / "a")
    assert files.entries()["a"] != before
    assert files.entry("nothing") is None
    assert LocalStore(tmp_path / "nowhere").entries() == {}
    assert files.entry() is not None


def test_files_that_were_opened_ahead_are_closed_when_the_block_raises(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads open the next files while the first one is read."""
    held = open_store(memory)
    names = [f"{number}.distcp" for number in range(20)]
    for name in names:
        with held.create(name) as stream:
            stream.write(b"some")
    opened: list[Any] = []
    real = UrlStore.open

    def noted(self: UrlStore, name: str) -> Any:
        opened.append(real(self, name))
        return opened[-1]

    monkeypatch.setattr(UrlStore, "open", noted)
    with suppress(ZeroDivisionError), opened_ahead(held, names) as files:
        first = next(files)
        _ = 1 // 0
    assert isinstance(first, OpenedFile)
    assert len(opened) > 8
    left = [stream for stream in opened if not stream.closed]
    assert left == [first.stream], "the one that was asked for is the caller's"
