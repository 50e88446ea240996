"""The command line: exit codes, where things are printed, what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.offline_scenes import Run, save_sharded, wholes


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    save_sharded(path)
    return path


COMMANDS_ON_ONE = ["inspect", "merge-metadata"]


@pytest.mark.parametrize("command", COMMANDS_ON_ONE)
def test_what_cannot_be_looked_at_is_one_message_and_exit_2(
    command: str, tmp_path: Path, run: Run
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.write_bytes(b"x")
    for path, told in (
        (tmp_path / "nothing", "there is no such path"),
        (empty, "no checkpoint in it" if command != "merge-metadata" else "nothing to merge"),
        (file, "this is a file"),
    ):
        ran = run(command, path)
        assert (ran.code, ran.out) == (2, "")
        assert told in ran.err
        assert "Traceback" not in ran.err


def test_usage_errors_are_exit_2(run: Run, sound: Path) -> None:
    for arguments in ((), ("nonsense",), ("inspect",), ("inspect", sound, "--nonsense")):
        ran = run(*arguments)
        assert ran.code == 2
        assert ran.out == "" or not arguments


def test_a_parent_of_checkpoints_names_them(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "step-10")
    ran = run("inspect", tmp_path)
    assert ran.code == 2
    assert "step-10" in ran.err


def test_without_the_extra_one_line_says_how_to_install_it(sound: Path) -> None:
    program = (
        "import sys; sys.modules['typer'] = None\n"
        "from dcp_placements.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(sound)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "pip install 'dcp-placements[cli]'" in done.stderr


def test_piped_output_is_not_cut_to_a_width(tmp_path: Path, run: Run) -> None:
    long = "layers.0." + "very_long_name." * 12 + "weight"
    dcp.save({long: wholes()["layers.0.norm"]}, checkpoint_id=tmp_path)
    (line,) = [line for line in run("inspect", tmp_path).out.splitlines() if long in line]
    assert "bfloat16" in line


def test_merge_metadata(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path, collectives=False)
    assert not (tmp_path / ".metadata").exists()
    ran = run("merge-metadata", tmp_path, "--json")
    assert ran.code == 0
    assert ran.json["keys"] == len(wholes()) + 1
    assert (tmp_path / ".metadata").exists()
    assert run("inspect", tmp_path).code == 0
