"""A mesh seen from one rank: axis names, sizes, and where this rank stands."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dcp_placements.errors import PlacementError


class Mesh(Protocol):
    """The attributes that a mesh needs; ``torch.distributed.DeviceMesh`` has them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class MeshCoordinate:
    """A mesh seen from one coordinate, without a process group.

    For rehearsals, conversions and tests: it replaces the ``DeviceMesh`` of a rank in any process.

    >>> mesh = MeshCoordinate(("ep", "edp"), (4, 2), (3, 0))
    >>> mesh.shape, mesh.get_coordinate()
    ((4, 2), (3, 0))

    Args:
        names: One name per axis.
        sizes: Ranks along each axis.
        coordinate: This rank's position along each axis.

    Raises:
        PlacementError: Lengths that differ, a repeated name, or a position outside its axis.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    coordinate: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("names", "sizes", "coordinate"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not len(self.names) == len(self.sizes) == len(self.coordinate):
            raise PlacementError(
                f"a mesh needs as many names as sizes and coordinates, not names {self.names}, "
                f"sizes {self.sizes}, coordinate {self.coordinate}"
            )
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


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, seen from this rank.

    Attributes:
        name: The axis name; None where the mesh has no names.
        size: Ranks along it.
        position: This rank's position along it.
        group: The global ranks along it, this rank's among them, if the mesh has them.
    """

    name: str | None
    size: int
    position: int
    group: tuple[int, ...] | None = None

    def is_same(self, other: Axis) -> bool:
        """Whether both are one axis: by name or, without names, by their ranks."""
        if self.name is not None and other.name is not None:
            return self.name == other.name
        return self.group is not None and self.group == other.group


def mesh_axes(mesh: Mesh, *, with_ranks: bool = False) -> tuple[Axis, ...] | None:
    """Return the axes of ``mesh`` from this rank, or None if the rank is not part of the mesh.

    Args:
        mesh: The mesh.
        with_ranks: Set ``Axis.group`` for axes with names, too: two axes are compared by their
            ranks if one of them has no name.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes = tuple(mesh.shape)
    names = mesh.mesh_dim_names or (None,) * len(sizes)
    ranks = getattr(mesh, "mesh", None) if with_ranks or mesh.mesh_dim_names is None else None
    axes = []
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        group = None
        if ranks is not None:
            line = ranks[tuple(slice(None) if j == i else coordinate[j] for j in range(len(sizes)))]
            group = tuple(int(rank) for rank in line.tolist())
        axes.append(Axis(name, size, coordinate[i], group))
    return tuple(axes)


def mesh_state(mesh: Mesh) -> Hashable:
    """Return the value of a mesh: its names, sizes, this rank's position, and its ranks.

    A mesh that defines equality itself, as a ``DeviceMesh`` does, stands for its ranks; the ranks
    of any other mesh are listed, if it has them.
    """
    kind = type(mesh)
    ranks: Any = None
    if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None:
        ranks = mesh
    else:
        listed = getattr(mesh, "mesh", None)
        if listed is not None:
            ranks = tuple(listed.flatten().tolist())
    coordinate = mesh.get_coordinate()
    return (
        None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
        tuple(mesh.shape),
        None if coordinate is None else tuple(coordinate),
        ranks,
    )


class MeshNumbers:
    """Numbers meshes: equal meshes have one number, whichever objects they are.

    The last few are compared by identity first, because nearly all tensors of a state dict are on
    two or three meshes.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._recent: list[tuple[Mesh, int]] = []

    def __call__(self, mesh: Mesh) -> int:
        """Return the number of a mesh."""
        for recent, number in self._recent:
            if recent is mesh:
                return number
        number = self._numbers.setdefault(mesh_state(mesh), len(self._numbers))
        self._recent = [(mesh, number), *self._recent[:3]]
        return number


def format_mesh(mesh: Mesh) -> str:
    """Return a mesh as short text.

    >>> format_mesh(MeshCoordinate(("ep", "edp"), (4, 2), (3, 0)))
    '(ep=4, edp=2)'
    """
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(tuple(mesh.shape))))
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True)) + ")"
