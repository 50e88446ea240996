"""Each bench runs in its smallest configuration, and writes what its docstring says it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def bench(name: str, tmp_path: Path, *more: str) -> tuple[str, dict[str, Any]]:
    file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"bench_{name}.py", "--tiny", "--json", file, *more],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("bench-")]
    assert not left, "temporary directories are removed"
    return done.stdout, json.loads(file.read_text())


@pytest.mark.parametrize("name", [pytest.param("plan", marks=pytest.mark.rare), "restart"])
def test_a_bench_runs_without_faults(name: str, tmp_path: Path) -> None:
    printed, report = bench(name, tmp_path)
    assert printed
    assert {"machine", "options", "seconds"} <= set(report)
    assert not report.get("faults")


@pytest.mark.dist
@pytest.mark.rare
def test_bench_io_reports_both_sides_and_the_raw_cost(tmp_path: Path) -> None:
    where = ("--directory", str(tmp_path))
    _, report = bench("io", tmp_path, "--cases", "small", "reshard", *where)
    cases = report["directories"][str(tmp_path)]
    assert set(cases) == {"small", "reshard"}
    assert all({"stock", "ours", "raw"} <= set(entry["sides"]) for entry in cases.values())


@pytest.mark.dist
@pytest.mark.rare
def test_a_bench_that_counts_bytes_misses_no_bound(tmp_path: Path) -> None:
    _, report = bench("load", tmp_path)
    assert report["cases"]
    assert report["missed"] == []


def test_the_page_has_a_command_for_every_bench() -> None:
    text = (SCRIPTS / "README.md").read_text()
    benches = {file.stem.removeprefix("bench_") for file in SCRIPTS.glob("bench_*.py")}
    for bench in benches - {"common", "planning", "workloads"}:
        assert f"`scripts/bench {bench}" in text, bench
