"""One tensor per expert on the ranks, one for all of them in the checkpoint; and the other way.

Nothing is copied. A stack is a layout whose rows are picked on one dim, each the view of another
local tensor; what is unstacked is a view per row that the layout holds, with one dim less. What is
split is the chunks of the fused tensor, clipped to each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dcp_placements._torch import dtensor_facts, has_hooks, is_dtensor_like
from dcp_placements.bind.binding import BindError, Binding, Own, bind, fault_of
from dcp_placements.bind.placing import Placed, Placer, Placing, place
from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.sharding import Chunk, Cut, Layout, Pick, Sharding
from dcp_placements.names.keys import Parts, Path, Rows, Stacked, Unstacked
from dcp_placements.names.optimizer_state import OptimizerStates, possible_parameters
from dcp_placements.rules.mesh import MeshNumbers
from dcp_placements.rules.patterns import Rules, rule_name
from dcp_placements.rules.placement import shard_dim, shard_parts, shards


@dataclass(slots=True)
class StackedPlaced(Placed):
    """Local tensors that are rows of one tensor of the checkpoint.

    Attributes:
        parts: The tensors, one per row that this rank holds; ``tensor`` is the first of them.
        dims: The dims of the checkpoint's tensor that the rows lie along, ascending. On each of
            them a chunk's local offset says which of the tensors it is a piece of.
    """

    parts: list[torch.Tensor] = field(default_factory=list)
    dims: tuple[int, ...] = (0,)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.parts

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the piece of a row that ``chunk`` is; a view with the checkpoint's dims."""
        part = self.parts[chunk.local_offsets[self.dims[0]]].detach()
        for dim in self.dims:
            part = part.unsqueeze(dim)
        return _piece(part, chunk)


@dataclass(slots=True)
class RowPlaced(Placed):
    """A row of a local tensor, or a part of it, which is a tensor of its own in the checkpoint.

    Attributes:
        parts: All that this rank holds of that row: one, unless it holds it several times. The
            last local offset of a chunk, beyond those of the dims, says which.
    """

    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.parts

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the piece of one of its tensors that ``chunk`` is; a view."""
        which = chunk.local_offsets[-1] if len(self.parts) > 1 else 0
        return _piece(self.parts[which].detach(), chunk)

    @property
    def has_own_key(self) -> bool:
        """Other ranks of the mesh may hold other rows."""
        return True


def _piece(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    for dim, size in enumerate(chunk.sizes):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, chunk.local_offsets[dim], size)
    return tensor


def _several(chunks: tuple[Chunk, ...], count: int) -> tuple[Chunk, ...]:
    """Return the chunks of a tensor that a rank holds several times."""
    return tuple(
        [
            Chunk((*chunk.local_offsets, at), chunk.offsets, chunk.sizes)
            for at in range(count)
            for chunk in chunks
        ]
    )


@dataclass(slots=True)
class Unfolded:
    """A flat state dict with one value per key of the checkpoint.

    Attributes:
        state_dict: The values.
        mappings: Where they stand in the nested dict.
        copies: Further places of an object that several local keys have as one.
        shared: What a scalar or an object is called whose one value stands for several keys.
    """

    state_dict: dict[str, Any]
    mappings: dict[str, Path]
    copies: dict[str, list[Path]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


def unfold(
    state_dict: dict[str, Any],
    mappings: dict[str, Path],
    placing: Placing,
    rules: Rules | None,
    rank: int,
    stored: Mapping[str, Any] | None = None,
) -> Unfolded:
    """Give every ``Stacked`` and ``Unstacked`` value its place, in ``placing``.

    Args:
        state_dict: Flat, as ``rename_keys`` leaves it.
        mappings: Where each key stands in the nested dict.
        placing: Of all other values; takes in places, faults and rules that matched.
        rules: The user's.
        rank: This process's rank, for messages.
        stored: Of a load, the checkpoint's metadata by key.
    """
    if not any(type(value) in (Stacked, Unstacked) for value in state_dict.values()):
        return Unfolded(state_dict, mappings)
    return _Unfolder(mappings, placing, rules, rank, stored).unfold(state_dict)


@dataclass(frozen=True, slots=True)
class _Shifted:
    """A DTensor's own shard, seen from the tensor with one more dim."""

    dim: int
    split_factor: int

    def is_partial(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False


Piece = tuple[Binding, tuple[Chunk, ...]]

Numbers = tuple[int, ...]
"""Which row it is, of each of the stacks, from the inside out."""


@dataclass(slots=True)
class _Row:
    """What the rows of tensors that lie alike have in common.

    Attributes:
        total: How many there are; 1 of a tensor that is split alone.
        numbers: Those that are here, each with its place on the dim; None for all of the tensor.
        pieces: What a row is in the checkpoint: one tensor, or one per part.
    """

    total: int
    numbers: list[tuple[int, int | None]]
    pieces: list[Piece]


class _Unfolder:
    def __init__(
        self,
        mappings: dict[str, Path],
        placing: Placing,
        rules: Rules | None,
        rank: int,
        stored: Mapping[str, Any] | None,
    ) -> None:
        self.mappings = mappings
        self.placing = placing
        self.rules = rules
        self.rank = rank
        self.loading = stored is not None
        self.stored = stored or {}
        self.placer = Placer(rules, rank)
        self.placer.placing = placing
        self.made = Unfolded({}, {})
        self._stacks: dict[Any, tuple[Binding, tuple[Chunk, ...]] | None] = {}
        self._rows: dict[Any, _Row] = {}
        self._rows_of: dict[str, _Row] = {}
        self._scalar: Binding | None = None
        self._moments: dict[str, tuple[list[Numbers], list[torch.Tensor]]] = {}
        self._owns: dict[str, Own] = {}
        self._copies: dict[tuple[tuple[Chunk, ...], int], tuple[Chunk, ...]] = {}
        self._mesh_number = MeshNumbers()

    def unfold(self, state_dict: dict[str, Any]) -> Unfolded:
        self._states = _states_of(state_dict)
        whole = self._place_unstacked(state_dict)
        for fqn, value in state_dict.items():
            if type(value) is Stacked:
                self._stack(fqn, value)
            elif type(value) is Unstacked:
                self._unstack(value, whole)
            else:
                self._note(fqn, value, self.mappings.get(fqn))
        self._let_states_follow()
        return self.made

    def _note(self, fqn: str, value: Any, path: Path | None) -> None:
        if fqn in self.made.state_dict:
            self._fault(
                fqn,
                "rename= gives this one name to a row and to another value",
                "way out:     map every key of a rank to a key of its own",
            )
        self.made.state_dict[fqn] = value
        if path is not None:
            self.made.mappings[fqn] = path

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.placing.faults.append(Fault(fqn, headline, details))

    # Stacks

    def _stack(self, fqn: str, stacked: Stacked) -> None:
        rows = sorted(stacked.rows, key=lambda row: row[0])
        values = [value for _, _, value, _ in rows]
        path = self.mappings.get(fqn)
        tensors = [isinstance(value, torch.Tensor) or is_dtensor_like(value) for value in values]
        if not any(tensors):
            self._stack_objects(fqn, stacked, path)
            return
        self._note(fqn, values[0], path)
        try:
            if not all(tensors) or any(has_hooks(value) for value in values):
                raise BindError(
                    "cannot stack what is no tensor, or names its chunks itself, with tensors",
                    f"it stacks:   {format_names([key for _, key, _, _ in rows], 4)}",
                )
            self._stack_tensors(fqn, stacked, values, [row for row, _, _, _ in rows])
        except BindError as error:
            found = fault_of(error, fqn, self.rank, rule_name(self.rules, fqn))
            self.placing.faults.append(found)

    def _stack_objects(self, fqn: str, stacked: Stacked, path: Path | None) -> None:
        _, first_key, first, _ = stacked.rows[0]
        for _, key, value, _ in stacked.rows[1:]:
            if not self.loading and not _equal(first, value):
                self._fault(
                    fqn,
                    f"rank {self.rank} cannot store one object for all rows: {first_key} is "
                    f"{first!r}, and {key} is {value!r}",
                    "way out:     make them equal, or leave these keys as they are in rename=",
                )
                break
        self._note(fqn, first, path)
        self.made.copies[fqn] = [at for _, _, _, at in stacked.rows[1:] if at is not None]

    def _stack_tensors(
        self, fqn: str, stacked: Stacked, values: list[Any], rows: list[Numbers]
    ) -> None:
        facts = [_facts(value) for value in values]
        kinds = {(part.dtype, part.shape, own.shape, own.placements) for part, own in facts}
        if len(kinds) > 1:
            told = [
                f"{key}: {part.dtype}, {own.format()}"
                for (_, key, _, _), (part, own) in zip(
                    sorted(stacked.rows, key=lambda row: row[0]), facts, strict=True
                )
            ]
            raise BindError(
                "cannot stack rows of different dtypes, shapes or placements", *told[:4]
            )
        parts = [part for part, _ in facts]
        own = facts[0][1]
        dims: list[int] = []
        for ndim, (_, dim) in enumerate(stacked.axes, len(own.shape) + 1):
            if not own.shape:  # has none of the dims that its parameter has
                dim = min(max(dim, -ndim), ndim - 1)
            elif not -ndim <= dim < ndim:
                dims_told = "1 dim" if ndim == 2 else f"{ndim - 1} dims"
                raise BindError(f"cannot stack rows of {dims_told} on dim {dim}")
            dims.append(dim % ndim)
        axes = [(total, dim) for (total, _), dim in zip(stacked.axes, dims, strict=True)]
        stored = self.stored.get(fqn)
        if not own.shape and stored is not None and tuple(getattr(stored, "size", (0,))) == ():
            # One scalar for all rows, as a stacked parameter's optimizer state has it.
            if self._scalar is None:
                self._scalar = bind(Own(()), (), None)
            assert self._scalar is not None
            chunks = self._several(self._scalar.layout.chunks(), len(parts))
            self.placing.placed[fqn] = RowPlaced(
                fqn, parts[0], self._scalar, chunks, None, None, parts
            )
            return
        self._owns[fqn] = own
        if own.shape and self._states.of(fqn) is not None:
            self._moments[fqn] = (rows, parts)
        placement, rule = None, None
        if own.shape:
            shape = tuple(parts[0].shape)
            for dim, numbers in zip(dims, zip(*rows, strict=True), strict=True):
                shape = _with(shape, dim, len(numbers if len(dims) == 1 else set(numbers)))
            probe = torch.empty(shape, dtype=parts[0].dtype, device="meta")
            placement, rule = self.placer.ask(fqn, probe)
        key = (
            *(tuple(axes), tuple(rows), own.shape, own.placements),
            *(tuple(parts[0].shape), placement),
            None if own.mesh is None else self._mesh_number(own.mesh),
        )
        if key not in self._stacks:
            self._stacks[key] = self._bind_stack(own, tuple(parts[0].shape), placement, axes, rows)
        self._place_stack(fqn, self._stacks[key], parts, _lie_along(dims), rule)

    def _place_stack(
        self,
        fqn: str,
        found: tuple[Binding, tuple[Chunk, ...]] | None,
        parts: list[torch.Tensor],
        dims: tuple[int, ...],
        rule: str | None,
    ) -> None:
        if found is None:
            self.placing.absent.add(fqn)
        else:
            binding, chunks = found
            self.placing.placed[fqn] = StackedPlaced(
                fqn, parts[0], binding, chunks, rule, None, parts, tuple(sorted(dims))
            )

    def _bind_stack(
        self,
        own: Own,
        local: tuple[int, ...],
        placement: Any,
        axes: list[tuple[int, int]],
        rows: list[Numbers],
    ) -> tuple[Binding, tuple[Chunk, ...]] | None:
        """Bind as if this rank had all rows; then leave it those that it has."""
        dims = _lie_along([dim for _, dim in axes])
        ndim = len(local) + len(dims)
        along = [-1] * len(dims)
        for at, (dim, (total, _)) in enumerate(zip(dims, axes, strict=True)):
            if placement is None:
                continue
            for axis, entry in enumerate(placement.placements):
                if shards(entry) and -ndim <= entry.dim < ndim and shard_dim(entry, ndim) == dim:
                    along[at] = axis
            told = placement.global_shape
            if told is not None and (len(told) != ndim or told[dim] != total):
                raise BindError(
                    f"stacks {total} rows on dim {dim} of a tensor of {ndim} dims, but its rule "
                    f"says global_shape={told}"
                )
            if along[at] >= 0:
                placement = placement.without(dim, ndim)
        for total, dim in axes:
            own = Own(_with(own.shape, dim, total), own.mesh, _shifted(own, dim))
            local = _with(local, dim, total)
        whole = bind(own, local, placement)
        if whole is None:
            return None
        picks = [
            Pick(dim, numbers, axis)
            for dim, numbers, axis in zip(dims, zip(*rows, strict=True), along, strict=True)
        ]
        sharding = replace(whole.sharding, cuts=(*picks, *whole.sharding.cuts))
        layout = sharding.at(whole.coordinate)
        binding = Binding(sharding, whole.axes, layout, is_uniform=False)
        return binding, layout.chunks() if len(dims) == 1 else _cells(layout, dims, rows)

    def _let_states_follow(self) -> None:
        """Give optimizer state that lies as its parameter does, row by row, the place of that."""
        for fqn, (rows, held) in self._moments.items():
            state = self._states.of(fqn)
            names = [] if state is None else self._states.keys_of(state.parameter)
            found = [
                placed
                for name in names
                if isinstance(placed := self.placing.placed.get(name), StackedPlaced)
            ]
            if not found or any(one.binding != found[0].binding for one in found):
                continue
            first = found[0]
            if not self.placer.may_follow(fqn, first.fqn):
                continue
            own, known = self._owns[fqn], self.placing.placed.get(fqn)
            if own.mesh is not None and (
                first.rule is None
                or known is None
                or known.rule is not None
                or not self.placer.same_own(own, self._owns[first.fqn])
            ):
                continue
            # The stack's come first; an IndexShard of the rule's picks too.
            cuts = first.binding.sharding.cuts[: len(rows[0])]
            picks = [cut.indices for cut in cuts if isinstance(cut, Pick)]
            if picks == list(zip(*rows, strict=True)) and held[0].shape == first.tensor.shape:
                self.placing.placed[fqn] = StackedPlaced(
                    fqn, held[0], first.binding, first.chunks, first.rule, None, held, first.dims
                )
                self.placing.faults = [f for f in self.placing.faults if f.fqn != fqn]

    # The other way

    def _place_unstacked(self, state_dict: dict[str, Any]) -> Placing:
        """Place what is unstacked as the whole tensors that they are here."""
        tensors: dict[str, Any] = {}
        for fqn, value in state_dict.items():
            if type(value) is Unstacked and _is_rowed(value.value):
                if value.name.stacked in tensors:
                    self._fault(fqn, f"two tensors are called {value.name.stacked} by rename=")
                tensors[value.name.stacked] = value.value
        whole = place(tensors, self.rules, self.rank)
        self.placing.faults += whole.faults
        for rule, count in whole.matched.items():
            self.placing.matched[rule] = self.placing.matched.get(rule, 0) + count
        faulty = {fault.fqn for fault in whole.faults}
        for stacked, value in tensors.items():
            if stacked in whole.placed or stacked in whole.absent or stacked in faulty:
                continue
            if has_hooks(value):
                self._fault(stacked, "names its chunks itself, and cannot be unstacked")
                continue
            binding = bind(Own(tuple(value.shape)), tuple(value.shape), None)
            assert binding is not None
            whole.placed[stacked] = Placed(stacked, value, binding, binding.layout.chunks(), None)
        for value in state_dict.values():
            if type(value) is Unstacked and value.name.stacked in whole.placed:
                self._learn_rows(value, whole.placed[value.name.stacked])
        return whole

    def _learn_rows(self, value: Unstacked, placed: Placed) -> None:
        """Note the rows of a tensor, by all that its optimizer state could call it."""
        name = value.name
        dim, parts = (name.dim, None) if isinstance(name, Rows) else (name.rows, name)
        ndim = len(placed.global_shape)
        if dim is not None:
            if not -ndim <= dim < ndim:
                self._fault(name.stacked, f"cannot be unstacked on dim {dim}: it has {ndim} dims")
                return
            dim %= ndim
        key = (placed.binding, dim, parts and (parts.dim, parts.sizes, parts.groups))
        if key not in self._rows:
            rows = _whole_of(placed) if dim is None else _rows_of(placed.binding, dim)
            if parts is not None:
                try:
                    rows.pieces = _parts_of(*rows.pieces[0], parts)
                except ValueError as error:
                    self._fault(name.stacked, f"cannot be split: {error}")
                    return
            self._rows[key] = rows
        rows = self._rows[key]
        self._rows_of[name.stacked] = rows
        components = name.stacked.split(".")
        runs = [".".join(components[at:]) for at in range(len(components))]
        runs += possible_parameters(name.stacked)
        for run in runs:
            self._rows_of.setdefault(run, rows)

    def _unstack(self, value: Unstacked, whole: Placing) -> None:
        name = value.name
        if name.stacked in whole.absent:
            return
        placed = whole.placed.get(name.stacked)
        if placed is None:
            if not _is_rowed(value.value):
                self._share(value)
            return
        rows = self._rows_of.get(name.stacked)
        if rows is None:
            return
        dim = name.dim if isinstance(name, Rows) else name.rows
        tensor = placed.tensor.detach()
        found: dict[int, list[torch.Tensor]] = {}
        for number, at in rows.numbers:
            row = tensor if at is None or dim is None else tensor.select(dim, at)
            found.setdefault(number, []).append(row)
        for number, parts in found.items():
            for fqn, (binding, chunks) in zip(_fqns(name, number), rows.pieces, strict=True):
                self._note(fqn, parts[0], value.path)
                chunks = self._several(chunks, len(parts))
                self.placing.placed[fqn] = RowPlaced(
                    fqn, parts[0], binding, chunks, placed.rule, None, parts
                )

    def _several(self, chunks: tuple[Chunk, ...], count: int) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor that this rank holds several times, the same each time."""
        if count == 1:
            return chunks
        key = chunks, count
        if key not in self._copies:
            self._copies[key] = _several(chunks, count)
        return self._copies[key]

    def _share(self, value: Unstacked) -> None:
        """Give a scalar or an object to every row of its parameter that this rank holds."""
        name = value.name
        runs = possible_parameters(name.stacked) or _grouped(name.stacked)
        rows = next((self._rows_of[run] for run in runs if run in self._rows_of), None)
        if rows is None:
            self._fault(
                name.stacked,
                f"rank {self.rank} cannot tell its rows: it is a scalar or an object, and no "
                "tensor of its parameter is unstacked with it",
                "way out:     save it together with the parameter; or leave this key as it is in "
                "rename=",
            )
            return
        numbers = list(dict.fromkeys(number for number, _ in rows.numbers))
        if self.loading and isinstance(value.value, torch.Tensor):
            # What one scalar stands for is all rows, whichever this rank holds.
            numbers = list(range(rows.total))
        elif self.loading and not numbers and rows.total:
            numbers = [0]
        for number in numbers:
            for fqn in _fqns(name, number):
                self._note(fqn, value.value, value.path)
                self.made.shared[fqn] = name.stacked


def _states_of(state_dict: Mapping[str, Any]) -> OptimizerStates:
    """Return what is optimizer state, by the names of the checkpoint's stacks or of this rank's."""
    held: dict[str, Any] = {}
    names = []
    for fqn, value in state_dict.items():
        if type(value) is Stacked:
            held[fqn] = value.rows[0][2]
            names += [key for _, key, _, _ in value.rows]
        elif type(value) is Unstacked:
            held[value.name.stacked] = value.value
        else:
            held[fqn] = value
    return OptimizerStates(held, names=names)


def _lie_along(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of the checkpoint's tensor that are each stack's own dim.

    >>> _lie_along([0, 0]), _lie_along([1, 0]), _lie_along([0, 1])
    ((1, 0), (2, 0), (0, 1))
    """
    found: list[int] = []
    for dim in dims:
        found = [*[known + (known >= dim) for known in found], dim]
    return tuple(found)


def _cells(layout: Layout, dims: Sequence[int], rows: Sequence[Numbers]) -> tuple[Chunk, ...]:
    """Return the chunks of rows of rows, of which a rank need not have a full product."""
    intervals = layout.intervals
    for dim in dims:
        intervals = _put(intervals, dim, ((0, 1),))
    pieces = Layout(layout.global_shape, intervals).chunks()
    found = []
    for at, numbers in enumerate(rows):
        for chunk in pieces:
            local, offsets = chunk.local_offsets, chunk.offsets
            for dim, number in zip(dims, numbers, strict=True):
                local, offsets = _put(local, dim, at), _put(offsets, dim, number)
            found.append(Chunk(local, offsets, chunk.sizes))
    return tuple(found)


def _fqns(name: Rows | Parts, number: int) -> list[str]:
    """Return what a row is called in the checkpoint, or each of its parts."""
    fqns = (name.fqn,) if isinstance(name, Rows) else name.fqns
    return [fqn.replace("{}", str(number)) for fqn in fqns]


def _whole_of(placed: Placed) -> _Row:
    return _Row(1, [(0, None)], [(placed.binding, placed.chunks)])


def _rows_of(binding: Binding, dim: int) -> _Row:
    layout, sharding = binding.layout, binding.sharding
    numbers: list[tuple[int, int | None]] = []
    at = 0
    for start, stop in layout.intervals[dim]:
        for number in range(start, stop):
            if number < layout.global_shape[dim]:
                numbers.append((number, at))
            at += 1
    cuts = tuple(
        replace(cut, dim=cut.dim - (cut.dim > dim)) for cut in sharding.cuts if cut.dim != dim
    )
    padded = sharding.padded_shape
    row = Sharding(
        _less(sharding.global_shape, dim),
        sharding.axis_sizes,
        cuts,
        None if padded is None else _less(padded, dim),
    )
    made = Layout(row.global_shape, _less(layout.intervals, dim))
    return _Row(
        layout.global_shape[dim],
        numbers,
        [(Binding(row, binding.axes, made, row.is_uniform), made.chunks())],
    )


def _parts_of(binding: Binding, chunks: tuple[Chunk, ...], parts: Parts) -> list[Piece]:
    """Return where each part of a fused tensor lies.

    Raises:
        ValueError: The tensor cannot be cut into them.
    """
    shape, sharding = binding.global_shape, binding.sharding
    if not -len(shape) <= parts.dim < len(shape):
        raise ValueError(f"there is no dim {parts.dim}, the shape is {shape}")
    dim = parts.dim % len(shape)
    if sharding.cut_shape[dim] != shape[dim]:
        raise ValueError(f"dim {dim} is padded, to {sharding.cut_shape[dim]} of {shape[dim]}")
    # Where no axis cuts the dim, a run in the whole is the same run on every rank.
    is_cut = any(cut.dim == dim for cut in sharding.cuts)
    found = []
    for spans in parts.spans(shape[dim]):
        held = []
        intervals = []
        for start, stop in binding.layout.intervals[dim]:
            intervals += [(at, at + size) for _, at, size in _clipped(start, stop - start, spans)]
        for chunk in chunks:
            for skipped, at, size in _clipped(chunk.offsets[dim], chunk.sizes[dim], spans):
                local = chunk.local_offsets[dim] + skipped
                held.append(
                    Chunk(
                        _put(chunk.local_offsets, dim, local),
                        _put(chunk.offsets, dim, at),
                        _put(chunk.sizes, dim, size),
                    )
                )
        made = Sharding(
            _put(shape, dim, sum(stop - start for start, stop in spans)),
            sharding.axis_sizes,
            # Which axes cut it is known, but not by what rule: parts are no shards of equal size.
            tuple([c if c.dim != dim else Cut(dim, c.axis) for c in sharding.cuts if c.axis >= 0]),
            None
            if sharding.padded_shape is None
            else _put(sharding.padded_shape, dim, sum(stop - start for start, stop in spans)),
        )
        layout = Layout(made.global_shape, _put(binding.layout.intervals, dim, tuple(intervals)))
        is_exact = not is_cut and len(spans) == 1
        is_uniform = made.is_uniform and is_exact
        lies = Binding(made, binding.axes, layout, is_uniform, is_exact=is_exact)
        found.append((lies, tuple(held)))
    return found


def _clipped(
    start: int, size: int, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield ``(elements skipped, place in the part, size)`` of what a run has of each span."""
    at = 0
    for begin, end in spans:
        low, high = max(start, begin), min(start + size, end)
        if low < high:
            yield low - start, at + low - begin, high - low
        at += end - begin


def _facts(value: Any) -> tuple[torch.Tensor, Own]:
    if is_dtensor_like(value):
        local, mesh, placements, shape = dtensor_facts(value)
        return local, Own(tuple(shape), mesh, placements)
    return value, Own(tuple(value.shape))


def _shifted(own: Own, dim: int) -> tuple[Any, ...]:
    """Return a row's placements as those of the stack."""
    ndim = len(own.shape)
    found = []
    for placement in own.placements:
        if shards(placement):
            at = shard_dim(placement, ndim)
            parts, _ = shard_parts(placement)
            assert isinstance(parts, int)
            found.append(_Shifted(at + (at >= dim), parts))
        else:
            found.append(placement)
    return tuple(found)


def _is_rowed(value: Any) -> bool:
    """Whether a value is a tensor that has rows."""
    return (isinstance(value, torch.Tensor) or is_dtensor_like(value)) and len(value.shape) > 0


def _grouped(fqn: str) -> list[str]:
    """Return the parameters that a key of ``param_groups`` may speak of."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[at + 1 :]) for at, part in enumerate(parts) if part == "param_groups"]


def _with(values: tuple[Any, ...], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim:])


def _put(values: tuple[Any, ...], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _less(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(type(one) is type(other) and one == other)
    except (RuntimeError, TypeError, ValueError):  # lists with tensors in them, arrays
        return False
