"""A mesh seen from one rank: axis names, sizes, and where this rank stands."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from dcp_placements.errors import PlacementError

MeshAxes = dict[str, int]
"""Sizes by axis name, the outermost first: a mesh without a rank's coordinate."""


class Mesh(Protocol):
    """The attributes that a mesh needs; ``torch.distributed.DeviceMesh`` has them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


_MAX_TABLE = 32
"""The largest number of ranks of a mesh that a message lists."""


@dataclass(frozen=True, slots=True)
class MeshCoordinate:
    """A mesh seen from one coordinate, without a process group.

    It replaces a rank's ``DeviceMesh`` in rehearsals, conversions and tests, in any process, and
    has the methods of it that declarations call.

    >>> mesh = MeshCoordinate(("ep", "edp"), (4, 2), (3, 0))
    >>> mesh.shape, mesh.get_coordinate()
    ((4, 2), (3, 0))

    Args:
        names: One name per axis.
        sizes: Ranks along each axis.
        coordinate: This rank's position along each axis.

    Raises:
        PlacementError: The lengths differ, a name repeats, or a position is outside its axis.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    coordinate: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("names", "sizes", "coordinate"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not len(self.names) == len(self.sizes) == len(self.coordinate):
            raise PlacementError(f"a mesh needs as many names as sizes and coordinates: {self}")
        if len(set(self.names)) != len(self.names):
            raise PlacementError(f"axis names of a mesh must differ, but got {self.names}")
        for name, size, position in zip(self.names, self.sizes, self.coordinate, strict=True):
            if not 0 <= position < size:
                raise PlacementError(f"position {position} is outside axis {name} of size {size}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(self.sizes)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """One name per axis."""
        return tuple(self.names)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    def get_coordinate(self) -> tuple[int, ...]:
        """Return this rank's position along each axis."""
        return tuple(self.coordinate)

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along axis ``mesh_dim``, by its number, or of all axes."""
        return prod(self.sizes) if mesh_dim is None else self.sizes[mesh_dim]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's position along an axis; a mesh of one axis needs no ``mesh_dim``.

        Args:
            mesh_dim: Name of the axis, or its number.

        Raises:
            PlacementError: The mesh has no such axis, or several and ``mesh_dim`` is None.
        """
        dim = 0 if mesh_dim is None and self.ndim == 1 else mesh_dim
        axis = self.mesh_dim_names.index(dim) if dim in self.names else dim
        if not isinstance(axis, int) or not -self.ndim <= axis < self.ndim:
            raise PlacementError(f"mesh {format_mesh(self)} has no local rank along {mesh_dim!r}")
        return self.coordinate[axis]

    def __getitem__(self, names: str | Sequence[str]) -> MeshCoordinate:
        """Return the sub-mesh over the named axes that this rank is in."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if unknown := [name for name in wanted if name not in self.names]:
            raise PlacementError(f"no axis {unknown[0]!r} in mesh {format_mesh(self)}")
        axes = [self.mesh_dim_names.index(name) for name in wanted]
        sizes, coordinate = ([of[axis] for axis in axes] for of in (self.sizes, self.coordinate))
        return MeshCoordinate(wanted, sizes, coordinate)


def mesh_at(axes: MeshAxes, rank: int) -> MeshCoordinate:
    """Return the mesh seen from a rank; the last axis is the fastest.

    >>> mesh_at({"ep": 4, "edp": 2}, 3).get_coordinate()
    (1, 1)
    """
    coordinate: list[int] = []
    for size in reversed(axes.values()):
        rank, position = divmod(rank, size)
        coordinate.append(position)
    return MeshCoordinate(tuple(axes), tuple(axes.values()), tuple(reversed(coordinate)))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, seen from this rank: ``Axis("ep", 2, 1, mesh, 0)`` on the second of two.

    Attributes:
        name: The axis name; None where the mesh has no names.
        size: Number of ranks along it.
        position: This rank's position along it.
        mesh: The mesh.
        number: Its index among the axes of the mesh.
    """

    name: str | None
    size: int
    position: int
    mesh: Any = field(repr=False, hash=False)
    number: int

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The global ranks along it, this rank's among them, if the mesh has them."""
        ranks = getattr(self.mesh, "mesh", None)
        if ranks is None:
            return None
        line: list[Any] = list(self.mesh.get_coordinate())
        line[self.number] = slice(None)
        return tuple([int(rank) for rank in ranks[tuple(line)].tolist()])

    def is_same(self, other: Axis) -> bool:
        """Whether both are one axis: by name or, without names, by their ranks."""
        if self.name is not None and other.name is not None:
            return self.name == other.name
        ranks = self.ranks
        return ranks is not None and ranks == other.ranks

    def __str__(self) -> str:
        return self.name if self.name is not None else f"of size {self.size}"


def mesh_axes(mesh: Mesh) -> tuple[Axis, ...] | None:
    """Return the axes of ``mesh`` from this rank, or None if the rank is not part of the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    names = mesh.mesh_dim_names or (None,) * len(mesh.shape)
    axes = enumerate(zip(names, mesh.shape, coordinate, strict=True))
    return tuple([Axis(*axis, mesh, number) for number, axis in axes])


def mesh_state(mesh: Mesh) -> Hashable:
    """Return what makes meshes equal: their names, sizes, this rank's coordinate, and ranks.

    A mesh that defines equality itself, as a ``DeviceMesh`` does, is the entry for its ranks; the
    ranks of any other mesh are listed, if it has them.
    """
    ranks: Any = None
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    if type(mesh).__eq__ is not object.__eq__ and type(mesh).__hash__ is not None:
        ranks = mesh
    elif (listed := getattr(mesh, "mesh", None)) is not None:
        ranks = tuple(listed.flatten().tolist())
    sizes, named = tuple(mesh.shape), None if names is None else tuple(names)
    return named, sizes, None if coordinate is None else tuple(coordinate), ranks


def format_ranks_of(mesh: Any) -> str:
    """Return a mesh and the table of its ranks as text, or the first of many ranks.

    A ``DeviceMesh`` gives ``(ep=2, edp=2) of ranks [[0, 2], [1, 3]]``.
    """
    table = mesh.mesh
    if table.numel() <= _MAX_TABLE:
        return f"{format_mesh(mesh)} of ranks {table.tolist()}"
    first = ", ".join(map(str, table.flatten()[:_MAX_TABLE].tolist()))
    return f"{format_mesh(mesh)} of ranks {first}, ... (in order, {table.numel()} of them)"


def format_mesh(mesh: Mesh) -> str:
    """Return a mesh as short text.

    >>> format_mesh(MeshCoordinate(("ep", "edp"), (4, 2), (3, 0)))
    '(ep=4, edp=2)'
    """
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(tuple(mesh.shape))))
    return f"({format_mesh_axes(dict(zip(names, mesh.shape, strict=True)))})"


def format_mesh_axes(axes: Mapping[str, int]) -> str:
    """Return axes as text.

    >>> format_mesh_axes({"ep": 8, "edp": 2})
    'ep=8, edp=2'
    """
    return ", ".join(f"{name}={size}" for name, size in axes.items())
