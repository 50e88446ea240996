"""The walks of the guide: the functions that it names run, in the order in which it names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import dcp_placements
from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    Placements,
)
from dcp_placements.testing import FakeDTensor, World

PACKAGE = Path(dcp_placements.__file__).parent
WALKS = (PACKAGE / "README.md").read_text().partition("## A walk for the reader")[2]
STEP = re.compile(r"^\d+\. \[.*?\]\((\S+\.py)\) `([\w.]+)`", re.MULTILINE)


WORLD = World(4)


def ranks(rank: int) -> tuple[dict[str, Any], Placements]:
    """Return an expert of ep 2 x fsdp 2, and its rules."""
    mesh = WORLD.mesh(rank, ep=2, fsdp=2)
    expert = FakeDTensor(torch.full((1, 3), float(rank)), mesh["fsdp"], [Shard(0)], (2, 3))
    rules = {"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})}
    return {"experts.w1": expert}, Placements(rules)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """What runs in a save and in a load, as file and name, in the order of the first calls."""
    path = tmp_path_factory.mktemp("walk") / "step-1"
    seen: dict[str, dict[tuple[str, str], None]] = {"save": {}, "load": {}}

    def run(part: str) -> None:
        def note(frame: FrameType, event: str, arg: Any) -> None:
            file = Path(frame.f_code.co_filename)
            if event == "call" and file.is_relative_to(PACKAGE):
                name = frame.f_code.co_qualname.removesuffix(".__init__")
                seen[part].setdefault((file.relative_to(PACKAGE).as_posix(), name))

        sys.setprofile(note)
        try:
            if part == "save":
                WORLD.save(
                    path,
                    lambda rank: ranks(rank)[0],
                    lambda rank: ranks(rank)[1].save_planner(),
                    lambda rank: PlacementFileSystemWriter(path, sync_files=False),
                )
            else:
                WORLD.load(
                    path,
                    lambda rank: ranks(rank)[0],
                    lambda rank: ranks(rank)[1].load_planner(),
                    lambda rank: PlacementFileSystemReader(path),
                )
        finally:
            sys.setprofile(None)

    run("save")
    run("load")
    return {part: list(of_part) for part, of_part in seen.items()}


@pytest.mark.parametrize(
    ("heading", "part"),
    [
        ("One EP expert, from `dcp.save` to bytes", "save"),
        ("One rule, from pattern to offsets", "save"),
        ("One load, from disk to parameter", "load"),
    ],
)
def test_a_walk_names_what_runs_in_its_order(
    heading: str, part: str, calls: dict[str, list[tuple[str, str]]]
) -> None:
    section = WALKS.partition(f"### {heading}\n")[2].partition("\n#")[0]
    steps = STEP.findall(section)
    assert len(steps) >= 5
    missing = [step for step in steps if step not in calls[part]]
    assert not missing
    order = [calls[part].index(step) for step in steps]
    in_order = [step for _, step in sorted(zip(order, steps, strict=True))]
    assert steps == in_order


def test_one_expert_passes_few_modules_and_functions() -> None:
    """Who follows it reads so many; more are a sign that something is done twice."""
    command = [sys.executable, PACKAGE.parent / "scripts" / "bench_path.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = re.findall(r"^(save|load): (\d+) modules, (\d+) functions$", done.stdout, re.MULTILINE)
    assert [part for part, *_ in counts] == ["save", "load"]
    for (_, modules, functions), most in zip(counts, (109, 119), strict=True):
        assert int(modules) <= 23
        assert int(functions) <= most
