"""How a whole tensor of a checkpoint is cut in a world that does not exist.

There is no DTensor here. A rule cuts the tensor, and then one flattened FSDP axis cuts dim 0 inside
the rule's cuts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.layout.sharding import Cut, Layout, Pick, Sharding
from dcp_placements.rules.placement import CheckpointPlacement, cut_of, shards


def in_mesh_order(axes: Mapping[str, int], fsdp: Sequence[str]) -> list[str]:
    """Return the FSDP axes in the mesh's order.

    Raises:
        CannotLook: The mesh does not have one of them.
    """
    if unknown := sorted(set(fsdp) - set(axes)):
        raise CannotLook(f"no axis {', '.join(unknown)} for FSDP: the mesh has {', '.join(axes)}")
    return [name for name in axes if name in fsdp]


def fsdp_axes(
    shape: tuple[int, ...], placement: CheckpointPlacement | None, fsdp: Sequence[str]
) -> list[str]:
    """Return the FSDP axes that cut a tensor: all that its rule does not cut over."""
    if not shape:
        return []
    taken: set[str] = set()
    if placement is not None:
        names = placement.mesh.mesh_dim_names or ()
        taken = {n for n, p in zip(names, placement.placements, strict=False) if shards(p)}
    return [name for name in fsdp if name not in taken]


def whole_sharding(
    shape: tuple[int, ...],
    placement: CheckpointPlacement | None,
    axes: Mapping[str, int],
    own: Sequence[str],
) -> Sharding:
    """Return how a whole tensor is cut: by its rule, then over FSDP, whose axis is the last.

    Args:
        shape: Of the checkpoint's tensor.
        placement: Its rule's.
        axes: The mesh.
        own: The axes over which FSDP cuts it.

    Raises:
        PlacementError: A rule that does not fit the tensor.
    """
    cuts: list[Cut | Pick] = []
    sizes: list[int] = []
    padded = None
    if placement is not None:
        if placement.mesh.get_coordinate() is None:
            raise PlacementError("the rank is no part of the rule's mesh")
        if placement.global_shape is not None and placement.global_shape != shape:
            raise PlacementError(
                f"the checkpoint holds a {shape} tensor, the rule says global_shape="
                f"{placement.global_shape}"
            )
        padded = placement.padded_shape
        sizes += placement.mesh.shape
        entries = enumerate(placement.placements)
        cuts += [cut_of(entry, len(shape), axis) for axis, entry in entries if shards(entry)]
    if own:
        cuts.append(Cut(0, len(sizes)))
    return Sharding(shape, (*sizes, prod(axes[name] for name in own)), tuple(cuts), padded)


def layout_at(
    sharding: Sharding,
    placement: CheckpointPlacement | None,
    axes: Mapping[str, int],
    own: Sequence[str],
    coordinate: Sequence[int],
) -> Layout:
    """Return what the rank at ``coordinate`` of the mesh holds.

    Raises:
        LayoutError: A cut that does not fit what is left to cut.
    """
    position = 0
    for index, (name, size) in zip(coordinate, axes.items(), strict=True):
        if name in own:
            position = position * size + index
    rule_coordinate = () if placement is None else tuple(placement.mesh.get_coordinate() or ())
    return sharding.at((*rule_coordinate, position))


def cut_signature(placement: CheckpointPlacement | None) -> Hashable:
    """Return what decides how a placement cuts, whatever its rank."""
    if placement is None:
        return None
    mesh = placement.mesh
    shapes = placement.global_shape, placement.padded_shape
    return placement.placements, tuple(mesh.shape), mesh.mesh_dim_names, shapes
