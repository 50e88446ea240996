"""What can be declared, and the words with which the rest is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
)
from dcp_placements.rules.placement import shard_dim
from dcp_placements.testing import FakeMesh

MESH = MeshCoordinate(("ep", "edp"), (4, 2), (3, 0))


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(PlacementError) as refused:
        make()
    return str(refused.value)


def test_axes_that_a_mapping_leaves_out_are_replicated() -> None:
    placement = CheckpointPlacement(MESH, {"edp": Shard(1)})
    assert len(placement.placements) == 2
    assert placement.placements[0].is_replicate()
    assert placement.placements[1] == Shard(1)
    assert placement.format() == "[Replicate(), Shard(1)] on mesh (ep=4, edp=2)"


def test_a_mapping_may_name_the_axes_in_any_order() -> None:
    placement = CheckpointPlacement(MESH, {"edp": Shard(1), "ep": Shard(0)})
    assert placement.placements == (Shard(0), Shard(1))


def test_one_placement_per_axis_in_mesh_order() -> None:
    placement = CheckpointPlacement(MESH, [Shard(0), Replicate()])
    assert placement.placements == (Shard(0), Replicate())
    assert CheckpointPlacement(FakeMesh((4,), rank=1), [Shard(0)]).placements == (Shard(0),)


def test_unknown_axis_is_refused_by_name() -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"eq": Shard(0), "etp": Shard(0)}))
    assert message == "no axis 'eq', 'etp' in mesh (ep=4, edp=2): its axes are 'ep', 'edp'"


def test_names_need_a_mesh_with_names() -> None:
    message = refusal(lambda: CheckpointPlacement(FakeMesh((2, 3), rank=0), {"ep": Shard(0)}))
    assert "(axis0=2, axis1=3)" in message
    assert "mesh_dim_names=" in message


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_placements_is_refused_with_both_numbers(count: int) -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, [Shard(0)] * count))
    assert "(ep=4, edp=2) has 2 axes" in message
    assert f"got {count}" in message


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_out_of_range_is_refused_with_the_number_of_dims(dim: int) -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": Shard(dim)}, global_shape=(4, 3)))
    assert f"Shard({dim}) names dim {dim}" in message
    assert "2 dims" in message
    message = refusal(lambda: shard_dim(FusedShard(1, 2), 1))
    assert message == "FusedShard(1, 2) names dim 1, but the tensor has 1 dim"


def test_strings_for_numbers_are_refused() -> None:
    for made in (lambda: FusedShard("0", 2), lambda: FusedShard(0, "2")):  # type: ignore[arg-type]
        assert "takes a dim and a number of parts" in refusal(made)
    assert "not dim '0'" in refusal(lambda: IndexShard("0", (1,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["Shard(0)", 0, None])
def test_what_is_no_placement_is_refused(what: Any) -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": what}))
    assert f"{what!r} is no placement" in message
    assert "Shard(dim)" in message


@pytest.mark.parametrize("kind", [Shard, Replicate, FusedShard, IndexShard])
def test_the_class_of_a_placement_is_refused_by_name(kind: Any) -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": kind}))
    assert f"{kind.__name__} is a class, not a placement" in message
    assert "way out:" in message


def test_partial_sums_are_refused_with_the_way_out() -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": Partial()}))
    assert "cannot be checkpointed" in message
    assert "redistribute" in message


def test_padded_shape_needs_the_shape_without_padding() -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": Shard(0)}, padded_shape=(8, 3)))
    assert "padded_shape=(8, 3) needs global_shape" in message


@pytest.mark.parametrize("padded", [(4, 3), (8, 2), (8,), (8, 3, 1)])
def test_padded_shape_must_hold_the_global_shape(padded: tuple[int, ...]) -> None:
    message = refusal(
        lambda: CheckpointPlacement(
            MESH, {"ep": Shard(0)}, global_shape=(5, 3), padded_shape=padded
        )
    )
    assert f"padded_shape={padded}" in message
    assert "global_shape=(5, 3)" in message


def test_negative_sizes_are_refused() -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": Shard(0)}, global_shape=(-1, 3)))
    assert message == "global_shape=(-1, 3) has a negative size"


def test_index_shard_needs_the_global_shape() -> None:
    message = refusal(lambda: CheckpointPlacement(MESH, {"ep": IndexShard(0, (1, 2))}))
    assert "needs global_shape=" in message
    assert "(1, 2)" in message


@pytest.mark.parametrize("parts", [0, -1, (), (3, 0), (4, -1)])
def test_fused_shard_needs_parts_with_rows(parts: Any) -> None:
    assert f"not {parts}" in refusal(lambda: FusedShard(0, parts))


def test_index_shard_refuses_negative_rows() -> None:
    assert "not -2" in refusal(lambda: IndexShard(0, (3, -2)))


@pytest.mark.parametrize(
    "placement",
    [
        FusedShard(0, 2),
        FusedShard(-1, (4, 1, 1)),
        IndexShard(0, (3, 1)),
        MESH,
        CheckpointPlacement(MESH, {"ep": FusedShard(0, 2)}),
        CheckpointPlacement(MESH, {"edp": Shard(1)}, global_shape=(5, 3), padded_shape=(8, 3)),
        CheckpointPlacement(MESH, [Shard(0), _StridedShard(0, split_factor=2)]),
    ],
)
def test_declarations_are_values_that_travel(placement: Any) -> None:
    """async_save in a process pickles the planner, and its rules with it."""
    copy = pickle.loads(pickle.dumps(placement))
    assert copy == placement
    assert hash(copy) == hash(placement)
