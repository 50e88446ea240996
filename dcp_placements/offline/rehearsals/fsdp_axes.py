"""The axes over which FSDP cuts dim 0 of the tensors of a world that does not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.rules.mesh_axes import MeshAxes, MeshCoordinate, mesh_at
from dcp_placements.rules.patterns import EVERY, PlacementRules
from dcp_placements.rules.placement import CheckpointPlacement, kind_of

Fsdp = Sequence[str] | Mapping[str, Sequence[str]]
"""Axes over which FSDP cuts dim 0: of every tensor, or by pattern of its key."""


class FsdpAxes:
    """The axes over which FSDP cuts dim 0 of the tensors of a world.

    >>> fsdp = FsdpAxes({"experts": ["edp"], "**": ["ep", "edp"]}, {"edp": 2, "ep": 4})
    >>> fsdp.of("layers.0.experts.w1"), fsdp.of("layers.0.norm")
    (('edp',), ('edp', 'ep'))
    >>> fsdp.mesh(("edp", "ep"), 5, None)
    MeshCoordinate(names=('edp_ep',), sizes=(8,), coordinate=(5,))

    Args:
        declared: Axes for all tensors, or by pattern.
        axes: The mesh.

    Raises:
        CannotLook: The mesh does not have one of them, or a pattern has an empty component.
    """

    def __init__(self, declared: Fsdp, axes: MeshAxes) -> None:
        by_pattern = declared if isinstance(declared, Mapping) else {EVERY: declared}
        self._mesh_axes = axes
        self._axes: dict[str | None, tuple[str, ...]] = {None: ()}
        # By flattened axes, the mesh of each rank.
        self._flattened: dict[tuple[str, ...], list[MeshCoordinate]] = {}
        for pattern, names in by_pattern.items():
            if unknown := sorted(set(names) - set(axes)):
                has = ", ".join(axes)
                raise CannotLook(f"no axis {', '.join(unknown)} for FSDP: the mesh has {has}")
            self._axes[pattern] = tuple([name for name in axes if name in names])
        try:
            self._patterns = PlacementRules(dict.fromkeys(by_pattern))
        except PlacementError as error:
            raise CannotLook(str(error)) from error

    def of(self, key: str) -> tuple[str, ...]:
        """Return the axes of a tensor, in the mesh's order."""
        return self._axes[self._patterns.pattern_of(key)]

    def mesh(
        self, axes: Sequence[str], rank: int, placement: CheckpointPlacement | None
    ) -> MeshCoordinate | None:
        """Return the one axis that axes of a tensor are flattened into, seen from a rank.

        Args:
            axes: Axes of the tensor.
            rank: The rank.
            placement: Placement of its rule; FSDP does not cut over the axes that this cuts over.

        Returns:
            The mesh; None where no axis is left.
        """
        cut_over: set[str | None] = set()
        if placement is not None:
            names = placement.mesh.mesh_dim_names or ()
            entries = zip(names, placement.placements, strict=False)
            cut_over = {name for name, entry in entries if kind_of(entry)}
        own = tuple([name for name in axes if name not in cut_over])
        if not own:
            return None
        if own not in self._flattened:
            self._flattened[own] = [
                _flattened(mesh_at(self._mesh_axes, each_rank)[own])
                for each_rank in range(prod(self._mesh_axes.values()))
            ]
        return self._flattened[own][rank]

    def matches(self, keys: Iterable[str]) -> dict[str, bool]:
        """Return which of the patterns match any of the keys."""
        matched = {self._patterns.pattern_of(key) for key in keys}
        patterns = [pattern for pattern in self._patterns.patterns if pattern != EVERY]
        return {f"fsdp({pattern!r})": pattern in matched for pattern in patterns}


def _flattened(mesh: MeshCoordinate) -> MeshCoordinate:
    """Return a mesh as one axis, in whose order its last axis is the fastest."""
    position = 0
    for size, along in zip(mesh.sizes, mesh.coordinate, strict=True):
        position = position * size + along
    return MeshCoordinate(("_".join(mesh.names),), (mesh.size(),), (position,))
