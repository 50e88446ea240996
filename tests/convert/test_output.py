"""Outputs appear as a whole, one writer makes them, and nothing is written through links."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dcp_placements.offline import CannotLook, draw, open_source, save_figure, stock_metadata
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.output import LocalOutput
from dcp_placements.storage.store import LocalStore
from tests.offline_scenes import Run, save_sharded

ROUNDS = int(os.environ.get("DCP_PLACEMENTS_ROUNDS", "4"))

WORKER = """
import contextlib, io, json, sys
from dcp_placements.cli import main
import dcp_placements.offline
print("ready", flush=True)
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, err.getvalue()]), flush=True)
"""


def start_worker(stack: ExitStack, *program: str) -> subprocess.Popen[str]:
    """Start a process that runs in the background, and ends with the test."""
    worker = subprocess.Popen(
        [sys.executable, "-c", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    stack.enter_context(worker)
    stack.callback(worker.kill)
    return worker


def line_of(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def test_of_two_at_once_one_succeeds_and_the_other_names_it(tmp_path: Path) -> None:
    sources = []
    for number in range(2):
        (tmp_path / f"hf{number}").mkdir()
        held = {"w": torch.full((300, 1000), float(number)), f"only{number}": torch.ones(3)}
        save_file(held, tmp_path / f"hf{number}" / "model.safetensors")
        sources.append(tmp_path / f"hf{number}")
    with ExitStack() as stack:
        workers = [start_worker(stack, WORKER) for _ in sources]
        for worker in workers:
            assert line_of(worker) == "ready"
        for number in range(ROUNDS):
            how = "import" if number % 2 else "export"
            out = tmp_path / "out" / str(number)
            for worker, source in zip(workers, sources, strict=True):
                assert worker.stdin is not None
                worker.stdin.write(json.dumps([how, str(source), str(out)]) + "\n")
                worker.stdin.flush()
            ended = [json.loads(line_of(worker)) for worker in workers]
            codes = [code for code, _ in ended]
            assert sorted(codes) == [0, 2], ended
            winner = codes.index(0)
            message = ended[1 - winner][1]
            assert "is being written" in message or "is there already" in message
            found = open_source(out)
            with BoxReader(found) as reader:
                w = found.tensors["w"]
                assert torch.equal(reader.read(w, w.whole), torch.full((300, 1000), float(winner)))
            assert sorted(found.tensors) == [f"only{winner}", "w"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        str(number) for number in range(ROUNDS)
    )


@pytest.mark.filterwarnings("ignore:.*file system cannot")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_of_the_file_system_the_file_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with LocalOutput(tmp_path / "out") as output, output.directory([], "a"):
        with pytest.raises(CannotLook, match=r"if that process has ended, remove \.out\.lock"):
            LocalOutput(tmp_path / "out").__enter__()
        (output.partial / "whole").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_threads_of_one_process_keep_each_other_out(tmp_path: Path) -> None:
    with LocalOutput(tmp_path / "out"), pytest.raises(CannotLook, match="another process"):
        LocalOutput(tmp_path / "out").__enter__()
    with LocalOutput(tmp_path / "out"):
        pass


def test_what_fails_leaves_what_the_next_attempt_takes(tmp_path: Path) -> None:
    def refused() -> None:
        with LocalOutput(tmp_path / "a" / "b" / "out"):
            raise RuntimeError

    def file() -> None:
        with LocalStore(tmp_path).replace("file") as stream:
            stream.write(b"half")
            raise RuntimeError

    for fails in (refused, file):
        with pytest.raises(RuntimeError):
            fails()
    assert list(tmp_path.iterdir()) == []


def test_what_came_to_be_there_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def directory() -> None:
        with LocalOutput(out) as output, output.directory([], "a"):
            out.mkdir()
            (out / "precious").write_text("x")

    with pytest.raises(CannotLook, match="is there already"):
        directory()
    assert (out / "precious").read_text() == "x"


def plant(folder: Path, outside: Path, *names: str) -> None:
    """Put links to a file elsewhere under the names that an output passes through."""
    outside.write_text("precious")
    for name in names:
        (folder / name).symlink_to(outside)


def test_m58_stock_metadata_does_not_write_through_links(tmp_path: Path) -> None:
    """What was in the link's place is replaced; what it points to stays."""
    path, outside = tmp_path / "ckpt", tmp_path / "outside"
    save_sharded(path, stock_metadata=False)
    plant(path, outside, ".metadata.tmp", ".metadata.partial", "..metadata.partial")
    stock_metadata(path)
    assert outside.read_text() == "precious"
    assert not (path / ".metadata").is_symlink()
    assert len(open_source(path).tensors) == 5


def test_a_link_in_the_place_of_the_output_is_replaced_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outside = tmp_path / "outside"
    save_sharded(tmp_path / "ckpt")
    plant(tmp_path, outside, "a.png", ".a.png.tmp", ".a.png.partial")
    save_figure(draw(tmp_path / "ckpt"), tmp_path / "a.png")
    assert outside.read_text() == "precious"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CannotLook, match="is there already"):
        LocalOutput(tmp_path / "dangling")


def test_a_planted_lock_is_not_followed(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "ckpt")
    plant(tmp_path, tmp_path / "outside", ".out.lock")
    assert ".out.lock" in run.fails("export", tmp_path / "ckpt", tmp_path / "out")
    assert (tmp_path / "outside").read_text() == "precious"


def test_planted_parts_of_an_export_are_not_kept(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "ckpt")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tmp_path / ".out.partial").symlink_to(outside)
    ran = run("export", tmp_path / "ckpt", tmp_path / "out", "--prefix", "")
    assert ran.code == 0, ran.err
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert not (tmp_path / "out").is_symlink()


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold a lock as another process does."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("is_alive", [False, True])
def test_what_a_killed_command_left_is_used_or_removed_and_what_is_held_stays(
    tmp_path: Path, run: Run, is_alive: bool
) -> None:
    save_sharded(tmp_path / "ckpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    metadata = tmp_path / "ckpt" / ".metadata"
    before = metadata.read_bytes()
    locks = [tmp_path / ".out.lock", tmp_path / "ckpt" / ".metadata.lock", tmp_path / ".a.svg.lock"]
    left = [tmp_path / "ckpt" / ".metadata.00000000.tmp", tmp_path / "a.svg.00000000.tmp"]
    for path in (*locks, *left):
        path.write_bytes(b"" if path in locks else b"left")
    (tmp_path / ".other.lock").write_text("of another tool")
    commands: list[tuple[Any, ...]] = [
        ("export", tmp_path / "ckpt", tmp_path / "out"),
        ("stock-metadata", tmp_path / "ckpt"),
        ("draw", tmp_path / "ckpt", "-o", tmp_path / "a.svg"),
    ]
    with ExitStack() as stack:
        for lock in locks if is_alive else ():
            stack.enter_context(held(lock))
        ran = [run(*command) for command in commands]
        assert [each.code for each in ran] == ([2, 2, 2] if is_alive else [2, 0, 0])
        assert "is there already" in ran[0].err
        for each in ran[1:] if is_alive else ():
            assert "is being written by another process" in each.err
        assert [path for path in (*locks, *left) if path.exists()] == (
            [*locks, *left] if is_alive else []
        )
    if is_alive:
        assert metadata.read_bytes() == before
    assert (tmp_path / ".other.lock").read_text() == "of another tool"


def test_a_save_removes_what_a_killed_command_left(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    for name in (".metadata.lock", ".metadata.00000000.tmp"):
        (tmp_path / name).touch()
    save_sharded(tmp_path)
    assert not [*tmp_path.glob(".metadata.*")]
