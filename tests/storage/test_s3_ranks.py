"""Four real gloo ranks and a bucket: what they save there, any of their meshes loads.

One launch of ``tests/ranks/s3_worker.py`` runs all scenarios and writes what each rank read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_placements import PlacementFileSystemReader
from tests.offline_scenes import Run
from tests.ranks.s3_worker import wholes
from tests.remote_scenes import bucket
from tests.storage_scenes import load, same
from tests.torchrun import forked, tail

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "ranks" / "s3_worker.py"
Ranks = list[dict[str, Any]]


def start(out: Path, url: str, *chosen: str) -> Ranks:
    """Return what each rank reports of all scenarios."""
    done = forked(WORKER, out, url, *chosen, modules="s3fs")
    assert done.returncode == 0, tail(done)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def url(s3_server: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        yield f"{bucket(s3_server, patched)}/ranks"


@pytest.fixture(scope="module")
def outcomes(url: str, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return start(tmp_path_factory.mktemp("ranks"), url)


def seen(outcomes: Ranks, name: str) -> Ranks:
    reports = [outcome[name] for outcome in outcomes]
    assert not [report["failed"] for report in reports if "failed" in report]
    return reports


def assert_whole(path: str, start: int) -> None:
    """Check the whole tensors, as torch's default planner reads them in one process."""
    expected = wholes(start)
    blank = {name: torch.zeros_like(whole) for name, whole in expected.items()}
    read = load(Path("none"), blank, PlacementFileSystemReader(path))
    assert [name for name in expected if not same(read[name], expected[name])] == []


def test_what_four_ranks_save_any_mesh_loads(outcomes: Ranks, url: str, run: Run) -> None:
    for rank in seen(outcomes, "resharded"):
        assert [rank[ep]["differing"] for ep in ("ep2", "ep4", "ep1")] == [[], [], []]
    assert_whole(f"{url}/resharded", 5)
    ran = run("verify", f"{url}/resharded", "--contents", "--json")
    assert (ran.code, ran.json["faults"]) == (0, []), ran.err
