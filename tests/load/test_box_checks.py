"""Boxes of sharded keys: a load that asks twice for one and never for another is refused; what is
right together, or left out on purpose, is quiet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, blank, refused, same_bits, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
    contiguous,
)
from dcp_placements.testing import FakeDTensor, World

FOUR = World(4)
WHOLE = {f"layers.{i // 6}.experts.{i % 6}.w": arange(4, 2, start=100 * i) for i in range(12)}
STACKED = {f"layers.{i}.experts.w": arange(6, 4, 2, start=100 * i) for i in range(2)}

Planned = Callable[[int], Any]


def mesh(rank: int) -> Any:
    return FOUR.mesh(rank, edp=2, ep=2)


def at(rank: int, axis: str) -> int:
    return int(mesh(rank)[axis].get_coordinate()[0])


def over_edp(rank: int, whole: torch.Tensor, dim: int = 0) -> FakeDTensor:
    """Return a tensor as FSDP over ``edp`` has it, which knows of no ``ep``."""
    return FakeDTensor.distribute(whole, mesh(rank)["edp"], [Shard(dim)])


def experts(rank: int) -> dict[str, Any]:
    """Return the experts of ``ep``, numbered from 0, each over ``edp``."""
    first = 3 * at(rank, "ep")
    return {
        f"layers.{layer}.experts.{i}.w": over_edp(
            rank, WHOLE[f"layers.{layer}.experts.{first + i}.w"]
        )
        for layer in range(2)
        for i in range(3)
    }


def numbered(axis: str) -> Callable[[int], Renumber]:
    return lambda rank: Renumber("experts.{}", contiguous([3, 3], at=at(rank, axis)), total=6)


def unchanged(key: str) -> str:
    return key


def save(path: Path, state: Planned = experts, **options: Planned) -> None:
    options = options or {"rename": numbered("ep")}

    def planner(rank: int) -> PlacementSavePlanner:
        return PlacementSavePlanner(**{name: of(rank) for name, of in options.items()})

    FOUR.save(path, state, planner)


def load(
    path: Path, state: Planned, world: World = FOUR, everywhere: Any = (), **options: Planned
) -> list[dict[str, Any]]:
    def planner(rank: int) -> PlacementLoadPlanner:
        mine = {name: of(rank) for name, of in options.items()}
        return PlacementLoadPlanner(**mine, **dict(everywhere))

    return world.load(path, lambda rank: blank(state(rank)), planner)


def test_m43_numbers_by_the_position_along_edp_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    with refused() as refusal:
        load(tmp_path, experts, rename=numbered("edp"))
    refusal.says(
        "layers.0-1.experts.0-2.w: several ranks",
        "several ranks ask for [0:2, :] of (4, 2), and none for [2:4, :]",
        "several ranks ask for [2:4, :] of (4, 2), and none for [0:2, :]",
        "saved:       Shard(0) over 'edp' of size 2",
        "this load:   Shard(0) over 'edp' of size 2; rename=Renumber('experts.{}', total=6)",
        "asked for:   [0:2, :] by ranks 0-1",
        "asked for:   [2:4, :] by ranks 2-3",
        "position of another rank, as along a wrong axis (edp in place of ep)",
        "waive={pattern: reason}",
    )


def test_m43_a_stack_of_experts_by_the_position_along_edp_is_refused(tmp_path: Path) -> None:
    def stacks(axis: str) -> Callable[[int], Renames]:
        return lambda rank: Renames(numbered(axis)(rank), Stack("experts.{}", total=6))

    save(tmp_path, rename=stacks("ep"))
    with refused() as refusal:
        load(tmp_path, experts, rename=stacks("edp"))
    refusal.says(
        "layers.0-1.experts.w: several ranks ask for [0:3, 0:2, :] "
        "of (6, 4, 2), and none for [0:3, 2:4, :], [3:6, 0:2, :]",
    )


def placed(axis: str) -> Callable[[int], PlacementRules]:
    """Return rules with a mesh of which ``ep`` is the position along ``axis``."""

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(mesh(rank)[axis], [Shard(0)])
        return PlacementRules({"experts": placement})

    return rules


def stacked(rank: int) -> dict[str, Any]:
    """Return what a framework has as one tensor per layer, over ``edp`` on the second dim."""
    rows = slice(3 * at(rank, "ep"), 3 * at(rank, "ep") + 3)
    return {fqn: over_edp(rank, whole[rows], dim=1) for fqn, whole in STACKED.items()}


def swapped(rank: int) -> PlacementRules:
    """Return rules with a mesh whose axes were named in the wrong order."""
    named = FOUR.mesh(rank, ep=2, xdp=2)
    return PlacementRules({"experts": CheckpointPlacement(named, {"ep": Shard(0)})})


def test_m43_a_rule_with_the_axes_of_its_mesh_in_the_wrong_order_is_refused(
    tmp_path: Path,
) -> None:
    save(tmp_path, stacked, rules=placed("ep"))
    with refused() as refusal:
        load(tmp_path, stacked, rules=swapped)
    refusal.says(
        "layers.0-1.experts.w: several ranks ask for [0:3, 0:2, :] of "
        "(6, 4, 2), and none for [0:3, 2:4, :], [3:6, 0:2, :]",
        "by ranks 0-1; [3:6, 2:4, :] by ranks 2-3",
    )


def test_right_loads_of_sharded_experts_are_quiet(tmp_path: Path) -> None:
    save(tmp_path)
    with without_warning():
        loaded = load(tmp_path, experts, rename=numbered("ep"))
        one = load(tmp_path, lambda rank: WHOLE, World(1), rename=lambda rank: unchanged)
        whole = load(tmp_path, lambda rank: WHOLE, rename=lambda rank: unchanged)
    for rank, state in enumerate(loaded):
        for fqn, value in experts(rank).items():
            assert same_bits(state[fqn].to_local(), value.to_local())
    for state in [*one, *whole]:
        assert all(same_bits(state[fqn], value) for fqn, value in WHOLE.items())


def test_a_rank_that_asks_for_the_whole_tensor_leaves_no_gap(tmp_path: Path) -> None:
    """An evaluation on rank 3 reads all experts, while the others read by half."""
    save(tmp_path)

    def state(rank: int) -> dict[str, Any]:
        return experts(rank) if rank < 3 else WHOLE

    with without_warning():
        loaded = load(
            tmp_path, state, rename=lambda rank: numbered("edp")(rank) if rank < 3 else unchanged
        )
    assert all(same_bits(loaded[3][fqn], value) for fqn, value in WHOLE.items())


@pytest.mark.parametrize("option", [{"optional": ["experts"]}, {"waive": {"experts": "half"}}])
def test_boxes_left_out_on_purpose_are_quiet_when_an_option_names_the_key(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    save(tmp_path)
    with without_warning():
        load(tmp_path, experts, everywhere=option, rename=numbered("edp"))


@pytest.mark.parametrize("partial", [False, True])
def test_ranks_with_parts_of_their_own_are_quiet(tmp_path: Path, partial: bool) -> None:
    """Half of an embedding for inference: no rank asks for what another one asks for."""
    emb = arange(8, 2)
    dcp.save({"emb": emb}, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    two = World(2)

    def rules(rank: int) -> PlacementRules:
        return PlacementRules({"emb": CheckpointPlacement(FOUR.mesh(rank, tp=4), [Shard(0)])})

    with without_warning():
        loaded = load(
            tmp_path,
            lambda rank: {"emb": emb.chunk(4)[rank]},
            two,
            {"allow_partial_load": partial},
            rules=rules,
        )
    assert all(same_bits(loaded[rank]["emb"], emb.chunk(4)[rank]) for rank in range(2))


@pytest.mark.parametrize("asks_for_all", [True, False])
def test_a_rank_that_declares_nothing_asks_for_what_it_has(
    tmp_path: Path, asks_for_all: bool
) -> None:
    """Two ranks ask for one half; a third has no rules, and the whole, or another tensor."""
    dcp.save({"w": arange(4, 2), "norm": arange(2)}, checkpoint_id=tmp_path, no_dist=True)
    half = CheckpointPlacement(MeshCoordinate(("ep",), (2,), (0,)), {"ep": Shard(0)})

    def state(rank: int) -> dict[str, Any]:
        if rank < 2:
            return {"w": torch.zeros(2, 2)}
        return {"w": torch.zeros(4, 2)} if asks_for_all else {"norm": torch.zeros(2)}

    def planner(rank: int) -> PlacementLoadPlanner:
        return PlacementLoadPlanner(PlacementRules({"w": half}) if rank < 2 else None)

    if asks_for_all:
        with without_warning():
            found = World(3).load(tmp_path, state, planner)
        assert same_bits(found[2]["w"], arange(4, 2))
        return
    with refused() as refusal:
        World(3).load(tmp_path, state, planner)
    refusal.says("w: several ranks ask for [0:2, :] of (4, 2), and none for [2:4, :]", "ranks 0-1")


@pytest.mark.parametrize("first", [0, 2])
def test_a_tensor_of_which_every_rank_has_padding_alone_is_refused(
    tmp_path: Path, first: int
) -> None:
    dcp.save({"w": arange(4, 2), "norm": arange(2)}, checkpoint_id=tmp_path, no_dist=True)
    whole = {"global_shape": (4, 2), "padded_shape": (8, 2)}

    def rules(rank: int) -> PlacementRules:
        mesh = MeshCoordinate(("ep",), (4,), (first + rank,))
        return PlacementRules({"w": CheckpointPlacement(mesh, {"ep": Shard(0)}, **whole)})

    states = [{"w": torch.zeros(2, 2), "norm": torch.zeros(2)} for _ in range(3)]

    def load_all(**options: Any) -> None:
        World(2).load(
            tmp_path, states.__getitem__, lambda rank: PlacementLoadPlanner(rules(rank), **options)
        )

    if first:
        with refused() as refusal:
            load_all()
        refusal.says("w: every rank has padding alone of it", "of (4, 2)", "padded to (8, 2)")
        load_all(optional=["w"])
        return
    with without_warning():
        load_all()
        load(tmp_path, states.__getitem__, World(3), rules=rules)  # the last has padding alone
    assert same_bits(states[1]["w"], arange(4, 2)[2:])
    assert not states[2]["w"].any()
