"""Who writes what several ranks hold.

A load of the same topology opens its own file and those of the ranks that wrote what it shares with
them. So what is replicated goes to as few of the lowest ranks that hold it as can take it without
writing more than ``BALANCE`` of the mean: to one where it is little beside sharded tensors, to all
of a replica group where replicas are all there is. What counts is what a rank writes in all, not
the size of one tensor. Small tensors are given out in runs of neighbours. Both forms below follow
that rule: by class, where the coordinator says how many ranks share and every rank works out the
rest from a table and its slot among its replicas; and item by item.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from dcp_placements.agreement import nbytes_of
from dcp_placements.interop import MetadataIndex, SavePlan
from dcp_placements.mesh import mesh_axes
from dcp_placements.placing import Placed
from dcp_placements.table import OBJECT, Table

SMALL_NBYTES = 1 << 20
"""Tensors below this size are given out in runs of neighbours, larger ones one by one."""

FILE_NBYTES = 64 << 10
"""Below this a rank gives nothing away: a file more to open would cost more than it saves."""

BALANCE = 1.05
"""What a rank may write, as a multiple of the mean, before another takes a share."""

Spread = Mapping[int, int]
"""Number of replicas to how many of them share tensors that have so many; not there: one."""


def owner_slots(
    table: Table, replicas: Sequence[int], elsewhere: bytes | bytearray, spread: Spread
) -> list[int]:
    """Return for each entry of a table which of its holders writes it, counted from 0.

    Args:
        table: Keys that are cut alike on all the ranks that have it.
        replicas: Holders of each part, by class; those that hold the same part have slots 0, 1 ...
        elsewhere: Bitmap of entries that others write; empty for none.
        spread: How many of them share.
    """
    owners = [0] * len(table.fqns)
    if all(writers == 1 for writers in spread.values()):
        return owners
    shared = shared_entries(table, replicas, elsewhere)
    for count, writers in spread.items():
        entries, nbytes = shared[count]
        for entry, slot in zip(entries, shared_out(nbytes, writers)[0], strict=True):
            owners[entry] = slot
    return owners


def shared_entries(
    table: Table, replicas: Sequence[int], elsewhere: bytes | bytearray
) -> dict[int, tuple[list[int], list[int]]]:
    """Return, by number of replicas, the entries that have several, and the bytes of a part.

    Args:
        table: As for ``owner_slots``, and so are the others.
        replicas: Holders of each part, by class.
        elsewhere: Bitmap of entries that others write.
    """
    shared: dict[int, tuple[list[int], list[int]]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for entry, (index, look) in enumerate(zip(table.class_of, table.look_of, strict=True)):
        if index == OBJECT or replicas[index] < 2 or in_bitmap(elsewhere, entry):
            continue
        nbytes = sizes.get((index, look))
        if nbytes is None:
            # By what one rank holds: the whole, over the number of different parts.
            nbytes = sizes[index, look] = table.nbytes(entry) // table.classes[index].cells
        entries, pieces = shared.setdefault(replicas[index], ([], []))
        entries.append(entry)
        pieces.append(nbytes)
    return shared


def shared_out(pieces: Sequence[int], writers: int) -> tuple[list[int], list[int]]:
    """Return which writer takes each piece, and the bytes that each takes in all.

    Args:
        pieces: Their bytes.
        writers: How many share.
    """
    total = sum(pieces)
    if writers == 1:
        return [0] * len(pieces), [total]
    found = _by_size(pieces, writers, SMALL_NBYTES)
    if max(found[1]) * writers > BALANCE * total:
        # Runs of pieces that are a good part of a share do not come out even.
        found = _by_size(pieces, writers, total // writers // 32)
    return found


def _by_size(pieces: Sequence[int], writers: int, large_from: int) -> tuple[list[int], list[int]]:
    """Return which writer takes each piece, and the bytes that each takes in all.

    The large pieces go one by one to the writer that has least, the largest first. The small ones
    fill up what each then lacks, in runs of neighbours; where they are few the first has them all.
    """
    owners = [0] * len(pieces)
    total = sum(pieces)
    large = [at for at, nbytes in enumerate(pieces) if nbytes >= large_from]
    small = [at for at, nbytes in enumerate(pieces) if nbytes < large_from]
    rest = total - sum(pieces[at] for at in large)
    few = rest * writers <= (BALANCE - 1) * total
    heap = [(rest if few and slot == 0 else 0, slot) for slot in range(writers)]
    heapq.heapify(heap)
    for at in sorted(large, key=lambda at: -pieces[at]):
        has, slot = heap[0]
        owners[at] = slot
        heapq.heapreplace(heap, (has + pieces[at], slot))
    taken = [0] * writers
    for has, slot in heap:
        taken[slot] = has
    if few:
        return owners, taken
    ends = list(accumulate(_lacking(taken, rest)))
    reached = slot = 0
    for at in small:
        # A piece belongs where its middle lies.
        while 2 * ends[slot] <= 2 * reached + pieces[at] and slot < writers - 1:
            slot += 1
        owners[at] = slot
        taken[slot] += pieces[at]
        reached += pieces[at]
    return owners, taken


def _lacking(taken: Sequence[int], rest: int) -> list[int]:
    """Return what each writer lacks to a level at which all of ``rest`` is given out."""
    below = 0
    level = 0
    for number, has in enumerate(sorted(taken), start=1):
        if number > 1 and level <= has:
            break
        below += has
        level = -(-(below + rest) // number)
    return [max(level - has, 0) for has in taken]


def writers_needed(pieces: Sequence[int], held: Sequence[int], limit: float) -> int:
    """Return how many slots of a replica group have to share, so that none has too much.

    Args:
        pieces: Bytes of what is shared.
        held: Bytes that each slot has beside them.
        limit: What none ought to exceed. Where one piece alone does, it is the limit.
    """
    total = sum(pieces)
    if total <= max(FILE_NBYTES, limit / 100):
        return 1
    limit = max(limit, min(held) + max(pieces))
    room = 0.0
    writers = len(held)
    for slot, nbytes in enumerate(held):
        room += max(limit - nbytes, 0)
        if room >= total:
            writers = slot + 1
            break
    while writers < len(held):
        taken = shared_out(pieces, writers)[1]
        if all(has + new <= limit for has, new in zip(held, taken, strict=False)):
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
        spread: How many replicas share.
    """
    owners = owner_slots(table, [count for count, _ in slots], elsewhere, spread)
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


def write_limit(total: int, held: Sequence[int]) -> float:
    """Return the bytes that no rank ought to exceed.

    Args:
        total: Bytes that are written in all.
        held: Bytes that each rank writes, whatever is decided.
    """
    return max(BALANCE * total / max(len(held), 1), max(held, default=0), FILE_NBYTES)


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
            if len(held_by) == 1 or lowest_rank or not nbytes:
                load[held_by[0]] += nbytes
            else:
                shared.append((nbytes, item.index))
    limit = write_limit(total, load)
    chosen = shared_by_holders([(n, holders[index]) for n, index in shared], load, limit)
    owner.update(zip([index for _, index in shared], chosen, strict=True))
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if owner[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
