"""The tables of all ranks side by side, as arrays, and the pieces that they have in common.

Ranks that sent the same tables and as many boxes of each group are a *cohort*: what they hold is
one integer array. A *piece* is the keys that the same tables have: a group of one table, or a part
of one where another table has some of its keys, too (a tied embedding on the first and the last
pipeline stage, say). Everything that holds for one key of a piece holds for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from dcp_placements.layout.boxes import Boxes, Ints
from dcp_placements.table.cover import NOTHING, Cover
from dcp_placements.table.table import Group, Sent, Table, unpacked_ints


class Cohort(NamedTuple):
    """Ranks that differ in the numbers of their boxes only.

    Attributes:
        tables: Positions of their tables in ``World.tables``, in their order.
        ranks: The ranks (positions in ``World.sent``), ascending.
        counts: Of each group of each table, the number of boxes on each rank.
    """

    tables: tuple[int, ...]
    ranks: Ints
    counts: list[int]


class Rows(NamedTuple):
    """What one cohort holds of a group: a row per rank and box.

    Of an expert weight of shape ``(4, 3)`` on two ep ranks::

        Rows(0, [0, 1], [[[0, 0], [2, 3]], [[2, 0], [2, 3]]])

    Attributes:
        cohort: Position of the cohort in ``World.cohorts``.
        ranks: By row, the rank.
        boxes: By row, the box.
    """

    cohort: int
    ranks: Ints
    boxes: Boxes


class Source(NamedTuple):
    """Where one table has the keys of a piece.

    Attributes:
        table: Position in ``World.tables``.
        number: Position of their group there.
        group: What they have in common there.
        positions: Of the piece's keys among those of the group, in the piece's order.
        piece: Which piece of the table it is.
        rows: What each cohort holds of the group.
    """

    table: int
    number: int
    group: Group
    positions: Sequence[int]
    piece: int
    rows: Sequence[Rows]


@dataclass(slots=True)
class Piece:
    """Keys that every rank which has one of them has all of, lying alike.

    Attributes:
        fqns: The keys.
        sources: The tables that have them.
        group: That of the first source.
        ranks: By row, source after source and cohort after cohort within each, the rank.
        boxes: By row, the box; none where the groups differ in their number of dims.
        cover: Which ranks hold which box; of no rows before that is asked.
    """

    fqns: list[str]
    sources: list[Source]
    group: Group
    ranks: Ints
    boxes: Boxes
    cover: Cover = NOTHING

    def by_row(self, values: Sequence[int]) -> Ints:
        """Return values, one per source, by row."""
        counts = [sum(len(rows.ranks) for rows in source.rows) for source in self.sources]
        return np.repeat(np.array(values, np.int64), counts)


class World:
    """What all ranks hold.

    Args:
        sent: By rank, what it sends.
        like: By rank, what else ranks of one cohort have in common.

    Attributes:
        tables: The different tables.
        cohorts: The cohorts.
        rows: By table and group, what each cohort holds.
        members: By table, the ranks that have it, ascending.
        pieces: In the order of the tables.
        split: By table, the piece of each key; empty where every group is a piece by itself.
    """

    def __init__(self, sent: Sequence[Sent], like: Sequence[Hashable] = ()) -> None:
        self.tables: list[Table] = []
        self.rows: list[list[list[Rows]]] = []
        self.cohorts: list[Cohort] = []
        unpacked = cache(unpacked_ints)
        numbers: dict[bytes, int] = {}
        alike: dict[Hashable, list[int]] = {}
        for rank, one in enumerate(sent):
            kind = one.tables, one.counts, like[rank] if like else None
            alike.setdefault(kind, []).append(rank)
        having: list[list[Ints]] = []
        for members in alike.values():
            ranks, first = np.array(members, np.int64), sent[members[0]]
            for packed in first.tables:
                if packed not in numbers:
                    numbers[packed] = len(numbers)
                    self.tables.append(Table.unpacked(packed))
                    self.rows.append([[] for _ in self.tables[-1].groups])
                    having.append([])
            tables = tuple([numbers[packed] for packed in first.tables])
            cohort = Cohort(tables, ranks, unpacked(first.counts).tolist())
            boxes, at = np.stack([unpacked(sent[rank].boxes) for rank in members]), 0
            for (table, number, group), count in zip(
                self.groups_of(cohort), cohort.counts, strict=True
            ):
                ndim = len(group.shape)
                held = boxes[:, at : at + count * 2 * ndim].reshape(len(ranks) * count, 2, ndim)
                rows = Rows(len(self.cohorts), np.repeat(ranks, count), held)
                self.rows[table][number].append(rows)
                at += count * 2 * ndim
            for table in tables:
                having[table].append(ranks)
            self.cohorts.append(cohort)
        self.members: list[Ints] = [np.sort(np.concatenate(parts)) for parts in having]
        self.pieces, self.split = self._pieces()

    def groups_of(self, cohort: Cohort) -> list[tuple[int, int, Group]]:
        """Return table, number and group of all groups of a cohort, in the order of its boxes."""
        return [
            (table, number, group)
            for table in cohort.tables
            for number, group in enumerate(self.tables[table].groups)
        ]

    def _pieces(self) -> tuple[list[Piece], list[list[int]]]:
        """Return the pieces of all tables, and by table the piece of each key where it is split."""
        shared = _shared_keys(self.tables)
        made: dict[Hashable, tuple[list[str], list[Source]]] = {}
        split: list[list[int]] = []
        for at, table in enumerate(self.tables):
            piece_of: list[int] = []
            count = 0
            for number, fqns in enumerate(table.keys):
                positions_of: dict[Hashable, Sequence[int]] = {(at, number): range(len(fqns))}
                if not shared.keys().isdisjoint(fqns):
                    kinds: dict[Hashable, list[int]] = {}
                    for position, fqn in enumerate(fqns):
                        kinds.setdefault(shared.get(fqn, (at, number)), []).append(position)
                    positions_of = {**kinds}
                of_group = [0] * len(fqns)
                for kind, positions in positions_of.items():
                    if kind not in made:
                        made[kind] = [fqns[position] for position in positions], []
                    rows, group = self.rows[at][number], table.groups[number]
                    made[kind][1].append(Source(at, number, group, positions, count, rows))
                    for position in positions:
                        of_group[position] = count
                    count += 1
                piece_of += of_group
            split.append(piece_of if count > len(table.groups) else [])
        return [_piece(*one) for one in made.values()], split

    def by_rank(self, values: Sequence[Ints]) -> list[Ints]:
        """Return what pieces have by row as one row per rank, cohort by cohort.

        Args:
            values: By piece, the values of its rows.

        Returns:
            By cohort, of each of its ranks the values, table after table, piece after piece.
        """
        # By cohort and table, the column of each piece of the table.
        columns: dict[tuple[int, int], dict[int, Ints]] = {}
        for piece, of_rows in zip(self.pieces, values, strict=True):
            start = 0
            for source in piece.sources:
                for rows in source.rows:
                    stop = start + len(rows.ranks)
                    of_table = columns.setdefault((rows.cohort, source.table), {})
                    of_table[source.piece] = of_rows[start:stop]
                    start = stop
        found = []
        for at, cohort in enumerate(self.cohorts):
            ranks = len(cohort.ranks)
            in_order = [
                column.reshape(ranks, -1)
                for table in cohort.tables
                for _, column in sorted(columns[at, table].items())
            ]
            found.append(np.concatenate(in_order or [np.zeros((ranks, 0), np.int64)], axis=1))
        return found


def _piece(fqns: list[str], sources: list[Source]) -> Piece:
    rows = [rows for source in sources for rows in source.rows]
    boxes = NOTHING.boxes
    if len({len(source.group.shape) for source in sources}) == 1:
        boxes = np.concatenate([one.boxes for one in rows])
    ranks = np.concatenate([one.ranks for one in rows])
    return Piece(fqns, sources, sources[0].group, ranks, boxes)


def _shared_keys(tables: Sequence[Table]) -> dict[str, Hashable]:
    """Return the keys that several tables have, each with what makes its piece.

    That is the groups that have it: ``((0, 2), (5, 0))`` for group 2 of table 0 and the first of
    table 5.
    """
    seen: set[str] = set()
    several: set[str] = set()
    for table in tables:
        for fqns in table.keys:
            several.update(seen.intersection(fqns))
            seen.update(fqns)
    places: dict[str, list[tuple[int, int, int]]] = {fqn: [] for fqn in several}
    for at, table in enumerate(tables if several else ()):
        for group, fqns in enumerate(table.keys):
            for position, fqn in enumerate(fqns):
                if fqn in several:
                    places[fqn].append((at, group, position))
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for fqn, where in places.items():
        alike.setdefault(tuple([place[:2] for place in where]), []).append(fqn)
    shared: dict[str, Hashable] = {}
    for kind, fqns in alike.items():
        # Runs are positions: where two tables have the keys in another order, one by one.
        orders = {tuple(sorted(fqns, key=lambda fqn: places[fqn][i][2])) for i in range(len(kind))}
        for fqn in fqns:
            shared[fqn] = kind if len(orders) == 1 else (kind, fqn)
    return shared
