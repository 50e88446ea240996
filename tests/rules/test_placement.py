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
    FlatShard,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    RaggedShard,
)
from dcp_placements.testing import FakeMesh

MESH = MeshCoordinate(("ep", "edp"), (4, 2), (3, 0))


def test_placements_of_other_classes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In some versions of torch a ``_StridedShard`` equals the ``Shard`` of its dim."""
    monkeypatch.setattr(
        _StridedShard, "__eq__", lambda self, other: self.dim == getattr(other, "dim", None)
    )
    strided = CheckpointPlacement(MESH, {"ep": _StridedShard(0, split_factor=2)})
    assert strided == CheckpointPlacement(MESH, {"ep": _StridedShard(0, split_factor=2)})
    assert strided != CheckpointPlacement(MESH, {"ep": Shard(0)})


def test_axes_that_a_mapping_leaves_out_are_replicated() -> None:
    placement = CheckpointPlacement(MESH, {"edp": Shard(1)})
    assert len(placement.placements) == 2
    assert placement.placements[0].is_replicate()
    assert placement.placements[1] == Shard(1)
    assert placement.format() == "[Replicate(), Shard(1)] on mesh (ep=4, edp=2)"


def test_a_mapping_may_name_the_axes_in_any_order() -> None:
    placement = CheckpointPlacement(MESH, {"edp": Shard(1), "ep": Shard(0)})
    assert placement.placements == (Shard(0), Shard(1))


def test_m84_an_axis_that_a_topology_lacks_may_be_absent() -> None:
    placements = {"ep": Shard(0), "edp": Shard(1)}
    one = MeshCoordinate(("edp",), (2,), (1,))
    assert CheckpointPlacement(one, placements, absent=("ep",)).placements == (Shard(1),)
    assert CheckpointPlacement(MESH, placements, absent=("ep",)) == (
        CheckpointPlacement(MESH, placements)
    )
    assert CheckpointPlacement(one, placements, absent="ep").placements == (Shard(1),)


def test_one_placement_per_axis_in_mesh_order() -> None:
    placement = CheckpointPlacement(MESH, [Shard(0), Replicate()])
    assert placement.placements == (Shard(0), Replicate())
    assert CheckpointPlacement(FakeMesh((4,), rank=1), [Shard(0)]).placements == (Shard(0),)


def on_mesh(placements: Any, **shapes: Any) -> Callable[[], Any]:
    return lambda: CheckpointPlacement(MESH, placements, **shapes)


BY_EP = {"ep": Shard(0)}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (on_mesh({"eq": Shard(0)}, absent=("ep",)), "absent=['ep'] names axes of placements="),
    (on_mesh([Shard(0), Shard(1)], absent=("ep",)), "absent=['ep'] names axes of placements="),
    (on_mesh({"eq": 0}, absent=("eq",)), "0 is no placement"),
    (on_mesh({"eq": Shard(0), "ep": 0}, absent=("eq",)), "0 is no placement"),
    (on_mesh({"eq": Shard(0), "etp": Shard(0)}), "no axis 'eq', 'etp' in mesh (ep=4, edp=2)"),
    (lambda: CheckpointPlacement(FakeMesh((2, 3), rank=0), BY_EP), "mesh_dim_names="),
    *(
        (
            on_mesh([Shard(0)] * n),
            f"(ep=4, edp=2) has 2 axes and needs as many placements, but got {n}",
        )
        for n in (0, 1, 3)
    ),
    *(
        (on_mesh({"ep": Shard(dim)}, global_shape=(4, 3)), f"Shard({dim}) names dim {dim}")
        for dim in (2, -3)
    ),
    *((on_mesh({"ep": what}), f"{what!r} is no placement") for what in ("Shard(0)", 0, None)),
    *(
        (on_mesh({"ep": kind}), f"{kind!r} is no placement")
        for kind in (Shard, Replicate, FlatShard, FusedShard, IndexShard, RaggedShard)
    ),
    (on_mesh({"ep": Partial()}), "redistribute"),
    (on_mesh(BY_EP, padded_shape=(8, 3)), "padded_shape=(8, 3) needs global_shape"),
    *(
        (on_mesh(BY_EP, global_shape=(5, 3), padded_shape=padded), f"padded_shape={padded}")
        for padded in ((4, 3), (8, 2), (8,), (8, 3, 1))
    ),
    (on_mesh(BY_EP, global_shape=(-1, 3)), "global_shape=(-1, 3) must be a shape"),
    *(
        (on_mesh(BY_EP, **{"global_shape": (50, 3), name: 50}), f"{name}=50 must be a shape")
        for name in ("global_shape", "padded_shape")
    ),
    (on_mesh({"ep": IndexShard(0, (1, 2))}), "needs global_shape="),
    *((lambda n=n: FusedShard(0, n), f"not {n}") for n in (0, -1, (), (3, 0), (4, -1))),
    (lambda: IndexShard(0, (3, -2)), "not -2"),
    *((lambda n=n: RaggedShard(0, n), f"not {n}") for n in ((), (3, -2), (-1,))),
    *(
        (on_mesh({"ep": RaggedShard(0, n)}), f"{len(n)} sizes, {n}, but axis 'ep' has 4 ranks")
        for n in ((3,), (3, 0, 1), (1, 2, 3, 4, 5))
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlacementError) as refused:
        make()
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "placement",
    [
        FusedShard(0, 2),
        FusedShard(-1, (4, 1, 1)),
        IndexShard(0, (3, 1)),
        RaggedShard(-1, (3, 0, 1)),
        FlatShard((3, 0, 1 << 40)),
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
