"""``transfer``: who sends what to whom, as text and as JSON."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, Placements, Renumber, Replace
from tests.offline_scenes import Run, save_sharded

RULES = "tests.offline_scenes:rules_by_ep"
without_module = Replace("module", "")


def test_text_and_json_have_the_same_pairs(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    given = ("--rules", RULES, "--mesh", "ep=4", "--target-rules", RULES, "--target-mesh", "ep=2")
    ran = run("transfer", tmp_path, *given, "--apart")
    assert ran.code == 0, ran.err
    assert "copied within a rank" in ran.out
    found = run("transfer", tmp_path, *given, "--apart", "--json").json
    assert found["source"] == {"ep": 4}
    assert {pair["target"] for pair in found["pairs"]} == {4, 5}
    assert found["sent_bytes"] == sum(pair["bytes"] for pair in found["pairs"])
    together = run("transfer", tmp_path, *given, "--json").json
    assert together["copied_bytes"] > 0
    total = together["sent_bytes"] + together["copied_bytes"]
    assert total == found["sent_bytes"]


def misspelt(mesh: Any) -> Placements:
    rename = Renumber("expert.{}", [0], total=None)
    return Placements({"expert": CheckpointPlacement(mesh, {"ep": Shard(0)})}, rename=rename)


def test_declarations_that_match_no_key_are_findings(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    wrong = "tests.transfer.test_transfer_command:misspelt"
    given = ("--rules", RULES, "--mesh", "ep=4", "--target-rules", wrong, "--target-mesh", "ep=2")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = run("transfer", tmp_path, *given, "--rename", f"{__name__}:without_module")
        document = run("transfer", tmp_path, *given, "--json")
    assert ran.code == document.code == 1
    assert "look at the source (1 note)\nrename=Replace('module'): no key on any" in ran.err
    assert "look at the target (1 note)\n'expert', rename=Renumber('expert.{}')" in ran.err
    assert "for 'expert', 'expert' is no component of any key; 'experts' is" in ran.err
    assert "UserWarning" not in ran.err
    assert ".py" not in ran.err
    assert document.json["unmatched"] == ["target: expert", "target: rename=Renumber('expert.{}')"]


def test_an_unknown_axis_cannot_be_looked_at(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path)
    given = ("--rules", RULES, "--mesh", "ep=4", "--target-rules", RULES, "--target-mesh", "tp=2")
    assert run("transfer", tmp_path, *given).code == 2


def test_a_picture_and_a_clear_error_without_matplotlib(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    save_sharded(tmp_path / "ckpt")
    given = ("--rules", RULES, "--mesh", "ep=4", "--target-rules", RULES, "--target-mesh", "ep=2")
    picture = tmp_path / "pairs.svg"
    ran = run("transfer", tmp_path / "ckpt", *given, "-o", picture)
    assert ran.code == 0, ran.err
    assert "copied within a rank" in picture.read_text()
    named = run("transfer", tmp_path / "ckpt", *given, "-o", tmp_path / "pairs.gif")
    assert named.code == 2
    assert "ends in .png or .svg" in named.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = run("transfer", tmp_path / "ckpt", *given, "-o", tmp_path / "other.png")
    assert without.code == 2
    assert "pip install" in without.err
    assert not (tmp_path / "other.png").exists()
