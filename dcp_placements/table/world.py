"""The tables of all ranks side by side, as arrays, and the pieces that they have in common.

Ranks that sent the same tables and as many boxes of each group are a *cohort*: what they hold is
one integer array. A *piece* is the keys that the same tables have: a group of one table, or a part
of one where another table has some of its keys, too (a tied embedding on the first and the last
pipeline stage, say). Everything that holds for one key of a piece holds for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from dcp_placements.layout.boxes import Boxes, Ints
from dcp_placements.table.cover import NOTHING, Cover
from dcp_placements.table.table import Group, Table, unpacked_ints


class Sent(Protocol):
    """What a rank sends of its holding: its tables and its boxes, packed."""

    @property
    def tables(self) -> tuple[bytes, ...]:
        """Its tables."""
        ...

    @property
    def boxes(self) -> bytes:
        """The boxes of each group of each table in turn."""
        ...


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


@dataclass
class Piece:
    """Keys that every rank which has one of them has all of, lying alike.

    Attributes:
        fqns: The keys.
        sources: The tables that have them.
        cover: Which ranks hold which box; of no rows before that is asked.
    """

    fqns: list[str]
    sources: list[Source] = field(default_factory=list)
    cover: Cover = NOTHING

    @property
    def group(self) -> Group:
        """The group of the first source."""
        return self.sources[0].group

    @cached_property
    def rows(self) -> list[Rows]:
        """What is held, source after source, and cohort after cohort within each."""
        return [rows for source in self.sources for rows in source.rows]

    @cached_property
    def ranks(self) -> Ints:
        """By row, the rank."""
        return np.concatenate([rows.ranks for rows in self.rows])

    @cached_property
    def boxes(self) -> Boxes:
        """By row, the box; for groups of one number of dims."""
        return np.concatenate([rows.boxes for rows in self.rows])

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
        sent: The same.
        tables: The different tables.
        cohorts: The cohorts.
        rows: By table and group, what each cohort holds.
        members: By table, the ranks that have it, ascending.
        pieces: In the order of the tables.
        split: By table, the piece of each key; empty where every group is a piece by itself.
    """

    def __init__(
        self,
        sent: Sequence[Sent],
        like: Sequence[Hashable] = (),
    ) -> None:
        self.sent = sent
        self.tables: list[Table] = []
        self.cohorts: list[Cohort] = []
        self.rows: list[list[list[Rows]]] = []
        self.pieces: list[Piece] = []
        self.split: list[list[int]] = []
        self._numbers: dict[bytes, int] = {}
        alike: dict[Hashable, list[int]] = {}
        for at, one in enumerate(sent):
            alike.setdefault((one.tables, like[at] if like else None), []).append(at)
        for ranks in alike.values():
            tables = tuple([self._number(packed) for packed in sent[ranks[0]].tables])
            self._add(tables, ranks)
        having: list[list[Ints]] = [[] for _ in self.tables]
        for cohort in self.cohorts:
            for table in cohort.tables:
                having[table].append(cohort.ranks)
        self.members: list[Ints] = [np.sort(np.concatenate(parts)) for parts in having]
        self._add_pieces()

    def groups_of(self, cohort: Cohort) -> list[tuple[int, int, Group]]:
        """Return table, number and group of all groups of a cohort, in the order of its boxes."""
        return [
            (table, number, group)
            for table in cohort.tables
            for number, group in enumerate(self.tables[table].groups)
        ]

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

    def _number(self, packed: bytes) -> int:
        """Return the position of a table, unpacking it where it is new."""
        number = self._numbers.setdefault(packed, len(self.tables))
        if number == len(self.tables):
            self.tables.append(Table.unpacked(packed))
            self.rows.append([[] for _ in self.tables[-1].groups])
        return number

    def _add(self, tables: tuple[int, ...], ranks: list[int]) -> None:
        """Make cohorts of ranks with the same tables."""
        width = sum(len(self.tables[table].groups) for table in tables)
        # By the number of boxes of each group: the ranks, and their boxes.
        alike: dict[bytes, tuple[list[int], list[Ints]]] = {}
        unpacked = cache(unpacked_ints)
        for rank in ranks:
            row = unpacked(self.sent[rank].boxes)
            members, boxes = alike.setdefault(row[:width].tobytes(), ([], []))
            members.append(rank)
            boxes.append(row[width:])
        for packed, (members, boxes) in alike.items():
            counts: list[int] = np.frombuffer(packed, np.int64).tolist()
            cohort = Cohort(tables, np.array(members, np.int64), counts)
            numbers, at = np.stack(boxes), 0
            for (table, number, group), count in zip(self.groups_of(cohort), counts, strict=True):
                ends = at + count * 2 * len(group.shape)
                held = numbers[:, at:ends].reshape(len(members) * count, 2, len(group.shape))
                of_row = np.repeat(cohort.ranks, count)
                self.rows[table][number].append(Rows(len(self.cohorts), of_row, held))
                at = ends
            self.cohorts.append(cohort)

    def _add_pieces(self) -> None:
        """Make the pieces of all tables."""
        shared = _shared_keys(self.tables)
        by_kind: dict[Hashable, Piece] = {}
        for at, table in enumerate(self.tables):
            pieces_of_keys: list[int] = []
            count = 0
            for number, group in enumerate(table.groups):
                fqns, rows = table.keys(number), self.rows[at][number]
                positions_of: dict[Hashable, Sequence[int]] = {(at, number): range(len(fqns))}
                if not shared.keys().isdisjoint(fqns):
                    positions_of = _split(fqns, shared, (at, number))
                piece_of = [count] * len(fqns)
                for kind, positions in positions_of.items():
                    if kind not in by_kind:
                        by_kind[kind] = Piece([fqns[position] for position in positions])
                        self.pieces.append(by_kind[kind])
                    source = Source(at, number, group, positions, count, rows)
                    by_kind[kind].sources.append(source)
                    for position in positions:
                        piece_of[position] = count
                    count += 1
                pieces_of_keys += piece_of
            self.split.append(pieces_of_keys if count > len(table.groups) else [])


def _split(
    fqns: Sequence[str], shared: Mapping[str, Hashable], own: Hashable
) -> dict[Hashable, Sequence[int]]:
    """Return the positions of the keys of a group by what makes their piece."""
    positions: dict[Hashable, list[int]] = {}
    for position, fqn in enumerate(fqns):
        positions.setdefault(shared.get(fqn, own), []).append(position)
    return dict(positions)


def _shared_keys(tables: Sequence[Table]) -> dict[str, Hashable]:
    """Return the keys that several tables have, each with what makes its piece.

    That is the groups that have it: ``((0, 2), (5, 0))`` for group 2 of table 0 and the first of
    table 5.
    """
    seen: set[str] = set()
    several: set[str] = set()
    for table in tables:
        several.update(seen.intersection(table.fqns))
        seen.update(table.fqns)
    places: dict[str, list[tuple[int, int, int]]] = {fqn: [] for fqn in several}
    for at, table in enumerate(tables):
        if several.isdisjoint(table.fqns):
            continue
        for group, (start, stop) in enumerate(pairwise(table.starts)):
            for position, fqn in enumerate(table.fqns[start:stop]):
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
