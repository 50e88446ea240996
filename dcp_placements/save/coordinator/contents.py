"""Do ranks that claim the same box hold the same content: digests, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_placements.save.coordinator.cohorts import Rows
from dcp_placements.save.coordinator.cover import Cover
from dcp_placements.save.coordinator.pieces import Piece
from dcp_placements.save.digest_folding import Digests, may_have_replicas

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)


def own_digests(piece: Piece, positions: Sequence[int]) -> Digests:
    """Return digests by row and key of a piece; 0 where one is folded or there is none."""
    columns = []
    for source in piece.sources:
        keys = list(map(source.positions.__getitem__, positions))
        for rows in source.rows:
            if rows.slots is not None and rows.slots.own == keys:
                columns.append(rows.digests[:, : len(keys)])
                continue
            column = np.zeros((len(rows.plans), len(positions)), np.uint64)
            if rows.slots is not None:
                slot_of = {key: slot for slot, key in enumerate(rows.slots.own)}
                slots = [slot_of.get(key, -1) for key in keys]
                here = [at for at, slot in enumerate(slots) if slot >= 0]
                column[:, here] = rows.digests[:, [slots[at] for at in here]]
            columns.append(column)
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def differing_keys(piece: Piece) -> list[int]:
    """Return positions of the keys of which two ranks hold one box with different contents."""
    if not piece.cover.has_replicas:
        return []
    positions = sorted(set().union(*_own_positions(piece)))
    if not positions:
        return []
    differing = _differing(own_digests(piece, positions), piece.cover).any(axis=0)
    return [positions[at] for at in np.flatnonzero(differing).tolist()]


def _own_positions(piece: Piece) -> list[set[int]]:
    """Return by cohort and source positions of the keys with a digest of their own there."""
    every = set(range(len(piece.fqns)))
    found = []
    for source in piece.sources:
        for rows in source.rows:
            if rows.slots is not None and rows.slots.folded:
                own = set(rows.slots.own)
                found.append({at for at, key in enumerate(source.positions) if key in own})
            elif rows.slots is not None:
                found.append(every)
    return found


def folded_conflict(
    held: Sequence[Rows], keys: Sequence[str], cover: Cover
) -> tuple[list[str], list[int]]:
    """Return the folded keys of a group, one or more of which differ.

    Args:
        held: What each cohort holds of the group.
        keys: All keys of the group.
        cover: Of the rows of all cohorts.

    Returns:
        The keys, and positions of the plans that hold the first box that differs. No keys where
        none differs, or none is folded.
    """
    folding = next((rows.slots for rows in held if rows.slots and rows.slots.folded), None)
    if folding is None or not cover.has_replicas:
        return [], []
    # Ranks with few other keys beside these have not folded them.
    columns = [
        rows.digests if rows.slots is folding else folding.vector(rows.digests.T).T
        for rows in held
        if rows.slots is not None
    ]
    differing = _differing(np.concatenate(columns)[:, -1:], cover)
    if not differing.any():
        return [], []
    holders = cover.holders(int(differing.argmax())).tolist()
    return [keys[at] for at in folding.folded], holders


def uncompared(piece: Piece) -> int:
    """Return how many keys of a piece of several tables have digests that are folded in some.

    Where no box is on ranks of two tables, there is nothing to compare between them.
    """
    cover = piece.cover
    if len(piece.sources) < 2 or not cover.has_replicas:
        return 0
    source_of = piece.by_row(range(len(piece.sources)))[cover.order]
    starts = cover.starts[:-1]
    if (np.maximum.reduceat(source_of, starts) == np.minimum.reduceat(source_of, starts)).all():
        return 0
    own = _own_positions(piece)
    return len(piece.fqns) - len(set.intersection(*own)) if own else 0


def held_beside_its_own(piece: Piece, world: int) -> int | None:
    """Return a box that several ranks hold, one of them by a mesh with a part for every rank."""
    cover = piece.cover
    if not cover.has_replicas:
        return None
    alone = [not may_have_replicas(source.group, world) for source in piece.sources]
    if not any(alone):
        return None
    is_alone = np.maximum.reduceat(piece.by_row(alone)[cover.order], cover.starts[:-1]) > 0
    boxes = np.flatnonzero(is_alone & (np.diff(cover.starts) > 1))
    return int(boxes[0]) if len(boxes) else None


def _differing(digests: Digests, cover: Cover) -> Bools:
    """Return by box and column whether two of its rows have different digests."""
    starts = cover.starts[:-1]
    first_of_row = cover.order[starts][cover.box_of] if len(starts) else starts
    if (digests == digests[first_of_row]).all():
        # Nearly always, and several times faster than what follows.
        return np.zeros((len(starts), digests.shape[1]), bool)
    ordered = digests[cover.order]
    highest = np.maximum.reduceat(ordered, starts)
    lowest = np.minimum.reduceat(np.where(ordered == 0, _MOST, ordered), starts)
    differing: Bools = lowest < highest
    return differing
