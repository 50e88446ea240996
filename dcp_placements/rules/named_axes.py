"""Where all ranks are along the axes of a program's meshes, as the coordinator knows it.

A mesh lists its ranks, so that any process that has it knows the positions of all of them; what a
rank knows else, it sends. Two meshes of four ranks, ``(dp=2, tp=2)`` and ``(ep=2, etp=2)``::

    dp, ep     NamedAxis(2, (0, 0, 1, 1), ...)
    tp, etp    NamedAxis(2, (0, 1, 0, 1), ...)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from dcp_placements._torch import root_mesh


class NamedAxis(NamedTuple):
    """An axis of the program's meshes: ``NamedAxis(2, (0, 0, 1, 1))`` of ep in a mesh (ep, tp).

    Attributes:
        size: Ranks along it.
        positions: By rank, in the order of the plans.
        lines: By rank, the ranks along it, where the mesh has them.
    """

    size: int
    positions: tuple[int, ...]
    lines: tuple[tuple[int, ...], ...] = ()


class NamedAxes(NamedTuple):
    """The axes that all ranks have, and which of them a mesh has together.

    Attributes:
        axes: By name, those of more than one rank.
        meshes: The axis names of each mesh.
    """

    axes: dict[str, NamedAxis]
    meshes: tuple[tuple[str, ...], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name."""
        return {name: axis.size for name, axis in self.axes.items()}

    def line(self, axis: str, rank: int) -> Hashable:
        """Return what ranks have alike that differ in their position along one axis alone."""
        named = self.axes[axis]
        if named.lines:
            return named.lines[rank]
        others = [
            other.positions for other in self.axes.values() if other.positions != named.positions
        ]
        return tuple([positions[rank] for positions in others])


def named_axes_of(
    ranks: Sequence[int], sent: Sequence[Mapping[str, tuple[int, int]]], meshes: Iterable[Any] = ()
) -> NamedAxes:
    """Return the axes that have one meaning on all ranks.

    A name that two meshes have along other ranks is left out.

    Args:
        ranks: The global ranks.
        sent: By rank, position and size of each axis that it knows.
        meshes: Meshes of this process that list their ranks.
    """
    candidates: dict[str, list[NamedAxis]] = {}
    groups: dict[tuple[str, ...], None] = {}
    different = {_state(mesh): mesh for each in meshes for mesh in (root_mesh(each), each)}
    for mesh in different.values():
        names, table = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
        if not names or table is None:
            continue
        rank_table = np.asarray(table.tolist(), np.int64)
        if not np.isin(ranks, rank_table).all():
            continue
        groups[tuple(names)] = None
        places = {int(rank): place for place, rank in np.ndenumerate(rank_table)}
        for dim, name in enumerate(names):
            lines = []
            for rank in ranks:
                line: list[Any] = [*places[rank]]
                line[dim] = slice(None)
                lines.append(tuple(rank_table[tuple(line)].tolist()))
            positions = tuple([places[rank][dim] for rank in ranks])
            axis = NamedAxis(rank_table.shape[dim], positions, tuple(lines))
            candidates.setdefault(name, []).append(axis)
    for name in set.intersection(*map(set, sent)) if sent else ():
        sizes = {each[name][1] for each in sent}
        if len(sizes) == 1:
            positions = tuple([each[name][0] for each in sent])
            candidates.setdefault(name, []).append(NamedAxis(sizes.pop(), positions))
    axes = {}
    for name, several in candidates.items():
        is_clear = len({(axis.size, axis.positions) for axis in several}) == 1
        if is_clear and len({axis.lines for axis in several if axis.lines}) < 2:
            axes[name] = several[0]
    order = list(dict.fromkeys(chain(*groups, axes)))
    axes = {name: axes[name] for name in order if name in axes and axes[name].size > 1}
    return NamedAxes(axes, tuple(groups))


def _state(mesh: Any) -> Hashable:
    """Return what tells meshes apart: names and ranks."""
    table = getattr(mesh, "mesh", None)
    ranks = None if table is None else (tuple(table.shape), tuple(table.flatten().tolist()))
    return tuple(getattr(mesh, "mesh_dim_names", None) or ()), ranks
