"""Hazards that are known and not mended yet: each test fails until it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, load, refused, save
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementRules,
    Placements,
    Renames,
    Renumber,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.offline import rehearse
from dcp_placements.testing import World

TWO, FOUR = World(2), World(4)


def open_hazard(number: str, what: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=f"{number}: {what}")


def rules_of(world: World, axes: dict[str, int], key: str, **placements: Any) -> Any:
    def on(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, **axes)
        return PlacementRules({key: CheckpointPlacement(mesh, placements)})

    return on


@open_hazard("M74", "cuts by the same axes on other dims are not compared")
def test_m74_axes_that_are_swapped_on_a_square_tensor_are_refused(tmp_path: Path) -> None:
    axes, whole = {"ep": 2, "tp": 2}, arange(4, 4)

    def part(rank: int) -> torch.Tensor:
        return whole.chunk(2)[rank // 2].chunk(2, 1)[rank % 2].clone()

    by = rules_of(FOUR, axes, "w", ep=Shard(0), tp=Shard(1))
    save(FOUR, tmp_path, lambda rank: {"w": part(rank)}, by)
    with refused() as refusal:
        load(
            FOUR,
            tmp_path,
            lambda rank: {"w": torch.zeros(2, 2)},
            rules_of(FOUR, axes, "w", ep=Shard(1), tp=Shard(0)),
        )
    refusal.says("Shard(0) over 'ep'", "Shard(1) over 'ep'")


@open_hazard("M74", "listed rows are not compared with a plain cut")
def test_m74_listed_rows_that_a_load_declares_as_a_plain_cut_are_refused(tmp_path: Path) -> None:
    whole, rows = arange(4, 3), ((0, 2), (1, 3))

    def listed(rank: int) -> PlacementRules:
        placement = {"ep": IndexShard(0, rows[rank])}
        mesh = TWO.mesh(rank, ep=2)
        return PlacementRules({"w": CheckpointPlacement(mesh, placement, global_shape=(4, 3))})

    save(TWO, tmp_path, lambda rank: {"w": whole[list(rows[rank])]}, listed)
    with refused() as refusal:
        load(
            TWO,
            tmp_path,
            lambda rank: {"w": torch.zeros(2, 3)},
            rules_of(TWO, {"ep": 2}, "w", ep=Shard(0)),
        )
    refusal.says("rows of dim 0", "Shard(0) over 'ep'")


NAMES = ["gate", "up"]
OTHERWISE: dict[str, Any] = {
    "groups": Split("w", NAMES),
    "names": Split("w", NAMES[::-1], groups=2),
}


@open_hazard("M74", "how a rename splits or stacks is not compared")
@pytest.mark.parametrize("rename", OTHERWISE.values(), ids=OTHERWISE)
def test_m74_a_tensor_that_a_load_splits_otherwise_is_refused(tmp_path: Path, rename: Any) -> None:
    saved = Split("w", NAMES, groups=2)
    save(TWO, tmp_path, lambda rank: {"w": arange(8, 3)}, rename=saved)
    with refused():
        load(TWO, tmp_path, lambda rank: {"w": torch.zeros(8, 3)}, rename=rename)


@open_hazard("M74", "how a rename splits or stacks is not compared")
def test_m74_a_stack_along_another_dim_is_refused(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {f"experts.{i}": torch.full((2,), value * i) for i in range(2)}

    save(TWO, tmp_path, lambda rank: state(1), rename=Stack("experts.{}", 2))
    with refused():
        load(TWO, tmp_path, lambda rank: state(0), rename=Stack("experts.{}", 2, dim=1))


@open_hazard("M75", "the boxes that all ranks ask for are not compared where rows are unstacked")
def test_m75_unstacked_experts_over_the_wrong_axis_are_refused(tmp_path: Path) -> None:
    axes, whole = {"ep": 2, "edp": 2}, arange(4, 3)
    rename = Unstack("experts.{}")
    save(
        FOUR,
        tmp_path,
        lambda rank: {"experts": whole.chunk(2)[rank // 2].clone()},
        rules_of(FOUR, axes, "experts", ep=Shard(0)),
        rename=rename,
    )
    with refused():
        load(
            FOUR,
            tmp_path,
            lambda rank: {"experts": torch.zeros(2, 3)},
            rules_of(FOUR, axes, "experts", edp=Shard(0)),
            rename=rename,
        )


@open_hazard("M91", "rehearse does not know the rows that a rank has")
def test_m91_rehearse_has_the_verdict_of_a_load_that_stacks(tmp_path: Path) -> None:
    """Both ranks give their experts the numbers 0 and 1, so nobody asks for 2 and 3."""
    whole = {"experts": arange(4, 3)}
    save(TWO, tmp_path, lambda rank: whole)

    def at(mesh: Any) -> Placements:
        rename = Renames(Renumber("experts.{}", [0, 1], total=4), Stack("experts.{}", 4))
        return Placements(None, rename=rename)

    def loads() -> bool:
        try:
            TWO.load(
                tmp_path,
                lambda rank: {f"experts.{i}": torch.zeros(3) for i in range(2)},
                lambda rank: at(TWO.mesh(rank, ep=2)).load_planner(),
            )
        except CheckpointException:
            return False
        return True

    assert rehearse(tmp_path, at, {"ep": 2}).loads == loads()
