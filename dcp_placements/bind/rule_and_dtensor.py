"""From a tensor and its rule to its place in the checkpoint: which source speaks for which axis.

Two sources describe how a tensor is cut. The rule speaks for the axes that the tensor's own DTensor
does not shard; the DTensor for those that it does. The rule's cuts come first, because FSDP cuts
the model-parallel part: that holds whatever position its axis has in the checkpoint's mesh.

The result is a ``Place``, and with a tensor a ``Placed``; a ``Placing`` has those of a state dict.
Nothing is copied: every chunk is a view. The chunks of a stack are views of several local tensors,
its rows. Two ep ranks with two fsdp ranks each, where every rank holds a row::

    rule       {"ep": Shard(0)}       the whole tensor: (4, 3)
    DTensor    Shard(0) over fsdp     the part of an ep rank: (2, 3)
    Place      Cut(0, "ep", 2), Cut(0, "fsdp", 2): the local tensor is (1, 3)
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import Facts, is_dtensor_like, root_mesh
from dcp_placements.errors import CannotPlace, Fault, PlacementError, Uneven
from dcp_placements.layout.sharding import Chunk, Cut, Kind, Position, Sharding, unknown_kind
from dcp_placements.names.flat import Path, RenamedValue
from dcp_placements.names.optimizer_state import Dims, OptimizerStates, ParameterGroups
from dcp_placements.pages import MESHES_PAGE, UNEVEN_PAGE
from dcp_placements.rules.mesh_axes import (
    Axis,
    Mesh,
    format_mesh,
    format_ranks_of,
    mesh_axes,
    mesh_state,
)
from dcp_placements.rules.placement import (
    CheckpointPlacement,
    cut_of,
    format_placement,
    format_placements,
    is_flat,
    kind_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where tensors of one layout lie in the checkpoint.

    Expert weights of shape ``(2, 3)`` on the second of two ep ranks, as ``{"ep": Shard(0)}``::

        Place(Sharding((4, 3), (Cut(0, "ep", 2),)), (Axis("ep", 2, 1, ...),),
              (Chunk((0, 0), (2, 0), (2, 3)),), (1,))

    Tensors of one layout have one object, which is the key of many tables.

    Attributes:
        sharding: How the whole tensor is cut.
        axes: The mesh axes of the rule and the DTensor, the rule's first, seen from this rank.
        chunks: The non-empty boxes that this rank holds, in C order of the local tensor. A rank may
            hold a row several times.
        positions: This rank's position in each of the cuts.
        is_exact: Whether ``sharding`` and the listed rows determine what each rank holds; false for
            a part of a fused dim that an axis cuts.
    """

    sharding: Sharding
    axes: tuple[Axis, ...]
    chunks: tuple[Chunk, ...]
    positions: tuple[Position, ...] = ()
    is_exact: bool = True


@dataclass(slots=True)
class Placed:
    """One tensor of the checkpoint, as far as this rank holds it.

    Attributes:
        fqn: The checkpoint's key.
        tensor: The local tensor, no copy; the first of ``rows`` where there are several.
        place: Its place, shared by all tensors of the same layout.
        rule: The name of its rule in messages; None if no rule matches.
        rows: The rows of a stack, or the copies of a row that this rank holds several times, as
            views with the checkpoint's dims; ``Chunk.row`` is an index into it. Empty where
            ``tensor`` is all that the rank holds.
        has_own_key: Whether other ranks of its mesh may not have the key at all: a row, or a part
            of a row, of a local tensor.
        is_reduced: Whether it is optimizer state without some dims of its parameter, as a factored
            moment. An axis that cuts only these dims holds replicas of it.
        is_follower: Whether it is optimizer state that follows its parameter by its shape alone.
    """

    fqn: str
    tensor: torch.Tensor
    place: Place
    rule: str | None = None
    rows: Sequence[torch.Tensor] = ()
    has_own_key: bool = False
    is_reduced: bool = False
    is_follower: bool = False

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.rows or (self.tensor,)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole tensor, as one chunk."""
        shape = self.place.sharding.global_shape
        return 0 in shape or (len(self.place.chunks) == 1 and self.place.chunks[0].sizes == shape)

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements of a chunk: a view of a local tensor, with the checkpoint's dims."""
        tensor = self.rows[chunk.row] if self.rows else self.tensor
        if chunk.strides is not None:  # the local tensor is a range of the flattened tensor
            tensor = tensor.detach()
            step = tensor.stride(0)
            start = tensor.storage_offset() + chunk.local_offsets[0] * step
            return tensor.as_strided(chunk.sizes, [n * step for n in chunk.strides], start)
        if tensor.shape == chunk.sizes and not tensor.requires_grad:
            return tensor  # most are whole chunks
        tensor = tensor.detach()
        if 0 in chunk.sizes:  # the one chunk of a tensor without elements
            return tensor.new_empty(chunk.sizes)
        for dim, size in enumerate(chunk.sizes):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, chunk.local_offsets[dim], size)
        return tensor


_NO_STATES = OptimizerStates()


@dataclass(slots=True)
class Placing:
    """A rank's flat state dict, bound, with one value per key of the checkpoint.

    Attributes:
        placed: By key, the tensors that have a place. Keys that are neither here nor in
            ``absent`` are left to torch's default planner.
        absent: Keys of which this rank has nothing to save or load: the mesh of the DTensor does
            not include it, or torch's hooks name no chunk here.
        faults: A fault for each tensor that does not fit.
        matched: The number of keys that each rule matches; 0 for a pattern that matches none.
        state_dict: The values.
        mappings: The path of each key in the nested dict.
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``, which
            has the numbers that the rename gave.
        parameter_groups: The parameters in parameter groups, by optimizer.
        states: Which keys are optimizer state.
        tied: The keys of this rank whose memory another key of it has as well, which the rename
            gives the same name: by key, that name. The other key stands for both.
        several: The keys of this rank that a load fills with one tensor or value, where there are
            several, by its name.
        more_paths: The paths of objects and numbers that a load fills with one value, but for the
            first, by its name.
        sources: The values of this rank that a tensor is made of or fills, where a rename makes
            others of them or gives several one name: by key, in the order of ``Placed.tensors``.
    """

    placed: dict[str, Placed] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    matched: dict[str, int] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    parameter_groups: ParameterGroups = field(default_factory=dict)
    states: OptimizerStates = _NO_STATES
    tied: dict[str, str] = field(default_factory=dict)
    several: dict[str, tuple[str, ...]] = field(default_factory=dict)
    more_paths: dict[str, list[Path]] = field(default_factory=dict)
    sources: dict[str, Sequence[RenamedValue[Any]]] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]:
        """Map each rule to its pairs (local shape, whole shape) that differ."""
        by_rule: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], None]] = {}
        distinct = {(placed.place, placed.rule): placed for placed in self.placed.values()}
        for placed in distinct.values():
            local, whole = tuple(placed.tensor.shape), placed.place.sharding.global_shape
            if placed.rule is not None and local != whole:
                by_rule.setdefault(placed.rule, {})[local, whole] = None
        return {rule: tuple(shapes) for rule, shapes in by_rule.items()}


class CutSource(NamedTuple):
    """A tensor of a state dict, and the rule that matches its key.

    An expert of shape ``(2, 3)`` on each of two ep ranks::

        CutSource(weight, (weight, None, (), (2, 3)), "'experts'",
                  CheckpointPlacement(mesh, {"ep": Shard(0)}))

    Attributes:
        value: The tensor or DTensor.
        own: Its local tensor, and its own mesh, placements and shape.
        rule: The rule's name in messages; None if no rule matches.
        placement: The placement of that rule; None keeps the tensor's own mesh and placements.
    """

    value: Any
    own: Facts
    rule: str | None
    placement: CheckpointPlacement | None


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or has the attributes of a DTensor."""
    return isinstance(value, torch.Tensor) or is_dtensor_like(value)


def has_dims(value: Any) -> bool:
    """Whether a value is a tensor with dims; a scalar or an object has no rows of its own."""
    return is_tensor(value) and len(value.shape) > 0


@dataclass(slots=True)
class SharedPlaces:
    """The places of a state dict's tensors: tensors of one layout share one ``Place``.

    Neighbours in a state dict mostly have one mesh, and its ``mesh_state`` costs more than the rest
    of the key: the places of the last mesh are kept beside those of all.
    """

    _places: dict[Hashable, dict[Any, Place]] = field(default_factory=dict)
    _last_mesh: Mesh | None = None
    _of_last_mesh: dict[Any, Place] = field(default_factory=dict)

    def bind(
        self,
        own: Facts,
        placement: CheckpointPlacement | None = None,
        origins: Dims | None = None,
        ndim: int = 0,
    ) -> Place:
        """Return where a local tensor lies in the checkpoint.

        Args:
            own: The tensor's local tensor, mesh, placements and shape.
            placement: The placement of its rule, or of another tensor whose dims it has; None keeps
                the tensor's own mesh and placements.
            origins: For each dim of the tensor, the dim of that other one, or None for a reduced
                dim; None where the placement is the tensor's own.
            ndim: The number of dims of the other tensor.

        Raises:
            CannotPlace: The rule and the DTensor contradict each other, or do not yield the shape
                of the local tensor.
        """
        local, mesh, placements, shape = own
        if placement is None or origins == tuple(range(ndim)):
            origins, ndim = None, 0
        if mesh is not self._last_mesh or not self._places:
            # A rule is compared with the root as well, which equal meshes need not share.
            state = None if mesh is None else (mesh_state(mesh), mesh_state(root_mesh(mesh)))
            self._last_mesh, self._of_last_mesh = mesh, self._places.setdefault(state, {})
        of_mesh = self._of_last_mesh
        key = shape, local.shape, placements, placement, origins, ndim
        place = of_mesh.get(key)
        if place is not None:
            return place
        if placement is not None and origins is not None:
            place = self.bind(own, placement.of_dims(origins, ndim))
        else:
            place, expected = declared_place(tuple(shape), placement, mesh, placements)
            held = tuple(local.shape)
            # FSDP may leave (0, 0) of a parameter of shape (0, 8): neither has an element to place.
            is_empty = len(held) == len(shape) and not prod(expected) and not prod(held)
            if expected != held and not is_empty:
                headline = f"holds a {held} tensor where {expected} was declared"
                own_text = format_own(tuple(shape), mesh, placements)
                sharding, positions, axes = place.sharding, place.positions, place.axes
                refusal = _misfit(headline, own_text, placement, sharding, positions, axes)
                refusal.uneven = _uneven(place, expected, held)
                raise refusal
        of_mesh[key] = place
        return place


def _uneven(place: Place, expected: tuple[int, ...], local_shape: tuple[int, ...]) -> Uneven | None:
    """Return the shard of a rank along the one dim of another size, where the last cut makes it.

    Args:
        place: The place as it is declared.
        expected: The local shape that it makes.
        local_shape: The shape of the local tensor.
    """
    pairs = enumerate(zip(expected, local_shape, strict=False))
    differing = [dim for dim, (size, held) in pairs if size != held]
    if len(expected) != len(local_shape) or len(differing) != 1:
        return None
    (dim,) = differing
    cuts = [*zip(place.sharding.cuts, place.positions, strict=True)]
    for cut, position in cuts:
        if cut.kind is Kind.FLAT and cut.axis is not None:
            assert isinstance(cut.parts, tuple)
            assert isinstance(position, int)
            return Uneven(cut.axis, None, position, local_shape[0], cut.parts)
    cutting = [(cut, position) for cut, position in cuts if cut.dim == dim and cut.size > 1]
    rows = place.sharding.cut_shape[dim]
    outer: list[tuple[str, str, int, int]] = []
    for number, (cut, position) in enumerate(cutting):
        if cut.axis is None or not isinstance(position, int):
            return None
        is_declared = cut.kind is Kind.RAGGED
        if is_declared:
            assert isinstance(cut.parts, tuple)
            sizes = cut.parts
        elif cut.kind is Kind.PLAIN:
            step = -(-rows // cut.size)
            ends = [min(count * step, rows) for count in range(cut.size + 1)]
            sizes = tuple([stop - start for start, stop in pairwise(ends)])
        else:
            return None
        if number + 1 == len(cutting):
            size, is_alone = local_shape[dim], not outer
            by_rule = is_declared and is_alone
            return Uneven(cut.axis, dim, position, size, sizes, by_rule, tuple(outer))
        # The rule's cuts come before those of the DTensor, so it has to declare these, too.
        is_own = not cut.by_rule and not is_declared
        placement = f"RaggedShard({dim}, {sizes})" if is_own else cut.placement
        outer.append((cut.axis, placement, cut.size, position))
        rows = sizes[position]
    return None


def declared_place(
    shape: tuple[int, ...],
    placement: CheckpointPlacement | None = None,
    mesh: Mesh | None = None,
    placements: Sequence[Any] = (),
    *,
    is_whole: bool = False,
) -> tuple[Place, tuple[int, ...]]:
    """Return where a rank holds its part of a tensor, and the local shape that it has there.

    The rule's cuts come first, then those of the tensor's own DTensor.

    Args:
        shape: The shape of the tensor over its own mesh; a plain tensor's own shape.
        placement: The placement of its rule; None keeps the tensor's own mesh and placements.
        mesh: The DTensor's mesh, which this rank is in; None for a plain tensor.
        placements: The DTensor's placements, one per axis of ``mesh``.
        is_whole: Whether ``shape`` is the shape of the whole tensor, as in a rehearsal, where no
            rank runs. A ``global_shape`` of the rule still decides.

    Raises:
        CannotPlace: The two sources contradict each other, or do not fit the shape.
    """
    own_axes = () if mesh is None else mesh_axes(mesh)
    assert own_axes is not None, "the rank is in the tensor's mesh"
    rule_axes = () if placement is None else mesh_axes(placement.mesh)
    if rule_axes is None:
        assert placement is not None
        raise CannotPlace(
            f"the rank is not part of the rule's mesh {format_mesh(placement.mesh)}",
            "way out:     a rule must name a mesh of the ranks that hold the tensor; on the other "
            "ranks give another rule, or None",
        )
    own_cuts = _own_cuts(len(shape), own_axes, placements)
    is_range, ndim = is_flat(placement), len(shape)
    if is_range:
        assert placement is not None
        assert placement.global_shape is not None
        ndim = len(placement.global_shape)
        if len(shape) != 1 and not is_whole:
            raise _no_range(shape, placement, format_own(shape, mesh, placements))
    ruled: list[_RuleCut] = []
    if placement is not None:
        entries = zip(rule_axes, placement.placements, strict=True)
        cutting = {axis.name for axis, entry in entries if kind_of(entry)}
        cutting |= {own_axes[number].name for number in own_cuts}
        check_ranks([axis for axis in rule_axes if axis.name in cutting], mesh)
        ruled = list(_rule_cuts(ndim, placement, rule_axes, own_axes, own_cuts))
    replaced = {cut.own_axis for cut in ruled if cut.own_axis in own_cuts}
    whole, padded = list(shape), None
    if placement is not None and placement.global_shape is not None:
        whole, padded = list(placement.global_shape), placement.padded_shape
    elif not is_whole:
        stated: set[int] = set()  # the dims whose size a ragged cut states, whatever this rank has
        for number, (cut, _, own_axis) in enumerate(ruled):
            if own_axis in replaced or cut.dim is None or cut.dim in stated:
                continue  # the shape of the DTensor, or the sum, is of all ranks along the axis
            whole[cut.dim] *= cut.size
            if (cut.kind is Kind.RAGGED or cut.copies) and isinstance(cut.parts, tuple):
                before = [
                    by_rule.cut.size for by_rule in ruled[:number] if by_rule.cut.dim == cut.dim
                ]
                whole[cut.dim] = sum(cut.parts) * prod(before)
                stated.add(cut.dim)
    kept = _without(own_cuts, replaced) if replaced else own_cuts
    cuts = [*[by_rule.cut for by_rule in ruled], *kept.values()]
    positions = *[by_rule.position for by_rule in ruled], *[own_axes[i].position for i in kept]
    sharding = Sharding(tuple(whole), tuple(cuts), padded)
    others = [axis for axis in own_axes if not any(map(axis.is_same, rule_axes))]
    axes = (*rule_axes, *others)  # an axis that both sources have stands once
    try:
        if len(whole) != len(shape) and not is_range:
            given = f"global_shape={tuple(whole)} has {len(whole)}"
            dims = f"{len(shape)} {'dim' if len(shape) == 1 else 'dims'}"
            raise CannotPlace(f"the tensor has {dims}, but {given}")
        local_shape, chunks = sharding.shard(positions)
    except CannotPlace as error:
        own = format_own(shape, mesh, placements)
        raise _misfit(error.headline, own, placement, sharding, positions, axes) from None
    return Place(sharding, axes, chunks, positions), local_shape


def _own_cuts(ndim: int, axes: Sequence[Axis], placements: Sequence[Any]) -> dict[int, Cut]:
    """Return the cuts of a DTensor by the index of their axis."""
    cuts = {}
    for i, (axis, placement) in enumerate(zip(axes, placements, strict=True)):
        try:
            cut = cut_of(placement, ndim, axis.name, axis.size) if kind_of(placement) else None
        except PlacementError as error:
            headline, *details = str(error).splitlines()
            raise CannotPlace(f"its own DTensor: {headline}", *map(str.strip, details)) from None
        if cut is not None:
            cuts[i] = cut
        elif placement.is_partial():
            raise CannotPlace(
                f"holds a partial sum over axis {axis} ({placement})",
                "way out:     redistribute it to Replicate or Shard before saving",
            )
    return cuts


class _RuleCut(NamedTuple):
    """A cut for which the rule speaks, as ``_RuleCut(Cut(0, "ep", 2, by_rule=True), 1, None)``.

    Attributes:
        cut: The cut.
        position: This rank's position in it.
        own_axis: The index of the same axis in the DTensor's mesh, if it has it. If the DTensor
            cuts along it, too, this cut replaces the DTensor's.
    """

    cut: Cut
    position: Position
    own_axis: int | None


def _no_range(shape: Sequence[int], placement: CheckpointPlacement, own: str) -> CannotPlace:
    """Return the refusal of a tensor of other than one dim, of which a range is declared."""
    return CannotPlace(
        f"holds a {tuple(shape)} tensor where a range of the flattened one was declared, which has "
        "one dim",
        f"declared:    {placement.format()} of global_shape {placement.global_shape}",
        f"the tensor:  {own}",
        "likely:      the pattern matches the parameter, and its optimizer state alone is a range: "
        'a pattern on the keys of the state, as "state.**.exp_avg*", is tried first',
        "way out:     no FlatShard in the rule of this tensor; or the range itself: "
        "tensor.view(-1)",
    )


def _rule_cuts(
    ndim: int,
    placement: CheckpointPlacement,
    axes: Sequence[Axis],
    own_axes: Sequence[Axis],
    own_cuts: Mapping[int, Cut],
) -> Iterator[_RuleCut]:
    """Yield the cuts for which the rule speaks, without those that the DTensor says as exactly."""
    for axis, entry in zip(axes, placement.placements, strict=True):
        number = next((i for i, own in enumerate(own_axes) if own.is_same(axis)), None)
        own, own_cut = (None, None) if number is None else (own_axes[number], own_cuts.get(number))
        if own is not None and own.size != axis.size:
            raise _contradiction(axis, f"of size {own.size}", f"of size {axis.size}")
        if kind_of(entry) is None:
            continue
        cut = cut_of(entry, ndim, axis.name, axis.size)
        if own_cut is not None and not _is_finer(cut, own_cut, entry):
            if axis.size > 1:
                continue
            cut = own_cut  # over one rank it cuts nothing, and is declared by the rule, too
        position = entry.indices if cut.kind is Kind.LISTED else axis.position
        yield _RuleCut(cut._replace(by_rule=True), position, number)


def _is_finer(cut: Cut, own_cut: Cut, entry: Any) -> bool:
    """Whether a rule's cut says more than the DTensor's cut over the same axis.

    Over an axis of size 1 nothing is cut, so two cuts that contradict each other are accepted, and
    the rule's counts.

    Args:
        cut: The rule's cut.
        own_cut: The DTensor's cut.
        entry: The rule's placement.

    Raises:
        CannotPlace: The two contradict each other.
    """
    match cut.kind:
        case Kind.FLAT:  # the DTensor has one dim, the range
            return True
        case Kind.FUSED | Kind.RAGGED | Kind.LISTED:
            fits, is_finer = cut.dim == own_cut.dim, True
        case Kind.PLAIN | Kind.STRIDED:
            fits, is_finer = cut.dim == own_cut.dim, False
        case _:
            raise unknown_kind(cut.kind)
    if not fits and cut.size == 1:
        return True
    if not fits:
        axis = cut.axis if cut.axis is not None else f"of size {cut.size}"
        own, declared = f"sharded on dim {own_cut.dim}", f"as {format_placement(entry)}"
        raise _contradiction(axis, own, declared)
    return is_finer


def check_ranks(axes: Sequence[Axis], mesh: Mesh | None) -> None:
    """Refuse axes of a rule that have other ranks than the same axes of the DTensor's meshes.

    Each rank compares the ranks along its own line; so all ranks compare the whole meshes.

    Args:
        axes: The axes of the rule along which the rule or the DTensor cuts.
        mesh: The DTensor's mesh; None for a plain tensor, which has no axes.

    Raises:
        CannotPlace: An axis of the same name has other ranks in that mesh, or in the mesh that it
            was sliced from; or this rank has another position along it.
    """
    if not axes or mesh is None:
        return
    root = root_mesh(mesh)
    if root is root_mesh(axes[0].mesh):
        return
    own_meshes = (mesh, root)
    by_name = {axis.name: axis for own_mesh in own_meshes for axis in mesh_axes(own_mesh) or ()}
    for axis in axes:
        own = None if axis.name is None else by_name.get(axis.name)
        if own is None or own.size != axis.size:
            continue
        if None in (own.ranks, axis.ranks):
            if own.position != axis.position:
                raise CannotPlace(
                    f"is at position {own.position} of {axis} by its own DTensor, and at "
                    f"{axis.position} by the rule",
                    "likely:      a MeshCoordinate of another rank, or with positions in another "
                    "order than its names",
                    "way out:     the mesh that the tensor's was sliced from, in the rule; or "
                    "other names, where the two axes are not the same",
                    MESHES_PAGE,
                )
            continue
        if own.ranks != axis.ranks:
            raise CannotPlace(
                f"has axis {axis} along other ranks by its own DTensor than by the rule",
                f"its mesh:    {format_ranks_of(own.mesh)}",
                f"the rule's:  {format_ranks_of(axis.mesh)}",
                "likely:      two meshes of the same axis names that lay out the ranks otherwise, "
                "as two calls with the axes in another order make them",
                "way out:     one mesh for both: the rule's is the one that the tensor's was "
                "sliced from; or other names, where the two axes are not the same",
                MESHES_PAGE,
            )


def _contradiction(axis: Axis | str, own: str, declared: str) -> CannotPlace:
    """Return the refusal of an axis that differs between the tensor's own DTensor and its rule."""
    return CannotPlace(
        f"has axis {axis} {own} by its own DTensor, but {declared} by the rule",
        "likely:      an axis that the DTensor shards, and so speaks for; or two meshes of the "
        "same axis names that lay out the ranks differently",
        "way out:     leave it out of the rule, whose mesh is the one that the tensor's was sliced "
        "from; or other names, where the two axes are not the same",
        MESHES_PAGE,
    )


def _without(own_cuts: Mapping[int, Cut], replaced: Container[int | None]) -> dict[int, Cut]:
    """Return the own cuts that remain when the rule replaces those of axes ``replaced``.

    ``_StridedShard(dim, split_factor=k)`` cuts inside the k shards that axes further right make.
    Where the rule makes one of those axes cut first, the factor is divided by its size. With
    ``(_StridedShard(0, split_factor=2), Shard(0))`` on (fsdp, tp=2) and a rule for tp, the rule's
    cut stands first, and ``_StridedShard(0, split_factor=1)`` over fsdp remains.
    """
    kept = {i: cut for i, cut in own_cuts.items() if i not in replaced}
    for i, cut in kept.items():
        if cut.kind is Kind.STRIDED:
            factor = cut.parts
            assert isinstance(factor, int)
            for j, other in own_cuts.items():
                is_first = j in replaced and j > i and other.dim == cut.dim
                if is_first and factor % other.size == 0:
                    factor //= other.size
            kept[i] = cut._replace(parts=factor)
    return kept


def _misfit(
    headline: str,
    own: str,
    placement: CheckpointPlacement | None,
    sharding: Sharding,
    positions: Sequence[Position],
    axes: Sequence[Axis],
) -> CannotPlace:
    """Return the refusal of a local tensor whose shape is not the one that its sources declare."""
    counts = [f", {len(rows)} of them" if isinstance(rows, tuple) else "" for rows in positions]
    cuts = [f"{cut}{count}" for cut, count in zip(sharding.cuts, counts, strict=True)]
    declared = []
    if placement is not None:
        whole, padded = placement.global_shape, placement.padded_shape
        shape = "" if whole is None else f" of global_shape {whole}"
        shape += "" if padded is None else f", padded {padded}"
        declared.append(f"declared:    {placement.format()}{shape}")
    where = (f"coordinate:  ({', '.join(f'{axis}={axis.position}' for axis in axes)})",)
    facts = (
        *declared,
        f"the tensor:  {own}",
        f"that makes:  whole tensor {sharding.cut_shape}, "
        f"cut by {', then '.join(cuts) or 'nothing'}",
        *_order_of_axes(sharding.cuts),
        *_other_order(sharding),
    )
    if is_flat(placement):
        return CannotPlace(
            headline,
            *facts,
            "likely:      sizes of another tensor, or of another order of ranks; or global_shape= "
            "of the part that other axes leave, and not of the whole over all axes",
            "way out:     the size of the range of each rank along the axis, in their order, "
            "without the padding of a flat buffer; axes that cut first are left of it in the mesh "
            "of the rule, and none is right of it",
            UNEVEN_PAGE,
            where=where,
        )
    if any(cut.kind is Kind.RAGGED and cut.size > 1 for cut in sharding.cuts):
        return CannotPlace(
            headline,
            *facts,
            "likely:      sizes of RaggedShard that are of another topology, or in another order; "
            "or a coordinate that is not this rank's",
            "way out:     the size of each rank along the axis, in the order of the axis, the same "
            "on all ranks",
            UNEVEN_PAGE,
            where=where,
        )
    return CannotPlace(
        headline,
        *facts,
        "likely:      a wrong global_shape= (padded_shape=) or parts= of FusedShard, which are of "
        "the whole over all axes; or shards that torch.chunk would not make, "
        "by DTensor.from_local()",
        "way out:     correct these in the rule; where the ranks have uneven shards, "
        "RaggedShard(dim, sizes) with the size of each rank along the axis; or IndexShard(dim, "
        "rows) with global_shape=, which lists the rows of this rank",
        UNEVEN_PAGE,
        where=where,
    )


def _order_of_axes(cuts: Sequence[Cut]) -> Iterator[str]:
    """Yield the order of the axes that cut a dim, where declared sizes depend on it."""
    for dim in dict.fromkeys([cut.dim for cut in cuts if cut.dim is not None]):
        cutting = [cut for cut in cuts if cut.dim == dim and cut.size > 1]
        if any(isinstance(cut.parts, tuple) for cut in cutting[1:]):
            axes = " before ".join([repr(cut.axis) for cut in cutting])
            yield (
                f"order:       {axes} on dim {dim}: parts= and sizes= of an axis are of what the "
                "axes before it leave; another order is another mesh"
            )


def _other_order(sharding: Sharding) -> Iterator[str]:
    """Yield the order of axes in which declared sizes fit, where another axis stands after theirs.

    With ``Shard`` over tp, the uneven shards ``(3, 2)`` that FSDP has of ten rows are of the five
    that tp leaves. On a mesh ``(fsdp, tp)`` they are of all ten.
    """
    cuts = [cut for cut in sharding.cuts if cut.size > 1]
    for first, second in combinations(cuts, 2):
        if first.dim is None or first.dim != second.dim or not isinstance(first.parts, tuple):
            continue
        if first.axis is None or second.axis is None:
            continue
        whole = sharding.cut_shape[first.dim]
        if second.kind is Kind.PLAIN and sum(first.parts) * second.size == whole:
            yield (
                f"likely:      {first.parts} are of what {second.axis!r} leaves: a mesh for this "
                f'rule with {second.axis!r} before {first.axis!r}, as MeshCoordinate(("'
                f'{second.axis}", "{first.axis}"), ({second.size}, {first.size}), coordinate)'
            )
            if not second.by_rule:
                sizes = (whole // second.size,) * second.size
                yield (
                    f'             and {{"{second.axis}": RaggedShard({first.dim}, {sizes})}} in '
                    "it, as the rule's axes come before the DTensor's"
                )


def format_own(shape: tuple[int, ...], mesh: Mesh | None, placements: Sequence[Any]) -> str:
    """Return the shape, placements and mesh of a tensor as short text."""
    if mesh is None:
        return f"plain tensor of shape {tuple(shape)}"
    return (
        f"DTensor of shape {tuple(shape)}, {format_placements(placements)} "
        f"on mesh {format_mesh(mesh)}"
    )
