"""What a rank sends to the coordinator: its key tables, and per group the boxes that it holds.

This is the one form of a plan, whatever a tensor is: a plain shard, strided, fused, padded, rows of
an ``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key; so boxes are
all that the coordinator needs to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        keys: All keys, in state dict order.
    """

    tables: list[KeyTable] = field(default_factory=list)
    boxes: list[list[tuple[Box, ...]]] = field(default_factory=list)
    keys: list[Held] = field(default_factory=list)

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
        found: list[list[list[Held]]] = [[[] for _ in table.groups] for table in self.tables]
        for held in self.keys:
            found[held.table][held.group].append(held)
        for table, groups in enumerate(found):
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
    numbers: dict[Alike, int] = {}
    # Most tensors lie like another one: by all that a group is worked out from, its number.
    memo: dict[Any, int] = {}
    places: dict[tuple[Any, int, bool], tuple[int, int]] = {}
    tables: dict[Any, int] = {}
    entries: list[list[list[Entry]]] = []
    for fqn, value in state_dict.items():
        if fqn in placing.absent:
            continue
        placed = placing.placed.get(fqn)
        source = _source_of_group(fqn, value, placed)
        if source not in memo:
            memo[source] = numbers.setdefault(_alike(fqn, value, placed), len(numbers))
        path = (fqn,) if paths is None else paths.get(fqn, (fqn,))
        head = path[0] if len(path) > 1 else fqn.partition(".")[0]
        has_own_key = placed is not None and placed.has_own_key
        key = head, memo[source], has_own_key
        if key not in places:
            group, boxes = list(numbers)[memo[source]]
            table = tables.setdefault(
                (head, group.kind, group.axis_names, has_own_key), len(holding.tables)
            )
            if table == len(holding.tables):
                holding.tables.append(KeyTable())
                holding.boxes.append([])
                entries.append([])
            places[key] = table, len(entries[table])
            holding.tables[table].groups.append(group)
            holding.boxes[table].append(boxes)
            entries[table].append([])
        table, number = places[key]
        keys = entries[table][number]
        holding.keys.append(Held(fqn, value, placed, table, number, len(keys)))
        keys.append((fqn, None if placed is None else placed.rule, path_counts(path)))
    for key_table, by_group in zip(holding.tables, entries, strict=True):
        _add_keys(key_table, by_group)
    return holding


def _add_keys(table: KeyTable, by_group: Sequence[Sequence[Entry]]) -> None:
    """Add its keys to a table that has its groups."""
    entries = [entry for group in by_group for entry in group]
    rules = {rule: at for at, rule in enumerate(dict.fromkeys(rule for _, rule, _ in entries))}
    paths = {path: at for at, path in enumerate(dict.fromkeys(path for _, _, path in entries))}
    table.fqns = [fqn for fqn, _, _ in entries]
    table.sizes = [len(group) for group in by_group]
    table.rules, table.paths = list(rules), list(paths)
    table.rule_of = [rules[rule] for _, rule, _ in entries]
    table.path_of = [paths[path] for _, _, path in entries]


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
    keys = [
        Held(fqn, None, None, table, group, position)
        for table, key_table in enumerate(tables)
        for group in range(len(key_table.groups))
        for position, fqn in enumerate(key_table.keys(group))
    ]
    return Holding(list(tables), sent_boxes(plan, tables), keys)


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

Entry = tuple[str, str | None, tuple[int, ...]]
"""A key, the rule that matched it, and how its path makes it."""


def _source_of_group(fqn: str, value: Any, placed: Placed | None) -> Any:
    """Return a value that determines the group of a key on this rank."""
    if placed is not None:
        tensor = placed.tensor
        look = tensor.dtype, tensor.layout, tensor.requires_grad
        return placed.binding, len(placed.chunks), look
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
