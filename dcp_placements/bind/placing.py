"""A rank's flat state dict bound to the checkpoint: one ``Placed`` per tensor that has a place.

Both planners use this, so that a save and a load compute the same places. Nothing is raised here: a
tensor that does not fit becomes a ``Fault``, and the planner raises all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from dcp_placements._torch import DTensor, dtensor_facts, global_rank, has_hooks, is_dtensor_like
from dcp_placements.bind.aliases import nested_faults, storage_faults
from dcp_placements.bind.binding import BindError, Own, Place
from dcp_placements.bind.own_chunks import (
    check_equal,
    listed_place,
    lists_its_chunks,
    names_its_chunks,
)
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.bind.rule_and_dtensor import Sources, fault_of, sources_of
from dcp_placements.errors import Fault
from dcp_placements.names.flat import RenamedValue
from dcp_placements.names.optimizer_state import (
    OptimizerStates,
    listed_faults,
    positional_faults,
)
from dcp_placements.names.target import Rename, Row, row_target, stack_dims
from dcp_placements.rules.mesh import Axis, Mesh, MeshNumbers, mesh_axes
from dcp_placements.rules.patterns import PlacementRules, Rules, asked, rule_name
from dcp_placements.rules.placement import CheckpointPlacement, IndexShard, shard_dim, shards

RowsOfStacks = Mapping[str, Sequence[RenamedValue[Row]]]


def place(
    state_dict: Mapping[str, Any], rules: Rules | None, rows: RowsOfStacks = MappingProxyType({})
) -> Placing:
    """Bind every tensor of a flat state dict to its place in the checkpoint.

    The rules are never asked about 0-d tensors and non-tensors. Optimizer state with the layout of
    its parameter takes the parameter's place, unless a rule of its own matches.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        rules: The user's; None leaves every tensor its own mesh and placements.
        rows: By key, the rows that this rank has of a stack. The rules are asked about the stack;
            the first row is the value, and is bound as what it is.
    """
    placer = Placer(rules, Placing(), rows)
    placer.add_all(state_dict)
    placer.let_states_follow(state_dict)
    placer.placing.faults += storage_faults(state_dict, placer.placing.placed)
    placer.placing.faults += nested_faults(state_dict)
    return placer.placing


class Placer:
    def __init__(self, rules: Rules | None, placing: Placing, rows: RowsOfStacks) -> None:
        self.rules = rules
        self.placing = placing
        self.rows = rows
        # By stack and its placement, that of a row, and the axes that shard the dims of the rows.
        self._of_rows: dict[Any, tuple[CheckpointPlacement, tuple[int, ...]]] = {}
        # Most tensors have the layout of another one: by all arguments of the binding.
        self._bound: dict[Any, Place | None] = {}
        # Tensors of many shapes are cut in a few ways: by dims, mesh and rule the latest.
        self._sources: dict[Any, tuple[Any, Sources | None]] = {}
        self.mesh_number = MeshNumbers()
        self._axes: dict[tuple[int, bool], tuple[Axis, ...] | None] = {}
        self._dtensor_kinds: dict[type, bool] = {DTensor: True}
        self._names: dict[str, str] = {}
        # By key, the placements that a callable returned.
        self._returned: dict[str, CheckpointPlacement] = {}

    def add_all(self, state_dict: Mapping[str, Any]) -> None:
        """Bind every value that is a tensor and has a place."""
        recent, number = None, 0
        # By shapes and mesh, the latest placements and their place: these are hashed slowly.
        latest: dict[Any, tuple[Any, Place | None]] = {}
        unruled, placed = self.rules is None, self.placing.placed
        for fqn, value in state_dict.items():
            if unruled and type(value) is DTensor:
                # The common case, inline: more calls for each of thousands of tensors are slow.
                local, mesh, placements, whole = dtensor_facts(value)
                if mesh is not recent:
                    recent, number = mesh, self.mesh_number(mesh)
                shapes = whole, local.shape, number
                equal, place = latest.get(shapes, (None, None))
                if type(local) is torch.Tensor:
                    if equal != placements:
                        try:
                            place = self._dtensor_place(shapes, mesh, placements, None)
                        except BindError as error:
                            self._fault(error, fqn)
                            continue
                        latest[shapes] = placements, place
                    if place is None:
                        self.placing.absent.add(fqn)
                    else:
                        placed[fqn] = Placed(fqn, local, place, None, mesh)
                    continue
            self._add(fqn, value)

    def _add(self, fqn: str, value: Any) -> None:
        kind = type(value)
        dtensor = self._dtensor_kinds.get(kind)
        if dtensor is None:
            dtensor = self._dtensor_kinds[kind] = is_dtensor_like(value)
        if not dtensor and not isinstance(value, torch.Tensor):
            return
        try:
            placement, rule = self._ask(fqn, value)
            if has_hooks(value):
                if placement is not None:
                    raise BindError(
                        f"holds a {type(value).__name__}, which names its chunks itself, and a "
                        "rule speaks for it too",
                        "way out:     let one of them speak: None for this key in the rules",
                    )
                return
            if dtensor:
                self._bind_dtensor(fqn, value, placement, rule)
            elif lists_its_chunks(value):
                self._bind_listed(fqn, value, placement, rule)
            elif placement is not None:
                self._place(fqn, value, self._bind_plain(value, placement), rule)
        except BindError as error:
            self._fault(error, fqn)

    def let_states_follow(self, state_dict: Mapping[str, Any]) -> None:
        """Give optimizer state with the layout of its parameter the parameter's place.

        If a rule matches the state's own key, the state follows only if the same rule matches the
        parameter. A plain tensor has its parameter's layout if it has the local shape; a DTensor
        if it has the shape, mesh and placements.
        """
        ruled = any(placed.rule is not None for placed in self.placing.placed.values())
        if not ruled and all(map(self._dtensor_kinds.get, map(type, state_dict.values()))):
            return
        names = [row.key for rows in self.rows.values() for row in rows]
        states = OptimizerStates(state_dict, names=names)
        places: dict[str, Placed | None] = {}
        for fqn, value in state_dict.items():
            dtensor = self._dtensor_kinds.get(type(value), False)
            placed = self.placing.placed.get(fqn)
            if dtensor:
                if not ruled or placed is None or placed.rule is not None:
                    continue
            elif not isinstance(value, torch.Tensor) or not value.dim():
                continue
            state = states.of(fqn)
            if state is None or names_its_chunks(value):
                continue
            if state.parameter not in places:
                places[state.parameter] = self._one_place(states.keys_of(state.parameter))
            first = places[state.parameter]
            if first is None or not self._may_follow(fqn, first.fqn):
                continue
            if not dtensor:
                if tuple(value.shape) == tuple(first.tensor.shape):
                    self._follow(fqn, value, first)
            elif placed is not None and self._same_own(
                described(value)[1], described(state_dict[first.fqn])[1]
            ):
                self._follow(fqn, placed.tensor, first, placed.mesh)

    def _may_follow(self, fqn: str, parameter: str) -> bool:
        """Whether no rule matches optimizer state itself, or the rule of its parameter does.

        The same rule is the same pattern or, for a callable, an equal placement. Rows follow rows
        of a stack that has as many, along the same dims.
        """
        own_rows, rows = self.rows.get(fqn), self.rows.get(parameter)
        if (own_rows and own_rows[0].name.axes) != (rows and rows[0].name.axes):
            return False
        if isinstance(self.rules, PlacementRules):
            own = self.rules.pattern_of(fqn)
            return own is None or own == self.rules.pattern_of(parameter)
        placement = self._returned.get(fqn)
        return placement is None or placement == self._returned.get(parameter)

    def _one_place(self, fqns: Sequence[str]) -> Placed | None:
        """Return the place of these keys; None if they have none, or several."""
        places = [self.placing.placed.get(fqn) for fqn in fqns]
        first = places[0] if places else None
        if first is None:
            return None
        different = {None if other is None else other.place for other in places}
        return first if len(different) == 1 else None

    def _same_own(self, one: Own, other: Own) -> bool:
        """Whether two DTensors have the same shape, mesh and placements of their own."""
        if (one.shape, one.placements) != (other.shape, other.placements):
            return False
        if one.mesh is None or other.mesh is None:
            return one.mesh is other.mesh
        return self.mesh_number(one.mesh) == self.mesh_number(other.mesh)

    def _follow(self, fqn: str, tensor: torch.Tensor, first: Placed, mesh: Any = None) -> None:
        self.placing.placed[fqn] = Placed(fqn, tensor, first.place, first.rule, mesh)
        if first.fqn in self.placing.stack_axes:
            self.placing.stack_axes[fqn] = self.placing.stack_axes[first.fqn]
        self.placing.faults = [fault for fault in self.placing.faults if fault.fqn != fqn]

    def _ask(self, fqn: str, value: Any) -> tuple[CheckpointPlacement | None, str | None]:
        """Return the placement of a tensor by the rules, and the name of its rule for messages."""
        if self.rules is None or not value.shape:
            return None, None
        if isinstance(self.rules, PlacementRules):
            match = self.rules.find(fqn)
            if match is None:
                return None, None
            # The pattern of a None rule counts as matched, too.
            pattern, placement = match
            name = self._names.setdefault(pattern, repr(pattern))
        else:
            if fqn in self.rows:
                value = _stack_of(self.rows[fqn], value)
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
        self.placing.matched[name] = self.placing.matched.get(name, 0) + 1
        if placement is None:
            return None, None
        return self._of_row(fqn, placement), name

    def _of_row(self, fqn: str, placement: CheckpointPlacement) -> CheckpointPlacement:
        """Return the placement of each row of a stack; of other tensors that of the rule.

        Raises:
            BindError: The rule has another number of rows.
        """
        if fqn not in self.rows:
            return placement
        row, ndim = self.rows[fqn][0].name, len(self.rows[fqn][0].value.shape)
        key = placement, row.axes, ndim
        if key not in self._of_rows:
            self._of_rows[key] = _of_rows(placement, row, ndim)
        of_rows, self.placing.stack_axes[fqn] = self._of_rows[key]
        return of_rows

    def _bind_dtensor(
        self, fqn: str, value: Any, placement: CheckpointPlacement | None, rule: str | None
    ) -> None:
        local, mesh, placements, shape = dtensor_facts(value)
        shapes = shape, local.shape, self.mesh_number(mesh)
        place = self._dtensor_place(shapes, mesh, placements, placement)
        self._place(fqn, local, place, rule, mesh)

    def _dtensor_place(
        self,
        shapes: tuple[torch.Size, torch.Size, int],
        mesh: Any,
        placements: tuple[Any, ...],
        placement: CheckpointPlacement | None,
    ) -> Place | None:
        """Return the place of a DTensor by its shape, its local shape and the number of its mesh.

        Raises:
            BindError: It does not fit.
        """
        key = *shapes, placements, placement
        place: Place | None = self._bound.get(key, _UNBOUND)
        if place is _UNBOUND:
            own = Own(tuple(shapes[0]), mesh, placements)
            place = self._bind(own, tuple(shapes[1]), placement, key)
        return place

    def _bind_plain(self, value: torch.Tensor, placement: CheckpointPlacement) -> Place | None:
        shape = tuple(value.shape)
        plain = (shape, placement)
        if plain not in self._bound:
            self._bind(Own(shape), shape, placement, plain)
        return self._bound[plain]

    def _bind_listed(
        self, fqn: str, value: torch.Tensor, placement: CheckpointPlacement | None, rule: str | None
    ) -> None:
        """Bind a tensor that lists its chunks; a rule that says more has to say the same."""
        listed = listed_place(value)
        if placement is None or (
            not _cuts(placement) and placement.global_shape in (None, listed.global_shape)
        ):
            self._place(fqn, value, self.placing.shared(listed), None)
            return
        bound = self._bind_plain(value, placement)
        if bound is not None:
            check_equal(listed, bound)
        self._place(fqn, value, bound, rule)

    def _bind(
        self,
        own: Own,
        local_shape: tuple[int, ...],
        placement: CheckpointPlacement | None,
        key: Any,
    ) -> Place | None:
        kind = len(own.shape), None if own.mesh is None else self.mesh_number(own.mesh), placement
        # The latest: to hash placements is slow.
        placements, sources = self._sources.get(kind, _NO_SOURCES)
        if placements != own.placements:
            sources = sources_of(own, placement, self._axes_of)
            self._sources[kind] = own.placements, sources
        place = None
        if sources is not None:
            place = self.placing.shared(sources.bind(own, local_shape))
        self._bound[key] = place
        return place

    def _axes_of(self, mesh: Mesh, *, with_ranks: bool) -> tuple[Axis, ...] | None:
        key = self.mesh_number(mesh), with_ranks
        if key not in self._axes:
            self._axes[key] = mesh_axes(mesh, with_ranks=with_ranks)
        return self._axes[key]

    def _place(
        self,
        fqn: str,
        tensor: torch.Tensor,
        place: Place | None,
        rule: str | None,
        mesh: Any = None,
    ) -> None:
        if place is None:
            self.placing.absent.add(fqn)
        else:
            self.placing.placed[fqn] = Placed(fqn, tensor, place, rule, mesh)

    def _fault(self, error: BindError, fqn: str) -> None:
        self.placing.faults.append(fault_of(error, fqn, rule_name(self.rules, fqn)))


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
) -> tuple[CheckpointPlacement, tuple[int, ...]]:
    dims = stack_dims(row, (1,) * ndim)
    ndim += len(dims)
    declared = placement.global_shape
    axes = []
    for dim, (total, _) in zip(dims, row.axes, strict=True):
        if declared is not None and (len(declared) != ndim or declared[dim] != total):
            raise BindError(
                f"stacks {total} rows on dim {dim} of a tensor of {ndim} dims, but its rule "
                f"says global_shape={declared}"
            )
        sharding = [
            axis
            for axis, entry in enumerate(placement.placements)
            if shards(entry) and -ndim <= entry.dim < ndim and shard_dim(entry, ndim) == dim
        ]
        axes.append(max(sharding, default=-1))
    return placement.of_rows(dims, ndim), tuple(axes)


def optimizer_faults(
    state_dict: Mapping[str, Any], placing: Placing, rename: Rename | None
) -> list[Fault]:
    """Return the faults of optimizer state that cannot follow its parameters.

    They are named by their positions, and tensors are renamed, sharded by a rule, or lists of
    chunks; or parameter groups list them by names that ``rename`` changes.
    """
    if rename is not None:
        return positional_faults(state_dict) + listed_faults(state_dict, rename)
    is_placed = any(
        (placed.rule is None and not placed.place.axes)  # a list of chunks
        or (placed.rule is not None and not placed.place.is_whole)
        for placed in placing.placed.values()
    )
    return positional_faults(state_dict) if is_placed else []


def _cuts(placement: CheckpointPlacement) -> bool:
    """Whether a placement splits a tensor over several ranks, or lists its rows."""
    return any(
        isinstance(entry, IndexShard) or (shards(entry) and size > 1)
        for entry, size in zip(placement.placements, placement.mesh.shape, strict=True)
    )


_UNBOUND: Any = object()
_NO_SOURCES: tuple[Any, Sources | None] = None, None


def described(value: Any) -> tuple[torch.Tensor, Own]:
    """Return the local tensor of a tensor or DTensor-like, and its description of itself."""
    if is_dtensor_like(value):
        local, mesh, placements, shape = dtensor_facts(value)
        return local, Own(tuple(shape), mesh, placements)
    return value, Own(tuple(value.shape))
