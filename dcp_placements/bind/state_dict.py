"""A rank's state dict bound to the checkpoint: one ``Placed`` per tensor that has a place.

Both planners use this, so that a save and a load compute the same places. Nothing is raised here: a
tensor that does not fit becomes a ``Fault``, and the planner raises all of them at once. Nothing is
copied: each chunk is a view of a local tensor.

Each tensor is bound as what it is on this rank. Where a rename makes other tensors of it (rows
stacked, stacks row by row, fused tensors in parts), its targets are pairs of equal boxes: what the
rank has of a target is the tensor's own chunks, moved by those pairs, in views of the tensor with
the dims of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product, starmap
from typing import Any

import torch

from dcp_placements._torch import (
    Facts,
    default_write_items,
    facts_of,
    global_rank,
    has_hooks,
    is_dtensor_like,
)
from dcp_placements.bind.lint import tensor_faults
from dcp_placements.bind.one_tensor import Place, Placed, Placing, bind, format_own
from dcp_placements.bind.own_chunks import listed_place, lists_its_chunks, names_its_chunks
from dcp_placements.errors import CannotPlace, Fault, format_names
from dcp_placements.layout.boxes import format_boxes
from dcp_placements.layout.sharding import Cut, FusedPart, Kind, Sharding
from dcp_placements.names.flat import Path, RenamedValue, Reshaped
from dcp_placements.names.numbers import NumberedKey, Numberings, families
from dcp_placements.names.optimizer_state import (
    Dims,
    OptimizerStates,
    ParameterNames,
    followed_dims,
    named_lists,
    parameter_groups,
    unnamed_faults,
)
from dcp_placements.names.renames import fqns_of
from dcp_placements.names.stacks_and_parts import (
    Parts,
    Rename,
    Row,
    Rows,
    Target,
    part_targets,
    removed,
    row_dim,
    row_target,
    stack_dims,
)
from dcp_placements.rules.mesh import Axis, mesh_axes, mesh_state
from dcp_placements.rules.patterns import PlacementRules, Rules, asked, rule_name
from dcp_placements.rules.placement import (
    CheckpointPlacement,
    IndexShard,
    kind_of,
    moved_placements,
    shard_dim,
)

Piece = tuple[int, int, Sequence[int], Place]
"""A tensor that a rename makes of another one: the number of its row, which replaces ``{}`` in its
key; its number among the parts of that row; the index of the row in the local tensor, for each time
that it is there; and where it lies."""


def place(
    state_dict: dict[str, Any],
    rules: Rules | None,
    mappings: dict[str, Path] | None = None,
    reshaped: Reshaped | None = None,
    stored: Mapping[str, Any] | None = None,
    rename: Rename | None = None,
    *,
    has_contents: bool = True,
) -> Placing:
    """Bind every tensor of a flat state dict to its place in the checkpoint.

    The rules are never asked about 0-d tensors and non-tensors. Optimizer state follows its
    parameter dim by dim, unless a rule of its own matches; state of another shape is a replica.

    Args:
        state_dict: Flat, as ``rename_keys`` returns it.
        rules: The user's; None leaves every tensor its own mesh and placements.
        mappings: The path of each key in the nested dict.
        reshaped: The values that a rename makes other tensors of, if any. The rules are asked about
            a stack, of which the first row is the value, and is bound as what it is.
        stored: The checkpoint's metadata by key on a load; None on a save.
        rename: What has renamed the keys.
        has_contents: Whether a save refuses meta tensors.
    """
    faults: list[Fault] = []
    lists: dict[str, ParameterNames] = {}
    parameters, alone = _parameters(state_dict, mappings or {}, reshaped)
    # Of flattened state, whose groups name one parameter each, there are no lists to look for.
    if any(fqn.endswith(".params") for fqn in state_dict):
        names_of = None if rename is None else lambda key: fqns_of(rename(key))
        lists, faults = named_lists(state_dict, names_of)
        state_dict = {**state_dict, **lists}
    # The pattern of a None rule counts as matched, too.
    declared = rules.declared if isinstance(rules, PlacementRules) else ()
    placing = Placing(matched=dict.fromkeys(declared, 0), faults=faults)
    placer = _Placer(placing, rules, reshaped or Reshaped(), stored, state_dict, alone)
    for fqn in state_dict:
        if fqn not in parameters:
            placer.add(fqn)
    for fqn, names in parameters.items():
        placer.add(fqn, names)
    is_save = stored is None and has_contents
    placing.faults += tensor_faults(placer.locals, placing.placed, is_save=is_save)
    if reshaped:
        placer.reshape(state_dict, mappings or {})
        for fqn, listed in lists.items():
            placing.state_dict[fqn] = listed.numbered(placing.totals)
    else:
        placing.state_dict, placing.mappings = state_dict, mappings or {}
    if any("param_groups" in fqn for fqn in placing.state_dict):
        placing.groups = parameter_groups(placing.state_dict)
        placing.faults += _optimizer_faults(placing, rename)
    return placing


def numberings(placing: Placing, numbered: Sequence[NumberedKey]) -> Numberings:
    """Return the families of keys to which a rename gives numbers on this rank.

    Optimizer state counts for nothing: a parameter that was never stepped has none.

    Args:
        placing: The tensors, bound.
        numbered: The keys in which the rename gave a number, as ``rename_keys`` returns them.
    """
    states = OptimizerStates(placing.state_dict)
    heads = tuple([f"{head}param_groups." for head in placing.groups])

    def is_listed(key: str) -> bool:
        return states.of(key) is None and not key.startswith(heads)

    rows = {key: total for key, total in placing.totals.items() if is_listed(key)}
    return families(filter(is_listed, numbered), rows)


def _parameters(
    state_dict: Mapping[str, Any], mappings: Mapping[str, Path], reshaped: Reshaped | None
) -> tuple[dict[str, list[str]], dict[str, tuple[int, ...]]]:
    """Map each tensor of optimizer state to the tensors that its parameter may be.

    A rank's own names say which belong together: a rename may change one and not the other. Of an
    optimizer that is saved alone the largest sizes of a parameter's state are those of the
    parameter, unless one has others: then nothing is known of it.

    Args:
        state_dict: Flat, with the names in rules.
        mappings: The path of each key in the nested dict, which has the rank's own names.
        reshaped: The values that a rename makes other tensors of; stacks have several names.

    Returns:
        The tensors, by the state's name in rules; and without them the shape that the parameter
        must have.
    """
    if not any("param_groups" in fqn for fqn in state_dict):
        return {}, {}
    names, own = {}, {}
    for fqn, value in state_dict.items():
        key = ".".join(map(str, mappings[fqn])) if fqn in mappings else fqn
        names[key], own[key] = fqn, value
    for fqn, rows in reshaped.rows.items() if reshaped else ():
        names.update({row.key: fqn for row in rows})
        own.update({row.key: row.value for row in rows})
    states = OptimizerStates(own)
    tensors = [key for key, value in own.items() if _has_dims(value)]
    owners = {key: state.owner for key in tensors if (state := states.of(key)) is not None}
    others = [key for key in tensors if key not in owners]
    weights = states.weights_of(dict.fromkeys(owners.values()), others)
    found: dict[str, list[str]] = {}
    for key, owner in owners.items():
        found.setdefault(names[key], [*dict.fromkeys([names[one] for one in weights[owner]])])
    shapes: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for key, owner in owners.items():
        if not weights[owner]:
            shapes.setdefault(owner, []).append(tuple(own[key].shape))
    largest = {}
    for owner, held in shapes.items():
        ndim = max(map(len, held))
        sizes = tuple(map(max, zip(*[one for one in held if len(one) == ndim], strict=True)))
        if all(followed_dims(one, sizes) for one in held):
            largest[owner] = sizes
    alone = {names[key]: largest[owner] for key, owner in owners.items() if owner in largest}
    return found, alone


def _optimizer_faults(placing: Placing, rename: Rename | None) -> list[Fault]:
    """Return the faults of optimizer state that has to follow its parameters, and cannot.

    They are named by their positions; and tensors are renamed, ruled, or lists of chunks.
    """
    needs_names = rename is not None or any(
        not (one.place.axes if one.rule is None else one.is_whole)
        for one in placing.placed.values()
    )
    return unnamed_faults(placing.state_dict, placing.groups) if needs_names else []


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or has the attributes of a DTensor."""
    return isinstance(value, torch.Tensor) or is_dtensor_like(value)


@dataclass(slots=True)
class _Placer:
    """Binds the tensors of one state dict, and then makes of them what a rename says.

    Attributes:
        placing: The result.
        rules: The user's.
        reshaped: The values that a rename makes other tensors of.
        stored: The checkpoint's metadata by key on a load; None on a save.
        values: The state dict, with the names in rules.
        alone: The shapes of parameters that are not there, by the names of their state.
        locals: Local tensors by the key of the rules; a stack has several.
    """

    placing: Placing
    rules: Rules | None
    reshaped: Reshaped
    stored: Mapping[str, Any] | None
    values: Mapping[str, Any]
    alone: Mapping[str, tuple[int, ...]]
    locals: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    # Most tensors have the layout of another one: by all arguments of the binding.
    _bound: dict[Any, Place] = field(default_factory=dict)
    # By key, the rule that matched and its placement.
    _answers: dict[str, tuple[str, CheckpointPlacement | None]] = field(default_factory=dict)
    # Of moments of most layers the placement is the same: by that of the parameter and its dims.
    _of_dims: dict[Any, CheckpointPlacement] = field(default_factory=dict)
    # By stack, the rule's axis that shards each dim of its rows, if any.
    _row_axes: dict[str, tuple[Axis | None, ...]] = field(default_factory=dict)
    # What lies as what it is on this rank, before it becomes something else.
    _own: dict[str, Placed] = field(default_factory=dict)
    # Layers have equal stacks: by the place of a tensor and what becomes of it.
    _stacks: dict[Any, Place] = field(default_factory=dict)
    _pieces: dict[Any, list[Piece]] = field(default_factory=dict)

    def add(self, fqn: str, parameters: Sequence[str] = ()) -> None:
        """Bind a value, if it is a tensor and has a place.

        Args:
            fqn: Its name in rules.
            parameters: The tensors that its parameter may be, if it is optimizer state.
        """
        value = self.values[fqn]
        if not (isinstance(value, torch.Tensor) or is_dtensor_like(value)):
            return
        placed, rows_of, before = self.placing.placed, self.reshaped.rows, len(self.locals)
        try:
            placement, rule = (None, None) if self.rules is None else self._ask(fqn, value)
            if has_hooks(value):
                if placement is None:
                    if not default_write_items(fqn, value):
                        self.placing.absent.add(fqn)  # as to torch's planners, other ranks have it
                    return
                kind = type(value).__name__
                headline = f"holds a {kind}, which names its chunks itself, and has a rule"
                raise CannotPlace(headline, _ONE_SPEAKS)
            facts = facts_of(value)
            self.locals.append((fqn, facts[0]))
            for row in rows_of[fqn][1:] if fqn in rows_of else ():
                if is_tensor(row.value) and not has_hooks(row.value):
                    self.locals.append((fqn, facts_of(row.value)[0]))
            listed = listed_place(value) if facts[1] is None and lists_its_chunks(value) else None
            parameter = None if names_its_chunks(value) else self._leads(fqn, parameters)
            if parameter is not None:
                follower = self._following(fqn, facts, parameter)
                if follower is not None:
                    placed[fqn] = follower
                    return
                # The rule is the parameter's, and a tensor of another shape has none of its dims.
                placement = rule = None
            if listed is not None and (placement is None or not _declares(placement, listed)):
                placed[fqn] = Placed(fqn, value, listed)
            elif facts[1] is not None or placement is not None:
                dims: tuple[int, ...] = ()
                if placement is not None and fqn in rows_of:
                    name, shape = rows_of[fqn][0].name, facts[3]
                    dims = stack_dims(name, shape)
                    self._row_axes[fqn] = _axes_of_rows(placement, name, dims, len(shape))
                bound = self._bind(facts, placement, dims)
                if bound is None:
                    self.placing.absent.add(fqn)
                    del self.locals[before:]
                    return
                if listed is not None:
                    _check_alike(listed, bound)
                is_reduced = fqn in self.alone and tuple(facts[3]) != self.alone[fqn]
                placed[fqn] = Placed(fqn, facts[0], bound, rule, is_reduced=is_reduced)
        except CannotPlace as error:
            self.placing.faults.append(error.fault(fqn, rule_name(self.rules, fqn)))

    def _ask(self, fqn: str, value: Any) -> tuple[CheckpointPlacement | None, str | None]:
        """Return the placement of a tensor by the rules, and the name of its rule for messages."""
        assert self.rules is not None
        if not value.shape:
            return None, None
        if isinstance(self.rules, PlacementRules):
            match = self.rules.find(fqn)
            if match is None:
                return None, None
            name, placement = repr(match[0]), match[1]
        else:
            if fqn in self.reshaped.rows:
                value = _stack_of(self.reshaped.rows[fqn], value)
            placement = asked(self.rules, fqn, value, rank=global_rank())
            if placement is None:
                return None, None
            name = rule_name(self.rules, fqn) or ""
        self.placing.matched[name] = self.placing.matched.get(name, 0) + 1
        self._answers[fqn] = name, placement
        if placement is not None and fqn in self.alone and fqn not in self.reshaped.rows:
            dims, *others = followed_dims(tuple(value.shape), self.alone[fqn])
            placement = placement if others else self._moved(placement, dims, self.alone[fqn])
        return (None, None) if placement is None else (placement, name)

    def _bind(
        self, facts: Facts, placement: CheckpointPlacement | None, rows: Sequence[int] = ()
    ) -> Place | None:
        """Return the place of a tensor; None on a rank that holds no part.

        Args:
            facts: What it says of itself.
            placement: That of its rule.
            rows: Of a row of a stack, the dims of the stack that its rows lie along.
        """
        local, mesh, placements, shape = facts
        state = None if mesh is None else mesh_state(mesh)
        key = shape, local.shape, state, placements, placement, rows
        place = self._bound.get(key)
        if place is None:
            place = bind(shape, tuple(local.shape), placement, mesh, placements, rows)
            if place is not None:
                self._bound[key] = place
        return place

    def _leads(self, fqn: str, parameters: Sequence[str]) -> Placed | None:
        """Return the parameter that optimizer state follows; None where it has its own place.

        That is so where a rule matches the state's own key and not the parameter: the same rule is
        the same pattern or, for a callable, an equal placement. Rows follow rows of a stack that
        has as many, along the same dims.
        """
        # Of several tensors that the optimizer may call so, the place is not known.
        places = {
            one and (one.place.sharding, one.place.chunks): one
            for one in map(self.placing.placed.get, parameters)
        }
        parameter = next(iter(places.values()), None)
        if parameter is None or len(places) > 1:
            return None
        rows_of, own = self.reshaped.rows, self._answers.get(fqn)
        names = fqn, parameter.fqn
        axes = {rows_of[one][0].name.axes if one in rows_of else () for one in names}
        is_ruled = own is not None and own != self._answers.get(parameter.fqn)
        return None if is_ruled or len(axes) > 1 else parameter

    def _following(self, fqn: str, facts: Facts, parameter: Placed) -> Placed | None:
        """Return where optimizer state lies that follows its parameter dim by dim.

        A plain tensor follows the parameter's DTensor, too; a DTensor says itself how it is cut.

        Returns:
            None where its shape is none of those that follow.

        Raises:
            CannotPlace: Its shape fits in several ways, which lie differently.
        """
        local, mesh, placements, shape = facts
        first, other, others, whole = facts_of(self.values[parameter.fqn])
        is_plain = mesh is None
        if is_plain and local.shape == first.shape:  # moments, most of all
            if fqn in self.reshaped.rows and parameter.fqn in self._row_axes:
                self._row_axes[fqn] = self._row_axes[parameter.fqn]
            return Placed(fqn, local, parameter.place, parameter.rule)
        if lists_its_chunks(self.values[parameter.fqn]):
            return None
        of_parameter = tuple(first.shape if is_plain else whole)
        ways = followed_dims(tuple(local.shape if is_plain else shape), of_parameter)
        _, placement = self._answers.get(parameter.fqn, ("", None))
        found: list[tuple[Place | None, tuple[Axis | None, ...]]] = []
        for dims in ways:
            if is_plain:
                mesh, placements = other, moved_placements(others, dims, len(whole))
                sizes = zip(dims, local.shape, strict=True)
                shape = torch.Size([n if dim is None else whole[dim] for dim, n in sizes])
            found.append(self._way(fqn, (local, mesh, placements, shape), placement, dims, whole))
        places = {place and (place.sharding, place.chunks) for place, _ in found}
        if len(places) > 1:
            lost = [set(range(len(whole))).difference(dims).pop() for dims in ways]
            raise CannotPlace(
                f"its local shape {tuple(local.shape)} may be that of its parameter, "
                f"{tuple(of_parameter)}, without dim {' or '.join(map(str, sorted(lost)))}, which "
                "are cut differently",
                "way out:     a rule for this key itself, above that of its parameter",
            )
        place, axes = found[0] if found else (None, ())
        if place is None:
            return None
        if axes:
            self._row_axes[fqn] = axes
        return Placed(fqn, local, place, parameter.rule, is_reduced=True)

    def _way(
        self,
        fqn: str,
        facts: Facts,
        placement: CheckpointPlacement | None,
        dims: Dims,
        whole: Sequence[int],
    ) -> tuple[Place | None, tuple[Axis | None, ...]]:
        """Return where state lies, and the axes of its rows, that follows some dims.

        Args:
            fqn: Its name in rules.
            facts: What it says of itself, or its parameter for it.
            placement: That of the parameter's rule.
            dims: By dim of the state, the parameter's.
            whole: The shape of the parameter over its own mesh.
        """
        rows: tuple[int, ...] = ()
        origins, ndim = dims, len(whole)
        if fqn in self.reshaped.rows:
            name = self.reshaped.rows[fqn][0].name
            rows, rows_there = stack_dims(name, facts[3]), stack_dims(name, tuple(whole))
            ndim += len(rows)
            rest = [dim for dim in range(ndim) if dim not in rows_there]
            own = iter([None if dim is None else rest[dim] for dim in dims])
            at = dict(zip(rows, rows_there, strict=True))
            origins = tuple([at[i] if i in at else next(own) for i in range(len(dims) + len(at))])
        if placement is None:
            return self._bind(facts, None), ()
        placement = self._moved(placement, origins, range(ndim))
        axes = _axes_of_rows(placement, name, rows, len(dims)) if rows else ()
        return self._bind(facts, placement, rows), axes

    def _moved(
        self, placement: CheckpointPlacement, origins: Dims, whole: Sequence[int]
    ) -> CheckpointPlacement:
        """Return the placement of state of which the dims are some of a parameter's.

        Args:
            placement: The parameter's.
            origins: By dim of the state, the parameter's; None of one that is reduced.
            whole: One value for each dim of the parameter.
        """
        if origins == tuple(range(len(whole))):
            return placement
        key = placement, origins, len(whole)
        if key not in self._of_dims:
            self._of_dims[key] = placement.of_dims(origins, len(whole))
        return self._of_dims[key]

    def reshape(self, state_dict: Mapping[str, Any], mappings: Mapping[str, Path]) -> None:
        """Put what a rename makes of the bound tensors in their place."""
        placing = self.placing
        self._own, placing.placed = placing.placed, {}
        refused = {fault.fqn for fault in placing.faults}
        unbound = refused | placing.absent
        for fqn, value in state_dict.items():
            path, whole = mappings.get(fqn), self.reshaped.wholes.get(fqn)
            rows = sorted(self.reshaped.rows.get(fqn, ()), key=lambda row: row.name.indices)
            if whole is None:
                placing.add(fqn, rows[0].value if rows else value, path)
            try:
                if rows and not any(is_tensor(row.value) for row in rows):
                    raise CannotPlace(
                        f"{rows[0].key} is an object, and rename= makes a row of a stack of it: "
                        "only tensors are stacked",
                        _OF_ONE,
                    )
                elif rows and fqn not in refused:
                    self._add_stack(fqn, rows)
                elif whole is not None and not _has_dims(value):
                    kind = "a scalar" if is_tensor(value) else "an object"
                    raise CannotPlace(
                        f"is {kind}, and rename= makes several tensors of it: it has no rows and "
                        "no parts",
                        _OF_ONE,
                    )
                elif whole is not None and fqn not in unbound:
                    self._add_pieces(whole)
                elif whole is None and not rows and fqn in self._own:
                    placing.placed[fqn] = self._own[fqn]
            except CannotPlace as error:
                placing.faults.append(error.fault(fqn, rule_name(self.rules, fqn)))

    def _add_stack(self, fqn: str, rows: Sequence[RenamedValue[Row]]) -> None:
        """Place one stack, of which the rank has some rows."""
        parts = _alike_tensors(rows)
        if fqn in self.placing.absent:
            return
        own = self._lies(fqn, rows[0].value)
        names = [row.name for row in rows]
        axes = self._row_axes.get(fqn, (None,) * len(names[0].axes))
        key = own.place, names[0].axes, axes, tuple([name.indices for name in names])
        if key not in self._stacks:
            self._stacks[key] = _stack_place(own.place, names, axes)
        views = [part.detach() for part in parts]
        for dim, origin in enumerate(row_target(names[0], own.place.sharding.global_shape).dims):
            if origin is None:
                views = [view.unsqueeze(dim) for view in views]
        self.placing.placed[fqn] = Placed(fqn, parts[0], self._stacks[key], own.rule, views)

    def _lies(self, fqn: str, value: Any) -> Placed:
        """Return where a tensor lies as what it is; one that nothing speaks for is a whole."""
        if fqn not in self._own:
            local = facts_of(value)[0]
            whole = self._bind((local, None, (), local.shape), None)
            assert whole is not None
            self._own[fqn] = Placed(fqn, local, whole)
        return self._own[fqn]

    def _add_pieces(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Place the rows and parts of a tensor that this rank has."""
        name, placing = whole.name, self.placing
        if names_its_chunks(whole.value):
            raise CannotPlace("names its chunks itself, and cannot be unstacked")
        own = self._lies(name.stacked, whole.value)
        dim, total = row_dim(name, own.place.sharding.global_shape), 1
        if dim is not None:
            total = own.place.sharding.global_shape[dim]
            placing.totals.update(dict.fromkeys(name.fqns, total))
        key = own.place, dim, isinstance(name, Parts) and (name.dim, name.sizes, name.groups)
        if key not in self._pieces:
            self._pieces[key] = _pieces_of(own.place, name, dim)
        tensor = own.tensor.detach()
        for number, part, at, place in self._pieces[key]:
            fqn = name.fqns[part].replace("{}", str(number))
            held = [tensor if dim is None else tensor.select(dim, index) for index in at]
            copies = held if len(held) > 1 else ()
            placing.add(fqn, held[0], whole.path)
            placing.placed[fqn] = Placed(fqn, held[0], place, own.rule, copies, has_own_key=True)


_ONE_SPEAKS = "way out:     let one of them speak: None for this key in the rules"
_OF_ONE = (
    "way out:     leave it out, or give both sides one form of experts, so that no rename= touches "
    "optimizer state; offline export_safetensors(optimizer=True, rename=) converts it. Without "
    "flatten_optimizer_state_dict=True one lr is that of all parameters of a group"
)


def _has_dims(value: Any) -> bool:
    """Whether a value is a tensor with dims; a scalar or an object has no rows of its own."""
    return is_tensor(value) and len(value.shape) > 0


def _check_alike(listed: Place, bound: Place) -> None:
    """Refuse a rule by which a rank holds other chunks than the tensor itself lists."""
    shapes = [one.sharding.global_shape for one in (listed, bound)]
    if shapes[0] != shapes[1] or sorted(listed.chunks) != sorted(bound.chunks):
        itself, declared = (
            format_boxes([chunk.box for chunk in one.chunks], shape)
            for one, shape in zip((listed, bound), shapes, strict=True)
        )
        raise CannotPlace(
            "lists chunks of its own that are not those of its rule",
            f"by itself:   {itself}",
            f"declared:    {declared}",
            _ONE_SPEAKS,
        )


def _declares(placement: CheckpointPlacement, listed: Place) -> bool:
    """Whether a placement says more than that each rank has all of the whole."""
    if placement.global_shape not in (None, listed.sharding.global_shape):
        return True
    axes = zip(placement.placements, placement.mesh.shape, strict=True)
    return any(isinstance(entry, IndexShard) or (kind_of(entry) and n > 1) for entry, n in axes)


def _stack_of(rows: Sequence[RenamedValue[Row]], value: Any) -> torch.Tensor:
    """Return a tensor of the local shape of a stack, for rules that are a function."""
    dims, local = stack_dims(rows[0].name, value.shape), facts_of(value)[0]
    shape = list(row_target(rows[0].name, tuple(local.shape)).shape)
    numbers = zip(*[row.name.indices for row in rows], strict=True)
    for dim, indices in zip(dims, numbers, strict=True):
        shape[dim] = len(indices if len(dims) == 1 else set(indices))
    return torch.empty(shape, dtype=local.dtype, device="meta")


def _axes_of_rows(
    placement: CheckpointPlacement, row: Row, dims: Sequence[int], ndim: int
) -> tuple[Axis | None, ...]:
    """Return the axis that shards each dim of a stack that its rows lie along, if any.

    Args:
        placement: Of the stack.
        row: One of the rows.
        dims: Those dims.
        ndim: Dims of the row.

    Raises:
        CannotPlace: The rule has another number of rows.
    """
    ndim += len(dims)
    declared = placement.global_shape
    for dim, (total, _) in zip(dims, row.axes, strict=True):
        if declared is not None and (len(declared) != ndim or declared[dim] != total):
            raise CannotPlace(
                f"stacks {total} rows on dim {dim} of a tensor of {ndim} dims, but its rule "
                f"says global_shape={declared}"
            )
    sharding: dict[int, Axis] = {}
    for axis, entry in zip(mesh_axes(placement.mesh) or (), placement.placements, strict=False):
        if kind_of(entry) and -ndim <= entry.dim < ndim:
            sharding[shard_dim(entry, ndim)] = axis
    return tuple([sharding.get(dim) for dim in dims])


def _alike_tensors(rows: Sequence[RenamedValue[Row]]) -> list[torch.Tensor]:
    """Return the local tensors of the rows of one stack.

    Raises:
        CannotPlace: They are not all tensors, or differ in more than their numbers.
    """
    if not all(is_tensor(row.value) and not names_its_chunks(row.value) for row in rows):
        raise CannotPlace(
            "cannot stack what is no tensor, or names its chunks itself, with tensors",
            f"it stacks:   {format_names([row.key for row in rows], 4)}",
        )
    facts = [facts_of(row.value) for row in rows]
    alike = set()
    for part, mesh, placements, shape in facts:
        # Meshes may differ in the ranks, and not in where this rank stands along what cuts.
        axes = None if mesh is None else mesh_axes(mesh)
        both = zip(axes or (), placements, strict=False)
        stands = [(x.size, x.position) for x, one in both if not one.is_replicate()]
        alike.add((part.dtype, part.shape, shape, placements, tuple(stands)))
    if len(alike) > 1:
        details = [
            f"{row.key}: {part.dtype}, {format_own(shape, mesh, placements)}"
            for row, (part, mesh, placements, shape) in zip(rows[:4], facts, strict=False)
        ]
        raise CannotPlace("cannot stack rows of different dtypes, shapes or placements", *details)
    return [part for part, *_ in facts]


def _stack_place(own: Place, rows: Sequence[Row], axes: Sequence[Axis | None]) -> Place:
    """Return the place of a stack of which a rank has rows that each lie as ``own``.

    Args:
        own: The place of each row as a tensor by itself.
        rows: Those that the rank has, sorted.
        axes: For each dim that the rows lie along, the axis that shards it, if any.
    """
    shape = own.sharding.global_shape
    listed = [
        Cut(
            dim, *((None, 1) if axis is None else (axis.name, axis.size)), Kind.LISTED, by_rule=True
        )
        for dim, axis in zip(stack_dims(rows[0], shape), axes, strict=True)
    ]
    sharding = _moved(own.sharding, row_target(rows[0], shape))
    chunks = [
        chunk
        for part, row in enumerate(rows)
        for chunk in row_target(row, shape).chunks(own.chunks, part)
    ]
    sharding = replace(sharding, cuts=(*listed, *sharding.cuts))
    return Place(sharding, own.axes, tuple(chunks))


def _pieces_of(whole: Place, name: Rows | Parts, dim: int | None) -> list[Piece]:
    """Return the rows and parts of a tensor that this rank holds.

    Args:
        whole: The place of the tensor.
        name: What becomes of it.
        dim: The dim that its rows lie along; None where it is only split.

    Raises:
        CannotPlace: The tensor cannot be cut into the parts.
    """
    shape = whole.sharding.global_shape
    parts = part_targets(name, shape if dim is None else removed(shape, dim))
    held: dict[int, list[int]] = {0: [0]} if dim is None else {}
    rows = () if dim is None else whole.sharding.dim_at(dim, whole.positions)
    for index, number in enumerate(chain.from_iterable(starmap(range, rows))):
        if dim is not None and number < shape[dim]:
            held.setdefault(number, []).append(index)
    pieces: list[Piece] = []
    for (number, at), (part, target) in product(held.items(), enumerate(parts)):
        if dim is not None:
            target = target.of_row(number, dim)
        chunks = [
            moved
            for copy, index in enumerate(at)
            for chunk in whole.chunks
            if dim is None or 0 <= index - chunk.local_offsets[dim] < chunk.sizes[dim]
            for moved in target.chunks([chunk], copy)
        ]
        boxes = [source for source, _ in target.boxes]
        split = [
            at
            for at, origin in enumerate(target.dims)
            if origin is not None and any(box.sizes[origin] != shape[origin] for box in boxes)
        ]
        of = FusedPart(part, name.sizes, name.groups) if isinstance(name, Parts) else None
        sharding = _moved(whole.sharding, target, split, of)
        # Where no axis cuts a fused dim, one run of the whole is the same run on every rank.
        is_cut = any(cut.dim in split for cut in sharding.cuts)
        is_exact = not split or (len(boxes) == 1 and not is_cut)
        place = Place(sharding, whole.axes, tuple(chunks), is_exact=is_exact)
        pieces.append((number, part, at, place))
    return pieces


def _moved(
    whole: Sharding, target: Target, split: Sequence[int] = (), of: FusedPart | None = None
) -> Sharding:
    """Return how axes cut what a rename makes of a tensor that they cut.

    The cut of a fused dim stays that of the whole dim: parts are not shards of equal size.

    Args:
        whole: How they cut the tensor.
        target: What becomes of it.
        split: The dims of the target that are parts of a dim of the tensor.
        of: Which part it is.

    Raises:
        CannotPlace: A fused dim that is padded.
    """
    cuts: list[Cut] = []
    for cut in whole.cuts:
        if cut.dim not in target.dims:  # of a row: ranks along the axis hold other rows
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
