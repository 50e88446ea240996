"""What a declaration that does not fit is refused or warned of with: the facts, and the way out.

The rows of ``hazards.md`` are in ``test_hazards_save.py`` and ``test_hazards_load.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, load, refused, refused_save, save, warned, without_warning
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Partial, Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renumber,
    Stack,
)
from dcp_placements.errors import MAX_SENT
from dcp_placements.testing import FakeDTensor, FakeMesh, World

WORLD = World(4)
Ranked = Callable[[int], Any]


def ruled(
    pattern: str,
    placements: dict[str, Any],
    global_shape: tuple[int, ...] | None = None,
    **axes: int,
) -> Ranked:
    """Return each rank's rules: one pattern, over the mesh of ``axes``."""

    def rules(rank: int) -> PlacementRules:
        mesh = WORLD.mesh(rank, **axes)
        return PlacementRules(
            {pattern: CheckpointPlacement(mesh, placements, global_shape=global_shape)}
        )

    return rules


def plain(*shape: int) -> Ranked:
    return lambda rank: {"w": torch.zeros(shape)}


def sharded(axis: str, *shape: int, dim: int = 0, **axes: int) -> Ranked:
    """Return each rank's state dict of one DTensor over an axis of a mesh."""

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, **axes)[axis]
        return {"w": FakeDTensor.distribute(torch.zeros(shape), mesh, [Shard(dim)])}

    return state_dict


def uneven(rank: int) -> dict[str, Any]:
    """Of 7 rows the first edp rank should have 4; the second has its 3."""
    mesh = WORLD.mesh(rank, ep=2, edp=2)
    return {"layers.0.w": FakeDTensor(torch.zeros(3, 5), mesh["edp"], [Shard(0)], (7, 5))}


def outside(rank: int) -> PlacementRules:
    mesh = FakeMesh((3,), ("ep",), rank=rank)
    return PlacementRules({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def no_placement(fqn: str, tensor: Any) -> Any:
    return Shard(0)


def on_some_ranks(rank: int) -> PlacementRules:
    mesh = WORLD.mesh(rank, ep=4)
    return PlacementRules({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})} if rank < 2 else {})


def other_dims(rank: int) -> PlacementRules:
    return PlacementRules({"w": CheckpointPlacement(WORLD.mesh(rank, ep=4), [Shard(rank % 2)])})


def two_copies(rank: int) -> dict[str, Any]:
    return {"w": torch.full((3, 2), 1.0 + rank)} if rank in (0, 3) else {}


REFUSED: dict[str, tuple[Ranked, Ranked, tuple[str, ...]]] = {
    "a local shape that does not fit": (
        uneven,
        ruled("w", {"ep": Shard(0)}, ep=2, edp=2),
        (
            "ranks 0, 2 cannot be placed in the checkpoint (1 fault)",
            "layers.0.w: holds a (3, 5) tensor where (4, 5) was declared",
            "[Shard(0), Replicate()] on mesh (ep=2, edp=2)",
            "DTensor of shape (7, 5), [Shard(0)] on mesh (edp=2)",
            "(ep=0, edp=0) on rank 0",
            "whole tensor (14, 5), cut by Shard(0) over 'ep' of size 2, then Shard(0) over 'edp'",
            "by rule:     'w'",
        ),
    ),
    "a global shape that does not fit": (
        plain(4, 3),
        ruled("w", {"ep": Shard(0)}, (20, 3), ep=4),
        ("w: holds a (4, 3) tensor where (5, 3)", "(20, 3)", "a wrong global_shape="),
    ),
    "a global shape that does not fit a DTensor": (
        sharded("fsdp", 4, 3, ep=2, fsdp=2),
        ruled("w", {"ep": Shard(0)}, (10, 3), ep=2, fsdp=2),
        ("a wrong global_shape=", "DTensor.from_local()"),
    ),
    "a global shape of other dims": (
        plain(4, 3),
        ruled("w", {"ep": Shard(0)}, (8,), ep=4),
        ("w: the tensor has 2 dims", "global_shape=(8,)", "has 1"),
    ),
    "a dim out of range": (
        plain(4),
        ruled("w", {"ep": Shard(1)}, ep=4),
        ("w: holds a tensor of 1 dim, but Shard(1) over axis ep names dim 1", "'w'"),
    ),
    "one axis on two dims": (
        sharded("fsdp", 4, 6, fsdp=4),
        ruled("w", {"fsdp": Shard(1)}, fsdp=4),
        ("w: has axis fsdp sharded on dim 0 by its own DTensor, but as Shard(1)", "leave it out"),
    ),
    "listed rows over an axis that the tensor shards": (
        sharded("ep", 4, 6, ep=4),
        ruled("w", {"ep": IndexShard(0, (0,))}, (4, 6), ep=4),
        ("w: has axis ep sharded on dim 0 by its own DTensor, but as IndexShard(0"),
    ),
    "one axis of two sizes": (
        sharded("fsdp", 4, 6, other=2, fsdp=2),
        ruled("w", {"fsdp": Replicate()}, fsdp=4),
        ("w: has axis fsdp of size 2 by its own DTensor, but of size 4 by the rule",),
    ),
    "one axis in two places": (
        sharded("fsdp", 4, 6, fsdp=2, ep=2),
        ruled("w", {"ep": Shard(0)}, ep=2, fsdp=2),
        ("w: has axis fsdp with this rank at 0 by its own DTensor, but at 1 by the rule",),
    ),
    "axes that need more ranks than there are": (
        sharded("fsdp", 8, 3, ep=2, fsdp=2),
        ruled("w", {"ep": Shard(0)}, ep=4),
        (
            "w: nobody holds all of the (32, 3) tensor",
            "'ep' of size 4 and 'fsdp' of size 2 need 8 ranks, and there are 4",
        ),
    ),
    "a mesh that the rank is not part of": (
        plain(2),
        outside,
        ("rank 3 cannot be placed", "w: the rank is not part of the rule's mesh (ep=3)"),
    ),
    "parts that do not add up": (
        plain(5, 3),
        ruled("w", {"tp": FusedShard(0, (8, 2, 2))}, tp=4),
        ("w: parts (8, 2, 2) add up to 12, but 20 rows are being cut", "parts= of FusedShard"),
    ),
    "rules that give no placement": (
        plain(3),
        lambda rank: no_placement,
        ("w: was given Shard(dim=0) by the rules", "no_placement()", "way out:"),
    ),
    "a rule that some ranks lack": (
        plain(3, 4),
        on_some_ranks,
        ("(12, 4) on ranks 0-1", "(3, 4) on ranks 2-3", "the ranks have different rules"),
    ),
    "a rule that shards another dim on some ranks": (
        plain(4, 3),
        other_dims,
        ("the ranks have different rules",),
    ),
    "a key that one rank lacks": (
        lambda rank: {"other": torch.ones(2)} | ({"w": torch.ones(2, 3)} if rank != 2 else {}),
        ruled("w", {"ep": Shard(0)}, ep=4),
        (
            "w: nobody holds all of the (8, 3) tensor",
            "[4:6, :] of (8, 3) (6 of 24 elements)",
            "ranks 0-1, 3",
            "rank 2",
            "by rule:     'w'",
        ),
    ),
    "copies that either of two axes tells apart": (
        two_copies,
        ruled("w", {}, ep=2, tp=2),
        ("differs along 'ep', 'tp'", "it is sharded over 'ep' or 'tp'"),
    ),
    "a pattern with a slip, and what it leads to": (
        lambda rank: {"ws": torch.full((4, 3), float(rank))},
        ruled("w", {"ep": Shard(0)}, ep=4),
        ("'w': no key on any rank matches", "ws: 4 different contents", "differs along 'ep'"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_the_facts_and_a_way_out(case: str, tmp_path: Path) -> None:
    state_dict, rules, facts = REFUSED[case]
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state_dict, rules)
    refusal.says(*facts, "way out:")


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
        save(WORLD, tmp_path, state_dict, ruled("z", {"tp": Shard(1)}, dp=2, tp=2))
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


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("layers.3.mlp.experts.0.w1", "experts.{}"),
        ("layers.3.mlp.local_experts.0.fc1.weight", "local_experts.{}"),
        ("layers.3.mlp.experts.linear_fc1.weight0", "experts.linear_fc1.weight{}"),
    ],
)
def test_experts_that_are_numbered_from_0_are_to_be_renamed_before_they_are_sharded(
    tmp_path: Path, key: str, pattern: str
) -> None:
    with refused_save(tmp_path) as refusal:
        save(
            WORLD,
            tmp_path,
            lambda rank: {key: torch.full((3, 2), 1.0 + rank // 2)},
            ruled("other", {"ep": Shard(0)}, ep=2, edp=2),
        )
    refusal.says("every rank counts its own from 0", f'rename=Renumber("{pattern}", this rank')
    assert Renumber(pattern, [5], total=8)(key) != key, "the pattern fits the key"


def test_a_stack_of_local_numbers_needs_a_renumber_before_it(tmp_path: Path) -> None:
    with refused_save(tmp_path) as refusal:
        save(
            WORLD,
            tmp_path,
            lambda rank: {f"experts.{n}.w1": torch.full((3, 2), 10.0 * rank + n) for n in range(2)},
            rename=Stack("experts.{}", 2),
        )
    refusal.says("experts.w1: 4 different contents on 4 ranks", "a Renumber before the Stack")


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
            ruled("norm", {"tp": Shard(1)}, tp=4),
        )
    refusal.says("absent: the checkpoint lacks", "norm: holds a tensor of 1 dim")


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
    for other, fact in (("b", "(step 1) by rank 2"), ("stock", "without a save id by rank 2")):
        with refused() as refusal:
            World(3).load(
                tmp_path,
                plain(3),
                lambda rank: PlacementLoadPlanner(),
                lambda rank, other=other: dcp.FileSystemReader(
                    tmp_path / (other if rank == 2 else "a")
                ),
            )
        refusal.says("the ranks read different checkpoints", "(step 0) by ranks 0-1", fact)


def test_parts_that_ranks_saved_alone_are_not_taken_for_different_checkpoints(
    tmp_path: Path,
) -> None:
    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {f"w{rank}": torch.ones(3)},
        lambda rank: PlacementSavePlanner(),
        use_collectives=False,
    )

    class OwnMetadata(dcp.FileSystemReader):
        """Reads what a rank wrote, as torch does where there is no global metadata."""

        def __init__(self, rank: int) -> None:
            super().__init__(tmp_path)
            self.own = rank

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return super().read_metadata(rank=self.own)

    loaded = world.load(
        tmp_path,
        lambda rank: {f"w{rank}": torch.zeros(3)},
        lambda rank: PlacementLoadPlanner(),
        OwnMetadata,
    )
    assert loaded[1]["w1"].tolist() == [1, 1, 1]


# What passes with a warning


@pytest.mark.parametrize(
    ("patterns", "likely"),
    [
        (["expert"], "'expert' is no component of any key; 'experts' is"),
        (["layers", "experts"], None),
        (["attention"], None),
    ],
)
def test_a_pattern_that_matches_nothing_anywhere_is_warned_of_and_reported(
    tmp_path: Path, patterns: list[str], likely: str | None
) -> None:
    with warned() as texts:
        report = save(
            WORLD,
            tmp_path,
            lambda rank: {"layers.0.experts.w1": torch.ones(3)},
            lambda rank: PlacementRules(dict.fromkeys(patterns)),
        )
    (text,) = texts
    assert report.unmatched == (repr(patterns[-1]),)
    assert "no key on any rank matches" in text
    assert ("likely:" in text) == (likely is not None)
    assert (likely or "way out:") in text


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
    assert "the ranks write into 2 different directories: " in text
    assert "at-59' on ranks 0-1; " in text
    assert "at-60' on rank 2" in text


def test_a_sound_save_says_nothing_and_reports_what_it_wrote(tmp_path: Path) -> None:
    whole = arange(8, 6)

    def state_dict(rank: int) -> dict[str, Any]:
        return {"experts": {"w1": whole.chunk(2)[rank // 2].clone()}, "step": 3}

    with without_warning():
        report = save(
            WORLD, tmp_path, state_dict, ruled("experts.w1", {"ep": Shard(0)}, ep=2, dp=2)
        )
    assert report.ranks == 4
    assert report.unique_nbytes == report.whole_nbytes == report.replica_nbytes == whole.nbytes
    assert report.objects == ("step",)
    assert report.rules == {"'experts.w1'": 1}
    entry = report.keys["experts.w1"]
    assert (entry.shape, entry.dtype, entry.chunks) == ((8, 6), "float32", 2)
    assert entry.held_nbytes == 2 * whole.nbytes
    assert "1 tensor and 1 object from 4 ranks" in str(report)
