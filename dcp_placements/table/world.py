"""The tables of all ranks side by side, as arrays, and the pieces that they have in common.

Ranks that sent the same tables and as many boxes of each group are a *cohort*: what they hold is
one integer array. A *piece* is the keys that the same tables have: a group of one table, or a part
of one where another table has some of its keys, too (a tied embedding on the first and the last
pipeline stage, say). What is true of one key of a piece is true of all of them: the *cover* of the
piece says which ranks hold which box, so whether the boxes make the whole, and which are replicas.

A *cell* is one box of one key on one rank. The cells of all ranks are numbered, each rank's in the
order in which it sends them: group by group, key by key, box by box. The values of all cells are
one array: digests arrive in this order, and assignments are sent in it. Two ep ranks, each with
half of ``experts.w1`` and ``experts.w2``, and a norm that both hold::

    rank 0    0: half of experts.w1    1: half of experts.w2    2: norm
    rank 1    3: half of experts.w1    4: half of experts.w2    5: norm
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.layout.boxes import Array, Boxes, Ints, numel, unique
from dcp_placements.table.table import Group, Sent, Table, unpacked_ints

NO_RULE = "no rule"


class Cover(NamedTuple):
    """The boxes of all ranks side by side.

    A *row* is one box on one rank. Equal boxes are replicas. An expert weight of shape ``(4, 3)``
    on ranks 0 and 1 of ``ep``, and again on ranks 2 and 3::

        boxes   [[[0, 0], [2, 3]], [[2, 0], [2, 3]]]
        numel   [6, 6]
        box_of  [0, 1, 0, 1]
        ranks   [0, 1, 2, 3]
        order   [0, 2, 1, 3]
        starts  [0, 2, 4]

    Attributes:
        boxes: The different boxes, in order of offsets.
        numel: Elements of each box.
        box_of: The position in ``boxes`` of each row.
        ranks: The rank of each row (position among those that take part).
        order: The rows, sorted by box, then by rank.
        starts: The first index in ``order`` of each box; the number of rows last.
        has_replicas: Whether any box is held more than once.
    """

    boxes: Boxes
    numel: Ints
    box_of: Ints
    ranks: Ints
    order: Ints
    starts: Ints
    has_replicas: bool

    def holders(self, box: int) -> Ints:
        """Return the ranks that hold a box, ascending."""
        return self.ranks[self.order[self.starts[box] : self.starts[box + 1]]]

    def ranks_by_boxes(self) -> dict[frozenset[int], list[int]]:
        """Map sets of boxes to the ranks that hold them: ``{{0}: [0, 2], {1}: [1, 3]}``."""
        order = np.argsort(self.ranks, kind="stable")
        ranks = self.ranks[order]
        starts = np.flatnonzero(np.diff(ranks, prepend=-1))
        ranks_by_boxes: dict[frozenset[int], list[int]] = {}
        for rank, boxes in zip(
            ranks[starts].tolist(), np.split(self.box_of[order], starts[1:]), strict=True
        ):
            ranks_by_boxes.setdefault(frozenset(boxes.tolist()), []).append(rank)
        return ranks_by_boxes


def repeated(holders: Mapping[frozenset[int], Sequence[int]]) -> list[frozenset[int]]:
    """Return the sets of boxes, or of numbers, that other ranks hold entirely as well.

    Sets that only overlap are not returned: these ranks have copies of some experts.

    >>> repeated({frozenset({0, 1}): [0], frozenset({1, 2}): [1]})
    []
    >>> repeated({frozenset({0, 1}): [0, 1]})
    [frozenset({0, 1})]

    Args:
        holders: The ranks that hold each set.
    """
    counts = Counter(element for elements in holders for element in elements)
    return [
        elements
        for elements, ranks in holders.items()
        if elements
        and (
            len(ranks) > 1
            or (
                all(counts[element] > 1 for element in elements)
                and any(elements < other for other in holders)
            )
        )
    ]


class Cohort(NamedTuple):
    """Ranks whose plans differ in the offsets and sizes of their boxes only.

    Attributes:
        tables: Positions of their tables in ``World.tables``, in their order.
        ranks: The ranks (positions among those that sent), ascending.
        groups: The table of each group, its position there and its number of boxes, in the order
            of the boxes.
        cells: Their cells, rank after rank; equally many of each rank.
    """

    tables: tuple[int, ...]
    ranks: Ints
    groups: list[tuple[int, int, int]]
    cells: slice


class Block(NamedTuple):
    """The cells of one group on the ranks of a cohort.

    Two ranks that hold two boxes of each of three keys, and nothing else, have cells 0 to 11::

        Block(cells=slice(0, 12), ranks=2, start=0, keys=3, boxes=2)

    Attributes:
        cells: The cells of the cohort.
        ranks: Number of ranks in the cohort.
        start: The first cell of the group among those of a rank.
        keys: Number of the group's keys.
        boxes: Number of boxes that each rank holds of each key.
    """

    cells: slice
    ranks: int
    start: int
    keys: int
    boxes: int


class Source(NamedTuple):
    """One table that has the keys of a piece, and the boxes of its ranks: a row per rank and box.

    An expert weight of shape ``(4, 3)`` on two ep ranks::

        Source(0, 0, group, [0], [0, 1], [[[0, 0], [2, 3]], [[2, 0], [2, 3]]], [Block(...)])

    Attributes:
        table: The position of the table in ``World.tables``.
        number: The position of the keys' group in the table.
        group: The group.
        positions: The positions of the piece's keys in the group, in the piece's order.
        ranks: The rank of each row, cohort after cohort.
        boxes: The box of each row.
        blocks: The cells of the rows, cohort after cohort.
    """

    table: int
    number: int
    group: Group
    positions: Sequence[int]
    ranks: Ints
    boxes: Boxes
    blocks: Sequence[Block]

    def views(self, values: Array) -> Iterator[tuple[Array, Any]]:
        """Yield views ``[ranks, boxes, keys]`` that have the rows, and the piece's keys in each.

        Args:
            values: The values of all cells. A rank sends the boxes of one key side by side:
                ``k0b0 k0b1 k1b0 k1b1 k2b0 k2b1``.
        """
        positions = slice(None) if type(self.positions) is range else self.positions
        for cells, ranks, start, keys, boxes in self.blocks:
            by_rank = values[cells].reshape(ranks, -1)
            of_group = by_rank[:, start : start + keys * boxes]
            yield of_group.reshape(ranks, keys, boxes).transpose(0, 2, 1), positions


@dataclass
class Piece:
    """Keys that the same tables have: a rank with one of them has all, in equal boxes.

    Attributes:
        fqns: The keys.
        sources: The tables that have them.
        group: The group of the first source.
        ranks: The rank of each row, source after source.
        boxes: The box of each row; none where the groups differ in their number of dims.
    """

    fqns: list[str]
    sources: list[Source]
    group: Group
    ranks: Ints
    boxes: Boxes

    @cached_property
    def cover(self) -> Cover:
        """Which ranks hold which box, where the groups agree on the number of dims."""
        first, box_of = unique(self.boxes)
        order = np.lexsort((self.ranks, box_of))
        starts = np.searchsorted(box_of[order], np.arange(len(first) + 1))
        boxes, has_replicas = self.boxes[first], len(first) < len(self.boxes)
        return Cover(boxes, numel(boxes), box_of, self.ranks, order, starts, has_replicas)

    def take(self, values: Array) -> Array:
        """Return the values of this piece, by row and key, from an array by cell."""
        of_sources = [
            view[:, :, keys].reshape(-1, len(self.fqns))
            for source in self.sources
            for view, keys in source.views(values)
        ]
        return np.concatenate(of_sources)

    def put(self, values: Array, of_piece: Array) -> None:
        """Write the values of this piece, by row and key, into an array by cell."""
        row = 0
        for source in self.sources:
            for view, keys in source.views(values):
                ranks, boxes, _ = view.shape
                of_rows = of_piece[row : row + ranks * boxes]
                view[:, :, keys] = of_rows.reshape(ranks, boxes, len(self.fqns))
                row += ranks * boxes


class World:
    """What all ranks hold.

    Args:
        sent: The tables and boxes that each rank sends.

    Attributes:
        tables: The different tables.
        cohorts: The cohorts.
        members: The ranks that have each table, ascending.
        count: Number of cells.
        pieces: The pieces, in the order of the tables.
    """

    def __init__(self, sent: Sequence[Sent]) -> None:
        self.tables: list[Table] = []
        self.cohorts: list[Cohort] = []
        self.count = 0
        unpacked = cache(unpacked_ints)
        numbers: dict[bytes, int] = {}
        cohorts: dict[tuple[tuple[bytes, ...], bytes], list[int]] = {}
        for rank, of_rank in enumerate(sent):
            cohorts.setdefault((of_rank.tables, of_rank.counts), []).append(rank)
        # The columns of a ``Source`` for each cohort, by table and group.
        rows: dict[tuple[int, int], list[tuple[Ints, Boxes, Block]]] = {}
        having: list[list[Ints]] = []
        for members in cohorts.values():
            ranks, first = np.array(members, np.int64), sent[members[0]]
            for packed in first.tables:
                if packed not in numbers:
                    numbers[packed] = len(numbers)
                    self.tables.append(Table.unpacked(packed))
                    having.append([])
            tables = tuple([numbers[packed] for packed in first.tables])
            counts = iter(unpacked(first.counts).tolist())
            groups = [
                (table, number, next(counts))
                for table in tables
                for number in range(len(self.tables[table].groups))
            ]
            ncells = sum([len(self.tables[t].keys[number]) * n for t, number, n in groups])
            cells = slice(self.count, self.count + ncells * len(ranks))
            self.cohorts.append(Cohort(tables, ranks, groups, cells))
            for table in tables:
                having[table].append(ranks)
            # A row per rank: the offsets and sizes of all its boxes.
            boxes = np.stack([unpacked(sent[rank].boxes) for rank in members])
            column = start = 0
            for table, number, count in groups:
                ndim = len(self.tables[table].groups[number].shape)
                end = column + count * 2 * ndim
                of_group = boxes[:, column:end].reshape(len(ranks) * count, 2, ndim)
                column = end
                block = Block(cells, len(ranks), start, len(self.tables[table].keys[number]), count)
                start += block.keys * count
                source = np.repeat(ranks, count), of_group, block
                rows.setdefault((table, number), []).append(source)
            self.count = cells.stop
        self.members: list[Ints] = [np.sort(np.concatenate(ranks)) for ranks in having]
        joined: dict[tuple[int, int], tuple[Ints, Boxes, Sequence[Block]]] = {}
        for key, of_cohorts in rows.items():
            of_ranks, of_boxes, blocks = zip(*of_cohorts, strict=True)
            joined[key] = np.concatenate(of_ranks), np.concatenate(of_boxes), blocks
        self.pieces = self._pieces(joined)

    def _pieces(
        self, rows: Mapping[tuple[int, int], tuple[Ints, Boxes, Sequence[Block]]]
    ) -> list[Piece]:
        """Return the pieces of all tables.

        Args:
            rows: The columns of a ``Source`` of each table and group.
        """
        shared = _shared_keys(self.tables) if len(self.tables) > 1 else {}
        # What a piece is known by is its table and group, or those of all tables that share it.
        sources_of: dict[Hashable, tuple[list[str], list[Source]]] = {}
        for table, of_table in enumerate(self.tables):
            for number, fqns in enumerate(of_table.keys):
                own = table, number
                positions_of: dict[Hashable, Sequence[int]] = {own: range(len(fqns))}
                if not shared.keys().isdisjoint(fqns):
                    by_piece: dict[Hashable, list[int]] = {}
                    for position, fqn in enumerate(fqns):
                        by_piece.setdefault(shared.get(fqn, own), []).append(position)
                    positions_of = {**by_piece}
                group = of_table.groups[number]
                for piece, positions in positions_of.items():
                    named = [fqns[position] for position in positions]
                    of_piece, sources = sources_of.setdefault(piece, (named, []))
                    if named != of_piece:  # this table has them in another order
                        position_of = dict(zip(named, positions, strict=True))
                        positions = [position_of[fqn] for fqn in of_piece]
                    sources.append(Source(table, number, group, positions, *rows[own]))
        pieces = []
        for fqns, sources in sources_of.values():
            ranks = np.concatenate([source.ranks for source in sources])
            boxes = np.zeros((0, 2, 0), np.int64)
            if len({len(source.group.shape) for source in sources}) == 1:
                boxes = np.concatenate([source.boxes for source in sources])
            pieces.append(Piece(fqns, sources, sources[0].group, ranks, boxes))
        return pieces

    def rules(self, piece: Piece, position: int) -> str:
        """Return the names of the rules that match the key at a position of a piece, as text."""
        names = [
            self.tables[source.table].rule(source.number, source.positions[position]) or NO_RULE
            for source in piece.sources
        ]
        return ", ".join(sorted(set(names)))

    def by_rank(self, values: Array) -> list[Array]:
        """Return the values of each rank's cells.

        Args:
            values: The values of all cells.
        """
        of_ranks: dict[int, Array] = {}
        for cohort in self.cohorts:
            of_cohort = values[cohort.cells].reshape(len(cohort.ranks), -1)
            of_ranks.update(zip(cohort.ranks.tolist(), of_cohort, strict=True))
        return [of_ranks[rank] for rank in range(len(of_ranks))]


def _shared_keys(tables: Sequence[Table]) -> dict[str, Hashable]:
    """Map each key that several tables have to the groups that have it.

    ``((0, 2), (5, 0))`` is group 2 of table 0 and the first of table 5.
    """
    seen: set[str] = set()
    several: set[str] = set()
    for table in tables:
        for fqns in table.keys:
            several.update(seen.intersection(fqns))
            seen.update(fqns)
    groups_of: dict[str, list[tuple[int, int]]] = {fqn: [] for fqn in several}
    for number, table in enumerate(tables if several else ()):
        for group, fqns in enumerate(table.keys):
            for fqn in several.intersection(fqns):
                groups_of[fqn].append((number, group))
    return {fqn: tuple(groups) for fqn, groups in groups_of.items()}
