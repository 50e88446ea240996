"""``python -m dcp_placements.run``: a trainer that is not edited, watched or with a declaration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements import PlacementError, PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.advice.block import BEGINS, ENDS, block_in
from dcp_placements.program_watch import Watch
from dcp_placements.run import RefusedStart, main
from tests.torchrun import ROOT, forked, python, tail, torchrun

TRAINER = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh


class OfMain:
    pass


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))["ep"].get_local_rank()
    whole = torch.arange(24.0).reshape(8, 3)
    weights = {"layers.0.experts.w1": whole.chunk(2)[ep].clone(), "norm.weight": torch.ones(3)}
    if "right" in sys.argv:
        weights.pop("layers.0.experts.w1")
    if "resume" in sys.argv:
        name = "layers.0.experts.w1"
        dcp.load({"model": {name: weights[name]}}, checkpoint_id="stock")
    dcp.save({"model": weights, "step": 3}, checkpoint_id="saved")
    assert sys.modules["__main__"].OfMain is OfMain
    sys.stdout.write(f"SAVED {sys.argv}\\n")  # in one piece: four ranks print
    dist.destroy_process_group()
    sys.exit(int(sys.argv[-1]))
"""
DECLARED = """
from torch.distributed.tensor import Shard
from dcp_placements import CheckpointPlacement, Placements

NUMBER = 3


def placements(meshes):
    return Placements({"experts": CheckpointPlacement(meshes["ep"], {"ep": Shard(0)})})


def no_placements(meshes):
    return {"experts": meshes["ep"]}


def other_axis(meshes):
    return Placements({"experts": CheckpointPlacement(meshes["expert"], {"expert": Shard(0)})})


def without_meshes():
    return Placements(None)
"""
WHOLE = torch.arange(24.0).reshape(8, 3)
RUN = ROOT / "dcp_placements" / "run.py"


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "ours.py").write_text(DECLARED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return what four ranks print that run a program so."""
    return forked(RUN, *arguments, cwd=Path.cwd())


def one(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return what one process prints that runs a program so."""
    return python("-m", "dcp_placements.run", *arguments)


def stored() -> torch.Tensor:
    """Return what torch reads of the experts in one process."""
    state = {"model": {"layers.0.experts.w1": torch.zeros(8, 3)}}
    dcp.load(state, checkpoint_id="saved", no_dist=True)
    return state["model"]["layers.0.experts.w1"]


@pytest.mark.dist
def test_the_alarm_refuses_what_would_be_lost(trainer: Path) -> None:
    done = ran("train.py", "0")
    assert done.returncode != 0
    assert "SAVED" not in done.stdout
    assert "model.layers.0.experts.w1: 2 different contents on 4 ranks" in done.stderr, tail(done)
    assert not (trainer / "saved" / ".metadata").exists()


@pytest.mark.dist
def test_the_declaration_of_a_refusal_is_a_file_of_its_own(trainer: Path) -> None:
    """The ranks that begin each line are not in it, and it is used as it stands."""
    done = ran("--propose", "found.py", "train.py", "0")
    assert "[rank0]: " in done.stderr
    assert done.returncode != 0
    assert done.stderr.count("run with --placements found.py:placements") == 1, tail(done)
    assert block_in((trainer / "found.py").read_text()) == (trainer / "found.py").read_text()
    assert ran("--placements", "found.py:placements", "train.py", "0").returncode == 0
    assert torch.equal(stored(), WHOLE)


def test_a_declaration_is_not_written_over_a_file(
    trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--propose", "ours.py", "train.py"])
    assert "--propose ours.py: this file exists: give another name" in capsys.readouterr().err
    assert (trainer / "ours.py").read_text() == DECLARED
    refusal = PlacementError(f"w: ...\n\n{BEGINS}\nx = 1\n{ENDS}")
    watch = Watch(propose="ours.py")  # made while the program ran
    watch.failed(refusal)
    assert "--propose ours.py: File exists: the declaration is not" in capsys.readouterr().err
    assert (trainer / "ours.py").read_text() == DECLARED


@pytest.mark.parametrize("ending", ["", "sys.exit()"])
def test_a_program_without_saves_is_told_that_nothing_was_checked(
    tmp_path: Path, ending: str
) -> None:
    (tmp_path / "quiet.py").write_text(f"import sys\n{ending}")
    done = one(str(tmp_path / "quiet.py"))
    assert (done.returncode, done.stderr.count("nothing was checked")) == (0, 1)


def test_the_program_is_what_it_is_without_run(tmp_path: Path) -> None:
    """It knows its file after it has gone elsewhere; a declaration imports what lies beside it."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "sizes.py").write_text("RANKS = 1")
    (tmp_path / "conf" / "ours.py").write_text(
        "import sizes\nfrom dcp_placements import Placements\n"
        "def placements(meshes):\n    return Placements(None)"
    )
    program = (
        "import inspect, os, sys\n"
        "import torch, torch.distributed.checkpoint as dcp\n"
        "class OfMain: pass\n"
        "os.chdir('/')\n"
        "assert os.path.isfile(__file__), __file__\n"
        "assert __loader__ is not None\n"
        "assert 'class OfMain' in inspect.getsource(OfMain)\n"
        "dcp.save({'w': torch.ones(2)}, checkpoint_id=sys.argv[1])\n"
    )
    (tmp_path / "train.py").write_text(program)
    run = ["-m", "dcp_placements.run", "--placements", "conf/ours.py:placements"]
    done = python(*run, "--report", "lines.json", "train.py", str(tmp_path / "saved"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "lines.json").read_text().splitlines()
    assert json.loads(line)["kind"] == "save"


def test_a_report_that_cannot_be_written_stops_no_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        "for number in '12':\n"
        "    dcp.save({'w': torch.ones(2)}, checkpoint_id=sys.argv[1] + number)\n"
    )
    (tmp_path / "train.py").write_text(program)
    done = one("--report", "/dev/full", str(tmp_path / "train.py"), str(tmp_path / "saved"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("/dev/full: No space left on device: no more lines") == 1
    assert (tmp_path / "saved2" / ".metadata").exists()


@pytest.mark.parametrize("options", [[], ["--strict"]], ids=["left alone", "strict"])
def test_a_planner_that_is_not_served_is_told_of(options: list[str], tmp_path: Path) -> None:
    """What it saves is not checked."""
    program = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        "class Own(dcp.DefaultSavePlanner):\n"
        "    def finish_plan(self, plan):\n"
        "        self.plan = plan\n"
        "        return plan\n"
        "dcp.save({'w': torch.ones(2)}, checkpoint_id=sys.argv[1], planner=Own())\n"
    )
    (tmp_path / "train.py").write_text(program)
    report = tmp_path / "lines.json"
    saved = tmp_path / "saved"
    done = one(*options, "--report", str(report), str(tmp_path / "train.py"), str(saved))
    assert "this save is not checked: dcp.save was called with planner=__main__.Own" in done.stderr
    if options:
        assert done.returncode != 0
        assert not (saved / ".metadata").exists()
    else:
        assert done.returncode == 0
        assert json.loads(report.read_text())["served"] is False


@pytest.mark.dist
def test_a_declaration_that_fails_on_one_rank_is_refused_on_all(trainer: Path) -> None:
    """The other ranks do not wait for it."""
    (trainer / "one.py").write_text(
        "import torch.distributed as dist\nfrom dcp_placements import Placements\n"
        "def placements(meshes):\n"
        "    if dist.get_rank() == 2:\n        raise KeyError('expert')\n"
        "    return Placements(None)"
    )
    done = ran("--placements", "one.py:placements", "train.py", "right", "0")
    assert done.returncode != 0
    assert "rank 2 cannot be placed in the checkpoint (1 fault)" in done.stderr, tail(done)
    assert "this save: the declaration fails: KeyError: 'expert'" in done.stderr
    assert re.search(r"raised:      \S+one.py:5, in placements", done.stderr)
    assert not (trainer / "saved" / ".metadata").exists()


def test_a_program_that_fails_speaks_for_itself(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("import sys\nsys.exit(3)")
    done = one(str(tmp_path / "failing.py"), "--placements", "ours.py:placements")
    assert done.returncode == 3
    assert done.stderr == (
        "dcp_placements.run: --placements ours.py:placements is for the program: an option of run "
        "stands before PROGRAM\n"
    )


@pytest.mark.dist
def test_the_alarm_is_silent_where_nothing_is_lost(trainer: Path) -> None:
    done = ran("train.py", "right", "0")
    assert done.returncode == 0, tail(done)
    assert done.stdout.count("SAVED ['train.py', 'right', '0']") == 4
    assert done.stderr == ""
    state = {"model": {"norm.weight": torch.zeros(3)}, "step": 0}
    dcp.load(state, checkpoint_id="saved", no_dist=True)
    assert state["step"] == 3
    assert state["model"]["norm.weight"].tolist() == [1, 1, 1]


@pytest.mark.dist
def test_a_declaration_puts_every_shard_where_it_belongs(trainer: Path) -> None:
    """The program's arguments and exit code are its own."""
    done = ran("--placements", "ours.py:placements", "train.py", "--save", "5")
    assert done.stdout.count("SAVED ['train.py', '--save', '5']") == 4, tail(done)
    assert done.returncode != 0  # that of a rank is in test_one_process
    assert torch.equal(stored(), WHOLE)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("no_placements", ["ours.py:no_placements returned a dict, not a Placements"]),
        ("other_axis", ["meshes['expert']", "(ep=2, edp=2) of ranks [[0, 1], [2, 3]]"]),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_at_the_save(
    trainer: Path, function: str, expected: list[str]
) -> None:
    done = ran("--placements", f"ours.py:{function}", "train.py", "0")
    assert done.returncode != 0
    for text in expected:
        assert text in done.stderr, tail(done)
    assert not (trainer / "saved" / ".metadata").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.py"], "nowhere.py cannot be read"),
        (["pipe"], "pipe cannot be read: it is no plain file"),
        (["--placements", "pipe:f", "train.py"], "pipe cannot be read: it is no plain file"),
        (["--report", "pipe", "train.py"], "--report pipe: No such device"),
        (["-m", "no_such_module"], "there is no module no_such_module"),
        (["--placements", "ours.py", "train.py"], "FUNCTION; it has placements, no_placements, "),
        (["--placements", "no.py:f", "train.py"], "no.py cannot be read: No such file"),
        (
            ["--placements", "ours.py:nothing", "train.py"],
            "of this name in ours.py; it has placements",
        ),
        (["--placements", "ours.py:NUMBER", "train.py"], "no function in ours.py"),
        (["--placements", "ours.py:Shard", "train.py"], "takes more or less than meshes alone"),
        (["--placements", "ours.py:without_meshes", "train.py"], "takes more or less than meshes"),
        (["--placements", "broken.py:f", "train.py"], "ZeroDivisionError: division by zero"),
        (["--placements", "leaving.py:f", "train.py"], "leaving.py:f: SystemExit: 0"),
        (["--report", ".", "train.py"], "--report .: Is a directory"),
        (["--report", "no/report.json", "train.py"], "--report no/report.json: No such file"),
        (["--save", "digests", "train.py"], "'digests' is not KEY=VALUE"),
        (["--save", "digests=x", "train.py"], "--save={'digests': 'x'}: digests='x'"),
        (["--save", "digest=full", "train.py"], "no option 'digest'; there is 'digests'"),
        (["--load", "exchange=True", "--load", "x=1", "train.py"], "'x'"),
    ],
    ids=str,
)
def test_what_cannot_start_is_one_line(
    trainer: Path, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (trainer / "broken.py").write_text("1 / 0")
    (trainer / "leaving.py").write_text("import sys; sys.exit(0)")
    os.mkfifo(trainer / "pipe")
    program = sys.modules["__main__"], list(sys.argv), sys.path[0]
    with pytest.raises(RefusedStart) as refused:
        main(arguments)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
    assert program == (sys.modules["__main__"], list(sys.argv), sys.path[0])


def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, pickles of classes of the program, exceptions and exit codes are as without it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 7")
    (folder / "train.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing, pickle, sys, threading
            import beside

            class Config:
                value = beside.VALUE

            def double(value):
                return value * 2

            if __name__ == "__main__":
                assert type(pickle.loads(pickle.dumps(Config()))) is Config
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(double, [beside.VALUE]))
                thread = threading.Thread(target=lambda: print("thread", double(3)))
                thread.start()
                thread.join()  # else two threads write into one line
                print(sys.argv[1:], __file__, __spec__)
                sys.exit(5 if sys.argv[1] == "exit" else KeyError("raised"))
            """
        )
    )
    (folder / "raises.py").write_text("raise KeyError('raised')")
    monkeypatch.chdir(tmp_path)
    done = one("programs/train.py", "exit")
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.splitlines()[0] == "[14]"
    assert sorted(done.stdout.splitlines()[1:]) == [
        f"['exit'] {tmp_path}/programs/train.py None",
        "thread 6",
    ]
    done = one("programs/raises.py")
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'raised'\n")
    done = one("nowhere.py")
    assert done.returncode == 2
    assert done.stderr.startswith("dcp_placements.run: nowhere.py cannot be read")


def test_a_module_is_run_as_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainers"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'package'")
    (package / "__main__.py").write_text(
        "import sys\nfrom . import NAME\nprint(NAME, __package__, __spec__.name, sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    done = one("-m", "trainers", "--x", "y")
    assert done.stdout == "package trainers trainers.__main__ ['--x', 'y']\n", tail(done)


@pytest.mark.dist
def test_a_resume_of_a_checkpoint_that_lost_experts_is_told_of_and_reported(trainer: Path) -> None:
    lost = {
        "model": {
            "layers.0.experts.w1": WHOLE[:4].clone(),
            "layers.0.router.weight": torch.zeros(8, 3),
        }
    }
    dcp.save(lost, checkpoint_id="stock", no_dist=True)
    done = ran("--save", "step=7", "--report", "lines.json", "train.py", "resume", "0")
    assert done.returncode == 0, tail(done)
    assert "stock was written without some experts" in done.stderr, tail(done)
    assert "4 of 8 experts stored" in done.stderr
    load, save = map(json.loads, (trainer / "lines.json").read_text().splitlines())
    assert (load["kind"], load["path"], load["step"]) == ("load", "stock", None)
    assert (save["kind"], save["path"], save["step"]) == ("save", "saved", 7)
    assert (save["ranks"], save["tensors"], save["objects"]) == (4, 2, 1)
    assert save["unique_nbytes"] == 4 * 12 + 12
    (warning,) = save["warnings"]  # the ranks of ep have loaded the same experts
    assert "the experts are bit for bit equal on all 2 positions along 'ep'" in warning
    assert "1 tensor, as model.layers.0.experts.w1" in warning
    assert done.stderr.count("bit for bit equal") == 1


MESHES = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from dcp_placements import PlacementError
from dcp_placements.program_meshes import ProgramMeshes

if __name__ == "__main__":
    before = init_device_mesh("cpu", (4,), mesh_dim_names=("before",))
    meshes = ProgramMeshes()
    meshes.record()
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ep", "dp", "etp"))
    nameless = init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    assert meshes["tp"].mesh.tolist() == [[0, 1], [2, 3]][rank // 2]
    assert meshes["ep"].mesh.tolist() == [[0, 2], [1, 3]][rank % 2]
    assert meshes["tp"].mesh_dim_names == ("tp",)
    assert meshes["ep", "etp"].mesh.tolist() == [[0, 1], [2, 3]]
    assert meshes.of("dp", "tp").get_coordinate() == dense.get_coordinate()
    assert meshes["ep"].get_local_rank() == rank // 2
    assert "etp" in meshes and "before" not in meshes
    for names in ("before", "dp", ("tp", "etp")):
        try:
            meshes[names]
        except PlacementError as refused:
            text = str(refused)
            assert "(dp=2, tp=2) of ranks [[0, 1], [2, 3]]" in text or names == "dp", text
            if names == "dp":  # along two ranks of the first mesh, and one of the second
                assert f"(dp=2) of ranks {[rank % 2, rank % 2 + 2]}" in text, text
                assert f"(dp=1) of ranks {[rank]}" in text, text
        else:
            raise AssertionError(names)
    dense["dp", "tp"]._flatten("world")
    assert meshes["world"].mesh.tolist() == [0, 1, 2, 3]
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.dist
def test_meshes_are_reached_by_the_names_of_their_axes(tmp_path: Path) -> None:
    (tmp_path / "meshes.py").write_text(MESHES)
    done = forked(tmp_path / "meshes.py", cwd=tmp_path)
    assert done.returncode == 0, tail(done)


def test_reports_are_plain_values(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2, 3, dtype=torch.float64), "step": 3}
    save, load = PlacementSavePlanner(), PlacementLoadPlanner()
    dcp.save(state, checkpoint_id=tmp_path, planner=save, no_dist=True)
    target = {"w": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="float64"):
        dcp.load(target, checkpoint_id=tmp_path, planner=load, no_dist=True)
    saved = json.loads(json.dumps(save.report.as_dict()))
    assert saved["keys"]["w"] == {
        **{"shape": [2, 3], "dtype": "float64", "chunks": 1},
        **{"unique_nbytes": 48, "whole_nbytes": 48, "held_nbytes": 48},
    }
    assert (saved["objects"], saved["unique_nbytes"], saved["replica_nbytes"]) == (["step"], 48, 0)
    loaded = json.loads(json.dumps(load.report.as_dict()))
    assert loaded["casts"] == {"w": "float64 -> float32"}
    assert loaded["traffic"] == {"opens": 0, "storage_nbytes": 0, "exchanged_nbytes": 0}


@pytest.mark.dist
def test_the_first_screen_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer, the message that it prints, the block, and what the file has then."""
    page = (ROOT / "README.md").read_text()
    blocks = dict(re.findall(r"```(python \w+\.py|text)\n(.*?)```", page, re.DOTALL)[2::-1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe.py").write_text(blocks["python moe.py"])
    alarm = torchrun(RUN, "--propose", "ours.py", "moe.py", ranks=2, cwd=tmp_path)
    text = re.sub(r"(?m)^\[rank0\]:(?: |$)", "", alarm.stderr)
    assert blocks["text"] in text, tail(alarm)
    block = (tmp_path / "ours.py").read_text()
    assert block == block_in(text)
    assert blocks["python ours.py"] in block.replace("\n\n\n", "\n\n").replace(
        "\n\ndef", "\n\n\ndef"
    ), block
    assert not (tmp_path / "step-1" / ".metadata").exists()
    done = forked(RUN, "--placements", "ours.py:placements", "moe.py", ranks=2, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), tail(done)
    read = {"layers.0.experts.w1": torch.zeros(8, 3, 2)}
    dcp.load(read, checkpoint_id="step-1", no_dist=True)
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        parts.append(torch.randn(4, 3, 2))
    assert torch.equal(read["layers.0.experts.w1"], torch.cat(parts))
