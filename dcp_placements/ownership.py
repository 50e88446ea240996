"""Who writes what several ranks hold.

Small tensors and objects go to the lowest rank that holds them, so that a load finds them in one
file; big ones are spread over their holders by bytes. Both forms below follow that one rule: by
class, where every rank works it out for itself from a table and its slot among its replicas; and
item by item.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from dcp_placements.agreement import nbytes_of
from dcp_placements.interop import MetadataIndex, SavePlan
from dcp_placements.mesh import mesh_axes
from dcp_placements.placing import Placed
from dcp_placements.table import OBJECT, Table

SMALL_NBYTES = 1 << 20
"""Replicated tensors below this size stay together in one file."""


def owner_slots(table: Table, replicas: Sequence[int], *, lowest_rank: bool = False) -> list[int]:
    """Return for each entry of a table which of its holders writes it, counted from 0.

    Args:
        table: Keys that are cut alike on all the ranks that have it.
        replicas: Holders of each part, by class; those that hold the same part have slots 0, 1 ...
        lowest_rank: Leave every replica to slot 0.
    """
    owners = [0] * len(table.fqns)
    if lowest_rank or all(count == 1 for count in replicas):
        return owners
    cells = [known.cells for known in table.classes]
    shared: dict[int, list[tuple[int, int]]] = {}
    load: dict[int, list[tuple[int, int]]] = {}
    for entry, index in enumerate(table.class_of):
        count = 1 if index == OBJECT else replicas[index]
        if count == 1:
            continue
        if count not in load:
            load[count] = [(0, slot) for slot in range(count)]
        slots = load[count]
        # By what one rank holds: the whole, over the number of different parts.
        nbytes = table.nbytes(entry) // cells[index]
        if nbytes < SMALL_NBYTES:
            slots[0] = (slots[0][0] + nbytes, 0)
        else:
            shared.setdefault(count, []).append((nbytes, entry))
    for count, entries in shared.items():
        heap = load[count]
        heapq.heapify(heap)
        for nbytes, entry in sorted(entries, key=lambda known: (-known[0], known[1])):
            held, slot = heapq.heappop(heap)
            owners[entry] = slot
            heapq.heappush(heap, (held + nbytes, slot))
    return owners


def owned_entries(
    table: Table,
    slots: Sequence[tuple[int, int]],
    elsewhere: bytes,
    *,
    lowest_rank: bool = False,
) -> list[int]:
    """Return the entries of a table that one rank writes.

    Args:
        table: The table.
        slots: By class, objects last: how many ranks hold what it holds, and which it is of them.
        elsewhere: Bitmap of entries that others write; empty for none.
        lowest_rank: Leave every replica to slot 0.
    """
    owners = owner_slots(table, [count for count, _ in slots], lowest_rank=lowest_rank)
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


def drop_replicas(plans: Sequence[SavePlan], *, lowest_rank: bool = False) -> list[SavePlan]:
    """Return the plans with every item on exactly one of its holders.

    Args:
        plans: One per rank; items of equal key and offset must be equal boxes.
        lowest_rank: Leave every replica to its lowest rank (``dedup_save_to_lowest_rank``).
    """
    holders: dict[MetadataIndex, list[int]] = {}
    for index, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(index)
    load = [0] * len(plans)
    shared: list[tuple[int, MetadataIndex]] = []
    owner: dict[MetadataIndex, int] = {}
    for plan in plans:
        for item in plan.items:
            held_by = holders[item.index]
            if item.index in owner:
                continue
            nbytes = nbytes_of(item)
            owner[item.index] = held_by[0]
            if len(held_by) == 1 or lowest_rank or nbytes < SMALL_NBYTES:
                load[held_by[0]] += nbytes
            else:
                shared.append((nbytes, item.index))
    shared.sort(key=lambda entry: -entry[0])
    for nbytes, item_index in shared:
        chosen = min(holders[item_index], key=lambda rank: load[rank])
        owner[item_index] = chosen
        load[chosen] += nbytes
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if owner[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
