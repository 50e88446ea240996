"""The command line: exit codes, where things are printed, what it needs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_placements import presets
from dcp_placements.cli.app import PRESETS
from dcp_placements.names.renames import Renames
from dcp_placements.offline import open_source
from dcp_placements.presets import hub
from dcp_placements.testing import damage
from tests.offline_scenes import (
    Run,
    save_hugging_face,
    save_sharded,
    save_torch_dist,
    wholes,
)
from tests.storage_scenes import save_alone


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    save_sharded(path)
    return path


def test_version(run: Run) -> None:
    ran = run("--version")
    assert ran.code == 0
    printed = re.fullmatch(r"dcp-placements \S+, torch (\S+)\n", ran.out)
    assert printed
    # Wheels of the index do not name the CUDA of their torch.
    assert printed[1] in (torch.__version__, torch.__version__.partition("+")[0])


RULES = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=4")
FQN = "layers.0.experts.w1"

COMMANDS: dict[str, tuple[Any, ...]] = {
    "inspect": ("it",),
    "verify": ("it", "--contents"),
    "diff": ("it", "it"),
    "rehearse": ("it", *RULES),
    "doctor": ("it", "--experts-per-layer", 8),
    "draw": ("it", FQN, "-o", "drawn.svg"),
    "stock-metadata": ("it",),
    "megatron": ("it",),
    "import": ("it", "imported"),
    "export": ("it", "exported"),
    "reshard": ("it", "resharded", *RULES),
}


def damaged(damages: Callable[[Path, str], object]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        save_sharded(path, lean=False, digests="off")
        damages(path, FQN)

    return make


def hostile(path: Path) -> None:
    save_sharded(path)
    damage.foreign_pickle(path, path.parent / "executed")


EXIT_CODES: dict[str, tuple[Callable[[Path], object], str]] = {
    # by command, in the order of COMMANDS: 0 sound or done, 1 not sound, 2 could not
    "stock": (lambda path: save_sharded(path, lean=False, digests="off"), "000000 02100"),
    "ours": (save_sharded, "000000 02100"),
    "ranks": (lambda path: save_alone(path, 0, wholes()), "222222 22222"),
    "torch_dist": (save_torch_dist, "000110 22102"),
    "safetensors": (lambda path: save_hugging_face(path, wholes()), "000000 22000"),
    "truncated": (damaged(damage.truncate), "011000 02111"),
    "removed": (damaged(damage.remove_file), "011100 02111"),
    "hole": (damaged(damage.drop_chunk), "011100 02111"),
    "overlap": (damaged(damage.overlap_chunk), "011000 02111"),
    "hostile": (hostile, "222222 22222"),
    "empty": (Path.mkdir, "222222 22222"),
    "file": (Path.touch, "222222 22222"),
    "missing": (lambda path: None, "222222 22222"),
}
"""A checkpoint of each kind, and the exit code of each command on it."""


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_the_exit_code_of_every_command_on_every_checkpoint(
    kind: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, expected = EXIT_CODES[kind]
    make(tmp_path / "it")
    found = {}
    for command, arguments in COMMANDS.items():
        if command == "draw" and kind == "torch_dist":
            arguments = ("it", sorted(open_source("it").tensors)[0], "-o", "drawn.svg")
        ran = run(command, *arguments)
        found[command] = ran.code
        assert "Traceback" not in ran.err
        assert (ran.out == "") == (ran.code == 2 or (ran.code == 1 and command not in REPORTS))
        assert ran.out or ran.err.count("dcp-placements: ") == 1
        if command in REPORTS or ran.code:
            assert isinstance(run(command, *arguments, "--json").json, dict)
    codes = [int(code) for code in expected.replace(" ", "")]
    assert found == dict(zip(COMMANDS, codes, strict=True))
    assert not (tmp_path / "executed").exists()


REPORTS = {"inspect", "verify", "diff", "rehearse", "doctor", "draw"}
"""Commands whose exit code 1 has a result; others refuse and write nothing."""


def test_help_names_the_presets(run: Run) -> None:
    placements = sorted(set(presets.__all__) - {"megatron_meshes"})
    renames = sorted(name for name, value in vars(hub).items() if isinstance(value, Renames))
    named = [text.split(", ") for text in PRESETS.values()]
    assert named == [placements, renames]
    result = " ".join(run("--help").out.split())
    assert all(text in result for text in PRESETS.values())


def test_help_version_and_completion_of_commands_need_no_torch() -> None:
    program = (
        "import sys\n"
        "from dcp_placements.cli import main\n"
        "assert main(['--help']) == main(['--version']) == 0\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    completing = {
        "_DCP_PLACEMENTS_COMPLETE": "bash_complete",
        "COMP_WORDS": "dcp-placements ve",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "dcp_placements"],
        env={**os.environ, **completing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["plain,verify"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("verify", "nowhere"), "CannotLook", "there is no such path"),
        (("verify", "nowhere", "--nonsense"), "UsageError", "--nonsense"),
        (("diff", "nowhere"), "UsageError", "B"),
    ],
)
def test_errors_of_json_are_json(
    arguments: tuple[str, ...], kind: str, message: str, run: Run
) -> None:
    ran = run(*arguments, "--json")
    assert ran.code == 2
    assert ran.json["error"]["type"] == kind
    assert message in ran.json["error"]["message"]
    assert ran.err


def test_a_parent_of_checkpoints_names_them(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "step-10")
    ran = run("inspect", tmp_path)
    assert ran.code == 2
    assert "step-10" in ran.err


def test_without_the_extra_one_line_says_how_to_install_it(sound: Path) -> None:
    program = (
        "import sys; sys.modules['click'] = None\n"
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


def test_what_looks_like_a_checkpoint_and_is_none_is_said(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "cut_off")
    (tmp_path / "cut_off" / ".metadata").unlink()
    assert "a save that was cut off" in run.fails("verify", tmp_path / "cut_off")
    (tmp_path / "legacy" / "mp_rank_00").mkdir(parents=True)
    ran = run("inspect", tmp_path / "legacy")
    assert ran.code == 1
    assert "mp_rank_00/model_optim_rng.pt: incomplete: there is no such file" in ran.err


@pytest.mark.parametrize("size", ["lots", "-1", "1XB"])
def test_a_size_of_memory_that_is_none(sound: Path, run: Run, size: str) -> None:
    run.fails("diff", sound, sound, "--memory", size)


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_a_reader_of_the_first_lines_only_changes_no_exit_code(
    sound: Path, tmp_path: Path, same: bool, code: int
) -> None:
    dcp.save({**wholes(), "step": 1 if same else 2}, checkpoint_id=tmp_path)
    command = [sys.executable, "-m", "dcp_placements", "diff", str(sound), str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == code


def test_an_error_into_a_closed_pipe_is_exit_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dcp_placements", "inspect", str(tmp_path / "nothing")]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=writer, timeout=100, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 2


def test_output_that_has_no_room_is_exit_2_with_the_reason(sound: Path) -> None:
    command = [sys.executable, "-m", "dcp_placements", "inspect", str(sound), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "dcp-placements: [Errno 28] No space left on device\n"


def test_a_mesh_without_an_axis_of_the_rules_is_exit_2(sound: Path, run: Run) -> None:
    rules = ("--rules", "tests.offline_scenes:rules_by_ep")
    assert "no axis 'ep'" in run.fails("rehearse", sound, *rules, "--mesh", "tp=2")


MISTYPED = {"experts": Shard(0)}


def plain(mesh: Any) -> Any:
    """Return rules of placements without their mesh."""
    return MISTYPED


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--rules", "rules.py:rules", "names a file, not a module"),
        ("--rules", "rules.py:rules", "way out:     rules:rules, in the directory ., or with that"),
        ("--rules", "jobs/moe.py:f", "way out:     moe:f, in the directory jobs, or with that in"),
        ("--rules", f"{__name__}:MISTYPED", f"{__name__}:MISTYPED is of type dict, no function"),
        ("--rules", f"{__name__}:none", f"{__name__} has no function none"),
        ("--rules", f"{__name__}:plain", "plain returns rules that cannot be used: rule 'experts'"),
        ("--mesh", "ep=0", "'ep=0' is no mesh, 'ep=0' is not axis=size with a size of 1 and more"),
        ("--mesh", "ep=2,edp", "'edp' is not axis=size with a size of 1 and more: write for"),
        ("--mesh", "ep=2,ep=2", "it names axis 'ep' twice"),
    ],
)
def test_rules_and_meshes_of_a_wrong_form(
    sound: Path, run: Run, option: str, value: str, message: str
) -> None:
    given = {"--rules": "tests.offline_scenes:rules_by_ep", "--mesh": "ep=4", option: value}
    err = run.fails("rehearse", sound, *[text for pair in given.items() for text in pair])
    assert message in err


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory", "missing"])
def test_a_list_of_keys_that_is_no_plain_file_is_refused_at_once(
    sound: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A FIFO would be waited for, and a device has no end."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("keys")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    err = run.fails("rehearse", sound, *RULES, "--expect", path)
    why = "No such file" if kind == "missing" else "it is no plain file"
    assert f"{path}: no list of keys" in err
    assert why in err
    assert len(err.splitlines()) == 1
