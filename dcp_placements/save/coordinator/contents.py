"""Do ranks that claim the same box hold the same content: digests, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_placements.save.coordinator.cohorts import Cohorts, Rows
from dcp_placements.save.coordinator.cover import Cover
from dcp_placements.save.coordinator.pieces import Piece, Source
from dcp_placements.save.digest_vector import Digests
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
    """Keys of which one or more differ; which, their folded digests do not tell.

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
    for buckets in {rows.cohort.buckets for rows in held if rows.digests is not None}:
        slots = cohorts.slots(table, group, buckets)
        if not slots.folded:
            continue
        columns = np.zeros((len(cover.ranks), slots.count), np.uint64)
        start = 0
        for rows in held:
            stop = start + len(rows.plans)
            if rows.digests is not None and rows.cohort.buckets == buckets:
                columns[start:stop] = _by_row(rows, slots.count)
            start = stop
        differing = _differing(columns, cover)
        differing[:, : len(slots.own)] = False
        boxes = np.flatnonzero(differing.any(axis=1))
        if len(boxes):
            found = slots.suspects(np.flatnonzero(differing.any(axis=0)).tolist())
            keys = cohorts.tables[table].keys(group)
            yield Suspects([keys[at] for at in found], cover.holders(int(boxes[0])).tolist())


def uncompared(cohorts: Cohorts, piece: Piece) -> int:
    """Return how many keys of a piece of several tables have digests that are folded in some."""
    if len(piece.sources) < 2:
        return 0
    hidden: set[int] = set()
    for source in piece.sources:
        for rows in held_rows(cohorts, source):
            if rows.digests is not None:
                own = set(cohorts.slots(source.table, source.group, rows.cohort.buckets).own)
                hidden.update(i for i, at in enumerate(source.positions) if at not in own)
    return len(hidden)


def _own_columns(cohorts: Cohorts, piece: Piece, positions: Sequence[int]) -> Digests:
    """Return digests of keys by row; 0 where one is folded or there is none."""
    found = []
    for source in piece.sources:
        for rows in held_rows(cohorts, source):
            columns = np.zeros((len(rows.plans), len(positions)), np.uint64)
            if rows.digests is not None:
                slots = cohorts.slots(source.table, source.group, rows.cohort.buckets)
                slot_of = {at: slot for slot, at in enumerate(slots.own)}
                known = [slot_of.get(source.positions[position], -1) for position in positions]
                here = [column for column, slot in enumerate(known) if slot >= 0]
                columns[:, here] = _by_row(rows, slots.count)[:, [known[c] for c in here]]
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
    # Of an object that cannot be pickled nothing is known; of a folded one, what its buckets tell.
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
