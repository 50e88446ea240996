"""Rows of ``hazards.md`` that a save decides: the right bytes, or an error that names the facts.

Every ``M<n>`` is a row of that table. Ranks are simulated; ``test_hazards_ranks.py`` has those
where real processes matter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
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
    refused,
    refused_save,
    same_bits,
    save,
    warned,
    without_warning,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementError,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

WORLD = World(4)


def by_axis(**placements: Any) -> Callable[..., Callable[[int], PlacementRules]]:
    """Return ``rules(pattern, axes)`` of one rule on a mesh of all ranks."""

    def rules(*patterns: str, **axes: int) -> Callable[[int], PlacementRules]:
        def on(rank: int) -> PlacementRules:
            placement = CheckpointPlacement(WORLD.mesh(rank, **axes), placements)
            return PlacementRules(dict.fromkeys(patterns, placement))

        return on

    return rules


def experts(rank: int, whole: torch.Tensor) -> FakeDTensor:
    """Return what FSDP2 makes of expert weights: the ep part, as a DTensor over fsdp alone."""
    mesh = WORLD.mesh(rank, ep=2, fsdp=2)
    part = cut(whole, [Shard(0)], [2], mesh.get_coordinate()[:1])
    return FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])


# M1: plain tensors of one key, other content per rank.


def test_m1_plain_tensors_that_differ_on_every_rank_are_refused(tmp_path: Path) -> None:
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, lambda rank: {"layers": {"w": arange(4, 3, start=rank)}})
    refusal.says(
        "layers.w: 4 different contents on 4 ranks",
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 3",
        "needs a rule",
        "CheckpointPlacement",
    )


@pytest.mark.parametrize("element", [0, 131_072, 262_143])
def test_m1_full_digests_see_any_single_element(tmp_path: Path, element: int) -> None:
    def state(rank: int) -> dict[str, Any]:
        w = arange(512, 512)
        w.view(-1)[element] += rank == 3
        return {"w": w}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state, digests="full")
    refusal.says("w: 2 different contents on 4 ranks", "ranks 0-2", "rank 3")


@pytest.mark.parametrize("value", [torch.tensor(5), torch.arange(16, dtype=torch.uint8)])
def test_m1_counters_and_rng_tensors_that_differ_are_refused(
    tmp_path: Path, value: torch.Tensor
) -> None:
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, lambda rank: {"train": {"seen": value + rank}})
    refusal.says("train.seen: 4 different contents on 4 ranks", "a name per rank")


def test_m1_a_refused_save_leaves_the_older_checkpoint_as_it_was(tmp_path: Path) -> None:
    save(WORLD, tmp_path, lambda rank: {"w": arange(4, 3)})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with refused():
        save(WORLD, tmp_path, lambda rank: {"w": arange(4, 3, start=rank)})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert_holds(tmp_path, {"w": arange(4, 3)})


def test_m1_with_a_rule_keeps_what_every_rank_holds(tmp_path: Path) -> None:
    whole = arange(8, 3)
    rules = by_axis(ep=Shard(0))("layers.w", ep=4)
    save(WORLD, tmp_path, lambda rank: {"layers": {"w": whole.chunk(4)[rank]}}, rules)
    assert_holds(tmp_path, {"layers.w": whole})


# M2, M3: DTensors over the fsdp sub-mesh, other experts per ep group.


@pytest.mark.parametrize(
    "shapes", [[(8, 3)], [(8 + 4 * i, 1 + i % 3) for i in range(16)]], ids=["m2", "m3-16-tensors"]
)
class TestExpertsOfTwoGroups:
    def state(self, shapes: list[tuple[int, ...]], rank: int) -> dict[str, Any]:
        wholes = self.wholes(shapes)
        return {
            "experts": {
                name.removeprefix("experts."): experts(rank, whole)
                for name, whole in wholes.items()
            }
        }

    def wholes(self, shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return {f"experts.w{i}": arange(*shape, start=i) for i, shape in enumerate(shapes)}

    def test_are_whole_in_the_file_with_a_rule(
        self, tmp_path: Path, shapes: list[tuple[int, ...]]
    ) -> None:
        rules = by_axis(ep=Shard(0))("experts", ep=2, fsdp=2)
        with without_warning():
            report = save(WORLD, tmp_path, lambda rank: self.state(shapes, rank), rules)
            assert_holds(tmp_path, self.wholes(shapes))
            loaded, _ = load(WORLD, tmp_path, lambda rank: blank(self.state(shapes, rank)), rules)
        for rank in range(4):
            assert_same(loaded[rank], self.state(shapes, rank))
        assert report.unique_nbytes == report.whole_nbytes
        assert report.replica_nbytes == 0

    def test_are_refused_without_a_rule(
        self, tmp_path: Path, shapes: list[tuple[int, ...]]
    ) -> None:
        with refused_save(tmp_path) as refusal:
            save(WORLD, tmp_path, lambda rank: self.state(shapes, rank))
        refusal.says(
            "(1 fault)" if len(shapes) == 1 else f"(1 fault of {len(shapes)} keys)",
            "content A:   rank 0",
            "content B:   rank 2",
            "2 different contents on 2 ranks that claim to be replicas",
            "differs along 'ep'",
            "needs a rule",
            "Shard",
            *(f"experts.w{i}" for i in range(min(8, len(shapes)))),
        )


# M4: one name, sharded over some ranks and replicated over others.


@pytest.mark.parametrize("sharded_ranks", [(0, 1), (2, 3)])
def test_m4_shards_here_and_replicas_there_are_refused(
    tmp_path: Path, sharded_ranks: tuple[int, int]
) -> None:
    whole_ranks = tuple({0, 1, 2, 3} - set(sharded_ranks))

    def state(rank: int) -> dict[str, Any]:
        sharded = rank in sharded_ranks
        ranks = torch.tensor(sharded_ranks if sharded else whole_ranks)
        mesh = FakeMesh((2,), ("fsdp",), rank=rank, ranks=ranks)
        whole = arange(8, 3, start=0 if sharded else 100)
        return {"w": FakeDTensor.distribute(whole, mesh, [Shard(0) if sharded else Replicate()])}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state)
    refusal.says(
        "w: ",
        "(8, 3)",
        "overlap",
        f"[0:4, :] by rank {sharded_ranks[0]}",
        f"by ranks {whole_ranks[0]}-{whole_ranks[1]}",
        "way out:",
    )


# M5: one name, another global shape or dtype on another rank.


def test_m5_another_shape_on_another_rank_is_refused(tmp_path: Path) -> None:
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, lambda rank: {"w": arange(8, 3 + rank // 3)}, by_none)
    refusal.says("w: ", "(8, 3) on ranks 0-2", "(8, 4) on rank 3", "way out:")


def test_m5_another_dtype_on_another_rank_is_refused(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"w": arange(8, 3, dtype=torch.bfloat16 if rank == 2 else torch.float32)}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state)
    refusal.says(
        "w: ", "torch.float32 on ranks 0-1, 3", "torch.bfloat16 on rank 2", "dtype", "way out:"
    )


def test_m5_a_tensor_here_and_an_object_there_is_refused(tmp_path: Path) -> None:
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, lambda rank: {"w": "none" if rank == 1 else arange(3)})
    refusal.says("w: ", "tensor on ranks 0, 2-3", "object on rank 1", "way out:")


def by_none(rank: int) -> None:
    """Rules that say nothing."""


# M6: one storage under two names.


def tied(rank: int) -> dict[str, Any]:
    part = arange(8, 3).chunk(4)[rank].clone()
    return {"embed.weight": part, "head.weight": part}


@pytest.mark.parametrize(("ruled", "missed"), [("embed", "head"), ("head", "embed")])
def test_m6_a_rule_that_misses_one_of_two_tied_names_is_refused(
    tmp_path: Path, ruled: str, missed: str
) -> None:
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, tied, by_axis(tp=Shard(0))(f"{ruled}.weight", tp=4))
    refusal.says(
        "ranks 0-3 cannot be placed in the checkpoint (1 fault)",
        f"{missed}.weight: it is in one storage with {ruled}.weight",
        f"{ruled}.weight is:  [0:2, :] of (8, 3)",
        "a rule speaks for one of them and misses the other",
        "way out:",
    )


@pytest.mark.parametrize("one_object", [False, True])
def test_m6_tied_dtensors_are_refused_likewise(tmp_path: Path, one_object: bool) -> None:
    def state(rank: int) -> dict[str, Any]:
        embed = experts(rank, arange(8, 3))
        head = FakeDTensor(embed.to_local(), embed.device_mesh, embed.placements, embed.shape)
        return {"embed.weight": embed, "head.weight": embed if one_object else head}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state, by_axis(ep=Shard(0))("embed.weight", ep=2, fsdp=2))
    refusal.says(
        "head.weight: it is in one storage with embed.weight",
        "embed.weight is:  [0:2, :] of (8, 3)",
    )


def test_m6_two_tied_names_under_their_rules_are_saved_whole(tmp_path: Path) -> None:
    save(WORLD, tmp_path, tied, by_axis(tp=Shard(0))("embed.weight", "head.weight", tp=4))
    assert_holds(tmp_path, {"embed.weight": arange(8, 3), "head.weight": arange(8, 3)})


# M7: two plain Shards on one dim, the fsdp axis left of the tp axis.


def fsdp_after_tp(rank: int, whole: torch.Tensor) -> torch.Tensor:
    """Return what FSDP over a tensor-parallel shard leaves on a rank."""
    fsdp, tp = WORLD.mesh(rank, fsdp=2, tp=2).get_coordinate()
    return whole.chunk(2)[tp].chunk(2)[fsdp].clone()


def test_m7_two_plain_shards_with_fsdp_left_of_tp_are_warned_of(tmp_path: Path) -> None:
    rules = by_axis(fsdp=Shard(0), tp=Shard(0))("w", fsdp=2, tp=2)
    with warned() as texts:
        report = save(WORLD, tmp_path, lambda rank: {"w": fsdp_after_tp(rank, arange(8, 3))}, rules)
    (text,) = texts
    for part in ("w: ", "'fsdp'", "'tp'", "_StridedShard", "way out:"):
        assert part in text, text
    assert len(report.warnings) == 1


def test_m7_two_plain_shards_of_a_dtensor_are_warned_of(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, fsdp=2, tp=2)
        local = fsdp_after_tp(rank, arange(8, 3))
        return {"layers.0.w": FakeDTensor(local, mesh, [Shard(0), Shard(0)], (8, 3))}

    with warned() as texts:
        save(WORLD, tmp_path, state)
    (text,) = texts
    for part in ("layers.0.w: ", "'fsdp'", "'tp'", "_StridedShard"):
        assert part in text, text


@pytest.mark.parametrize(
    "by", ["dtensor", "rule", "fsdp-dtensor-and-tp-rule", "fsdp-dtensor-and-rule-of-both"]
)
def test_m7_fsdp_after_tp_declared_as_it_is_saves_right_without_a_warning(
    tmp_path: Path, by: str
) -> None:
    whole = arange(8, 3)
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    rules: Any = None
    if by == "rule":
        rules = by_axis(fsdp=strided[0], tp=strided[1])("w", fsdp=2, tp=2)
    elif by == "fsdp-dtensor-and-tp-rule":
        rules = by_axis(tp=Shard(0))("w", fsdp=2, tp=2)
    elif by == "fsdp-dtensor-and-rule-of-both":
        rules = by_axis(fsdp=Shard(0), tp=Shard(0))("w", fsdp=2, tp=2)

    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, fsdp=2, tp=2)
        local = fsdp_after_tp(rank, whole)
        if by == "rule":
            return {"w": local}
        if by == "dtensor":
            return {"w": FakeDTensor(local, mesh, strided, (8, 3))}
        return {"w": FakeDTensor(local, mesh["fsdp"], [Shard(0)], (4, 3))}

    with without_warning():
        report = save(WORLD, tmp_path, state, rules)
    assert report.warnings == ()
    assert_holds(tmp_path, {"w": whole})


def test_m7_other_orders_and_dims_are_not_warned_of(tmp_path: Path) -> None:
    whole = arange(8, 4)

    def state(rank: int) -> dict[str, Any]:
        tp_first = WORLD.mesh(rank, tp=2, fsdp=2)
        fsdp_first = WORLD.mesh(rank, fsdp=2, tp=2)
        return {
            "a": FakeDTensor.distribute(whole, tp_first, [Shard(0), Shard(0)]),
            "b": FakeDTensor.distribute(whole, fsdp_first, [Shard(0), Shard(1)]),
            "c": FakeDTensor.distribute(whole, fsdp_first, [Shard(0), Replicate()]),
        }

    with without_warning():
        save(WORLD, tmp_path, state)
    assert_holds(tmp_path, dict.fromkeys("abc", whole))


# M8: fused projections under tp.

FUSED_NAMES = [
    "layers.0.mlp.gate_up_proj.weight",
    "layers.0.attn.qkv.weight",
    "layers.0.attention.qkv_proj.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "layers.0.mixer.in_proj.weight",
    "h.0.attn.c_attn.weight",
]


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_m8_a_plain_shard_over_tp_on_a_fused_name_is_warned_of(tmp_path: Path, name: str) -> None:
    rules = by_axis(tp=Shard(0))(name, tp=4)
    with warned() as texts:
        report = save(WORLD, tmp_path, lambda rank: {name: arange(4, 3, start=rank)}, rules)
    (text,) = texts
    is_qkv = "qkv" in name or "c_attn" in name
    parts = "(rows of Q, rows of K, rows of V)), or 3" if is_qkv else "2), or"
    held = "[its Q; its K; its V] has three" if is_qkv else "[its gate; its up] has two"
    for part in (f"{name}: ", "'tp'", "Shard(0)", held, f"way out:     FusedShard(0, {parts}"):
        assert part in text, text
    assert len(report.warnings) == 1


@pytest.mark.parametrize(
    ("name", "parts", "warns"),
    [
        ("qkv_proj", 2, True),
        ("qkv_proj", 3, False),
        ("qkv_proj", (4, 4, 4), False),
        ("gate_up_proj", 2, False),
        ("gate_up_proj", 3, True),
        ("gate_up_proj", 6, True),
        ("gate_up_proj", (8, 4), False),
    ],
)
def test_m8_a_number_of_parts_that_the_name_does_not_say_is_warned_of(
    tmp_path: Path, name: str, parts: Any, warns: bool
) -> None:
    key = f"layers.0.{name}.weight"
    rules = by_axis(tp=FusedShard(0, parts))(key, dp=2, tp=2)
    with warned() if warns else without_warning():
        report = save(WORLD, tmp_path, lambda rank: {key: arange(6, 3, start=rank % 2)}, rules)
    assert [f"as {parts} parts" in str(warning) for warning in report.warnings] == [True] * warns


def test_m8_fused_shards_save_the_logical_tensors_and_reshard(tmp_path: Path) -> None:
    whole = arange(16, 3)
    name = "mlp.gate_up_proj.weight"
    four = by_axis(tp=FusedShard(0, 2))(name, tp=4)
    two = by_axis(tp=FusedShard(0, 2))(name, dp=2, tp=2)

    def state(rank: int) -> dict[str, Any]:
        return {name: cut(whole, [FusedShard(0, 2)], [4], [rank])}

    with without_warning():
        save(WORLD, tmp_path, state, four)
        assert_holds(tmp_path, {name: whole})
        loaded, _ = load(WORLD, tmp_path, lambda rank: {name: torch.zeros(8, 3)}, two)
    gate, up = whole.chunk(2)
    for rank in range(4):
        wanted = torch.cat([gate.chunk(2)[rank % 2], up.chunk(2)[rank % 2]])
        assert same_bits(loaded[rank][name], wanted)


@pytest.mark.parametrize(
    ("name", "axis", "dim"),
    [
        ("experts.gate_up_proj", "ep", 0),
        ("mlp.gate_up_proj.weight", "fsdp", 0),
        ("mlp.down_proj.weight", "tp", 1),
        ("mlp.gate_proj.weight", "tp", 0),
        ("mlp.in_projector.weight", "tp", 0),
    ],
)
def test_m8_names_or_axes_that_are_not_fused_are_not_warned_of(
    tmp_path: Path, name: str, axis: str, dim: int
) -> None:
    whole = arange(8, 4, 3)
    rules = by_axis(**{axis: Shard(dim)})(name, **{axis: 4})
    with without_warning():
        save(WORLD, tmp_path, lambda rank: {name: whole.chunk(4, dim)[rank].clone()}, rules)
    assert_holds(tmp_path, {name: whole})


def test_lint_experts_that_are_declared_replicas_along_ep_are_warned_of(tmp_path: Path) -> None:
    rules = by_axis(tp=Shard(0))("layers.0.experts.w1", ep=2, tp=2)
    with warned() as texts:
        save(WORLD, tmp_path, lambda rank: {"layers.0.experts.w1": arange(4, 3)}, rules)
    (text,) = texts
    for part in ("layers.0.experts.w1: ", "'ep'", "Replicate()", "size 2", "Shard(0)"):
        assert part in text, text


def test_lint_of_numbered_experts_leads_to_a_rename_first(tmp_path: Path) -> None:
    name = "layers.0.experts.0.w1"
    with warned() as texts:
        save(
            WORLD,
            tmp_path,
            lambda rank: {name: arange(4, 3)},
            by_axis(tp=Shard(0))(name, ep=2, tp=2),
        )
    (text,) = texts
    way_out = text[text.index("way out:") :]
    assert way_out.index("rename=Renumber(") < way_out.index("Shard(0)")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_lint_stacked_experts_that_ep_cuts_along_another_dim_are_warned_of(
    tmp_path: Path, dim: int
) -> None:
    name = "layers.0.experts.w1"
    whole = arange(8, 4, 4)
    rules = by_axis(ep=Shard(dim))(name, ep=4)
    with warned() if dim else without_warning() as texts:
        save(WORLD, tmp_path, lambda rank: {name: whole.chunk(4, dim)[rank].clone()}, rules)
    if dim:
        (text,) = texts
        assert f"{name}: 'ep' cuts dim {dim}, and stacked experts lie along dim 0" in text
        assert f"Shard({dim}) over 'ep' of size 4, of a (8, 4, 4) tensor" in text
    assert_holds(tmp_path, {name: whole})


@pytest.mark.parametrize(
    "name", ["layers.0.router.weight", "layers.0.self_attn.o_proj.weight", "input_layernorm.weight"]
)
def test_lint_a_pattern_that_cuts_a_router_along_ep_is_warned_of(tmp_path: Path, name: str) -> None:
    """Each rank has all of it: the checkpoint joins the copies, and only its size tells."""
    whole = arange(8, 3)
    with warned() as texts:
        save(WORLD, tmp_path, lambda rank: {name: whole}, by_axis(ep=Shard(0))(name, ep=4))
    (text,) = texts
    assert f"{name}: its name is not that of experts, but 'ep' cuts it" in text
    assert "Shard(0) over 'ep' of size 4, which makes a (32, 3) tensor" in text
    assert_holds(tmp_path, {name: torch.cat([whole] * 4)})


@pytest.mark.parametrize("name", ["layers.0.experts.gate.weight", "layers.0.mlp.gate_proj", "w"])
def test_lint_other_names_that_ep_cuts_are_not_warned_of(tmp_path: Path, name: str) -> None:
    whole = arange(8, 3)
    with without_warning():
        rules = by_axis(ep=Shard(0))(name, ep=4)
        save(WORLD, tmp_path, lambda rank: {name: whole.chunk(4)[rank].clone()}, rules)
    assert_holds(tmp_path, {name: whole})


def test_lint_experts_that_tp_does_not_cut_are_not_warned_of(tmp_path: Path) -> None:
    rules = by_axis(ep=Shard(0))("layers.0.experts.w1", ep=2, tp=2)
    with without_warning():
        save(WORLD, tmp_path, lambda rank: {"layers.0.experts.w1": arange(4, 3) + rank // 2}, rules)


def test_ranks_that_save_different_steps_are_refused(tmp_path: Path) -> None:
    def save_steps(steps: list[int | None]) -> None:
        WORLD.save(
            tmp_path,
            lambda rank: {"w": arange(3)},
            lambda rank: PlacementSavePlanner(step=steps[rank]),
        )

    with pytest.raises(CheckpointException) as refused:
        save_steps([7, 7, 8, 7])
    text = str(refused.value.failures[0][0])
    assert "the ranks save 2 different steps: 7 on ranks 0-1, 3; 8 on rank 2" in text
    assert not list(tmp_path.iterdir())
    save_steps([7, None, None, 7])


def test_lint_shared_experts_and_routers_are_not_warned_of(tmp_path: Path) -> None:
    names = ("layers.0.shared_experts.w1", "layers.0.router.expert_bias", "layers.0.shared_expert")
    rules = by_axis(tp=Shard(0))(*names, ep=2, tp=2)
    with without_warning():
        save(WORLD, tmp_path, lambda rank: dict.fromkeys(names, arange(4, 3)[:2]), rules)
    assert_holds(tmp_path, dict.fromkeys(names, torch.cat([arange(2, 3), arange(2, 3)])))


def test_lint_is_silenced_by_pattern_with_a_reason_that_is_kept(tmp_path: Path) -> None:
    names = ("attn.qkv.weight", "mixer.in_proj.weight")
    rules = by_axis(tp=Shard(0))(*names, tp=4)

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


# M9, M10: from_local() with and without a shape that fits.


@pytest.mark.parametrize("make", [FakeDTensor, real_dtensor])
def test_m9_local_sizes_that_placements_do_not_make_are_refused(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    sizes = [3, 1, 2, 2]

    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, fsdp=4)
        return {"w": make(arange(sizes[rank], 3, start=3 * rank), mesh, [Shard(0)], (8, 3))}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state)
    refusal.says(
        "ranks 0-1 cannot be placed in the checkpoint (2 faults)",
        "w: holds a (3, 3) tensor where (2, 3) was declared",
        "w: holds a (1, 3) tensor where (2, 3) was declared",
        "(8, 3)",
        "fsdp=0",
        "from_local",
        "way out:",
        "IndexShard",
    )


def test_m10_uneven_from_local_without_shape_names_ranks_and_rows(tmp_path: Path) -> None:
    rows = [3, 3, 3, 1]

    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, fsdp=4)
        local = arange(rows[rank], 2, start=100 * rank)
        inferred = (4 * rows[rank], 2)
        return {"w": FakeDTensor(local, mesh, [Shard(0)], inferred)}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state)
    refusal.says(
        "w: ",
        "(12, 2) on ranks 0-2",
        "(4, 2) on rank 3",
        "nobody holds [9:12, :] of (12, 2)",
        "from_local",
        "shape=",
    )


# M11: HSDP replicas that drifted apart.


def drifted(rank: int) -> dict[str, Any]:
    mesh = WORLD.mesh(rank, replicate=2, shard=2)
    value = FakeDTensor.distribute(arange(8, 3), mesh, [Replicate(), Shard(0)])
    value.to_local()[0, 0] += 0.5 if rank == 3 else 0
    return {"w": value}


def test_m11_hsdp_replicas_that_drifted_apart_are_refused(tmp_path: Path) -> None:
    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, drifted)
    refusal.says(
        "w: 2 different contents on 2 ranks",
        "[4:8, :] of (8, 3)",
        "content A:   rank 1",
        "content B:   rank 3",
        "differs along 'replicate'",
        "drifted apart",
        'on_conflict="warn"',
    )


def test_m11_on_conflict_warn_saves_one_of_the_copies(tmp_path: Path) -> None:
    with warned() as texts:
        report = save(WORLD, tmp_path, drifted, on_conflict="warn")
    assert len(texts) == len(report.warnings) == 1
    assert "w: 2 different contents" in texts[0]
    assert "rank 3" in texts[0]
    read = read_whole(tmp_path)["w"]
    assert same_bits(read[:4], arange(8, 3)[:4])
    assert any(same_bits(read[4:], drifted(rank)["w"].to_local()) for rank in (1, 3))


def test_m11_digests_off_does_not_look(tmp_path: Path) -> None:
    with without_warning():
        save(WORLD, tmp_path, drifted, digests="off")
    assert same_bits(read_whole(tmp_path)["w"][:4], arange(8, 3)[:4])


# M12: per-rank objects under one key.


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


# M24: optimizer state that only one ep group has.


def test_m24_state_of_one_ep_group_only_is_named_with_its_ranks(tmp_path: Path) -> None:
    whole = arange(8, 3)
    rules = by_axis(ep=Shard(0))("experts.w", ep=2, fsdp=2)

    def state(rank: int) -> dict[str, Any]:
        weights: dict[str, Any] = {"model": {"experts.w": experts(rank, whole)}}
        if rank < 2:
            weights["optim"] = {"state": {"experts.w": {"exp_avg": experts(rank, whole)}}}
        return weights

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state, rules)
    assert sorted(refusal.by_rank) == [0]
    refusal.says(
        "(1 fault)",
        "optim.state.experts.w.exp_avg: ",
        "on ranks 0-1 and not on ranks 2-3",
        "[4:8, :]",
        "12 of 24 elements",
        "'ep'",
        "by rule:     'experts.w'",
        "way out:",
    )


# M25: plan caching over saves that differ.


class TestPlanCache:
    def planners(self) -> Callable[[int], PlacementSavePlanner]:
        rules = by_axis(ep=Shard(0))("experts.w", ep=4)
        made = [PlacementSavePlanner(rules(rank), enable_plan_caching=True) for rank in range(4)]
        return lambda rank: made[rank]

    def state(self, rank: int, whole: torch.Tensor) -> dict[str, Any]:
        return {"experts.w": whole.chunk(4)[rank].clone(), "norm": arange(5)}

    def save(
        self,
        path: Path,
        planners: Callable[[int], PlacementSavePlanner],
        whole: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        WORLD.save(path, lambda rank: self.state(rank, whole), planners, **kwargs)

    def test_m25_holds_over_two_storage_writers(self, tmp_path: Path) -> None:
        planners = self.planners()
        whole = arange(8, 3)
        for step in range(2):
            self.save(tmp_path / f"file-{step}", planners, whole)
            self.save(
                tmp_path / f"ours-{step}",
                planners,
                whole,
                writer=lambda rank, step=step: PlacementFileSystemWriter(tmp_path / f"ours-{step}"),
            )
        for step in range(2):
            for kind in ("file", "ours"):
                wanted = {"experts.w": whole, "norm": arange(5)}
                assert_holds(tmp_path / f"{kind}-{step}", wanted)


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
    rules = by_axis(ep=Shard(0))("experts.w", ep=4)
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


# M28: shards of every unusual kind.


@pytest.mark.parametrize("make", [FakeDTensor, real_dtensor])
def test_m28_uneven_strided_empty_and_zero_element_shards_are_right(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    wholes = {
        "uneven": (arange(5, 3), [Shard(0), Shard(0)]),
        "uneven_columns": (arange(3, 5), [Replicate(), Shard(1)]),
        "two_dims": (arange(5, 7), [Shard(1), Shard(0)]),
        "strided": (arange(12, 2), strided),
        "strided_uneven": (arange(10, 2), strided),
        "empty_on_some": (arange(1, 3), [Shard(0), Replicate()]),
        "no_element": (arange(0, 3), [Shard(0), Replicate()]),
        "no_column": (arange(4, 0), [Shard(0), Shard(0)]),
        "scalar": (torch.tensor(5.0), [Replicate(), Replicate()]),
        "one": (torch.tensor([6]), [Replicate(), Replicate()]),
    }

    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, a=2, b=2)
        found = {}
        for name, (whole, placements) in wholes.items():
            local = cut(whole, placements, (2, 2), mesh.get_coordinate())
            found[name] = make(local, mesh, placements, whole.shape)
        return found

    def template(rank: int) -> dict[str, Any]:
        found = state(rank)
        for value in found.values():
            value.to_local().fill_(9)
        return found

    with without_warning():
        save(WORLD, tmp_path, state)
        loaded, _ = load(WORLD, tmp_path, template)
    assert_holds(tmp_path, {name: whole for name, (whole, _) in wholes.items()})
    for rank in range(4):
        wanted = state(rank)
        for name, value in loaded[rank].items():
            assert same_bits(value.to_local(), wanted[name].to_local()), name


# M29: what cannot be saved as it is.


def test_m29_a_partial_placement_is_refused(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        mesh = WORLD.mesh(rank, tp=4)
        return {"w": FakeDTensor(arange(4, 3), mesh, [Partial()], (4, 3))}

    with refused_save(tmp_path) as refusal:
        save(WORLD, tmp_path, state)
    refusal.says("w: holds a partial sum over axis tp", "way out:", "redistribute")


def test_m29_two_keys_that_flatten_into_one_are_refused(tmp_path: Path) -> None:
    state = {"a": {"b": arange(2)}, "a.b": arange(2, start=5)}
    with pytest.raises(dcp.CheckpointException, match=r"a\.b"):
        save(WORLD, tmp_path, lambda rank: state)
    assert not list(tmp_path.rglob(".metadata"))


# M30, M53: files that know a tensor by its name alone.


@pytest.mark.parametrize("scene", ["m30: two chunks", "m53: an object", "one chunk"])
@pytest.mark.parametrize("save_distributed", [False, True])
def test_m30_m53_torchs_writer_of_safetensors_is_refused_before_writing(
    tmp_path: Path, save_distributed: bool, scene: str
) -> None:
    placement = FusedShard(0, 2) if "chunks" in scene else Shard(0)
    rules = by_axis(tp=placement)("w", tp=4)

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
    refusal.says("HuggingFaceStorageWriter", "way out:", "FileSystemWriter", "export --to hf")
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
    rules = by_axis(ep=Shard(0))("experts.w", ep=2, tp=2)

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
