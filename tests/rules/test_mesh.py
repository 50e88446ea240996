"""Meshes seen from one rank: coordinates, and when two axes are one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dcp_placements import MeshCoordinate, PlacementError
from dcp_placements.rules.mesh_axes import format_mesh
from dcp_placements.testing import FakeMesh


def test_mesh_coordinate_answers_as_a_mesh_does() -> None:
    mesh = MeshCoordinate(["ep", "edp"], [4, 2], [3, 0])
    assert mesh.shape == (4, 2)
    assert mesh.ndim == 2
    assert mesh.mesh_dim_names == ("ep", "edp")
    assert mesh.get_coordinate() == (3, 0)
    assert format_mesh(mesh) == "(ep=4, edp=2)"


@pytest.mark.parametrize(
    "mesh",
    [
        MeshCoordinate(("ep", "edp"), (4, 2), (3, 0)),
        FakeMesh((4, 2), ("ep", "edp"), rank=6),
    ],
    ids=["MeshCoordinate", "FakeMesh"],
)
def test_it_has_the_methods_of_a_device_mesh_that_declarations_call(mesh: Any) -> None:
    assert mesh["ep"].get_local_rank() == mesh.get_local_rank("ep") == mesh.get_local_rank(0) == 3
    assert (mesh["edp"].get_coordinate()[0], mesh.get_local_rank(-1)) == (0, 0)
    assert (mesh.size(), mesh.size(1), mesh["ep"].size()) == (8, 2, 4)
    assert mesh["ep", "edp"].shape == (4, 2)
    for mesh_dim in (None, "tp", 2):
        with pytest.raises(PlacementError, match=f"no local rank along {mesh_dim!r}"):
            mesh.get_local_rank(mesh_dim)
    with pytest.raises((PlacementError, KeyError), match="no axis 'tp'"):
        mesh["tp"]


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
