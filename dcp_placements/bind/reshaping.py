"""What a rename makes of a rank's tensors: rows stacked, stacks row by row, fused tensors in parts.

Each tensor is bound as what it is on this rank. The rename gives the targets of that tensor: pairs
of equal boxes. What the rank holds of a target is the tensor's own chunks, moved by those pairs, in
views of the tensor that have the dims of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import is_dtensor_like
from dcp_placements.bind.aliases import freed_faults
from dcp_placements.bind.binding import BindError, Own, Place
from dcp_placements.bind.own_chunks import names_its_chunks
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.bind.placing import described, place
from dcp_placements.bind.rule_and_dtensor import bind, fault_of
from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.sharding import Chunk, Cut, Kind, Pick, Sharding, unknown_kind
from dcp_placements.names.flat import Path, RenamedValue, Reshaped
from dcp_placements.names.optimizer_state import possible_parameters
from dcp_placements.names.target import (
    Parts,
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
from dcp_placements.rules.patterns import Rules, rule_name


@dataclass(slots=True)
class Unfolded:
    """A flat state dict with one value per key of the checkpoint.

    Attributes:
        placing: The places of its tensors.
        loading: Whether the values are to be filled from a checkpoint.
        state_dict: The values.
        mappings: The path of each key in the nested dict.
        copies: Further paths of an object that several local keys have as one.
        shared: The name of a scalar or an object whose one value stands for several keys.
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``.
    """

    placing: Placing
    loading: bool
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    copies: dict[str, list[Path]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    def add(self, fqn: str, value: Any, path: Path | None) -> None:
        """Note a value under its key in the checkpoint."""
        if fqn in self.state_dict:
            self.fault(
                fqn,
                "rename= gives this one name to a row and to another value",
                "way out:     map every key of a rank to a key of its own",
            )
        self.state_dict[fqn] = value
        if path is not None:
            self.mappings[fqn] = path

    def fault(self, fqn: str, headline: str, *details: str) -> None:
        """Note a fault."""
        self.placing.faults.append(Fault(fqn, headline, details))


def place_renamed(
    state_dict: dict[str, Any],
    mappings: dict[str, Path],
    reshaped: Reshaped,
    rules: Rules | None,
    stored: Mapping[str, Any] | None = None,
) -> Unfolded:
    """Bind a state dict as ``place`` does, and what a rename makes of its tensors.

    Args:
        state_dict: Flat, as ``rename_keys`` returns it.
        mappings: The path of each key in the nested dict.
        reshaped: The values that become other tensors.
        rules: The user's.
        stored: The checkpoint's metadata by key on a load; None on a save.
    """
    placing = place(state_dict, rules, reshaped.rows)
    unfolded = Unfolded(placing, loading=stored is not None)
    if not reshaped:
        unfolded.state_dict, unfolded.mappings = state_dict, mappings
        return unfolded
    own, placing.placed = placing.placed, {}
    stacks, wholes = _Stacks(unfolded, own, stored or {}, rules), _Wholes(unfolded, own)
    for whole in reshaped.wholes.values():
        wholes.note(whole)
    for fqn, value in state_dict.items():
        if fqn in reshaped.rows:
            stacks.add(fqn, reshaped.rows[fqn], mappings.get(fqn))
        elif fqn in reshaped.wholes:
            wholes.add(reshaped.wholes[fqn])
        else:
            unfolded.add(fqn, value, mappings.get(fqn))
            if fqn in own:
                placing.placed[fqn] = own[fqn]
    return unfolded


class _Stacks:
    """Places values of this rank as rows of one tensor of the checkpoint."""

    def __init__(
        self,
        unfolded: Unfolded,
        own: Mapping[str, Placed],
        stored: Mapping[str, Any],
        rules: Rules | None,
    ) -> None:
        self.unfolded = unfolded
        self._own = own
        self._stored = stored
        self._rules = rules
        self._faulty = {fault.fqn for fault in unfolded.placing.faults}
        self._alike: dict[Any, Place] = {}

    def add(self, fqn: str, held: Sequence[RenamedValue[Row]], path: Path | None) -> None:
        """Place one stack."""
        rows = sorted(held, key=lambda row: row.name.indices)
        self.unfolded.add(fqn, rows[0].value, path)
        tensors = [is_tensor(row.value) for row in rows]
        if not any(tensors):
            self._add_objects(fqn, held)
        elif fqn not in self._faulty and fqn not in self.unfolded.placing.absent:
            try:
                if not all(tensors) or any(names_its_chunks(row.value) for row in rows):
                    raise BindError(
                        "cannot stack what is no tensor, or names its chunks itself, with tensors",
                        f"it stacks:   {format_names([row.key for row in rows], 4)}",
                    )
                self._add_tensors(fqn, rows)
            except (BindError, RenameError) as error:
                fault = fault_of(error, fqn, rule_name(self._rules, fqn))
                self.unfolded.placing.faults.append(fault)

    def _add_objects(self, fqn: str, rows: Sequence[RenamedValue[Row]]) -> None:
        first, *others = rows
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
        self.unfolded.copies[fqn] = [row.path for row in others if row.path is not None]

    def _add_tensors(self, fqn: str, rows: Sequence[RenamedValue[Row]]) -> None:
        tensors, placing = _alike_tensors(rows), self.unfolded.placing
        if freed := freed_faults([(fqn, tensor) for tensor in tensors]):
            placing.faults += freed
            return
        own = self._own.get(fqn) or _plain(fqn, tensors[0])
        stored = self._stored.get(fqn)
        if not own.global_shape and tuple(getattr(stored, "size", (0,))) == ():
            # One scalar for all rows, as a stacked parameter's optimizer state has it.
            chunks = tuple([Chunk((), (), (), part) for part in range(len(rows))])
            scalar = placing.shared(replace(own.place, chunks=chunks))
            placing.placed[fqn] = Placed(
                fqn, tensors[0], scalar, None, parts=tensors, has_own_key=True
            )
            return
        first = row_target(rows[0].name, own.global_shape)
        axes = placing.stack_axes.get(fqn, (-1,) * len(rows[0].name.axes))
        key = own.place, rows[0].name.axes, axes, tuple([row.name.indices for row in rows])
        if key not in self._alike:
            place = _stack_place(own.place, [row.name for row in rows], axes)
            self._alike[key] = placing.shared(place)
        parts = [tensor.detach() for tensor in tensors]
        for dim, origin in enumerate(first.dims):
            if origin is None:
                parts = [part.unsqueeze(dim) for part in parts]
        placing.placed[fqn] = Placed(
            fqn, tensors[0], self._alike[key], own.rule, parts=parts, is_stack=True
        )


def _alike_tensors(rows: Sequence[RenamedValue[Row]]) -> list[torch.Tensor]:
    """Return the local tensors of the rows of one stack.

    Raises:
        BindError: They differ in more than their numbers.
    """
    facts = [described(row.value) for row in rows]
    if len({(part.dtype, part.shape, own.shape, own.placements) for part, own in facts}) > 1:
        details = [
            f"{row.key}: {part.dtype}, {own.format()}"
            for row, (part, own) in zip(rows[:4], facts, strict=False)
        ]
        raise BindError("cannot stack rows of different dtypes, shapes or placements", *details)
    return [part for part, _ in facts]


def _stack_place(own: Place, rows: Sequence[Row], axes: Sequence[int]) -> Place:
    """Return the place of a stack of which a rank has rows that each lie as ``own``.

    Args:
        own: The place of each row as a tensor by itself.
        rows: Those that the rank has, sorted.
        axes: For each dim that the rows lie along, the axis that shards it; -1 for none.
    """
    targets = [row_target(row, own.global_shape) for row in rows]
    numbers = zip(*[row.indices for row in rows], strict=True)
    dims = stack_dims(rows[0], own.global_shape)
    picks = [Pick(*pick) for pick in zip(dims, numbers, axes, strict=True)]
    sharding = _sharding_of(targets[0], own.sharding)
    chunks = [
        chunk for part, target in enumerate(targets) for chunk in target.chunks(own.chunks, part)
    ]
    return Place(
        replace(sharding, cuts=(*picks, *sharding.cuts)), own.axes, tuple(chunks), own.homes
    )


def _plain(fqn: str, tensor: torch.Tensor) -> Placed:
    """Return a tensor that neither a rule nor a DTensor speaks for, as the whole that it is."""
    shape = tuple(tensor.shape)
    place = bind(Own(shape), shape, None)
    assert place is not None
    return Placed(fqn, tensor, place, None)


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


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a rename makes of tensors that have one place.

    Attributes:
        dim: The dim that rows lie along; None of a tensor that is only split.
        total: The number of rows in the checkpoint; 1 of a tensor that is only split.
        made: The rows, or parts, that this rank holds.
    """

    dim: int | None
    total: int
    made: Sequence[_Made]

    @property
    def numbers(self) -> list[int]:
        """The rows that this rank holds."""
        return list(dict.fromkeys([made.number for made in self.made]))


class _Wholes:
    """Places values of this rank as rows and parts, which are tensors in the checkpoint."""

    def __init__(self, unfolded: Unfolded, own: dict[str, Placed]) -> None:
        self.unfolded = unfolded
        self._own = own
        self._faulty = {fault.fqn for fault in unfolded.placing.faults}
        self._alike: dict[Any, _Rows] = {}
        # By the name of a whole, and by every name that optimizer state may have for it.
        self._rows_of: dict[str, _Rows] = {}

    def note(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Note the rows and parts of a tensor."""
        name, tensor = whole.name, whole.value
        label = name.stacked
        if not _has_dims(tensor) or label in self._faulty | self.unfolded.placing.absent:
            return
        if names_its_chunks(tensor):
            self.unfolded.fault(label, "names its chunks itself, and cannot be unstacked")
            return
        own = self._own[label] = self._own.get(label) or _plain(label, tensor)
        try:
            dim = row_dim(name, own.global_shape)
            key = own.place, dim, isinstance(name, Parts) and (name.dim, name.sizes, name.groups)
            if key not in self._alike:
                self._alike[key] = _rows_of(own, name, dim, self.unfolded.placing)
        except RenameError as error:
            self.unfolded.fault(label, error.headline, *error.details)
            return
        components = label.split(".")
        runs = [".".join(components[at:]) for at in range(len(components))]
        self._rows_of[label] = self._alike[key]
        for run in (*runs, *possible_parameters(label)):
            self._rows_of.setdefault(run, self._alike[key])

    def add(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Place one value, or give a scalar or an object to every row of its parameter."""
        name, unfolded = whole.name, self.unfolded
        if not _has_dims(whole.value):
            self._share(whole)
            return
        own, rows = self._own.get(name.stacked), self._rows_of.get(name.stacked)
        if own is None or rows is None or name.stacked in self._faulty:
            return
        if rows.dim is not None:
            unfolded.totals.update(dict.fromkeys(name.fqns, rows.total))
        tensor = own.tensor.detach()
        for made in rows.made:
            fqn = name.fqns[made.part].replace("{}", str(made.number))
            held = [tensor if rows.dim is None else tensor.select(rows.dim, at) for at in made.at]
            parts = held if len(held) > 1 else ()
            unfolded.add(fqn, held[0], whole.path)
            unfolded.placing.placed[fqn] = Placed(
                fqn, held[0], made.place, own.rule, parts=parts, has_own_key=True
            )

    def _share(self, whole: RenamedValue[Rows | Parts]) -> None:
        """Give a scalar or an object to every row of its parameter that this rank holds."""
        name, unfolded = whole.name, self.unfolded
        runs = possible_parameters(name.stacked) or _grouped_parameters(name.stacked)
        rows = next((self._rows_of[run] for run in runs if run in self._rows_of), None)
        if rows is None:
            unfolded.fault(
                name.stacked,
                "its rows cannot be determined: it is a scalar or an object, and no tensor of its "
                "parameter is unstacked with it",
                "way out:     save it together with the parameter; or leave this key as it is in "
                "rename=",
            )
            return
        numbers = rows.numbers
        if unfolded.loading and isinstance(whole.value, torch.Tensor):
            # One scalar stands for all rows, whichever this rank holds.
            numbers = list(range(rows.total))
        elif unfolded.loading and not numbers and rows.total:
            numbers = [0]
        for number in numbers:
            for fqn in name.fqns:
                key = fqn.replace("{}", str(number))
                unfolded.add(key, whole.value, whole.path)
                unfolded.shared[key] = name.stacked


def _rows_of(own: Placed, name: Rows | Parts, dim: int | None, placing: Placing) -> _Rows:
    """Return the rows and parts of a tensor that this rank holds.

    Raises:
        RenameError: The tensor cannot be cut into the parts.
    """
    place, shape = own.place, own.global_shape
    if dim is None:
        targets = part_targets(name, shape)
        rows = [_Made(0, part, (0,), _place_of(one, place)) for part, one in enumerate(targets)]
        return _Rows(dim, 1, [row._replace(place=placing.shared(row.place)) for row in rows])
    held: dict[int, list[int]] = {}
    local = [
        n
        for start, stop in place.sharding.dim_at(dim, place.coordinate)
        for n in range(start, stop)
    ]
    for index, number in enumerate(local):
        if number < shape[dim]:
            held.setdefault(number, []).append(index)
    made = []
    parts = part_targets(name, removed(shape, dim))
    for number, at in held.items():
        for part, target in enumerate(parts):
            row = _place_of(target.of_row(number, dim), place, at)
            made.append(_Made(number, part, at, placing.shared(row)))
    return _Rows(dim, shape[dim], made)


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
        held = [chunk for chunk in whole.chunks if all(_is_in(chunk, dim, index) for dim in dims)]
        chunks += target.chunks(held, part)
    sharding = _sharding_of(target, whole.sharding)
    # Where no axis cuts a fused dim, one run of the whole is the same run on every rank.
    split = _split_dims(target, whole.global_shape)
    is_exact = not split or (
        len(target.boxes) == 1 and not any(c.dim in split for c in sharding.cuts)
    )
    return Place(sharding, whole.axes, tuple(chunks), whole.homes, is_exact)


def _is_in(chunk: Chunk, dim: int, index: int) -> bool:
    """Whether an index of the local tensor is one of a chunk's."""
    return chunk.local_offsets[dim] <= index < chunk.local_offsets[dim] + chunk.sizes[dim]


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
    cuts: list[Cut | Pick] = []
    for cut in whole.cuts:
        if cut.dim not in target.dims:
            continue
        dim = target.dims.index(cut.dim)
        if dim not in split:
            cuts.append(replace(cut, dim=dim))
            continue
        match cut.kind:
            case Kind.PLAIN | Kind.FUSED | Kind.STRIDED | Kind.LISTED:
                cuts.append(Cut(dim, cut.axis))
            case _:
                raise unknown_kind(cut.kind)
    padded = None
    if whole.padded_shape is not None:
        padded = tuple(
            [
                size if origin is None or dim in split else whole.padded_shape[origin]
                for dim, (origin, size) in enumerate(zip(target.dims, target.shape, strict=True))
            ]
        )
    for dim in split:
        origin = target.dims[dim]
        if origin is not None and whole.cut_shape[origin] != whole.global_shape[origin]:
            raise RenameError(
                f"cannot be split: dim {dim} is padded, to {whole.cut_shape[origin]} of "
                f"{whole.global_shape[origin]}"
            )
    return Sharding(target.shape, whole.axis_sizes, tuple(cuts), padded)


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


def equal_values(one: Any, other: Any) -> bool:
    """Whether two objects are equal; tensors and arrays in them by their elements.

    >>> equal_values({"betas": [torch.ones(2)]}, {"betas": [torch.ones(2)]})
    True
    """
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(equal_values(one[k], other[k]) for k in one)
        if isinstance(one, list | tuple) and type(one) is type(other):
            return len(one) == len(other) and all(map(equal_values, one, other))
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other)
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays within other objects
        return False
