"""Optimizer state that follows its parameter: its place is the parameter's, dim by dim.

A weight (8, 3), cut over two ep ranks by ``{"ep": Shard(0)}``, and its state, on the second rank::

    model.w                (4, 3)   [4:8, 0:3] of (8, 3)
    optim.state.w.exp_avg  (4, 3)   [4:8, 0:3] of (8, 3): its parameter's place
    optim.state.w.row_var  (4, 1)   [4:8, 0:1] of (8, 1): dim 1 is reduced
    optim.state.w.col_var  (1, 3)   [0:1, 0:3] of (1, 3): a replica, as no cut of the weight is left
    optim.state.w.step     ()       no place: it has no dims

``names/optimizer_state.py`` computes which dims follow, from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from dcp_placements.bind.own_chunks import lists_its_chunks
from dcp_placements.bind.rule_and_dtensor import CutSource, Place, Placed, SharedPlaces, has_dims
from dcp_placements.errors import CannotPlace
from dcp_placements.names.flat import Path, Reshaped
from dcp_placements.names.optimizer_state import Dims, OptimizerStates, followed_dims
from dcp_placements.names.rename_results import dims_of_row, rule_dims, swapped
from dcp_placements.rules.placement import is_flat, moved_placements


class States(NamedTuple):
    """The optimizer state among the tensors of a flat state dict, by names in rules.

    With a ``critic.w`` and a ``generator.w`` beside one optimizer of ``w``, and an optimizer of a
    ``v`` that is saved without it::

        States({"optim.state.w.exp_avg": ["critic.w", "generator.w"], "other.state.v.m": []},
               {"other.state.v.m": (4, 3)})

    Attributes:
        parameters: For each state, the tensors that its parameter may be.
        shapes: For each state of an absent parameter, the shape that the parameter has over its own
            mesh.
    """

    parameters: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]


def states_of(
    state_dict: Mapping[str, Any],
    mappings: Mapping[str, Path],
    reshaped: Reshaped,
    tied: Mapping[str, str],
) -> States:
    """Return which tensors are optimizer state, and of which parameters.

    State and parameter are matched by a rank's own names, since a rename may change one and not the
    other. Where an optimizer is saved alone, the largest sizes of a parameter's state are the sizes
    of the parameter; if some state does not follow these, its shape stays unknown.

    Args:
        state_dict: Flat, with the names in rules, and with parameter groups.
        mappings: The path of each key in the nested dict, which has the rank's own names.
        reshaped: The values that a rename turns into other tensors; a stack has a key per row,
            and a tensor that fills several has one for each.
        tied: The other keys of a rank for memory in the state dict, each with its name there.
    """
    names, values = {}, {}
    for fqn, value in state_dict.items():
        key = ".".join(map(str, mappings[fqn])) if fqn in mappings else fqn
        names[key], values[key] = fqn, value
    for values_of in (reshaped.rows, reshaped.several):
        for fqn, renamed in values_of.items():
            names.update({of.key: fqn for of in renamed})
            values.update({of.key: of.value for of in renamed})
    names.update(tied)
    values.update({key: state_dict[fqn] for key, fqn in tied.items()})
    states = OptimizerStates(values)
    tensors = [key for key, value in values.items() if has_dims(value)]
    owners = {key: state.owner for key in tensors if (state := states.of(key)) is not None}
    others = [key for key in tensors if key not in owners]
    weights = states.weights_of(dict.fromkeys(owners.values()), others)
    parameters: dict[str, list[str]] = {}
    shapes: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for key, owner in owners.items():
        candidates = dict.fromkeys([names[weight] for weight in weights[owner]])
        parameters.setdefault(names[key], [*candidates])
        if not candidates:
            shapes.setdefault(owner, []).append(tuple(values[key].shape))
    largest = {owner: _largest(held) for owner, held in shapes.items()}
    of_states = {names[key]: largest[owner] for key, owner in owners.items() if owner in largest}
    return States(parameters, {fqn: shape for fqn, shape in of_states.items() if shape is not None})


def _largest(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of a parameter that is absent, by those of its state; None if unknown.

    >>> _largest([(4, 1), (4, 3), (3,)]), _largest([(4, 3), (5, 3)])
    ((4, 3), None)
    """
    ndim = max(map(len, shapes))
    sizes = tuple(map(max, zip(*[shape for shape in shapes if len(shape) == ndim], strict=True)))
    return sizes if all(followed_dims(shape, sizes) for shape in shapes) else None


def followed_parameter(
    fqn: str,
    states: States,
    sources: Mapping[str, CutSource],
    placed: Mapping[str, Placed],
    reshaped: Reshaped,
) -> Placed | None:
    """Return the parameter that optimizer state follows; None where it has its own place.

    A state has its own place where a rule matches its own key and not the parameter: the same rule
    is the same pattern or, for a callable, an equal placement. Rows follow the rows of a stack with
    as many rows along the same dims.

    Args:
        fqn: The state's name in rules.
        states: The tensors that its parameter may be.
        sources: The tensors, by their names in rules.
        placed: The tensors that are bound so far, all parameters among them.
        reshaped: The values that a rename turns into other tensors.
    """
    candidates = states.parameters[fqn]
    if not candidates or lists_its_chunks(sources[fqn].value):
        return None
    # Where the parameter may be any of several tensors, their places have to be equal.
    places = {
        tensor and (tensor.place.sharding, tensor.place.chunks): tensor
        for tensor in map(placed.get, candidates)
    }
    parameter = next(iter(places.values()))
    if parameter is None or len(places) > 1:
        return None
    own, leading = sources[fqn], sources[parameter.fqn]
    is_ruled = own.rule is not None and own[2:] != leading[2:]
    stacks = [
        reshaped.rows[key][0].name.axes if key in reshaped.rows else ()
        for key in (fqn, parameter.fqn)
    ]
    return None if is_ruled or stacks[0] != stacks[1] else parameter


def check_orientation(
    fqn: str,
    states: States,
    sources: Mapping[str, CutSource],
    placed: Mapping[str, Placed],
    reshaped: Reshaped,
) -> None:
    """Refuse optimizer state that is transposed otherwise than its parameter.

    A state of another shape, as a factored moment, has rows or columns of its parameter by its
    name. Of a transposed parameter it would have the other ones. A moment that a rule of its own
    cuts otherwise than its parameter has the parameter's shape as ``global_shape``.

    Args:
        fqn: The state's name in rules.
        states: The tensors that its parameter may be.
        sources: The tensors, by their names in rules.
        placed: The parameters, bound as what they are on this rank.
        reshaped: The values that a rename turns into other tensors.

    Raises:
        CannotPlace: It is such a state.
    """
    shape = tuple(sources[fqn].own[0].shape)
    parameters = {name: sources[name] for name in states.parameters[fqn] if name in sources}
    local_shapes = {name: tuple(source.own[0].shape) for name, source in parameters.items()}
    if not parameters and fqn in states.shapes:
        shape, local_shapes = tuple(sources[fqn].own[3]), {fqn: states.shapes[fqn]}
    for name, of_parameter in local_shapes.items():
        is_transposed = _is_transposed(name, reshaped)
        is_moment = shape == of_parameter
        if name in parameters and sources[fqn][2:] != sources[name][2:]:
            own = placed.get(name)
            whole = parameters[name].own[3] if own is None else own.place.sharding.global_shape
            is_moment |= _declared_shape(fqn, sources, reshaped) == tuple(whole)
        if is_moment or len(of_parameter) < 2 or prod(shape) == 1:
            if is_transposed != _is_transposed(fqn, reshaped) and len(shape) > 1:
                raise CannotPlace(
                    f"its parameter is {'' if is_transposed else 'not '}transposed by rename=, and "
                    f"it is {'not' if is_transposed else 'transposed'}",
                    f"parameter:   {name}",
                    "way out:     a Transpose whose pattern both match: without the levels above "
                    "the layer",
                )
        elif is_transposed:
            raise CannotPlace(
                f"has the shape {shape}, and its parameter, which rename= transposes, "
                f"{of_parameter}: rows of it would be stored as columns",
                f"parameter:   {name}",
                "way out:     leave the state out, or save without the Transpose and load so",
            )


def _declared_shape(
    fqn: str, sources: Mapping[str, CutSource], reshaped: Reshaped
) -> tuple[int, ...] | None:
    """Return the ``global_shape`` of the rule of a tensor, with its dims as on this rank."""
    placement = sources[fqn].placement
    whole = None if placement is None or is_flat(placement) else placement.global_shape
    return swapped(whole) if whole is not None and _is_transposed(fqn, reshaped) else whole


def _is_transposed(fqn: str, reshaped: Reshaped) -> bool:
    """Whether a rename transposes a tensor, by its name in rules."""
    rows = reshaped.rows.get(fqn, ())
    whole = reshaped.wholes.get(fqn)
    return any(row.name.transposed for row in rows) or (whole is not None and whole.name.transposed)


def follow(
    fqn: str,
    source: CutSource,
    parameter: Placed,
    leading: CutSource,
    reshaped: Reshaped,
    places: SharedPlaces,
) -> Placed | None:
    """Return the place of optimizer state that follows its parameter dim by dim.

    A plain tensor follows the parameter's DTensor, too; a DTensor says itself how it is cut.

    Args:
        fqn: Its name in rules.
        source: The state.
        parameter: The parameter, placed.
        leading: The parameter, with its own rule.
        reshaped: The values that a rename turns into other tensors.
        places: The places so far.

    Returns:
        None where its shape does not follow the parameter's; as any other than that of a range.

    Raises:
        CannotPlace: Its shape follows in several ways, which have different places.
    """
    local, mesh, placements, shape = source.own
    first, other, others, whole = leading.own
    is_plain = mesh is None
    if is_plain and local.shape == first.shape:  # moments, most of all
        return Placed(fqn, local, parameter.place, parameter.rule, is_follower=True)
    if lists_its_chunks(leading.value) or is_flat(leading.placement):
        return None
    of_parameter = tuple(first.shape if is_plain else whole)
    ways = followed_dims(tuple(local.shape if is_plain else shape), of_parameter)
    ndim, ruled = len(whole), tuple(range(len(whole)))  # by dim of the parameter, the rule's
    if parameter.fqn in reshaped.rows:
        row = reshaped.rows[parameter.fqn][0].name
        ndim, ruled = len(whole) + len(row.axes), dims_of_row(row, tuple(whole))
    elif parameter.fqn in reshaped.wholes:
        ruled = rule_dims(reshaped.wholes[parameter.fqn].name, tuple(whole))
    candidates: list[Place] = []
    for dims in ways:
        if is_plain:
            mesh, placements = other, moved_placements(others, dims, len(whole))
            sizes = zip(dims, local.shape, strict=True)
            shape = torch.Size([n if dim is None else whole[dim] for dim, n in sizes])
        origins: Dims = tuple([None if dim is None else ruled[dim] for dim in dims])
        own = local, mesh, placements, shape
        candidates.append(places.bind(own, leading.placement, origins, ndim))
    if len({(place.sharding, place.chunks) for place in candidates}) > 1:
        lost = [set(range(len(whole))).difference(dims).pop() for dims in ways]
        raise CannotPlace(
            f"its local shape {tuple(local.shape)} may be that of its parameter, "
            f"{tuple(of_parameter)}, without dim {' or '.join(map(str, sorted(lost)))}, which "
            "are cut differently",
            "way out:     a rule for this key itself, above that of its parameter",
        )
    if not candidates:
        return None
    return Placed(fqn, local, candidates[0], parameter.rule, is_reduced=True, is_follower=True)
