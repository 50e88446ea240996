"""The first save after a restart says if its plan is that of the checkpoint, or what changed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    PlacementError,
    PlacementLoadPlanner,
    PlacementSavePlanner,
    plan_record,
)
from dcp_placements.plan_record import PLAN_KEY
from dcp_placements.provenance import RESERVED_KEY, stored
from fakes import FakeDTensor, World

WORLD = World(4)
WHOLE = torch.arange(39, dtype=torch.float32).reshape(13, 3)


def model(
    rank: int,
    *,
    world: World = WORLD,
    whole: torch.Tensor = WHOLE,
    placements: Any = (Replicate(), Shard(0)),  # noqa: B008
) -> dict[str, Any]:
    mesh = world.mesh(rank, dp=2, fsdp=world.size // 2)
    made = {f"layers.{i}.w": FakeDTensor.distribute(whole, mesh, list(placements)) for i in (0, 1)}
    return {"model": made, "step": 3}


def saved(path: Path, world: World = WORLD, **options: Any) -> Path:
    world.save(
        path,
        lambda rank: model(rank, world=world),
        lambda rank: PlacementSavePlanner(enable_plan_caching=True, **options),
    )
    return path


def loaded(path: Path, kind: Any = PlacementLoadPlanner) -> Any:
    planner = kind()
    target = {f"layers.{i}.w": torch.zeros(13, 3) for i in (0, 1)}
    dcp.load({"model": target}, checkpoint_id=path, planner=planner, no_dist=True)
    assert torch.equal(target["layers.1.w"], WHOLE)
    return planner


def said(
    path: Path,
    load_planner: Any,
    state_dict: Callable[[int], dict[str, Any]],
    world: World = WORLD,
) -> list[str]:
    """Return what the coordinator says of two saves after a restart; read back they are right."""
    made = [
        PlacementSavePlanner(enable_plan_caching=True, after=load_planner)
        for _ in range(world.size)
    ]
    told = []
    for turn in range(2):
        world.save(path / str(turn), state_dict, lambda rank: made[rank])
        told.append(made[0].report.plan_cache)
        read = {"layers.1.w": torch.zeros_like(WHOLE)}
        dcp.load({"model": read}, checkpoint_id=path / str(turn), no_dist=True)
        assert torch.equal(read["layers.1.w"], WHOLE)
    return told


def test_the_plan_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    told = said(tmp_path, loaded(saved(tmp_path / "first", step=100)), model)
    record = FileSystemReader(tmp_path / "first").read_metadata().planner_data[RESERVED_KEY]
    assert told == [f"as in save {record[PLAN_KEY]['id'][:8]}, step 100", "reused"]


def test_every_save_has_an_id_of_its_own(tmp_path: Path) -> None:
    said(tmp_path, loaded(saved(tmp_path / "first")), model)
    ids = {
        FileSystemReader(tmp_path / name).read_metadata().planner_data[RESERVED_KEY][PLAN_KEY]["id"]
        for name in ("first", "0", "1")
    }
    assert len(ids) == 3


def renamed(rank: int) -> dict[str, Any]:
    made = model(rank)
    made["model"]["layers.2.w"] = made["model"].pop("layers.0.w")
    return made


CHANGES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "dtype": (
        lambda rank: model(rank, whole=WHOLE.double()),
        "model.layers.0.w changed its dtype",
    ),
    "layout": (
        lambda rank: model(rank, placements=(Shard(0), Replicate())),
        "model.layers.0.w changed its shape or its layout",
    ),
    "name": (renamed, "model.layers.2.w is new"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_said(change: str, tmp_path: Path) -> None:
    state_dict, why = CHANGES[change]
    made = PlacementSavePlanner(enable_plan_caching=True, after=loaded(saved(tmp_path / "first")))
    others = [PlacementSavePlanner(enable_plan_caching=True) for _ in range(WORLD.size)]
    WORLD.save(tmp_path / "next", state_dict, lambda rank: others[rank] if rank else made)
    assert made.report.plan_cache == f"made anew: {why}"
    assert f"plan:      made anew: {why}" in str(made.report)


def test_another_world_is_said(tmp_path: Path) -> None:
    world = World(8)
    told = said(
        tmp_path,
        loaded(saved(tmp_path / "first")),
        lambda rank: model(rank, world=world),
        world,
    )
    assert told == ["made anew: 8 ranks, and 4 saved what was loaded", "reused"]


def test_ranks_that_hold_other_parts_are_seen(tmp_path: Path) -> None:
    """Two ranks exchange places: the tables are as they were, and the coordinates are not."""
    exchanged = [1, 0, 2, 3]
    told = said(
        tmp_path,
        loaded(saved(tmp_path / "first")),
        lambda rank: model(exchanged[rank]),
    )
    assert told == ["made anew: the ranks hold other parts", "reused"]


def test_ranks_that_resumed_from_elsewhere_do_no_harm(tmp_path: Path) -> None:
    here, there = loaded(saved(tmp_path / "here")), loaded(saved(tmp_path / "there"))
    made = [
        PlacementSavePlanner(enable_plan_caching=True, after=there if rank % 2 else here)
        for rank in range(WORLD.size)
    ]
    WORLD.save(tmp_path / "next", model, lambda rank: made[rank])
    assert made[0].report.plan_cache.startswith("as in save ")
    loaded(tmp_path / "next")


def test_a_checkpoint_that_says_nothing_is_a_first_save(tmp_path: Path) -> None:
    WORLD.save(tmp_path / "plain", model, lambda rank: PlacementSavePlanner())
    data = FileSystemReader(tmp_path / "plain").read_metadata().planner_data
    assert PLAN_KEY not in data[RESERVED_KEY]
    told = said(tmp_path, loaded(tmp_path / "plain"), model)
    assert told == ["made anew: no plan yet", "reused"]


def test_torch_s_load_planner_will_do(tmp_path: Path) -> None:
    told = said(tmp_path, loaded(saved(tmp_path / "first"), DefaultLoadPlanner), model)
    assert told[0].startswith("as in save ")


def test_tables_too_large_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_record, "MAX_NBYTES", 10)
    planner = loaded(saved(tmp_path / "first"))
    assert said(tmp_path / "same", planner, model)[0].startswith("as in save ")
    told = said(tmp_path / "other", planner, lambda rank: model(rank, whole=WHOLE.double()))
    assert told[0] == "made anew: the tensors are other ones, or lie otherwise"


@pytest.mark.parametrize("damage", [None, 3, (b"", b""), ((1, 2, 3),), "as it is"])
def test_a_damaged_record_is_no_more_than_a_line(damage: Any, tmp_path: Path) -> None:
    planner = loaded(saved(tmp_path / "first"))
    record = planner.metadata.planner_data[RESERVED_KEY][PLAN_KEY]
    record["made_from"] = b"?"
    if damage != "as it is":
        record["tables"] = damage
    told = said(tmp_path, planner, model)[0]
    assert told == (
        "made anew: the ranks hold other parts"
        if damage == "as it is"
        else "made anew: the tensors are other ones, or lie otherwise"
    )


def test_the_record_is_small_and_beside_it_is_the_identity_alone(tmp_path: Path) -> None:
    keys = [f"layers.{i}.{name}" for i in range(100) for name in ("w1", "w2", "w3", "norm")]
    mesh = [WORLD.mesh(rank, dp=2, fsdp=2) for rank in range(WORLD.size)]
    WORLD.save(
        tmp_path,
        lambda rank: {
            key: FakeDTensor.distribute(WHOLE, mesh[rank], [Replicate(), Shard(0)]) for key in keys
        },
        lambda rank: PlacementSavePlanner(enable_plan_caching=True),
    )
    metadata = FileSystemReader(tmp_path).read_metadata()
    told = metadata.planner_data[RESERVED_KEY]
    assert len(pickle.dumps(told)) < 2048
    assert set(told) == {"save_id", "versions", "world_size", PLAN_KEY}


def test_it_stands_beside_full_digests(tmp_path: Path) -> None:
    saved(tmp_path, digests="full")
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert stored(metadata) is not None
    assert loaded(tmp_path, lambda: PlacementLoadPlanner(verify="digests")).report.verified
    assert PLAN_KEY in metadata.planner_data[RESERVED_KEY]


def test_after_is_refused_where_it_has_no_meaning(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="has not"):
        PlacementSavePlanner(enable_plan_caching=True, after=PlacementLoadPlanner())
    with pytest.raises(PlacementError, match="enable_plan_caching=True"):
        PlacementSavePlanner(after=loaded(saved(tmp_path)))


@pytest.mark.dist
def test_a_real_run_resumes(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "ranks" / "resume_worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    told = {}
    for run in ("first", "resumed"):
        done = subprocess.run(
            [*command, "2", str(worker), str(tmp_path), run],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(worker.parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        # Judged by what was written: gloo's threads sometimes abort a process that is done.
        assert (tmp_path / f"{run}.json").exists(), done.stdout[-8000:]
        told[run] = json.loads((tmp_path / f"{run}.json").read_text())
    metadata = FileSystemReader(tmp_path / "first0").read_metadata()
    name = metadata.planner_data[RESERVED_KEY][PLAN_KEY]["id"][:8]
    assert told["first"] == ["made anew: no plan yet", "reused", "made anew: no plan yet"]
    assert told["resumed"] == [
        f"as in save {name}, step 100",
        "reused",
        "made anew: model.0.weight changed its dtype",
    ]
    read = {
        run: {"model": {"0.weight": torch.zeros(7, 5)}} for run in ("first0", "first1", "resumed1")
    }
    for run, state_dict in read.items():
        dcp.load(state_dict, checkpoint_id=tmp_path / run, no_dist=True)
        assert torch.equal(state_dict["model"]["0.weight"], read["first0"]["model"]["0.weight"])
        assert state_dict["model"]["0.weight"].any()
