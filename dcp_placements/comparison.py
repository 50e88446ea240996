"""Do ranks that hold the same part hold the same content: digests, table by table.

What differs key by key is *odd*, for the item-wise way to name it. Objects are noted as they are,
and where digests are folded into buckets a conflict, or a note, names the keys of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dcp_placements.agreement import object_note, objects_note
from dcp_placements.buckets import is_folded, suspects, told_of
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
            elif self.offers[members.plans[0]].bucketed:
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
        if self.offers[members.plans[0]].bucketed:
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
        found = suspects([blob for _, blob in told], len(entries))
        names = [members.table.fqns[entries[position]] for position in found]
        if len(found) == 1:
            groups: dict[tuple[bytes, ...], list[int]] = {}
            for rank, blob in told:
                groups.setdefault(told_of(blob, found[0], len(entries)), []).append(rank)
            self.notes.append(object_note(names[0], list(groups.values())))
        elif found:
            self.notes.append(objects_note(names, [rank for rank, _ in told]))

    def _bucket_conflict(
        self, members: Members, index: int, entries: Sequence[int], cells: Sequence[int]
    ) -> None:
        here = [
            (self.offers[plan].rank, told.digests[index])
            for plan, told, at in zip(
                members.plans, members.offers, members.cells[index].tolist(), strict=True
            )
            if at == cells[0] and index in told.digests
        ]
        pieces = len(members.boxes(index, members.cells_of(index).index(cells[0])))
        found = suspects([digests for _, digests in here], len(entries) * pieces)
        keys = dict.fromkeys(entries[position // pieces] for position in found)
        names = [members.table.fqns[entry] for entry in keys]
        self.conflicts.append(
            Fault(
                names[0],
                f"different contents on {format_ranks(rank for rank, _ in here)}, which claim to "
                "be replicas",
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
        if self.offers[members.plans[0]].bucketed:
            blob = members.offers[0].digests.get(index, b"")
            if index != OBJECT or is_folded(blob, len(entries)):
                return {}
        position = entries.index(entry)
        found: dict[int, bytes] = {}
        for cell, told in zip(members.cells_of(index), members.offers, strict=True):
            digests = told.digests.get(index)
            if digests is not None and cell not in found:
                width = len(digests) // DIGEST_NBYTES // len(entries)
                digest = digest_slice(digests, position, width)
                if any(digest):
                    found[cell] = digest
        return found


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
