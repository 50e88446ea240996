"""Layouts as a table: numbers that do not divide, nothing to hold, parts, and listed rows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dcp_placements.errors import CannotPlace
from dcp_placements.layout.sharding import (
    Chunk,
    Cut,
    Intervals,
    Kind,
    Sharding,
    cut_intervals,
)

LISTED = Cut(0, "ep", 2, Kind.LISTED)


def rows(intervals: Intervals) -> list[int]:
    return [row for start, stop in intervals for row in range(start, stop)]


def test_adjacent_intervals_merge_into_one_chunk() -> None:
    fused = Cut(0, "tp", 1, Kind.FUSED, 3)
    assert Sharding((6,), (fused,)).shard((0,))[1] == (Chunk((0,), (0,), (6,)),)
    # What a list of rows has left apart stays apart.
    assert cut_intervals(((0, 2), (2, 4)), Cut(0, "tp", 1, Kind.FUSED, 2), 0) == ((0, 2), (2, 4))


def test_listed_rows_keep_their_order_and_stay_apart() -> None:
    """A row is one chunk wherever it is held, whatever lies beside it on that rank."""
    sharding = Sharding((6, 2), (LISTED,))
    assert sharding.shard([(4, 1, 2)])[1] == (
        Chunk((0, 0), (4, 0), (1, 2)),
        Chunk((1, 0), (1, 0), (1, 2)),
        Chunk((2, 0), (2, 0), (1, 2)),
    )


def test_listed_rows_stay_apart_where_parts_of_them_are_cut() -> None:
    sharding = Sharding((6,), (LISTED, Cut(0, "tp", 1, Kind.FUSED, 2)))
    assert sharding.dim_at(0, [(1, 2, 3, 4), 0]) == ((1, 2), (2, 3), (3, 4), (4, 5))


@pytest.mark.parametrize("index", [-1, 6, 100])
def test_index_beyond_the_dim_is_refused_with_the_numbers(index: int) -> None:
    with pytest.raises(CannotPlace, match=rf"index {index} .*6 rows"):
        Sharding((6,), (LISTED,)).shard([(0, index)])[1]


def test_sixteen_thousand_coordinates_are_laid_out() -> None:
    """No group, no tensors: any rank of any world can be worked out anywhere."""
    cuts = Cut(0, "ep", 16), Cut(1, "tp", 16), Cut(1, "fsdp", 64)
    sharding = Sharding((256, 2048, 7168), cuts)
    chunks = {
        chunk.offsets: chunk.sizes
        for positions in sharding.positions()
        for chunk in sharding.shard(positions)[1]
    }
    assert len(chunks) == 16 * 64 * 16
    assert set(chunks.values()) == {(16, 2, 7168)}


PURE = ("layout.sharding", "layout.boxes", "rules.placement", "rules.patterns", "errors")
NEEDS_NO_TORCH = {
    "the pure layers": "".join(f"import dcp_placements.{name}\n" for name in PURE),
    "a declaration from the front door": """
from dcp_placements import CheckpointPlacement, FusedShard, MeshCoordinate, PlacementRules
mesh = MeshCoordinate(("ep",), (2,), (1,))
PlacementRules({"experts": CheckpointPlacement(mesh, {"ep": FusedShard(0, 2)})})
""",
}


@pytest.mark.parametrize("script", NEEDS_NO_TORCH.values(), ids=NEEDS_NO_TORCH)
def test_layouts_and_declarations_need_no_torch(script: str) -> None:
    """Their names can be had where torch.distributed, or torch, cannot be."""
    script += "import sys; print([n for n in sys.modules if n.split('.')[0] == 'torch'])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
