"""The groups of all ranks as pieces: keys that the same tables have.

A group of one table is a piece by itself, unless another table has some of its keys, too: a tied
embedding on the first and the last pipeline stage, say. Then it is split, so that everything that
holds for one key of a piece holds for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from dcp_placements.layout.boxes import Boxes
from dcp_placements.save.coordinator.cohorts import Cohorts, Rows
from dcp_placements.save.coordinator.cover import NOTHING, Cover
from dcp_placements.save.key_table import Group, KeyTable
from dcp_placements.save.packing import Ints


@dataclass(slots=True)
class Source:
    """Where one table has the keys of a piece.

    Attributes:
        table: Position in ``Cohorts.tables``.
        group: What the keys have in common there.
        positions: Of the piece's keys among those of the group, in the piece's order.
        number: Which piece of the table it is.
        rows: What each cohort holds of the group.
    """

    table: int
    group: Group
    positions: Sequence[int]
    number: int
    rows: list[Rows]


@dataclass
class Piece:
    """Keys that every rank which has one of them has all of, lying alike.

    Attributes:
        fqns: The keys.
        sources: The tables that have them.
        cover: Which ranks hold which box.
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
    def plans(self) -> Ints:
        """By row, the position of the plan."""
        return np.concatenate([rows.plans for rows in self.rows])

    @cached_property
    def boxes(self) -> Boxes:
        """By row, the box; for groups of one number of dims."""
        boxes = np.concatenate([rows.boxes for rows in self.rows])
        return boxes.reshape(len(boxes), 2, len(self.group.shape))

    def by_row(self, values: Sequence[int]) -> Ints:
        """Return values, one per source, by row."""
        counts = [sum(len(rows.plans) for rows in source.rows) for source in self.sources]
        return np.repeat(np.array(values, np.int64), counts)


@dataclass(slots=True)
class Pieces:
    """All pieces.

    Attributes:
        all: The pieces, in the order of the tables.
        split: By table, the piece of each key; empty where every group is a piece by itself.
        counts: By table, the number of its pieces.
    """

    all: list[Piece] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def pieces_of(cohorts: Cohorts) -> Pieces:
    """Return the pieces of all tables."""
    shared = _shared_keys(cohorts.tables)
    pieces = Pieces()
    by_kind: dict[Hashable, Piece] = {}
    for at, table in enumerate(cohorts.tables):
        if shared.keys().isdisjoint(table.fqns):
            for number, group in enumerate(table.groups):
                fqns, rows = table.keys(number), cohorts.rows[at][number]
                source = Source(at, group, range(len(fqns)), number, rows)
                pieces.all.append(Piece(fqns, [source]))
            pieces.split.append([])
            pieces.counts.append(len(table.groups))
            continue
        split: list[int] = []
        count = 0
        for number, group in enumerate(table.groups):
            fqns = table.keys(number)
            positions_of: dict[Hashable, list[int]] = {}
            for position, fqn in enumerate(fqns):
                positions_of.setdefault(shared.get(fqn, (at, number)), []).append(position)
            piece_of = [0] * len(fqns)
            for kind, positions in positions_of.items():
                if kind not in by_kind:
                    by_kind[kind] = Piece([fqns[position] for position in positions])
                    pieces.all.append(by_kind[kind])
                rows = cohorts.rows[at][number]
                by_kind[kind].sources.append(Source(at, group, positions, count, rows))
                for position in positions:
                    piece_of[position] = count
                count += 1
            split += piece_of
        pieces.split.append(split if count > len(table.groups) else [])
        pieces.counts.append(count)
    return pieces


def _shared_keys(tables: list[KeyTable]) -> dict[str, Hashable]:
    """Return the keys that several tables have, each with what makes its piece."""
    seen: set[str] = set()
    several: set[str] = set()
    for table, following in pairwise(tables):
        seen.update(table.fqns)
        several.update(seen.intersection(following.fqns))
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
