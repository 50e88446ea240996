"""A load that is declared otherwise than its checkpoint was saved is refused; what may differ is
quiet.

The ranks are simulated. The whole tensors are cut by plain slicing here, as a framework would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    edit_metadata,
    load,
    refused,
    same_bits,
    save,
    warned,
    without_warning,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
)
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.testing import FakeDTensor, World

ONE, WORLD, FOUR = World(1), World(2), World(4)
GATE_UP = "layers.0.mlp.gate_up_proj.weight"


def fused_part(whole: torch.Tensor, parts: int, ranks: int, rank: int) -> torch.Tensor:
    """Return what a rank holds of several tensors in one, each cut by rows."""
    return torch.cat([part.chunk(ranks)[rank] for part in whole.chunk(parts)])


def tp_rules(world: World, pattern: str, placement: Any) -> Callable[[int], PlacementRules]:
    def on(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, tp=world.size)
        return PlacementRules({pattern: CheckpointPlacement(mesh, {"tp": placement})})

    return on


def tp_dtensor(world: World, local: torch.Tensor, rank: int, rows: int) -> FakeDTensor:
    """Return a DTensor that says that ``tp`` cuts it plainly."""
    return FakeDTensor(local, world.mesh(rank, tp=world.size), [Shard(0)], (rows, *local.shape[1:]))


def save_fused(path: Path, whole: torch.Tensor, key: str = GATE_UP, **options: Any) -> None:
    """Save a fused gate|up from two ranks of ``tp``, with the rule that it needs."""

    def state(rank: int) -> dict[str, Any]:
        return {key: tp_dtensor(WORLD, fused_part(whole, 2, 2, rank), rank, len(whole))}

    save(WORLD, path, state, tp_rules(WORLD, key, FusedShard(0, 2)), **options)


def plain_template(rank: int) -> dict[str, Any]:
    return {GATE_UP: tp_dtensor(WORLD, torch.zeros(4, 3), rank, 8)}


def plain_w(rank: int) -> dict[str, Any]:
    """Return the template of a key whose name says nothing."""
    return {"w": plain_template(rank)[GATE_UP]}


# M46: the rule of a fused tensor forgotten, or another one.


def test_a_wrong_dim_at_the_save_is_named_by_the_load(tmp_path: Path) -> None:
    """Both shapes are possible, so that the save could not see it."""
    save(WORLD, tmp_path, lambda rank: {"w": torch.ones(4, 6)}, tp_rules(WORLD, "w", Shard(1)))
    with refused() as refusal:
        rules = tp_rules(WORLD, "w", Shard(0))
        load(WORLD, tmp_path, lambda rank: {"w": torch.zeros(4, 6)}, rules)
    refusal.says(
        "w: the checkpoint holds a (4, 12) tensor, but (8, 6) is needed",
        "saved:       Shard(1) over 'tp' of size 2",
        "this load:   Shard(0) over 'tp' of size 2",
    )


def test_padding_is_the_likely_cause_of_a_few_rows_more(tmp_path: Path) -> None:
    def rules(rank: int, **shapes: Any) -> PlacementRules:
        mesh = WORLD.mesh(rank, tp=2)
        return PlacementRules({"w": CheckpointPlacement(mesh, {"tp": Shard(0)}, **shapes)})

    shapes = {"global_shape": (50, 3), "padded_shape": (56, 3)}
    state = {"w": torch.ones(28, 3)}
    save(WORLD, tmp_path, lambda rank: state, lambda rank: rules(rank, **shapes))
    with refused() as refusal:
        load(WORLD, tmp_path, lambda rank: state, rules)
    refusal.says(
        "likely:      uneven parts, or padding: rows that are not stored",
        "way out:     global_shape=(50, 3) in the rule, and padded_shape=(56, 3) for padding",
    )
    assert "another size" not in refusal.text
    load(WORLD, tmp_path, lambda rank: state, lambda rank: rules(rank, **shapes))


def test_a_waiver_with_its_reason_lets_another_cut_pass(tmp_path: Path) -> None:
    whole = arange(8, 3)
    save_fused(tmp_path, whole)
    reason = "cut apart by hand afterwards"
    with without_warning():
        loaded, reports = load(WORLD, tmp_path, plain_template, waive={"gate_up_proj": reason})
    assert same_bits(loaded[1][GATE_UP].to_local(), whole[4:])
    assert reports[0].waived == {"gate_up_proj": reason}
    assert "declared as saved: 0 keys; 1 differ, waived" in str(reports[0])
    assert reason in str(reports[0])
    with pytest.raises(PlacementError, match="needs a reason"):
        PlacementLoadPlanner(waive={"w": ""})


def test_checkpoints_without_a_record_are_quiet(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "stock", no_dist=True)
    save_fused(tmp_path / "old", whole, "w")

    def drop(metadata: Metadata) -> None:
        del metadata.planner_data[RESERVED_KEY]

    edit_metadata(tmp_path / "old", drop)
    for name in ("stock", "old"):
        with without_warning():
            _, reports = load(WORLD, tmp_path / name, plain_w)
        assert reports[0].compared == "no record"


def test_a_record_of_other_keys_or_of_another_form_is_none(tmp_path: Path) -> None:
    save_fused(tmp_path, arange(8, 3), "w")

    def spoil(metadata: Metadata) -> None:
        metadata.planner_data[RESERVED_KEY]["cuts"]["keys"] = (1, 0)

    def garble(metadata: Metadata) -> None:
        metadata.planner_data[RESERVED_KEY]["cuts"] = {"groups": 5}

    for edit in (spoil, garble):
        edit_metadata(tmp_path, edit)
        with without_warning():
            _, reports = load(WORLD, tmp_path, plain_w)
        assert reports[0].compared == "no record"


def test_parts_that_alternate_row_by_row_in_an_older_record_are_a_plain_cut(tmp_path: Path) -> None:
    """Records of older saves have a sixth value in each cut: whether its parts alternate."""
    save_fused(tmp_path, arange(8, 3), "w")

    def alternate(metadata: Metadata) -> None:
        cuts = metadata.planner_data[RESERVED_KEY]["cuts"]
        cuts["groups"] = tuple(tuple((*cut[:5], True) for cut in each) for each in cuts["groups"])

    edit_metadata(tmp_path, alternate)
    with without_warning():
        _, reports = load(WORLD, tmp_path, plain_w)
    assert reports[0].compared == "declared as saved: 1 key"


# M47 and M48: the lint and the patterns that match nothing, at load as at save.


def test_m47_a_load_runs_the_lint_of_the_save_and_warns_once(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({GATE_UP: whole}, checkpoint_id=tmp_path, no_dist=True)
    with warned() as texts:
        _, reports = load(WORLD, tmp_path, plain_template)
    (text,) = texts
    assert "its name says several tensors in one, but 'tp' cuts it plainly" in text
    assert "FusedShard(0, 2)" in text
    assert "waive={pattern: reason}" in text
    assert [len(report.warnings) for report in reports] == [1, 1]
    with without_warning():
        load(WORLD, tmp_path, plain_template, waive={"gate_up_proj": "parts alternate by head"})


def test_m47_the_coordinator_tells_once_what_any_rank_found(tmp_path: Path) -> None:
    """Rank 0 holds none of these keys, ranks 1 and 2 the same one."""
    keys = [f"layers.{i}.mlp.gate_up_proj.weight" for i in range(2)]
    dcp.save({key: arange(8, 3) for key in (*keys, "w")}, checkpoint_id=tmp_path, no_dist=True)

    def state(rank: int) -> dict[str, Any]:
        if rank == 0:
            return {"w": torch.zeros(8, 3)}
        mesh = FOUR.mesh(rank, dp=2, tp=2)["tp"]
        return {keys[rank // 3]: FakeDTensor(torch.zeros(4, 3), mesh, [Shard(0)], (8, 3))}

    with warned() as texts:
        _, reports = load(FOUR, tmp_path, state)
    (text,) = texts
    assert text.startswith(
        "look at this load (1 note of 2 keys)\nlayers.0-1.mlp.gate_up_proj.weight: "
    )
    assert [len(report.warnings) for report in reports] == [0, 1, 1, 1]


def test_m48_a_pattern_that_matches_nothing_on_any_rank_is_warned_of_once(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({"a": whole, "b": whole}, checkpoint_id=tmp_path, no_dist=True)

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(WORLD.mesh(rank, tp=2), {"tp": Shard(0)})
        return PlacementRules({"a": placement, "b": placement, "expert.w": placement})

    def state(rank: int) -> dict[str, Any]:
        return {"ab"[rank]: torch.zeros(4, 3)}

    with warned() as texts:
        _, reports = load(WORLD, tmp_path, state, rules)
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
    with without_warning(), FOUR._as(2):
        planner.set_up_planner({"a": torch.zeros(8, 3)}, metadata, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    assert planner.report.unmatched == ()
