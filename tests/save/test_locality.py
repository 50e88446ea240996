"""Who writes replicas: few files to open for each rank, and no rank with much more to write."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import assert_holds, assert_same
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.storage.save_ids import ID_PREFIX
from dcp_placements.table.owners import BALANCE
from dcp_placements.testing import FakeDTensor, FakeMesh, World

KIB = 1 << 10
MIB = 1 << 20


def tensor(mesh: FakeMesh, nbytes: int, *placements: Any) -> FakeDTensor:
    """A DTensor whose memory nobody touches."""
    local = nbytes // 4
    for size, placement in zip(mesh.shape, placements, strict=True):
        local //= size if isinstance(placement, Shard) else 1
    return FakeDTensor(torch.empty(local), mesh, placements, (nbytes // 4,))


def costs(
    world: World,
    state_dict: Callable[[int], dict[str, Any]],
    rules: Callable[[int], PlacementRules | None] = lambda rank: None,
    **options: Any,
) -> tuple[list[int], list[set[int]]]:
    """Return the bytes that each rank writes, and whose files each opens to load the same again.

    The second of the ranks in ``sample`` alone; by default of all.
    """
    planners = [
        PlacementSavePlanner(rules(rank), digests="off", **options) for rank in range(world.size)
    ]
    world.check(state_dict, planners.__getitem__)
    written, owner = [], {}
    for rank, plan in enumerate(planners[0].global_plan):
        nbytes = 0
        for item in items_of(world, rank, planners[rank], plan):
            data = item.tensor_data
            nbytes += 8 if data is None else data.chunk.sizes.numel() * 4
            assert owner.setdefault(item.index, rank) == rank
        written.append(nbytes)
    opened = []
    for rank in range(world.size):
        mine = PlacementSavePlanner(rules(rank), digests="off")
        with world._as(rank):
            # A coordinator of its own saves all that it has.
            mine.set_up_planner(state_dict(rank), is_coordinator=True)
            with warnings.catch_warnings(action="ignore"):
                [plan], _ = mine.create_global_plan([mine.create_local_plan()])
        opened.append({owner[item.index] for item in items_of(world, rank, mine, plan)})
    return written, opened


def items_of(world: World, rank: int, planner: PlacementSavePlanner, plan: Any) -> list[Any]:
    """Return what a rank writes, without the record that names the save."""
    with world._as(rank):
        items = planner.finish_plan(plan).items
    return [item for item in items if not item.index.fqn.startswith(ID_PREFIX)]


def test_what_all_ranks_share_stays_on_the_first_ranks_while_they_are_within_balance() -> None:
    world = World(8)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=8)
        state = {f"w{i}": tensor(mesh, 160 * MIB, Shard(0)) for i in range(8)}
        # 8 MiB of the mean of 164: as much as one rank may have more.
        state |= {f"router{i}": tensor(mesh, 2 * MIB, Replicate()) for i in range(4)}
        return state | {f"step{i}": torch.zeros(()) for i in range(50)} | {"lr": 0.1}

    written, opened = costs(world, state_dict)
    assert all(files <= {rank, 0} for rank, files in enumerate(opened))
    assert max(written) <= BALANCE * sum(written) / 8

    def more(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=8)
        others = {f"table{i}": tensor(mesh, 2 * MIB, Replicate()) for i in range(8)}
        return state_dict(rank) | others

    written, opened = costs(world, more)
    assert max(map(len, opened)) <= 5
    assert max(written) <= BALANCE * sum(written) / 8


def test_experts_on_a_mesh_of_their_own_are_weighed_with_all_that_a_rank_writes() -> None:
    world = World(8)

    def state_dict(rank: int) -> dict[str, Any]:
        dense, experts = world.mesh(rank, fsdp=8), world.mesh(rank, edp=2, ep=4)
        state = {f"w{i}": tensor(dense, 256 * MIB, Shard(0)) for i in range(4)}
        state |= {f"e{i}": tensor(experts, 64 * MIB, Replicate(), Shard(0)) for i in range(16)}
        # Nothing of this mesh is sharded, but what its ranks write elsewhere counts.
        state |= {f"router{i}": tensor(dense, 4 * MIB, Replicate()) for i in range(2)}
        return state

    written, opened = costs(world, state_dict)
    assert max(map(len, opened)) <= 1 + 2
    assert max(written) <= BALANCE * sum(written) / 8


def test_a_tensor_that_is_too_large_by_itself_does_not_scatter_the_others() -> None:
    world = World(8)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=8)
        state = {f"w{i}": tensor(mesh, 80 * MIB, Shard(0)) for i in range(8)}
        state["embedding"] = tensor(mesh, 64 * MIB, Replicate())
        return state | {f"router{i}": tensor(mesh, 2 * MIB, Replicate()) for i in range(30)}

    written, opened = costs(world, state_dict)
    assert max(map(len, opened)) <= 3
    assert max(written) <= (80 + 64) * MIB


def assert_balanced(written: list[int], opened: list[set[int]], files: int) -> None:
    assert max(written) <= 1.1 * sum(written) / len(written), written
    assert max(map(len, opened)) <= files


def test_m44_replicas_of_small_shards_share_what_they_write() -> None:
    world = World(16)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, replicate=2, fsdp=8)
        return {f"w{i}": tensor(mesh, 8 * 64 * KIB, Replicate(), Shard(0)) for i in range(24)}

    assert_balanced(*costs(world, state_dict), files=1 + 2)
    written, opened = costs(world, state_dict, dedup_save_to_lowest_rank=True)
    assert written[8:] == [0] * 8
    assert max(map(len, opened)) <= 2


def test_m44_small_and_large_shards_beside_what_all_ranks_hold() -> None:
    world = World(16)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, replicate=4, fsdp=4)
        state: dict[str, Any] = {"embed": tensor(mesh, 12 * MIB, Replicate(), Shard(0))}
        for i in range(40):
            state[f"layers.{i}.norm"] = tensor(mesh, 1 * KIB, Replicate(), Replicate())
            state[f"layers.{i}.w"] = tensor(mesh, (1 + i % 3) * MIB, Replicate(), Shard(0))
            state[f"layers.{i}.bias"] = tensor(mesh, 16 * KIB, Replicate(), Shard(0))
            state[f"optim.{i}.step"] = torch.zeros(())
        return state | {"lr": 0.1}

    assert_balanced(*costs(world, state_dict), files=1 + 4)


def test_m44_small_tensors_that_are_whole_on_every_rank_are_shared() -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {f"layers.{i}.w": torch.zeros(16 * KIB) for i in range(200)} | {"step": rank * 0}

    assert_balanced(*costs(world, state_dict), files=1 + 4)


def test_m44_but_what_is_small_in_all_stays_in_one_file() -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        return {f"layers.{i}.w": torch.zeros(64) for i in range(100)} | {"step": 1}

    written, opened = costs(world, state_dict)
    assert written[1:] == [0] * 3
    assert max(map(len, opened)) == 1


@pytest.mark.parametrize("dims", [(0,), (0, 1)], ids=["rows", "rows of rows"])
def test_m44_rows_that_ranks_name_are_shared_among_those_that_have_them(
    dims: tuple[int, ...],
) -> None:
    world = World(8)
    rows = [(0, 2, 5), (1, 3, 4)]

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, dp=4, ep=2)
        by_dim = [IndexShard(0, rows[rank % 2]), IndexShard(1, [2, 0, 1])]
        placements = {"ep": by_dim[0]} | ({"dp": by_dim[1]} if len(dims) > 1 else {})
        return PlacementRules(
            {"experts": CheckpointPlacement(mesh, placements, global_shape=(6, 3, 4096))}
        )

    def state_dict(rank: int) -> dict[str, Any]:
        return {f"layers.{i}.experts": torch.zeros(3, 3, 4096) for i in range(24)}

    assert_balanced(*costs(world, state_dict, rules), files=1 + 4)


@pytest.mark.parametrize("lowest", [False, True])
def test_m44_shared_small_shards_are_whole_in_the_files(tmp_path: Path, lowest: bool) -> None:
    """With keys that live on another mesh on other ranks."""
    world = World(8)
    wholes = {f"layers.{i}.w": torch.arange(4096.0 * 6).reshape(4096, 6) + i for i in range(30)}

    def state_dict(rank: int, fill: float | None = None) -> dict[str, Any]:
        mesh = world.mesh(rank, pp=2, replicate=2, fsdp=2)
        stage = rank // 4
        held = {}
        for i, (key, whole) in enumerate(wholes.items()):
            if i % 5 == 0 or i // 15 == stage:
                part = whole if fill is None else torch.full_like(whole, fill)
                placements = [Replicate(), Shard(0)]
                held[key] = FakeDTensor.distribute(part, mesh["replicate", "fsdp"], placements)
        return held

    planners = world.save(
        tmp_path,
        state_dict,
        lambda rank: PlacementSavePlanner(dedup_save_to_lowest_rank=lowest),
        lambda rank: PlacementFileSystemWriter(tmp_path),
    )
    written = Counter(
        item.index
        for planner in planners
        for item in planner.plan.items
        if item.index.fqn in wholes
    )
    assert set(written.values()) == {1}
    assert len(written) == 2 * len(wholes)
    assert_holds(tmp_path, wholes)
    loaded = world.load(
        tmp_path,
        lambda rank: state_dict(rank, fill=77.0),
        lambda rank: PlacementLoadPlanner(),
        lambda rank: PlacementFileSystemReader(tmp_path),
    )
    for rank, found in enumerate(loaded):
        assert_same(found, state_dict(rank))
