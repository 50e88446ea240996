"""What a rank sends to the coordinator: its key tables, and per group the boxes that it holds.

This is the one form of a plan, whatever a tensor is: a plain shard, strided, fused, padded, rows of
an ``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key; so boxes are
all that the coordinator needs to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dcp_placements._torch import SavePlan, default_write_items, has_hooks
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box, Chunk
from dcp_placements.names.renamed_keys import Path
from dcp_placements.save.key_table import (
    OBJECT,
    PLAIN,
    SHARD,
    Group,
    KeyTable,
    declared_group,
    path_counts,
)
from dcp_placements.save.packing import packed_ints, unpacked_ints

T = TypeVar("T")

OBJECT_BOX = Box((), ())
"""An object is held as one box without dims, as a scalar is."""


@dataclass(slots=True)
class LocalPlan:
    """All that one rank sends to the coordinator.

    Attributes:
        rank: Its global rank.
        tables: Its key tables, packed.
        boxes: Packed: for each group of each table in turn how many boxes the rank holds, then in
            the same order offsets and sizes of those boxes.
        coordinate: Its position along each of ``Statement.axis_sizes``, in that order.
        digest_kind: ``"sampled"``, ``"full"`` or ``"off"``.
        digests: The digest vector (see ``digest_folding``); empty for none.
        buckets: Into how many buckets digests are folded; 0 where none is.
        stored_digests: 16 bytes per key and box as files will hold them, group after group; only
            with ``"full"``.
        statement: A packed ``Statement``.
        faults: Why the rank cannot save, packed; it has nothing else then.
    """

    rank: int
    tables: tuple[bytes, ...]
    boxes: bytes
    coordinate: tuple[int, ...] = ()
    digest_kind: str = "off"
    digests: bytes = b""
    buckets: int = 0
    stored_digests: bytes = b""
    statement: bytes = b""
    faults: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        # The names of the fields do not travel.
        return LocalPlan, tuple(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class Held:
    """One key of this rank.

    Attributes:
        fqn: The key.
        value: The state dict's value.
        placed: Where a placed tensor lies; None for what has no place of its own.
        table: Position of its table.
        group: Number of its group there.
        position: Position among the keys of its group.
    """

    fqn: str
    value: Any
    placed: Placed | None
    table: int
    group: int
    position: int


@dataclass(slots=True)
class Holding:
    """What this rank holds, as it keeps it for itself.

    Attributes:
        tables: Its key tables.
        boxes: Per table and group, the boxes that it holds.
        members: Per table and group, the keys.
        keys: All keys, in state dict order.
    """

    tables: list[KeyTable] = field(default_factory=list)
    boxes: list[list[tuple[Box, ...]]] = field(default_factory=list)
    members: list[list[list[Held]]] = field(default_factory=list)
    keys: list[Held] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def place_of(self, group: Group, boxes: tuple[Box, ...], *, kind: Any) -> tuple[int, int]:
        """Return table and number of a group; a new one is added.

        Args:
            group: What its keys have in common.
            boxes: Those that the rank holds of each.
            kind: Different for groups that must not be in one table.
        """
        kind = kind, group.kind, group.axis_names
        table = self._numbers.setdefault(kind, len(self.tables))
        if table == len(self.tables):
            self.tables.append(KeyTable())
            self.boxes.append([])
            self.members.append([])
        groups = self.tables[table].groups
        number = self._numbers.setdefault((table, group, boxes), len(groups))
        if number == len(groups):
            groups.append(group)
            self.boxes[table].append(boxes)
            self.members[table].append([])
        return table, number

    def packed_boxes(self) -> bytes:
        """Return ``LocalPlan.boxes``."""
        held = [boxes for groups in self.boxes for boxes in groups]
        flat = [len(boxes) for boxes in held]
        for boxes in held:
            for box in boxes:
                flat += box.offsets
                flat += box.sizes
        return packed_ints(flat)

    def by_group(self) -> Iterator[tuple[int, int, list[Held]]]:
        """Yield the keys of each table and group, in the order of the table."""
        for table, groups in enumerate(self.members):
            for group, keys in enumerate(groups):
                yield table, group, keys


def holding_of(
    state_dict: Mapping[str, Any], placing: Placing, paths: Mapping[str, Path] | None
) -> Holding:
    """Return what a rank holds of a flat state dict, by group.

    Keys that other ranks need not have stand in tables apart, so that the other tables are equal on
    more ranks: by the mesh axes of their tensors, and by the head of the nested dict.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        paths: Where the keys stand in the nested dict; None where it was not flattened.
    """
    holding = Holding()
    path_of = {} if paths is None else paths
    # Table and number of each group, by all that determines it.
    places: dict[Any, tuple[int, int]] = {}
    for fqn, value in state_dict.items():
        if fqn in placing.absent:
            continue
        placed = placing.placed.get(fqn)
        path = path_of.get(fqn, (fqn,))
        head = path[0] if len(path) > 1 else fqn.partition(".")[0]
        source: tuple[Any, ...]
        if placed is None:
            source = head, _source_of_group(fqn, value)
        else:
            tensor = placed.tensor
            look = tensor.dtype, tensor.layout, tensor.requires_grad
            source = head, placed.place.number, placed.has_own_key, look
        place = places.get(source)
        if place is None:
            has_own_key = placed is not None and placed.has_own_key
            alike = _alike(fqn, value, placed)
            place = places[source] = holding.place_of(*alike, kind=(head, has_own_key))
        table, number = place
        members = holding.members[table][number]
        held = Held(fqn, value, placed, table, number, len(members))
        holding.keys.append(held)
        members.append(held)
    for key_table, by_group in zip(holding.tables, holding.members, strict=True):
        _add_keys(key_table, by_group, path_of)
    return holding


def _add_keys(
    table: KeyTable, by_group: Sequence[Sequence[Held]], paths: Mapping[str, Path]
) -> None:
    """Add its keys to a table that has its groups."""
    keys = [held for group in by_group for held in group]
    table.fqns = [held.fqn for held in keys]
    table.sizes = [len(group) for group in by_group]
    rules = [None if held.placed is None else held.placed.rule for held in keys]
    table.rules, table.rule_of = _numbered(rules)
    forms = [path_counts(paths.get(fqn, (fqn,))) for fqn in table.fqns]
    table.paths, table.path_of = _numbered(forms)


def _numbered(values: Sequence[T]) -> tuple[list[T], list[int]]:
    """Return the different values, and the number of each value among them."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return list(numbers), [numbers[value] for value in values]


def foreign_plans(plans: Sequence[SavePlan]) -> list[Fault]:
    """Return that other planners made some of the plans, if they did."""
    ours = [isinstance(plan.planner_data, LocalPlan) for plan in plans]
    if all(ours):
        return []
    others = len(ours) - sum(ours)
    return [
        Fault(
            "this save",
            f"{others} of {len(ours)} ranks planned it with another planner, the first at position "
            f"{ours.index(False)}",
            ("way out:     the same planner on every rank; installed() on every rank",),
        )
    ]


def sent_holding(plan: LocalPlan, tables: Sequence[KeyTable]) -> Holding:
    """Return what a plan shows of its rank's holding: no values, keys in table order.

    Args:
        plan: The plan.
        tables: Its tables, unpacked.
    """
    holding = Holding(list(tables), sent_boxes(plan, tables))
    for table, key_table in enumerate(tables):
        holding.members.append([])
        for group in range(len(key_table.groups)):
            keys = enumerate(key_table.keys(group))
            members = [Held(fqn, None, None, table, group, position) for position, fqn in keys]
            holding.members[table].append(members)
            holding.keys += members
    return holding


def sent_boxes(plan: LocalPlan, tables: Sequence[KeyTable]) -> list[list[tuple[Box, ...]]]:
    """Return the boxes in a plan, per table and group."""
    flat: list[int] = unpacked_ints(plan.boxes).tolist()
    at = sum(len(table.groups) for table in tables)
    counts = iter(flat[:at])
    found = []
    for table in tables:
        held = []
        for group in table.groups:
            boxes, ndim = [], len(group.shape)
            for _ in range(next(counts)):
                row = tuple(flat[at : at + 2 * ndim])
                boxes.append(Box(row[:ndim], row[ndim:]))
                at += 2 * ndim
            held.append(tuple(boxes))
        found.append(held)
    return found


def offset_slices(counts: Sequence[int], tables: Sequence[KeyTable]) -> list[slice | None]:
    """Return where the offsets of each box in a plan stand among its integers; None of objects.

    Args:
        counts: Boxes of each group of each table, with which the integers begin.
        tables: Of the rank.
    """
    at, slices = len(counts), []
    groups = [group for table in tables for group in table.groups]
    for group, count in zip(groups, counts, strict=True):
        ndim = len(group.shape)
        for _ in range(count):
            slices.append(None if group.kind == OBJECT else slice(at, at + ndim))
            at += 2 * ndim
    return slices


Alike = tuple[Group, tuple[Box, ...]]
"""What makes a group on one rank: what its keys have in common, and the boxes held."""


def _source_of_group(fqn: str, value: Any) -> Any:
    """Return a value that determines the group of a key without a place."""
    if has_hooks(value):
        return fqn
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.layout, value.requires_grad
    return None


def _alike(fqn: str, value: Any, placed: Placed | None) -> Alike:
    if placed is not None:
        return _of_placed(placed)
    if has_hooks(value):
        return _of_own_chunks(fqn, value)
    if not isinstance(value, torch.Tensor):
        return Group(OBJECT), (OBJECT_BOX,)
    shape = tuple(value.shape)
    return Group(PLAIN, shape, *_look_of(value)), (Box((0,) * len(shape), shape),)


def _look_of(tensor: torch.Tensor) -> tuple[torch.dtype, str, bool]:
    return tensor.dtype, str(tensor.layout).removeprefix("torch."), tensor.requires_grad


def _of_placed(placed: Placed) -> Alike:
    binding = placed.binding
    names = tuple([axis.name for axis in binding.axes])
    look = _look_of(placed.tensor)
    group = declared_group(binding.sharding, names, *look, is_exact=binding.is_exact)
    return group, tuple([chunk.box for chunk in held_chunks(placed)])


def _of_own_chunks(fqn: str, value: Any) -> Alike:
    items = default_write_items(fqn, value)
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    if not data:
        return Group(OBJECT), (OBJECT_BOX,)
    boxes = dict.fromkeys(Box(tuple(o.chunk.offsets), tuple(o.chunk.sizes)) for o in data)
    look = data[0].properties
    name = str(look.layout).removeprefix("torch.")
    shape = tuple(data[0].size)
    return Group(SHARD, shape, look.dtype, name, look.requires_grad), tuple(boxes)


def held_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a tensor is written as.

    A tensor without elements keeps its key by one empty chunk; of a row that a rank holds twice
    the first is written.
    """
    if 0 in placed.global_shape:
        origin = (0,) * len(placed.global_shape)
        return (Chunk(origin, origin, placed.global_shape),)
    by_offsets = {chunk.offsets: chunk for chunk in reversed(placed.chunks)}
    if len(by_offsets) < len(placed.chunks):
        return tuple(reversed(by_offsets.values()))
    return placed.chunks


def chunk_data(placed: Placed, chunk: Chunk) -> torch.Tensor:
    """Return the data of a chunk: a view of the local tensor, no copy."""
    if 0 in placed.global_shape:
        return placed.tensor.detach().new_empty(placed.global_shape)
    return placed.view(chunk)
