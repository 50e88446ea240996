"""What a load says about sizes, about the record of the save, and about names and patterns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, edit_metadata, load, same_bits, warned, without_warning
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, FusedShard, PlacementLoadPlanner, PlacementRules
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
    assert "declared as saved: 0 keys; 1 differ, waived" in str(report)
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
    compared = "declared as saved: 1 key" if edit is alternating else "no record"
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
