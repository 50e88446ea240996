"""What is hard about whole models, each by itself: fused dims, padding, tied names, replicas.

``test_matrix`` runs them all together through every topology.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds, refused_save
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from test_world_properties import checkpoint_directory
from topologies import (
    EMBEDDINGS,
    HIDDEN,
    MOMENTS,
    VOCAB,
    Ranks,
    Topology,
    load_and_check,
    save_and_check,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, real_dtensor

# Fused tensors


@st.composite
def fused(draw: st.DrawFn, dim: int, ranks: int, *, even: bool) -> tuple[int, FusedShard]:
    """Draw a dim's size and how it is fused: equal parts, GQA's unequal ones, or interleaved."""
    kind = draw(st.sampled_from(("parts", "sizes", "interleaved")))
    count = draw(st.integers(1, 3))
    if kind == "sizes":
        each = [draw(st.integers(1, 5)) * (ranks if even else 1) for _ in range(count)]
        return sum(each), FusedShard(dim, tuple(each))
    size = count * draw(st.integers(1, 5)) * (ranks if even else 1)
    return size, FusedShard(dim, count, interleaved=kind == "interleaved")


@given(st.data())
@examples(10)
def test_fused_dims_under_tp_then_fsdp_are_in_canonical_order(data: st.DataObject) -> None:
    """torch's own DTensors over fsdp alone, or over both; loaded by ranks of other numbers."""
    has_tp = data.draw(st.booleans(), "the DTensor has tp")
    axes = [
        {"fsdp": data.draw(st.integers(1, 3)), "tp": data.draw(st.integers(1, 4))} for _ in range(2)
    ]
    rows, placement = data.draw(fused(0, prod(a["tp"] for a in axes), even=has_tp))
    whole = arange(rows, data.draw(st.integers(1, 3)))
    columns_too = data.draw(st.booleans(), "fsdp cuts the other dim")

    def held(rank: int, at: dict[str, int], source: torch.Tensor) -> Any:
        mesh = World(prod(at.values())).mesh(rank, **at)
        part = cut(source, [placement], [at["tp"]], (mesh.get_coordinate() or ())[1:])
        own = Shard(1 if columns_too else 0)
        local = cut(part, [own], [at["fsdp"]], (mesh.get_coordinate() or ())[:1])
        if not has_tp:
            return real_dtensor(local, mesh["fsdp"], [own], part.shape)
        inner = own if columns_too else _StridedShard(0, split_factor=at["tp"])
        return real_dtensor(local, mesh, [inner, Shard(0)], source.shape)

    assert_saved_and_loaded(whole, axes, held, {"tp": placement})


@given(st.data())
@examples(10)
def test_fused_experts_under_ep_and_etp_then_edp_are_in_canonical_order(
    data: st.DataObject,
) -> None:
    """``[E, 2F, H]``, uneven in both dims; FSDP cuts the experts, or what etp has left."""
    axes = [
        {
            axis: data.draw(st.integers(1, 3 if axis == "edp" else 2))
            for axis in ("edp", "ep", "etp")
        }
        for _ in range(2)
    ]
    width, placement = data.draw(fused(1, 1, even=False))
    whole = arange(data.draw(st.integers(1, 5)), width, 2)
    own = Shard(data.draw(st.integers(0, 1)))
    cuts = {"ep": Shard(0), "etp": placement}

    def held(rank: int, at: dict[str, int], source: torch.Tensor) -> Any:
        mesh = World(prod(at.values())).mesh(rank, **at)
        edp, *inner = mesh.get_coordinate() or ()
        part = cut(source, list(cuts.values()), [at["ep"], at["etp"]], inner)
        local = cut(part, [own], [at["edp"]], [edp])
        return real_dtensor(local, mesh["edp"], [own], part.shape)

    assert_saved_and_loaded(whole, axes, held, cuts)


def assert_saved_and_loaded(
    whole: torch.Tensor, axes: list[dict[str, int]], held: Any, cuts: dict[str, Any]
) -> None:
    """Save by the first axes, read by stock torch, load by the second; moments follow."""
    wholes = {"model.w": whole, **{f"optim.state.w.{m}": whole + i for i, m in enumerate(MOMENTS)}}

    def rules(rank: int, at: dict[str, int]) -> PlacementRules:
        mesh = World(prod(at.values())).mesh(rank, **at)
        return PlacementRules({"w": CheckpointPlacement(mesh, cuts, global_shape=whole.shape)})

    saving, loading = (World(prod(at.values())) for at in axes)
    with checkpoint_directory() as path:
        saving.save(
            path,
            lambda rank: {key: held(rank, axes[0], value) for key, value in wholes.items()},
            lambda rank: PlacementSavePlanner(rules(rank, axes[0])),
        )
        assert_holds(path, wholes)
        blank = torch.full_like(whole, -1)
        loaded = loading.load(
            path,
            lambda rank: {key: held(rank, axes[1], blank) for key in wholes},
            lambda rank: PlacementLoadPlanner(rules(rank, axes[1])),
        )
    for rank, state in enumerate(loaded):
        for key, value in wholes.items():
            expected = held(rank, axes[1], value).to_local()
            assert torch.equal(state[key].to_local(), expected), (key, rank)


# Padding


@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 2), (1, 4), (4, 1)])
def test_padding_that_depends_on_tp_is_kept_on_load_and_counted(
    source: int, target: int, tmp_path: Path
) -> None:
    """19 rows: 24 under tp 2, 32 under tp 4. ``load_and_check`` compares the padding, too."""
    save_and_check(tmp_path, Ranks(Topology(tp=source)))
    padded = -(-VOCAB // (4 * target)) * 4 * target
    reports = load_and_check(tmp_path, Ranks(Topology(tp=target)))
    tensors = 2 * (1 + len(MOMENTS))
    kept = Counter[str]()
    for rank, report in enumerate(reports):
        kept.update(report.padded)
        beyond = min(max((rank + 1) * padded // target - VOCAB, 0), padded // target)
        assert sum(report.padded.values()) == beyond * HIDDEN * tensors
        if beyond:
            line = f"{beyond * HIDDEN * tensors} elements of padding kept"
            assert line in str(report)
    assert len(kept) == tensors
    assert set(kept.values()) == {(padded - VOCAB) * HIDDEN}


def test_a_load_without_padding_says_nothing_of_it(tmp_path: Path) -> None:
    rules = PlacementRules({"w": CheckpointPlacement(FakeMesh((1,), ("tp",), rank=0), {})})
    World(1).save(tmp_path, lambda rank: {"w": arange(4, 2)}, lambda rank: PlacementSavePlanner())
    planner = PlacementLoadPlanner(rules)
    World(1).load(tmp_path, lambda rank: {"w": torch.zeros(4, 2)}, lambda rank: planner)
    assert planner.report.padded == {}
    assert "padded" not in str(planner.report)


# Tied weights


@pytest.mark.parametrize(
    "source",
    [
        Topology(),
        Topology(tp=2),
        Topology(pp=4),
        Topology(fsdp=4),
        Topology(tp=2, fsdp=2, hsdp=2),
    ],
    ids=str,
)
def test_tied_names_are_both_in_the_file_and_both_load(source: Topology, tmp_path: Path) -> None:
    """In one storage, and on two pipeline stages each in its own."""
    ranks = Ranks(source, tied=True)
    assert torch.equal(*(ranks.wholes[f"model.{name}"] for name in EMBEDDINGS))
    save_and_check(tmp_path, ranks)
    for target in (Topology(tp=2), Topology(pp=2), Topology(fsdp=2, tp=2)):
        load_and_check(tmp_path, Ranks(target, tied=True))


def test_tied_names_with_different_rules_are_refused(tmp_path: Path) -> None:
    world = World(2)
    weight = arange(4, 3)

    def rules(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, tp=2)
        return PlacementRules(
            {
                "embed": CheckpointPlacement(mesh, {"tp": Shard(0)}),
                "head": CheckpointPlacement(mesh, {"tp": Shard(1)}),
            }
        )

    with refused_save(tmp_path) as caught:
        world.save(
            tmp_path,
            lambda rank: {"embed": weight, "head": weight},
            lambda rank: PlacementSavePlanner(rules(rank)),
        )
    caught.says("one storage", "embed", "head", "way out")


# Replicas


BIG = (1 << 18, 1)
"""Shape of a tensor of 1 MiB: from there on replicas share the work."""


def replicas(kind: str, rank: int) -> tuple[dict[str, Any], PlacementRules]:
    """Return 16 tensors that the ranks of an axis of 4 hold alike, and a small one that all do."""
    world = World(8)
    whole = torch.arange(BIG[0] * 2, dtype=torch.float32).reshape(-1, 1)
    inner = {"hsdp": "fsdp", "cp": "tp", "dp": "tp", "edp": "ep"}[kind]
    mesh = world.mesh(rank, **{kind: 4, inner: 2})

    def layer() -> Any:
        if kind == "hsdp":
            return FakeDTensor.distribute(whole, mesh, [Replicate(), Shard(0)])
        return whole.chunk(2)[rank % 2].clone()

    rules = PlacementRules({"layers": CheckpointPlacement(mesh, {inner: Shard(0)})})
    state = {f"layers.{i}.weight": layer() for i in range(16)}
    return state | {"norm": torch.arange(8.0)}, rules


@pytest.mark.parametrize("kind", ["hsdp", "cp", "dp", "edp"])
@pytest.mark.parametrize("lowest", [False, True])
def test_replicas_share_the_bytes_or_leave_them_to_the_lowest_rank(
    kind: str, lowest: bool, tmp_path: Path
) -> None:
    planners = [
        PlacementSavePlanner(replicas(kind, rank)[1], dedup_save_to_lowest_rank=lowest)
        for rank in range(8)
    ]
    World(8).save(tmp_path, lambda rank: replicas(kind, rank)[0], planners.__getitem__)
    nbytes = [
        sum(
            item.tensor_data.chunk.sizes.numel() * 4
            for item in planner.plan.items
            if item.tensor_data is not None
        )
        for planner in planners
    ]
    total = 16 * 2 * BIG[0] * 4 + 32
    assert sum(nbytes) == total
    if lowest:
        assert nbytes[2:] == [0] * 6
    else:
        # 4 of 16 tensors each, and the small one on the lowest.
        assert [count // BIG[0] // 4 for count in nbytes] == [4] * 8
        assert max(nbytes) - min(nbytes) <= 32
    # Small ones are left to the lowest rank in any case.
    assert any(item.index.fqn == "norm" for item in planners[0].plan.items)


# Without collectives


@pytest.mark.parametrize(
    "source",
    [
        Topology(pp=2, tp=2),
        Topology(ep=2, etp=2, hsdp=4),
        Topology(tp=2, pp=2, ep=2, fsdp=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("whole", [False, True], ids=["fsdp-dtensors", "whole-dtensors"])
def test_each_rank_alone_saves_enough(source: Topology, whole: bool, tmp_path: Path) -> None:
    """No rank knows which keys the others have: stages, experts that are modules."""
    save_and_check(tmp_path, Ranks(source, whole=whole), use_collectives=False)
    load_and_check(tmp_path, Ranks(Topology(tp=2, pp=2)))
