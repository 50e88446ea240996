"""Who writes replicas: few files to open for each rank, and no rank with much more to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import PlacementSavePlanner
from dcp_placements.ownership import BALANCE, shared_out, writers_needed
from fakes import FakeDTensor, FakeMesh, World

MIB = 1 << 20


def tensor(mesh: FakeMesh, nbytes: int, *placements: Any) -> FakeDTensor:
    """A DTensor whose memory nobody touches."""
    local = nbytes // 4
    for size, placement in zip(mesh.shape, placements, strict=True):
        local //= size if isinstance(placement, Shard) else 1
    return FakeDTensor(torch.empty(local), mesh, placements, (nbytes // 4,))


def costs(
    world: World, state_dict: Callable[[int], dict[str, Any]], **options: Any
) -> tuple[list[int], list[set[int]]]:
    """Return the bytes that each rank writes, and whose files each opens to load the same again."""
    planner = world.check(state_dict, lambda rank: PlacementSavePlanner(digests="off", **options))
    assert isinstance(planner, PlacementSavePlanner)
    written, owner = [], {}
    for rank, plan in enumerate(planner.global_plan):
        nbytes = 0
        for item in plan.items:
            data = item.tensor_data
            nbytes += 8 if data is None else data.chunk.sizes.numel() * 4
            assert owner.setdefault(item.index, rank) == rank
        written.append(nbytes)
    opened = []
    for rank in range(world.size):
        with world._as(rank):
            mine = PlacementSavePlanner(digests="off")
            mine.set_up_planner(state_dict(rank), is_coordinator=rank == 0)
            opened.append({owner[item.index] for item in mine.create_local_plan().items})
    return written, opened


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


def test_replicas_of_sharded_tensors_share_what_they_write_and_open_each_other() -> None:
    world = World(8)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, replicate=2, fsdp=4)
        state = {f"w{i}": tensor(mesh, 16 * MIB, Replicate(), Shard(0)) for i in range(40)}
        state |= {f"norm{i}": tensor(mesh, 4096, Replicate(), Shard(0)) for i in range(40)}
        return state | {f"step{i}": torch.zeros(()) for i in range(50)}

    written, opened = costs(world, state_dict)
    assert max(map(len, opened)) <= 1 + 2
    assert max(written) <= BALANCE * sum(written) / 8
    written, opened = costs(world, state_dict, dedup_save_to_lowest_rank=True)
    assert written[4:] == [0] * 4
    assert max(map(len, opened)) <= 2


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


@pytest.mark.parametrize("lowest", [False, True])
def test_ranks_and_coordinator_agree_on_who_writes(lowest: bool) -> None:
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, a=2, b=2)
        state = {f"x{i}": tensor(mesh, (2 + i) * MIB, Replicate(), Shard(0)) for i in range(5)}
        return state | {
            f"y{i}": tensor(mesh, (1 + i) * MIB, Replicate(), Replicate()) for i in range(5)
        }

    made = [PlacementSavePlanner(digests="off", dedup_save_to_lowest_rank=lowest) for _ in range(4)]
    world.check(state_dict, made.__getitem__)
    plans = made[0].global_plan
    seen = set()
    for rank, plan in enumerate(plans):
        wanted = [item.index for item in plan.items]
        with world._as(rank):
            own = [item.index for item in made[rank].finish_plan(plan).items]
        assert sorted(map(str, own)) == sorted(map(str, wanted))
        seen.update(own)
    assert len(seen) == 5 * 2 + 5


@given(
    pieces=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    held=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    limit=st.integers(0, 4000),
)
def test_as_few_share_as_can_take_it(pieces: list[int], held: list[int], limit: int) -> None:
    pieces.sort(reverse=True)
    writers = writers_needed(pieces, 0, held, limit)
    assert 1 <= writers <= len(held)
    owners, taken = shared_out(pieces, [0] * writers)
    assert sum(taken) == sum(pieces)
    assert set(owners) <= set(range(writers))
    for slot in range(writers):
        assert taken[slot] == sum(p for p, o in zip(pieces, owners, strict=True) if o == slot)
    limit = max(limit, min(held) + pieces[0])
    if writers < len(held):
        assert all(held[slot] + taken[slot] <= limit for slot in range(writers))
