"""Two meshes of the same axis names may lay out the ranks otherwise: a rule's mesh is compared with
the one that the tensor's own DTensor was sliced from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds, assert_same, blank, load, refused, save
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementRules,
    PlacementSavePlanner,
    Stack,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World

WORLD = World(4)
NAMES = ("ep", "edp")
WHOLE = arange(4, 3)
ROOT = [[0, 1], [2, 3]]

Of = Callable[[int], Any]


def table(rank: int, ranks: Any, names: tuple[str, ...] = NAMES) -> FakeMesh:
    ranks = torch.tensor(ranks)
    return FakeMesh(tuple(ranks.shape), names, rank=rank, ranks=ranks)


def experts(over: tuple[str, ...], placements: tuple[Any, ...]) -> Of:
    """Return experts that ep cuts and then FSDP, as DTensors over some axes of one mesh."""

    def on(rank: int) -> dict[str, Any]:
        mesh = table(rank, ROOT)
        ep, edp = mesh.get_coordinate() or ()
        local = WHOLE.chunk(2)[ep].chunk(2)[edp].clone()
        shape = (2, 3) if over == ("edp",) else (4, 3)
        return {"experts.w": FakeDTensor(local, mesh[over], placements, shape)}

    return on


BY_FSDP = experts(("edp",), (Shard(0),))
BY_BOTH = experts(NAMES, (Shard(0), Shard(0)))


def rules(of: Callable[[int], Any], placements: Any) -> Of:
    return lambda rank: PlacementRules({"experts": CheckpointPlacement(of(rank), placements)})


EP = {"ep": Shard(0)}
OTHERS: dict[str, tuple[Of, Any, Any]] = {
    "ep the other way round": (BY_FSDP, [[2, 3], [0, 1]], EP),
    "edp the other way round": (BY_FSDP, [[1, 0], [3, 2]], EP),
    "the axes in another order": (BY_FSDP, [[0, 2], [1, 3]], EP),
    "some ranks elsewhere": (BY_FSDP, [[0, 1], [3, 2]], EP),
    "an axis that the DTensor has, too": (BY_BOTH, [[2, 3], [0, 1]], EP),
    "axes of which the rule cuts none": (BY_BOTH, [[0, 2], [1, 3]], {}),
}


@pytest.mark.parametrize(("state", "ranks", "placements"), OTHERS.values(), ids=OTHERS)
def test_m127_a_rule_whose_mesh_lays_out_the_ranks_otherwise_is_refused(
    tmp_path: Path, state: Of, ranks: Any, placements: Any
) -> None:
    other = rules(lambda rank: table(rank, ranks), placements)
    tables = f"(ep=2, edp=2) of ranks {ROOT}", f"(ep=2, edp=2) of ranks {ranks}"
    with refused() as refusal:
        save(WORLD, tmp_path, state, other)
    refusal.says("experts.w: has axis e", "along other ranks", *tables, "by rule:", "'experts'")
    assert not (tmp_path / ".metadata").exists()
    save(WORLD, tmp_path, state, rules(lambda rank: table(rank, ROOT), EP))
    assert_holds(tmp_path, {"experts.w": WHOLE})
    states = [blank(state(rank)) for rank in range(4)]
    with refused() as refusal:
        load(WORLD, tmp_path, states.__getitem__, other)
    refusal.says(*tables)
    assert_same(dict(enumerate(states)), {rank: blank(state(rank)) for rank in range(4)})


def test_a_coordinate_that_is_not_that_of_the_mesh_is_refused(tmp_path: Path) -> None:
    """Without a table of ranks, a rule with the position of another rank would swap the experts."""

    def of_another_rank(rank: int) -> MeshCoordinate:
        ep, edp = table(rank, ROOT).get_coordinate() or ()
        return MeshCoordinate(NAMES, (2, 2), (1 - ep, edp))

    other = rules(of_another_rank, EP)
    with refused() as refusal:
        save(WORLD, tmp_path, BY_FSDP, other)
    refusal.says("experts.w: is at position 0 of ep by its own DTensor, and at 1 by the rule")
    save(WORLD, tmp_path, BY_FSDP, rules(lambda rank: table(rank, ROOT), EP))
    states = [blank(BY_FSDP(rank)) for rank in range(4)]
    with refused() as refusal:
        load(WORLD, tmp_path, states.__getitem__, other)
    refusal.says("is at position 0 of ep by its own DTensor, and at 1 by the rule")


@pytest.mark.parametrize("names", [("a.w", "b.w"), ("b.w", "a.w")])
@pytest.mark.parametrize("is_stack", [False, True])
def test_a_tensor_is_compared_with_the_root_of_its_own_mesh(
    names: tuple[str, str], is_stack: bool, tmp_path: Path
) -> None:
    """The mesh of one tensor is a slice; that of the other is equal, and knows no ep."""

    def state(rank: int) -> dict[str, Any]:
        sliced = table(rank, ROOT)["edp"]
        alone = table(rank, sliced.mesh.tolist(), ("edp",))
        ep, edp = table(rank, ROOT).get_coordinate() or ()
        local = WHOLE.chunk(2)[ep].chunk(2)[edp]
        meshes = {"a.w": alone, "b.w": sliced}
        held = {
            name: FakeDTensor(local.clone(), meshes[name], [Shard(0)], (2, 3)) for name in names
        }
        return {f"rows.{row}": held[name] for row, name in enumerate(names)} if is_stack else held

    def planner(ranks: Any, rank: int) -> PlacementSavePlanner:
        placements = {"ep": Shard(1 if is_stack else 0)}
        placement = CheckpointPlacement(table(rank, ranks), placements)
        rename = Stack("rows.{}", total=2) if is_stack else None
        return PlacementSavePlanner(PlacementRules({"**": placement}), rename=rename)

    with refused() as refusal:
        WORLD.save(tmp_path, state, partial(planner, [[2, 3], [0, 1]]))
    refusal.says("has axis ep", "along other ranks")
    WORLD.save(tmp_path, state, partial(planner, ROOT))
    whole = {"rows": torch.stack([WHOLE, WHOLE])} if is_stack else dict.fromkeys(names, WHOLE)
    assert_holds(tmp_path, whole)


def test_a_rule_gives_all_rows_of_a_stack_one_place(tmp_path: Path) -> None:
    """The rule's axis cuts the first row by its own DTensor, and the second one once more."""
    world = World(2)

    def state(rank: int, names: tuple[str, str]) -> dict[str, Any]:
        return {
            f"rows.{row}": FakeDTensor.distribute(
                WHOLE, FakeMesh((2,), (name,), rank=rank), [Shard(0)]
            )
            for row, name in enumerate(names)
        }

    def planner(rank: int) -> PlacementSavePlanner:
        placement = CheckpointPlacement(world.mesh(rank, ep=2), {"ep": Shard(1)})
        rules = PlacementRules({"rows": placement})
        return PlacementSavePlanner(rules, rename=Stack("rows.{}", total=2))

    for names in (("ep", "x"), ("x", "ep")):
        with refused() as refusal:
            world.save(tmp_path, partial(state, names=names), planner)
        refusal.says("rows: the rule gives two tensors of this key different places", "(x=2)")
    world.save(tmp_path, partial(state, names=("ep", "ep")), planner)
    assert_holds(tmp_path, {"rows": torch.stack([WHOLE, WHOLE])})


def test_m127_of_many_ranks_the_first_are_shown(tmp_path: Path) -> None:
    ranks = torch.arange(4096).reshape(64, 64)

    def state(rank: int) -> dict[str, Any]:
        own = table(rank, ranks.tolist())["edp"]
        return {"experts.w": FakeDTensor(torch.ones(1, 3), own, (Shard(0),), (64, 3))}

    with refused() as refusal:
        save(WORLD, tmp_path, state, rules(lambda rank: table(rank, ranks.T.tolist()), EP))
    refusal.says("(ep=64, edp=64) of ranks 0, 1, 2,", "ranks 0, 64, 128,", "4096 of them")
    assert len(str(refusal)) < 4000


RIGHT: dict[str, tuple[Of, Of, Any]] = {
    "a mesh of its own, of the same table": (BY_FSDP, lambda rank: table(rank, ROOT), EP),
    "a part of it": (BY_FSDP, lambda rank: table(rank, ROOT)["ep"], EP),
    "no table": (
        BY_FSDP,
        lambda rank: MeshCoordinate(NAMES, (2, 2), table(rank, ROOT).get_coordinate() or ()),
        EP,
    ),
    "another name for another axis": (
        BY_FSDP,
        lambda rank: table(rank, [[0, 2], [1, 3]], ("other", "ep")),
        EP,
    ),
    "an axis of one name in two meshes, which cuts nothing": (
        BY_FSDP,
        lambda rank: table(rank, [[[0], [1]], [[2], [3]]], ("ep", "edp", "dp")),
        EP,
    ),
    "a DTensor whose mesh knows of no other": (
        lambda rank: {
            "experts.w": FakeDTensor(
                BY_FSDP(rank)["experts.w"].to_local(),
                table(rank, ROOT[rank // 2], ("edp",)),
                (Shard(0),),
                (2, 3),
            )
        },
        lambda rank: table(rank, ROOT),
        EP,
    ),
}


@pytest.mark.parametrize(("state", "mesh", "placements"), RIGHT.values(), ids=RIGHT)
def test_m127_meshes_that_agree_pass(tmp_path: Path, state: Of, mesh: Of, placements: Any) -> None:
    save(WORLD, tmp_path, state, rules(mesh, placements))
    assert_holds(tmp_path, {"experts.w": WHOLE})


def test_m127_a_name_that_two_meshes_use_for_axes_that_cut_nothing_passes(tmp_path: Path) -> None:
    """``dp`` of the dense mesh is not ``dp`` of the experts' mesh."""

    def state(rank: int) -> dict[str, Any]:
        tp = table(rank, [[0, 1], [2, 3]], ("dp", "tp"))["tp"]
        return {"experts.w": FakeDTensor(WHOLE[rank % 2 :: 2], tp, (Replicate(),), (2, 3))}

    mesh = rules(lambda rank: table(rank, [[0, 2], [1, 3]], ("ep", "dp")), EP)
    save(WORLD, tmp_path, state, mesh)
    assert_holds(tmp_path, {"experts.w": torch.cat([WHOLE[::2], WHOLE[1::2]])})
