"""``FusedShard(copies=)``: Q|K|V with fewer KV heads than tensor-parallel ranks.

Each rank has its own rows of Q, and those of K and of V that its neighbours have, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds, refused
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, FusedShard, PlacementError
from dcp_placements.testing import FakeDTensor, FakeMesh, cut
from tests.load.sides import Held, Side, at

PARTS = (16, 4, 4)
WHOLE = arange(24, 3)
Q, K, V = WHOLE.split(PARTS)


def heads(tp: int, copies: int) -> Held:
    """Return what a rank has of Q, and of K and V with as many copies."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        position = at(mesh, "tp")
        pieces = [kv.chunk(tp // copies)[position // copies] for kv in (K, V)]
        return {"w": torch.cat([Q.chunk(tp)[position], *pieces])}

    return held


def fused(copies: int) -> dict[str, Any]:
    return {"tp": FusedShard(0, PARTS, copies=(1, copies, copies))}


def inside_fsdp(mesh: FakeMesh) -> dict[str, Any]:
    part = heads(4, 2)(mesh)["w"]
    return {"w": FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])}


SHAPE = {"global_shape": (24, 3)}
ANY = {
    "two on each": Side({"tp": 8}, heads(8, 2), fused(2)),
    "four on each": Side({"tp": 8}, heads(8, 4), fused(4)),
    "all on each": Side({"tp": 4}, heads(4, 4), fused(4)),
    "none": Side({"tp": 2}, heads(2, 1), fused(1)),
    "alone": Side({"tp": 1}, heads(1, 1), {"tp": FusedShard(0, PARTS)}),
    "inside fsdp": Side({"fsdp": 2, "tp": 4}, inside_fsdp, fused(2)),
    "shape given": Side({"tp": 4}, heads(4, 2), fused(2), shapes=SHAPE),
    "plain": Side({"dp": 3}, lambda mesh: {"w": WHOLE.chunk(3)[at(mesh, "dp")]}, {"dp": Shard(0)}),
}


@pytest.mark.parametrize("name", ANY)
def test_m144_copied_heads_are_saved_once_and_loaded_by_any_other_cut(
    tmp_path: Path, name: str
) -> None:
    ANY[name].saves(tmp_path)
    assert_holds(tmp_path, {"w": WHOLE})
    for other in ANY.values():
        other.loads_right(tmp_path)


@pytest.mark.parametrize("position", range(8))
def test_m144_a_rank_has_its_rows_of_each_part(position: int) -> None:
    placement = FusedShard(0, PARTS, copies=(1, 2, 4))
    expected = torch.cat(
        [Q.chunk(8)[position], K.chunk(4)[position // 2], V.chunk(2)[position // 4]]
    )
    assert torch.equal(cut(WHOLE, [placement], [8], [position]), expected)


UNSAVED = {
    "copies that differ": (
        Side({"tp": 8}, lambda mesh: {"w": heads(8, 2)(mesh)["w"] + at(mesh, "tp")}, fused(2)),
        ("w", "along 'tp'"),
    ),
    "another number of copies": (
        Side({"tp": 8}, heads(8, 2), fused(4)),
        ("holds a (4, 3) tensor where (6, 3) was declared", "copies=(1, 4, 4)"),
    ),
    "copies that do not divide the ranks": (
        Side({"tp": 8}, heads(8, 2), fused(3)),
        ("3 copies of part 1 of FusedShard(0, (16, 4, 4), copies=(1, 3, 3)) over 'tp' of size 8",),
    ),
    "another order of the axes": (
        Side(
            {"ep": 2, "tp": 2},
            lambda mesh: {
                "w": torch.cat([p.chunk(2)[at(mesh, "tp")] for p in WHOLE.split(PARTS)]).chunk(2)[
                    at(mesh, "ep")
                ]
            },
            {"ep": Shard(0), "tp": FusedShard(0, PARTS)},
            shapes=SHAPE,
        ),
        ("parts (16, 4, 4) add up to 24, but 12 rows", "order:       'ep' before 'tp' on dim 0"),
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_m144_other_parts_are_refused_with_the_numbers(tmp_path: Path, name: str) -> None:
    side, facts = UNSAVED[name]
    with refused() as refusal:
        side.saves(tmp_path)
    refusal.says(*facts)


@pytest.mark.parametrize("copies", [(), (1, 2), (1, 0, 2), (1, 2, 2, 2)])
def test_copies_are_a_count_per_part(copies: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError, match="must be a count of ranks from 1 up"):
        FusedShard(0, PARTS, copies=copies)


def test_copies_are_part_of_the_text_of_a_rule() -> None:
    mesh = Side({"tp": 8}, heads(8, 2)).world.mesh(0, tp=8)
    text = CheckpointPlacement(mesh, fused(2), global_shape=(24, 3)).format()
    assert "FusedShard(0, (16, 4, 4), copies=(1, 2, 2))" in text
