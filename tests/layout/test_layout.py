"""Layouts as a table: numbers that do not divide, nothing to hold, parts, and listed rows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dcp_placements.layout.sharding import (
    Chunk,
    Cut,
    Intervals,
    Kind,
    LayoutError,
    Pick,
    Sharding,
    pick_intervals,
    shard_intervals,
)


def rows(intervals: Intervals) -> list[int]:
    return [row for start, stop in intervals for row in range(start, stop)]


def rows_at(sharding: Sharding, coordinate: tuple[int, ...]) -> list[int]:
    return rows(sharding.at(coordinate).intervals[0])


def test_two_axes_on_one_dim_cut_one_after_the_other() -> None:
    sharding = Sharding((5, 3), (2, 2), (Cut(0, 0), Cut(0, 1)))
    table = {each: rows_at(sharding, each) for each in sharding.coordinates()}
    assert table == {(0, 0): [0, 1], (0, 1): [2], (1, 0): [3], (1, 1): [4]}


def test_cuts_apply_in_their_order_whatever_their_axes() -> None:
    """FSDP on axis 0 cuts what tp on axis 1 has left."""
    sharding = Sharding((8,), (2, 2), (Cut(0, 1), Cut(0, 0)))
    table = {each: rows_at(sharding, each) for each in sharding.coordinates()}
    assert table == {(0, 0): [0, 1], (0, 1): [4, 5], (1, 0): [2, 3], (1, 1): [6, 7]}


def test_parts_of_a_part_are_chunked_from_what_is_left() -> None:
    """_StridedShard with split factor 2 inside the second half of an uneven cut."""
    sharding = Sharding((7,), (2, 2), (Cut(0, 0), Cut(0, 1, Kind.FUSED, 2)))
    table = {each: rows_at(sharding, each) for each in sharding.coordinates()}
    assert table == {(0, 0): [0, 2], (0, 1): [1, 3], (1, 0): [4, 6], (1, 1): [5]}


def test_adjacent_intervals_merge_into_one_chunk() -> None:
    whole = Sharding((6,), (1,), (Cut(0, 0, Kind.FUSED, 3),)).at((0,))
    assert whole.intervals == (((0, 6),),)
    assert whole.chunks() == (Chunk((0,), (0,), (6,)),)
    # What a pick has left apart stays apart.
    assert shard_intervals(((0, 2), (2, 4)), 1, 0, 2) == ((0, 2), (2, 4))


def test_last_rank_of_uneven_shard_is_empty() -> None:
    layout = Sharding((5, 3), (4,), (Cut(0, 0),)).at((3,))
    assert layout.local_shape == (0, 3)
    assert layout.chunks() == ()


def test_listed_rows_keep_their_order_and_stay_apart() -> None:
    """A row is one chunk wherever it is held, whatever lies beside it on that rank."""
    sharding = Sharding((6, 2), (2,), (Pick(0, (4, 1, 2)),))
    layout = sharding.at((0,))
    assert layout.intervals == (((4, 5), (1, 2), (2, 3)), ((0, 2),))
    assert layout.chunks() == (
        Chunk((0, 0), (4, 0), (1, 2)),
        Chunk((1, 0), (1, 0), (1, 2)),
        Chunk((2, 0), (2, 0), (1, 2)),
    )
    assert not sharding.is_uniform
    assert Sharding((6,), (2,), (Cut(0, 0),)).is_uniform


def test_listed_rows_stay_apart_where_parts_of_them_are_cut() -> None:
    sharding = Sharding((6,), (1,), (Pick(0, (1, 2, 3, 4)), Cut(0, 0, Kind.FUSED, 2)))
    assert sharding.at((0,)).intervals == (((1, 2), (2, 3), (3, 4), (4, 5)),)


def test_padding_in_the_middle_of_a_local_tensor_is_left_out() -> None:
    """Parts of a padded tensor: local rows 2 and 3 are rows 6 and 7, beyond the real ones."""
    layout = Sharding((6,), (2,), (Cut(0, 0, Kind.FUSED, 2),), padded_shape=(8,)).at((1,))
    assert layout.local_shape == (4,)
    assert layout.chunks() == (Chunk((0,), (2,), (2,)),)


def test_padding_before_real_rows_moves_them_on_in_the_local_tensor() -> None:
    layout = Sharding((5,), (2,), (Pick(0, (6, 1, 7, 4)),), padded_shape=(8,)).at((0,))
    assert layout.local_shape == (4,)
    assert layout.chunks() == (Chunk((1,), (1,), (1,)), Chunk((3,), (4,), (1,)))


@pytest.mark.parametrize("index", [-1, 6, 100])
def test_index_beyond_the_dim_is_refused_with_the_numbers(index: int) -> None:
    with pytest.raises(LayoutError, match=rf"index {index} .*6 rows"):
        pick_intervals(((0, 6),), (0, index))


def test_sixteen_thousand_coordinates_are_laid_out() -> None:
    """No group, no tensors: any rank of any world can be worked out anywhere."""
    sharding = Sharding((256, 2048, 7168), (16, 64, 16), (Cut(0, 0), Cut(1, 2), Cut(1, 1)))
    chunks = {
        chunk.offsets: chunk.sizes
        for coordinate in sharding.coordinates()
        for chunk in sharding.at(coordinate).chunks()
    }
    assert len(chunks) == 16 * 64 * 16
    assert set(chunks.values()) == {(16, 2, 7168)}


def test_the_pure_layers_need_no_torch() -> None:
    """Their names can be had where torch.distributed, or torch, cannot be."""
    names = ("layout.sharding", "layout.boxes", "rules.placement", "rules.patterns", "errors")
    modules = ", ".join(f"dcp_placements.{name}" for name in names)
    script = f"import sys, {modules}; print([n for n in sys.modules if n.split('.')[0] == 'torch'])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_declaring_from_the_front_door_needs_no_torch() -> None:
    script = (
        "import sys; from dcp_placements import CheckpointPlacement, FusedShard, MeshCoordinate, "
        "PlacementRules; "
        "mesh = MeshCoordinate(('ep',), (2,), (1,)); "
        "PlacementRules({'experts': CheckpointPlacement(mesh, {'ep': FusedShard(0, 2)})}); "
        "print('torch.distributed' in sys.modules, 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", "False"]
