"""Who writes what several ranks hold.

A load of the same topology opens its own file and those of the ranks that wrote what it shares with
them. So small tensors and objects go to the lowest rank that holds them, and big ones to as few of
the lowest as can take them without writing more than ``BALANCE`` of the mean: one or two beside
sharded tensors, all of a replica group where replicas are all there is. Both forms below follow
that rule: by class, where the coordinator says how many ranks share and every rank works out the
rest from a table and its slot among its replicas; and item by item.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence

from dcp_placements.agreement import nbytes_of
from dcp_placements.interop import MetadataIndex, SavePlan
from dcp_placements.mesh import mesh_axes
from dcp_placements.placing import Placed
from dcp_placements.table import OBJECT, Table

SMALL_NBYTES = 1 << 20
"""Replicated tensors below this size stay together in one file."""

BALANCE = 1.05
"""What a rank may write, as a multiple of the mean, before another takes a share."""

Spread = Mapping[int, int]
"""Number of replicas to how many of them share big tensors that have so many; not there: one."""


def owner_slots(table: Table, replicas: Sequence[int], spread: Spread) -> list[int]:
    """Return for each entry of a table which of its holders writes it, counted from 0.

    Args:
        table: Keys that are cut alike on all the ranks that have it.
        replicas: Holders of each part, by class; those that hold the same part have slots 0, 1 ...
        spread: How many of them share the big tensors.
    """
    owners = [0] * len(table.fqns)
    if all(writers == 1 for writers in spread.values()):
        return owners
    small = dict.fromkeys(spread, 0)
    shared: dict[int, list[tuple[int, int]]] = {count: [] for count in spread}
    parts = [known.cells for known in table.classes]
    for entry, index in enumerate(table.class_of):
        if index == OBJECT or replicas[index] not in spread:
            continue
        # By what one rank holds: the whole, over the number of different parts.
        nbytes = table.nbytes(entry) // parts[index]
        if nbytes < SMALL_NBYTES:
            small[replicas[index]] += nbytes
        else:
            shared[replicas[index]].append((nbytes, entry))
    for count, writers in spread.items():
        pieces = sorted(shared[count], key=lambda known: (-known[0], known[1]))
        slots, _ = shared_out([n for n, _ in pieces], [small[count], *[0] * (writers - 1)])
        for (_, entry), slot in zip(pieces, slots, strict=True):
            owners[entry] = slot
    return owners


def shared_out(pieces: Iterable[int], held: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return who takes which piece, each the one that has least, and what they have in the end.

    Args:
        pieces: Bytes, the largest first.
        held: Bytes that each has already.
    """
    heap = [(nbytes, slot) for slot, nbytes in enumerate(held)]
    heapq.heapify(heap)
    owners = []
    for nbytes in pieces:
        has, slot = heap[0]
        owners.append(slot)
        heapq.heapreplace(heap, (has + nbytes, slot))
    taken = [0] * len(held)
    for has, slot in heap:
        taken[slot] = has
    return owners, taken


def writers_needed(pieces: Sequence[int], small: int, held: Sequence[int], limit: float) -> int:
    """Return how many slots of a replica group have to share, so that none has too much.

    Args:
        pieces: Bytes of what is shared, the largest first.
        small: Bytes that slot 0 has for this group, whatever is decided.
        held: Bytes that each slot has in all, those included.
        limit: What none ought to exceed. Where one piece alone does, it is the limit.
    """
    total = sum(pieces)
    limit = max(limit, min(held) + pieces[0])
    room = 0.0
    writers = len(held)
    for slot, nbytes in enumerate(held):
        room += max(limit - nbytes, 0)
        if room >= total:
            writers = slot + 1
            break
    while writers < len(held):
        start = [small, *[0] * (writers - 1)]
        _, taken = shared_out(pieces, start)
        ends = zip(held, taken, start, strict=False)
        if all(has + new - old <= limit for has, new, old in ends):
            break
        writers = min(max(writers + 1, writers * 5 // 4), len(held))
    return writers


def owned_entries(
    table: Table, slots: Sequence[tuple[int, int]], elsewhere: bytes, spread: Spread
) -> list[int]:
    """Return the entries of a table that one rank writes.

    Args:
        table: The table.
        slots: By class, objects last: how many ranks hold what it holds, and which it is of them.
        elsewhere: Bitmap of entries that others write; empty for none.
        spread: How many replicas share the big tensors.
    """
    owners = owner_slots(table, [count for count, _ in slots], spread)
    return [
        entry
        for entry, index in enumerate(table.class_of)
        if owners[entry] == slots[index][1] and not in_bitmap(elsewhere, entry)
    ]


def left_to_others(placed: Iterable[Placed]) -> set[str]:
    """Return the keys of this rank's tensors that another rank writes, by their axes alone.

    A DTensor is on all ranks of its own mesh, so the first along the axes that do not cut it
    writes. Of other axes, those of a rule or of the mesh that its own was sliced from, nothing is
    known: along ``pp`` and ``ep`` other ranks may have other keys.
    """
    left = set()
    for tensor in placed:
        own = () if tensor.mesh is None else mesh_axes(tensor.mesh, with_ranks=True) or ()
        cut = {cut.axis for cut in tensor.binding.sharding.cuts}
        if any(
            axis.position
            for i, axis in enumerate(tensor.binding.axes)
            if i not in cut and any(axis.is_same(other) for other in own)
        ):
            left.add(tensor.fqn)
    return left


def in_bitmap(bitmap: bytes | bytearray, entry: int) -> bool:
    """Whether an entry is in a bitmap; an empty one holds none."""
    return bool(bitmap) and bool(bitmap[entry >> 3] >> (entry & 7) & 1)


def set_in_bitmap(bitmap: bytearray, entry: int) -> None:
    """Put an entry into a bitmap."""
    bitmap[entry >> 3] |= 1 << (entry & 7)


def shared_by_holders(
    pieces: Sequence[tuple[int, Sequence[int]]], load: list[int], limit: float
) -> list[int]:
    """Return who writes each piece: the lowest of its holders that can take it, or has least.

    Args:
        pieces: Bytes and ranks that hold it, ascending.
        load: Bytes that each rank writes; what it is given is added.
        limit: What none ought to exceed.
    """
    owners = [0] * len(pieces)
    for at in sorted(range(len(pieces)), key=lambda at: -pieces[at][0]):
        nbytes, among = pieces[at]
        least = min(among, key=lambda rank: load[rank])
        owners[at] = next((rank for rank in among if load[rank] + nbytes <= limit), least)
        load[owners[at]] += nbytes
    return owners


def drop_replicas(
    plans: Sequence[SavePlan],
    *,
    lowest_rank: bool = False,
    held: Sequence[int] | None = None,
    others: int = 0,
) -> list[SavePlan]:
    """Return the plans with every item on exactly one of its holders.

    Args:
        plans: One per rank; items of equal key and offset must be equal boxes.
        lowest_rank: Leave every replica to its lowest rank (``dedup_save_to_lowest_rank``).
        held: Bytes that each rank writes beside these items.
        others: Bytes that are written beside them in all.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    for index, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(index)
    load = [0] * len(plans) if held is None else list(held)
    shared: list[tuple[int, MetadataIndex]] = []
    owner: dict[MetadataIndex, int] = {}
    total = others
    for plan in plans:
        for item in plan.items:
            held_by = holders[item.index]
            if item.index in owner:
                continue
            nbytes = nbytes_of(item)
            total += nbytes
            owner[item.index] = held_by[0]
            if len(held_by) == 1 or lowest_rank or nbytes < SMALL_NBYTES:
                load[held_by[0]] += nbytes
            else:
                shared.append((nbytes, item.index))
    limit = max(BALANCE * total / max(len(plans), 1), max(load, default=0))
    chosen = shared_by_holders([(n, holders[index]) for n, index in shared], load, limit)
    owner.update(zip([index for _, index in shared], chosen, strict=True))
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if owner[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
