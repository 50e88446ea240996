"""The command line: exit codes, where things are printed, what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch.distributed.checkpoint as dcp

from tests.offline_scenes import Run, save_sharded, wholes


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    save_sharded(path)
    return path


COMMANDS_ON_ONE = ["inspect", "verify", "merge-metadata"]


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


def test_what_looks_like_a_checkpoint_and_is_none_is_said(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "cut_off")
    (tmp_path / "cut_off" / ".metadata").unlink()
    ran = run("verify", tmp_path / "cut_off")
    assert (ran.code, ran.out) == (2, "")
    assert "cut off before it wrote .metadata" in ran.err
    (tmp_path / "legacy" / "mp_rank_00").mkdir(parents=True)
    ran = run("inspect", tmp_path / "legacy")
    assert ran.code == 2
    assert "dcp-placements megatron" in ran.err


@pytest.mark.parametrize("size", ["lots", "-1", "1XB"])
def test_a_size_of_memory_that_is_none(sound: Path, run: Run, size: str) -> None:
    ran = run("diff", sound, sound, "--memory", size)
    assert (ran.code, ran.out) == (2, "")


def test_urls_of_fsspec_are_looked_at(sound: Path, run: Run) -> None:
    files = fsspec.filesystem("memory")
    for file in sound.iterdir():
        files.pipe(f"/far/{file.name}", file.read_bytes())
    ran = run("verify", "memory://far", "--digests", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert run("diff", sound, "memory://far").code == 0
    assert run("inspect", "memory://nothing").code == 2


def test_a_reader_of_the_first_lines_only_is_no_error(sound: Path) -> None:
    command = [sys.executable, "-m", "dcp_placements", "inspect", str(sound), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
