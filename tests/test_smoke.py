"""The smoke's cases that nothing else runs: saves in the background, tensor parallelism."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).parent.parent / "scripts" / "ep_smoke.py"
CASES = ("ep2-thread", "ep2-process", "tp2xep2")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("smoke") / "report.json"
    command = [sys.executable, str(SCRIPT), "--planner=placements", "--nproc=4", f"--report={file}"]
    done = subprocess.run(
        [*command, *(f"--case={case}" for case in CASES)],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("check", ["save_load", "continue"])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_back_and_training_goes_on_bit_for_bit(
    report: dict[str, Any], case: str, check: str
) -> None:
    """Moments and steps included; the file as torch's default planner reads it."""
    (entry,) = [e for e in report["cases"] if (e["case"], e["check"]) == (case, check)]
    assert entry["errors"] == {}
    assert entry["warnings"] == []
    compared = [*entry["ranks"], *([entry["oracle"]] if check == "save_load" else [])]
    assert len(entry["ranks"]) == 4
    for each in compared:
        assert each["tensors_compared"] > 300
        assert each["unequal"] == each["missing_keys"] == each["shape_mismatches"] == []
        assert each["max_delta"] == 0.0
    assert all(rank["loaded_step"] == rank["saved_step"] == 3 for rank in entry["ranks"])
