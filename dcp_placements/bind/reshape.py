"""Renames that change a rank's tensors: ``Stack``, ``Unstack``, ``Split`` and ``Transpose``.

Each tensor is bound before, as what it is on this rank. A target of a rename has pairs of equal
boxes. The rank's chunks of a target are the tensor's own chunks, moved by those pairs; their views
have the dims of the target. Nothing is copied or gathered. On the second of two ep ranks
with two experts each::

    Stack("experts.{}", total=4)   experts.2.w (4, 3), experts.3.w (4, 3)
                                   -> experts.w: chunks [2:3, ...] and [3:4, ...] of (4, 4, 3)
    Unstack("experts.{}")          experts.w (2, 4, 3), which is [2:4, ...] of (4, 4, 3)
                                   -> experts.2.w and experts.3.w, whole
    Split("gate_up", ("gate", "up"))  gate_up (8, 3)
                                   -> gate: its [0:4, ...]; up: its [4:8, ...]
    Transpose("w")                 w (2, 4, 3) -> w: a view (2, 3, 4), with the cuts of its dims

Rules name the stack in all of these forms. So a tensor that is a row of a stack is bound by the
stack's rule without the dims that the rows lie along; ranks along an axis that shards these hold
other rows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product, starmap
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import facts_of, has_hooks
from dcp_placements.bind.own_chunks import names_its_chunks
from dcp_placements.bind.rule_and_dtensor import (
    Place,
    Placed,
    Placing,
    SharedPlaces,
    check_ranks,
    format_own,
    has_dims,
    is_tensor,
)
from dcp_placements.errors import CannotPlace, Fault
from dcp_placements.layout.sharding import Cut, FusedPart, Kind, Sharding
from dcp_placements.names.flat import Path, RenamedValue, Reshaped
from dcp_placements.names.rename_results import (
    OfWhole,
    Parts,
    Row,
    Target,
    Transposed,
    part_targets,
    removed,
    row_dim,
    row_target,
    stack_dims,
    swapped,
)
from dcp_placements.rules.mesh_axes import Axis, Mesh, mesh_axes
from dcp_placements.rules.patterns import Rules, rule_name
from dcp_placements.rules.placement import (
    CheckpointPlacement,
    cut_of,
    format_placement,
    kind_of,
)
from dcp_placements.short_text import format_names

RowAxes = tuple[Axis | None, ...]
"""For each dim of a stack that its rows lie along, the axis that shards it, if any."""


def stack_like(rows: Sequence[RenamedValue[Row]], value: Any) -> torch.Tensor:
    """Return a tensor of the local shape of a stack, for rules that are a function.

    Args:
        rows: The rows that this rank has.
        value: The first one.
    """
    dims, local = stack_dims(rows[0].name, value.shape), facts_of(value)[0]
    shape = list(row_target(rows[0].name, tuple(local.shape)).shape)
    numbers = zip(*[row.name.indices for row in rows], strict=True)
    for dim, indices in zip(dims, numbers, strict=True):
        shape[dim] = len(indices if len(dims) == 1 else set(indices))
    return torch.empty(shape, dtype=local.dtype, device="meta")


def other_tensors(reshaped: Reshaped, bound: Container[str]) -> list[tuple[str, torch.Tensor]]:
    """Return the local tensors that are not the first of their name, each with that name.

    Args:
        reshaped: The rows, by stack, and the values that a load fills with one tensor.
        bound: The names to include.
    """
    return [
        (fqn, facts_of(renamed.value)[0])
        for values_of in (reshaped.rows, reshaped.several)
        for fqn, values in values_of.items()
        if fqn in bound
        for renamed in values[1:]
        if is_tensor(renamed.value) and not has_hooks(renamed.value)
    ]


def row_axes(
    placement: CheckpointPlacement, row: Row, shape: tuple[int, ...], mesh: Mesh | None = None
) -> RowAxes:
    """Return the axes of a stack's rule that shard the dims that its rows lie along.

    ``{"ep": Shard(0), "tp": Shard(1)}`` for a stack of experts gives ``(Axis("ep", ...),)``.

    Args:
        placement: The placement of the stack.
        row: One of its rows.
        shape: The shape of that row over its own mesh.
        mesh: The mesh of that row, if it is a DTensor.

    Raises:
        CannotPlace: The rule has another number of rows or dims, or the row's DTensor has one of
            these axes along other ranks.
    """
    dims, declared = stack_dims(row, shape), placement.global_shape
    ndim = len(shape) + len(dims)
    for dim, (total, _) in zip(dims, row.axes, strict=True):
        if declared is not None and (len(declared) != ndim or declared[dim] != total):
            raise CannotPlace(
                f"stacks {total} rows on dim {dim} of a tensor of {ndim} dims, but its rule "
                f"says global_shape={declared}"
            )
    sharding: dict[int, Axis] = {}
    # A rank that is not in the rule's mesh has no axes, and is refused where the row is bound.
    for axis, entry in zip(mesh_axes(placement.mesh) or (), placement.placements, strict=False):
        if kind_of(entry):
            if kind_of(entry) is Kind.FLAT:
                raise _no_dims(format_placement(entry))
            if (declared_dim := cut_of(entry, ndim, axis.name, axis.size).dim) is not None:
                sharding[declared_dim] = axis
    axes = tuple([sharding.get(dim) for dim in dims])
    check_ranks([axis for axis in axes if axis is not None], mesh)
    return axes


def reshape(
    placing: Placing,
    reshaped: Reshaped,
    axes_of_rows: Mapping[str, RowAxes],
    rules: Rules | None,
) -> Placing:
    """Return the tensors of a state dict, with the results of a rename in place of their sources.

    Args:
        placing: The tensors, bound as what they are on this rank; a stack as its first row.
        reshaped: The values that become rows of a stack, or one tensor per row or part.
        axes_of_rows: For each stack, the axes of its rule that shard its rows.
        rules: The user's rules, for messages.
    """
    result = replace(placing, placed={}, faults=[*placing.faults], state_dict={}, mappings={})
    unbound = placing.absent.union([fault.fqn for fault in placing.faults])
    wholes = SharedPlaces()
    # Layers have equal tensors: the results of the rename are kept by place.
    stacks: dict[Any, Place] = {}
    targets: dict[Any, list[HeldTarget]] = {}
    repeats: dict[Any, Place] = {}
    for fqn, value in placing.state_dict.items():
        own, path = placing.placed.get(fqn), placing.mappings.get(fqn)
        try:
            if fqn in reshaped.rows:
                rows = sorted(reshaped.rows[fqn], key=lambda row: row.name.indices)
                _put(result, fqn, rows[0].value, path)
                tensors = _row_tensors(rows)
                result.sources[fqn] = rows
                if fqn not in unbound:
                    own = own or _unruled(fqn, rows[0].value, wholes)
                    names, axes = [row.name for row in rows], axes_of_rows.get(fqn)
                    result.placed[fqn] = _stack(own, names, tensors, axes, stacks)
            elif fqn in reshaped.wholes:
                renamed = reshaped.wholes[fqn]
                _check_whole(renamed)
                if fqn not in unbound:
                    own = own or _unruled(fqn, value, wholes)
                    sources = reshaped.several.get(fqn, [])
                    _put_targets(result, own, renamed, targets, sources, repeats)
            elif fqn in reshaped.several:
                _put(result, fqn, value, path)
                if fqn not in unbound:
                    _put_several(result, fqn, own, reshaped.several[fqn], wholes, repeats)
            else:
                _put(result, fqn, value, path)
                if own is not None:
                    result.placed[fqn] = own
        except CannotPlace as error:
            result.faults.append(error.fault(fqn, rule_name(rules, fqn)))
    return result


def _put(placing: Placing, fqn: str, value: Any, path: Path | None) -> None:
    """Add a value under its key in the checkpoint, which no other value may have."""
    if fqn in placing.state_dict:
        headline = "rename= gives this one name to a row and to another value"
        way_out = "way out:     map every key of a rank to a key of its own"
        placing.faults.append(Fault(fqn, headline, (way_out,)))
    placing.state_dict[fqn] = value
    if path is not None:
        placing.mappings[fqn] = path


def _unruled(fqn: str, value: Any, wholes: SharedPlaces) -> Placed:
    """Return a tensor without a rule and a DTensor, which is a whole."""
    local = facts_of(value)[0]
    return Placed(fqn, local, wholes.bind((local, None, (), local.shape)))


_ONE_FORM = (
    "way out:     leave it out, or give both sides one form of experts, so that no rename= touches "
    "optimizer state; offline export_safetensors(optimizer=True, rename=) converts it. Without "
    "flatten_optimizer_state_dict=True one lr is that of all parameters of a group"
)


def _row_tensors(rows: Sequence[RenamedValue[Row]]) -> list[torch.Tensor]:
    """Return the local tensors of the rows of one stack.

    Raises:
        CannotPlace: The rows are not all tensors, or differ in more than their numbers.
    """
    if not any(is_tensor(row.value) for row in rows):
        raise CannotPlace(
            f"{rows[0].key} is an object, and rename= makes a row of a stack of it: "
            "only tensors are stacked",
            _ONE_FORM,
        )
    return _equal_tensors(rows, "stack")


def _equal_tensors(
    values: Sequence[RenamedValue[Row] | RenamedValue[str | OfWhole]], verb: str
) -> list[torch.Tensor]:
    """Return the local tensors of values that are equal but for their names and contents.

    Args:
        values: The values.
        verb: What is done with them, for messages.

    Raises:
        CannotPlace: They are not all tensors, or have other dtypes, layouts, shapes or places.
    """
    if not all(is_tensor(of.value) and not names_its_chunks(of.value) for of in values):
        raise CannotPlace(
            f"cannot {verb} what is no tensor, or names its chunks itself, with tensors",
            f"the keys:    {format_names([of.key for of in values], 4)}",
        )
    facts = [facts_of(of.value) for of in values]
    kinds = set()
    for local, mesh, placements, shape in facts:
        # Meshes may differ in their ranks, but not in this rank's position along cutting axes.
        axes = None if mesh is None else mesh_axes(mesh)
        entries = zip(axes or (), placements, strict=False)
        cutting = [
            (axis.size, axis.position) for axis, entry in entries if not entry.is_replicate()
        ]
        kinds.add((local.dtype, local.layout, local.shape, shape, placements, tuple(cutting)))
    if len(kinds) > 1:
        details = [
            f"{of.key}: {local.dtype}, {local.layout}, {format_own(shape, mesh, placements)}"
            for of, (local, mesh, placements, shape) in zip(values[:4], facts, strict=False)
        ]
        what = "rows" if verb == "stack" else "tensors"
        raise CannotPlace(
            f"cannot {verb} {what} of different dtypes, shapes or placements", *details
        )
    return [local for local, *_ in facts]


_FILL = "fill with one tensor of the checkpoint"


def _put_several(
    placing: Placing,
    fqn: str,
    own: Placed | None,
    values: Sequence[RenamedValue[str | OfWhole]],
    wholes: SharedPlaces,
    repeats: dict[Any, Place],
) -> None:
    """Add the values that a load fills with one tensor or object of the checkpoint.

    Args:
        placing: Takes in the values.
        fqn: Their name in the checkpoint.
        own: The first, bound as what it is; None for an object, and for a tensor without a rule.
        values: All of them.
        wholes: The places of tensors without a rule.
        repeats: The places of several tensors so far; takes in that of these.

    Raises:
        CannotPlace: Some are tensors and others are not, or they are not equal in kind.
    """
    placing.several[fqn] = tuple([of.key for of in values])
    if not any(is_tensor(of.value) for of in values):
        placing.more_paths[fqn] = [of.path or (of.key,) for of in values[1:]]
        return
    tensors = _equal_tensors(values, _FILL)
    own = own or _unruled(fqn, values[0].value, wholes)
    rows = [tensor.detach() for tensor in tensors]
    place = _repeated(own.place, len(rows), repeats)
    placing.sources[fqn] = values
    placing.placed[fqn] = replace(own, place=place, rows=rows)


def _repeated(place: Place, count: int, repeats: dict[Any, Place], *, rows: int = 1) -> Place:
    """Return the place of several tensors, each with the chunks of the first.

    Args:
        place: The place of the first.
        count: The number of tensors.
        repeats: The places of several tensors so far; takes in this one.
        rows: The number of rows of each tensor.
    """
    if (place, count) not in repeats:
        chunks = [
            chunk._replace(row=number * rows + chunk.row)
            for number in range(count)
            for chunk in place.chunks
        ]
        repeats[place, count] = replace(place, chunks=tuple(chunks))
    return repeats[place, count]


def _stack(
    own: Placed,
    rows: Sequence[Row],
    tensors: Sequence[torch.Tensor],
    axes: RowAxes | None,
    stacks: dict[Any, Place],
) -> Placed:
    """Return one stack, some of whose rows the rank has.

    Args:
        own: The first row, bound as what it is.
        rows: The rows that the rank has, sorted.
        tensors: Their local tensors.
        axes: The axes of the rule that shard the rows; None without a rule.
        stacks: The places of stacks so far; takes in this one.
    """
    axes = axes or (None,) * len(rows[0].axes)
    key = own.place, axes, tuple([row.form for row in rows])
    if key not in stacks:
        stacks[key] = _stack_place(own.place, rows, axes)
    views = [_view(tensor.detach(), rows[0].transposed) for tensor in tensors]
    for dim, origin in enumerate(row_target(rows[0], own.place.sharding.global_shape).dims):
        if origin is None:
            views = [view.unsqueeze(dim) for view in views]
    return Placed(own.fqn, tensors[0], stacks[key], own.rule, views, is_follower=own.is_follower)


def _stack_place(own: Place, rows: Sequence[Row], axes: RowAxes) -> Place:
    """Return the place of a stack, some of whose rows a rank has, each with the place ``own``."""
    shape = own.sharding.global_shape
    listed = []
    for dim, axis in zip(stack_dims(rows[0], shape), axes, strict=True):
        name, size = (None, 1) if axis is None else (axis.name, axis.size)
        listed.append(Cut(dim, name, size, Kind.LISTED, by_rule=True))
    sharding = _moved(own.sharding, row_target(rows[0], shape))
    chunks = [
        chunk
        for number, row in enumerate(rows)
        for chunk in row_target(row, shape).chunks(own.chunks, number)
    ]
    sharding = replace(sharding, cuts=(*listed, *sharding.cuts))
    return Place(sharding, own.axes, tuple(chunks))


def _no_dims(placement: str) -> CannotPlace:
    """Return the refusal of a range of a flattened tensor that is stacked, unstacked or split."""
    return CannotPlace(
        f"{placement} is a range of the flattened tensor, and rename= stacks, unstacks or splits "
        "it along a dim",
        "way out:     save it without that step; offline reshard(rename=) or "
        "export_safetensors(rename=) makes the other tensors of the checkpoint",
    )


class HeldTarget(NamedTuple):
    """A row or part that a rename makes of a tensor, as far as this rank holds it.

    The ``up`` of expert 5, which is the second expert of this rank::

        HeldTarget(row=5, part=1, indices=(1,), place=Place(...))

    Attributes:
        row: The number of its row, which replaces ``{}`` in its key; 0 without rows.
        part: Its index among the parts of that row.
        indices: The indices of the row in the local tensor; several where it is held repeatedly.
        place: Its place.
    """

    row: int
    part: int
    indices: tuple[int, ...]
    place: Place


def _view(tensor: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Return a tensor, as a view with its last two dims swapped where they are."""
    dims = tuple(range(tensor.ndim))
    return tensor.permute(swapped(dims)) if transposed else tensor


def _check_whole(renamed: RenamedValue[OfWhole]) -> None:
    """Refuse a value that has no rows and no parts.

    Raises:
        CannotPlace: The value is an object, a scalar, or a tensor that names its chunks itself.
    """
    value = renamed.value
    if not has_dims(value):
        kind = "a scalar" if is_tensor(value) else "an object"
        raise CannotPlace(
            f"is {kind}, and rename= makes several tensors of it: it has no rows and no parts",
            _ONE_FORM,
        )
    if names_its_chunks(value):
        raise CannotPlace("names its chunks itself, and cannot be unstacked, split or transposed")


def _put_targets(
    placing: Placing,
    own: Placed,
    renamed: RenamedValue[OfWhole],
    targets: dict[Any, list[HeldTarget]],
    several: Sequence[RenamedValue[str | OfWhole]],
    repeats: dict[Any, Place],
) -> None:
    """Add the rows and parts of a tensor that this rank has.

    Args:
        placing: Takes in the rows and parts.
        own: The tensor, bound as what it is.
        renamed: The tensor, with the answer of the rename.
        targets: The rows and parts of tensors so far; takes in those of this tensor.
        several: The tensors whose parts a load fills with the same ones, this one first; empty
            where it is the only one.
        repeats: The places of several tensors so far; takes in those of these.
    """
    name, shape = renamed.name, own.place.sharding.global_shape
    is_turned = name.transposed
    dim = row_dim(name, shape)
    if dim is not None:
        placing.totals.update(dict.fromkeys(name.fqns, shape[dim]))
    key = own.place, name.form
    if key not in targets:
        targets[key] = _held_targets(own.place, name, dim)
    tensors = _equal_tensors(several, _FILL) if several else [own.tensor]
    for row, part, indices, place in targets[key]:
        fqn = name.fqns[part].replace("{}", str(row))
        views = [
            _view(tensor.detach() if dim is None else tensor.detach().select(dim, index), is_turned)
            for tensor in tensors
            for index in indices
        ]
        _put(placing, fqn, views[0], renamed.path)
        placing.sources[fqn] = several or [renamed]
        if several:
            placing.several[fqn] = tuple([of.key for of in several])
            place = _repeated(place, len(several), repeats, rows=len(indices))
        rows = views if len(views) > 1 else ()
        has_own_key = not isinstance(name, Transposed)
        placing.placed[fqn] = Placed(
            fqn, views[0], place, own.rule, rows, has_own_key, is_follower=own.is_follower
        )


def _held_targets(whole: Place, name: OfWhole, dim: int | None) -> list[HeldTarget]:
    """Return the rows and parts of a tensor that this rank holds.

    Args:
        whole: The place of the tensor.
        name: The answer of the rename.
        dim: The dim that its rows lie along; None where it is only split.

    Raises:
        CannotPlace: The tensor cannot be cut into the parts.
    """
    for cut in whole.sharding.cuts:
        if cut.kind is Kind.FLAT:
            raise _no_dims(cut.placement)
    shape = whole.sharding.global_shape
    targets = part_targets(name, shape if dim is None else removed(shape, dim))
    indices_of: dict[int, list[int]] = {0: [0]}
    if dim is not None:
        rows = chain.from_iterable(starmap(range, whole.sharding.dim_at(dim, whole.positions)))
        indices_of = {}
        for index, row in enumerate(rows):
            if row < shape[dim]:  # beyond it is padding
                indices_of.setdefault(row, []).append(index)
    held = []
    for (row, indices), (part, target) in product(indices_of.items(), enumerate(targets)):
        if dim is not None:
            target = target.of_row(row, dim)
        chunks = [
            moved
            for number, index in enumerate(indices)
            for chunk in whole.chunks
            if dim is None or 0 <= index - chunk.local_offsets[dim] < chunk.sizes[dim]
            for moved in target.chunks([chunk], number)
        ]
        of = FusedPart(part, name.sizes, name.groups) if isinstance(name, Parts) else None
        split = _split_dims(target, shape)
        sharding = _moved(whole.sharding, target, split, of)
        # Where no axis cuts a fused dim, a part in one box is the same box on every rank.
        is_cut = any(cut.dim in split for cut in sharding.cuts)
        is_exact = not split or (len(target.boxes) == 1 and not is_cut)
        place = Place(sharding, whole.axes, tuple(chunks), is_exact=is_exact)
        held.append(HeldTarget(row, part, tuple(indices), place))
    return held


def _split_dims(target: Target, shape: tuple[int, ...]) -> list[int]:
    """Return the dims of a target that are parts of a dim of its source, whose shape is given."""
    return [
        dim
        for dim, origin in enumerate(target.dims)
        if origin is not None
        and any(source.sizes[origin] != shape[origin] for source, _ in target.boxes)
    ]


def _moved(
    whole: Sharding, target: Target, split: Sequence[int] = (), of: FusedPart | None = None
) -> Sharding:
    """Return the sharding of a rename's target, which follows from that of its source.

    The cut of a fused dim stays that of the whole dim: parts are not shards of equal size.

    Args:
        whole: The sharding of the source.
        target: The target.
        split: The dims of the target that are parts of a dim of the source.
        of: The part that the target is.

    Raises:
        CannotPlace: A fused dim is padded.
    """
    cuts: list[Cut] = []
    for cut in whole.cuts:
        if cut.dim not in target.dims:  # the target is a row: ranks along the axis hold other rows
            cuts.append(cut._replace(dim=-1))
            continue
        dim = target.dims.index(cut.dim)
        cuts.append(cut._replace(dim=dim, of=of if dim in split else None))
    if whole.padded_shape is None:
        return Sharding(target.shape, tuple(cuts))
    padded = list(target.shape)
    for dim, origin in enumerate(target.dims):
        if origin is None or whole.padded_shape[origin] == whole.global_shape[origin]:
            continue
        padded[dim] = whole.padded_shape[origin]
        if dim in split:
            sizes = f"{padded[dim]} of {whole.global_shape[origin]}"
            raise CannotPlace(f"cannot be split: dim {dim} is padded, to {sizes}")
    return Sharding(target.shape, tuple(cuts), tuple(padded))
