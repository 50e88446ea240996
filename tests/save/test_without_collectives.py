"""``use_collectives=False`` is refused by name; a rank that saves with ``no_dist=True`` is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    PlacementError,
    PlacementFileSystemWriter,
    Placements,
    PlacementSavePlanner,
    installed,
)
from dcp_placements.testing import FakeDTensor, World
from tests.storage_scenes import save_alone, save_no_dist

WHOLE = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6)
WORLD = World(8)
REFUSED = r"use_collectives=False: such a save is refused"


class Naming(dcp.FileSystemWriter):
    """Names its files in a way of its own: it does not say in a plan that it is alone."""

    def prepare_local_plan(self, plan: Any) -> Any:
        self.fs.mkdir(self.path)
        return plan


WRITERS: dict[str, Callable[[Path], Any]] = {
    "torch": dcp.FileSystemWriter,
    "ours": PlacementFileSystemWriter,
    "ours without stock metadata": lambda path: PlacementFileSystemWriter(
        path, stock_metadata=False
    ),
}


def replicated(rank: int) -> dict[str, Any]:
    """Return what a rank of HSDP holds: a tensor over four ranks, and one that is on all eight."""
    mesh = WORLD.mesh(rank, replicate=2, fsdp=4)
    return {
        "w": FakeDTensor.distribute(WHOLE, mesh, [Replicate(), Shard(0)]),
        "norm": FakeDTensor.distribute(WHOLE[0], mesh, [Replicate(), Replicate()]),
    }


STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    "sharded": replicated,
    "whole": lambda rank: {"w": WHOLE, "lr": 0.1},
    "no rows": lambda rank: {"w": WHOLE[: 8 * (rank == 0)]},  # M39
    "nothing": lambda rank: {},
}


def refused(
    path: Path, number: int, rank: int, state: dict[str, Any], writer: Any, planner: Any = None
) -> None:
    """Assert that a rank, the ``number``-th of its group, is refused and has written nothing."""
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with WORLD._as(rank), pytest.raises(PlacementError, match=REFUSED) as caught:
        save_alone(path, number, state, planner or PlacementSavePlanner(), writer)
    assert "way out:     drop it" in str(caught.value)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("writer", WRITERS)
def test_m17_m39_every_rank_is_refused_before_anything_is_written(
    tmp_path: Path, writer: str, state: str
) -> None:
    for rank in range(8):
        refused(tmp_path, rank, rank, STATES[state](rank), WRITERS[writer](tmp_path))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("ranks", [(4, 5, 6, 7), (3,), (0, 5, 6)])
def test_m71_a_group_of_some_ranks_is_refused(
    tmp_path: Path, ranks: tuple[int, ...], writer: str
) -> None:
    for number, rank in enumerate(ranks):
        refused(tmp_path, number, rank, replicated(rank), WRITERS[writer](tmp_path))


def test_a_writer_that_names_its_files_itself_is_refused_on_all_ranks_but_the_first(
    tmp_path: Path,
) -> None:
    """There the first looks as with ``no_dist=True``, and is warned of; the job ends."""
    for rank in range(1, 8):
        refused(tmp_path, rank, rank, replicated(rank), Naming(tmp_path))
    with WORLD._as(0), pytest.warns(UserWarning, match="rank 0 of 8 ranks saves by itself"):
        save_alone(tmp_path, 0, replicated(0), PlacementSavePlanner(), Naming(tmp_path))


@pytest.mark.parametrize("writer", WRITERS)
def test_m98_an_older_checkpoint_stays_as_it_was(tmp_path: Path, writer: str) -> None:
    WORLD.save(
        tmp_path,
        replicated,
        lambda rank: PlacementSavePlanner(step=20),
        lambda rank: WRITERS[writer](tmp_path),
    )
    for rank in range(8):
        refused(tmp_path, rank, rank, replicated(rank), WRITERS[writer](tmp_path))


@pytest.mark.parametrize("caching", [False, True])
def test_m36_one_planner_that_was_refused_saves_every_tensor_afterwards(
    tmp_path: Path, caching: bool
) -> None:
    planners = [PlacementSavePlanner(enable_plan_caching=caching) for _ in range(8)]
    for step in range(2):
        path = tmp_path / f"{step}"
        for rank, planner in enumerate(planners):
            refused(path, rank, rank, replicated(rank), dcp.FileSystemWriter(path), planner)
        WORLD.save(path, replicated, planners.__getitem__)
        assert_holds(path, {"w": WHOLE, "norm": WHOLE[0]})
        alone = tmp_path / f"{step}.alone"
        with pytest.warns(UserWarning, match="rank 5 of 8 ranks saves by itself"):
            save_no_dist(WORLD, 5, alone, replicated(5), planners[5])
        stored = dcp.FileSystemReader(alone).read_metadata()
        chunks = {
            (index.fqn, tuple(index.offset))
            for index in stored.storage_data
            if index.fqn in stored.state_dict_metadata
        }
        assert chunks == {("w", (2, 0)), ("norm", (0,))}


@pytest.mark.parametrize("no_dist", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_process_by_itself_is_refused(tmp_path: Path, writer: str, no_dist: bool) -> None:
    """There is no process group; torch would leave ``__0.metadata`` alone."""
    with pytest.raises(PlacementError, match=REFUSED):
        dcp.save(
            {"w": WHOLE},
            storage_writer=WRITERS[writer](tmp_path),
            planner=PlacementSavePlanner(),
            no_dist=no_dist,
            use_collectives=False,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, PlacementFileSystemWriter])
def test_an_asynchronous_save_is_refused_where_its_result_is_asked_for(
    tmp_path: Path, writer: Any
) -> None:
    saving = dcp.async_save(
        {"w": WHOLE},
        storage_writer=writer(tmp_path),
        planner=PlacementSavePlanner(),
        use_collectives=False,
    )
    with pytest.raises(PlacementError, match=REFUSED):
        saving.result()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner], ids=str)
def test_frameworks_inside_installed_are_refused(tmp_path: Path, planner: Any) -> None:
    with installed(Placements(None)), pytest.raises(PlacementError, match=REFUSED):
        dcp.save(
            {"w": WHOLE},
            checkpoint_id=tmp_path,
            planner=planner and planner(),
            use_collectives=False,
        )
    assert not list(tmp_path.iterdir())


def test_our_writer_refuses_it_with_any_planner(tmp_path: Path) -> None:
    """No reader of this package would load what it writes."""
    with pytest.raises(PlacementError, match=REFUSED):
        dcp.save(
            {"w": WHOLE},
            storage_writer=PlacementFileSystemWriter(tmp_path),
            use_collectives=False,
        )
    assert not list(tmp_path.iterdir())


# A rank that saves by itself, with no_dist=True


def by_itself(rank: int, path: Path, state_dict: dict[str, Any]) -> list[str]:
    """Return the warnings of a rank that saves with ``no_dist=True``."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        save_no_dist(WORLD, rank, path, state_dict, PlacementSavePlanner())
    return [str(one.message) for one in given if "this save" in str(one.message)]


@pytest.mark.parametrize("rank", [0, 3])
def test_no_dist_warns_of_shards_that_other_ranks_hold(tmp_path: Path, rank: int) -> None:
    mesh = WORLD.mesh(rank, fsdp=8)
    state = {"norm": torch.ones(3), "w": FakeDTensor.distribute(WHOLE, mesh, [Shard(0)])}
    (message,) = by_itself(rank, tmp_path, state)
    assert f"this save: rank {rank} of 8 ranks saves by itself" in message
    assert "parts of 1 of 2 tensors, as of w: 24 B of 192 B are saved" in message
    assert "no_dist=True" in message


def test_no_dist_of_whole_tensors_warns_only_where_rank_0_would_be_overwritten(
    tmp_path: Path,
) -> None:
    assert not by_itself(0, tmp_path / "0", {"w": WHOLE})
    (message,) = by_itself(2, tmp_path / "2", {"w": WHOLE})
    assert "rank 2 of 8 ranks saves by itself" in message
    assert "overwrite" in message
    assert "missing" not in message
    for rank in (0, 2):
        assert_holds(tmp_path / f"{rank}", {"w": WHOLE})


def test_a_process_without_a_group_warns_where_the_launcher_started_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="rank 0 of 4 ranks saves by itself"):
        dcp.save({"w": WHOLE}, checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        dcp.save({"w": WHOLE}, checkpoint_id=tmp_path, planner=PlacementSavePlanner())
    assert not any("by itself" in str(one.message) for one in given)


def test_ranks_with_directories_of_their_own_each_save_and_load_what_they_hold(
    tmp_path: Path,
) -> None:
    """Each has an id of its own, and ranks that load together do not take them for one mixture."""
    world = World(2)
    for rank in range(2):
        path = tmp_path / f"{rank}"
        with warnings.catch_warnings(action="ignore"):
            save_no_dist(world, rank, path, {"w": WHOLE + rank}, PlacementSavePlanner())
    loaded = world.load(
        tmp_path,
        lambda rank: {"w": torch.zeros(8, 6)},
        lambda rank: Placements(None).load_planner(),
        lambda rank: dcp.FileSystemReader(tmp_path / f"{rank}"),
    )
    for rank, state in enumerate(loaded):
        assert torch.equal(state["w"], WHOLE + rank)
