"""Conversions on full disks, stopped and killed: nothing appears, and the next attempt ends it."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_placements.cli import main
from dcp_placements.convert import conversion, format_writers
from dcp_placements.offline import CannotLook, export_safetensors, import_checkpoint, reshard
from dcp_placements.storage import store
from tests.offline_scenes import Run, rules_by_ep, save_hugging_face, save_sharded, wholes

ROOT = Path(__file__).parents[2]
Convert = Callable[..., conversion.Converted]
CONVERSIONS: dict[str, Convert] = {
    "export": lambda out, **more: export_safetensors("ckpt", out, max_shard_size=200, **more),
    "reshard": lambda out, **more: reshard("ckpt", out, rules_by_ep, {"ep": 4}, **more),
    "import": lambda out, **more: import_checkpoint("hub", out, **more),
    "import of ranks": lambda out, **more: import_checkpoint("ranks", out, **more),
    "export of ranks": lambda out, **more: export_safetensors(
        "ranks", out, max_shard_size=200, **more
    ),
}


def write_sources() -> None:
    save_sharded(Path("ckpt"))
    save_hugging_face(Path("hub"), wholes())
    Path("ranks").mkdir()
    for rank in range(2):
        torch.save(wholes(), f"ranks/model_rank_{rank}.pt")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(format_writers, "FILE_NBYTES", 200)
    monkeypatch.chdir(tmp_path)
    write_sources()
    return tmp_path


def files_of(path: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def check_resumed(convert: Convert, out: str = "out") -> None:
    """Check that nothing appeared, and that another attempt makes the bytes of an undisturbed."""
    assert not Path(out).exists()
    half = Path(f".{out}.partial")
    finished = {
        p.name: p.stat().st_ino
        for p in half.glob("*")
        if p.suffix != ".tmp" and p.name != "identity"
    }
    seen: list[tuple[int, int]] = []
    again = convert(out, progress=lambda done, total: seen.append((done, total)))
    assert set(finished) - {again_last(again)} == set(again.kept)
    assert {n: (Path(out) / n).stat().st_ino for n in again.kept} == {
        n: finished[n] for n in again.kept
    }
    assert seen[-1][0] == seen[-1][1] == sum(again.files.values())
    if not Path("whole").exists():
        assert convert("whole").kept == ()
    assert files_of(out) == files_of("whole")
    assert not half.exists()
    assert not Path(f".{out}.lock").exists()


def again_last(converted: conversion.Converted) -> str:
    """Return the name of the file that completes an output, unless it is one of its tensors'."""
    names = {".metadata", "model.safetensors.index.json"}
    return next(name for name in files_of(converted.out) if name in names)


class Full(io.FileIO):
    """A file on a disk with room for ``left`` bytes more, of which a last write takes a part."""

    left = 0

    def write(self, data: Any) -> int:
        if Full.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(memoryview(data).cast("B")[: Full.left])
        Full.left -= written
        return written


@pytest.mark.parametrize("name", CONVERSIONS)
def test_on_a_full_disk_it_says_what_is_needed_and_goes_on_later(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = CONVERSIONS[name]
    convert("whole")
    total = sum(map(len, files_of("whole").values()))

    def opened(file: Any, mode: str, **options: Any) -> Any:
        if mode == "rb":
            return open(file, mode, **options)
        return io.BufferedWriter(Full(file, mode))

    # Before its first byte, at some points of its data, and in the last bytes of its metadata.
    for number, room in enumerate([0, 70, total // 3, 2 * total // 3, total + 60]):
        out = f"out{number}"
        Full.left = room
        with monkeypatch.context() as full:
            full.setattr(store, "open", opened, raising=False)
            with pytest.raises(CannotLook) as caught:
                convert(out)
        headline, needed, way_out = str(caught.value).splitlines()
        assert headline.startswith(f"{out}: [Errno 28] No space left on device: '.{out}.partial")
        assert "needed: " in needed
        assert "B in all" in needed
        assert "same command again" in way_out
        check_resumed(convert, out)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_stopped_at_any_moment_it_goes_on(name: str, folder: Path) -> None:
    convert = CONVERSIONS[name]
    for number, part in enumerate((0.0, 0.4, 0.8)):

        def stop(done: int, total: int, part: float = part) -> None:
            if done >= part * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(f"out{number}", progress=stop)
        check_resumed(convert, f"out{number}")


KILLED = """
import os, signal, sys
from dcp_placements.convert import format_writers
from tests.convert.test_interrupted import CONVERSIONS

def kill(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

format_writers.FILE_NBYTES = 200
for number, convert in enumerate(CONVERSIONS.values()):
    child = os.fork()
    if not child:
        convert(f"out{number}", progress=kill)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_killed_it_goes_on_and_what_is_left_of_its_lock_is_in_nobodys_way(folder: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", KILLED], env=environment, check=True, timeout=120)
    for number, convert in enumerate(CONVERSIONS.values()):
        check_resumed(convert, f"out{number}")
        for file in Path("whole").iterdir():
            file.unlink()
        Path("whole").rmdir()


def test_what_another_attempt_left_is_room_for_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".out.partial").mkdir()
    Path(".out.partial/identity").write_text("of other arguments")
    Path(".out.partial/half").write_bytes(bytes(10_000))
    free = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    assert CONVERSIONS["export"]("out").is_written
    with pytest.raises(CannotLook, match="there is room for 100 B"):
        CONVERSIONS["export"]("out2")


def test_a_limit_on_files_is_exit_2(folder: Path, run: Run) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        ran = run("export", "ckpt", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (ran.code, ran.out) == (2, "")
    assert "out: [Errno 27] File too large: '.out.partial" in ran.err
    assert main(["export", "ckpt", "out"]) == 0
