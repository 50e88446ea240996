"""Progress bars: which commands show one, what it counts, and that a pipe gets none of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_placements.cli import commands
from dcp_placements.cli.printing import progress
from dcp_placements.testing.megatron import MegatronModel, MegatronRun, write_legacy
from tests.cli.test_cli import COMMANDS
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes

COUNTED = {"megatron", "verify", "diff", "rehearse", "import", "export", "reshard"}
"""Commands that know how much there is to do."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_bar_that_ends_at_all_of_it(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[str, list[tuple[int, int]]]] = []

    @contextmanager
    def recorded(label: str, items: str = "") -> Iterator[Callable[[int, int], None]]:
        bars.append((label, []))
        yield lambda done, total: bars[-1][1].append((done, total))

    monkeypatch.chdir(tmp_path)
    if command == "megatron":
        write_legacy("it", MegatronModel(layers=2), MegatronRun(tp=2), args=True)
    elif command == "import":
        save_hugging_face(Path("it"), wholes())
    else:
        save_sharded(Path("it"))
    monkeypatch.setattr(commands, "progress", recorded)
    assert run(command, *COMMANDS[command]).code == 0
    assert [label for label, _ in bars] == [command]
    steps = bars[-1][1]
    assert bool(steps) == (command in COUNTED)
    assert all(done <= total for done, total in steps)
    if steps and command != "verify":  # which has read more than what it counts
        assert steps[-1][0] == steps[-1][1] > 0


@pytest.mark.parametrize(
    ("items", "step", "parts"),
    [
        ("bytes", (3 << 20, 8 << 20), ["3.0/8.0 MiB", "/s"]),
        ("ranks", (3, 8), ["3/8", "ranks"]),
        ("", None, ["0:00:0"]),
    ],
)
def test_a_bar_on_a_terminal(
    items: str, step: tuple[int, int] | None, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.openpty()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    drawn = ""
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("copying", items) as move:
            if step is not None:
                move(1, step[1])
                move(*step)
            while not all(part in drawn for part in ["copying", *parts]):
                drawn += os.read(reader, 1 << 16).decode()
    os.close(reader)


def test_a_pipe_has_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("copying") as move:
        move(1, 2)
    assert capsys.readouterr() == ("", "")
