"""What all ranks together are refused or warned of with: each fault once, and who has it.

What one declaration is refused with is in ``test_hazards_save.py`` and ``test_hazards_load.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, load, refused, refused_save, save, without_warning
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Partial, Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.errors import MAX_SENT
from dcp_placements.testing import FakeDTensor, World

WORLD = World(4)
Ranked = Callable[[int], Any]


def ruled(pattern: str, dim: int, **axes: int) -> Ranked:
    """Return each rank's rules: one pattern, of which the first of these axes shards a dim."""

    def rules(rank: int) -> PlacementRules:
        placement = {next(iter(axes)): Shard(dim)}
        return PlacementRules({pattern: CheckpointPlacement(WORLD.mesh(rank, **axes), placement)})

    return rules


def plain(*shape: int) -> Ranked:
    return lambda rank: {"w": torch.zeros(shape)}


def test_all_faults_of_all_ranks_are_told_at_once_sorted_by_name(tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, dp=2, tp=2)["tp"]
        return {
            "z.bias": torch.zeros(3),
            "a.w": FakeDTensor(torch.zeros(3), mesh, [Partial()], (3,)),
            "m.w": FakeDTensor(torch.zeros(3, 1), mesh, [Shard(0)], (9, 1)),
            "fine": torch.zeros(2),
        }

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state_dict, ruled("z", 1, tp=2, dp=2))
    assert set(refusal.by_rank) == {0}, "one rank speaks for all"
    text = refusal.text
    assert text.startswith("ranks 0-3 cannot be placed in the checkpoint (4 faults)\n")
    entries = [line.split(": ")[0] for line in text.splitlines() if line[0] != " "]
    assert entries[1:] == ["a.w", "m.w", "m.w", "z.bias"]
    assert text.count("on: ") == 2, "what all ranks have names no ranks again"


def test_what_is_wrong_over_all_ranks_is_told_at_once_sorted_by_name(tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        return {
            "z": torch.zeros(3 + rank),
            "k": torch.zeros(2) if rank else "text",
            "a": torch.full((2,), float(rank)),
        }

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state_dict)
    refusal.says("(3 faults)")
    starts = [line[0] for line in refusal.text.splitlines() if line[1:3] == ": "]
    assert starts == ["a", "k", "z"]


@pytest.mark.parametrize(("first", "other"), [("full", "sampled"), ("sampled", "off")])
def test_ranks_that_do_not_agree_on_digests_are_refused(
    tmp_path: Path, first: str, other: str
) -> None:
    with refused_save(tmp_path) as refusal:
        WORLD.save(
            tmp_path,
            plain(3),
            lambda rank: PlacementSavePlanner(digests=other if rank == 2 else first),
        )
    refusal.says("the ranks do not agree on digests=", "rank 2", "ranks 0-1", repr(first))


def test_a_rules_function_that_fails_is_named_with_key_and_rank(tmp_path: Path) -> None:
    def by_name(fqn: str, tensor: torch.Tensor) -> CheckpointPlacement | None:
        return {"norm": None}[fqn]  # type: ignore[return-value]

    with pytest.raises(CheckpointException) as caught:
        save(
            WORLD,
            tmp_path,
            lambda rank: {"norm" if not rank else "head": torch.ones(3)},
            lambda rank: by_name,
        )
    error = caught.value.failures[1][0]
    for fact in ("head: the rules fail on rank 1: KeyError: 'head'", "test_refusals.py:"):
        assert fact in str(error)
    assert isinstance(error, PlacementError)
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize("stock", [0, 1])
def test_a_rank_with_another_planner_is_refused_by_its_position(tmp_path: Path, stock: int) -> None:
    fact = "position 1" if stock else "the coordinator uses another planner"
    with pytest.raises(CheckpointException, match=fact):
        WORLD.save(
            tmp_path,
            plain(3),
            lambda rank: dcp.DefaultSavePlanner() if rank == stock else PlacementSavePlanner(),
        )


@pytest.mark.parametrize("stock", [0, 2])
def test_a_load_by_another_planner_on_some_ranks_is_refused(tmp_path: Path, stock: int) -> None:
    """The others would count their experts from 0, and say nothing."""
    save(WORLD, tmp_path, lambda rank: {"w": arange(3)})
    fact = "position 2" if stock else "the coordinator uses another planner"
    with pytest.raises(CheckpointException, match=fact):
        WORLD.load(
            tmp_path,
            plain(3),
            lambda rank: dcp.DefaultLoadPlanner() if rank == stock else PlacementLoadPlanner(),
        )


@pytest.mark.parametrize("given", [0, 1])
def test_whole_on_some_ranks_alone_is_refused(tmp_path: Path, given: int) -> None:
    def whole(rank: int) -> dict[str, tuple[int, ...]] | None:
        return {"w": (3,)} if rank == given else None

    with pytest.raises(CheckpointException, match="the ranks do not agree on whole="):
        WORLD.save(tmp_path, plain(3), lambda rank: PlacementSavePlanner(whole=whole(rank)))
    WORLD.save(tmp_path, plain(3), lambda rank: PlacementSavePlanner())
    with pytest.raises(CheckpointException, match=f"[:;] given on rank {given}"):
        WORLD.load(tmp_path, plain(3), lambda rank: PlacementLoadPlanner(whole=whole(rank)))


# Loads


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"experts.w1": arange(8, 3), "norm": arange(5), "note": "text"}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_a_fault_of_several_ranks_stands_once_with_its_ranks(saved: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        held = {"absent": torch.zeros(1), "norm": torch.zeros(5 if rank < 2 else 6)}
        return held | ({f"late.{rank}.w": torch.zeros(2)} if rank % 2 else {})

    with refused() as refusal:
        load(WORLD, saved, state_dict)
    assert set(refusal.by_rank) == {0}, "one rank speaks for all"
    refusal.says(
        "ranks 0-3 cannot be loaded from this checkpoint (2 faults of 4 keys)",
        "absent, late.1,3.w: the checkpoint lacks this key",
        "ranks 0-3, some of the keys on fewer",
        "norm: the checkpoint holds a (5,) tensor, but (6,) is needed",
        "on:          ranks 2-3",
    )
    assert refusal.text.count("the checkpoint lacks this key") == 1
    assert refusal.text.count("way out:") == 2


def test_faults_of_placing_and_reading_come_in_one_error(saved: Path) -> None:
    with refused() as refusal:
        load(
            WORLD,
            saved,
            lambda rank: {"norm": torch.zeros(5), "absent": torch.zeros(1)},
            ruled("norm", 1, tp=4),
        )
    refusal.says("absent: the checkpoint lacks", "norm: Shard(1) over axis tp names dim 1")


def test_a_refusal_is_not_lost_where_the_coordinator_has_another_planner(saved: Path) -> None:
    with refused() as refusal:
        World(2).load(
            saved,
            lambda rank: {"absent": torch.zeros(1)} if rank else {},
            lambda rank: PlacementLoadPlanner() if rank else dcp.DefaultLoadPlanner(),
        )
    refusal.says("rank 1 cannot be loaded from this checkpoint (1 fault)", "absent: ")


def test_what_many_ranks_send_is_bounded(saved: Path) -> None:
    keys = MAX_SENT + 500
    with refused() as refusal:
        load(
            World(2),
            saved,
            lambda rank: {f"absent.{rank}.{at:05}": torch.zeros(1) for at in range(keys)},
        )
    refusal.says(f"the first {MAX_SENT:,} faults of each rank (1 fault of {2 * MAX_SENT:,} keys)\n")
    assert len(refusal.text.splitlines()) < 200


def test_ranks_that_read_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """Every rank's load is right by itself; together they would be a mixture of two steps."""
    for step, name in enumerate("ab"):
        save(WORLD, tmp_path / name, plain(3), step=step)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    for other, fact in (("b", "(step 1) on rank 2"), ("stock", "without a save id on rank 2")):
        with refused() as refusal:
            World(3).load(
                tmp_path,
                plain(3),
                lambda rank: PlacementLoadPlanner(),
                lambda rank, other=other: dcp.FileSystemReader(
                    tmp_path / (other if rank == 2 else "a")
                ),
            )
        refusal.says("the ranks read different checkpoints", "(step 0) on ranks 0-1", fact)


# What passes with a warning


def test_a_pattern_that_matches_on_one_rank_only_is_no_warning(tmp_path: Path) -> None:
    """Pipeline stages share one set of rules."""
    names = ("embed", "head", "a", "b")
    with without_warning():
        report = save(
            WORLD,
            tmp_path,
            lambda rank: {names[rank]: torch.ones(3)},
            lambda rank: PlacementRules({"embed": None, "head": None}),
        )
    assert report.unmatched == ()
    assert report.partial_keys["head"] == (1,)


def test_ranks_that_write_into_different_directories_are_warned_of(tmp_path: Path) -> None:
    """A name with the time of day in it differs between ranks now and then."""
    with pytest.warns(UserWarning, match="different directories") as caught:
        World(3).save(
            tmp_path,
            lambda rank: {"w": torch.ones(3), f"w{rank}": torch.ones(3)},
            lambda rank: PlacementSavePlanner(),
            lambda rank: dcp.FileSystemWriter(tmp_path / ("at-59", "at-59", "at-60")[rank]),
        )
    text = str(caught[0].message)
    assert "the ranks write into different directories: " in text
    assert "at-59' on ranks 0-1; " in text
    assert "at-60' on rank 2" in text


def test_one_relative_path_of_ranks_in_different_directories_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As launchers leave them that give each run a directory of its own."""

    def writer(rank: int) -> dcp.FileSystemWriter:
        (tmp_path / str(rank)).mkdir()
        monkeypatch.chdir(tmp_path / str(rank))
        return dcp.FileSystemWriter("ckpt")

    def planner(rank: int) -> PlacementSavePlanner:
        class Planner(PlacementSavePlanner):
            def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
                monkeypatch.chdir(tmp_path / str(rank))
                super().set_up_planner(*args, **kwargs)

        return Planner()

    with pytest.warns(UserWarning, match="the ranks write into different directories"):
        World(2).save("ckpt", plain(3), planner, writer)


def test_a_sound_save_says_nothing_and_reports_what_it_wrote(tmp_path: Path) -> None:
    whole = arange(8, 6)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"experts": {"w1": whole.chunk(2)[rank // 2].clone()}, "step": 3}

    with without_warning():
        report = save(WORLD, tmp_path, state_dict, ruled("experts.w1", 0, ep=2, dp=2))
    assert report.ranks == 4
    assert report.unique_nbytes == report.whole_nbytes == report.replica_nbytes == whole.nbytes
    assert report.objects == ("step",)
    assert report.rules == {"'experts.w1'": 1}
    entry = report.keys["experts.w1"]
    assert (entry.shape, entry.dtype, entry.chunks) == ((8, 6), "float32", 2)
    assert entry.held_nbytes == 2 * whole.nbytes
    assert "1 tensor and 1 object from 4 ranks" in str(report)
