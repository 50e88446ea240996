"""One tensor per expert on the ranks, one for all of them in the checkpoint.

The rules speak of the stack. It is bound as if this rank had all of its rows; then the rows that
the rank has are listed on the dim of the stack, each the view of another local tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from dcp_placements._torch import StridedShard
from dcp_placements.bind.aliases import freed_faults
from dcp_placements.bind.binding import BindError, Binding, Own
from dcp_placements.bind.own_chunks import names_its_chunks
from dcp_placements.bind.placed import Place, Placed, Placing
from dcp_placements.bind.placing import Placer, described
from dcp_placements.bind.rule_and_dtensor import bind, fault_of
from dcp_placements.bind.unfolded import Unfolded, equal_values, is_tensor, states_of
from dcp_placements.bind.unstacking import RowPlacer
from dcp_placements.errors import format_names
from dcp_placements.layout.sharding import Kind, Layout, Pick
from dcp_placements.names.flat import Path, Stacked, StackedRow, Unstacked
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.names.target import RenameError, Row, Target, row_target, stack_dims
from dcp_placements.rules.patterns import Rules, rule_name
from dcp_placements.rules.placement import CheckpointPlacement, kind_of, shard_dim, shards


def unfold(
    state_dict: dict[str, Any],
    mappings: dict[str, Path],
    placing: Placing,
    rules: Rules | None,
    stored: Mapping[str, Any] | None = None,
) -> Unfolded:
    """Give every ``Stacked`` and ``Unstacked`` value its place, in ``placing``.

    Args:
        state_dict: Flat, as ``rename_keys`` leaves it.
        mappings: The path of each key in the nested dict.
        placing: Of all other values; takes in places, faults and rules that matched.
        rules: The user's.
        stored: The checkpoint's metadata by key on a load; None on a save.
    """
    unstacked = [value for value in state_dict.values() if type(value) is Unstacked]
    if not unstacked and not any(type(value) is Stacked for value in state_dict.values()):
        states = OptimizerStates(state_dict)
        return Unfolded(placing, rules, stored, states, state_dict, mappings)
    unfolded = Unfolded(placing, rules, stored, states_of(state_dict))
    stacks, rows = StackPlacer(unfolded), RowPlacer(unfolded, unstacked)
    for fqn, value in state_dict.items():
        path = mappings.get(fqn)
        if type(value) is Stacked:
            stacks.add(fqn, value, path)
        elif type(value) is Unstacked:
            rows.add(value)
        else:
            unfolded.add(fqn, value, path)
    stacks.let_states_follow()
    placing.faults += freed_faults(
        (fqn, part) for fqn, placed in placing.placed.items() for part in placed.tensors
    )
    return unfolded


@dataclass(slots=True)
class _Held:
    """The rows of a stack that this rank holds, sorted.

    Attributes:
        rows: Their places in the stack.
        parts: Their local tensors.
        own: The description that each of them has of itself, the same for all.
    """

    rows: list[Row]
    parts: list[torch.Tensor]
    own: Own

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """Their numbers along each dim of the stack, from the inside out."""
        return list(zip(*[row.indices for row in self.rows], strict=True))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.parts[0].shape)


class StackPlacer:
    """Places each ``Stacked`` value of a state dict as one tensor of the checkpoint."""

    def __init__(self, unfolded: Unfolded) -> None:
        self.unfolded = unfolded
        self.placing = unfolded.placing
        self.placer = Placer(unfolded.rules, unfolded.placing)
        self._alike: dict[Any, Place | None] = {}
        self._held: dict[str, _Held] = {}

    def add(self, fqn: str, stacked: Stacked, path: Path | None) -> None:
        """Place one stack."""
        rows = sorted(stacked.rows, key=lambda held: held.row.indices)
        tensors = [is_tensor(held.value) for held in rows]
        if not any(tensors):
            self._add_objects(fqn, stacked, path)
            return
        self.unfolded.add(fqn, rows[0].value, path)
        try:
            if not all(tensors) or any(names_its_chunks(held.value) for held in rows):
                raise BindError(
                    "cannot stack what is no tensor, or names its chunks itself, with tensors",
                    f"it stacks:   {format_names([held.key for held in rows], 4)}",
                )
            self._add_tensors(fqn, _held_rows(rows))
        except (BindError, RenameError) as error:
            rule = rule_name(self.unfolded.rules, fqn)
            self.placing.faults.append(fault_of(error, fqn, rule))

    def _add_objects(self, fqn: str, stacked: Stacked, path: Path | None) -> None:
        first, *others = stacked.rows
        for other in others:
            is_equal = type(first.value) is type(other.value)
            is_equal = is_equal and equal_values(first.value, other.value)
            if not self.unfolded.loading and not is_equal:
                self.unfolded.fault(
                    fqn,
                    f"one object cannot be stored for all rows: {first.key} is {first.value!r}, "
                    f"and {other.key} is {other.value!r}",
                    "way out:     make them equal, or leave these keys as they are in rename=",
                )
                break
        self.unfolded.add(fqn, first.value, path)
        paths = [other.path for other in others if other.path is not None]
        self.unfolded.copies[fqn] = paths

    def _add_tensors(self, fqn: str, held: _Held) -> None:
        own, parts = held.own, held.parts
        dims = stack_dims(held.rows[0], own.shape)
        stored = (self.unfolded.stored or {}).get(fqn)
        if not own.shape and stored is not None and tuple(getattr(stored, "size", (0,))) == ():
            # One scalar for all rows, as a stacked parameter's optimizer state has it.
            scalar = bind(own, (), None)
            assert scalar is not None
            scalar_place = self.placing.place_of(scalar, scalar.layout.chunks())
            self.placing.place_row(fqn, scalar_place, None, parts)
            return
        self._held[fqn] = held
        placement, rule = None, None
        if own.shape:
            counts = [len(numbers if len(dims) == 1 else set(numbers)) for numbers in held.indices]
            totals = dict(zip(dims, counts, strict=True))
            target = row_target(held.rows[0], held.local_shape)
            shape = [totals.get(dim, size) for dim, size in enumerate(target.shape)]
            probe = torch.empty(shape, dtype=parts[0].dtype, device="meta")
            placement, rule = self.placer.ask(fqn, probe)
        mesh = None if own.mesh is None else self.placer.mesh_number(own.mesh)
        shapes = own.shape, held.local_shape
        key = (held.rows[0].axes, tuple(held.indices), shapes, own.placements, mesh, placement)
        if key not in self._alike:
            self._alike[key] = _bind_stack(held, placement, self.placing)
        place = self._alike[key]
        if place is None:
            self.placing.absent.add(fqn)
            return
        dims = tuple(sorted(dims))
        self.placing.placed[fqn] = Placed(fqn, parts[0], place, rule, parts=parts, dims=dims)

    def let_states_follow(self) -> None:
        """Give optimizer state with the rows of its parameter the place of the parameter."""
        for fqn, held in self._held.items():
            state = self.unfolded.states.of(fqn) if held.own.shape else None
            if state is None:
                continue
            placed = map(self.placing.placed.get, self.unfolded.states.keys_of(state.parameter))
            stacks = [one for one in placed if one is not None and one.dims]
            if len({one.place.number for one in stacks}) == 1:
                self._follow(fqn, held, stacks[0])

    def _follow(self, fqn: str, held: _Held, first: Placed) -> None:
        if not self.placer.may_follow(fqn, first.fqn):
            return
        placed = self.placing.placed.get(fqn)
        if held.own.mesh is not None and (
            first.rule is None
            or placed is None
            or placed.rule is not None
            or not self.placer.same_own(held.own, self._held[first.fqn].own)
        ):
            return
        # The rows of the stack come first; an IndexShard of the rule lists rows, too.
        cuts = first.binding.sharding.cuts[: len(held.indices)]
        listed = [cut.indices for cut in cuts if isinstance(cut, Pick)]
        if listed == held.indices and held.parts[0].shape == first.tensor.shape:
            self.placing.placed[fqn] = replace(
                first, fqn=fqn, tensor=held.parts[0], parts=held.parts
            )
            self.placing.faults = [fault for fault in self.placing.faults if fault.fqn != fqn]


def _held_rows(rows: Sequence[StackedRow]) -> _Held:
    """Return sorted rows of one stack.

    Raises:
        BindError: They differ in more than their numbers.
    """
    facts = [described(held.value) for held in rows]
    if len({(part.dtype, part.shape, own.shape, own.placements) for part, own in facts}) > 1:
        details = [
            f"{held.key}: {part.dtype}, {own.format()}"
            for held, (part, own) in zip(rows[:4], facts, strict=False)
        ]
        raise BindError("cannot stack rows of different dtypes, shapes or placements", *details)
    return _Held([held.row for held in rows], [part for part, _ in facts], facts[0][1])


def _bind_stack(
    held: _Held, placement: CheckpointPlacement | None, placing: Placing
) -> Place | None:
    """Bind as if this rank had all rows; then leave it those that it has.

    Raises:
        BindError: As ``bind``; or the rule has another number of rows.
    """
    row, own = held.rows[0], held.own
    dims = stack_dims(row, own.shape)
    target = row_target(row, own.shape)
    ndim = len(target.shape)
    row_axes = []
    for dim, (total, _) in zip(dims, row.axes, strict=True):
        axis = -1
        if placement is not None:
            for at, entry in enumerate(placement.placements):
                if shards(entry) and -ndim <= entry.dim < ndim and shard_dim(entry, ndim) == dim:
                    axis = at
            declared = placement.global_shape
            if declared is not None and (len(declared) != ndim or declared[dim] != total):
                raise BindError(
                    f"stacks {total} rows on dim {dim} of a tensor of {ndim} dims, but its rule "
                    f"says global_shape={declared}"
                )
            if axis >= 0:
                placement = placement.without(dim, ndim)
        row_axes.append(axis)
    stack = Own(target.shape, own.mesh, _stacked_placements(own, target))
    whole = bind(stack, row_target(row, held.local_shape).shape, placement)
    if whole is None:
        return None
    picks = [Pick(*pick) for pick in zip(dims, held.indices, row_axes, strict=True)]
    sharding = replace(whole.sharding, cuts=(*picks, *whole.sharding.cuts))
    layout = sharding.at(whole.coordinate)
    binding = Binding(sharding, whole.axes, layout)
    # A rank need not hold every combination of the numbers: its chunks are those of its rows.
    kept = [dim for dim, origin in enumerate(target.dims) if origin is not None]
    shape = tuple([sharding.global_shape[dim] for dim in kept])
    pieces = Layout(shape, tuple([layout.intervals[dim] for dim in kept])).chunks()
    chunks = [
        chunk
        for at, one in enumerate(held.rows)
        for chunk in row_target(one, shape).chunks(pieces, at)
    ]
    return placing.place_of(binding, tuple(sorted(chunks)))


def _stacked_placements(own: Own, target: Target) -> tuple[Any, ...]:
    """Return a row's placements as those of the stack."""
    stacked = []
    for placement in own.placements:
        kind = kind_of(placement)
        if kind is not None:
            dim = target.dims.index(shard_dim(placement, len(own.shape)))
            if kind is Kind.PLAIN:
                placement = Shard(dim)
            else:
                assert kind is Kind.STRIDED
                placement = StridedShard(dim, split_factor=placement.split_factor)
        stacked.append(placement)
    return tuple(stacked)
