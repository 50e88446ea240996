"""A transfer between any two topologies of the matrix fills the target as plain slicing does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hazard_scenes import FILL, same_bits
from matrix import rings
from topologies import MODEL, Ranks, Topology, Weight, wholes
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementRules,
    Placements,
    TransferWorld,
    transfer_plan,
)
from dcp_placements.transfer.plan import TransferPlan

PAD = -5.0


@cache
def ranks_of(topology: Topology) -> Ranks:
    return Ranks(topology)


def placement(ranks: Ranks, rank: int, weight: Weight) -> CheckpointPlacement | None:
    """Return all cuts of a weight as a rule: model parallelism, and FSDP inside of it."""
    at = ranks.at(rank, weight)
    sizes = ranks.topology.experts if weight.experts else ranks.topology.dense
    cuts = dict(weight.cuts)
    if weight.fsdp is not None:
        cuts["efsdp" if weight.experts else "fsdp"] = Shard(weight.fsdp)
    if not cuts:
        return None
    mesh = MeshCoordinate(tuple(cuts), [sizes[n] for n in cuts], [at[n] for n in cuts])
    padded = weight.padded(ranks.topology)
    return CheckpointPlacement(
        mesh,
        cuts,
        global_shape=weight.shape,
        padded_shape=padded if padded != weight.shape else None,
    )


@cache
def world(topology: Topology, first: int = 0) -> TransferWorld:
    """Return a topology as a world whose ranks count from ``first``."""
    ranks = ranks_of(topology)

    @cache
    def rules(mesh: MeshCoordinate) -> Placements:
        (rank,) = mesh.get_coordinate()
        table = {
            weight.pattern or name: placement(ranks, rank, weight) for name, weight in MODEL.items()
        }
        return Placements(PlacementRules(table), rename=ranks.rename(rank))

    def absent(mesh: MeshCoordinate) -> list[str]:
        (rank,) = mesh.get_coordinate()
        names = "embed.weight", "head.weight", "norm.weight"
        # `norm` is a component of the names of layers, too.
        return [
            f"{at}.{name}"
            for at in ("model", "state")
            for name in names
            if not ranks.holds(rank, name)
        ]

    numbers = range(first, first + topology.ranks)
    axes = {"rank": topology.ranks}
    return TransferWorld(axes, rules, wholes(), ranks=numbers, hosts=2, absent=absent)


State = dict[str, torch.Tensor]


@cache
def states(topology: Topology) -> list[State]:
    """Return what each rank holds, under the keys of the world."""
    ranks = ranks_of(topology)
    found = []
    for rank in range(topology.ranks):
        rename = ranks.rename(rank)
        local = ranks.expected(rank, pad=PAD)
        found.append({str(rename(key)): tensor for key, tensor in local.items()})
    return found


def check_filled(plan: TransferPlan, source: Topology, target: Topology, first: int) -> None:
    """Fill the target by the plan; assert that each element comes once and is the right one."""
    sources, expected = states(source), states(target)
    filled = [{key: torch.full_like(t, FILL) for key, t in state.items()} for state in expected]
    counts = [
        {key: torch.zeros(t.shape, dtype=torch.int8) for key, t in state.items()}
        for state in expected
    ]
    for one in plan.everything():
        rank = one.target_rank - first
        part = filled[rank][one.target_fqn][one.target_slices]
        part.copy_(sources[one.source_rank][one.source_fqn][one.source_slices].reshape(part.shape))
        counts[rank][one.target_fqn][one.target_slices] += 1
    for rank, state in enumerate(expected):
        for key, tensor in state.items():
            wanted = torch.where(counts[rank][key] == 1, tensor, FILL)
            padding = (counts[rank][key] == 0) & (tensor == PAD)
            assert (padding | (counts[rank][key] == 1)).all(), f"{key} on rank {rank}"
            assert same_bits(filled[rank][key], wanted.to(tensor.dtype)), f"{key} on rank {rank}"


@pytest.mark.parametrize(("source", "target"), rings(), ids=str)
def test_any_topology_fills_any_other(source: Topology, target: Topology) -> None:
    check_filled(transfer_plan(world(source), world(target)), source, target, 0)
