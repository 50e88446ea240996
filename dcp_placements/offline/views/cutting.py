"""How a whole tensor of a checkpoint is cut in a world that is not there.

No DTensor says anything here: a rule does, and besides it one flattened FSDP axis on dim 0, inside
of what the rule cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.layout.sharding import Cut, Layout, Pick, Sharding
from dcp_placements.rules.placement import CheckpointPlacement, cut_of, shards


def known_axes(axes: Mapping[str, int], fsdp: Sequence[str]) -> list[str]:
    """Return the axes of FSDP in the mesh's order.

    Raises:
        CannotLook: One of them is none of the mesh.
    """
    if unknown := sorted(set(fsdp) - set(axes)):
        raise CannotLook(f"no axis {', '.join(unknown)} for FSDP: the mesh has {', '.join(axes)}")
    return [name for name in axes if name in fsdp]


def fsdp_axes(
    shape: tuple[int, ...], placement: CheckpointPlacement | None, fsdp: Sequence[str]
) -> list[str]:
    """Return those of FSDP's axes that cut a tensor: all that its rule does not cut over."""
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
    """Return how a whole tensor is cut: as the rule says, then by FSDP; its axis is the last.

    Args:
        shape: Of the checkpoint's tensor.
        placement: What the rule says.
        axes: The mesh.
        own: Those of its axes over which FSDP cuts.

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
    for axis, (name, size) in enumerate(axes.items()):
        if name in own:
            position = position * size + coordinate[axis]
    place = () if placement is None else tuple(placement.mesh.get_coordinate() or ())
    return sharding.at((*place, position))
