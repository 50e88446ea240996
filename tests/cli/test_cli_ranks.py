"""The command line on what four real gloo ranks saved, sound and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dcp_placements.testing import damage
from tests.offline_scenes import Run
from tests.torchrun import forked, tail

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "ranks" / "offline_worker.py"
W1 = "model.experts.w1"
MOMENT = "optim.state.experts.w2.exp_avg"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    done = forked(WORKER, out)
    assert done.returncode == 0, tail(done)
    return out


@pytest.mark.parametrize(
    "name", ["ours", "stock_files", "unmerged", "stock", "hf_sharded", "truth", "later"]
)
def test_all_of_them_are_sound_and_can_be_looked_into(saved: Path, run: Run, name: str) -> None:
    result = run("inspect", saved / name, "--json")
    assert result.code == 0, result.err
    assert result.json["tensors"]
    ran = run("verify", saved / name, "--contents")
    assert ran.code == 0, ran.out


def test_inspect_names_ranks_and_experts(saved: Path, run: Run) -> None:
    result = run("inspect", saved / "ours", "--experts", "--json").json
    assert result["tensors"][W1]["shape"] == [8, 5, 3]
    assert result["tensors"][W1]["ranks"] == [0, 1, 2, 3]
    assert result["provenance"]["axes"] == {"ep": 2, "fsdp": 2}
    assert result["experts"]["model.experts"]["experts"] == list(range(8))
    lost = run("inspect", saved / "stock", "--experts", "--json").json
    assert lost["experts"]["model.experts"]["experts"] == list(range(4))


@pytest.mark.parametrize(
    ("a", "b", "more"),
    [
        ("ours", "truth", ()),
        ("truth", "ours", ("--memory", "300")),
        ("ours", "stock_files", ()),
        ("ours", "unmerged", ()),
        ("stock", "ours", ("--fqn", "model.dense")),
    ],
)
def test_what_is_the_same_is_the_same(
    saved: Path, run: Run, a: str, b: str, more: tuple[str, ...]
) -> None:
    ran = run("diff", saved / a, saved / b, *more)
    assert ran.code == 0, ran.out
    assert "0 tensors" not in ran.out


def test_hugging_face_shards_hold_the_same(
    saved: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf_names.py").write_text("def model(key):\n    return 'model.' + key\n")
    monkeypatch.chdir(tmp_path)
    ran = run(
        *("diff", saved / "hf_sharded", saved / "ours", "--fqn", "model"),
        *("--rename", "hf_names:model", "--json"),
    )
    assert ran.code == 0, ran.out + ran.err
    assert ran.json["compared"]["tensors"] == 6


def test_what_differs_is_named(saved: Path, run: Run) -> None:
    result = run("diff", saved / "ours", saved / "later", "--json")
    assert result.code == 1
    kinds = {d["fqn"]: d["kind"] for d in result.json["differences"]}
    assert kinds[W1] == kinds[MOMENT] == "values"
    lost = run("diff", saved / "ours", saved / "stock", "--fqn", "model.experts")
    assert lost.code == 1
    assert "(8, 5, 3) in the first, (4, 5, 3) in the second" in lost.out


def test_doctor_counts_the_experts_that_stock_planners_left(saved: Path, run: Run) -> None:
    result = run("doctor", saved / "stock", "--mesh", "ep=2,fsdp=2", "--json")
    assert result.code == 1
    truth = load_file(saved / "truth" / "all.safetensors")
    for fqn, tensor in result.json["tensors"].items():
        assert tensor["verdict"] == "overwritten"
        assert (tensor["stored"], tensor["experts"]) == (4, truth[fqn].shape[0])
    assert len(result.json["tensors"]) == 6


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "ours", tmp_path / "copy"))


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (damage.flip_bit, "checksum"),
        (damage.truncate, "truncated_file"),
        (damage.remove_file, "missing_file"),
        (damage.drop_chunk, "hole"),
        (damage.overlap_chunk, "overlap"),
    ],
)
@pytest.mark.parametrize("fqn", [W1, MOMENT])
def test_every_damage_is_found_and_named(
    copy: Path, run: Run, harm: Any, kind: str, fqn: str
) -> None:
    harm(copy, fqn, chunk=2)
    result = run("verify", copy, "--contents", "--json")
    assert result.code == 1
    (fault,) = [fault for fault in result.json["faults"] if fault["kind"] == kind]
    assert fqn in fault["tensors"]


def test_a_half_overwritten_step_is_found(saved: Path, tmp_path: Path, run: Run) -> None:
    copy = Path(shutil.copytree(saved / "stock_files", tmp_path / "copy"))
    names = damage.half_overwrite(copy, saved / "later")
    result = run("verify", copy, "--contents", "--json")
    assert result.code == 1
    faults = result.json["faults"]
    assert {file for fault in faults for file in fault["files"]} == set(names)
    assert "mixed_generations" in {fault["kind"] for fault in faults}


def test_metadata_of_ranks_is_merged(saved: Path, tmp_path: Path, run: Run) -> None:
    copy = Path(shutil.copytree(saved / "unmerged", tmp_path / "copy"))
    assert run("merge-metadata", copy).code == 0
    assert (copy / ".metadata").exists()
    assert run("diff", copy, saved / "ours").code == 0
    (copy / "__3.metadata").unlink()
    (copy / ".metadata").unlink()
    ran = run("merge-metadata", copy)
    assert ran.code == 1
    assert "no rank stored" in ran.err
    assert not (copy / ".metadata").exists()
