"""What a rank sends to the coordinator: its key tables, and per group the boxes that it holds.

This is the one form of a plan, whatever a tensor is: a plain shard, strided, fused, padded, rows of
an ``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key; so boxes are
all that the coordinator needs to compare.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from dcp_placements._torch import default_write_items, has_hooks
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.layout.sharding import Box, Chunk
from dcp_placements.names.keys import Path
from dcp_placements.save.key_table import (
    OBJECT,
    PLAIN,
    SHARD,
    Declaration,
    Group,
    KeyTable,
    declaration_of,
    path_counts,
)

T = TypeVar("T")
Ints = np.ndarray[Any, np.dtype[np.int64]]

OBJECT_BOX = Box((), ())
"""An object is held as one box without dims, as a scalar is."""

_SHORT_NBYTES = 128
_WIDTHS = {b"B": 1 << 8, b"H": 1 << 16, b"I": 1 << 32, b"q": 1 << 63}
_COMPRESSED = b"z"


def packed_ints(values: Sequence[int] | Ints) -> bytes:
    """Return non-negative integers as they travel; long rows of them mostly repeat themselves."""
    array = np.asarray(values, dtype=np.int64)
    largest = int(array.max()) if array.size else 0
    kind = next(kind for kind, end in _WIDTHS.items() if largest < end)
    data = array.astype("<" + kind.decode()).tobytes()
    if len(data) <= _SHORT_NBYTES:
        return kind + data
    return _COMPRESSED + kind + zlib.compress(data, 1)


def unpacked_ints(packed: bytes) -> Ints:
    """Return the integers that were packed."""
    kind, data = packed[:1], packed[1:]
    if kind == _COMPRESSED:
        kind, data = data[:1], zlib.decompress(data[1:])
    return np.frombuffer(data, "<" + kind.decode()).astype(np.int64)


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
        digests: The digest vector (see ``digest_vector``); empty for none.
        buckets: Into how many buckets digests are folded; 0 where none is.
        stored_digests: 16 bytes per key and box as files will hold them, group after group; only
            with ``"full"``.
        statement: A packed ``Statement``.
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

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        paths: Where the keys stand in the nested dict; None where it was not flattened.
    """
    builder = _Builder()
    for fqn, value in state_dict.items():
        if fqn not in placing.absent:
            path = (fqn,) if paths is None else paths.get(fqn, (fqn,))
            builder.add(fqn, value, placing.placed.get(fqn), path)
    return builder.finished()


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


Alike = tuple[Group, tuple[Box, ...]]
"""What makes a group on one rank: what its keys have in common, and the boxes held."""


class _Group:
    """A group in the making: its place, and its keys with their rules and path counts."""

    __slots__ = ("keys", "number", "table")

    def __init__(self, table: int, number: int) -> None:
        self.table = table
        self.number = number
        self.keys: list[tuple[str, str | None, tuple[int, ...]]] = []


class _Builder:
    def __init__(self) -> None:
        # Most tensors lie like another one: by all that a group is worked out from, its number.
        self.known: dict[Any, int] = {}
        self.numbers: dict[Alike, int] = {}
        self.alike: list[Alike] = []
        self.groups: dict[tuple[Any, int, bool], _Group] = {}
        self.tables: dict[Any, list[tuple[Alike, _Group]]] = {}
        self.order: dict[Any, int] = {}
        self.keys: list[Held] = []

    def add(self, fqn: str, value: Any, placed: Placed | None, path: Path) -> None:
        number = self._number(fqn, value, placed)
        own = placed is not None and placed.has_own_key
        head = path[0] if len(path) > 1 else fqn.partition(".")[0]
        group = self.groups.get((head, number, own))
        if group is None:
            group = self.groups[head, number, own] = self._group(head, number, own)
        rule = None if placed is None else placed.rule
        self.keys.append(Held(fqn, value, placed, group.table, group.number, len(group.keys)))
        group.keys.append((fqn, rule, path_counts(path)))

    def _group(self, head: Any, number: int, own: bool) -> _Group:
        """Begin a group.

        Keys that other ranks need not have stand in tables apart, so that the other tables are
        equal on more ranks: by the mesh axes of their tensors, and by the head of the nested dict.
        """
        alike = self.alike[number]
        apart = (head, alike[0].kind, alike[0].declared.axis_names, own)
        table = self.tables.setdefault(apart, [])
        at = self.order.setdefault(apart, len(self.order))
        group = _Group(at, len(table))
        table.append((alike, group))
        return group

    def finished(self) -> Holding:
        tables = list(self.tables.values())
        boxes = [[alike[1] for alike, _ in table] for table in tables]
        return Holding([_key_table(table) for table in tables], boxes, self.keys)

    def _number(self, fqn: str, value: Any, placed: Placed | None) -> int:
        """Return which of ``alike`` a value is."""
        key: Any
        if placed is not None:
            tensor = placed.tensor
            look = tensor.dtype, tensor.layout, tensor.requires_grad
            key = (placed.binding, len(placed.chunks), look)
        elif has_hooks(value):
            key = fqn
        elif isinstance(value, torch.Tensor):
            key = (value.shape, value.dtype, value.layout, value.requires_grad)
        else:
            key = None
        number = self.known.get(key)
        if number is None:
            alike = _alike(fqn, value, placed)
            number = self.numbers.setdefault(alike, len(self.alike))
            if number == len(self.alike):
                self.alike.append(alike)
            self.known[key] = number
        return number


def _key_table(groups: Sequence[tuple[Alike, _Group]]) -> KeyTable:
    keys = [key for _, group in groups for key in group.keys]
    rules = _numbered([rule for _, rule, _ in keys if rule is not None])
    paths = _numbered([counts for _, _, counts in keys])
    return KeyTable(
        groups=[alike[0] for alike, _ in groups],
        fqns=[fqn for fqn, _, _ in keys],
        sizes=[len(group.keys) for _, group in groups],
        rules=list(rules),
        rule_of=[-1 if rule is None else rules[rule] for _, rule, _ in keys],
        paths=list(paths),
        path_of=[paths[counts] for _, _, counts in keys],
    )


def _numbered(values: Iterable[T]) -> dict[T, int]:
    """Return the different values, numbered as they come."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}


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
    declared = declaration_of(binding.sharding, names, is_exact=binding.is_exact)
    group = Group(SHARD, placed.global_shape, *_look_of(placed.tensor), declared)
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
    return Group(SHARD, shape, look.dtype, name, look.requires_grad, Declaration()), tuple(boxes)


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
