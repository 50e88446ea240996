"""From a tensor and its rule to its layout: which source speaks for which axis.

Two sources describe how a tensor is cut. The rule speaks for the axes that the tensor's own DTensor
does not shard; the DTensor for those that it does. The rule's cuts come first, because FSDP cuts
the model-parallel part: that holds whatever position its axis has in the checkpoint's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcp_placements.bind.binding import BindError, Own, Place
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import (
    Cut,
    Kind,
    Layout,
    LayoutError,
    Pick,
    Sharding,
    unknown_kind,
)
from dcp_placements.names.target import RenameError
from dcp_placements.rules.mesh import Axis, Mesh, format_mesh, mesh_axes
from dcp_placements.rules.placement import (
    CheckpointPlacement,
    FusedShard,
    cut_of,
    format_placement,
    shards,
    strided_cut,
)


@dataclass(frozen=True, slots=True)
class Sources:
    """How tensors of some placements are cut, whatever their shapes.

    Attributes:
        placement: Of their rule; None keeps a tensor's own mesh and placements.
        axes: Of both sources, the rule's first, seen from this rank.
        homes: For each axis its mesh and its position there.
        cuts: In the order in which they apply.
        factors: By dim, how many times the whole is as long as the tensor, where it is longer.
    """

    placement: CheckpointPlacement | None
    axes: tuple[Axis, ...]
    homes: tuple[tuple[Any, int], ...]
    cuts: tuple[Cut | Pick, ...]
    factors: Mapping[int, int]

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple([axis.size for axis in self.axes])

    def bind(self, own: Own, local_shape: tuple[int, ...]) -> Place:
        """Return where a local tensor lies in the checkpoint.

        Args:
            own: Its own description, with the mesh and the placements of these sources.
            local_shape: Its shape, in elements.

        Raises:
            BindError: The cuts do not yield ``local_shape``.
        """
        ndim, placement = len(own.shape), self.placement
        global_shape, padded_shape = own.shape, None
        if self.factors:
            global_shape = tuple(
                [size * self.factors.get(dim, 1) for dim, size in enumerate(own.shape)]
            )
        if placement is not None and placement.global_shape is not None:
            global_shape, padded_shape = placement.global_shape, placement.padded_shape
        if len(global_shape) != ndim:
            raise BindError(
                f"the tensor has {ndim} dims, but global_shape={global_shape} has "
                f"{len(global_shape)}",
                "way out:     global_shape= of the whole tensor, with all its dims; or a more "
                "specific pattern above this rule",
            )
        sharding = Sharding(global_shape, self.axis_sizes, self.cuts, padded_shape)
        layout = _layout(sharding, self.axes, own, local_shape, placement)
        return Place(sharding, self.axes, layout.chunks(), self.homes)


def sources_of(
    own: Own,
    placement: CheckpointPlacement | None,
    axes_of: Callable[..., tuple[Axis, ...] | None] = mesh_axes,
) -> Sources | None:
    """Return how a tensor is cut, or None on a rank that holds no part.

    Tensors of as many dims, with equal meshes and placements, have the same sources.

    Args:
        own: The tensor's own description.
        placement: The placement of its rule; None keeps the tensor's own mesh and placements.
        axes_of: ``mesh_axes``, or a memo of it where many tensors are bound.

    Raises:
        BindError: The two contradict each other.
    """
    meshes = [own.mesh, None if placement is None else placement.mesh]
    unnamed = any(mesh is not None and mesh.mesh_dim_names is None for mesh in meshes)
    own_axes = () if own.mesh is None else axes_of(own.mesh, with_ranks=unnamed)
    if own_axes is None:
        return None
    rule_axes: tuple[Axis, ...] = ()
    if placement is not None:
        rule_axes = _rule_axes(placement.mesh, axes_of(placement.mesh, with_ranks=unnamed))
    ndim = len(own.shape)
    own_cuts = _own_cuts(own, own_axes, ndim)
    rule_cuts, replaced = _rule_cuts(placement, rule_axes, own_axes, own_cuts, ndim)

    # The axes of both sources, the rule's first; an axis that both have stands once.
    axes = list(rule_axes)
    homes = [(None if placement is None else placement.mesh, j) for j in range(len(axes))]
    own_position = []
    for i, axis in enumerate(own_axes):
        same = next((j for j, other in enumerate(rule_axes) if other.is_same(axis)), None)
        own_position.append(len(axes) if same is None else same)
        if same is None:
            axes.append(axis)
            homes.append((own.mesh, i))
    kept = _without(own_cuts, replaced, own_axes) if replaced else own_cuts
    if own_position != list(range(len(own_axes))):
        kept = [replace(cut, axis=own_position[cut.axis]) for cut in kept]
    factors: dict[int, int] = {}
    for cut in rule_cuts:
        if isinstance(cut, Cut) and cut.axis not in {own_position[i] for i in replaced}:
            factors[cut.dim] = factors.get(cut.dim, 1) * axes[cut.axis].size
    return Sources(placement, tuple(axes), tuple(homes), (*rule_cuts, *kept), factors)


def bind(
    own: Own, local_shape: tuple[int, ...], placement: CheckpointPlacement | None
) -> Place | None:
    """Return where a local tensor lies in the checkpoint, or None on a rank that holds no part.

    Args:
        own: The tensor's own description.
        local_shape: The shape of this rank's local tensor, in elements.
        placement: The placement of its rule; None keeps the tensor's own mesh and placements.

    Raises:
        BindError: The two contradict each other, or do not yield ``local_shape``.
    """
    sources = sources_of(own, placement)
    return None if sources is None else sources.bind(own, local_shape)


def _layout(
    sharding: Sharding,
    axes: Sequence[Axis],
    own: Own,
    local_shape: tuple[int, ...],
    placement: CheckpointPlacement | None,
) -> Layout:
    """Return this rank's layout, which must have the local shape.

    Raises:
        BindError: A cut that does not fit, or another local shape.
    """
    try:
        layout = sharding.at([axis.position for axis in axes])
    except LayoutError as error:
        text = str(error)
        details = *_sources(own, placement), *_parts_advice(placement)
        raise BindError(text, *details, place=_coordinate(axes)) from None
    # FSDP may leave (0, 0) of a parameter of shape (0, 8): neither has an element to place.
    empty = not math.prod(layout.local_shape) and not math.prod(local_shape)
    if layout.local_shape != local_shape and not (empty and len(local_shape) == len(own.shape)):
        raise BindError(
            f"holds a {local_shape} tensor where {layout.local_shape} was declared",
            *_sources(own, placement),
            f"that makes:  whole tensor {sharding.cut_shape}, cut by "
            + (_format_cuts(sharding, axes) or "nothing"),
            *_mismatch_advice(own, placement),
            place=_coordinate(axes),
        )
    return layout


def fault_of(error: BindError | RenameError, fqn: str, rule: str | None) -> Fault:
    """Return the fault that ``error`` is at key ``fqn``."""
    details = error.details if rule is None else (*error.details, f"by rule:     {rule}")
    place = error.place if isinstance(error, BindError) else ()
    return Fault(fqn, error.headline, details, place)


def _rule_axes(mesh: Mesh, axes: tuple[Axis, ...] | None) -> tuple[Axis, ...]:
    if axes is None:
        raise BindError(
            f"the rank is not part of the rule's mesh {format_mesh(mesh)}",
            "way out:     a rule must name a mesh of the ranks that hold the tensor; on the other "
            "ranks give another rule, or None",
        )
    return axes


def _own_cuts(own: Own, axes: Sequence[Axis], ndim: int) -> list[Cut]:
    cuts = []
    for i, placement in enumerate(own.placements):
        if placement.is_partial():
            raise BindError(
                f"holds a partial sum over axis {_axis_name(axes[i])} ({placement})",
                "way out:     redistribute it to Replicate or Shard before saving",
            )
        if shards(placement):
            cut = cut_of(placement, ndim, i)
            assert isinstance(cut, Cut)
            cuts.append(cut)
    return cuts


def _rule_cuts(
    placement: CheckpointPlacement | None,
    rule_axes: Sequence[Axis],
    own_axes: Sequence[Axis],
    own_cuts: Sequence[Cut],
    ndim: int,
) -> tuple[list[Cut | Pick], set[int]]:
    """Return the rule's cuts, and the own axes whose cut the rule describes more exactly."""
    cuts: list[Cut | Pick] = []
    replaced: set[int] = set()
    if placement is None:
        return cuts, replaced
    for j, (axis, entry) in enumerate(zip(rule_axes, placement.placements, strict=True)):
        same = next((i for i, other in enumerate(own_axes) if other.is_same(axis)), None)
        own_cut = next((cut for cut in own_cuts if cut.axis == same), None)
        if same is not None:
            _check_axis(axis, own_axes[same], is_cut=shards(entry) or own_cut is not None)
        if not shards(entry):
            continue
        if not -ndim <= entry.dim < ndim:
            raise BindError(
                f"holds a tensor of {ndim} {'dim' if ndim == 1 else 'dims'}, but "
                f"{format_placement(entry)} over axis {_axis_name(axis)} names dim {entry.dim}",
                "way out:     a more specific pattern above this rule, with its own placement or "
                "None",
            )
        cut = cut_of(entry, ndim, j)
        if own_cut is not None and axis.size > 1:
            _check_both_cut(axis, entry, cut, own_cut)
        if own_cut is None or same is None:
            cuts.append(cut)
            continue
        match cut.kind:
            case Kind.LISTED:
                cuts.append(cut)
            case Kind.FUSED:
                if own_cut.dim == cut.dim:
                    cuts.append(cut)
                    replaced.add(same)
            case Kind.PLAIN | Kind.STRIDED:
                pass  # the DTensor describes this axis
            case _:
                raise unknown_kind(cut.kind)
    return cuts, replaced


def _check_axis(axis: Axis, own: Axis, *, is_cut: bool) -> None:
    """Refuse one axis that the rule's mesh and the tensor's own have differently."""
    if own.size != axis.size:
        raise BindError(
            f"has axis {_axis_name(axis)} of size {own.size} in the tensor's own mesh, but of size "
            f"{axis.size} in the rule's",
            "way out:     name a mesh of this model-parallel setup in the rule",
        )
    if is_cut and own.position != axis.position:
        raise BindError(
            f"the rank is at {own.position} of axis {_axis_name(axis)} in the tensor's own mesh, "
            f"but at {axis.position} in the rule's",
            "likely:      two meshes of the same axis names that lay out the ranks differently",
            "way out:     in the rule the mesh that the tensor's was sliced from; or other "
            "names, where the two axes are not the same",
        )


def _check_both_cut(axis: Axis, entry: Any, cut: Cut | Pick, own_cut: Cut) -> None:
    """Refuse a rule that cuts an axis in another way than the tensor's own DTensor."""
    if isinstance(cut, Pick):
        raise BindError(
            f"has axis {_axis_name(axis)} sharded by its own DTensor on dim {own_cut.dim}, "
            f"but the rule says {format_placement(entry)}",
            "way out:     the DTensor speaks for that axis: leave it out of the rule; or "
            "hold a plain tensor, or a DTensor over the other axes alone, and let the rule "
            "speak",
        )
    if own_cut.dim != cut.dim:
        raise BindError(
            f"has axis {_axis_name(axis)} sharded on dim {own_cut.dim} by its own DTensor, but "
            f"on dim {cut.dim} by the rule",
            "way out:     the DTensor speaks for that axis; leave it out of the rule",
        )


def _without(own_cuts: Sequence[Cut], replaced: set[int], axes: Sequence[Axis]) -> list[Cut]:
    """Return the own cuts that remain when the rule replaces those of axes ``replaced``.

    ``_StridedShard(dim, split_factor=k)`` cuts inside the k parts that axes further right make.
    Where the rule makes one of those axes cut first, the factor is divided by its size.
    """
    kept = []
    for cut in own_cuts:
        if cut.axis in replaced:
            continue
        if cut.kind is Kind.STRIDED:
            factor = cut.parts
            assert isinstance(factor, int)
            for other in own_cuts:
                if other.axis in replaced and other.axis > cut.axis and other.dim == cut.dim:
                    size = axes[other.axis].size
                    if factor % size == 0:
                        factor //= size
            cut = strided_cut(cut.dim, cut.axis, factor)
        kept.append(cut)
    return kept


def _sources(own: Own, placement: CheckpointPlacement | None) -> tuple[str, ...]:
    lines = []
    if placement is not None:
        whole = placement.global_shape
        shape = "" if whole is None else f" of global_shape {whole}"
        padded = "" if placement.padded_shape is None else f", padded {placement.padded_shape}"
        lines.append(f"declared:    {placement.format()}{shape}{padded}")
    lines.append(f"the tensor:  {own.format()}")
    return tuple(lines)


def _coordinate(axes: Sequence[Axis]) -> tuple[str]:
    return (f"coordinate:  ({', '.join(f'{_axis_name(a)}={a.position}' for a in axes)})",)


def _format_cuts(sharding: Sharding, axes: Sequence[Axis]) -> str:
    texts = []
    for cut in sharding.cuts:
        if isinstance(cut, Pick):
            texts.append(f"{len(cut.indices)} listed rows on dim {cut.dim}")
        else:
            axis = axes[cut.axis]
            inside = "" if cut.kind is Kind.PLAIN else f" inside parts {cut.parts}"
            texts.append(f"{_axis_name(axis)} (x{axis.size}) on dim {cut.dim}{inside}")
    return ", then ".join(texts)


def _mismatch_advice(own: Own, placement: CheckpointPlacement | None) -> tuple[str, ...]:
    rows = "IndexShard(dim, rows) with global_shape= in the rule says which rows this rank holds"
    if own.mesh is not None and placement is not None and placement.global_shape is not None:
        return (
            "likely:      a wrong global_shape= (padded_shape=), which is the whole over all axes "
            "and holds for every key that the rule matches; or DTensor.from_local() with shards "
            "that torch.chunk would not make",
            f"way out:     correct global_shape=, or leave it out where all shards are equal; or "
            f"{rows}, for a plain tensor or a DTensor over the other axes alone",
        )
    if own.mesh is not None:
        return (
            "likely:      DTensor.from_local() with shards that torch.chunk would not make; only "
            "those can be described by Shard",
            f"way out:     shard as torch.chunk does; or {rows}, for a plain tensor or a DTensor "
            "over the other axes alone",
        )
    if placement is not None and placement.global_shape is not None:
        return (
            "likely:      a wrong global_shape= (padded_shape=), which is the whole over all "
            "axes; or shards that torch.chunk would not make",
            f"way out:     correct global_shape=; or {rows}",
        )
    return _parts_advice(placement) or (f"way out:     global_shape= in the rule; or {rows}",)


def _parts_advice(placement: CheckpointPlacement | None) -> tuple[str, ...]:
    if placement is None or not any(isinstance(p, FusedShard) for p in placement.placements):
        return ()
    text = "the number of equal tensors in the dim, or the rows of each, over all ranks together"
    return (
        f"way out:     parts= of FusedShard: {text}; global_shape= where ranks hold unequal rows",
    )


def _axis_name(axis: Axis) -> str:
    return axis.name if axis.name is not None else f"of size {axis.size}"
