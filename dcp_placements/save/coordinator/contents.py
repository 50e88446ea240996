"""Do ranks that claim the same box hold the same content: digests, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_placements.save.coordinator.cohorts import Cohorts, Rows
from dcp_placements.save.coordinator.cover import Cover
from dcp_placements.save.coordinator.pieces import Piece, Source
from dcp_placements.save.digest_vector import Digests, Slots, may_have_replicas
from dcp_placements.save.local_plan import Ints

_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)


def rows_of(cohorts: Cohorts, piece: Piece) -> tuple[Ints, Ints]:
    """Return, row by row, the plan that holds a box of the piece, and the box."""
    found = [rows for source in piece.sources for rows in held_rows(cohorts, source)]
    if len(found) == 1:
        return found[0].plans, found[0].boxes
    plans = np.concatenate([rows.plans for rows in found])
    return plans, np.concatenate([rows.boxes for rows in found])


def held_rows(cohorts: Cohorts, source: Source) -> list[Rows]:
    """Return what the ranks that have a table hold of a group of it."""
    return cohorts.groups[source.table][source.group].rows


def own_digests(cohorts: Cohorts, piece: Piece, position: int) -> Digests:
    """Return the digest of one key by row; 0 where there is none.

    Args:
        cohorts: All local plans.
        piece: The piece.
        position: Of the key in it.
    """
    columns = _own_columns(cohorts, piece, [position])
    return columns[:, 0]


def differing_keys(cohorts: Cohorts, piece: Piece, cover: Cover) -> list[int]:
    """Return positions of the keys of which two ranks hold one box with different contents."""
    if not cover.has_replicas or not any(
        rows.digests is not None for s in piece.sources for rows in held_rows(cohorts, s)
    ):
        return []
    columns = _own_columns(cohorts, piece, range(len(piece.fqns)))
    found: list[int] = np.flatnonzero(_differing(columns, cover).any(axis=0)).tolist()
    return found


@dataclass(frozen=True, slots=True)
class Suspects:
    """Keys of which one or more differ; folded digests do not show which.

    Attributes:
        fqns: The keys.
        plans: Positions of the plans that hold the first box that differs.
    """

    fqns: list[str]
    plans: list[int]


def differing_buckets(
    cohorts: Cohorts, table: int, group: int, cover: Cover | None
) -> Iterator[Suspects]:
    """Yield the keys of a group whose folded digests differ between ranks that have the table.

    Args:
        cohorts: All local plans.
        table: Position of the table.
        group: Number of the group.
        cover: Of the group's boxes on those ranks.
    """
    if cover is None or not cover.has_replicas:
        return
    held = cohorts.groups[table][group].rows
    keys = cohorts.tables[table].keys(group)
    kinds = sorted({rows.cohort.buckets for rows in held if rows.digests is not None})
    found = False
    for buckets in kinds:
        slots = cohorts.slots(table, group, buckets)
        if not slots.folded:
            continue

        def told(rows: Rows, slots: Slots = slots, buckets: int = buckets) -> Digests | None:
            return _by_row(rows, slots.count) if rows.cohort.buckets == buckets else None

        differing = _differing(_columns(held, slots.count, told), cover)
        differing[:, : len(slots.own)] = False
        boxes = np.flatnonzero(differing.any(axis=1))
        if len(boxes):
            found = True
            at = slots.suspects(np.flatnonzero(differing.any(axis=0)).tolist())
            yield Suspects([keys[i] for i in at], cover.holders(int(boxes[0])).tolist())
    # Ranks with other keys beside these have another number of buckets; they are compared, too.
    folded = [slots for n in kinds if (slots := cohorts.slots(table, group, n)).folded]
    if found or not folded or len(kinds) < 2:
        return
    fewest = folded[0]

    def first_row(rows: Rows) -> Digests:
        slots = cohorts.slots(table, group, rows.cohort.buckets)
        return slots.first_row(_by_row(rows, slots.count), fewest)

    differing = _differing(_columns(held, fewest.buckets, first_row), cover)
    boxes = np.flatnonzero(differing.any(axis=1))
    if len(boxes):
        at = fewest.suspects_of_first_row(np.flatnonzero(differing.any(axis=0)).tolist())
        yield Suspects([keys[i] for i in at], cover.holders(int(boxes[0])).tolist())


def _columns(held: Sequence[Rows], width: int, told: Callable[[Rows], Digests | None]) -> Digests:
    """Return what cohorts tell of a group by row; 0 where they tell nothing."""
    columns = np.zeros((sum(len(rows.plans) for rows in held), width), np.uint64)
    start = 0
    for rows in held:
        stop = start + len(rows.plans)
        if rows.digests is not None and (found := told(rows)) is not None:
            columns[start:stop] = found
        start = stop
    return columns


def uncompared(cohorts: Cohorts, piece: Piece, cover: Cover) -> int:
    """Return how many keys of a piece of several tables have digests that are folded in some.

    Where no box is on ranks of two tables, there is nothing to compare between them.
    """
    if len(piece.sources) < 2 or not cover.has_replicas:
        return 0
    source_of = _by_source(cohorts, piece, range(len(piece.sources)))[cover.order]
    starts = cover.starts[:-1]
    if (np.maximum.reduceat(source_of, starts) == np.minimum.reduceat(source_of, starts)).all():
        return 0
    hidden: set[int] = set()
    for source in piece.sources:
        for rows in held_rows(cohorts, source):
            if rows.digests is not None:
                own = set(cohorts.slots(source.table, source.group, rows.cohort.buckets).own)
                hidden.update(i for i, at in enumerate(source.positions) if at not in own)
    return len(hidden)


def held_beside_its_own(cohorts: Cohorts, piece: Piece, cover: Cover) -> int | None:
    """Return a box that several ranks hold, one of them by a mesh with a part for every rank."""
    alone = [not may_have_replicas(group, cohorts.world) for group in piece.groups]
    if not any(alone) or not cover.has_replicas:
        return None
    is_alone = _by_source(cohorts, piece, alone)[cover.order]
    found = np.maximum.reduceat(is_alone, cover.starts[:-1]) > 0
    boxes = np.flatnonzero(found & (np.diff(cover.starts) > 1))
    return int(boxes[0]) if len(boxes) else None


def _by_source(cohorts: Cohorts, piece: Piece, values: Sequence[int]) -> Ints:
    """Return by row the value of the source that it is of."""
    counts = [sum(len(rows.plans) for rows in held_rows(cohorts, s)) for s in piece.sources]
    return np.repeat(np.array(values, np.int64), counts)


def _own_columns(cohorts: Cohorts, piece: Piece, positions: Sequence[int]) -> Digests:
    """Return digests of keys by row; 0 where one is folded or there is none."""
    found = []
    for source in piece.sources:
        for rows in held_rows(cohorts, source):
            columns = np.zeros((len(rows.plans), len(positions)), np.uint64)
            if rows.digests is not None:
                slots = cohorts.slots(source.table, source.group, rows.cohort.buckets)
                slot_of = {at: slot for slot, at in enumerate(slots.own)}
                slot_numbers = [
                    slot_of.get(source.positions[position], -1) for position in positions
                ]
                here = [column for column, slot in enumerate(slot_numbers) if slot >= 0]
                columns[:, here] = _by_row(rows, slots.count)[:, [slot_numbers[c] for c in here]]
            found.append(columns)
    return np.concatenate(found)


def _by_row(rows: Rows, slots: int) -> Digests:
    """Return a cohort's digests of a group, of shape (rows, slots)."""
    assert rows.cohort.digests is not None
    assert rows.digests is not None
    held = rows.cohort.digests[:, rows.digests].reshape(-1, slots, rows.count)
    return held.transpose(0, 2, 1).reshape(-1, slots)


def _differing(columns: Digests, cover: Cover) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return by box and column whether two of its rows have different digests."""
    if not len(cover.boxes):
        return np.zeros((0, columns.shape[1]), bool)
    ordered = columns[cover.order]
    starts = cover.starts[:-1]
    firsts = np.repeat(ordered[starts], np.diff(cover.starts), axis=0)
    if np.array_equal(ordered, firsts):
        # Nearly always, and several times faster than what follows.
        return np.zeros((len(starts), columns.shape[1]), bool)
    highest = np.maximum.reduceat(ordered, starts)
    lowest = np.minimum.reduceat(np.where(ordered == 0, _MOST, ordered), starts)
    differing: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = lowest < highest
    return differing


def differing_objects(cohorts: Cohorts, piece: Piece) -> list[str]:
    """Return the objects of a piece that are not known to be the same in the files of all ranks."""
    columns = []
    for source in piece.sources:
        for rows in held_rows(cohorts, source):
            if rows.cohort.stored is not None:
                # What files hold, and not only what it means, has to be the same.
                stored = rows.cohort.stored[:, rows.items][:, source.positions]
                columns.append(stored.reshape(len(rows.plans), -1))
    if columns:
        table = np.concatenate(columns).reshape(-1, len(piece.fqns), 2)
        unlike = (table != table[0]).any(axis=(0, 2))
        return [fqn for fqn, other in zip(piece.fqns, unlike.tolist(), strict=True) if other]
    own = _own_columns(cohorts, piece, range(len(piece.fqns)))
    # An object that cannot be pickled has no digest; a folded one has that of its buckets.
    unlike = (own != own[0]).any(axis=0) | (
        (own == 0).any(axis=0) & ~_buckets_equal(cohorts, piece)
    )
    return [fqn for fqn, other in zip(piece.fqns, unlike.tolist(), strict=True) if other]


def _buckets_equal(cohorts: Cohorts, piece: Piece) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return by key whether it is folded, and the same on all ranks as far as buckets tell."""
    found = np.zeros(len(piece.fqns), bool)
    held = [rows for source in piece.sources for rows in held_rows(cohorts, source)]
    kinds = {rows.cohort.buckets for rows in held}
    if len(piece.sources) == 1 and len(kinds) == 1 and all(rows.digests for rows in held):
        (source,), (buckets,) = piece.sources, kinds
        slots = cohorts.slots(source.table, source.group, buckets)
        columns = np.concatenate([_by_row(rows, slots.count) for rows in held])
        differing = np.flatnonzero((columns != columns[0]).any(axis=0)).tolist()
        folded = set(slots.folded) - set(slots.suspects(differing))
        found[[at for at, position in enumerate(source.positions) if position in folded]] = True
    return found
