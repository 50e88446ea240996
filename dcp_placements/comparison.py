"""Do ranks that hold the same part hold the same content: digests, table by table.

What differs key by key is *odd*, for the item-wise way to name it. Objects are noted as they are,
and where digests are folded into buckets a conflict, or a note, names the keys of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dcp_placements.agreement import object_note, objects_note
from dcp_placements.buckets import OBJECT_ROWS, Folding, folding
from dcp_placements.errors import Fault, format_names, format_ranks
from dcp_placements.evidence import DIGEST_NBYTES, Offer
from dcp_placements.members import Members
from dcp_placements.table import OBJECT, Table


class Comparison:
    """Compares what the offers say of contents.

    Args:
        offers: One per rank.
        members: The tables' ranks, by what names the table.

    Attributes:
        odd: Keys of which two ranks say different things.
        conflicts: Replicas that differ, where no single key can be told.
        notes: Objects that differ.
    """

    def __init__(self, offers: Sequence[Offer], members: Mapping[bytes, Members]) -> None:
        self.offers = offers
        self.members = members
        self.odd: dict[str, None] = {}
        self.conflicts: list[Fault] = []
        self.notes: list[Fault] = []

    def within(self, members: Members) -> None:
        """Note classes of which two ranks that hold one part say different things."""
        for index in (*range(len(members.table.classes)), OBJECT):
            cells = members.cells_of(index)
            if index != OBJECT and int(members.counts[index].max()) < 2:
                continue
            first: dict[int, bytes] = {}
            differing: dict[int, None] = {}
            for cell, told in zip(cells, members.offers, strict=True):
                digests = told.digests.get(index)
                if digests is not None and first.setdefault(cell, digests) != digests:
                    differing[cell] = None
            if not differing:
                continue
            entries = members.table.entries_of(index)
            if index == OBJECT:
                self._note_objects(members, entries)
            elif self._bucketed(members):
                self._bucket_conflict(members, index, entries, list(differing))
            else:
                for cell in differing:
                    told_here = [
                        told.digests[index]
                        for at, told in zip(cells, members.offers, strict=True)
                        if at == cell and index in told.digests
                    ]
                    for fqn in _differing(members.table, entries, told_here):
                        self.odd[fqn] = None

    def _note_objects(self, members: Members, entries: Sequence[int]) -> None:
        if self._bucketed(members):
            self._note_bucketed_objects(members, entries)
            return
        for position, entry in enumerate(entries):
            groups: dict[bytes, list[int]] = {}
            for plan, told in zip(members.plans, members.offers, strict=True):
                digest = digest_slice(told.digests.get(OBJECT, b""), position, 1)
                if any(digest):
                    groups.setdefault(digest, []).append(self.offers[plan].rank)
            if len(groups) > 1:
                self.notes.append(object_note(members.table.fqns[entry], list(groups.values())))

    def _note_bucketed_objects(self, members: Members, entries: Sequence[int]) -> None:
        told = [
            (self.offers[plan].rank, offer.digests[OBJECT])
            for plan, offer in zip(members.plans, members.offers, strict=True)
            if OBJECT in offer.digests
        ]
        places = folding_of(members.table, OBJECT, 1)
        suspects = places.suspects([blob for _, blob in told])
        sure = [position for position in suspects if places.is_alone(position)]
        others = [position for position in suspects if not places.is_alone(position)]
        for position in sure + (others if len(others) == 1 else []):
            groups: dict[bytes, list[int]] = {}
            for rank, blob in told:
                groups.setdefault(places.told_of(blob, position), []).append(rank)
            name = members.table.fqns[entries[position]]
            self.notes.append(object_note(name, list(groups.values())))
        if len(others) > 1:
            names = [members.table.fqns[entries[position]] for position in others]
            self.notes.append(objects_note(names, [rank for rank, _ in told]))

    def _bucketed(self, members: Members) -> bool:
        return self.offers[members.plans[0]].bucketed

    def _bucket_conflict(
        self, members: Members, index: int, entries: Sequence[int], cells: Sequence[int]
    ) -> None:
        """Note what differs: as odd where one key is known, as a conflict where several may be."""
        fqns = members.table.fqns
        by_cell: dict[int, list[tuple[int, bytes]]] = {cell: [] for cell in cells}
        at_cell: dict[int, int] = {}
        for at, (cell, told) in enumerate(
            zip(members.cells[index].tolist(), members.offers, strict=True)
        ):
            if cell in by_cell and index in told.digests:
                at_cell.setdefault(cell, at)
                rank = self.offers[members.plans[at]].rank
                by_cell[cell].append((rank, told.digests[index]))
        names: list[str] = []
        for cell, here in by_cell.items():
            pieces = len(members.boxes(index, at_cell[cell]))
            places = folding_of(members.table, index, pieces)
            folded: dict[int, None] = {}
            for position in places.suspects([digests for _, digests in here]):
                if places.is_alone(position):
                    self.odd[fqns[entries[position // pieces]]] = None
                else:
                    folded[entries[position // pieces]] = None
            if folded and not names:
                names = [fqns[entry] for entry in folded]
                self._folded_conflict(names, [rank for rank, _ in here])

    def _folded_conflict(self, names: Sequence[str], ranks: Sequence[int]) -> None:
        self.conflicts.append(
            Fault(
                names[0],
                f"different contents on {format_ranks(ranks)}, which claim to be replicas",
                (
                    f"it is one or more of {len(names)} keys: {format_names(names)}",
                    "likely:      a rule with Shard on an axis is missing; or the replicas have "
                    "drifted apart",
                    "way out:     dcp_placements.check(state_dict, rules) compares key by key",
                    'by rule:     on_conflict="warn" saves one of the copies anyway',
                ),
            )
        )

    def across(self, fqn: str, one: tuple[bytes, int], others: Sequence[tuple[bytes, int]]) -> None:
        """Note a key of which the ranks of two tables say different things."""
        known = self._digests_by_cell(*one)
        for other in others:
            for cell, digests in self._digests_by_cell(*other).items():
                if known.setdefault(cell, digests) != digests:
                    self.odd[fqn] = None
                    return

    def _digests_by_cell(self, name: bytes, entry: int) -> dict[int, bytes]:
        members = self.members[name]
        index = members.table.class_of[entry]
        entries = members.table.entries_of(index)
        position = entries.index(entry)
        found: dict[int, bytes] = {}
        foldings: dict[int, Folding] = {}
        for at, (cell, told) in enumerate(
            zip(members.cells_of(index), members.offers, strict=True)
        ):
            digests = told.digests.get(index)
            if digests is None or cell in found:
                continue
            if self._bucketed(members):
                pieces = 1 if index == OBJECT else len(members.boxes(index, at))
                if pieces not in foldings:
                    foldings[pieces] = folding_of(members.table, index, pieces)
                places = foldings[pieces]
                own = range(position * pieces, (position + 1) * pieces)
                if not all(places.is_alone(piece) for piece in own):
                    return {}
                digest = b"".join([places.told_of(digests, piece) for piece in own])
            else:
                width = len(digests) // DIGEST_NBYTES // len(entries)
                digest = digest_slice(digests, position, width)
            if any(digest):
                found[cell] = digest
        return found


def folding_of(table: Table, index: int, pieces: int) -> Folding:
    """Return how the digests of a class are folded in a large world."""
    names = [table.fqns[entry] for entry in table.entries_of(index)]
    return folding(names, pieces, OBJECT_ROWS if index == OBJECT else 1)


def _differing(table: Table, entries: Sequence[int], blobs: Sequence[bytes]) -> Iterable[str]:
    """Return the keys of which digests of one cell differ."""
    width = len(blobs[0]) // DIGEST_NBYTES // len(entries)
    for position, entry in enumerate(entries):
        told = {digest_slice(blob, position, width) for blob in blobs}
        if len({digest for digest in told if any(digest)}) > 1:
            yield table.fqns[entry]


def places_in_class(table: Table) -> list[int]:
    """Return each entry's number among those of its class."""
    seen: dict[int, int] = {}
    places = []
    for index in table.class_of:
        places.append(seen.get(index, 0))
        seen[index] = places[-1] + 1
    return places


def digest_slice(blob: bytes, position: int, width: int) -> bytes:
    step = DIGEST_NBYTES * width
    return blob[position * step : (position + 1) * step]
