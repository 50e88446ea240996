"""The tables of all ranks side by side, as arrays, and the pieces that they have in common.

Ranks that sent the same tables and as many boxes of each group are a *cohort*: what they hold is
one integer array. A *piece* is the keys that the same tables have: a group of one table, or a part
of one where another table has some of its keys, too (a tied embedding on the first and the last
pipeline stage, say). Everything that holds for one key of a piece holds for all of them: its
*cover* is which ranks hold which box, so whether the boxes make the whole, and which are replicas.

A *cell* is one box of one key on one rank. The cells of all ranks are numbered, each rank's in the
order in which it sends them: group by group, key by key, box by box. What is said of every cell is
one array: digests come in by it, and who writes or reads what goes out by it. Two ep ranks, each
with half of ``experts.w1`` and ``experts.w2``, and a norm that both hold::

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
        box_of: By row, position in ``boxes``.
        ranks: By row, the rank (position among those that take part).
        order: The rows by box, then by rank.
        starts: By box, its first place in ``order``; the number of rows last.
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
        """Return the ranks by the boxes that they hold: ``{{0}: [0, 2], {1}: [1, 3]}``."""
        order = np.argsort(self.ranks, kind="stable")
        ranks = self.ranks[order]
        starts = np.flatnonzero(np.diff(ranks, prepend=-1))
        found: dict[frozenset[int], list[int]] = {}
        for rank, boxes in zip(
            ranks[starts].tolist(), np.split(self.box_of[order], starts[1:]), strict=True
        ):
            found.setdefault(frozenset(boxes.tolist()), []).append(rank)
        return found


def repeated(parts: Mapping[frozenset[int], Sequence[int]]) -> list[frozenset[int]]:
    """Return the parts of a whole all of which another rank holds, too.

    Parts that only overlap are those of ranks with copies of some experts.

    >>> repeated({frozenset({0, 1}): [0], frozenset({1, 2}): [1]})
    []
    >>> repeated({frozenset({0, 1}): [0, 1]})
    [frozenset({0, 1})]

    Args:
        parts: The ranks that hold each part.
    """
    counts = Counter(element for part in parts for element in part)
    return [
        part
        for part, ranks in parts.items()
        if part
        and (
            len(ranks) > 1
            or (
                all(counts[element] > 1 for element in part)
                and any(part < other for other in parts)
            )
        )
    ]


class Cohort(NamedTuple):
    """Ranks that differ in the numbers of their boxes only.

    Attributes:
        tables: Positions of their tables in ``World.tables``, in their order.
        ranks: The ranks (positions among those that sent), ascending.
        groups: Table, position there and number of boxes of each group, in the order of the boxes.
        cells: Their cells, rank after rank; each rank has as many.
    """

    tables: tuple[int, ...]
    ranks: Ints
    groups: list[tuple[int, int, int]]
    cells: slice


class Block(NamedTuple):
    """The cells of one group on the ranks of a cohort.

    Of two ranks that hold two boxes each of three keys, and of no other, these are cells 0 to 12::

        Block(cells=slice(0, 12), ranks=2, start=0, keys=3, boxes=2)

    Attributes:
        cells: Those of the cohort.
        ranks: Number of its ranks.
        start: The first cell of the group among those of a rank.
        keys: Number of the group's keys.
        boxes: Number of boxes that each rank holds of each key.
    """

    cells: slice
    ranks: int
    start: int
    keys: int
    boxes: int

    def view(self, values: Array) -> Array:
        """Return the part of an array by cell as a view ``[ranks, boxes, keys]``."""
        by_rank = values[self.cells].reshape(self.ranks, -1)
        of_group = by_rank[:, self.start : self.start + self.keys * self.boxes]
        return of_group.reshape(self.ranks, self.keys, self.boxes).transpose(0, 2, 1)


class Source(NamedTuple):
    """Where one table has the keys of a piece, and what ranks hold of them: a row per rank and box.

    Of an expert weight of shape ``(4, 3)`` on two ep ranks::

        Source(0, 0, group, [0], [0, 1], [[[0, 0], [2, 3]], [[2, 0], [2, 3]]], [Block(...)])

    Attributes:
        table: Position in ``World.tables``.
        number: Position of their group there.
        group: What they have in common there.
        positions: Of the piece's keys among those of the group, in the piece's order.
        ranks: By row, cohort after cohort, the rank.
        boxes: By row, the box.
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
        """Yield the views of an array by cell that have the rows, and which of their keys count."""
        keys = slice(None) if type(self.positions) is range else self.positions
        for block in self.blocks:
            yield block.view(values), keys


@dataclass
class Piece:
    """Keys that every rank which has one of them has all of, lying alike.

    Attributes:
        fqns: The keys.
        sources: The tables that have them.
        group: That of the first source.
        ranks: By row, source after source, the rank.
        boxes: By row, the box; none where the groups differ in their number of dims.
    """

    fqns: list[str]
    sources: list[Source]
    group: Group
    ranks: Ints
    boxes: Boxes

    @cached_property
    def cover(self) -> Cover:
        """Which ranks hold which box, of groups that agree on the number of dims."""
        first, box_of = unique(self.boxes)
        order = np.lexsort((self.ranks, box_of))
        starts = np.searchsorted(box_of[order], np.arange(len(first) + 1))
        boxes, has_replicas = self.boxes[first], len(first) < len(self.boxes)
        return Cover(boxes, numel(boxes), box_of, self.ranks, order, starts, has_replicas)

    def take(self, values: Array) -> Array:
        """Return by row and key what an array by cell has of this piece."""
        taken = [
            view[:, :, keys].reshape(-1, len(self.fqns))
            for source in self.sources
            for view, keys in source.views(values)
        ]
        return np.concatenate(taken)

    def put(self, values: Array, of_piece: Array) -> None:
        """Put what this piece has by row and key into an array by cell."""
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
        sent: By rank, what it sends.

    Attributes:
        tables: The different tables.
        cohorts: The cohorts.
        members: By table, the ranks that have it, ascending.
        count: Number of cells.
        pieces: In the order of the tables.
    """

    def __init__(self, sent: Sequence[Sent]) -> None:
        self.tables: list[Table] = []
        self.cohorts: list[Cohort] = []
        self.count = 0
        unpacked = cache(unpacked_ints)
        numbers: dict[bytes, int] = {}
        alike: dict[tuple[tuple[bytes, ...], bytes], list[int]] = {}
        for rank, one in enumerate(sent):
            alike.setdefault((one.tables, one.counts), []).append(rank)
        # By table and group, of each cohort the columns of a ``Source``.
        rows: dict[tuple[int, int], list[tuple[Ints, Boxes, Block]]] = {}
        having: list[list[Ints]] = []
        for members in alike.values():
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
            of_rank = sum([len(self.tables[t].keys[number]) * n for t, number, n in groups])
            cells = slice(self.count, self.count + of_rank * len(ranks))
            self.cohorts.append(Cohort(tables, ranks, groups, cells))
            boxes, at = np.stack([unpacked(sent[rank].boxes) for rank in members]), 0
            start = 0
            for table in tables:
                having[table].append(ranks)
            for table, number, count in groups:
                ndim = len(self.tables[table].groups[number].shape)
                held = boxes[:, at : at + count * 2 * ndim].reshape(len(ranks) * count, 2, ndim)
                at += count * 2 * ndim
                block = Block(cells, len(ranks), start, len(self.tables[table].keys[number]), count)
                start += block.keys * count
                rows.setdefault((table, number), []).append((np.repeat(ranks, count), held, block))
            self.count = cells.stop
        self.members: list[Ints] = [np.sort(np.concatenate(parts)) for parts in having]
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
            rows: By table and group, the columns of a ``Source``.
        """
        shared = _shared_keys(self.tables) if len(self.tables) > 1 else {}
        made: dict[Hashable, tuple[list[str], list[Source]]] = {}
        for at, table in enumerate(self.tables):
            for number, fqns in enumerate(table.keys):
                positions_of: dict[Hashable, Sequence[int]] = {(at, number): range(len(fqns))}
                if not shared.keys().isdisjoint(fqns):
                    kinds: dict[Hashable, list[int]] = {}
                    for position, fqn in enumerate(fqns):
                        kinds.setdefault(shared.get(fqn, (at, number)), []).append(position)
                    positions_of = {**kinds}
                group = table.groups[number]
                for kind, positions in positions_of.items():
                    named = [fqns[one] for one in positions]
                    of_piece, sources = made.setdefault(kind, (named, []))
                    if named != of_piece:  # another order of keys here
                        at_of = dict(zip(named, positions, strict=True))
                        positions = [at_of[fqn] for fqn in of_piece]
                    sources.append(Source(at, number, group, positions, *rows[at, number]))
        pieces = []
        for fqns, sources in made.values():
            ranks = np.concatenate([one.ranks for one in sources])
            alike = len({len(one.group.shape) for one in sources}) == 1
            boxes = np.zeros((0, 2, 0), np.int64)
            if alike:
                boxes = np.concatenate([one.boxes for one in sources])
            pieces.append(Piece(fqns, sources, sources[0].group, ranks, boxes))
        return pieces

    def rules(self, piece: Piece, at: int) -> str:
        """Return the names of the rules that match the key at a position of a piece, as text."""
        names = [
            self.tables[one.table].rule(one.number, one.positions[at]) or NO_RULE
            for one in piece.sources
        ]
        return ", ".join(sorted(set(names)))

    def by_rank(self, values: Array) -> list[Array]:
        """Return by rank the values of its cells.

        Args:
            values: By cell.
        """
        of_ranks: dict[int, Array] = {}
        for cohort in self.cohorts:
            of_cohort = values[cohort.cells].reshape(len(cohort.ranks), -1)
            of_ranks.update(zip(cohort.ranks.tolist(), of_cohort, strict=True))
        return [of_ranks[rank] for rank in range(len(of_ranks))]


def _shared_keys(tables: Sequence[Table]) -> dict[str, Hashable]:
    """Return the keys that several tables have, each with the groups that have it.

    ``((0, 2), (5, 0))`` is group 2 of table 0 and the first of table 5.
    """
    seen: set[str] = set()
    several: set[str] = set()
    for table in tables:
        for fqns in table.keys:
            several.update(seen.intersection(fqns))
            seen.update(fqns)
    groups_of: dict[str, list[tuple[int, int]]] = {fqn: [] for fqn in several}
    for at, table in enumerate(tables if several else ()):
        for group, fqns in enumerate(table.keys):
            for fqn in several.intersection(fqns):
                groups_of[fqn].append((at, group))
    return {fqn: tuple(groups) for fqn, groups in groups_of.items()}
