"""What a load says about sizes, about the record of the save, and about names and patterns."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    assert_holds,
    assert_same,
    edit_metadata,
    load,
    refused,
    same_bits,
    warned,
    without_warning,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    MeshCoordinate,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Replace,
)
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.testing import FakeDTensor, World
from tests.load.sides import Side, distributed, parts_of

WHOLE = arange(8, 3)


# M14: another size than in the checkpoint.


def held(*shape: int, **axes: int) -> Side:
    """Return ranks that hold equal tensors of a shape, beside a norm."""
    return Side(axes or {"ep": 1}, lambda mesh: {"w": arange(*shape), "norm": arange(3)})


def ruled(side: Side, dim: int = 0, **shapes: Any) -> Side:
    """Return the same with a rule by which the first axis shards a dim."""
    return replace(side, placements={next(iter(side.axes)): Shard(dim)}, shapes=shapes)


ONES = Side({"tp": 2}, lambda mesh: {"w": torch.ones(28, 3)})
PADDED = ruled(ONES, global_shape=(50, 3), padded_shape=(56, 3))
SIZES: dict[str, tuple[Side, Side, tuple[str, ...]]] = {
    "saved without its ep axis": (
        held(2, 3, ep=4),
        ruled(held(2, 3, ep=4)),
        (
            "ranks 0-3 cannot be loaded from this checkpoint (1 fault)",
            "w: the checkpoint holds a (2, 3) tensor, but (8, 3) is needed",
            *("on dim 0", "4 times", "saved without its placement", "axis of size 4"),
            "by rule:     'w'",
        ),
    ),
    "loaded without the rule of the save": (
        ruled(held(2, 3, ep=4)),
        held(2, 3, ep=4),
        (
            "w: the checkpoint holds a (8, 3) tensor, but (2, 3) is needed",
            *("on dim 0", "4 times", "lack a rule", "axis of size 4"),
        ),
    ),
    # Both shapes are possible, so that the save could not see it.
    "a wrong dim at the save": (
        ruled(held(4, 6, tp=2), 1),
        ruled(held(4, 6, tp=2), 0),
        (
            "w: the checkpoint holds a (4, 12) tensor, but (8, 6) is needed",
            "saved:       Shard(1) over 'tp' of size 2",
            "this load:   Shard(0) over 'tp' of size 2",
        ),
    ),
    "a few rows more, which are padding": (
        PADDED,
        replace(PADDED, shapes={}),
        ("(50, 3) tensor, but (56, 3) is needed", "padded_shape= of parts that are uneven"),
    ),
    **{
        f"{shape}, of which nothing is to be guessed": (
            held(8, 3),
            held(*shape),
            ("w: the checkpoint holds a (8, 3) tensor", f"{shape} is needed"),
        )
        for shape in ((7, 3), (8, 4, 2), (16, 6))
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_m14_other_sizes_are_refused_with_their_likely_cause(tmp_path: Path, name: str) -> None:
    saved, loaded, facts = SIZES[name]
    saved.saves(tmp_path)
    refusal = loaded.is_refused(tmp_path, *facts, "way out:")
    assert ("axis of size" in refusal.text) == ("axis of size 4" in facts)
    saved.loads(tmp_path)


def test_m14_a_part_that_other_planners_kept_is_not_called_padding_alone(tmp_path: Path) -> None:
    side = held(5, 3, ep=4)
    stock: Any = lambda rank: dcp.DefaultSavePlanner()  # noqa: E731
    side.world.save(tmp_path, side.state, stock)
    ruled(held(2, 3, ep=4)).is_refused(
        tmp_path, "(5, 3) tensor, but (8, 3)", "saved:       by other planners", "doctor"
    )


# The record of the save.

FUSED = Side({"tp": 2}, parts_of(WHOLE.chunk(2), "tp"), {"tp": FusedShard(0, 2)})
PLAIN = Side({"tp": 2}, distributed(Shard(0), w=WHOLE))


def test_a_waiver_with_its_reason_lets_another_cut_pass(tmp_path: Path) -> None:
    FUSED.saves(tmp_path)
    reason = "cut apart by hand afterwards"
    report = PLAIN.loads_right(tmp_path, waive={"w": reason})[0]
    assert report.waived == {"w": reason}
    assert "declared as saved: 0 of 1 keys, the others waived" in str(report)
    assert reason in str(report)


def drop(metadata: Metadata) -> None:
    del metadata.planner_data[RESERVED_KEY]


def of_other_keys(metadata: Metadata) -> None:
    metadata.planner_data[RESERVED_KEY]["cuts"]["keys"] = (1, 0)


def of_another_form(metadata: Metadata) -> None:
    metadata.planner_data[RESERVED_KEY]["cuts"] = {"groups": 5}


def alternating(metadata: Metadata) -> None:
    """Records of older saves have a sixth value in each cut: whether its parts alternate."""
    cuts = metadata.planner_data[RESERVED_KEY]["cuts"]
    cuts["groups"] = tuple(tuple((*cut[:5], True) for cut in each) for each in cuts["groups"])


@pytest.mark.parametrize("edit", [drop, of_other_keys, of_another_form, alternating])
def test_a_record_that_cannot_be_compared_is_none(
    tmp_path: Path, edit: Callable[[Metadata], None]
) -> None:
    FUSED.saves(tmp_path)
    edit_metadata(tmp_path, edit)
    compared = "declared as saved: 1 of 1 keys" if edit is alternating else "no record"
    assert PLAIN.loads_right(tmp_path)[0].compared == compared


def test_a_stock_checkpoint_has_no_record(tmp_path: Path) -> None:
    dcp.save({"w": WHOLE}, checkpoint_id=tmp_path, no_dist=True)
    assert PLAIN.loads_right(tmp_path)[0].compared == "no record"


# M47 and M48: the lint and the patterns that match nothing, at load as at save.


def test_m47_a_load_runs_the_lint_of_the_save_and_the_coordinator_tells_once(
    tmp_path: Path,
) -> None:
    """Rank 0 holds none of these keys, ranks 1 and 2 the same one."""
    world = World(4)
    keys = [f"layers.{i}.mlp.gate_up_proj.weight" for i in range(2)]
    dcp.save({key: WHOLE for key in (*keys, "w")}, checkpoint_id=tmp_path, no_dist=True)

    def state(rank: int) -> dict[str, Any]:
        if rank == 0:
            return {"w": torch.zeros(8, 3)}
        mesh = world.mesh(rank, dp=2, tp=2)["tp"]
        return {keys[rank // 3]: FakeDTensor(torch.zeros(4, 3), mesh, [Shard(0)], (8, 3))}

    with warned() as texts:
        loaded, reports = load(world, tmp_path, state)
    (text,) = texts
    assert text.startswith(
        "look at this load (1 note of 2 keys)\nlayers.0-1.mlp.gate_up_proj.weight: "
    )
    for fact in (
        "its name says several tensors in one, but 'tp' cuts it plainly",
        *("FusedShard(0, 2)", "waive={pattern: reason}"),
    ):
        assert fact in text
    assert [len(report.warnings) for report in reports] == [0, 1, 1, 1]
    assert same_bits(loaded[1][keys[0]].to_local(), WHOLE[4:])
    with without_warning():
        load(world, tmp_path, state, waive={"gate_up_proj": "parts alternate by head"})


def test_a_cast_is_warned_of_once_and_reported_by_each_rank(tmp_path: Path) -> None:
    dcp.save({"a": arange(8, 3)}, checkpoint_id=tmp_path, no_dist=True)
    with warned() as texts:
        _, reports = load(
            World(3), tmp_path, lambda rank: {"a": torch.zeros(8, 3, dtype=torch.bfloat16)}
        )
    (text,) = texts
    assert "a: loaded with less precision than stored (float32 -> bfloat16)" in text
    assert [len(report.warnings) for report in reports] == [1, 1, 1]


def test_m48_a_pattern_that_matches_nothing_on_any_rank_is_warned_of_once(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({"a": whole, "b": whole}, checkpoint_id=tmp_path, no_dist=True)

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(World(2).mesh(rank, tp=2), {"tp": Shard(0)})
        return PlacementRules({"a": placement, "b": placement, "expert.w": placement})

    def state(rank: int) -> dict[str, Any]:
        return {"ab"[rank]: torch.zeros(4, 3)}

    with warned() as texts:
        _, reports = load(World(2), tmp_path, state, rules)
    (text,) = texts
    assert "'expert.w': no key on any rank matches" in text
    assert "way out:" in text
    assert reports[0].unmatched == ("'expert.w'",)
    assert "unmatched: 1: 'expert.w'" in str(reports[0])
    assert reports[1].unmatched == ()


def test_m48_a_rank_that_loads_by_itself_knows_nothing_of_others_keys(tmp_path: Path) -> None:
    dcp.save({"a": arange(8, 3)}, checkpoint_id=tmp_path, no_dist=True)
    rules = PlacementRules({"a": None, "b": None})
    planner = PlacementLoadPlanner(rules)
    with warned() as texts:
        dcp.load({"a": torch.zeros(8, 3)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert "'b': no key on any rank matches" in texts[0]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    with without_warning(), World(4)._as(2):
        planner.set_up_planner({"a": torch.zeros(8, 3)}, metadata, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    assert planner.report.unmatched == ()


# M147: bytes that a module keeps beside its tensors.


OTHER_BYTES = {
    "another length": (torch.zeros(50, dtype=torch.uint8), torch.ones(25, dtype=torch.uint8)),
    "bytes, then an object": (torch.zeros(50, dtype=torch.uint8), [1, 2]),
    "an object, then bytes": ([1, 2], torch.ones(25, dtype=torch.uint8)),
    "none, then some": (torch.zeros(0, dtype=torch.uint8), torch.ones(25, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", OTHER_BYTES)
def test_m147_opaque_bytes_of_another_length_are_called_so_and_may_stay(
    name: str, tmp_path: Path
) -> None:
    saved, own = OTHER_BYTES[name]
    weight = torch.arange(6.0)
    state = {"model": {"fc1.w": weight, "fc1._extra_state": saved}}
    dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)

    def load(**options: Any) -> tuple[dict[str, Any], PlacementLoadPlanner]:
        template = {"model": {"fc1.w": torch.zeros(6), "fc1._extra_state": deepcopy(own)}}
        planner = PlacementLoadPlanner(**options)
        dcp.load(template, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        return template["model"], planner

    with pytest.raises(dcp.CheckpointException) as caught:
        load()
    text = str(caught.value)
    assert "opaque bytes of a module" in text
    assert 'optional=["_extra_state"]' in text
    assert "lack a rule" not in text
    assert "an axis of size" not in text
    with without_warning():
        model, planner = load(optional=["_extra_state"])
    assert_same(model, {"fc1.w": weight, "fc1._extra_state": own})
    assert planner.report.missing == ("model.fc1._extra_state",)


def test_m147_opaque_bytes_of_one_length_are_read_also_where_they_may_stay(tmp_path: Path) -> None:
    saved = torch.arange(50, dtype=torch.uint8)
    dcp.save({"w": torch.ones(2), "_extra_state": saved}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(2), "_extra_state": torch.zeros(50, dtype=torch.uint8)}
    planner = PlacementLoadPlanner(optional=["_extra_state"])
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert torch.equal(state["_extra_state"], saved)
    assert planner.report.missing == ()


# M148: wrong causes.


WRAPPED = {
    "compiled blocks": ("layers.{}._orig_mod.w", "layers.{}.w", "_orig_mod"),
    "a compiled model": ("_orig_mod.layers.{}.w", "layers.{}.w", "_orig_mod"),
    "ddp": ("module.layers.{}.w", "layers.{}.w", "module"),
    "fsdp1": ("layers.{}._fsdp_wrapped_module.w", "layers.{}.w", "_fsdp_wrapped_module"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_m148_a_wrapper_s_name_in_keys_of_one_side_is_named(name: str, tmp_path: Path) -> None:
    long, short, word = WRAPPED[name]

    def state(key: str, fill: float) -> dict[str, Any]:
        return {key.format(n): torch.full((3,), fill * (n + 1)) for n in range(12)}

    for number, (saved, asked) in enumerate([(short, long), (long, short)]):
        path = tmp_path / str(number)
        dcp.save(state(saved, 1.0), checkpoint_id=path, no_dist=True)
        planner = PlacementLoadPlanner()
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load(state(asked, 0.0), checkpoint_id=path, planner=planner, no_dist=True)
        assert f"likely:      {word!r} is the name of a wrapper" in str(caught.value)
        if asked == long:
            assert f'rename=Replace("{word}", "")' in str(caught.value)
            template = state(asked, 0.0)
            planner = PlacementLoadPlanner(rename=Replace(word, ""))
            dcp.load(template, checkpoint_id=path, planner=planner, no_dist=True)
            assert_same(template, state(asked, 1.0))


def test_m148_another_order_of_axes_under_a_fused_shard_is_named(tmp_path: Path) -> None:
    """tp cuts the rows of q, k and v, and gtp what tp has left."""
    whole, parts = arange(16, 3), (8, 4, 4)
    world = World(4)

    def held(rank: int) -> dict[str, Any]:
        tp, gtp = divmod(rank, 2)
        rows = torch.cat([part.chunk(2)[tp] for part in whole.split(parts)])
        return {"qkv": rows.chunk(2)[gtp].clone()}

    def save(rank: int, *axes: str) -> PlacementSavePlanner:
        positions = dict(zip(("tp", "gtp"), divmod(rank, 2), strict=True))
        mesh = MeshCoordinate(axes, (2, 2), tuple(positions[axis] for axis in axes))
        by = CheckpointPlacement(mesh, {"tp": FusedShard(0, parts), "gtp": Shard(0)})
        return PlacementSavePlanner(PlacementRules({"qkv": by}))

    with refused() as refusal:
        world.save(tmp_path, held, lambda rank: save(rank, "gtp", "tp"))
    refusal.says("add up to 16, but 8 rows", "order:       'gtp' before 'tp' on dim 0")
    world.save(tmp_path, held, lambda rank: save(rank, "tp", "gtp"))
    assert_holds(tmp_path, {"qkv": whole})
