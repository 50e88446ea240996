"""Progress bars: which commands show one, what it counts, and that a pipe gets none of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_placements.cli import progress as progress_bars
from dcp_placements.cli.app import COMMANDS
from dcp_placements.cli.progress import progress
from dcp_placements.testing.megatron import MegatronModel, MegatronRun, write_legacy
from tests.offline_scenes import Run, run, save_hugging_face, save_sharded, wholes

__all__ = ["run"]

RULES = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=4")

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "inspect": ("sharded",),
    "draw": ("sharded", "-o", "drawn.svg"),
    "verify": ("sharded", "--contents"),
    "diff": ("sharded", "sharded"),
    "rehearse": ("sharded", *RULES),
    "doctor": ("sharded", "--experts-per-layer", 8),
    "megatron": ("megatron",),
    "merge-metadata": ("ranks",),
    "import": (
        "hub",
        "imported",
    ),
    "export": ("sharded", "exported"),
    "reshard": ("sharded", "resharded", *RULES),
}
COUNTED = {"megatron", "verify", "diff", "rehearse", "import", "export", "reshard"}
"""Commands that know how much there is to do."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    save_sharded(path / "sharded")
    save_sharded(path / "ranks", collectives=False)
    save_hugging_face(path / "hub", wholes())
    write_legacy(path / "megatron", MegatronModel(layers=2), MegatronRun(tp=2), args=True)
    return path


@pytest.fixture
def terminal() -> Iterator[Any]:
    """Return a terminal: what a program writes to, and the end from which it is read."""
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as stream:
        yield stream, reader
    os.close(reader)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_bar_that_ends_at_all_of_it(
    command: str, checkpoints: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[str, list[tuple[int, int]]]] = []

    class Recorder:
        def __init__(self, label: str, items: str) -> None:
            bars.append((label, []))

        def step(self, done: int, total: int) -> None:
            bars[-1][1].append((done, total))

        def stop(self) -> None:
            pass

    monkeypatch.chdir(checkpoints)
    monkeypatch.setattr(progress_bars, "_Bar", Recorder)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(command, *ARGUMENTS[command]).code == 0
    assert [label for label, _ in bars] == [command]
    steps = bars[-1][1]
    assert bool(steps) == (command in COUNTED)
    assert all(done <= total for done, total in steps)
    if steps and command != "verify":  # which has read more than what it counts
        assert steps[-1][0] == steps[-1][1] > 0


@pytest.mark.parametrize(
    ("items", "step", "parts"),
    [
        ("", (3 << 20, 8 << 20), ["3.0/8.0 MiB", "/s"]),
        ("ranks", (3, 8), ["3/8", "ranks"]),
        ("", None, ["0:00:0"]),
    ],
)
def test_a_bar_on_a_terminal(
    items: str,
    step: tuple[int, int] | None,
    parts: list[str],
    terminal: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, reader = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_bars, "DELAY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    drawn = ""
    with progress("copying", items) as move:
        while "copying" not in drawn:
            drawn += os.read(reader, 1 << 16).decode()
        if step is not None:
            move(1, step[1])
            move(*step)
        while not all(part in drawn for part in parts):
            drawn += os.read(reader, 1 << 16).decode()


def test_short_work_and_work_into_a_pipe_have_no_bar(
    terminal: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bars, "DELAY_S", 0.0)
    with progress("copying") as move:
        move(1, 2)
    assert capsys.readouterr() == ("", "")
    stream, reader = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_bars, "DELAY_S", 3600.0)
    with progress("copying") as move:
        move(1, 2)
    stream.write("end")
    stream.flush()
    assert os.read(reader, 1 << 16) == b"end"
