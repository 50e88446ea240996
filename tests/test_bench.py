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


@pytest.mark.bench
def test_bench_plan_plans_the_same_boxes_as_stock_and_reports_both_costs(tmp_path: Path) -> None:
    printed, report = bench("plan", tmp_path)
    assert "Coordinator" in printed
    assert "w4" in printed
    assert {"machine", "options", "seconds", "exponents"} <= set(report)
    assert report["faults"] == []
    cells = {(e["workload"], e["ranks"], e["side"]): e for e in report["coordinator"]}
    assert set(cells) == {("w4", n, side) for n in (4, 8) for side in ("ours", "stock")}
    for entry in cells.values():
        assert entry["kind"] == "measured"
        assert entry["warnings"] == []
        parts = entry["unpickle_s"] + entry["plan_s"] + entry["pickle_s"]
        assert entry["cpu_s"] == pytest.approx(parts)
        assert entry["gathered_bytes"] > 0
        assert entry["scattered_bytes"] > 0
        assert entry["metadata_bytes"] > 0
        assert entry["rss_bytes"] >= 0
        assert entry["digest_bytes"] < entry["gathered_bytes"]
    assert [(e["workload"], e["ranks"]) for e in report["rank"]] == [("w4", 4), ("w4", 8)]
    for entry in report["rank"]:
        names = {"local_ms", "flatten_ms", "finish_ms", "load_ms", "reshard_ms"}
        names |= {"local_bytes", "load_bytes"}
        assert names | {"local_off_ms"} <= set(entry["ours"])
        assert names <= set(entry["stock"])
    assert set(report["exponents"]["w4"]) == {"ours", "stock"}


@pytest.mark.bench
def test_bench_digests_reports_the_share_of_each_kind(tmp_path: Path) -> None:
    printed, report = bench("digests", tmp_path)
    assert "sampled" in printed
    assert {"machine", "options", "seconds"} <= set(report)
    assert set(report["cases"]) == {"big", "small"}
    for entry in report["cases"].values():
        assert entry["rounds"] >= 1
        for kind in ("off", "sampled", "full"):
            names = {"save_s", "save_cpu_s", "plan_cpu_s"}
            names |= {"whole_percent", "added_percent", "added_cpu_percent"}
            assert set(entry[kind]) == names


@pytest.mark.dist
@pytest.mark.bench
def test_bench_io_reports_both_sides_and_the_raw_cost(tmp_path: Path) -> None:
    where = ("--directory", str(tmp_path))
    printed, report = bench("io", tmp_path, "--cases", "small", "reshard", *where)
    assert "small" in printed
    assert "of raw" in printed
    assert {"machine", "options", "seconds"} <= set(report)
    assert set(report["directories"]) == {str(tmp_path)}
    cases = report["directories"][str(tmp_path)]
    assert set(cases) == {"small", "reshard"}
    for entry in cases.values():
        assert {"stock", "ours", "raw"} <= set(entry["sides"])
        for side in entry["sides"].values():
            for what, part in (("save", "write"), ("load", "read")):
                names = ("s", "plan_s", f"{part}_s", "finish_s", "rss_bytes", "bytes", "opens")
                names += ("cpu_s", "of_raw", "ratio")
                assert {f"{what}_{name}" for name in names} <= set(side)
        assert {side["rounds"] for side in entry["sides"].values()} == {1}
        assert entry["sides"]["stock"]["save_ratio"] == 1
        assert entry["sides"]["raw"]["load_of_raw"] == 1
        assert entry["sides"]["raw"]["save_bytes"] >= entry["nbytes"] / 2


@pytest.mark.dist
@pytest.mark.bench
def test_bench_exchange_reads_unique_bytes_once(tmp_path: Path) -> None:
    printed, report = bench("exchange", tmp_path)
    assert "read/unique" in printed
    assert {"machine", "options", "seconds", "missed", "cases"} <= set(report)
    assert report["missed"] == []
    assert set(report["cases"]) == {"hsdp", "experts", "plain"}
    for case in report["cases"].values():
        ratios = {
            k: side["all_read_bytes"] / case["unique_bytes"] for k, side in case["sides"].items()
        }
        assert ratios["exchange"] < 1.01
        assert min(ratios["stock"], ratios["ours"]) > 1.9
        assert case["sides"]["exchange"]["exchanged_bytes"] > 0
        assert all(side["load_s"] > 0 for side in case["sides"].values())


@pytest.mark.dist
@pytest.mark.bench
def test_bench_load_counts_files_calls_and_bytes_of_both_sides(tmp_path: Path) -> None:
    printed, report = bench("load", tmp_path)
    assert "same topology" in printed
    assert {"machine", "options", "seconds", "missed", "cases"} <= set(report)
    assert report["missed"] == []
    assert set(report["cases"]) == {"fsdp", "hsdp", "norms", "w1", "w4"}
    for case, sides in report["cases"].items():
        assert {"stock", "lowest", "ours"} <= set(sides)
        for side in sides.values():
            assert side["opens"] >= 1
            assert side["written"] >= 1
        assert sides["ours"]["opens"] <= sides["stock"]["opens"]
        if case in ("fsdp", "hsdp", "norms"):
            assert sides["ours"]["reads"] < sides["stock"]["reads"]
            assert sides["ours"]["read_bytes"] < sides["stock"]["read_bytes"]
    assert report["cases"]["norms"]["ours"]["small_ratio"] <= 1.1


@pytest.mark.bench
def test_bench_restart_reports_saves_and_loads_of_all_sides(tmp_path: Path) -> None:
    printed, report = bench("restart", tmp_path)
    assert "Save" in printed
    assert "Load" in printed
    assert report["faults"] == []
    [entry] = report["entries"]
    assert (entry["workload"], entry["ranks"]) == ("w1", 8)
    assert entry["factor"] > 1
    for side in ("ours", "index", "stock"):
        cost = entry[side]
        assert cost["gathered_bytes"] > cost["rank_bytes"] > 0
        assert cost["join_s"] > 0
        assert cost["write_rss_bytes"] >= 0
        for kind in ("same", "resharded") if side != "stock" else ("same",):
            assert cost[kind]["read_bytes"] > 0
            assert {"read_s", "plan_s", "look_up_s", "read_rss_bytes"} <= set(cost[kind])
    assert entry["index"]["metadata_bytes"] < entry["ours"]["metadata_bytes"] / 4
    assert entry["ours"]["metadata_bytes"] < entry["stock"]["metadata_bytes"]


@pytest.mark.bench
def test_bench_transfer_plans_both_cases(tmp_path: Path) -> None:
    printed, report = bench("transfer", tmp_path)
    assert "a rank's part" in printed
    assert set(report["cases"]) == {"same", "engine"}
    for case in report["cases"].values():
        assert case["plan_s"] > 0
        assert case["longest_part_s"] >= case["part_s"] > 0
        assert case["messages"] >= case["pairs"] >= 8
        assert case["nbytes"] > 0


@pytest.mark.bench
def test_bench_page_writes_what_a_bench_prints_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark = "<!-- bench digests -->\nold\n<!-- end of bench digests -->\n"
    page.write_text(f"before\n{mark}after\n")
    command = [sys.executable, SCRIPTS / "bench_page.py", "digests", "--tiny", "--page", page]
    subprocess.run(command, check=True, timeout=400, env={**os.environ, "TMPDIR": str(tmp_path)})
    text = page.read_text()
    assert text.startswith(
        "before\n<!-- bench digests -->\n`scripts/bench digests --tiny`, commit "
    )
    assert "sampled" in text
    assert "old" not in text
    assert text.endswith("```\n<!-- end of bench digests -->\nafter\n")
    command[2] = "no-such"
    assert subprocess.run(command, check=False, capture_output=True).returncode == 2


def test_bench_page_shows_the_worlds_of_several_reports_in_one_table(tmp_path: Path) -> None:
    load = dict.fromkeys(("read_bytes", "read_s", "plan_s", "look_up_s", "read_rss_bytes"), 1.5)
    names = "gathered_bytes", "rank_bytes", "join_s", "metadata_bytes", "write_rss_bytes"
    side = dict.fromkeys(names, 2.5) | {"same": load}
    files = []
    for ranks in (4096, 64):
        entry = {"workload": "w2", "ranks": ranks, "tensors": 5, "chunks": 7, "factor": 3}
        report = {
            "machine": {"cores": 2, "memory_gb": 25, "load_average": 1.5, "torch": "2.13.0"},
            "commit": f"commit{ranks}",
            "options": {"workloads": ["w2"], "ranks": [ranks]},
            "faults": [],
            "entries": [entry | dict.fromkeys(("ours", "index", "stock"), side)],
        }
        files.append(tmp_path / f"{ranks}.json")
        files[-1].write_text(json.dumps(report))
    page = tmp_path / "page.md"
    page.write_text("<!-- bench restart -->\nold\n<!-- end of bench restart -->\n")
    command = [sys.executable, SCRIPTS / "bench_page.py", "restart", "--page", page, "--show"]
    subprocess.run([*command, *files], check=True, timeout=400)
    text = page.read_text()
    assert "--workloads w2 --ranks 4096`, commit commit4096," in text
    assert "--workloads w2 --ranks 64`, commit commit64," in text
    lines = [line.split()[:4] for line in text.splitlines() if line.startswith("w2")]
    assert lines[:3] == [["w2", "64", side, "7"] for side in ("ours", "index")] + [
        ["w2", "64", "stock", "x"]
    ]
    assert lines[3:5] == [["w2", "4,096", side, "7"] for side in ("ours", "index")]
    assert len(lines) == 12
    files[0].write_text(files[0].read_text().replace('"faults": []', '"faults": ["wrong"]'))
    assert subprocess.run([*command, *files], check=False, capture_output=True).returncode == 1
    assert page.read_text() == text, "a world with faults is not shown"


def test_the_page_has_marks_for_every_bench() -> None:
    text = (SCRIPTS / "README.md").read_text()
    benches = {file.stem.removeprefix("bench_") for file in SCRIPTS.glob("bench_*.py")}
    for bench in benches - {"common", "page", "planning", "workloads"}:
        assert f"<!-- bench {bench} -->" in text, bench
        assert f"<!-- end of bench {bench} -->" in text, bench
