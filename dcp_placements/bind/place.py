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
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import dtensor_facts, global_rank, has_hooks, is_dtensor_like
from dcp_placements.bind.binding import BindError, Own, bind, fault_of
from dcp_placements.bind.checks import equal_values, freed_faults, nested_faults, storage_faults
from dcp_placements.bind.own_chunks import listed_place, lists_its_chunks, names_its_chunks
from dcp_placements.bind.placed import Place, Placed, Placing
from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.boxes import format_boxes
from dcp_placements.layout.sharding import Chunk, Cut, Kind, Sharding, unknown_kind
from dcp_placements.names.flat import Path, RenamedValue, Reshaped
from dcp_placements.names.optimizer_state import (
    OptimizerStates,
    possible_parameters,
    unnamed_faults,
)
from dcp_placements.names.target import (
    Parts,
    Rename,
    RenameError,
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
from dcp_placements.rules.placement import CheckpointPlacement, IndexShard, shard_dim, shards

RowsOfStacks = Mapping[str, Sequence[RenamedValue[Row]]]


def place(
    state_dict: dict[str, Any],
    rules: Rules | None,
    mappings: dict[str, Path] | None = None,
    reshaped: Reshaped | None = None,
    stored: Mapping[str, Any] | None = None,
) -> Placing:
    """Bind every tensor of a flat state dict to its place in the checkpoint.

    The rules are never asked about 0-d tensors and non-tensors. Optimizer state with the layout of
    its parameter takes the parameter's place, unless a rule of its own matches.

    Args:
        state_dict: Flat, as ``rename_keys`` returns it.
        rules: The user's; None leaves every tensor its own mesh and placements.
        mappings: The path of each key in the nested dict.
        reshaped: The values that a rename makes other tensors of. The rules are asked about a
            stack, of which the first row is the value, and is bound as what it is.
        stored: The checkpoint's metadata by key on a load; None on a save.
    """
    mappings, reshaped = mappings or {}, reshaped or Reshaped()
    placer = _Placer(rules, reshaped.rows)
    for fqn, value in state_dict.items():
        placer.add(fqn, value)
    placer.let_states_follow(state_dict)
    placing = placer.placing
    placing.faults += storage_faults(state_dict, placing.placed)
    placing.faults += nested_faults(state_dict)
    if not reshaped:
        placing.state_dict, placing.mappings = state_dict, mappings
        return placing
    own, placing.placed = placing.placed, {}
    reshaper = _Reshaper(placer, own, stored)
    for whole in reshaped.wholes.values():
        reshaper.note_whole(whole)
    for fqn, value in state_dict.items():
        if fqn in reshaped.rows:
            reshaper.add_stack(fqn, reshaped.rows[fqn], mappings.get(fqn))
        elif fqn in reshaped.wholes:
            reshaper.add_whole(reshaped.wholes[fqn])
        else:
            placing.add(fqn, value, mappings.get(fqn))
            if fqn in own:
                placing.placed[fqn] = own[fqn]
    return placing


class _Placer:
    def __init__(self, rules: Rules | None, rows: RowsOfStacks) -> None:
        self.placing = Placing()
        self.rules = rules
        self._rows = rows
        # By stack, the rule's axis that shards each dim of its rows, if any.
        self.row_axes: dict[str, tuple[Axis | None, ...]] = {}
        # Most tensors have the layout of another one: by all arguments of the binding.
        self._bound: dict[Any, Place] = {}
        # By the value of a mesh its number; nearly all tensors are on the latest few meshes.
        self._numbers: dict[Any, int] = {}
        self._latest: list[tuple[Any, int]] = []
        # By key, the placements that a callable returned.
        self._returned: dict[str, CheckpointPlacement] = {}

    def add(self, fqn: str, value: Any) -> None:
        """Bind a value, if it is a tensor and has a place."""
        is_dtensor = is_dtensor_like(value)
        if not is_dtensor and not isinstance(value, torch.Tensor):
            return
        try:
            placement, rule = self._ask(fqn, value)
            if has_hooks(value):
                if placement is not None:
                    raise BindError(
                        f"holds a {type(value).__name__}, which names its chunks itself, and a "
                        "rule speaks for it too",
                        _ONE_SPEAKS,
                    )
                return
            if not is_dtensor and lists_its_chunks(value):
                listed = listed_place(value)
                if placement is None or not _declares(placement, listed.global_shape):
                    self.placing.placed[fqn] = Placed(fqn, value, listed, None)
                    return
                bound = self._bind(value, Own(value.shape), placement)
                assert bound is not None
                _check_alike(listed, bound)
                self.placing.placed[fqn] = Placed(fqn, value, bound, rule)
            elif is_dtensor or placement is not None:
                local, own = described(value)
                place = self._bind(local, own, placement)
                if place is None:
                    self.placing.absent.add(fqn)
                else:
                    self.placing.placed[fqn] = Placed(fqn, local, place, rule, own.mesh)
        except BindError as error:
            self.placing.faults.append(fault_of(error, fqn, rule_name(self.rules, fqn)))

    def _ask(self, fqn: str, value: Any) -> tuple[CheckpointPlacement | None, str | None]:
        """Return the placement of a tensor by the rules, and the name of its rule for messages."""
        if self.rules is None or not value.shape:
            return None, None
        if isinstance(self.rules, PlacementRules):
            match = self.rules.find(fqn)
            if match is None:
                return None, None
            name, placement = repr(match[0]), match[1]
        else:
            if fqn in self._rows:
                value = _stack_of(self._rows[fqn], value)
            placement = asked(self.rules, fqn, value, rank=global_rank(), refusals=(BindError,))
            if placement is None:
                return None, None
            if not isinstance(placement, CheckpointPlacement):
                raise BindError(
                    f"was given {placement!r} by the rules, which is no CheckpointPlacement",
                    "way out:     return a CheckpointPlacement, or None to keep the tensor's own",
                )
            name = rule_name(self.rules, fqn) or ""
            self._returned[fqn] = placement
        # The pattern of a None rule counts as matched, too.
        self.placing.matched[name] = self.placing.matched.get(name, 0) + 1
        if placement is not None and fqn in self._rows:
            row = self._rows[fqn][0]
            ndim = len(row.value.shape)
            placement, self.row_axes[fqn] = _of_rows(placement, row.name, ndim)
        return placement, None if placement is None else name

    def _bind(
        self, local: torch.Tensor, own: Own, placement: CheckpointPlacement | None
    ) -> Place | None:
        key = self._key_of(own), local.shape, placement
        place = self._bound.get(key)
        if place is None:
            place = bind(own, tuple(local.shape), placement)
            if place is not None:
                self._bound[key] = place
        return place

    def _key_of(self, own: Own) -> tuple[Any, ...]:
        """Return what tensors of one layout have in common, whichever mesh objects they have."""
        for mesh, number in self._latest:
            if mesh is own.mesh:
                return own.shape, number, own.placements
        state = None if own.mesh is None else mesh_state(own.mesh)
        number = self._numbers.setdefault(state, len(self._numbers))
        self._latest = [(own.mesh, number), *self._latest[:3]]
        return own.shape, number, own.placements

    def _are_alike(self, state: Any, parameter: Any) -> bool:
        """Whether optimizer state has the layout of its parameter."""
        (local, own), (first, other) = described(state), described(parameter)
        if own.mesh is None:
            return local.shape == first.shape
        return self._key_of(own) == self._key_of(other)

    def let_states_follow(self, state_dict: Mapping[str, Any]) -> None:
        """Give optimizer state with the layout of its parameter the parameter's place.

        If a rule matches the state's own key, the state follows only if the same rule matches the
        parameter. A plain tensor has its parameter's layout if it has the local shape; a DTensor
        if it has the shape, mesh and placements.
        """
        placed = self.placing.placed
        ruled = any(one.rule is not None for one in placed.values())
        names = [row.key for rows in self._rows.values() for row in rows]
        states = OptimizerStates(state_dict, names=names)
        for fqn, value in state_dict.items():
            if is_dtensor_like(value) and not (ruled and fqn in placed and not placed[fqn].rule):
                continue
            state = states.of(fqn) if getattr(value, "shape", ()) else None
            if state is None or names_its_chunks(value):
                continue
            # Of several tensors that the optimizer may call so, the place is not known.
            parameters = [placed.get(key) for key in states.keys_of(state.parameter)]
            first = parameters[0] if parameters else None
            if first is None or any(one is None or one.place != first.place for one in parameters):
                continue
            if self._may_follow(fqn, first.fqn) and self._are_alike(value, state_dict[first.fqn]):
                local, own = described(value)
                placed[fqn] = Placed(fqn, local, first.place, first.rule, own.mesh)
                if first.fqn in self.row_axes:
                    self.row_axes[fqn] = self.row_axes[first.fqn]
                faults = self.placing.faults
                self.placing.faults = [fault for fault in faults if fault.fqn != fqn]

    def _may_follow(self, fqn: str, parameter: str) -> bool:
        """Whether no rule matches optimizer state itself, or the rule of its parameter does.

        The same rule is the same pattern or, for a callable, an equal placement. Rows follow rows
        of a stack that has as many, along the same dims.
        """
        own_rows, rows = self._rows.get(fqn), self._rows.get(parameter)
        if (own_rows and own_rows[0].name.axes) != (rows and rows[0].name.axes):
            return False
        if isinstance(self.rules, PlacementRules):
            own = self.rules.pattern_of(fqn)
            return own is None or own == self.rules.pattern_of(parameter)
        placement = self._returned.get(fqn)
        return placement is None or placement == self._returned.get(parameter)


def described(value: Any) -> tuple[torch.Tensor, Own]:
    """Return the local tensor of a tensor or DTensor-like, and its description of itself."""
    if is_dtensor_like(value):
        local, mesh, placements, shape = dtensor_facts(value)
        return local, Own(shape, mesh, placements)
    return value, Own(value.shape)


_ONE_SPEAKS = "way out:     let one of them speak: None for this key in the rules"


def _check_alike(listed: Place, bound: Place) -> None:
    """Refuse a rule by which a rank holds other chunks than the tensor itself lists."""
    if listed.global_shape != bound.global_shape or sorted(listed.chunks) != sorted(bound.chunks):
        boxes = [
            format_boxes([chunk.box for chunk in one.chunks], one.global_shape)
            for one in (listed, bound)
        ]
        raise BindError(
            "lists chunks of its own that are not those of its rule",
            f"by itself:   {boxes[0]}",
            f"declared:    {boxes[1]}",
            _ONE_SPEAKS,
        )


def _declares(placement: CheckpointPlacement, whole: tuple[int, ...]) -> bool:
    """Whether a placement says more than that each rank has all of a whole of this shape."""
    if placement.global_shape not in (None, whole):
        return True
    axes = zip(placement.placements, placement.mesh.shape, strict=True)
    return any(isinstance(entry, IndexShard) or (shards(entry) and n > 1) for entry, n in axes)


def _stack_of(rows: Sequence[RenamedValue[Row]], value: Any) -> torch.Tensor:
    """Return a tensor of the local shape of a stack, for rules that are a function."""
    dims, local = stack_dims(rows[0].name, value.shape), described(value)[0]
    shape = list(row_target(rows[0].name, tuple(local.shape)).shape)
    numbers = zip(*[row.name.indices for row in rows], strict=True)
    for dim, indices in zip(dims, numbers, strict=True):
        shape[dim] = len(indices if len(dims) == 1 else set(indices))
    return torch.empty(shape, dtype=local.dtype, device="meta")


def _of_rows(
    placement: CheckpointPlacement, row: Row, ndim: int
) -> tuple[CheckpointPlacement, tuple[Axis | None, ...]]:
    """Return the placement of each row of a stack, and the axis that shards each dim of the rows.

    Raises:
        BindError: The rule has another number of rows.
    """
    dims = stack_dims(row, (1,) * ndim)
    ndim += len(dims)
    declared = placement.global_shape
    for dim, (total, _) in zip(dims, row.axes, strict=True):
        if declared is not None and (len(declared) != ndim or declared[dim] != total):
            raise BindError(
                f"stacks {total} rows on dim {dim} of a tensor of {ndim} dims, but its rule "
                f"says global_shape={declared}"
            )
    sharding: dict[int, Axis] = {}
    for axis, entry in zip(mesh_axes(placement.mesh) or (), placement.placements, strict=False):
        if shards(entry) and -ndim <= entry.dim < ndim:
            sharding[shard_dim(entry, ndim)] = axis
    return placement.of_rows(dims, ndim), tuple([sharding.get(dim) for dim in dims])


def optimizer_faults(
    state_dict: Mapping[str, Any], placing: Placing, rename: Rename | None
) -> list[Fault]:
    """Return the faults of optimizer state that cannot follow its parameters.

    They are named by their positions, and tensors are renamed, sharded by a rule, or lists of
    chunks; or parameter groups list them by names that ``rename`` changes.
    """
    is_placed = rename is not None or any(
        (placed.rule is None and not placed.place.axes)  # a list of chunks
        or (placed.rule is not None and not placed.place.is_whole)
        for placed in placing.placed.values()
    )
    return unnamed_faults(state_dict, rename) if is_placed else []


class _Made(NamedTuple):
    """A tensor that a rename makes of tensors that have one place.

    Attributes:
        number: Of the row, which replaces ``{}`` in its key; 0 of a tensor that has no rows.
        part: Of the row, or of the tensor.
        at: The index of the row in the local tensor, for each time that it is there.
        place: Where it lies.
    """

    number: int
    part: int
    at: Sequence[int]
    place: Place


class _Reshaper:
    """Places values of this rank as rows of a stack, or as rows and parts of their own.

    Args:
        placer: What bound the tensors as what they are on this rank.
        own: Where they lie as that.
        stored: The checkpoint's metadata by key on a load; None on a save.
    """

    def __init__(
        self, placer: _Placer, own: dict[str, Placed], stored: Mapping[str, Any] | None
    ) -> None:
        self._placing = placer.placing
        self._row_axes = placer.row_axes
        self._rules = placer.rules
        self._own = own
        self._loading = stored is not None
        self._stored = stored or {}
        self._left = {fault.fqn for fault in self._placing.faults} | self._placing.absent
        # Layers have equal stacks: by the place of a tensor and what becomes of it.
        self._stacks: dict[Any, Place] = {}
        self._made: dict[Any, list[_Made]] = {}
        # By the name of a whole and by every end of it, which optimizer state may have for it.
        self._wholes: dict[str, tuple[list[_Made], int | None, int]] = {}
        # By what the names of one parameter's state have before the last dot.
        self._wholes_of_state: dict[str, tuple[list[_Made], int | None, int]] = {}

    def add_stack(self, fqn: str, held: Sequence[RenamedValue[Row]], path: Path | None) -> None:
        """Place one stack."""
        rows = sorted(held, key=lambda row: row.name.indices)
        self._placing.add(fqn, rows[0].value, path)
        tensors = [is_tensor(row.value) for row in rows]
        if not any(tensors):
            self._add_objects(fqn, held)
        elif fqn not in self._left or fqn in self._placing.absent:
            try:
                if not all(tensors) or any(names_its_chunks(row.value) for row in rows):
                    raise BindError(
                        "cannot stack what is no tensor, or names its chunks itself, with tensors",
                        f"it stacks:   {format_names([row.key for row in rows], 4)}",
                    )
                parts = _alike_tensors(rows)
                if fqn not in self._left:
                    self._add_tensors(fqn, rows, parts)
            except (BindError, RenameError) as error:
                self._placing.faults.append(fault_of(error, fqn, rule_name(self._rules, fqn)))

    def _add_objects(self, fqn: str, rows: Sequence[RenamedValue[Row]]) -> None:
        first, *others = rows
        for other in others if not self._loading else ():
            if type(first.value) is not type(other.value) or not equal_values(
                first.value, other.value
            ):
                self._placing.fault(
                    fqn,
                    f"one object cannot be stored for all rows: {first.key} is {first.value!r}, "
                    f"and {other.key} is {other.value!r}",
                    "way out:     make them equal, or leave these keys as they are in rename=",
                )
                break
        self._placing.copies[fqn] = [row.path for row in others if row.path is not None]

    def _add_tensors(
        self, fqn: str, rows: Sequence[RenamedValue[Row]], tensors: list[torch.Tensor]
    ) -> None:
        placing = self._placing
        if freed := freed_faults([(fqn, tensor) for tensor in tensors]):
            placing.faults += freed
            return
        own = self._own.get(fqn) or _plain(fqn, tensors[0])
        stored = self._stored.get(fqn)
        if not own.global_shape and tuple(getattr(stored, "size", (0,))) == ():
            # One scalar for all rows, as a stacked parameter's optimizer state has it.
            chunks = tuple([Chunk((), (), (), part) for part in range(len(rows))])
            scalar = replace(own.place, chunks=chunks)
            placing.placed[fqn] = Placed(
                fqn, tensors[0], scalar, None, parts=tensors, has_own_key=True
            )
            return
        names = [row.name for row in rows]
        axes = self._row_axes.get(fqn, (None,) * len(names[0].axes))
        key = own.place, names[0].axes, axes, tuple([name.indices for name in names])
        if key not in self._stacks:
            self._stacks[key] = _stack_place(own.place, names, axes)
        parts = [tensor.detach() for tensor in tensors]
        for dim, origin in enumerate(row_target(names[0], own.global_shape).dims):
            if origin is None:
                parts = [part.unsqueeze(dim) for part in parts]
        placing.placed[fqn] = Placed(
            fqn, tensors[0], self._stacks[key], own.rule, parts=parts, is_stack=True
        )

    def note_whole(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Note the rows and parts of a tensor; its scalars and objects have the same rows."""
        name, tensor, label = whole.name, whole.value, whole.name.stacked
        if not _has_dims(tensor) or label in self._left:
            return
        if names_its_chunks(tensor):
            self._placing.fault(label, "names its chunks itself, and cannot be unstacked")
            return
        own = self._own.setdefault(label, _plain(label, tensor))
        try:
            dim = row_dim(name, own.global_shape)
            key = own.place, dim, isinstance(name, Parts) and (name.dim, name.sizes, name.groups)
            if key not in self._made:
                self._made[key] = _rows_and_parts(own.place, name, dim)
        except RenameError as error:
            self._placing.fault(label, error.headline, *error.details)
            return
        held = self._made[key], dim, 1 if dim is None else own.global_shape[dim]
        components = label.split(".")
        self._wholes[label] = held
        ends = [".".join(components[at:]) for at in range(1, len(components))]
        for end in (*ends, *possible_parameters(label)):
            self._wholes.setdefault(end, held)
        if possible_parameters(label):
            self._wholes_of_state.setdefault(label.rpartition(".")[0], held)

    def add_whole(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Place one value, or give a scalar or an object to every row of its parameter."""
        name, placing = whole.name, self._placing
        if not _has_dims(whole.value):
            self._share(whole)
            return
        if name.stacked not in self._own or name.stacked not in self._wholes:
            return
        own, (made, dim, total) = self._own[name.stacked], self._wholes[name.stacked]
        if dim is not None:
            placing.totals.update(dict.fromkeys(name.fqns, total))
        tensor = own.tensor.detach()
        for one in made:
            fqn = name.fqns[one.part].replace("{}", str(one.number))
            held = [tensor if dim is None else tensor.select(dim, at) for at in one.at]
            parts = held if len(held) > 1 else ()
            placing.add(fqn, held[0], whole.path)
            placing.placed[fqn] = Placed(
                fqn, held[0], one.place, own.rule, parts=parts, has_own_key=True
            )

    def _share(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Give a scalar or an object to every row of its parameter that this rank holds."""
        name = whole.name
        ends = possible_parameters(name.stacked) or _grouped_parameters(name.stacked)
        # Another model's parameter may have the same name.
        found = self._wholes_of_state.get(name.stacked.rpartition(".")[0])
        found = found or next((self._wholes[end] for end in ends if end in self._wholes), None)
        if found is None:
            self._placing.fault(
                name.stacked,
                "its rows cannot be determined: it is a scalar or an object, and no tensor of its "
                "parameter is unstacked with it",
                "way out:     save it together with the parameter; or leave this key as it is in "
                "rename=",
            )
            return
        made, _, total = found
        numbers = list(dict.fromkeys([one.number for one in made]))
        if self._loading and isinstance(whole.value, torch.Tensor):
            # One scalar stands for all rows, whichever this rank holds.
            numbers = list(range(total))
        elif self._loading and not numbers and total:
            numbers = [0]
        for number in numbers:
            for fqn in name.fqns:
                key = fqn.replace("{}", str(number))
                self._placing.add(key, whole.value, whole.path)
                self._placing.shared[key] = name.stacked


def _alike_tensors(rows: Sequence[RenamedValue[Row]]) -> list[torch.Tensor]:
    """Return the local tensors of the rows of one stack.

    Raises:
        BindError: They differ in more than their numbers.
    """
    facts = [described(row.value) for row in rows]
    alike = {
        (part.dtype, part.shape, own.shape, own.placements, _standing(own)) for part, own in facts
    }
    if len(alike) > 1:
        details = [
            f"{row.key}: {part.dtype}, {own.format()}"
            for row, (part, own) in zip(rows[:4], facts, strict=False)
        ]
        raise BindError("cannot stack rows of different dtypes, shapes or placements", *details)
    return [part for part, _ in facts]


def _standing(own: Own) -> Any:
    """Return where this rank stands along the axes that cut a DTensor; None outside its mesh."""
    axes = () if own.mesh is None else mesh_axes(own.mesh)
    if axes is None:
        return None
    both = zip(axes, own.placements, strict=True)
    return tuple([(axis.size, axis.position) for axis, one in both if not one.is_replicate()])


def _plain(fqn: str, tensor: torch.Tensor) -> Placed:
    """Return a tensor that neither a rule nor a DTensor speaks for, as the whole that it is."""
    shape = tuple(tensor.shape)
    return Placed(
        fqn, tensor, Place(Sharding(shape), (), (), Sharding(shape).at(()).chunks()), None
    )


def _stack_place(own: Place, rows: Sequence[Row], axes: Sequence[Axis | None]) -> Place:
    """Return the place of a stack of which a rank has rows that each lie as ``own``.

    Args:
        own: The place of each row as a tensor by itself.
        rows: Those that the rank has, sorted.
        axes: For each dim that the rows lie along, the axis that shards it, if any.
    """
    targets = [row_target(row, own.global_shape) for row in rows]
    listed = [
        Cut(dim, *((None, 1) if axis is None else (axis.name, axis.size)), Kind.LISTED)
        for dim, axis in zip(stack_dims(rows[0], own.global_shape), axes, strict=True)
    ]
    sharding = _sharding_of(targets[0], own.sharding)
    chunks = [
        chunk for part, target in enumerate(targets) for chunk in target.chunks(own.chunks, part)
    ]
    replicating = tuple([axis for axis in own.replicating if axis not in axes])
    sharding = replace(sharding, cuts=(*listed, *sharding.cuts))
    return Place(sharding, own.axes, replicating, tuple(chunks))


def _rows_and_parts(whole: Place, name: Rows | Parts, dim: int | None) -> list[_Made]:
    """Return the rows and parts of a tensor that this rank holds.

    Args:
        whole: The place of the tensor.
        name: What becomes of it.
        dim: The dim that its rows lie along; None where it is only split.

    Raises:
        RenameError: The tensor cannot be cut into the parts.
    """
    shape = whole.global_shape
    if dim is None:
        targets = part_targets(name, shape)
        return [_Made(0, part, (0,), _place_of(one, whole)) for part, one in enumerate(targets)]
    parts = part_targets(name, removed(shape, dim))
    intervals = (
        whole.sharding.dim_at(dim, whole.positions) if whole.positions else ((0, shape[dim]),)
    )
    held: dict[int, list[int]] = {}
    for index, number in enumerate(n for each in intervals for n in range(*each)):
        if number < shape[dim]:
            held.setdefault(number, []).append(index)
    return [
        _Made(number, part, at, _place_of(target.of_row(number, dim), whole, at))
        for number, at in held.items()
        for part, target in enumerate(parts)
    ]


def _place_of(target: Target, whole: Place, at: Sequence[int] = (0,)) -> Place:
    """Return the place of a row or a part of a tensor.

    Args:
        target: The row or the part.
        whole: The place of the tensor.
        at: The index of the row in the local tensor, for each time that it is there.

    Raises:
        RenameError: A fused dim that is padded.
    """
    dims = [dim for dim in range(len(whole.global_shape)) if dim not in target.dims]
    chunks: list[Chunk] = []
    for part, index in enumerate(at):
        held = [
            chunk
            for chunk in whole.chunks
            if all(0 <= index - chunk.local_offsets[dim] < chunk.sizes[dim] for dim in dims)
        ]
        chunks += target.chunks(held, part)
    sharding = _sharding_of(target, whole.sharding)
    # Where no axis cuts a fused dim, one run of the whole is the same run on every rank.
    split = _split_dims(target, whole.global_shape)
    is_exact = not split or (
        len(target.boxes) == 1 and not any(c.dim in split for c in sharding.cuts)
    )
    return Place(sharding, whole.axes, whole.replicating, tuple(chunks), is_exact=is_exact)


def _split_dims(target: Target, shape: Sequence[int]) -> list[int]:
    """Return the dims of a target that are parts of a dim of its source."""
    return [
        dim
        for dim, origin in enumerate(target.dims)
        if origin is not None
        and any(source.sizes[origin] != shape[origin] for source, _ in target.boxes)
    ]


def _sharding_of(target: Target, whole: Sharding) -> Sharding:
    """Return how axes cut what a rename makes of a tensor that they cut.

    Of a part of a fused dim it is known which axis cuts it, but not how: parts are not shards of
    equal size.

    Raises:
        RenameError: A fused dim that is padded.
    """
    split = _split_dims(target, whole.global_shape)
    cuts: list[Cut] = []
    for cut in whole.cuts:
        if cut.dim not in target.dims:  # of a row: ranks along the axis hold other rows
            cuts.append(Cut(-1, cut.axis, cut.size, Kind.LISTED))
            continue
        dim = target.dims.index(cut.dim)
        match cut.kind:
            case Kind.PLAIN | Kind.FUSED | Kind.STRIDED | Kind.LISTED:
                moved = cut._replace(dim=dim)
                cuts.append(Cut(dim, cut.axis, cut.size) if dim in split else moved)
            case _:
                raise unknown_kind(cut.kind)
    shape = list(target.shape)
    for dim, origin in enumerate(target.dims):
        if origin is None or whole.cut_shape[origin] == whole.global_shape[origin]:
            continue
        if dim in split:
            raise RenameError(
                f"cannot be split: dim {dim} is padded, to {whole.cut_shape[origin]} of "
                f"{whole.global_shape[origin]}"
            )
        shape[dim] = whole.cut_shape[origin]
    padded = tuple(shape) if whole.padded_shape is not None else None
    return Sharding(target.shape, tuple(cuts), padded)


def _has_dims(value: Any) -> bool:
    """Whether a value is a tensor with dims; a scalar or an object has no rows of its own."""
    return is_tensor(value) and len(value.shape) > 0


def _grouped_parameters(fqn: str) -> list[str]:
    """Return the parameters that a key of ``param_groups`` may be about."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[at + 1 :]) for at, part in enumerate(parts) if part == "param_groups"]


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or has the attributes of a DTensor."""
    return isinstance(value, torch.Tensor) or is_dtensor_like(value)
