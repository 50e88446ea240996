"""Public reports, rebuilt without their projects' code: what a rank holds, and the lines that help.

Each scene cuts whole tensors as the reported trainer does, by plain slicing. Torch's own planners
read what our planner saves, in one process, and every world loads what another one saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    Placements,
    Renumber,
    contiguous,
)
from dcp_placements.testing import FakeMesh, World, real_dtensor

HIDDEN = 6
BLANK = -1.0


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    """Return a tensor of which no two elements are equal, nor equal to those of another family."""
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float32).reshape(shape)


EXPERTS = numbered(8, HIDDEN, 4)
MOMENTS = numbered(8, HIDDEN, 4, first=1000)


class Rank:
    """One rank of a world, as its trainer sees it.

    Attributes:
        mesh: Over all axes of the world.
        at: Its position along each axis; 0 along those that the world does not have.
        size: The ranks along each axis; 1 along those.
    """

    def __init__(self, mesh: FakeMesh) -> None:
        self.mesh = mesh
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        self.at = dict(zip(names, coordinate, strict=True))
        self.size = dict(zip(names, mesh.shape, strict=True))

    def part(self, whole: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
        """Return the ``torch.chunk`` piece of this rank along an axis; empty beyond the last."""
        pieces = whole.chunk(self.size[axis], dim)
        if self.at[axis] < len(pieces):
            return pieces[self.at[axis]].clone()
        return whole.narrow(dim, 0, 0).clone()

    def sharded(self, held: torch.Tensor, **dims: int | None) -> torch.Tensor:
        """Return what ``fully_shard`` makes of a tensor: a DTensor over these axes alone.

        Args:
            held: Whole for these axes.
            dims: By axis, the dim that it shards; None: it replicates.
        """
        local = held
        for axis, dim in dims.items():
            local = local if dim is None else self.part(local, dim, axis)
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims.values()]
        return real_dtensor(local.clone(), self.mesh[tuple(dims)], placements, held.shape)

    def rule(self, **placements: Any) -> CheckpointPlacement:
        """Return a rule of the whole mesh."""
        return CheckpointPlacement(self.mesh, placements)


@dataclass(frozen=True)
class Report:
    """A scene.

    Attributes:
        worlds: Axes and sizes of the worlds that save and load.
        wholes: What a checkpoint has to hold, by key.
        state: What a rank holds.
        lines: The declaration of a rank: the lines that its user writes.
    """

    worlds: tuple[dict[str, int], ...]
    wholes: Callable[[], dict[str, torch.Tensor]]
    state: Callable[[Rank], dict[str, Any]]
    lines: Callable[[Rank], dict[str, Any]]


def experts_by_number() -> dict[str, torch.Tensor]:
    weights = {f"model.experts.{i}.w": EXPERTS[i].clone() for i in range(8)}
    moments = {f"optim.state.experts.{i}.w.exp_avg": MOMENTS[i].clone() for i in range(8)}
    return weights | moments


def pruned(rank: Rank) -> dict[str, Any]:
    """Each rank has its own experts alone, counted from 0, and FSDP2 over the rest."""

    def mine(whole: torch.Tensor) -> list[torch.Tensor]:
        return [rank.sharded(one, fsdp=0) for one in rank.part(whole, 0, "ep")]

    return {
        "model": {f"experts.{i}.w": one for i, one in enumerate(mine(EXPERTS))},
        "optim": {
            "state": {f"experts.{i}.w": {"exp_avg": one} for i, one in enumerate(mine(MOMENTS))}
        },
    }


def numbers(rank: Rank) -> dict[str, Any]:
    ids = contiguous([8 // rank.size["ep"]] * rank.size["ep"], at=rank.at["ep"])
    return {"rules": None, "rename": Renumber("experts.{}", ids, total=8)}


def stacked_experts() -> dict[str, torch.Tensor]:
    return {"model.experts.w": EXPERTS, "optim.state.experts.w.exp_avg": MOMENTS}


def stacked(make: Callable[[Rank, torch.Tensor], torch.Tensor]) -> Callable[[Rank], dict[str, Any]]:
    def state(rank: Rank) -> dict[str, Any]:
        return {
            "model": {"experts.w": make(rank, EXPERTS)},
            "optim": {"state": {"experts.w": {"exp_avg": make(rank, MOMENTS)}}},
        }

    return state


def by_rule(**placements: Any) -> Callable[[Rank], dict[str, Any]]:
    return lambda rank: {"rules": {"experts": rank.rule(**placements)}}


UNEVEN = numbered(10, HIDDEN)
SWIGLU = numbered(16, HIDDEN)
QKV = numbered(24, HIDDEN)
EMBEDDING = numbered(10, HIDDEN)
SLOTS = {0: [0, 3, 5], 1: [1, 2, 4, 5]}


def swiglu(rank: Rank) -> dict[str, Any]:
    gate, up = SWIGLU.chunk(2)
    held = torch.cat([rank.part(gate, 0, "tp"), rank.part(up, 0, "tp")])
    return {"mlp.fc1": rank.sharded(held, fsdp=0)}


def qkv(rank: Rank) -> dict[str, Any]:
    return {"qkv": torch.cat([rank.part(one, 0, "tp") for one in QKV.split([16, 4, 4])])}


def padded(rank: Rank) -> dict[str, Any]:
    rows = -(-10 // rank.size["tp"]) * rank.size["tp"]
    whole = torch.cat([EMBEDDING, torch.full((rows - 10, HIDDEN), BLANK)])
    return {"embedding": rank.part(whole, 0, "tp")}


def padding(rank: Rank) -> dict[str, Any]:
    rows = -(-10 // rank.size["tp"]) * rank.size["tp"]
    shapes = {"global_shape": (10, HIDDEN), "padded_shape": (rows, HIDDEN)}
    return {"rules": {"embedding": CheckpointPlacement(rank.mesh, {"tp": Shard(0)}, **shapes)}}


def layers() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.w": EXPERTS[i].clone() for i in range(8)}


def stage(rank: Rank) -> dict[str, Any]:
    return {f"layers.{i}.w": one for i, one in enumerate(rank.part(EXPERTS, 0, "pp"))}


def stages(rank: Rank) -> dict[str, Any]:
    ids = contiguous([8 // rank.size["pp"]] * rank.size["pp"], at=rank.at["pp"])
    return {"rules": None, "rename": Renumber("layers.{}", ids, total=8)}


def slots(rank: Rank) -> dict[str, Any]:
    return {"experts.w": EXPERTS[SLOTS[rank.at["ep"]]] if rank.size["ep"] == 2 else EXPERTS[:6]}


def slot_map(rank: Rank) -> dict[str, Any]:
    held = SLOTS[rank.at["ep"]] if rank.size["ep"] == 2 else range(6)
    rows = {"ep": IndexShard(0, held)}
    shape = (6, *EXPERTS.shape[1:])
    return {"rules": {"experts": CheckpointPlacement(rank.mesh, rows, global_shape=shape)}}


def amax(rank: Rank) -> dict[str, Any]:
    held = rank.part(EXPERTS[:, :1, 0], 0, "ep")
    return {f"experts.{i}.quantizer._amax": one for i, one in enumerate(held)}


REPORTS = {
    "KempnerForge #202, pruned": Report(
        ({"ep": 2, "fsdp": 2}, {"ep": 4, "fsdp": 1}, {"ep": 1, "fsdp": 1}),
        experts_by_number,
        pruned,
        numbers,
    ),
    "KempnerForge #202, packed": Report(
        ({"ep": 4}, {"ep": 2}),
        stacked_experts,
        stacked(lambda rank, whole: rank.part(whole, 0, "ep")),
        by_rule(ep=Shard(0)),
    ),
    "UniRL #158, twinkle #116, VeOmni #228": Report(
        ({"ep": 2, "fsdp": 2}, {"ep": 8, "fsdp": 1}, {"ep": 1, "fsdp": 2}),
        stacked_experts,
        stacked(lambda rank, whole: rank.sharded(rank.part(whole, 0, "ep"), fsdp=1)),
        by_rule(ep=Shard(0)),
    ),
    "transformers #48237": Report(
        ({"ep": 2, "fsdp": 4}, {"ep": 1, "fsdp": 4}),
        lambda: {"experts.w": UNEVEN},
        lambda rank: {"experts.w": rank.sharded(rank.part(UNEVEN, 0, "ep"), fsdp=0)},
        by_rule(ep=Shard(0)),
    ),
    "Megatron-LM #2769": Report(
        ({"tp": 2, "fsdp": 2}, {"tp": 1, "fsdp": 4}, {"tp": 4, "fsdp": 1}),
        lambda: {"mlp.fc1": SWIGLU},
        swiglu,
        lambda rank: {"rules": {"fc1": rank.rule(tp=FusedShard(0, 2))}},
    ),
    "Megatron-LM #1836": Report(
        ({"ep": 2, "etp": 2}, {"ep": 1, "etp": 4}),
        stacked_experts,
        stacked(lambda rank, whole: rank.part(rank.part(whole, 0, "ep"), 2, "etp")),
        by_rule(ep=Shard(0), etp=Shard(2)),
    ),
    "DeepSpeed #8544, prime-rl #3583": Report(
        ({"ep": 2}, {"ep": 1}),
        lambda: {"experts.w": EXPERTS[:6].clone()},
        slots,
        slot_map,
    ),
    "Megatron-LM #7293": Report(
        ({"tp": 4}, {"tp": 2}, {"tp": 3}),
        lambda: {"embedding": EMBEDDING},
        padded,
        padding,
    ),
    "pytorch #149701": Report(
        ({"tp": 2}, {"tp": 4}, {"tp": 1}),
        lambda: {"qkv": QKV},
        qkv,
        lambda rank: {"rules": {"qkv": rank.rule(tp=FusedShard(0, (16, 4, 4)))}},
    ),
    "Automodel #3250": Report(({"pp": 2}, {"pp": 4}, {"pp": 1}), layers, stage, stages),
    "Model-Optimizer #2209": Report(
        ({"ep": 2}, {"ep": 4}),
        lambda: {f"experts.{i}.quantizer._amax": EXPERTS[i, :1, 0].clone() for i in range(8)},
        amax,
        numbers,
    ),
}


def world_of(axes: dict[str, int]) -> tuple[World, list[Rank]]:
    world = World(torch.Size(axes.values()).numel())
    return world, [Rank(world.mesh(rank, **axes)) for rank in range(world.size)]


def read_by_torch(path: Path, wholes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    read = {key: torch.full_like(whole, BLANK) for key, whole in wholes.items()}
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return read


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def locals_of(state: Any) -> list[torch.Tensor]:
    """Return the local tensors of a state dict, in its order."""
    if isinstance(state, dict):
        return [one for value in state.values() for one in locals_of(value)]
    return [state.to_local() if hasattr(state, "to_local") else state]


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with other values in its tensors."""
    for local in locals_of(state):
        local.fill_(BLANK)
    return state


@pytest.mark.parametrize("name", REPORTS)
def test_the_lines_make_it_right_in_every_topology(name: str, tmp_path: Path) -> None:
    report, wholes = REPORTS[name], REPORTS[name].wholes()
    worlds = [world_of(axes) for axes in report.worlds]
    for number, (world, ranks) in enumerate(worlds):
        path = tmp_path / str(number)
        world.save(
            path,
            lambda rank, ranks=ranks: report.state(ranks[rank]),  # type: ignore[misc]
            lambda rank, ranks=ranks: Placements(**report.lines(ranks[rank])).save_planner(),  # type: ignore[misc]
        )
        assert equal([*read_by_torch(path, wholes).values()], [*wholes.values()])
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        assert stored.keys() == wholes.keys()
    for number, (world, ranks) in enumerate(worlds):
        loaded = world.load(
            tmp_path / str((number + 1) % len(worlds)),
            lambda rank, ranks=ranks: blank(report.state(ranks[rank])),  # type: ignore[misc]
            lambda rank, ranks=ranks: Placements(**report.lines(ranks[rank])).load_planner(),  # type: ignore[misc]
        )
        for rank, state in zip(ranks, loaded, strict=True):
            assert equal(locals_of(state), locals_of(report.state(rank)))
