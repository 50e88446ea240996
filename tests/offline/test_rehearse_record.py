"""``rehearse`` and the record in a checkpoint: it gives the verdict that the load gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, refused, save
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    Placements,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
)
from dcp_placements.offline import rehearse
from dcp_placements.testing import World

TWO = World(2)
KEY = "layers.0.mlp.gate_up.weight"
WAIVED = {"gate_up": "cut apart by hand afterwards"}


def by_tp(placement: Any, **options: Any) -> Any:
    def at(mesh: Any) -> Placements:
        return Placements({KEY: CheckpointPlacement(mesh, {"tp": placement})}, **options)

    return at


def save_fused(path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {KEY: torch.cat([part.chunk(2)[rank] for part in arange(8, 3).chunk(2)])}

    at = by_tp(FusedShard(0, 2))
    save(TWO, path, state, lambda rank: at(TWO.mesh(rank, tp=2)).rules)


def loads(path: Path, at: Any, axis: str, state: Any) -> bool:
    """Whether two ranks really load by these placements."""
    try:
        TWO.load(path, state, lambda rank: at(TWO.mesh(rank, **{axis: 2})).load_planner())
    except CheckpointException:
        return False
    return True


def assert_verdict(path: Path, at: Any, axis: str, state: Any, *, right: bool) -> Any:
    found = rehearse(path, at, {axis: 2})
    assert found.loads == loads(path, at, axis, state) == right, found.faults
    return found


@pytest.mark.filterwarnings("ignore:look at this load")
@pytest.mark.parametrize(
    ("placement", "options", "right"),
    [
        (FusedShard(0, 2), {}, True),
        (FusedShard(0, (4, 4)), {}, True),
        (Shard(0), {}, False),
        (Shard(0), {"waive": WAIVED}, True),
        (FusedShard(0, 4), {}, False),
    ],
)
def test_another_cut_than_the_save_had_is_refused_as_by_a_load(
    tmp_path: Path, placement: Any, options: dict[str, Any], right: bool
) -> None:
    save_fused(tmp_path)
    at = by_tp(placement, **options)
    found = assert_verdict(tmp_path, at, "tp", lambda rank: {KEY: torch.zeros(4, 3)}, right=right)
    if placement == Shard(0) and not right:
        (fault,) = found.faults
        text = str(fault)
        for part in (
            f"{KEY}: this load cuts it by 'tp' in another way than the save did",
            "on:          ranks 0-1",
            "saved:       FusedShard(0, 2) over 'tp' of size 2",
            "this load:   Shard(0) over 'tp' of size 2",
            f"by rule:     '{KEY}'",
            'way out:     {"tp": FusedShard(0, 2)} in the rules of this load',
        ):
            assert part in text


def test_a_plain_cut_by_fsdp_alone_is_quiet_and_by_the_same_axis_is_not(tmp_path: Path) -> None:
    save_fused(tmp_path)
    assert rehearse(tmp_path, lambda mesh: Placements(None), {"dp": 2}, fsdp=["dp"]).loads
    assert not rehearse(tmp_path, lambda mesh: Placements(None), {"tp": 2}, fsdp=["tp"]).loads


def experts(mine: list[int]) -> dict[str, Any]:
    return {f"experts.{i}.w": arange(2, start=10 * e) for i, e in enumerate(mine)}


@pytest.mark.parametrize(
    ("numbers", "total", "right"),
    [
        ([[0, 1], [2, 3]], 4, True),
        ([[2, 1], [3, 0]], 4, True),
        ([[0, 1], [0, 1]], 4, False),
        ([[0], [1]], 2, False),
    ],
)
def test_numbers_of_another_rank_or_total_are_refused_as_by_a_load(
    tmp_path: Path, numbers: list[list[int]], total: int, right: bool
) -> None:
    TWO.save(
        tmp_path,
        lambda rank: experts([2 * rank, 2 * rank + 1]),
        lambda rank: PlacementSavePlanner(
            rename=Renumber("experts.{}", [2 * rank, 2 * rank + 1], total=4)
        ),
    )

    def at(mesh: Any, waive: Any = None) -> Placements:
        mine = numbers[mesh.get_coordinate()[0]]
        return Placements(None, rename=Renumber("experts.{}", mine, total=total), waive=waive)

    def state(rank: int) -> dict[str, Any]:
        return {key: torch.zeros(2) for key in experts(numbers[rank])}

    found = assert_verdict(tmp_path, at, "ep", state, right=right)
    if not right:
        with refused() as refusal:
            TWO.load(tmp_path, state, lambda rank: at(TWO.mesh(rank, ep=2)).load_planner())
        (fault,) = found.faults
        refusal.says(fault.headline.removeprefix("a rank "), fault.details[-1])
        excused = {"experts": "a smaller model"}
        assert rehearse(tmp_path, lambda mesh: at(mesh, excused), {"ep": 2}).loads


@pytest.mark.parametrize(("second", "right"), [([2, 3], True), ([1, 2], True), ([0, 1], False)])
def test_rows_of_another_rank_are_refused_as_by_a_load(
    tmp_path: Path, second: list[int], right: bool
) -> None:
    whole = arange(4, 3)

    def by_rows(second: list[int], **options: Any) -> Any:
        def at(mesh: Any) -> Placements:
            rows = [[0, 1], second][mesh.get_coordinate()[0]]
            entry = CheckpointPlacement(mesh, {"ep": IndexShard(0, rows)}, global_shape=(4, 3))
            return Placements({"w": entry}, **options)

        return at

    own = by_rows([2, 3])
    TWO.save(
        tmp_path,
        lambda rank: {"w": whole[[[0, 1], [2, 3]][rank]].clone()},
        lambda rank: own(TWO.mesh(rank, ep=2)).save_planner(),
    )
    at = by_rows(second)
    found = assert_verdict(tmp_path, at, "ep", lambda rank: {"w": torch.zeros(2, 3)}, right=right)
    if not right:
        (fault,) = found.faults
        assert "several ranks ask for [0:2, :] of (4, 3), and none for [2:4, :]" in str(fault)
        assert rehearse(tmp_path, by_rows(second, waive={"w": "half of it"}), {"ep": 2}).loads


def test_a_checkpoint_without_a_record_is_not_compared(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({KEY: arange(8, 3)}, checkpoint_id=tmp_path, no_dist=True)
    assert rehearse(tmp_path, by_tp(Shard(0)), {"tp": 2}).loads


def test_m91_rows_that_nobody_asks_for_are_refused_as_by_a_load_that_stacks(tmp_path: Path) -> None:
    """Both ranks give their experts the numbers 0 and 1, so nobody asks for 2 and 3."""
    save(TWO, tmp_path, lambda rank: {"experts": arange(4, 3)})

    def at(mesh: Any) -> Placements:
        rename = Renames(Renumber("experts.{}", [0, 1], total=4), Stack("experts.{}", 4))
        return Placements(None, rename=rename)

    def state(rank: int) -> dict[str, Any]:
        return {f"experts.{i}": torch.zeros(3) for i in range(2)}

    assert_verdict(tmp_path, at, "ep", state, right=False)


def test_a_number_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    save(TWO, tmp_path, lambda rank: {"experts.0.w": arange(2), "experts.1.w": arange(2)})

    def at(mesh: Any) -> Placements:
        first = 2 * mesh.get_coordinate()[0]
        return Placements(None, rename=Renumber("experts.{}", [first, first + 1], total=4))

    def state(rank: int) -> dict[str, Any]:
        return {key: torch.zeros(2) for key in experts([0, 1])}

    found = assert_verdict(tmp_path, at, "ep", state, right=False)
    assert {fault.fqn for fault in found.faults} == {"experts.2.w", "experts.3.w"}
