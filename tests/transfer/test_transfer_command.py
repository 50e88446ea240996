"""``transfer``: who sends what to whom, as text and as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.offline_scenes import Run, save_sharded

RULES = "tests.offline_scenes:rules_by_ep"


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
