"""What a rank sends to the coordinator: its key tables, and per group the boxes that it holds.

This is the one form of a plan, whatever a tensor is: a plain shard, strided, fused, padded, rows of
an ``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key; so boxes are
all that the coordinator needs to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar

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

Boxes = tuple[Box, ...]

OBJECT_BOXES = (Box((), ()),)
"""An object is held as one box without dims, as a scalar is."""


class LocalPlan(NamedTuple):
    """All that one rank sends to the coordinator.

    Attributes:
        rank: Its global rank.
        tables: Its key tables, packed.
        boxes: The boxes that it holds of each group of each table in turn, packed.
        coordinate: Its position along each of ``Statement.axis_sizes``, in that order.
        digest_kind: ``"sampled"``, ``"full"`` or ``"off"``.
        digests: The digest vector (see ``digest_folding``); empty for none.
        is_folded: Whether digests are folded.
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
    is_folded: bool = False
    stored_digests: bytes = b""
    statement: bytes = b""
    faults: bytes = b""


@dataclass(slots=True)
class Held:
    """One key of a rank.

    Attributes:
        fqn: The key.
        value: The state dict's value; None on the coordinator.
        placed: Where a placed tensor lies; None for what has no place of its own.
        group: What it has in common with the other keys of its group.
        boxes: The boxes that the rank holds of it.
        first_chunk: The number of its first box among those of all keys, table after table.
    """

    fqn: str
    value: Any
    placed: Placed | None
    group: Group
    boxes: Boxes
    first_chunk: int = 0


@dataclass(slots=True)
class Holding:
    """What one rank holds.

    Attributes:
        tables: Its key tables.
        groups: The keys of each group of each table in turn.
        keys: All keys: on the rank in state dict order, on the coordinator in table order.
    """

    tables: list[KeyTable] = field(default_factory=list)
    groups: list[list[Held]] = field(default_factory=list)
    keys: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        chunks = 0
        for held in chain.from_iterable(self.groups):
            held.first_chunk = chunks
            chunks += len(held.boxes)

    @property
    def boxes(self) -> list[Boxes]:
        """The boxes of each group."""
        return [keys[0].boxes for keys in self.groups]


def holding_of(
    state_dict: Mapping[str, Any], placing: Placing, paths: Mapping[str, Path]
) -> Holding:
    """Return what a rank holds of a flat state dict, by group.

    Keys that other ranks need not have stand in tables apart, so that the other tables are equal on
    more ranks: by the mesh axes of their tensors, and by the head of the nested dict.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        paths: By key, where it stands in the nested dict; empty where it was not flattened.
    """
    keys = []
    # Of each table, the keys of each group.
    tables: dict[Any, dict[tuple[Group, Boxes], list[Held]]] = {}
    # The group of a key, by all that determines it.
    groups: dict[Any, tuple[Group, Boxes, list[Held]]] = {}
    for fqn, value in state_dict.items():
        if fqn in placing.absent:
            continue
        placed = placing.placed.get(fqn)
        path = paths.get(fqn, (fqn,))
        head = path[0] if len(path) > 1 else fqn.partition(".")[0]
        source: tuple[Any, ...]
        if placed is None:
            source = head, _source_of_group(fqn, value)
        else:
            tensor = placed.tensor
            look = tensor.dtype, tensor.layout, tensor.requires_grad
            source = head, placed.place.number, placed.has_own_key, look
        found = groups.get(source)
        if found is None:
            group, boxes = _group_and_boxes(fqn, value, placed)
            has_own_key = placed is not None and placed.has_own_key
            table = tables.setdefault((head, has_own_key, group.kind, group.axis_names), {})
            found = groups[source] = group, boxes, table.setdefault((group, boxes), [])
        group, boxes, members = found
        held = Held(fqn, value, placed, group, boxes)
        keys.append(held)
        members.append(held)
    by_table = [list(table.values()) for table in tables.values()]
    key_tables = [_table_of(members, paths) for members in by_table]
    return Holding(key_tables, list(chain.from_iterable(by_table)), keys)


def _table_of(groups: Sequence[Sequence[Held]], paths: Mapping[str, Path]) -> KeyTable:
    keys = list(chain.from_iterable(groups))
    fqns = [held.fqn for held in keys]
    rules = [None if held.placed is None else held.placed.rule for held in keys]
    forms = [path_counts(paths.get(fqn, (fqn,))) for fqn in fqns]
    declared, sizes = [members[0].group for members in groups], list(map(len, groups))
    return KeyTable(declared, fqns, sizes, *_numbered(rules), *_numbered(forms))


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
    """Return what a plan, with its tables unpacked, shows of its rank's holding."""
    fqns = [table.keys(number) for table in tables for number in range(len(table.groups))]
    declared = [group for table in tables for group in table.groups]
    groups = [
        [Held(fqn, None, None, group, boxes) for fqn in keys]
        for keys, group, boxes in zip(
            fqns, declared, unpacked_boxes(plan.boxes, declared), strict=True
        )
    ]
    return Holding(list(tables), groups, list(chain.from_iterable(groups)))


def packed_boxes(held: Sequence[Boxes]) -> bytes:
    """Return the boxes of each group as they travel: how many of each, then all numbers."""
    boxes = chain.from_iterable(held)
    numbers = [number for box in boxes for part in box for number in part]
    return packed_ints([*map(len, held), *numbers])


def unpacked_boxes(packed: bytes, groups: Sequence[Group]) -> list[Boxes]:
    """Return the boxes that were packed."""
    return list(_unpacked_boxes(packed, tuple([len(group.shape) for group in groups])))


@lru_cache(maxsize=1 << 8)
def _unpacked_boxes(packed: bytes, dims: tuple[int, ...]) -> tuple[Boxes, ...]:
    """Return the boxes of groups of these numbers of dims; replicas pack the same bytes."""
    flat: list[int] = unpacked_ints(packed).tolist()
    at = len(dims)
    held = []
    for ndim, count in zip(dims, flat[:at], strict=True):
        boxes = []
        for _ in range(count):
            row = tuple(flat[at : at + 2 * ndim])
            boxes.append(Box(row[:ndim], row[ndim:]))
            at += 2 * ndim
        held.append(tuple(boxes))
    return tuple(held)


def _source_of_group(fqn: str, value: Any) -> Any:
    """Return a value that determines the group of a key without a place."""
    if has_hooks(value):
        return fqn
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.layout, value.requires_grad
    return None


def _group_and_boxes(fqn: str, value: Any, placed: Placed | None) -> tuple[Group, Boxes]:
    if placed is not None:
        binding = placed.binding
        names = tuple([axis.name for axis in binding.axes])
        look = _look_of(placed.tensor)
        group = declared_group(binding.sharding, names, *look, is_exact=binding.is_exact)
        return group, tuple([chunk.box for chunk in held_chunks(placed)])
    if has_hooks(value):
        return _of_own_chunks(fqn, value)
    if not isinstance(value, torch.Tensor):
        return Group(OBJECT), OBJECT_BOXES
    shape = tuple(value.shape)
    return Group(PLAIN, shape, *_look_of(value)), (Box.whole(shape),)


def _look_of(tensor: Any) -> tuple[torch.dtype, str, bool]:
    """Return dtype, layout and ``requires_grad`` of a tensor, or of torch's record of them."""
    return tensor.dtype, str(tensor.layout).removeprefix("torch."), tensor.requires_grad


def _of_own_chunks(fqn: str, value: Any) -> tuple[Group, Boxes]:
    items = default_write_items(fqn, value)
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    if not data:
        return Group(OBJECT), OBJECT_BOXES
    boxes = dict.fromkeys(Box(tuple(o.chunk.offsets), tuple(o.chunk.sizes)) for o in data)
    return Group(SHARD, tuple(data[0].size), *_look_of(data[0].properties)), tuple(boxes)


def held_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a tensor is written as.

    A tensor without elements keeps its key by one empty chunk; of a row that a rank holds twice
    the first is written.
    """
    if 0 in placed.global_shape:
        origin = (0,) * len(placed.global_shape)
        return (Chunk(origin, origin, placed.global_shape),)
    chunks = placed.chunks
    if len(chunks) > 1:
        by_offsets = {chunk.offsets: chunk for chunk in reversed(chunks)}
        if len(by_offsets) < len(chunks):
            return tuple(reversed(by_offsets.values()))
    return chunks


def chunk_data(placed: Placed, chunk: Chunk) -> torch.Tensor:
    """Return the data of a chunk: a view of the local tensor, no copy."""
    if 0 in placed.global_shape:
        return placed.tensor.detach().new_empty(placed.global_shape)
    return placed.view(chunk)
