"""A device mesh seen from any rank, without a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcp_placements import MeshCoordinate


class FakeMesh:
    """Answers as a ``DeviceMesh`` of ranks ``0..n-1`` in C order does on one rank.

    Args:
        sizes: Ranks along each axis.
        names: One name per axis, or None for a mesh without names.
        rank: The rank that sees it; one beyond the mesh has no coordinate.
        ranks: The ranks themselves, where they are not ``0..n-1``; shaped like ``sizes``.

    Raises:
        ValueError: The names are not as many as the axes, or two are equal.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        names: Sequence[str] | None = None,
        *,
        rank: int,
        ranks: torch.Tensor | None = None,
    ) -> None:
        self.mesh = torch.arange(int(torch.Size(sizes).numel())) if ranks is None else ranks
        self.mesh = self.mesh.reshape(tuple(sizes))
        if names is not None and len(names) != len(sizes):
            raise ValueError(f"mesh of {len(sizes)} axes needs as many names, not {tuple(names)}")
        if names is not None and len(set(names)) != len(names):
            raise ValueError(f"axis names must differ, not {tuple(names)}")
        self.mesh_dim_names = None if names is None else tuple(names)
        self.rank = rank
        here = (self.mesh == rank).nonzero()
        self._coordinate = [int(position) for position in here[0]] if len(here) else None
        self._root = self
        self.device_type = "cpu"

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along axis ``mesh_dim``, by its number, or of all axes."""
        return self.mesh.numel() if mesh_dim is None else self.shape[mesh_dim]

    def get_coordinate(self) -> list[int] | None:
        """Return the position of the rank along each axis; None outside the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the position along an axis; a mesh of one axis needs no ``mesh_dim``."""
        names = self.mesh_dim_names or tuple(map(str, range(self.ndim)))
        coordinate = self.get_coordinate()
        assert coordinate is not None, "a rank of the mesh"
        return MeshCoordinate(names, self.shape, coordinate).get_local_rank(mesh_dim)

    def __getitem__(self, names: str | Sequence[str]) -> FakeMesh:
        """Return the sub-mesh over the named axes that this rank is in."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        coordinate = self.get_coordinate()
        if self.mesh_dim_names is None or coordinate is None:
            raise RuntimeError("only a mesh with axis names that the rank is part of can be sliced")
        if unknown := [name for name in wanted if name not in self.mesh_dim_names]:
            raise KeyError(f"no axis {unknown[0]!r} in {self.mesh_dim_names}")
        axes = [self.mesh_dim_names.index(name) for name in wanted]
        if axes != sorted(axes):
            raise KeyError(f"axes {wanted} must be in the order of {self.mesh_dim_names}")
        index = tuple(
            slice(None) if axis in axes else coordinate[axis] for axis in range(self.ndim)
        )
        ranks = self.mesh[index]
        sliced = FakeMesh(tuple(ranks.shape), wanted, rank=self.rank, ranks=ranks)
        sliced._root = self._root
        return sliced

    def _get_root_mesh(self) -> FakeMesh:
        """Return the mesh that this one was sliced from, as ``DeviceMesh`` does."""
        return self._root

    def __repr__(self) -> str:
        return f"FakeMesh({self.shape}, {self.mesh_dim_names}, rank={self.rank})"
