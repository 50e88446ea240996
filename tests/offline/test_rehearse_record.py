"""``rehearse`` and the record in a checkpoint: it gives the verdict that the load gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, save
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    Placements,
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


def experts(mine: list[int]) -> dict[str, Any]:
    return {f"experts.{i}.w": arange(2, start=10 * e) for i, e in enumerate(mine)}


def test_m91_rows_that_nobody_asks_for_are_refused_as_by_a_load_that_stacks(tmp_path: Path) -> None:
    """Both ranks give their experts the numbers 0 and 1, so nobody asks for 2 and 3."""
    save(TWO, tmp_path, lambda rank: {"experts": arange(4, 3)})

    def at(mesh: Any) -> Placements:
        rename = Renames(Renumber("experts.{}", [0, 1], total=4), Stack("experts.{}", 4))
        return Placements(None, rename=rename)

    def state(rank: int) -> dict[str, Any]:
        return {f"experts.{i}": torch.zeros(3) for i in range(2)}

    assert_verdict(tmp_path, at, "ep", state, right=False)
