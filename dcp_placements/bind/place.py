"""A rank's state dict bound to the checkpoint: one ``Placed`` per tensor that has a place.

Both planners use this, so that a save and a load compute the same places. Nothing is raised here: a
tensor that does not fit becomes a ``Fault``, and the planner raises all of them at once. Nothing is
copied: each chunk is a view of a local tensor.

The pass has three steps. The rules are asked about each tensor. Each is bound as what it is on
this rank: parameters and buffers first, then the optimizer state that follows them (``followers``).
Where a rename makes other tensors of some, these replace them (``reshape``). On the second of two
ep ranks that have an expert of (2, 3) each::

    {"experts.w1": weight, "lr": 0.1}
    -> placed {"experts.w1": Placed("experts.w1", weight, Place(...), "'experts'")}
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from dcp_placements._torch import (
    default_write_items,
    facts_of,
    global_rank,
    has_hooks,
    is_dtensor_like,
)
from dcp_placements.bind.following_state import (
    States,
    check_orientation,
    follow,
    followed_parameter,
    states_of,
)
from dcp_placements.bind.own_chunks import (
    have_same_elements,
    listed_place,
    lists_its_chunks,
    names_its_chunks,
)
from dcp_placements.bind.reshape import RowAxes, other_tensors, reshape, row_axes, stack_like
from dcp_placements.bind.rule_and_dtensor import (
    CutSource,
    Place,
    Placed,
    Placing,
    SharedPlaces,
    format_own,
    is_tensor,
)
from dcp_placements.bind.tensor_memory import memory_key, tensor_faults
from dcp_placements.errors import CannotPlace, Fault
from dcp_placements.layout.boxes import format_boxes
from dcp_placements.names.flat import Path, RenamedValue, Reshaped, shared_name_fault
from dcp_placements.names.optimizer_state import (
    Dims,
    OptimizerStates,
    ParameterNames,
    followed_dims,
    named_lists,
    parameter_groups_in,
    unnamed_faults,
)
from dcp_placements.names.recorded_numbers import NumberedKey, Numberings, families
from dcp_placements.names.rename_results import OfWhole, Rename, dims_of_row, rule_dims, texts_of
from dcp_placements.rules.patterns import PlacementRules, Rules, asked, rule_name
from dcp_placements.rules.placement import CheckpointPlacement, IndexShard, is_flat, kind_of


def place(
    state_dict: dict[str, Any],
    rules: Rules | None,
    mappings: dict[str, Path] | None = None,
    reshaped: Reshaped | None = None,
    rename: Rename | None = None,
    *,
    has_contents: bool = True,
) -> Placing:
    """Bind every tensor of a flat state dict to its place in the checkpoint.

    The rules are never asked about 0-d tensors and non-tensors. Optimizer state follows its
    parameter dim by dim, unless a rule of its own matches; state of another shape is a replica.

    Args:
        state_dict: Flat, as ``rename_keys`` returns it.
        rules: The user's rules; None leaves every tensor its own mesh and placements.
        mappings: The path of each key in the nested dict.
        reshaped: The values that a rename turns into other tensors, if any. A stack has its first
            row as value, which is bound as what it is; the rules are asked about the stack.
        rename: The rename that the keys have gone through.
        has_contents: Whether a meta tensor, which has none, is a fault, as in a save.
    """
    mappings, reshaped = mappings or {}, reshaped or Reshaped()
    if reshaped.rows or reshaped.several:
        state_dict, mappings, reshaped = _without_absent(state_dict, mappings, reshaped)
    tied: dict[str, str] = {}
    if reshaped.several:
        reshaped, tied = _without_tied(reshaped)
    has_groups = any("param_groups" in fqn for fqn in state_dict)
    states = states_of(state_dict, mappings, reshaped, tied) if has_groups else States({}, {})
    faults: list[Fault] = []
    if has_contents:  # a save, which can give one name one tensor
        faults += [_shared_name(fqn, *values[:2]) for fqn, values in reshaped.several.items()]
        reshaped = replace(reshaped, several={})
    lists: dict[str, ParameterNames] = {}
    # The groups of flattened state name one parameter each, and have no lists.
    if has_groups and any(fqn.endswith(".params") for fqn in state_dict):
        names_of = None if rename is None else lambda key: texts_of(rename(key))
        lists, of_lists = named_lists(state_dict, names_of)
        faults += of_lists
        state_dict = {**state_dict, **lists}
    # The pattern of a None rule counts as matched, too.
    declared = rules.declared if isinstance(rules, PlacementRules) and rules.is_table else ()
    matched = dict.fromkeys(declared, 0)
    placing = Placing(faults=faults, matched=matched, state_dict=state_dict, mappings=mappings)
    placing.tied = tied
    sources = _sources(placing, rules, reshaped)
    axes_of_rows = _bind_each(placing, sources, states, reshaped)
    local_tensors = [(fqn, source.own[0]) for fqn, source in sources.items()]
    if reshaped.rows or reshaped.several:
        local_tensors += other_tensors(reshaped, sources)
    placing.faults += tensor_faults(local_tensors, placing.placed, has_contents=has_contents)
    if reshaped.rows or reshaped.wholes or reshaped.several:
        placing = reshape(placing, reshaped, axes_of_rows, rules)
        for fqn, listed in lists.items():
            placing.state_dict[fqn] = listed.numbered(placing.totals)
    if has_groups:
        placing.parameter_groups = parameter_groups_in(placing.state_dict)
        placing.states = OptimizerStates(placing.state_dict)
        placing.faults += _optimizer_faults(placing, rename)
    return placing


def _without_absent(
    state_dict: dict[str, Any], mappings: dict[str, Path], reshaped: Reshaped
) -> tuple[dict[str, Any], dict[str, Path], Reshaped]:
    """Return values, paths and what a rename makes of them, without those of other ranks' meshes.

    A stack, or a name of several values, has the first value that this rank has; it is absent where
    the rank has none of them.
    """
    state_dict, mappings = {**state_dict}, {**mappings}
    rows: dict[str, list[Any]] = {**reshaped.rows}
    several: dict[str, list[Any]] = {**reshaped.several}
    wholes: dict[str, Any] = {**reshaped.wholes}
    for values_of in (rows, several):
        for fqn, values in values_of.items():
            meshes = [of.value.device_mesh if is_dtensor_like(of.value) else None for of in values]
            has = [mesh is None or mesh.get_coordinate() is not None for mesh in meshes]
            values_of[fqn] = held = [*compress(values, has)] or values[:1]
            first = held[0]
            if first is not values[0]:
                state_dict[fqn] = first.value
                if first.path is not None:
                    mappings[fqn] = first.path
                if fqn in wholes:
                    wholes[fqn] = first
    several = {fqn: values for fqn, values in several.items() if len(values) > 1}
    return state_dict, mappings, Reshaped(rows, wholes, several)


def _without_tied(reshaped: Reshaped) -> tuple[Reshaped, dict[str, str]]:
    """Return what a rename makes of values, each memory once, and the keys of those left out.

    Args:
        reshaped: Its ``several`` may name one memory by several keys, as of tied weights.

    Returns:
        The name in the checkpoint of each key that is left out, beside the values.
    """
    tied: dict[str, str] = {}
    several = {}
    for fqn, values in reshaped.several.items():
        distinct: dict[Hashable, RenamedValue[str | OfWhole]] = {}
        for renamed in values:
            memory = memory_key(renamed.value)
            first = distinct.setdefault(renamed.key if memory is None else memory, renamed)
            if first is not renamed:
                tied[renamed.key] = fqn
        if len(distinct) > 1:
            several[fqn] = [*distinct.values()]
    return replace(reshaped, several=several), tied


def _shared_name(
    fqn: str, first: RenamedValue[str | OfWhole], other: RenamedValue[str | OfWhole]
) -> Fault:
    """Return the fault of two memories with one name in a save."""
    values = first.value, other.value
    are_copies = False
    if all(map(is_tensor, values)) and not any(map(names_its_chunks, values)):
        local, other_local = (facts_of(value)[0] for value in values)
        kinds = [(of.layout, of.device, of.dtype, of.shape) for of in (local, other_local)]
        if kinds[0] == kinds[1] and local.dim() and not local.is_meta:
            are_copies = torch.equal(local, other_local)
    return shared_name_fault(fqn, first.key, other.key, are_copies=are_copies)


def numberings(placing: Placing, numbered: Sequence[NumberedKey]) -> Numberings:
    """Return the families of keys to which a rename gives numbers on this rank.

    A family of optimizer state need not be whole: a parameter that was never stepped has none. Nor
    need a family of options, since a parameter may be frozen.

    Args:
        placing: The tensors, bound.
        numbered: The keys in which the rename gave a number, as ``rename_keys`` returns them.
    """
    heads = tuple([f"{head}param_groups." for head in placing.parameter_groups])

    def is_listed(key: str) -> bool:
        return placing.states.of(key) is None and not key.startswith(heads)

    rows = {key: total for key, total in placing.totals.items() if is_listed(key)}
    listed = families(filter(is_listed, numbered), rows)
    others = families([key for key in numbered if not is_listed(key)])
    partial = {family: numbering._replace(total=None) for family, numbering in others.items()}
    return {**partial, **listed}


def _optimizer_faults(placing: Placing, rename: Rename | None) -> list[Fault]:
    """Return the faults of optimizer state that has to follow its parameters, and cannot.

    The keys of such state have positions instead of names of parameters, while tensors are renamed,
    have rules, or list their chunks.
    """
    needs_names = rename is not None or any(
        not (placed.place.axes if placed.rule is None else placed.is_whole)
        for placed in placing.placed.values()
    )
    return unnamed_faults(placing.state_dict, placing.parameter_groups) if needs_names else []


def _sources(placing: Placing, rules: Rules | None, reshaped: Reshaped) -> dict[str, CutSource]:
    """Return the tensors of a state dict by their names in rules, each with its rule.

    Tensors of which this rank has nothing become ``absent``, and those with torch's hooks are left
    to torch's default planner.

    Args:
        placing: Has the state dict; takes in the rules that match, absent keys and faults.
        rules: The user's rules.
        reshaped: The values that a rename turns into other tensors.
    """
    sources: dict[str, CutSource] = {}
    for fqn, value in placing.state_dict.items():
        if not (isinstance(value, torch.Tensor) or is_dtensor_like(value)):
            continue
        try:
            rule, placement = _ask(rules, fqn, value, reshaped)
        except CannotPlace as error:
            placing.faults.append(error.fault(fqn, rule_name(rules, fqn)))
            continue
        if rule is not None:
            placing.matched[rule] = placing.matched.get(rule, 0) + 1
        if has_hooks(value):
            if placement is not None:
                kind = type(value).__name__
                headline = f"holds a {kind}, which names its chunks itself, and has a rule"
                placing.faults.append(CannotPlace(headline, _ONE_SPEAKS).fault(fqn, rule))
            elif not default_write_items(fqn, value):
                placing.absent.add(fqn)  # other ranks have it, as for torch's planners
            continue
        own = facts_of(value)
        if own[1] is not None and own[1].get_coordinate() is None:
            placing.absent.add(fqn)
        else:
            sources[fqn] = CutSource(value, own, rule, placement)
    return sources


def _ask(
    rules: Rules | None, fqn: str, value: Any, reshaped: Reshaped
) -> tuple[str | None, CheckpointPlacement | None]:
    """Return the name in messages of the rule that matches a tensor's key, and its placement."""
    if rules is None or not value.shape:
        return None, None
    if isinstance(rules, PlacementRules) and rules.is_table:
        match = rules.find(fqn)
        return (None, None) if match is None else (repr(match[0]), match[1])
    if fqn in reshaped.rows:
        value = stack_like(reshaped.rows[fqn], value)
    elif fqn in reshaped.wholes and reshaped.wholes[fqn].name.transposed:
        dims = rule_dims(reshaped.wholes[fqn].name, tuple(value.shape))
        shape = [value.shape[dim] for dim in dims]
        value = torch.empty(shape, dtype=value.dtype, device="meta")
    placement = asked(rules, fqn, value, rank=global_rank())
    return (None, None) if placement is None else (rule_name(rules, fqn), placement)


def _bind_each(
    placing: Placing, sources: Mapping[str, CutSource], states: States, reshaped: Reshaped
) -> dict[str, RowAxes]:
    """Bind tensors as what they are on this rank; optimizer state comes after its parameters.

    Args:
        placing: Takes in the tensors that have a place, and faults.
        sources: The tensors, by their names in rules.
        states: The optimizer state among them.
        reshaped: The values that a rename turns into other tensors.

    Returns:
        For each stack, the axis of its rule that shards each dim that its rows lie along.
    """
    places = SharedPlaces()
    axes_of_rows: dict[str, RowAxes] = {}
    first = [fqn for fqn in sources if fqn not in states.parameters]
    for fqn in (*first, *filter(sources.__contains__, states.parameters)):
        source = sources[fqn]
        try:
            parameter = None
            if fqn in states.parameters:
                check_orientation(fqn, states, sources, placing.placed, reshaped)
                parameter = followed_parameter(fqn, states, sources, placing.placed, reshaped)
            if parameter is not None:
                follower = follow(fqn, source, parameter, sources[parameter.fqn], reshaped, places)
                if follower is not None:
                    placing.placed[fqn] = follower
                    if parameter.fqn in axes_of_rows:
                        axes_of_rows[fqn] = axes_of_rows[parameter.fqn]
                    continue
                # The rule is the parameter's, and a tensor of another shape has none of its dims.
                source = source._replace(rule=None, placement=None)
            if source.placement is not None and fqn in reshaped.rows:
                row, (_, mesh, _, shape) = reshaped.rows[fqn][0].name, source.own
                axes_of_rows[fqn] = row_axes(source.placement, row, shape, mesh)
            placed = _placed(fqn, source, states, reshaped, places)
            if placed is not None:
                placing.placed[fqn] = placed
            are_many = fqn in reshaped.rows or fqn in reshaped.several
            if are_many and placed is not None and source.placement is not None:
                for other in _on_other_meshes(source, reshaped, fqn):
                    of_other = _placed(fqn, other, states, reshaped, places)
                    if of_other is None or of_other.place.chunks != placed.place.chunks:
                        raise _other_place(source, other)
        except CannotPlace as error:
            placing.faults.append(error.fault(fqn, sources[fqn].rule))
    return axes_of_rows


def _on_other_meshes(source: CutSource, reshaped: Reshaped, fqn: str) -> Iterator[CutSource]:
    """Yield the later rows of a stack, or tensors of one name, whose mesh is not the first one's.

    A rule may be right for the axes of one mesh, and contradict those of another.
    """
    for of in (*reshaped.rows.get(fqn, ()), *reshaped.several.get(fqn, ())):
        if is_dtensor_like(of.value) and of.value.device_mesh is not source.own[1]:
            yield source._replace(value=of.value, own=facts_of(of.value))


def _other_place(source: CutSource, other: CutSource) -> CannotPlace:
    """Return the refusal of tensors of one key that the rule gives different places."""
    own, others = (
        format_own(tuple(shape), mesh, placements)
        for _, mesh, placements, shape in (source.own, other.own)
    )
    return CannotPlace(
        "the rule gives two tensors of this key different places",
        f"the first:   {own}",
        f"another:     {others}",
        "way out:     one mesh for both, or meshes with the same names of axes",
    )


def _placed(
    fqn: str, source: CutSource, states: States, reshaped: Reshaped, places: SharedPlaces
) -> Placed | None:
    """Return the place of a tensor by its own sources; None for a plain one without a rule.

    Raises:
        CannotPlace: The tensor does not fit its sources, or these contradict each other.
    """
    value, own, rule, placement = source
    local, mesh, _, shape = own
    listed = listed_place(value) if mesh is None and lists_its_chunks(value) else None
    if listed is not None and (placement is None or not _declares(placement, listed)):
        return Placed(fqn, value, listed)
    if mesh is None and placement is None:
        return None
    parameter_shape = states.shapes.get(fqn)
    if parameter_shape not in (None, tuple(shape)) and is_flat(placement):
        return None  # state beside ranges of the parameter, of another shape: a replica
    origins: Dims | None = None
    ndim = 0
    if fqn in reshaped.rows:
        row = reshaped.rows[fqn][0].name
        origins, ndim = dims_of_row(row, tuple(shape)), len(shape) + len(row.axes)
    elif fqn in reshaped.wholes:
        origins, ndim = rule_dims(reshaped.wholes[fqn].name, tuple(shape)), len(shape)
        if is_flat(placement) and reshaped.wholes[fqn].name.transposed:
            raise CannotPlace(
                "is a range of its flattened tensor, and rename= transposes it",
                "way out:     no Transpose of it; export, import and diff take one of the whole",
            )
    elif parameter_shape is not None:
        ways, ndim = followed_dims(tuple(shape), parameter_shape), len(parameter_shape)
        origins = ways[0] if len(ways) == 1 else None
    place = places.bind(own, placement, origins, ndim)
    if listed is not None:
        _check_equal(listed, place)
    is_reduced = parameter_shape is not None and tuple(shape) != parameter_shape
    rule = None if placement is None else rule
    return Placed(fqn, local, place, rule, is_reduced=is_reduced)


_ONE_SPEAKS = "way out:     let one of them speak: None for this key in the rules"


def _declares(placement: CheckpointPlacement, listed: Place) -> bool:
    """Whether a placement says more than that each rank has all of the whole."""
    if placement.global_shape not in (None, listed.sharding.global_shape):
        return True
    axes = zip(placement.placements, placement.mesh.shape, strict=True)
    return any(isinstance(entry, IndexShard) or (kind_of(entry) and n > 1) for entry, n in axes)


def _check_equal(listed: Place, ruled: Place) -> None:
    """Refuse a rule by which a rank holds other elements than the tensor itself lists."""
    shapes = [place.sharding.global_shape for place in (listed, ruled)]
    if shapes[0] != shapes[1] or not have_same_elements(listed.chunks, ruled.chunks):
        itself, declared = (
            format_boxes([chunk.box for chunk in place.chunks], shape)
            for place, shape in zip((listed, ruled), shapes, strict=True)
        )
        raise CannotPlace(
            "lists chunks of its own that are not those of its rule",
            f"by itself:   {itself}",
            f"declared:    {declared}",
            _ONE_SPEAKS,
        )
