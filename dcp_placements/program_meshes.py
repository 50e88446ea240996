"""The meshes that a program has made, by the names of their axes.

A declaration in a file of its own needs the program's meshes, which exist only once it has built
its model. So each ``DeviceMesh`` is recorded when it is made. In a program of four ranks::

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("ep", "edp"))   # the program's

    meshes["ep"]           # the mesh of ep alone: of ranks [0, 2] on rank 0
    meshes["ep", "edp"]    # of both
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dcp_placements._torch import record_meshes, recorded_meshes, root_mesh
from dcp_placements.errors import PlacementError
from dcp_placements.rules.mesh_axes import format_ranks_of

_MOST_LISTED = 12


class ProgramMeshes:
    """The meshes that this process has made since ``record`` was called.

    They are kept, equal ones once, since a program may keep no more of them than process groups.
    Meshes without names, and of other names, are not reached by it; nor are process groups without
    a ``DeviceMesh``, for which there is ``MeshCoordinate``. A refused save has the same record.
    """

    def record(self) -> None:
        """Record each ``DeviceMesh`` that is made from now on, sliced and flattened ones, too."""
        record_meshes()

    def all(self) -> list[DeviceMesh]:
        """Return the meshes with names, in the order in which they were made, each once."""
        return [mesh for mesh in recorded_meshes() if mesh.mesh_dim_names]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of these axes alone, in this order, from this rank.

        Args:
            names: The name of an axis, or several names of axes that one mesh has.

        Raises:
            PlacementError: No mesh has these axes, or one has them in another order; or several
                have them, along other ranks.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if not wanted:
            raise PlacementError('meshes[()]: a name is missing, as in meshes["ep"]')
        slices: dict[Any, DeviceMesh] = {}
        for mesh in self.all():
            if set(wanted) <= set(mesh.mesh_dim_names or ()):
                ordered = tuple([name for name in mesh.mesh_dim_names or () if name in wanted])
                if ordered != wanted:
                    names_text, in_order = (", ".join(map(repr, n)) for n in (wanted, ordered))
                    raise PlacementError(
                        f"meshes[{names_text}]: the mesh has these axes once each, in another "
                        f"order\n    made:        {format_ranks_of(mesh)}\n"
                        f"    way out:     meshes[{in_order}]"
                    )
                sliced = _slice(mesh, wanted)
                slices.setdefault(_ranks(sliced), sliced)
        own = [mesh for mesh in slices.values() if mesh.get_coordinate() is not None]
        if len(own) == 1:
            return own[0]
        quoted = ", ".join(map(repr, wanted))
        if own:
            raise PlacementError(
                f"meshes[{quoted}]: {len(own)} meshes of the program have such axes, along other "
                f"ranks\n{_listed(own)}\n"
                "    way out:     more names, of axes that only one of them has; or another name "
                "for one of them, where the program makes it"
            )
        raise PlacementError(
            f"meshes[{quoted}]: the program has made no mesh with "
            f"{'this axis' if len(wanted) == 1 else 'these axes'} on this rank by now\n"
            f"{_listed(self.all())}\n"
            "    likely:      another name; a mesh without mesh_dim_names=; or process groups "
            "without a DeviceMesh\n"
            "    way out:     a name that is listed; MeshCoordinate(names, sizes, coordinate) for "
            "groups without a DeviceMesh"
        )

    def of(self, *names: str) -> DeviceMesh:
        """Return the mesh of these axes, as ``meshes[names]`` does."""
        return self[names]

    def __contains__(self, name: str) -> bool:
        """Whether a mesh with this axis has been made by now."""
        return any(name in (mesh.mesh_dim_names or ()) for mesh in self.all())

    def __repr__(self) -> str:
        return f"meshes of the program:\n{_listed(self.all())}"


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if mesh.mesh_dim_names == names:
        return mesh
    # Only a root is sliced by every version of torch; flattened axes are not its own.
    root = root_mesh(mesh)
    whole = root if set(names) <= set(root.mesh_dim_names or ()) else mesh
    return whole[names[0] if len(names) == 1 else names]


def _ranks(mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())


def _listed(meshes: list[DeviceMesh]) -> str:
    lines = [f"    made:        {format_ranks_of(mesh)}" for mesh in meshes[:_MOST_LISTED]]
    if len(meshes) > _MOST_LISTED:
        lines.append(f"    ... and {len(meshes) - _MOST_LISTED} more")
    return "\n".join(lines or ["    made:        none with names"])
