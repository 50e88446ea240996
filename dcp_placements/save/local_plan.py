"""What a rank sends to the coordinator: its key tables, and per group the boxes that it holds.

This is the one form of a plan, whatever a tensor is: a plain shard, strided, fused, padded, rows of
an ``IndexShard``, a stack of experts, a tensor that names its own chunks. The same shards can be
replicas of those of another rank only where both hold the same box of the same key; so boxes are
all that the coordinator needs to compare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from dcp_placements._torch import SavePlan, default_write_items, has_hooks
from dcp_placements.bind.placed import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box, Chunk
from dcp_placements.names.flat import Path
from dcp_placements.save.key_table import (
    OBJECT,
    PLAIN,
    SHARD,
    Group,
    KeyTable,
    declared_group,
    path_counts,
)
from dcp_placements.save.packing import numbered, packed_ints, unpacked_ints

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
        undigested: Keys of tensors whose contents cannot be read, so that they have no digest.
        statement: A packed ``Statement``.
        world: Number of ranks, which decides of which groups there are digests.
        faults: Why the rank cannot save, packed; it has nothing else then.
    """

    rank: int
    tables: tuple[bytes, ...]
    boxes: bytes
    coordinate: tuple[int, ...] = ()
    digest_kind: str = "off"
    digests: bytes = b""
    is_folded: bool = False
    undigested: tuple[str, ...] = ()
    statement: bytes = b""
    world: int = 1
    faults: bytes = b""


@dataclass(slots=True)
class Held:
    """The keys of one group, as a rank holds them.

    Attributes:
        group: What they have in common.
        boxes: The boxes that the rank holds of each.
        fqns: The keys.
        values: By key, its ``Placed``, or the state dict's value where it has no place; empty on
            the coordinator.
    """

    group: Group
    boxes: Boxes
    fqns: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Holding:
    """What one rank holds.

    Attributes:
        tables: Its key tables.
        groups: The keys of each group of each table in turn.
        fqns: All keys: on the rank in state dict order, on the coordinator in table order.
    """

    tables: list[KeyTable] = field(default_factory=list)
    groups: list[Held] = field(default_factory=list)
    fqns: list[str] = field(default_factory=list)

    @property
    def boxes(self) -> list[Boxes]:
        """The boxes of each group."""
        return [held.boxes for held in self.groups]

    def chunks(self) -> Iterator[tuple[str, Group, Box]]:
        """Yield each box of each key of each group, in the order in which chunks are numbered."""
        for held in self.groups:
            for fqn, box in product(held.fqns, held.boxes):
                yield fqn, held.group, box


def holding_of(
    state_dict: Mapping[str, Any],
    placed: Mapping[str, Placed],
    paths: Mapping[str, Path],
    without: Collection[str] = (),
) -> Holding:
    """Return what a rank holds of a flat state dict, by group.

    Keys that other ranks need not have stand in tables apart, so that the other tables are equal on
    more ranks: by the mesh axes of their tensors, and by the head of the nested dict.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placed: Its tensors' places.
        paths: By key, where it stands in the nested dict; empty where it was not flattened.
        without: Keys that it has no part of, or leaves to other ranks.
    """
    fqns = [fqn for fqn in state_dict if fqn not in without]
    # Of each table, the groups.
    tables: dict[Any, dict[tuple[Group, Boxes], Held]] = {}
    # The group of a key, by all that determines it.
    groups: dict[Any, Held] = {}
    for fqn in fqns:
        path = paths.get(fqn, ())
        head = path[0] if len(path) > 1 else fqn.partition(".")[0]
        value = placed.get(fqn)
        source: tuple[Any, ...]
        if value is None:
            value = state_dict[fqn]
            source = head, _source_of_group(fqn, value)
        else:
            source = head, value.place, value.has_own_key, _LOOK(value.tensor)
        held = groups.get(source)
        if held is None:
            held = _held(fqn, value)
            has_own_key = type(value) is Placed and value.has_own_key
            table = tables.setdefault(
                (head, has_own_key, held.group.kind, held.group.axis_names), {}
            )
            held = groups[source] = table.setdefault((held.group, held.boxes), held)
        held.fqns.append(fqn)
        held.values.append(value)
    by_table = [list(table.values()) for table in tables.values()]
    key_tables = [_table_of(members, paths) for members in by_table]
    return Holding(key_tables, list(chain.from_iterable(by_table)), fqns)


_LOOK = attrgetter("dtype", "layout", "requires_grad")


def _table_of(groups: Sequence[Held], paths: Mapping[str, Path]) -> KeyTable:
    fqns = [fqn for held in groups for fqn in held.fqns]
    rules = [one.rule if type(one) is Placed else None for held in groups for one in held.values]
    forms = path_counts([paths.get(fqn, (fqn,)) for fqn in fqns])
    declared, sizes = [held.group for held in groups], [len(held.fqns) for held in groups]
    return KeyTable(declared, fqns, sizes, *numbered(rules), *forms)


def unlike_worlds(plans: Sequence[LocalPlan], world: int) -> list[Fault]:
    """Return that ranks count other ranks than the coordinator does, if they do.

    The digests of such a rank would be compared with those of other tensors.
    """
    unlike = [plan for plan in plans if plan.world != world]
    if not unlike:
        return []
    return [
        Fault(
            "this save",
            f"there are {unlike[0].world} ranks by torch.distributed here, and {world} on the "
            "coordinator",
            (
                "likely:      the default process group was made anew, or is replaced while these "
                "ranks plan",
                "way out:     one default process group on all ranks, for the whole save",
            ),
            ranks=tuple([plan.rank for plan in unlike]),
        )
    ]


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


def sent_holding(tables: Sequence[KeyTable], boxes: Sequence[Boxes]) -> Holding:
    """Return what the tables and boxes of a plan, unpacked, show of its rank's holding."""
    declared = [group for table in tables for group in table.groups]
    fqns = [table.keys(number) for table in tables for number in range(len(table.groups))]
    groups = list(map(Held, declared, boxes, fqns))
    return Holding(list(tables), groups, list(chain.from_iterable(fqns)))


def packed_boxes(held: Sequence[Boxes]) -> bytes:
    """Return the boxes of each group as they travel: how many of each, then all numbers."""
    boxes = chain.from_iterable(held)
    numbers = [number for box in boxes for part in box for number in part]
    return packed_ints([*map(len, held), *numbers])


def unpacked_boxes(packed: bytes, dims: tuple[int, ...]) -> tuple[Boxes, ...]:
    """Return the boxes that were packed, of groups of these numbers of dims."""
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
        return value.shape, _LOOK(value)
    return None


def _held(fqn: str, value: Any) -> Held:
    """Return the group and the boxes of a key, as those of no key."""
    if type(value) is Placed:
        place = value.place
        names = tuple([axis.name for axis in place.axes])
        look = _look_of(value.tensor)
        group = declared_group(place.sharding, names, *look, is_exact=place.is_exact)
        return Held(group, tuple([chunk.box for chunk in held_chunks(value)]))
    if has_hooks(value):
        return Held(*_of_own_chunks(fqn, value))
    if not isinstance(value, torch.Tensor):
        return Held(Group(OBJECT), OBJECT_BOXES)
    shape = tuple(value.shape)
    return Held(Group(PLAIN, shape, *_look_of(value)), (Box.whole(shape),))


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
