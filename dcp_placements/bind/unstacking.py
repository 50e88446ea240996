"""One tensor for all experts on a rank, one per expert in the checkpoint; and fused tensors, split.

The rules speak of the whole tensor. Its layout contains the rows that this rank holds, under FSDP
too; each of them is a view with one dim less. A part is the chunks of the fused tensor, clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dcp_placements.bind.binding import Binding, Own
from dcp_placements.bind.own_chunks import names_its_chunks
from dcp_placements.bind.placed import Place, Placed, Placing
from dcp_placements.bind.placing import place
from dcp_placements.bind.rule_and_dtensor import bind
from dcp_placements.bind.unfolded import Unfolded, is_tensor
from dcp_placements.layout.sharding import Cut, Kind, Layout, Pick, Sharding, unknown_kind
from dcp_placements.names.flat import Unstacked
from dcp_placements.names.optimizer_state import possible_parameters
from dcp_placements.names.target import (
    Parts,
    RenameError,
    Rows,
    Target,
    part_targets,
    removed,
    replaced,
    row_dim,
)


@dataclass(slots=True)
class _Rows:
    """The rows of tensors that have one layout.

    Attributes:
        total: How many there are; 1 for a tensor that is only split.
        numbers: Those that this rank holds, each with its index in the local tensor; None for all
            of the tensor.
        places: Where a row lies in the checkpoint: one place, or one per part.
    """

    total: int
    numbers: list[tuple[int, int | None]]
    places: list[Place]


class RowPlacer:
    """Places each ``Unstacked`` value of a state dict as its rows and parts."""

    def __init__(self, unfolded: Unfolded, values: Sequence[Unstacked]) -> None:
        self.unfolded = unfolded
        self._alike: dict[object, _Rows] = {}
        self._rows_of: dict[str, _Rows] = {}
        self._whole = self._place_whole(values)

    def _place_whole(self, values: Sequence[Unstacked]) -> Placing:
        """Place the whole tensors, and note the rows of each."""
        fault, placing = self.unfolded.fault, self.unfolded.placing
        tensors = {}
        for value in values:
            if _has_rows(value):
                name = value.name.stacked
                if name in tensors:
                    fault(value.name.fqn, f"two tensors are called {name} by rename=")
                tensors[name] = value.value
        whole = place(tensors, self.unfolded.rules)
        placing.faults += whole.faults
        for rule, count in whole.matched.items():
            placing.matched[rule] = placing.matched.get(rule, 0) + count
        faulty = {fault.fqn for fault in whole.faults}
        for name, tensor in tensors.items():
            if names_its_chunks(tensor) and name not in faulty:
                whole.placed.pop(name, None)
                fault(name, "names its chunks itself, and cannot be unstacked")
                continue
            if name in whole.placed or name in whole.absent or name in faulty:
                continue
            shape = tuple(tensor.shape)
            binding = bind(Own(shape), shape, None)
            assert binding is not None
            plain = whole.place_of(binding, binding.layout.chunks())
            whole.placed[name] = Placed(name, tensor, plain, None)
        for value in values:
            if value.name.stacked in whole.placed:
                try:
                    self._note_rows(value.name, whole.placed[value.name.stacked])
                except RenameError as error:
                    fault(value.name.stacked, error.headline, *error.details)
                    del whole.placed[value.name.stacked]
        return whole

    def _note_rows(self, name: Rows | Parts, placed: Placed) -> None:
        """Note the rows of a tensor, by every name that its optimizer state may have for it."""
        dim = row_dim(name, placed.global_shape)
        parts = (name.dim, name.sizes, name.groups) if isinstance(name, Parts) else None
        key = placed.place.number, dim, parts
        rows = self._alike.get(key)
        if rows is None:
            rows = self._alike[key] = _rows_of(placed, name, dim, self.unfolded.placing)
        self._rows_of[name.stacked] = rows
        components = name.stacked.split(".")
        runs = [".".join(components[at:]) for at in range(len(components))]
        for run in (*runs, *possible_parameters(name.stacked)):
            self._rows_of.setdefault(run, rows)

    def add(self, value: Unstacked) -> None:
        """Place one value, or give a scalar or an object to every row of its parameter."""
        name = value.name
        if name.stacked in self._whole.absent:
            return
        placed = self._whole.placed.get(name.stacked)
        if placed is None:
            if not _has_rows(value):
                self._share(value)
            return
        rows = self._rows_of[name.stacked]
        dim = row_dim(name, placed.global_shape)
        if dim is not None:
            self.unfolded.totals.update(dict.fromkeys(name.fqns, rows.total))
        placing, tensor = self.unfolded.placing, placed.tensor.detach()
        held: dict[int, list[torch.Tensor]] = {}
        for number, at in rows.numbers:
            row = tensor if at is None or dim is None else tensor.select(dim, at)
            held.setdefault(number, []).append(row)
        for number, tensors in held.items():
            for fqn, row_place in zip(_fqns(name, number), rows.places, strict=True):
                self.unfolded.add(fqn, tensors[0], value.path)
                placing.place_row(fqn, row_place, placed.rule, tensors)

    def _share(self, value: Unstacked) -> None:
        """Give a scalar or an object to every row of its parameter that this rank holds."""
        name, unfolded = value.name, self.unfolded
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
        numbers = list(dict.fromkeys(number for number, _ in rows.numbers))
        if unfolded.loading and isinstance(value.value, torch.Tensor):
            # One scalar stands for all rows, whichever this rank holds.
            numbers = list(range(rows.total))
        elif unfolded.loading and not numbers and rows.total:
            numbers = [0]
        for number in numbers:
            for fqn in _fqns(name, number):
                unfolded.add(fqn, value.value, value.path)
                unfolded.shared[fqn] = name.stacked


def _has_rows(value: Unstacked) -> bool:
    """Whether a value is a tensor with dims; a scalar or an object has no rows of its own."""
    return is_tensor(value.value) and len(value.value.shape) > 0


def _fqns(name: Rows | Parts, number: int) -> list[str]:
    """Return the keys of a row in the checkpoint: one, or one per part."""
    return [fqn.replace("{}", str(number)) for fqn in name.fqns]


def _grouped_parameters(fqn: str) -> list[str]:
    """Return the parameters that a key of ``param_groups`` may be about."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[at + 1 :]) for at, part in enumerate(parts) if part == "param_groups"]


def _rows_of(placed: Placed, name: Rows | Parts, dim: int | None, placing: Placing) -> _Rows:
    """Return the rows of a tensor that this rank holds.

    Raises:
        RenameError: The tensor cannot be cut into the parts.
    """
    binding, chunks = placed.binding, placed.chunks
    rows = _Rows(1, [(0, None)], [])
    if dim is not None:
        local = [n for start, stop in binding.layout.intervals[dim] for n in range(start, stop)]
        rows.total = binding.global_shape[dim]
        rows.numbers = [(number, at) for at, number in enumerate(local) if number < rows.total]
        binding = _row_binding(binding, dim)
        chunks = binding.layout.chunks()
    if isinstance(name, Rows):
        rows.places = [placing.place_of(binding, tuple(chunks))]
        return rows
    for target in part_targets(name, binding.global_shape):
        part = _part_binding(binding, target, name.dim % len(target.shape))
        rows.places.append(placing.place_of(part, target.chunks(chunks)))
    return rows


def _row_binding(binding: Binding, dim: int) -> Binding:
    """Return the binding of each row along ``dim``."""
    sharding = binding.sharding
    padded = sharding.padded_shape
    row = Sharding(
        removed(sharding.global_shape, dim),
        sharding.axis_sizes,
        tuple([replace(c, dim=c.dim - (c.dim > dim)) for c in sharding.cuts if c.dim != dim]),
        None if padded is None else removed(padded, dim),
    )
    layout = Layout(row.global_shape, removed(binding.layout.intervals, dim))
    return Binding(row, binding.axes, layout)


def _part_binding(binding: Binding, part: Target, dim: int) -> Binding:
    """Return the binding of a part of a fused tensor.

    Raises:
        RenameError: The fused dim is padded.
    """
    sharding, size = binding.sharding, binding.global_shape[dim]
    if sharding.cut_shape[dim] != size:
        raise RenameError(
            f"cannot be split: dim {dim} is padded, to {sharding.cut_shape[dim]} of {size}"
        )
    intervals = []
    for start, stop in binding.layout.intervals[dim]:
        for source, target in part.boxes:
            first = source.offsets[dim]
            low, high = max(start, first), min(stop, first + source.sizes[dim])
            if low < high:
                shift = target.offsets[dim] - first
                intervals.append((low + shift, high + shift))
    padded = sharding.padded_shape
    cut = Sharding(
        part.shape,
        sharding.axis_sizes,
        tuple([c if c.dim != dim else _cut_of_part(c) for c in sharding.cuts if c.axis >= 0]),
        None if padded is None else replaced(padded, dim, part.shape[dim]),
    )
    layout = Layout(part.shape, replaced(binding.layout.intervals, dim, tuple(intervals)))
    # Where no axis cuts the dim, one run of the whole is the same run on every rank.
    is_exact = len(part.boxes) == 1 and not any(c.dim == dim for c in sharding.cuts)
    return Binding(cut, binding.axes, layout, is_exact=is_exact)


def _cut_of_part(cut: Cut | Pick) -> Cut:
    """Return the cut of a part of a fused dim by the axis that cuts the dim.

    It is known which axis that is, but not how it cuts: parts are not shards of equal size.
    """
    match cut.kind:
        case Kind.PLAIN | Kind.FUSED | Kind.STRIDED | Kind.LISTED:
            return Cut(cut.dim, cut.axis)
        case _:
            raise unknown_kind(cut.kind)
