"""Rows that ranks list themselves, by ``Stack`` or ``IndexShard``: a load by those of another rank
is refused; all that together covers the whole is quiet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    blank,
    edit_metadata,
    refused,
    same_bits,
    warned,
    without_warning,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
    Unstack,
)
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.testing import World

ONE, TWO, FOUR = World(1), World(2), World(4)
WHOLE = {f"layers.{layer}.experts.w": arange(4, 2, 3, start=100 * layer) for layer in range(2)}
W0, W1 = WHOLE
HALVES = ([0, 1], [2, 3])

RowsOf = Callable[[int], Sequence[int]]


def halves(rank: int) -> Sequence[int]:
    return HALVES[rank]


def first_half(rank: int) -> Sequence[int]:
    """The rows of rank 0, on every rank."""
    return HALVES[0]


# One tensor per expert, stacked.


def experts(mine: Sequence[int]) -> dict[str, Any]:
    """Return the state dict of a rank that numbers its experts from 0."""
    return {
        fqn.replace(".w", f".{i}.w"): whole[e].clone()
        for fqn, whole in WHOLE.items()
        for i, e in enumerate(mine)
    }


def stacked(mine: Sequence[int]) -> Renames:
    return Renames(Renumber("experts.{}", mine, total=4), Stack("experts.{}.w", 4))


def local_stack(mine: Sequence[int]) -> Stack:
    """The rename of a rank that forgot that it has other experts than rank 0."""
    return Stack("experts.{}.w", 4)


def save_stacked(path: Path) -> None:
    TWO.save(
        path,
        lambda rank: experts(halves(rank)),
        lambda rank: PlacementSavePlanner(rename=stacked(halves(rank))),
    )


def load_stacked(
    path: Path,
    world: World,
    rows: RowsOf,
    rename: Callable[[Sequence[int]], Any] = stacked,
    **options: Any,
) -> None:
    """Load by ``rows``, which make the rename, and compare with what they are in the whole."""
    found = world.load(
        path,
        lambda rank: blank(experts(rows(rank))),
        lambda rank: PlacementLoadPlanner(rename=rename(rows(rank)), **options),
    )
    for rank in range(world.size):
        wanted = experts(rows(rank))
        assert found[rank].keys() == wanted.keys()
        assert all(same_bits(found[rank][key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        (stacked, "rename=Renumber('experts.{}', total=4), Stack('experts.{}.w', total=4)"),
        (local_stack, "rename=Stack('experts.{}.w', total=4)"),
    ],
)
def test_m49_a_stack_with_the_numbers_of_another_rank_is_refused(
    tmp_path: Path, rename: Callable[[Sequence[int]], Any], text: str
) -> None:
    save_stacked(tmp_path)
    with refused() as refusal:
        load_stacked(tmp_path, TWO, first_half, rename)
    assert list(refusal.by_rank) == [0]
    refusal.says(
        "layers.0-1.experts.w: several ranks ask for [0:2, :, :] of (4, 2, 3)",
        "and none for [2:4, :, :]",
        "saved:       rows of dim 0, each rank its own",
        f"this load:   rows of dim 0, each rank its own; {text}",
        "asked for:   [0:2, :, :] by ranks 0-1",
        "optional=[pattern] or waive={pattern: reason}",
    )


def test_m49_rows_of_a_checkpoint_without_a_record_are_compared_too(tmp_path: Path) -> None:
    dcp.save(dict(WHOLE), checkpoint_id=tmp_path / "stock", no_dist=True)
    save_stacked(tmp_path / "old")

    def drop(metadata: Metadata) -> None:
        del metadata.planner_data[RESERVED_KEY]

    edit_metadata(tmp_path / "old", drop)
    for name in ("stock", "old"):
        with refused() as refusal:
            load_stacked(tmp_path / name, TWO, first_half)
        refusal.says("layers.0-1.experts.w: several ranks ask for [0:2, :, :]")
        assert not re.search("saved(:| with)", refusal.text)


def test_m49_experts_of_layers_in_one_tensor_are_told_by_both_numbers(tmp_path: Path) -> None:
    whole = arange(2, 4, 3)
    dcp.save({"layers.experts.w": whole}, checkpoint_id=tmp_path, no_dist=True)

    def load(rows: RowsOf) -> list[dict[str, Any]]:
        def state(rank: int) -> dict[str, Any]:
            return {f"layers.{n}.experts.{i}.w": torch.zeros(3) for n in range(2) for i in range(2)}

        def planner(rank: int) -> PlacementLoadPlanner:
            steps = (
                Renumber("experts.{}", rows(rank), total=4),
                Stack("experts.{}.w", 4),
                Stack("layers.{}.experts.w", 2),
            )
            return PlacementLoadPlanner(rename=Renames(*steps))

        return TWO.load(tmp_path, state, planner)

    with without_warning():
        found = load(halves)
    for rank, mine in enumerate(HALVES):
        for layer in range(2):
            for i, e in enumerate(mine):
                assert same_bits(found[rank][f"layers.{layer}.experts.{i}.w"], whole[layer, e])
    with refused() as refusal:
        load(first_half)
    refusal.says("several ranks ask for [:, 0:2, :] of (2, 4, 3), and none for [:, 2:4, :]")


# Rows of one tensor, by rule.


def by_index(world: World, rows: RowsOf) -> Callable[[int], PlacementRules]:
    def rules(rank: int) -> PlacementRules:
        entry = {"ep": IndexShard(0, list(rows(rank)))}
        mesh = world.mesh(rank, ep=world.size)
        return PlacementRules({"experts": CheckpointPlacement(mesh, entry, global_shape=(4, 2, 3))})

    return rules


def load_by_index(
    path: Path,
    world: World,
    rows: RowsOf,
    rules: Callable[[int], PlacementRules] | None = None,
    **options: Any,
) -> None:
    """Load by ``rows``, and compare with what they are in the whole."""
    rules = rules or by_index(world, rows)
    found = world.load(
        path,
        lambda rank: {fqn: torch.zeros(len(rows(rank)), 2, 3) for fqn in WHOLE},
        lambda rank: PlacementLoadPlanner(rules(rank), **options),
    )
    for rank in range(world.size):
        for fqn, whole in WHOLE.items():
            assert same_bits(found[rank][fqn], whole[list(rows(rank))])


def save_by_index(path: Path) -> None:
    rules = by_index(TWO, halves)
    TWO.save(
        path,
        lambda rank: {fqn: whole[list(halves(rank))].clone() for fqn, whole in WHOLE.items()},
        lambda rank: PlacementSavePlanner(rules(rank)),
    )


def test_m49_an_index_shard_of_rank_0_on_every_rank_is_refused(tmp_path: Path) -> None:
    save_by_index(tmp_path)
    with refused() as refusal:
        load_by_index(tmp_path, TWO, first_half)
    assert list(refusal.by_rank) == [0]
    refusal.says(
        "layers.0-1.experts.w: several ranks ask for [0:2, :, :] of (4, 2, 3)",
        "and none for [2:4, :, :]",
        "saved:       rows of dim 0, each rank its own",
        "this load:   rows of dim 0, each rank its own",
        "asked for:   [0:2, :, :] by ranks 0-1",
        "optional=[pattern] or waive={pattern: reason}",
    )


# What is quiet.

COVERING: dict[str, tuple[World, RowsOf]] = {
    "each its own": (TWO, halves),
    "twice as many ranks": (FOUR, lambda rank: [3 - rank]),
    "replicas": (FOUR, lambda rank: HALVES[rank % 2]),
    "copies of some": (TWO, lambda rank: [[0, 1, 2], [1, 2, 3]][rank]),
    "copies of all of a rank's": (TWO, lambda rank: [[0, 1, 2, 3], [1, 2]][rank]),
    "all on every rank": (TWO, lambda rank: [0, 1, 2, 3]),
    "copies that leave out others": (TWO, lambda rank: [[0, 1], [1, 2]][rank]),
    "others on each, some on none": (TWO, lambda rank: [rank]),
    "one process": (ONE, lambda rank: [2]),
}


@pytest.mark.parametrize("name", COVERING)
def test_rows_that_are_right_together_are_quiet(tmp_path: Path, name: str) -> None:
    world, rows = COVERING[name]
    save_stacked(tmp_path / "stacked")
    save_by_index(tmp_path / "index")
    with without_warning():
        load_stacked(tmp_path / "stacked", world, rows)
        load_by_index(tmp_path / "index", world, rows)
        load_by_index(tmp_path / "stacked", world, rows)


@pytest.mark.parametrize(
    "options", [{"optional": ["experts"]}, {"waive": {"experts": "a smaller model"}}]
)
def test_rows_left_out_on_purpose_are_quiet_when_optional_or_a_waiver_names_the_key(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    save_stacked(tmp_path)
    with without_warning():
        load_stacked(tmp_path, TWO, first_half, **options)
        load_by_index(tmp_path, TWO, first_half, **options)
    with refused():
        load_stacked(tmp_path, TWO, first_half, waive={W0: "a smaller layer"})


def by_ep_and_tp(rows: RowsOf) -> Callable[[int], PlacementRules]:
    """Return rules of ranks that list rows over ``ep``, and have half of each over ``tp``."""

    def rules(rank: int) -> PlacementRules:
        entries = {"ep": IndexShard(0, list(rows(rank // 2))), "tp": Shard(1)}
        placement = CheckpointPlacement(
            FOUR.mesh(rank, ep=2, tp=2), entries, global_shape=(4, 2, 3)
        )
        return PlacementRules({"experts": placement})

    return rules


def test_parts_of_the_same_rows_are_not_asked_for_twice(tmp_path: Path) -> None:
    save_by_index(tmp_path)

    def load(rows: RowsOf) -> None:
        found = FOUR.load(
            tmp_path,
            lambda rank: {fqn: torch.zeros(len(rows(rank // 2)), 1, 3) for fqn in WHOLE},
            lambda rank: PlacementLoadPlanner(by_ep_and_tp(rows)(rank)),
        )
        for rank in range(4):
            for fqn, whole in WHOLE.items():
                wanted = whole[list(rows(rank // 2)), rank % 2 : rank % 2 + 1]
                assert same_bits(found[rank][fqn], wanted)

    with without_warning():
        load(halves)
        load(lambda rank: [rank])  # a part of the experts, each once
    with refused() as refusal:
        load(first_half)
    refusal.says("several ranks ask for [0:2, 0:1, :]", "[0:2, 1:2, :] by ranks 1, 3")


# A model of fewer experts, in one tensor, than the checkpoint has by name.


def by_name(path: Path, form: str) -> torch.Tensor:
    """Save 8 experts of two layers as one tensor each; return those of layer 0, stacked."""
    wholes = {f"layers.{layer}.experts.w": arange(8, 2, 3, start=100 * layer) for layer in (0, 1)}
    state: dict[str, Any] = dict(wholes)
    rename: Any = Unstack("experts.{}")
    if form != "Unstack":
        rename = Renumber("experts.{}", range(8), total=8) if form == "Renumber" else None
        state = {
            fqn.replace(".w", f".{i}.w"): whole[i].clone()
            for fqn, whole in wholes.items()
            for i in range(8)
        }
    dcp.save(state, checkpoint_id=path, planner=PlacementSavePlanner(rename=rename), no_dist=True)
    return wholes["layers.0.experts.w"]


def unstacked(path: Path, count: int, **options: Any) -> dict[str, Any]:
    """Load into a model that has so many experts in one tensor."""
    state = {f"layers.{layer}.experts.w": torch.zeros(count, 2, 3) for layer in (0, 1)}
    planner = PlacementLoadPlanner(rename=Unstack("experts.{}"), **options)
    dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
    return state


@pytest.mark.parametrize("form", ["Renumber", "Unstack", "no rename"])
def test_m73_a_stack_of_fewer_experts_than_were_saved_is_refused(tmp_path: Path, form: str) -> None:
    whole = by_name(tmp_path, form)
    with refused() as refusal:
        unstacked(tmp_path, 6)
    refusal.says(
        "layers.0-1.experts.{}: this load asks for 0-5 of it, and not for 6-7",
        "a stacked tensor of 6 rows",
        "optional=[pattern] or waive={pattern: reason}",
    )
    with without_warning():
        assert torch.equal(unstacked(tmp_path, 8)["layers.0.experts.w"], whole)


@pytest.mark.parametrize("options", [{"optional": ["experts"]}, {"waive": {"experts": "pruned"}}])
def test_m73_a_stack_of_fewer_experts_loads_where_that_is_declared(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = by_name(tmp_path, "Unstack")
    with without_warning():
        found = unstacked(tmp_path, 6, **options)
    assert torch.equal(found["layers.0.experts.w"], whole[:6])


def test_m73_rows_over_ranks_are_counted_together(tmp_path: Path) -> None:
    whole = by_name(tmp_path, "Renumber")

    def planner(rank: int) -> PlacementLoadPlanner:
        placement = CheckpointPlacement(TWO.mesh(rank, ep=2), {"ep": Shard(0)})
        return PlacementLoadPlanner(
            PlacementRules({"experts": placement}), rename=Unstack("experts.{}")
        )

    def load(count: int) -> list[dict[str, Any]]:
        return TWO.load(
            tmp_path, lambda rank: {"layers.0.experts.w": torch.zeros(count, 2, 3)}, planner
        )

    with refused() as refusal:
        load(3)
    refusal.says("layers.0.experts.{}: this load asks for 0-5 of it, and not for 6-7")
    with warned() as texts:
        loaded = load(4)
    assert ["no rank asks for: layers.1.experts.0-7.w" in text for text in texts] == [True]
    for rank in range(2):
        assert torch.equal(loaded[rank]["layers.0.experts.w"], whole.chunk(2)[rank])
