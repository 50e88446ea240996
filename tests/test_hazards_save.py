"""What becomes of a save: the right bytes, a warning, or an error that names the facts.

Every ``m<n>`` is a row of ``hazards.md``. Ranks are simulated; ``test_hazards_ranks.py`` has those
where real processes matter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    assert_holds,
    assert_same,
    blank,
    load,
    read_whole,
    refusal,
    refused,
    refused_save,
    same_bits,
    save,
    warned,
    without_warning,
)
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    PlacementRules,
    PlacementSavePlanner,
    Stack,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

WORLD = World(4)
Ranked = Callable[[int], Any]


@dataclass(frozen=True)
class Scene:
    """A save of four ranks, and what becomes of it: quiet, where neither facts are given.

    Attributes:
        state: What each rank holds.
        rules: Each rank's rules.
        refused: Facts of the error.
        warned: Facts of the one warning.
        holds: The whole tensors of the checkpoint.
        options: Of the planners.
    """

    state: Ranked
    rules: Ranked | None = None
    refused: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    holds: dict[str, torch.Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def ruled(
    patterns: str, placements: Any, global_shape: tuple[int, ...] | None = None, **axes: int
) -> Ranked:
    """Return each rank's rules: one placement of these patterns, over the mesh of ``axes``."""

    def rules(rank: int) -> PlacementRules:
        mesh = WORLD.mesh(rank, **axes)
        placement = CheckpointPlacement(mesh, placements, global_shape=global_shape)
        return PlacementRules(dict.fromkeys(patterns.split(), placement))

    return rules


def chunks(name: str, whole: torch.Tensor, dim: int = 0) -> Ranked:
    """Return each rank's quarter of a tensor."""
    return lambda rank: {name: whole.chunk(4, dim)[rank].clone()}


def plain(*shape: int) -> Ranked:
    return lambda rank: {"w": torch.zeros(shape)}


def sharded(axis: str, *shape: int, dim: int = 0, **axes: int) -> Ranked:
    """Return each rank's state dict of one DTensor over an axis of a mesh."""

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, **axes)[axis]
        return {"w": FakeDTensor.distribute(torch.zeros(shape), mesh, [Shard(dim)])}

    return state_dict


def experts(rank: int, whole: torch.Tensor) -> FakeDTensor:
    """Return what FSDP2 makes of expert weights: the ep part, as a DTensor over fsdp alone."""
    mesh = WORLD.mesh(rank, ep=2, fsdp=2)
    part = cut(whole, [Shard(0)], [2], mesh.get_coordinate()[:1])
    return FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])


def one_element(at: int) -> Ranked:
    def state(rank: int) -> dict[str, Any]:
        w = arange(512, 512)
        w.view(-1)[at] += rank == 3
        return {"w": w}

    return state


def sharded_here_replicated_there(*sharded_ranks: int) -> Ranked:
    def state(rank: int) -> dict[str, Any]:
        is_sharded = rank in sharded_ranks
        ranks = sharded_ranks if is_sharded else sorted({0, 1, 2, 3} - {*sharded_ranks})
        mesh = FakeMesh((2,), ("fsdp",), rank=rank, ranks=torch.tensor(ranks))
        placement = Shard(0) if is_sharded else Replicate()
        whole = arange(8, 3, start=0 if is_sharded else 100)
        return {"w": FakeDTensor.distribute(whole, mesh, [placement])}

    return state


def tied(rank: int) -> dict[str, Any]:
    part = arange(8, 3).chunk(4)[rank].clone()
    return {"embed.weight": part, "head.weight": part}


def tied_dtensors(one_object: bool) -> Ranked:
    def state(rank: int) -> dict[str, Any]:
        embed = experts(rank, arange(8, 3))
        head = FakeDTensor(embed.to_local(), embed.device_mesh, embed.placements, embed.shape)
        return {"embed.weight": embed, "head.weight": embed if one_object else head}

    return state


def fsdp_after_tp(*placements: Any, over: str = "") -> Ranked:
    """Return what FSDP over a tensor-parallel shard leaves on a rank, as a DTensor where it is."""

    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, fsdp=2, tp=2)
        fsdp, tp = mesh.get_coordinate()
        local: Any = arange(8, 3).chunk(2)[tp].chunk(2)[fsdp].clone()
        if placements:
            shape = (4, 3) if over else (8, 3)
            local = FakeDTensor(local, mesh[over] if over else mesh, placements, shape)
        return {"w": local}

    return state


def other_orders_and_dims(rank: int) -> dict[str, Any]:
    whole = arange(8, 4)
    tp_first, fsdp_first = WORLD.mesh(rank, tp=2, fsdp=2), WORLD.mesh(rank, fsdp=2, tp=2)
    return {
        "a": FakeDTensor.distribute(whole, tp_first, [Shard(0), Shard(0)]),
        "b": FakeDTensor.distribute(whole, fsdp_first, [Shard(0), Shard(1)]),
        "c": FakeDTensor.distribute(whole, fsdp_first, [Shard(0), Replicate()]),
    }


GATE_UP = "[its gate; its up] has two", "way out:     FusedShard(0, 2), or"
QKV = (
    "[its Q; its K; its V] has three",
    "way out:     FusedShard(0, (rows of Q, rows of K, rows of V)), or 3",
)
FUSED_NAMES = {
    "layers.0.mlp.gate_up_proj.weight": GATE_UP,
    "layers.0.attn.qkv.weight": QKV,
    "layers.0.attention.qkv_proj.weight": QKV,
    "decoder.layers.0.mlp.linear_fc1.weight": GATE_UP,
    "layers.0.mixer.in_proj.weight": GATE_UP,
    "h.0.attn.c_attn.weight": QKV,
    "blocks.0.attn.to_qkv.weight": QKV,
    "blocks.0.mlp.up_gate_proj.weight": GATE_UP,
    "blocks.0.mlp.w1_w3": GATE_UP,
}
FUSED_PARTS = [
    ("qkv_proj", 2, True),
    ("qkv_proj", 3, False),
    ("qkv_proj", (4, 4, 4), False),
    ("gate_up_proj", 2, False),
    ("gate_up_proj", 3, True),
    ("gate_up_proj", 6, True),
    ("gate_up_proj", (8, 4), False),
]
PLAIN_CUTS = [
    ("experts.gate_up_proj", "ep", 0),
    ("mlp.gate_up_proj.weight", "fsdp", 0),
    ("mlp.down_proj.weight", "tp", 1),
    ("mlp.gate_proj.weight", "tp", 0),
    ("mlp.in_projector.weight", "tp", 0),
    ("layers.0.experts.w1", "ep", 0),
    ("layers.0.experts.gate.weight", "ep", 0),
    ("layers.0.mlp.gate_proj", "ep", 0),
    ("w", "ep", 0),
]
NO_EXPERTS = (
    *("layers.0.router.weight", "layers.0.self_attn.o_proj.weight"),
    *("input_layernorm.weight", "moe.shared_experts.w1", "moe.expert_bias"),
)
W1 = "layers.0.experts.w1"
SHARED = ("layers.0.shared_experts.w1", "layers.0.router.expert_bias", "layers.0.shared_expert")


def sizes_of_no_placement(make: Callable[..., Any]) -> Ranked:
    def state(rank: int) -> dict[str, Any]:
        local = arange([3, 1, 2, 2][rank], 3, start=3 * rank)
        return {"w": make(local, WORLD.mesh(rank, fsdp=4), [Shard(0)], (8, 3))}

    return state


def inferred_shapes(rank: int) -> dict[str, Any]:
    rows = [3, 3, 3, 1][rank]
    local = arange(rows, 2, start=100 * rank)
    return {"w": FakeDTensor(local, WORLD.mesh(rank, fsdp=4), [Shard(0)], (4 * rows, 2))}


def drifted(rank: int) -> dict[str, Any]:
    mesh = WORLD.mesh(rank, replicate=2, shard=2)
    value = FakeDTensor.distribute(arange(8, 3), mesh, [Replicate(), Shard(0)])
    value.to_local()[0, 0] += 0.5 if rank == 3 else 0
    return {"w": value}


def state_of_one_group(rank: int) -> dict[str, Any]:
    held: dict[str, Any] = {"model": {"experts.w": experts(rank, arange(8, 3))}}
    if rank < 2:
        held["optim"] = {"state": {"experts.w": {"exp_avg": experts(rank, arange(8, 3))}}}
    return held


def partial_sum(rank: int) -> dict[str, Any]:
    return {"w": FakeDTensor(arange(4, 3), WORLD.mesh(rank, tp=4), [Partial()], (4, 3))}


def uneven(rank: int) -> dict[str, Any]:
    """Of 7 rows the first edp rank should have 4; the second has its 3."""
    mesh = WORLD.mesh(rank, ep=2, edp=2)
    return {"layers.0.w": FakeDTensor(torch.zeros(3, 5), mesh["edp"], [Shard(0)], (7, 5))}


def outside(rank: int) -> PlacementRules:
    mesh = FakeMesh((3,), ("ep",), rank=rank)
    return PlacementRules({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def no_placement(fqn: str, tensor: Any) -> Any:
    return Shard(0)


def on_some_ranks(rank: int) -> PlacementRules:
    mesh = WORLD.mesh(rank, ep=4)
    return PlacementRules({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})} if rank < 2 else {})


def other_dims(rank: int) -> PlacementRules:
    return PlacementRules({"w": CheckpointPlacement(WORLD.mesh(rank, ep=4), [Shard(rank % 2)])})


def two_copies(rank: int) -> dict[str, Any]:
    return {"w": torch.full((3, 2), 1.0 + rank)} if rank in (0, 3) else {}


SCENES: dict[str, Scene] = {
    "m1: plain tensors that differ on every rank": Scene(
        lambda rank: {"layers": {"w": arange(4, 3, start=rank)}},
        refused=(
            "layers.w: 4 different contents on 4 ranks",
            *(f"rank {rank}" for rank in range(4)),
            *("needs a rule", "CheckpointPlacement"),
        ),
    ),
    **{
        f"m1: element {at} alone, by full digests": Scene(
            one_element(at),
            refused=("w: 2 different contents on 4 ranks", "ranks 0-2", "rank 3"),
            options={"digests": "full"},
        )
        for at in (0, 131_072, 262_143)
    },
    **{
        f"m1: {name} that differ": Scene(
            lambda rank, value=value: {"train": {"seen": value + rank}},
            refused=("train.seen: 4 different contents on 4 ranks", "a name per rank"),
        )
        for name, value in (
            ("counters", torch.tensor(5)),
            ("states of generators", torch.arange(16, dtype=torch.uint8)),
        )
    },
    **{
        f"m4: shards on ranks {one} and {other}, replicas elsewhere": Scene(
            sharded_here_replicated_there(one, other),
            refused=(
                *("w: ", "(8, 3)", "overlap", f"[0:4, :] by rank {one}"),
                f"by ranks {2 - one}-{3 - one}",
            ),
        )
        for one, other in ((0, 1), (2, 3))
    },
    "m5: another shape on another rank": Scene(
        lambda rank: {"w": arange(8, 3 + rank // 3)},
        lambda rank: None,
        refused=("w: ", "(8, 3) on ranks 0-2", "(8, 4) on rank 3"),
    ),
    "m5: another dtype on another rank": Scene(
        lambda rank: {"w": arange(8, 3, dtype=torch.bfloat16 if rank == 2 else torch.float32)},
        refused=("w: ", "torch.float32 on ranks 0-1, 3", "torch.bfloat16 on rank 2", "dtype"),
    ),
    "m5: a tensor here and an object there": Scene(
        lambda rank: {"w": "none" if rank == 1 else arange(3)},
        refused=("w: ", "tensor on ranks 0, 2-3", "object on rank 1"),
    ),
    **{
        f"m6: a rule that misses {missed} of two tied names": Scene(
            tied,
            ruled(f"{name}.weight", {"tp": Shard(0)}, tp=4),
            refused=(
                "ranks 0-3 cannot be placed in the checkpoint (1 fault)",
                f"{missed}.weight: it is in one storage with {name}.weight",
                f"{name}.weight is:  [0:2, :] of (8, 3)",
                "a rule speaks for one of them and misses the other",
            ),
        )
        for name, missed in (("embed", "head"), ("head", "embed"))
    },
    **{
        f"m6: tied {kind}": Scene(
            tied_dtensors(kind == "DTensors of one object"),
            ruled("embed.weight", {"ep": Shard(0)}, ep=2, fsdp=2),
            refused=(
                "head.weight: it is in one storage with embed.weight",
                "embed.weight is:  [0:2, :] of (8, 3)",
            ),
        )
        for kind in ("DTensors", "DTensors of one object")
    },
    "m7: two plain shards of a rule, fsdp left of tp": Scene(
        fsdp_after_tp(),
        ruled("w", {"fsdp": Shard(0), "tp": Shard(0)}, fsdp=2, tp=2),
        warned=("w: ", "'fsdp'", "'tp'", "_StridedShard"),
    ),
    "m7: two plain shards of a DTensor, fsdp left of tp": Scene(
        fsdp_after_tp(Shard(0), Shard(0)), warned=("w: ", "'fsdp'", "'tp'", "_StridedShard")
    ),
    "m7: fsdp after tp, as the DTensor says": Scene(
        fsdp_after_tp(_StridedShard(0, split_factor=2), Shard(0)), holds={"w": arange(8, 3)}
    ),
    "m7: fsdp after tp, as the rule says": Scene(
        fsdp_after_tp(),
        ruled("w", {"fsdp": _StridedShard(0, split_factor=2), "tp": Shard(0)}, fsdp=2, tp=2),
        holds={"w": arange(8, 3)},
    ),
    "m7: fsdp of the DTensor after tp of the rule": Scene(
        fsdp_after_tp(Shard(0), over="fsdp"),
        ruled("w", {"tp": Shard(0)}, fsdp=2, tp=2),
        holds={"w": arange(8, 3)},
    ),
    "m7: fsdp of the DTensor, and a rule of both": Scene(
        fsdp_after_tp(Shard(0), over="fsdp"),
        ruled("w", {"fsdp": Shard(0), "tp": Shard(0)}, fsdp=2, tp=2),
        holds={"w": arange(8, 3)},
    ),
    "m7: other orders and dims": Scene(
        other_orders_and_dims, holds=dict.fromkeys("abc", arange(8, 4))
    ),
    **{
        f"m8: {name} by a plain shard over tp": Scene(
            chunks(name, arange(16, 3)),
            ruled(name, {"tp": Shard(0)}, tp=4),
            warned=(f"{name}: ", "'tp'", "Shard(0)", *facts),
        )
        for name, facts in FUSED_NAMES.items()
    },
    **{
        f"m8: {name} as {parts} parts": Scene(
            lambda rank, name=name: {f"layers.0.{name}.weight": arange(6, 3, start=rank % 2)},
            ruled(name, {"tp": FusedShard(0, parts)}, dp=2, tp=2),
            warned=(f"as {parts} parts",) if is_warned else (),
        )
        for name, parts, is_warned in FUSED_PARTS
    },
    **{
        f"m8, lint: {name} by a plain shard over {axis}": Scene(
            chunks(name, arange(8, 4, 3), dim),
            ruled(name, {axis: Shard(dim)}, **{axis: 4}),
            holds={name: arange(8, 4, 3)},
        )
        for name, axis, dim in PLAIN_CUTS
    },
    "lint: experts that are declared replicas along ep": Scene(
        lambda rank: {W1: arange(4, 3)},
        ruled(W1, {"tp": Shard(0)}, ep=2, tp=2),
        warned=(f"{W1}: ", "'ep'", "Replicate()", "size 2", "Shard(0)"),
    ),
    **{
        f"lint: stacked experts that ep cuts along dim {dim}": Scene(
            chunks(W1, arange(8, 4, 4), dim),
            ruled(W1, {"ep": Shard(dim)}, ep=4),
            warned=(
                f"{W1}: 'ep' cuts dim {dim}, and stacked experts lie along dim 0",
                f"Shard({dim}) over 'ep' of size 4, of a (8, 4, 4) tensor",
            ),
            holds={W1: arange(8, 4, 4)},
        )
        for dim in (1, 2)
    },
    **{
        # Each rank has all of it: the checkpoint joins the copies, and only its size tells.
        f"lint: a pattern that cuts {name} along ep": Scene(
            lambda rank, name=name: {name: arange(8, 3)},
            ruled(name, {"ep": Shard(0)}, ep=4),
            warned=(
                f"{name}: its name is not that of experts, but 'ep' cuts it",
                "Shard(0) over 'ep' of size 4, which makes a (32, 3) tensor",
            ),
            holds={name: torch.cat([arange(8, 3)] * 4)},
        )
        for name in NO_EXPERTS
    },
    "lint: experts that tp does not cut": Scene(
        lambda rank: {W1: arange(4, 3) + rank // 2}, ruled(W1, {"ep": Shard(0)}, ep=2, tp=2)
    ),
    "lint: shared experts and routers": Scene(
        lambda rank: dict.fromkeys(SHARED, arange(2, 3)),
        ruled(" ".join(SHARED), {"tp": Shard(0)}, ep=2, tp=2),
        holds=dict.fromkeys(SHARED, torch.cat([arange(2, 3), arange(2, 3)])),
    ),
    **{
        f"m9: local sizes that placements do not make, by {make.__name__}": Scene(
            sizes_of_no_placement(make),
            refused=(
                "ranks 0-1 cannot be placed in the checkpoint (2 faults)",
                "w: holds a (3, 3) tensor where (2, 3) was declared",
                "w: holds a (1, 3) tensor where (2, 3) was declared",
                *("(8, 3)", "fsdp=0", "from_local", "IndexShard"),
            ),
        )
        for make in (FakeDTensor, real_dtensor)
    },
    "m10: uneven from_local() without a shape": Scene(
        inferred_shapes,
        refused=(
            *("w: ", "(12, 2) on ranks 0-2", "(4, 2) on rank 3"),
            *("nobody holds [9:12, :] of (12, 2)", "from_local", "shape="),
        ),
    ),
    "m11: HSDP replicas that drifted apart": Scene(
        drifted,
        refused=(
            *("w: 2 different contents on 2 ranks", "[4:8, :] of (8, 3)"),
            *("content A:   rank 1", "content B:   rank 3", "differs along 'replicate'"),
            *("drifted apart", 'on_conflict="warn"'),
        ),
    ),
    "m24: optimizer state that one ep group alone has": Scene(
        state_of_one_group,
        ruled("experts.w", {"ep": Shard(0)}, ep=2, fsdp=2),
        refused=(
            *("(1 fault)", "optim.state.experts.w.exp_avg: ", "on ranks 0-1 and not on ranks 2-3"),
            *("[4:8, :]", "12 of 24 elements", "'ep'", "by rule:     'experts.w'"),
        ),
    ),
    "m29: a partial sum": Scene(
        partial_sum, refused=("w: holds a partial sum over axis tp", "redistribute")
    ),
    "a local shape that does not fit": Scene(
        uneven,
        ruled("w", {"ep": Shard(0)}, ep=2, edp=2),
        refused=(
            "ranks 0, 2 cannot be placed in the checkpoint (1 fault)",
            "layers.0.w: holds a (3, 5) tensor where (4, 5) was declared",
            "[Shard(0), Replicate()] on mesh (ep=2, edp=2)",
            "DTensor of shape (7, 5), [Shard(0)] on mesh (edp=2)",
            "(ep=0, edp=0) on rank 0",
            "whole tensor (14, 5), cut by Shard(0) over 'ep' of size 2, then Shard(0) over 'edp'",
            "by rule:     'w'",
        ),
    ),
    "a global shape that does not fit": Scene(
        plain(4, 3),
        ruled("w", {"ep": Shard(0)}, (20, 3), ep=4),
        refused=("w: holds a (4, 3) tensor where (5, 3)", "(20, 3)", "a wrong global_shape="),
    ),
    "a global shape that does not fit a DTensor": Scene(
        sharded("fsdp", 4, 3, ep=2, fsdp=2),
        ruled("w", {"ep": Shard(0)}, (10, 3), ep=2, fsdp=2),
        refused=("a wrong global_shape=", "DTensor.from_local()"),
    ),
    "a global shape of other dims": Scene(
        plain(4, 3),
        ruled("w", {"ep": Shard(0)}, (8,), ep=4),
        refused=("w: the tensor has 2 dims", "global_shape=(8,)", "has 1"),
    ),
    "a dim out of range": Scene(
        plain(4),
        ruled("w", {"ep": Shard(1)}, ep=4),
        refused=("w: Shard(1) over axis ep names dim 1 of a tensor of 1 dim", "'w'"),
    ),
    "one axis on two dims": Scene(
        sharded("fsdp", 4, 6, fsdp=4),
        ruled("w", {"fsdp": Shard(1)}, fsdp=4),
        refused=(
            "w: has axis fsdp sharded on dim 0 by its own DTensor, but as Shard(1)",
            "leave it out",
        ),
    ),
    "listed rows over an axis that the tensor shards": Scene(
        sharded("ep", 4, 6, ep=4),
        ruled("w", {"ep": IndexShard(0, (0,))}, (4, 6), ep=4),
        refused=("w: nobody holds all of the (4, 6) tensor",),
    ),
    "one axis of two sizes": Scene(
        sharded("fsdp", 4, 6, other=2, fsdp=2),
        ruled("w", {"fsdp": Replicate()}, fsdp=4),
        refused=("w: has axis fsdp of size 2 by its own DTensor, but of size 4 by the rule",),
    ),
    "one axis in two places": Scene(
        sharded("fsdp", 4, 6, fsdp=2, ep=2),
        ruled("w", {"ep": Shard(0)}, ep=2, fsdp=2),
        refused=(
            "w: has axis ep along other ranks by its own DTensor than by the rule",
            "its mesh:    (fsdp=2, ep=2) of ranks [[0, 1], [2, 3]]",
            "the rule's:  (ep=2, fsdp=2) of ranks [[0, 1], [2, 3]]",
        ),
    ),
    "one axis in two places, where no mesh has a table": Scene(
        sharded("fsdp", 4, 6, fsdp=2, ep=2),
        lambda rank: PlacementRules(
            {
                "w": CheckpointPlacement(
                    MeshCoordinate(("ep", "fsdp"), (2, 2), divmod(rank, 2)), {"ep": Shard(0)}
                )
            }
        ),
        refused=("w: is at position 0 of ep by its own DTensor, and at 1 by the rule",),
    ),
    "axes that need more ranks than there are": Scene(
        sharded("fsdp", 8, 3, ep=2, fsdp=2),
        ruled("w", {"ep": Shard(0)}, ep=4),
        refused=(
            "w: nobody holds all of the (32, 3) tensor",
            "Shard(0) over 'ep' of size 4, then Shard(0) over 'fsdp' of size 2; 4 ranks in all",
        ),
    ),
    "a mesh that the rank is not part of": Scene(
        plain(2),
        outside,
        refused=("rank 3 cannot be placed", "w: the rank is not part of the rule's mesh (ep=3)"),
    ),
    "parts that do not add up": Scene(
        plain(5, 3),
        ruled("w", {"tp": FusedShard(0, (8, 2, 2))}, tp=4),
        refused=(
            "w: parts (8, 2, 2) add up to 12, but 20 rows are being cut",
            "parts= of FusedShard",
        ),
    ),
    "rules that give no placement": Scene(
        plain(3),
        lambda rank: no_placement,
        refused=("w: was given Shard(dim=0) by the rules", "no_placement()", "way out:"),
    ),
    "a rule that some ranks lack": Scene(
        plain(3, 4),
        on_some_ranks,
        refused=("(12, 4) on ranks 0-1", "(3, 4) on ranks 2-3", "the ranks have different rules"),
    ),
    "a rule that shards another dim on some ranks": Scene(
        plain(4, 3),
        other_dims,
        refused=("the ranks have different rules",),
    ),
    "a key that one rank lacks": Scene(
        lambda rank: {"other": torch.ones(2)} | ({"w": torch.ones(2, 3)} if rank != 2 else {}),
        ruled("w", {"ep": Shard(0)}, ep=4),
        refused=(
            "w: nobody holds all of the (8, 3) tensor",
            "[4:6, :] of (8, 3) (6 of 24 elements)",
            "ranks 0-1, 3",
            "rank 2",
            "by rule:     'w'",
        ),
    ),
    "copies that either of two axes tells apart": Scene(
        two_copies,
        ruled("w", {}, ep=2, tp=2),
        refused=("differs along 'ep', 'tp'", "it is sharded over 'ep' or 'tp'"),
    ),
    "a pattern with a slip, and what it leads to": Scene(
        lambda rank: {"ws": torch.full((4, 3), float(rank))},
        ruled("w", {"ep": Shard(0)}, ep=4),
        refused=(
            "'w': no key on any rank matches",
            "ws: 4 different contents",
            "differs along 'ep'",
        ),
    ),
    "experts that are numbered from 0": Scene(
        lambda rank: {"layers.3.mlp.experts.0.w1": torch.full((3, 2), 1.0 + rank // 2)},
        ruled("other", {"ep": Shard(0)}, ep=2, edp=2),
        refused=(
            "every rank counts its own from 0",
            'rename=Renumber("experts.{}", this rank',
        ),
    ),
    "a pattern that is a regular expression": Scene(
        lambda rank: {"layers.0.w": torch.full((4, 3), float(rank))},
        ruled(r"layers\.\d+\.w", {"ep": Shard(0)}, ep=4),
        refused=("no key on any rank matches", "give it as re.compile("),
    ),
    "a pattern that matches too much": Scene(
        lambda rank: {
            "norm": FakeDTensor.distribute(arange(8), WORLD.mesh(rank, dp=4), [Shard(0)])
        },
        ruled("*", {"ep": Shard(0)}, ep=2, edp=2),
        refused=(
            "norm: nobody holds all of the (16,) tensor",
            "these axes make 8 shards: the rule matches too much",
            "by rule:     '*'",
        ),
    ),
    "a pattern that matches nothing beside one that does": Scene(
        lambda rank: {"layers.0.experts.w1": torch.ones(3)},
        lambda rank: PlacementRules({"layers": None, "experts": None}),
        warned=("no key on any rank matches", "'experts': no key"),
    ),
    "a stack of experts that are numbered from 0": Scene(
        lambda rank: {f"experts.{n}.w1": torch.full((3, 2), 10.0 * rank + n) for n in range(2)},
        refused=("experts.w1: 4 different contents on 4 ranks", "a Renumber before the Stack"),
        options={"rename": Stack("experts.{}", 2)},
    ),
    **{
        f"patterns that match nothing: {patterns}": Scene(
            lambda rank: {"layers.0.experts.w1": torch.ones(3)},
            ruled(patterns, {}, ep=4),
            warned=("no key on any rank matches", fact),
        )
        for patterns, fact in (
            ("expert", "'expert' is no component of any key; 'experts' is"),
            ("attention", "'attention': no key"),
        )
    },
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_save_is_refused_warned_of_or_quiet(scene: Scene, tmp_path: Path) -> None:
    if scene.refused:
        with refused_save(tmp_path) as refusal:
            save(WORLD, tmp_path, scene.state, scene.rules, **scene.options)
        refusal.says(*scene.refused, "way out:")
        return
    with warned() if scene.warned else without_warning() as texts:
        report = save(WORLD, tmp_path, scene.state, scene.rules, **scene.options)
    assert len(report.warnings) == bool(scene.warned)
    if scene.warned:
        (text,) = texts
        for part in (*scene.warned, "way out:"):
            assert part in text, text
    if scene.holds is not None:
        assert_holds(tmp_path, scene.holds)


def test_m1_a_refused_save_leaves_the_older_checkpoint_as_it_was(tmp_path: Path) -> None:
    save(WORLD, tmp_path, lambda rank: {"w": arange(4, 3)})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with refused():
        save(WORLD, tmp_path, lambda rank: {"w": arange(4, 3, start=rank)})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert_holds(tmp_path, {"w": arange(4, 3)})


@pytest.mark.parametrize("count", [1, 16], ids=["m2", "m3: 16 tensors"])
def test_experts_of_two_groups_are_whole_with_a_rule_and_refused_without(
    tmp_path: Path, count: int
) -> None:
    """DTensors over the fsdp sub-mesh, other experts per ep group."""
    wholes = {f"experts.w{i}": arange(8 + 4 * i, 1 + i % 3, start=i) for i in range(count)}

    def state(rank: int) -> dict[str, Any]:
        return {name: experts(rank, whole) for name, whole in wholes.items()}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state)
    refusal.says(
        "(1 fault)" if count == 1 else f"(1 fault of {count} keys)",
        *("content A:   rank 0", "content B:   rank 2", "differs along 'ep'", "needs a rule"),
        *("2 different contents on 2 ranks that claim to be replicas", "Shard"),
        *(f"experts.w{i}" for i in range(min(8, count))),
    )
    rules = ruled("experts", {"ep": Shard(0)}, ep=2, fsdp=2)
    with without_warning():
        report = save(WORLD, tmp_path, state, rules)
        assert_holds(tmp_path, wholes)
        loaded, _ = load(WORLD, tmp_path, lambda rank: blank(state(rank)), rules)
    for rank in range(4):
        assert_same(loaded[rank], state(rank))
    assert report.unique_nbytes == report.whole_nbytes
    assert report.replica_nbytes == 0


def test_lint_of_numbered_experts_leads_to_a_rename_first(tmp_path: Path) -> None:
    name = "layers.0.experts.0.w1"
    rules = ruled(name, {"tp": Shard(0)}, ep=2, tp=2)
    with warned() as texts:
        save(WORLD, tmp_path, lambda rank: {name: arange(4, 3)}, rules)
    (text,) = texts
    way_out = text[text.index("way out:") :]
    assert way_out.index("rename=Renumber(") < way_out.index("Shard(0)")


def test_ranks_that_save_different_steps_are_refused(tmp_path: Path) -> None:
    def save_steps(steps: list[int | None]) -> None:
        WORLD.save(
            tmp_path,
            lambda rank: {"w": arange(3)},
            lambda rank: PlacementSavePlanner(step=steps[rank]),
        )

    text = refusal(lambda: save_steps([7, 7, 8, 7]))
    assert "the ranks save different steps: 7 on ranks 0-1, 3; 8 on rank 2" in text
    # A rank without a step, the coordinator or another one, would leave the checkpoint without it.
    for steps, ranks in [
        ([7, None, None, 7], "7 on ranks 0, 3; None on ranks 1-2"),
        ([None, 7, 7, 7], "None on rank 0; 7 on ranks 1-3"),
        ([0, 0, 0, None], "0 on ranks 0-2; None on rank 3"),
    ]:
        text = refusal(lambda steps=steps: save_steps(steps))
        assert f"the ranks save different steps: {ranks}" in text
    assert not list(tmp_path.iterdir())
    save_steps([0, 0, 0, 0])
    save_steps([None, None, None, None])


def test_lint_is_silenced_by_pattern_with_a_reason_that_is_kept(tmp_path: Path) -> None:
    names = ("attn.qkv.weight", "mixer.in_proj.weight")
    rules = ruled(" ".join(names), {"tp": Shard(0)}, tp=4)

    def state(rank: int) -> dict[str, Any]:
        return {name: arange(2, 3, start=rank) for name in names}

    reason = "its rows are interleaved by head"
    with warned() as texts:
        report = save(WORLD, tmp_path, state, rules, waive={"attn.qkv": reason})
    (text,) = texts
    assert "mixer.in_proj.weight: " in text
    assert "attn.qkv" not in text, text
    assert reason in str(report)
    for waive in ({"attn.qkv": ""}, {"**": reason}, {"*": reason}):
        with pytest.raises(PlacementError, match="waive="):
            PlacementSavePlanner(waive=waive)


@pytest.mark.parametrize("options", [{"on_conflict": "warn"}, {"digests": "off"}], ids=str)
def test_m11_one_of_the_copies_is_saved_where_that_is_let_pass(
    tmp_path: Path, options: dict[str, str]
) -> None:
    is_compared = "digests" not in options
    with warned() if is_compared else without_warning() as texts:
        report = save(WORLD, tmp_path, drifted, **options)
    assert len(report.warnings) == is_compared
    if is_compared:
        (text,) = texts
        assert "w: 2 different contents" in text
        assert "rank 3" in text
    read = read_whole(tmp_path)["w"]
    assert same_bits(read[:4], arange(8, 3)[:4])
    assert any(same_bits(read[4:], drifted(rank)["w"].to_local()) for rank in (1, 3))


def test_m12_objects_that_differ_are_warned_of_and_saved(tmp_path: Path) -> None:
    with warned() as texts:
        report = save(
            WORLD, tmp_path, lambda rank: {"train": {"rng": ("seed", rank // 2), "step": 3}}
        )
    (text,) = texts
    for part in ("train.rng: ", "ranks 0-1", "ranks 2-3", "2 different contents", "f'rng.{rank}'"):
        assert part in text, text
    assert "train.step" not in text
    assert len(report.warnings) == 1
    kept, _ = load(WORLD, tmp_path, lambda rank: {"train": {"rng": None, "step": None}})
    assert kept[2]["train"]["step"] == 3
    assert kept[2]["train"]["rng"] in (("seed", 0), ("seed", 1))


def test_m12_one_key_per_rank_keeps_every_object(tmp_path: Path) -> None:
    with without_warning():
        save(WORLD, tmp_path, lambda rank: {f"rng.{rank}": ("seed", rank)})
        loaded, _ = load(WORLD, tmp_path, lambda rank: {f"rng.{rank}": None})
    assert [loaded[rank][f"rng.{rank}"] for rank in range(4)] == [("seed", r) for r in range(4)]


class FailingWriter(dcp.FileSystemWriter):
    """Fails at one step of a save, as a full disk or a lost rank does."""

    def __init__(self, path: Path, step: str | None) -> None:
        super().__init__(path)
        self.step = step

    def _reach(self, step: str) -> None:
        if step == self.step:
            raise OSError(f"failed to {step}")

    def prepare_local_plan(self, plan: Any) -> Any:
        self._reach("plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._reach("plan for all")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._reach("begin writing")
        written = super().write_data(plan, planner)
        self._reach("end writing")
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        self._reach("finish")
        super().finish(metadata, results)


@pytest.mark.parametrize("seed", range(8))
def test_m25_cached_plans_are_right_through_failures_and_changes(tmp_path: Path, seed: int) -> None:
    """Random saves with one set of planners: other shapes, dtypes, keys, faults and failures."""
    chance = random.Random(seed)
    digests = chance.choice(["sampled", "full"])
    rules = ruled("experts.w", {"ep": Shard(0)}, ep=4)
    planners = [
        PlacementSavePlanner(rules(rank), enable_plan_caching=True, digests=digests)
        for rank in range(4)
    ]
    for step in range(12):
        whole = arange(chance.choice([8, 8, 8, 16]), 3, start=step)
        whole = whole.to(chance.choice([torch.float32, torch.float32, torch.bfloat16]))
        one_more, conflict = chance.random() < 0.2, chance.random() < 0.1
        fails = chance.choice(
            [None] * 5 + ["plan", "plan for all", "begin writing", "end writing", "finish"]
        )
        at = 0 if fails in ("plan for all", "finish") else chance.randrange(4)
        path = tmp_path / str(step)
        wanted = {"experts.w": whole, "norm": arange(5, start=step)}
        wanted |= {"one_more": arange(2)} if one_more else {}

        def state(
            rank: int, step: int = step, wanted: Any = wanted, conflict: bool = conflict
        ) -> dict[str, Any]:
            found = {**wanted, "experts.w": wanted["experts.w"].chunk(4)[rank].clone()}
            found["norm"] = found["norm"] + (rank if conflict else 0)
            if rank != 2:
                found.pop("one_more", None)
            return {**found, "step": ("step", step)}

        def writer(
            rank: int, path: Path = path, fails: str | None = fails, at: int = at
        ) -> FailingWriter:
            return FailingWriter(path, fails if rank == at else None)

        if fails is not None or conflict:
            with pytest.raises(dcp.CheckpointException, match=r"failed to|different contents"):
                WORLD.save(path, state, lambda rank: planners[rank], writer)
            assert not (path / ".metadata").exists()
            continue
        WORLD.save(path, state, lambda rank: planners[rank], writer)
        assert_holds(path, wanted)
        template = {**blank(wanted), "step": None}
        loaded, _ = load(World(1), path, lambda rank, t=template: t)
        assert loaded[0]["step"] == ("step", step)


def test_m29_two_keys_that_flatten_into_one_are_refused(tmp_path: Path) -> None:
    state = {"a": {"b": arange(2)}, "a.b": arange(2, start=5)}
    with pytest.raises(dcp.CheckpointException, match=r"a\.b"):
        save(WORLD, tmp_path, lambda rank: state)
    assert not list(tmp_path.rglob(".metadata"))


@pytest.mark.parametrize("save_distributed", [False, True])
def test_torchs_writer_of_safetensors_gets_whole_tensors_of_one_rank(
    tmp_path: Path, save_distributed: bool
) -> None:
    held = {"w": arange(16, 3), "nested": {"norm": arange(3)}}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=save_distributed)
    dcp.save(held, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)
    stored = {"w": torch.zeros_like(arange(16, 3)), "nested": {"norm": torch.zeros_like(arange(3))}}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    dcp.load(stored, storage_reader=reader, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(stored["w"], held["w"])
    assert torch.equal(stored["nested"]["norm"], held["nested"]["norm"])
    (tmp_path / "other").mkdir()
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "other"))
    with pytest.raises(dcp.CheckpointException, match="step: is an object, and HuggingFace"):
        dcp.save(
            {**held, "step": 3}, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True
        )
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("scene", ["m30: two chunks", "m53: an object", "one chunk"])
@pytest.mark.parametrize("save_distributed", [False, True])
def test_m30_m53_torchs_writer_of_safetensors_is_refused_to_several_ranks_before_writing(
    tmp_path: Path, save_distributed: bool, scene: str
) -> None:
    placement = FusedShard(0, 2) if "chunks" in scene else Shard(0)
    rules = ruled("w", {"tp": placement}, tp=4)

    def state(rank: int) -> dict[str, Any]:
        held: dict[str, Any] = {"w": cut(arange(16, 3), [placement], [4], [rank])}
        return {**held, "nested": {"step": 3}} if "object" in scene and rank == 2 else held

    with refused_save(tmp_path) as refusal:
        WORLD.save(
            tmp_path,
            state,
            lambda rank: PlacementSavePlanner(rules(rank)),
            lambda rank: dcp.HuggingFaceStorageWriter(
                str(tmp_path), save_distributed=save_distributed
            ),
        )
    refusal.says(
        "HuggingFaceStorageWriter", "way out:", "FileSystemWriter", "dcp-placements export"
    )
    assert not list(tmp_path.glob("*.safetensors"))


class CountingPlanner(PlacementSavePlanner):
    """Counts the calls of Python functions while the coordinator plans."""

    calls = 0

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        """Plan as ever."""

        def count(frame: Any, event: str, arg: Any) -> None:
            self.calls += event == "call"

        sys.setprofile(count)
        try:
            return super().create_global_plan(all_plans)
        finally:
            sys.setprofile(None)


DIFFERENT = {
    "the ranks do not agree on its dtype": lambda last: torch.ones(2, dtype=DTYPES[last]),
    "different contents": lambda last: torch.full((2,), float(last)),
}
DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("text", DIFFERENT)
def test_m96_an_error_of_many_keys_and_ranks_is_put_together_by_group(
    tmp_path: Path, text: str
) -> None:
    """One rank of 40 differs in all keys: less than one step in Python for each key and rank."""
    ranks, few, many = 40, 5, 55

    def calls(keys: int) -> int:
        planner = CountingPlanner()

        def state(rank: int) -> dict[str, Any]:
            value = DIFFERENT[text](rank == ranks - 1)
            return {f"layers.{i}.w": value.clone() for i in range(keys)}

        others = [planner, *[PlacementSavePlanner() for _ in range(ranks - 1)]]
        with refused_save(tmp_path) as refusal:
            World(ranks).save(tmp_path, state, others.__getitem__)
        refusal.says(text, "ranks 0-38", "rank 39")
        return planner.calls

    assert calls(many) - calls(few) < (many - few) * ranks


@pytest.mark.parametrize(("size", "tail"), [(60, 1.0), (61, 0.0), (60, None)])
def test_m105_rows_dropped_as_padding_that_are_not_constant_are_warned_of(
    tmp_path: Path, size: int, tail: float | None
) -> None:
    """A vocabulary of 61 in 64 rows: the row that ``global_shape=(60, 6)`` loses."""
    padded = torch.zeros(64, 6)
    padded[:61] = arange(61, 6) + 1
    if tail is None:
        padded[60:] = 7.0

    def rules(rank: int) -> PlacementRules:
        shapes = {"global_shape": (size, 6), "padded_shape": (64, 6)}
        return PlacementRules(
            {"embed": CheckpointPlacement(WORLD.mesh(rank, tp=4), {"tp": Shard(0)}, **shapes)}
        )

    def held(rank: int) -> dict[str, Any]:
        return {"embed.weight": padded.chunk(4)[rank].clone()}

    with warned() if tail else without_warning() as texts:
        save(WORLD, tmp_path, held, rules)
    if tail:
        (text,) = texts
        assert "embed.weight: [60:64] of dim 0 is padding by the rule, and is not constant" in text
        assert "global_shape=(60, 6), padded_shape=(64, 6)" in text
        with without_warning():
            save(WORLD, tmp_path, held, rules, waive={"embed": "two special rows"})
    assert_holds(tmp_path, {"embed.weight": padded[:size]})


@pytest.mark.parametrize("drifted", ["all", "experts", "tp"])
def test_m85_replicas_that_drifted_along_one_axis_are_said_once(
    tmp_path: Path, drifted: str
) -> None:
    """A trainer that clips gradients by another norm on each ep rank; or a rule that is missing."""
    rules = ruled("experts.w", {"ep": Shard(0)}, ep=2, tp=2)

    def held(rank: int) -> dict[str, Any]:
        ep, tp = divmod(rank, 2)
        own = {"all": ep, "experts": 0, "tp": tp}[drifted]
        dense = {f"layers.{at}.{name}": arange(2, 3) for at in range(6) for name in ("q", "norm")}
        for name in dense:
            if drifted == "all" or name.endswith("q"):
                dense[name] = dense[name] + own
        return {**dense, "experts.w": arange(2, 3, start=ep), "experts.v": arange(2, 3, start=ep)}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, held, rules)
    text = refusal.text
    is_said = "12 of the 12 tensors that no rule speaks of differ along 'ep'" in text
    assert is_said == (drifted == "all")
    assert text.count("drifted apart: gradients that are clipped") == is_said
    # Experts without a rule are another fault, and so is a missing rule over tp.
    assert "experts.v: 2 different contents" in text
    assert ("layers.0-5.q: 2 different contents" in text) == (drifted == "tp")


@pytest.mark.parametrize(
    ("key", "value", "likely"),
    [
        ("bn.running_var", torch.ones(4), "batches; one save may take the mean of one rank"),
        ("loss", torch.tensor(1.0), "a number of each rank's own, such as a loss"),
    ],
)
def test_what_data_parallel_ranks_have_of_their_own_is_called_so(
    key: str, value: torch.Tensor, likely: str, tmp_path: Path
) -> None:
    """Neither is a shard."""
    with refused_save(tmp_path) as refusal:
        WORLD.save(tmp_path, lambda rank: {key: value + rank}, lambda rank: PlacementSavePlanner())
    refusal.says(f"{key}: 4 different contents", likely, "way out:")
    assert "Shard" not in str(refusal.text)
