"""What shapes cannot show is compared with the record of the save, where a rule or a rename
declares it; a load into another topology is quiet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, load, refused, same_bits, save
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementRules,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.testing import FakeDTensor, World

TWO, FOUR = World(2), World(4)


def rules_of(world: World, axes: dict[str, int], key: str, **placements: Any) -> Any:
    def on(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, **axes)
        return PlacementRules({key: CheckpointPlacement(mesh, placements)})

    return on


ROWS = ((0, 2), (1, 3))


def listed(rank: int) -> PlacementRules:
    placement = {"ep": IndexShard(0, ROWS[rank])}
    mesh = TWO.mesh(rank, ep=2)
    return PlacementRules({"w": CheckpointPlacement(mesh, placement, global_shape=(4, 3))})


def test_m74_axes_that_are_swapped_on_a_square_tensor_are_refused(tmp_path: Path) -> None:
    axes, whole = {"ep": 2, "tp": 2}, arange(4, 4)

    def part(rank: int) -> torch.Tensor:
        return whole.chunk(2)[rank // 2].chunk(2, 1)[rank % 2].clone()

    by = rules_of(FOUR, axes, "w", ep=Shard(0), tp=Shard(1))
    save(FOUR, tmp_path, lambda rank: {"w": part(rank)}, by)
    swapped = rules_of(FOUR, axes, "w", ep=Shard(1), tp=Shard(0))
    with refused() as refusal:
        load(FOUR, tmp_path, lambda rank: {"w": torch.zeros(2, 2)}, swapped)
    refusal.says("Shard(0) over 'ep'", "Shard(1) over 'ep'")
    waive = {"w": "the model lays out w in another way"}
    load(FOUR, tmp_path, lambda rank: {"w": torch.zeros(2, 2)}, swapped, waive=waive)


def test_m74_listed_rows_that_a_load_declares_as_a_plain_cut_are_refused(tmp_path: Path) -> None:
    whole = arange(4, 3)
    save(TWO, tmp_path, lambda rank: {"w": whole[list(ROWS[rank])]}, listed)
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


@pytest.mark.parametrize("rename", OTHERWISE.values(), ids=OTHERWISE)
def test_m74_a_tensor_that_a_load_splits_otherwise_is_refused(tmp_path: Path, rename: Any) -> None:
    saved = Split("w", NAMES, groups=2)
    save(TWO, tmp_path, lambda rank: {"w": arange(8, 3)}, rename=saved)
    with refused():
        load(TWO, tmp_path, lambda rank: {"w": torch.zeros(8, 3)}, rename=rename)


def test_m74_a_stack_along_another_dim_is_refused(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {f"experts.{i}": torch.full((2,), value * i) for i in range(2)}

    save(TWO, tmp_path, lambda rank: state(1), rename=Stack("experts.{}", 2))
    with refused():
        load(TWO, tmp_path, lambda rank: state(0), rename=Stack("experts.{}", 2, dim=1))


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


def test_dtensors_that_swap_their_dims_are_quiet(tmp_path: Path) -> None:
    """A DTensor is what it says; only a rule may be wrong."""
    whole = arange(4, 4)

    def state(rank: int, *dims: int) -> dict[str, Any]:
        mesh = FOUR.mesh(rank, ep=2, tp=2)
        return {"w": FakeDTensor.distribute(whole, mesh, [Shard(dim) for dim in dims])}

    save(FOUR, tmp_path, lambda rank: state(rank, 0, 1))
    loaded, _ = load(FOUR, tmp_path, lambda rank: state(rank, 1, 0))
    assert same_bits(loaded[1]["w"].to_local(), whole[2:, :2])


def test_listed_rows_are_loaded_plainly_by_another_number_of_ranks(tmp_path: Path) -> None:
    whole = arange(4, 3)
    save(TWO, tmp_path / "listed", lambda rank: {"w": whole[list(ROWS[rank])]}, listed)
    loaded, _ = load(
        FOUR,
        tmp_path / "listed",
        lambda rank: {"w": torch.zeros(1, 3)},
        rules_of(FOUR, {"ep": 4}, "w", ep=Shard(0)),
    )
    assert same_bits(loaded[2]["w"], whole[2:3])
    # A plain cut is loaded as listed rows: an inference engine that places experts as it likes.
    plain = rules_of(TWO, {"ep": 2}, "w", ep=Shard(0))
    save(TWO, tmp_path / "plain", lambda rank: {"w": whole.chunk(2)[rank].clone()}, plain)
    loaded, _ = load(TWO, tmp_path / "plain", lambda rank: {"w": torch.zeros(2, 3)}, listed)
    assert same_bits(loaded[1]["w"], whole[[1, 3]])


def test_m74_rows_of_another_dim_are_refused(tmp_path: Path) -> None:
    save(TWO, tmp_path, lambda rank: {"experts": arange(3, 3)}, rename=Unstack("experts.{}"))
    other = Unstack("experts.{}", dim=1)
    with refused() as refusal:
        load(TWO, tmp_path, lambda rank: {"experts": torch.zeros(3, 3)}, rename=other)
    refusal.says("another Unstack", "Unstack('experts.{}', dim=1)")
    state = {"experts": torch.zeros(3, 3)}
    load(World(1), tmp_path, lambda rank: state, rename=other, waive={"experts.*": "transposed"})
    assert torch.equal(state["experts"], arange(3, 3).T)


def test_unstacked_experts_over_an_axis_of_another_name_are_quiet(tmp_path: Path) -> None:
    whole, rename = arange(4, 3), Unstack("experts.{}")
    by_ep = rules_of(TWO, {"ep": 2}, "experts", ep=Shard(0))
    save(TWO, tmp_path, lambda rank: {"experts": whole.chunk(2)[rank]}, by_ep, rename=rename)
    loaded, _ = load(
        FOUR,
        tmp_path,
        lambda rank: {"experts": torch.zeros(2, 3)},
        rules_of(FOUR, {"dp": 2, "expert": 2}, "experts", expert=Shard(0)),
        rename=rename,
    )
    assert same_bits(loaded[1]["experts"], whole[2:])
