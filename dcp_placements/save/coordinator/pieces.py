"""The groups of all ranks as pieces: keys that the same tables have.

A group of one table is a piece by itself, unless another table has some of its keys, too: a tied
embedding on the first and the last pipeline stage, say. Then it is split, so that everything that
holds for one key of a piece holds for all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.key_table import Group, KeyTable


@dataclass(slots=True)
class Source:
    """Where one table has the keys of a piece.

    Attributes:
        table: Position in ``Cohorts.tables``.
        group: Number of the group there.
        positions: Of the piece's keys among those of the group, in the piece's order.
        number: Which piece of the table it is.
    """

    table: int
    group: int
    positions: list[int]
    number: int = 0


@dataclass(slots=True)
class Piece:
    """Keys that every rank which has one of them has all of, lying alike.

    Attributes:
        fqns: The keys.
        sources: The tables that have them.
        groups: What each source says that they have in common.
    """

    fqns: list[str]
    sources: list[Source]
    groups: list[Group]

    @property
    def group(self) -> Group:
        """What the first source says."""
        return self.groups[0]


@dataclass(slots=True)
class Pieces:
    """All pieces.

    Attributes:
        all: The pieces, in the order of the tables.
        split: By table, the piece of each key; empty where every group is a piece by itself.
        groups: By table, the group of each piece.
    """

    all: list[Piece] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)


Place = tuple[int, int, int]
"""Table, group and position of a key."""


def pieces_of(cohorts: Cohorts, apart: Collection[str] = ()) -> Pieces:
    """Return the pieces of all tables.

    Args:
        cohorts: All local plans.
        apart: Keys that are to be pieces of their own.
    """
    shared = _shared_keys(cohorts.tables)
    found = Pieces()
    by_kind: dict[object, Piece] = {}
    for at, table in enumerate(cohorts.tables):
        if shared.keys().isdisjoint(table.fqns) and not apart:
            for group, of in enumerate(table.groups):
                source = Source(at, group, list(range(table.sizes[group])), group)
                found.all.append(Piece(table.keys(group), [source], [of]))
            found.split.append([])
            found.groups.append(list(range(len(table.groups))))
            continue
        numbers: dict[tuple[int, object], int] = {}
        split: list[int] = []
        for group, (start, stop) in enumerate(pairwise(table.starts)):
            for fqn in table.fqns[start:stop]:
                kind: object = (at, group)
                if fqn in shared:
                    kind = shared[fqn]
                if fqn in apart:
                    kind = (kind, fqn)
                number = numbers.setdefault((group, kind), len(numbers))
                split.append(number)
        by_number: list[list[int]] = [[] for _ in numbers]
        for entry, number in enumerate(split):
            by_number[number].append(entry)
        groups = [group for group, _ in numbers]
        for number, (group, kind) in enumerate(numbers):
            start = table.starts[group]
            entries = by_number[number]
            piece = by_kind.get(kind)
            if piece is None:
                piece = by_kind[kind] = Piece([table.fqns[entry] for entry in entries], [], [])
                found.all.append(piece)
            positions = [entry - start for entry in entries]
            piece.sources.append(Source(at, group, positions, number))
            piece.groups.append(table.groups[group])
        found.split.append(split if len(numbers) > len(table.groups) else [])
        found.groups.append(groups)
    return found


def _shared_keys(tables: list[KeyTable]) -> dict[str, object]:
    """Return the keys that several tables have, each with what makes its piece."""
    seen: set[str] = set()
    several: set[str] = set()
    for table in tables:
        several.update(seen.intersection(table.fqns))
        seen.update(table.fqns)
    if not several:
        return {}
    places: dict[str, list[Place]] = {}
    for at, table in enumerate(tables):
        if several.isdisjoint(table.fqns):
            continue
        for group, (start, stop) in enumerate(pairwise(table.starts)):
            for position, fqn in enumerate(table.fqns[start:stop]):
                if fqn in several:
                    places.setdefault(fqn, []).append((at, group, position))
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for fqn, found in places.items():
        alike.setdefault(tuple([place[:2] for place in found]), []).append(fqn)
    shared: dict[str, object] = {}
    for kind, fqns in alike.items():
        # Runs speak of positions: where two tables have the keys in another order, one by one.
        orders = {tuple(sorted(fqns, key=lambda fqn: places[fqn][i][2])) for i in range(len(kind))}
        for fqn in fqns:
            shared[fqn] = kind if len(orders) == 1 else (kind, fqn)
    return shared
