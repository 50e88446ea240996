"""Do ranks that claim the same box hold the same content: digests, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_placements.save.digest_folding import Digests, Slots, may_have_replicas
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.table.cover import Cover
from dcp_placements.table.world import Piece, World

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)


class Contents:
    """The digests of what all ranks hold, beside the rows of a ``World``.

    Args:
        world: What the ranks hold.
        plans: Their plans.
        size: Number of ranks that there are.
    """

    def __init__(self, world: World, plans: Sequence[LocalPlan], size: int) -> None:
        self._world = world
        # By cohort, table and group: which digests there are, and by row and slot the digests.
        self._digests: dict[tuple[int, int, int], tuple[Slots, Digests]] = {}
        slots_of: dict[tuple[int, int, bool], Slots] = {}
        for at, cohort in enumerate(world.cohorts):
            members = [plans[rank] for rank in cohort.ranks.tolist()]
            if not members[0].digests:
                continue
            joined = b"".join([plan.digests for plan in members])
            digests = np.frombuffer(joined, np.uint64).reshape(len(members), -1)
            is_folded, first = members[0].is_folded, 0
            groups = zip(world.groups_of(cohort), cohort.counts, strict=True)
            for (table, number, group), count in groups:
                if not count or not may_have_replicas(group, size):
                    continue
                kind = table, number, is_folded
                if kind not in slots_of:
                    slots_of[kind] = Slots(world.tables[table].keys(number), is_folded)
                slots = slots_of[kind]
                mine = digests[:, first : first + slots.count * count]
                mine = mine.reshape(-1, slots.count, count).transpose(0, 2, 1)
                self._digests[at, table, number] = slots, mine.reshape(-1, slots.count)
                first += slots.count * count

    def own(self, piece: Piece, positions: Sequence[int]) -> Digests:
        """Return digests by row and key of a piece; 0 where one is folded or there is none."""
        columns = []
        for source in piece.sources:
            keys = list(map(source.positions.__getitem__, positions))
            for rows in source.rows:
                column = np.zeros((len(rows.ranks), len(positions)), np.uint64)
                found = self._digests.get((rows.cohort, source.table, source.number))
                if found is not None:
                    slots, digests = found
                    if slots.own == keys:
                        column = digests[:, : len(keys)]
                    else:
                        slot_of = {key: slot for slot, key in enumerate(slots.own)}
                        places = [slot_of.get(key, -1) for key in keys]
                        here = [at for at, slot in enumerate(places) if slot >= 0]
                        column[:, here] = digests[:, [places[at] for at in here]]
                columns.append(column)
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def differing_keys(self, piece: Piece) -> list[int]:
        """Return positions of the keys of which two ranks hold one box with other contents."""
        if not piece.cover.has_replicas:
            return []
        positions = sorted(set().union(*self._own_positions(piece)))
        if not positions:
            return []
        differing = _differing(self.own(piece, positions), piece.cover).any(axis=0)
        return [positions[at] for at in np.flatnonzero(differing).tolist()]

    def _own_positions(self, piece: Piece) -> list[set[int]]:
        """Return by cohort and source positions of the keys with a digest of their own there."""
        every = set(range(len(piece.fqns)))
        result = []
        for source in piece.sources:
            for rows in source.rows:
                found = self._digests.get((rows.cohort, source.table, source.number))
                if found is None:
                    continue
                own = set(found[0].own)
                is_folded = bool(found[0].folded)
                places = enumerate(source.positions)
                result.append({at for at, key in places if key in own} if is_folded else every)
        return result

    def is_folded(self, table: int, number: int) -> bool:
        """Whether some keys of a group have no digest of their own."""
        held = [(rows.cohort, table, number) for rows in self._world.rows[table][number]]
        return any(self._digests[at][0].folded for at in held if at in self._digests)

    def folded_conflict(self, table: int, number: int, cover: Cover) -> tuple[list[str], list[int]]:
        """Return the folded keys of a group, one or more of which differ.

        Args:
            table: Position of the table.
            number: Position of the group there.
            cover: Of the rows of all cohorts.

        Returns:
            The keys, and the ranks that hold the first box that differs. No keys where none
            differs.
        """
        held = [
            self._digests[rows.cohort, table, number]
            for rows in self._world.rows[table][number]
            if (rows.cohort, table, number) in self._digests
        ]
        folding = next(slots for slots, _ in held if slots.folded)
        if not cover.has_replicas:
            return [], []
        # Ranks with few other keys beside these have not folded them.
        columns = [
            digests if slots is folding else folding.vector(digests.T).T for slots, digests in held
        ]
        differing = _differing(np.concatenate(columns)[:, -1:], cover)
        if not differing.any():
            return [], []
        keys = self._world.tables[table].keys(number)
        holders = cover.holders(int(differing.argmax())).tolist()
        return [keys[at] for at in folding.folded], holders

    def uncompared(self, piece: Piece) -> int:
        """Return how many keys of a piece of several tables have digests folded in some.

        Where no box is on ranks of two tables, there is nothing to compare between them.
        """
        cover = piece.cover
        if len(piece.sources) < 2 or not cover.has_replicas:
            return 0
        source_of = piece.by_row(range(len(piece.sources)))[cover.order]
        starts = cover.starts[:-1]
        if (np.maximum.reduceat(source_of, starts) == np.minimum.reduceat(source_of, starts)).all():
            return 0
        own = self._own_positions(piece)
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
