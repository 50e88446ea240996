"""Meshes seen from one rank: coordinates, and when two axes are one."""

from __future__ import annotations

import pickle

import pytest
import torch

from dcp_placements import MeshCoordinate, PlacementError
from dcp_placements.rules.mesh import Axis, format_mesh, mesh_axes
from dcp_placements.testing import FakeMesh


def test_mesh_coordinate_answers_as_a_mesh_does() -> None:
    mesh = MeshCoordinate(["ep", "edp"], [4, 2], [3, 0])
    assert mesh.shape == (4, 2)
    assert mesh.ndim == 2
    assert mesh.mesh_dim_names == ("ep", "edp")
    assert mesh.get_coordinate() == (3, 0)
    assert format_mesh(mesh) == "(ep=4, edp=2)"


def test_mesh_coordinate_is_a_value_that_travels() -> None:
    mesh = MeshCoordinate(("ep", "edp"), (4, 2), (3, 0))
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy == mesh
    assert hash(copy) == hash(mesh)
    assert copy != MeshCoordinate(("ep", "edp"), (4, 2), (3, 1))
    assert eval(repr(mesh)) == mesh


@pytest.mark.parametrize(
    ("names", "sizes", "coordinate", "message"),
    [
        (("ep",), (4, 2), (0, 0), ["as many names", "('ep',)", "(4, 2)", "(0, 0)"]),
        (("ep", "edp"), (4, 2), (0,), ["as many names", "(0,)"]),
        (("ep", "ep"), (4, 2), (0, 0), ["must differ", "('ep', 'ep')"]),
        (("ep", "edp"), (4, 2), (4, 0), ["position 4", "axis ep", "size 4"]),
        (("ep", "edp"), (4, 2), (0, -1), ["position -1", "axis edp", "size 2"]),
        (("ep",), (0,), (0,), ["position 0", "axis ep", "size 0"]),
    ],
)
def test_what_is_no_coordinate_is_refused_with_the_numbers(
    names: tuple[str, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...], message: list[str]
) -> None:
    with pytest.raises(PlacementError) as refused:
        MeshCoordinate(names, sizes, coordinate)
    for words in message:
        assert words in str(refused.value)


def test_axes_of_a_named_mesh_are_known_by_name() -> None:
    axes = mesh_axes(FakeMesh((2, 3), ("ep", "edp"), rank=4))
    assert axes == (Axis("ep", 2, 1), Axis("edp", 3, 1))


def test_axes_of_a_mesh_without_names_are_known_by_their_ranks() -> None:
    axes = mesh_axes(FakeMesh((2, 3), rank=4))
    assert axes == (Axis(None, 2, 1, (1, 4)), Axis(None, 3, 1, (3, 4, 5)))


def test_a_rank_outside_has_no_axes() -> None:
    mesh = FakeMesh((2,), ("ep",), rank=0, ranks=torch.tensor([1, 2]))
    assert mesh_axes(mesh) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Axis("ep", 2, 0), Axis("ep", 2, 0), True),
        (Axis("ep", 2, 0), Axis("edp", 2, 0), False),
        (Axis(None, 2, 0, (0, 2)), Axis(None, 2, 0, (0, 2)), True),
        (Axis(None, 2, 0, (0, 2)), Axis(None, 2, 0, (0, 1)), False),
        (Axis(None, 2, 0), Axis(None, 2, 0), False),
        # Names differ although the ranks are the same: two axes, as a flattened mesh has them.
        (Axis("ep", 2, 0, (0, 1)), Axis("tp", 2, 0, (0, 1)), False),
    ],
)
def test_axes_are_one_by_name_and_without_names_by_ranks(
    one: Axis, other: Axis, same: bool
) -> None:
    assert one.is_same(other) is same
    assert other.is_same(one) is same


def test_a_mesh_without_names_is_told_by_axis_number() -> None:
    assert format_mesh(FakeMesh((2, 3), rank=0)) == "(axis0=2, axis1=3)"
