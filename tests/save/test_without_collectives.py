"""``use_collectives=False``: every rank writes by itself, and what it holds of replicas once."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds, read_whole
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import merge_metadata, verify
from dcp_placements.storage.provenance import DIGESTS_OF_RANK, RESERVED_KEY
from dcp_placements.storage.save_ids import ID_PREFIX
from dcp_placements.testing import FakeDTensor, World
from tests.storage_scenes import save_alone
from tests.versions import passes_on_errors

WHOLE = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6)
WORLD = World(8)


def save(path: Path, state_dict: Any, rules: Any = lambda rank: None) -> Counter[tuple[str, Any]]:
    """Return how often each chunk is written, over all ranks' own metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WORLD.save(
            path,
            state_dict,
            lambda rank: PlacementSavePlanner(rules(rank)),
            use_collectives=False,
        )
    written: Counter[tuple[str, Any]] = Counter()
    for file in path.glob("__*.metadata"):
        written.update(
            (index.fqn, index.offset)
            for index in pickle.loads(file.read_bytes()).storage_data
            if not index.fqn.startswith(ID_PREFIX)
        )
    return written


def replicated(rank: int) -> dict[str, Any]:
    """Return what a rank of HSDP holds: a tensor over four ranks, and one that is on all eight."""
    mesh = WORLD.mesh(rank, replicate=2, fsdp=4)
    return {
        "w": FakeDTensor.distribute(WHOLE, mesh, [Replicate(), Shard(0)]),
        "norm": FakeDTensor.distribute(WHOLE[0], mesh, [Replicate(), Replicate()]),
    }


def save_without_others(
    rank: int, path: Path, state_dict: dict[str, Any], planner: PlacementSavePlanner
) -> None:
    """Save as ``dcp.save(..., no_dist=True)`` does on a rank of the world."""
    writer = dcp.FileSystemWriter(path)
    with WORLD._as(rank):
        planner.set_up_planner(state_dict, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan(
            [writer.prepare_local_plan(planner.create_local_plan())]
        )
        final = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(final, planner).value()])


def by_itself(rank: int, path: Path, state_dict: dict[str, Any]) -> list[str]:
    """Return the warnings of a rank that saves with ``no_dist=True``."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        save_without_others(rank, path, state_dict, PlacementSavePlanner())
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


def save_in_group(path: Path, ranks: Sequence[int], state_dict: Any) -> list[str]:
    """Save as ``dcp.save(..., use_collectives=False, process_group=)`` does; return warnings."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for number, rank in enumerate(ranks):
            planner, writer = PlacementSavePlanner(), dcp.FileSystemWriter(path)
            with WORLD._as(rank):
                planner.set_up_planner(state_dict(rank), writer.storage_meta(), number == 0)
                writer.set_up_storage_writer(number == 0, rank=number, use_collectives=False)
                plan = writer.prepare_local_plan(planner.create_local_plan())
                plans, metadata = planner.create_global_plan([plan])
                final = planner.finish_plan(writer.prepare_global_plan(plans)[0])
                writer.finish(metadata, [writer.write_data(final, planner).value()])
    return [str(one.message) for one in given if "this save" in str(one.message)]


@pytest.mark.parametrize("ranks", [(4, 5, 6, 7), (3, 4, 5, 6, 7), (0, 5, 6, 7)])
def test_m71_a_group_without_the_first_replica_saves_what_it_holds(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    texts = save_in_group(tmp_path, ranks, replicated)
    for number, rank in enumerate(ranks):
        if rank != number:
            assert any(f"rank {rank} of 8 ranks saves by itself" in text for text in texts)
    merge_metadata(tmp_path)
    assert_holds(tmp_path, {"w": WHOLE, "norm": WHOLE[0]})


def test_m71_a_save_by_all_ranks_is_not_warned_of(tmp_path: Path) -> None:
    assert not save_in_group(tmp_path, range(8), replicated)


@pytest.mark.parametrize("caching", [False, True])
def test_m36_one_planner_with_and_without_a_coordinator_keeps_every_tensor(
    tmp_path: Path, caching: bool
) -> None:
    """What a rank leaves to others without collectives it writes itself with ``no_dist=True``."""
    planners = [PlacementSavePlanner(enable_plan_caching=caching) for _ in range(8)]
    for step in range(2):
        WORLD.save(tmp_path / f"{step}", replicated, planners.__getitem__, use_collectives=False)
        merge_metadata(tmp_path / f"{step}")
        assert_holds(tmp_path / f"{step}", {"w": WHOLE, "norm": WHOLE[0]})
        alone = tmp_path / f"{step}.alone"
        with pytest.warns(UserWarning, match="rank 5 of 8 ranks saves by itself"):
            save_without_others(5, alone, replicated(5), planners[5])
        stored = dcp.FileSystemReader(alone).read_metadata()
        chunks = {
            (index.fqn, tuple(index.offset))
            for index in stored.storage_data
            if index.fqn in stored.state_dict_metadata
        }
        assert chunks == {("w", (2, 0)), ("norm", (0,))}


@passes_on_errors
@pytest.mark.parametrize("digests", ["sampled", "full"])
def test_copies_that_differ_are_refused_when_ranks_metadata_are_merged(
    tmp_path: Path, digests: str
) -> None:
    """Nobody compares them at the save; their digests do afterwards."""

    def planner(rank: int, on_conflict: str) -> PlacementSavePlanner:
        return PlacementSavePlanner(digests=digests, on_conflict=on_conflict)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"w": WHOLE + (rank == 5), "b": WHOLE, "step": rank}

    for on_conflict in ("error", "warn"):
        path = tmp_path / on_conflict
        WORLD.save(
            path, state_dict, lambda rank, at=on_conflict: planner(rank, at), use_collectives=False
        )
    with pytest.raises(PlacementError) as refused:
        merge_metadata(tmp_path / "error")
    assert "w: ranks 0 and 5 stored different contents as [:, :] of (8, 6)" in str(refused.value)
    assert "\nb:" not in str(refused.value)
    assert not (tmp_path / "error" / ".metadata").exists()
    with pytest.raises(dcp.api.CheckpointException, match="w: ranks 0 and 5 stored different"):
        dcp.load(
            {"w": torch.zeros(8, 6)},
            storage_reader=PlacementFileSystemReader(tmp_path / "error"),
            planner=PlacementLoadPlanner(),
        )
    with pytest.warns(UserWarning, match="w: ranks 0, 5 stored different contents; rank 0's"):
        merged = merge_metadata(tmp_path / "warn")
    # They were for the merge; of 8 bytes, they prove nothing about what is loaded.
    assert DIGESTS_OF_RANK not in merged.planner_data[RESERVED_KEY]
    assert torch.equal(read_whole(tmp_path / "warn")["w"], WHOLE)


def test_copies_without_digests_are_named_when_ranks_metadata_are_merged(tmp_path: Path) -> None:
    """One rank of digests="off" is enough; of one object and one tensor, in one warning."""

    def state_dict(rank: int) -> dict[str, Any]:
        every = {"w": WHOLE + (rank == 1), "lr": 0.1, "b": WHOLE, f"own.{rank}": WHOLE}
        return every if rank < 2 else {"b": every["b"]}

    WORLD.save(
        tmp_path,
        state_dict,
        lambda rank: PlacementSavePlanner(digests="off" if rank == 1 else "sampled"),
        use_collectives=False,
    )
    with pytest.warns(
        UserWarning, match=r"look at this checkpoint \(1 note of 3 keys\)\nb, lr, w: stored"
    ):
        merge_metadata(tmp_path)
    assert torch.equal(read_whole(tmp_path)["w"], WHOLE)
    (tmp_path / ".metadata").unlink()
    with pytest.warns(
        UserWarning, match="b, lr, w: stored by ranks 0-1 and not compared; rank 0's"
    ):
        PlacementFileSystemReader(tmp_path).read_metadata()


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": torch.Tensor.t,
    "scalar": lambda whole: whole[0, 0].clone(),
    "dtensor": lambda whole: whole,
    "large": lambda whole: whole.repeat(40, 5),
}


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_every_kind_are_compared_when_merged(
    tmp_path: Path, kind: str, drift: float
) -> None:
    """Rows that are no view of all memory, a scalar, a DTensor beside its mesh, a sampled one."""

    def state_dict(rank: int) -> dict[str, Any]:
        value: Any = KINDS[kind](WHOLE + drift * (rank == 6))
        if kind == "dtensor":
            mesh = WORLD.mesh(rank, replicate=2, fsdp=4)["fsdp"]
            value = FakeDTensor.distribute(value, mesh, [Shard(0)])
        return {"w": value}

    save(tmp_path, state_dict)
    if drift:
        with pytest.raises(PlacementError, match=r"w: ranks \d and 6 stored different contents"):
            merge_metadata(tmp_path)
    else:
        merge_metadata(tmp_path)
        assert_holds(tmp_path, {"w": KINDS[kind](WHOLE)})


def test_a_later_save_that_was_cut_off_is_told_by_its_step(tmp_path: Path) -> None:
    for name, step in (("first", 10), ("second", 20)):
        WORLD.save(
            tmp_path / name,
            replicated,
            lambda rank, step=step: PlacementSavePlanner(digests="full", step=step),
            use_collectives=False,
        )
        merge_metadata(tmp_path / name)
    for file in (tmp_path / "second").glob("__2*"):
        (tmp_path / "first" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(PlacementError, match=r"several saves: step 10 by .*; step 20 by rank 2"):
        merge_metadata(tmp_path / "first")


@pytest.mark.parametrize("steps", [(None, None), (None, 20), (20, 20)], ids=str)
@pytest.mark.parametrize("maker", [dcp.FileSystemWriter, PlacementFileSystemWriter])
@pytest.mark.parametrize("saves", [1, 2])
def test_m98_parts_that_may_be_of_an_older_save_are_warned_of(
    saves: int, maker: Any, steps: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """One rank is stopped before it writes: of a first save over another, and of a second."""

    class Killed(maker):  # type: ignore[misc]
        def write_data(self, *args: Any) -> Any:
            raise OSError("killed")

    def save_all(step: int | None, killed: int | None) -> None:
        def state_dict(rank: int) -> dict[str, Any]:
            mesh = WORLD.mesh(rank, fsdp=8)
            return {"w": FakeDTensor.distribute(WHOLE + (killed or 0), mesh, [Shard(0)])}

        WORLD.save(
            tmp_path,
            state_dict,
            lambda rank: PlacementSavePlanner(step=step),
            lambda rank: (Killed if rank == killed else maker)(tmp_path),
            use_collectives=False,
        )

    for _ in range(saves):
        save_all(steps[0], None)
        with warnings.catch_warnings(action="error"):
            PlacementFileSystemReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointException, match="killed"):
        save_all(steps[1], 3)
    message = rf"may be of several saves: .*, in {saves + 1} saves here; .* by rank 3, in {saves} s"
    with pytest.warns(UserWarning, match=message):
        merge_metadata(tmp_path)


@pytest.mark.parametrize("first", ["scalar", "sharded"])
def test_ranks_without_a_part_of_one_tensor_write_their_scalars(tmp_path: Path, first: str) -> None:
    """No boxes of a tensor and the one box of a scalar are both no numbers at all."""
    rows = {"sharded.w": WHOLE[:3].clone()}
    scalars = {"scalar.step": torch.tensor(5.0)}

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, fsdp=8)
        sharded = {"sharded.w": FakeDTensor.distribute(rows["sharded.w"], mesh, [Shard(0)])}
        return sharded | scalars if first == "sharded" else scalars | sharded

    save(tmp_path, state_dict)
    for rank in range(8):
        stored = pickle.loads((tmp_path / f"__{rank}.metadata").read_bytes()).state_dict_metadata
        assert [tuple(chunk.sizes) for chunk in stored["scalar.step"].chunks] == [()]
        chunks = stored["sharded.w"].chunks
        assert [tuple(chunk.sizes) for chunk in chunks] == ([(1, 6)] if rank < 3 else [])
    merge_metadata(tmp_path)
    assert_holds(tmp_path, rows | scalars)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("data_too", [False, True])
def test_a_rank_without_metadata_is_warned_of(tmp_path: Path, lost: int, data_too: bool) -> None:
    """It was killed in its save, or its files were not copied; what it has no other rank has."""
    world = World(3)
    world.save(
        tmp_path,
        lambda rank: {f"layers.{rank}.w": torch.full((2,), rank), "norm": torch.ones(3)},
        lambda rank: PlacementSavePlanner(step=1),
        lambda rank: PlacementFileSystemWriter(tmp_path),
        use_collectives=False,
    )
    assert verify(tmp_path).sound
    (tmp_path / f"__{lost}.metadata").unlink()
    if data_too:
        next(tmp_path.glob(f"__{lost}_*.distcp")).unlink()
    if data_too and lost == 2:
        return  # nothing in the directory tells that there was a third rank
    message = f"has no metadata of rank {lost}"
    into = {"norm": torch.zeros(3)}
    with pytest.warns(UserWarning, match=message):
        dcp.load(
            into,
            storage_reader=PlacementFileSystemReader(tmp_path),
            planner=PlacementLoadPlanner(),
        )
    assert into["norm"].eq(1).all()
    with pytest.warns(UserWarning, match=message):
        faults = verify(tmp_path).faults
    assert [(fault.kind, fault.files) for fault in faults] == [
        ("missing_file", (f"__{lost}.metadata",))
    ]
    with pytest.warns(UserWarning, match=message):
        merge_metadata(tmp_path)


@passes_on_errors
@pytest.mark.parametrize("unreadable", ["a directory", "damaged"])
def test_metadata_of_a_rank_that_cannot_be_read_are_not_passed_over(
    tmp_path: Path, unreadable: str
) -> None:
    """Torch would load each rank's own part in their place, compared with no other."""
    for rank in range(3):
        save_alone(tmp_path, rank, {"norm": torch.full((3,), 1.0 + rank)})
    last = tmp_path / "__2.metadata"
    last.unlink()
    if unreadable == "a directory":
        last.mkdir()
    else:
        last.write_bytes(b"x")
    into = {"norm": torch.zeros(3)}
    with pytest.raises(CheckpointException, match=r"__2\.metadata"):
        dcp.load(
            into,
            storage_reader=PlacementFileSystemReader(tmp_path),
            planner=PlacementLoadPlanner(),
            no_dist=True,
        )
    assert not into["norm"].any()
