"""From a tensor and its rule to its place in the checkpoint: which source speaks for which axis.

Two sources describe how a tensor is cut. The rule speaks for the axes that the tensor's own DTensor
does not shard; the DTensor for those that it does. The rule's cuts come first, because FSDP cuts
the model-parallel part: that holds whatever position its axis has in the checkpoint's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcp_placements.bind.placed import Place
from dcp_placements.errors import Fault, PlacementError
from dcp_placements.layout.sharding import (
    Chunk,
    Cut,
    Kind,
    LayoutError,
    Position,
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
    format_placements,
    position_of,
    shards,
    strided_cut,
)


class BindError(Exception):
    """Why a tensor and its rule do not fit together; becomes a ``Fault`` with the key.

    Args:
        headline: What does not fit.
        details: Causes and the way out.
        place: Facts about this rank alone.
    """

    def __init__(self, headline: str, *details: str, place: tuple[str, ...] = ()) -> None:
        super().__init__(headline)
        self.headline = headline
        self.details = details
        self.place = place


def fault_of(error: BindError | RenameError, fqn: str, rule: str | None) -> Fault:
    """Return the fault that ``error`` is at key ``fqn``."""
    details = error.details if rule is None else (*error.details, f"by rule:     {rule}")
    place = error.place if isinstance(error, BindError) else ()
    return Fault(fqn, error.headline, details, place)


class Own(NamedTuple):
    """What a tensor says of itself.

    Attributes:
        shape: The shape over ``mesh``; a plain tensor's own shape.
        mesh: The DTensor's mesh; None for a plain tensor.
        placements: One per mesh axis.
    """

    shape: tuple[int, ...]
    mesh: Mesh | None = None
    placements: tuple[Any, ...] = ()

    def format(self) -> str:
        """Return it as short text."""
        if self.mesh is None:
            return f"plain tensor of shape {tuple(self.shape)}"
        return (
            f"DTensor of shape {tuple(self.shape)}, {format_placements(self.placements)} "
            f"on mesh {format_mesh(self.mesh)}"
        )


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
    own_axes = () if own.mesh is None else mesh_axes(own.mesh)
    if own_axes is None:
        return None
    own_cuts = _own_cuts(own, own_axes)
    rule_axes = () if placement is None else _rule_axes(placement.mesh)
    # For each axis of the rule, the number of the tensor's own axis that it is.
    same = [
        next((i for i, one in enumerate(own_axes) if one.is_same(axis)), None) for axis in rule_axes
    ]
    rule_cuts, replaced = _rule_cuts(own, own_axes, own_cuts, placement, rule_axes, same)
    factors: dict[int, int] = {}
    for j, (cut, _) in rule_cuts.items():
        if cut.kind is not Kind.LISTED and same[j] not in replaced:
            factors[cut.dim] = factors.get(cut.dim, 1) * cut.size
    kept = _without(own_cuts, replaced)
    sharding = _sharding(own, placement, [cut for cut, _ in rule_cuts.values()], kept, factors)
    positions = [position for _, position in rule_cuts.values()]
    positions += [own_axes[i].position for i in kept]

    # An axis that both sources have stands once.
    others = [i for i in range(len(own_axes)) if i not in same]
    axes = (*rule_axes, *[own_axes[i] for i in others])
    cutting = {j for j, i in enumerate(same) if j in rule_cuts or i in kept}
    replicating = [axis for j, axis in enumerate(rule_axes) if j not in cutting]
    replicating += [own_axes[i] for i in others if i not in kept]
    chunks = _chunks(sharding, positions, axes, own, local_shape, placement)
    return Place(sharding, axes, tuple(replicating), chunks, tuple(positions))


def _own_cuts(own: Own, axes: Sequence[Axis]) -> dict[int, Cut]:
    """Return the cuts of a DTensor by the numbers of their axes."""
    cuts = {}
    try:
        for i, (axis, placement) in enumerate(zip(axes, own.placements, strict=True)):
            if shards(placement):
                cuts[i] = cut_of(placement, len(own.shape), axis.name, axis.size)
            elif placement.is_partial():
                raise BindError(
                    f"holds a partial sum over axis {axis} ({placement})",
                    "way out:     redistribute it to Replicate or Shard before saving",
                )
    except PlacementError as error:
        headline, *details = str(error).splitlines()
        raise BindError(f"its own DTensor: {headline}", *map(str.strip, details)) from None
    return cuts


def _rule_axes(mesh: Mesh) -> tuple[Axis, ...]:
    axes = mesh_axes(mesh)
    if axes is None:
        raise BindError(
            f"the rank is not part of the rule's mesh {format_mesh(mesh)}",
            "way out:     a rule must name a mesh of the ranks that hold the tensor; on the other "
            "ranks give another rule, or None",
        )
    return axes


def _rule_cuts(
    own: Own,
    own_axes: Sequence[Axis],
    own_cuts: Mapping[int, Cut],
    placement: CheckpointPlacement | None,
    rule_axes: Sequence[Axis],
    same: Sequence[int | None],
) -> tuple[dict[int, tuple[Cut, Position]], set[int]]:
    """Return the rule's cuts, and the own axes whose cut the rule describes more exactly.

    Returns:
        By the number of the rule's axis, its cut and this rank's position in it. An axis that the
        DTensor describes is not among them.
    """
    cuts: dict[int, tuple[Cut, Position]] = {}
    replaced: set[int] = set()
    if placement is None:
        return cuts, replaced
    ndim = len(own.shape)
    for j, (axis, entry) in enumerate(zip(rule_axes, placement.placements, strict=True)):
        at = same[j]
        own_cut = None if at is None else own_cuts.get(at)
        if at is not None:
            _check_axis(axis, own_axes[at], is_cut=shards(entry) or own_cut is not None)
        if not shards(entry):
            continue
        if not -ndim <= entry.dim < ndim:
            raise BindError(
                f"holds a tensor of {ndim} {'dim' if ndim == 1 else 'dims'}, but "
                f"{format_placement(entry)} over axis {axis} names dim {entry.dim}",
                "way out:     a more specific pattern above this rule, with its own placement or "
                "None",
            )
        cut = cut_of(entry, ndim, axis.name, axis.size)
        if own_cut is not None and axis.size > 1:
            _check_both_cut(axis, entry, cut, own_cut)
        match cut.kind:
            case Kind.LISTED:
                pass
            case Kind.FUSED:
                if own_cut is not None and own_cut.dim != cut.dim:
                    continue
                if own_cut is not None and at is not None:
                    replaced.add(at)
            case Kind.PLAIN | Kind.STRIDED:
                if own_cut is not None:
                    continue
            case _:
                raise unknown_kind(cut.kind)
        cuts[j] = cut, position_of(entry, axis.position)
    return cuts, replaced


def _check_axis(axis: Axis, own: Axis, *, is_cut: bool) -> None:
    """Refuse one axis that the rule's mesh and the tensor's own have differently."""
    if own.size != axis.size:
        raise BindError(
            f"has axis {axis} of size {own.size} in the tensor's own mesh, but of size "
            f"{axis.size} in the rule's",
            "way out:     name a mesh of this model-parallel setup in the rule",
        )
    if is_cut and own.position != axis.position:
        raise BindError(
            f"the rank is at {own.position} of axis {axis} in the tensor's own mesh, "
            f"but at {axis.position} in the rule's",
            "likely:      two meshes of the same axis names that lay out the ranks differently",
            "way out:     in the rule the mesh that the tensor's was sliced from; or other "
            "names, where the two axes are not the same",
        )


def _check_both_cut(axis: Axis, entry: Any, cut: Cut, own_cut: Cut) -> None:
    """Refuse a rule that cuts an axis in another way than the tensor's own DTensor."""
    if cut.kind is Kind.LISTED:
        raise BindError(
            f"has axis {axis} sharded by its own DTensor on dim {own_cut.dim}, "
            f"but the rule says {format_placement(entry)}",
            "way out:     the DTensor speaks for that axis: leave it out of the rule; or "
            "hold a plain tensor, or a DTensor over the other axes alone, and let the rule "
            "speak",
        )
    if own_cut.dim != cut.dim:
        raise BindError(
            f"has axis {axis} sharded on dim {own_cut.dim} by its own DTensor, but "
            f"on dim {cut.dim} by the rule",
            "way out:     the DTensor speaks for that axis; leave it out of the rule",
        )


def _without(own_cuts: Mapping[int, Cut], replaced: set[int]) -> dict[int, Cut]:
    """Return the own cuts that remain when the rule replaces those of axes ``replaced``.

    ``_StridedShard(dim, split_factor=k)`` cuts inside the k parts that axes further right make.
    Where the rule makes one of those axes cut first, the factor is divided by its size.
    """
    kept = {}
    for i, cut in own_cuts.items():
        if i in replaced:
            continue
        if cut.kind is Kind.STRIDED:
            factor = cut.parts
            assert isinstance(factor, int)
            for j in replaced:
                if j > i and own_cuts[j].dim == cut.dim and factor % own_cuts[j].size == 0:
                    factor //= own_cuts[j].size
            cut = strided_cut(cut, factor)
        kept[i] = cut
    return kept


def _sharding(
    own: Own,
    placement: CheckpointPlacement | None,
    rule_cuts: Sequence[Cut],
    own_cuts: Mapping[int, Cut],
    factors: Mapping[int, int],
) -> Sharding:
    """Return how the whole is cut, whose shape a rule gives, or the axes that it shards.

    Args:
        own: The tensor's own description.
        placement: Of its rule.
        rule_cuts: Those of the rule, which come first.
        own_cuts: Those of its DTensor.
        factors: By dim, how many times the whole is as long as the tensor, where it is longer.
    """
    shape = tuple([size * factors.get(dim, 1) for dim, size in enumerate(own.shape)])
    padded_shape = None
    if placement is not None and placement.global_shape is not None:
        shape, padded_shape = placement.global_shape, placement.padded_shape
    if len(shape) != len(own.shape):
        raise BindError(
            f"the tensor has {len(own.shape)} dims, but global_shape={shape} has {len(shape)}",
            "way out:     global_shape= of the whole tensor, with all its dims; or a more "
            "specific pattern above this rule",
        )
    return Sharding(shape, (*rule_cuts, *own_cuts.values()), padded_shape)


def _chunks(
    sharding: Sharding,
    positions: Sequence[Position],
    axes: Sequence[Axis],
    own: Own,
    local_shape: tuple[int, ...],
    placement: CheckpointPlacement | None,
) -> tuple[Chunk, ...]:
    """Return this rank's chunks, whose layout must have the local shape.

    Raises:
        BindError: A cut that does not fit, or another local shape.
    """
    place = (f"coordinate:  ({', '.join(f'{axis}={axis.position}' for axis in axes)})",)
    try:
        layout = sharding.at(positions)
    except LayoutError as error:
        details = *_sources(own, placement), *_parts_advice(placement)
        raise BindError(str(error), *details, place=place) from None
    # FSDP may leave (0, 0) of a parameter of shape (0, 8): neither has an element to place.
    empty = not math.prod(layout.local_shape) and not math.prod(local_shape)
    if layout.local_shape != local_shape and not (empty and len(local_shape) == len(own.shape)):
        cuts = ", then ".join(map(_cut_text, sharding.cuts, positions)) or "nothing"
        raise BindError(
            f"holds a {local_shape} tensor where {layout.local_shape} was declared",
            *_sources(own, placement),
            f"that makes:  whole tensor {sharding.cut_shape}, cut by {cuts}",
            *_mismatch_advice(own, placement),
            place=place,
        )
    return layout.chunks()


def _cut_text(cut: Cut, position: Position) -> str:
    if not isinstance(position, int):
        return f"{len(position)} listed rows on dim {cut.dim}"
    axis = f"of size {cut.size}" if cut.axis is None else cut.axis
    inside = "" if cut.kind is Kind.PLAIN else f" inside parts {cut.parts}"
    return f"{axis} (x{cut.size}) on dim {cut.dim}{inside}"


def _sources(own: Own, placement: CheckpointPlacement | None) -> tuple[str, ...]:
    lines = []
    if placement is not None:
        whole = placement.global_shape
        shape = "" if whole is None else f" of global_shape {whole}"
        padded = "" if placement.padded_shape is None else f", padded {placement.padded_shape}"
        lines.append(f"declared:    {placement.format()}{shape}{padded}")
    lines.append(f"the tensor:  {own.format()}")
    return tuple(lines)


def _mismatch_advice(own: Own, placement: CheckpointPlacement | None) -> tuple[str, ...]:
    rows = "IndexShard(dim, rows) with global_shape= in the rule says which rows this rank holds"
    if own.mesh is not None:
        rows += ", for a plain tensor or a DTensor over the other axes alone"
    has_shape = placement is not None and placement.global_shape is not None
    parts = _parts_advice(placement)
    if own.mesh is None and not has_shape:
        return parts or (f"way out:     global_shape= in the rule; or {rows}",)
    causes = ["a wrong global_shape= (padded_shape=), which is the whole over all axes"] * has_shape
    made_by = "" if own.mesh is None else "DTensor.from_local() with "
    causes.append(f"{made_by}shards that torch.chunk would not make")
    correct = "correct global_shape=" if has_shape else "shard as torch.chunk does"
    return f"likely:      {'; or '.join(causes)}", f"way out:     {correct}; or {rows}"


def _parts_advice(placement: CheckpointPlacement | None) -> tuple[str, ...]:
    if placement is None or not any(isinstance(p, FusedShard) for p in placement.placements):
        return ()
    text = "the number of equal tensors in the dim, or the rows of each, over all ranks together"
    return (
        f"way out:     parts= of FusedShard: {text}; global_shape= where ranks hold unequal rows",
    )
