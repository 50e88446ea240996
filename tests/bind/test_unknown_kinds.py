"""A placement, or a kind of cut, that is not known is refused wherever it could be taken for
another one."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, load, refused, save
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    MeshCoordinate,
    PlacementError,
)
from dcp_placements.errors import CannotPlace
from dcp_placements.layout.cuts_compared import canonical
from dcp_placements.layout.sharding import Cut, Sharding
from dcp_placements.offline import rehearse, reshard
from dcp_placements.testing import FakeDTensor, World

WORLD = World(2)
MESH = MeshCoordinate(("ep",), (2,), (0,))


class BlockCyclicShard(Shard):
    """Rows 0, 2, 4, ... on the first of two ranks: not those of ``Shard``."""


class ManyParts(FusedShard):
    """Parts that nobody here knows how to cut."""


def state_dict(rank: int) -> dict[str, Any]:
    mesh = WORLD.mesh(rank, ep=2)
    rows = arange(8, 3)[rank::2].clone()
    return {"w": FakeDTensor(rows, mesh, (BlockCyclicShard(0),), (8, 3))}


@pytest.mark.parametrize("placement", [BlockCyclicShard(0), ManyParts(0, 2)])
def test_m97_a_placement_of_another_class_is_refused_where_it_is_declared(placement: Any) -> None:
    with pytest.raises(PlacementError) as refusal:
        CheckpointPlacement(MESH, {"ep": placement})
    assert type(placement).__name__ in str(refusal.value)


def test_m97_a_dtensor_of_another_placement_is_refused_by_name_in_a_save(tmp_path: Path) -> None:
    with refused() as refusal:
        save(WORLD, tmp_path, state_dict)
    refusal.says("w: its own DTensor: ", "BlockCyclicShard", "which rows its ranks hold")
    assert not (tmp_path / ".metadata").exists()


def test_m97_a_dtensor_of_another_placement_is_refused_by_name_in_a_load(tmp_path: Path) -> None:
    save(WORLD, tmp_path, lambda rank: {"w": arange(8, 3)})
    states = [state_dict(rank) for rank in range(2)]
    with refused() as refusal:
        load(WORLD, tmp_path, lambda rank: states[rank])
    refusal.says("w: its own DTensor: ", "BlockCyclicShard")
    assert torch.equal(states[0]["w"].to_local(), arange(8, 3)[0::2])


class NewKind(StrEnum):
    """A member that somebody adds to ``Kind``, and forgets everywhere else."""

    CYCLIC = "cyclic"


NEW: Any = NewKind.CYCLIC
CYCLIC = Cut(0, "ep", 2, NEW)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Sharding((8, 3), (CYCLIC,)).shard((0,))[1],
        lambda: str(CYCLIC),
        lambda: canonical([CYCLIC]),
    ],
    ids=["layout", "message", "comparison"],
)
def test_m97_a_kind_of_cut_that_a_place_does_not_handle_is_refused_there(
    ask: Callable[[], Any],
) -> None:
    with pytest.raises(CannotPlace, match="a cut of kind cyclic is not supported here"):
        ask()


def declared(placement: Any) -> Callable[[MeshCoordinate], Any]:
    return lambda mesh: {"w": CheckpointPlacement(mesh, {"ep": placement})}


WORLDS: dict[str, Callable[[Path, Any], Any]] = {
    "rehearse": lambda path, one: rehearse(path / "saved", declared(one), {"ep": 2}),
    "reshard": lambda path, one: reshard(path / "saved", path / "out", declared(one), {"ep": 2}),
}


@pytest.mark.parametrize("kind", WORLDS)
def test_m97_worlds_of_an_unknown_placement_are_refused(tmp_path: Path, kind: str) -> None:
    save(WORLD, tmp_path / "saved", lambda rank: {"w": arange(8, 3)})
    with pytest.raises(PlacementError, match="BlockCyclicShard: which rows its ranks hold"):
        WORLDS[kind](tmp_path, BlockCyclicShard(0))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
