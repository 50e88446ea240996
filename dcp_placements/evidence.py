"""What travels with a plan: a rank's side of the story, and the coordinator's answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from dcp_placements.digests import SAMPLED_NBYTES
from dcp_placements.errors import Fault
from dcp_placements.interop import WriteItem
from dcp_placements.renaming import Numbered, Step
from dcp_placements.table import Table, unpacked

Ints = np.ndarray[Any, np.dtype[np.int64]]

Digests = dict[int, bytes]
"""By layout class of a table (``OBJECT`` included): 8 bytes per item, zeros for no evidence; or so
many buckets of 8 bytes where a world is too large for digests of every item."""

DIGEST_NBYTES = SAMPLED_NBYTES

_SHORT_NBYTES = 512


def packed_ints(values: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    """Return non-negative integers as they travel; long rows of them mostly repeat themselves."""
    data = np.asarray(values, dtype="<u4").tobytes()
    return b"r" + data if len(data) <= _SHORT_NBYTES else b"z" + zlib.compress(data, 1)


def unpacked_ints(packed: bytes) -> Ints:
    """Return the integers that were packed."""
    data = packed[1:] if packed[:1] == b"r" else zlib.decompress(packed[1:])
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


@dataclass(slots=True)
class TableOffer:
    """One table of a rank, and where the rank stands in it.

    Attributes:
        table_id: Names the table.
        coordinates: The rank's position along the axes of each class, class after class, packed.
        digests: Of the items of those classes that may have replicas.
        stored_digests: Of all items as files will hold them, 16 bytes each in entry order; only
            for full digests.
        packed: The table itself, where the coordinator may not know it.
    """

    table_id: bytes
    coordinates: bytes
    digests: Digests = field(default_factory=dict)
    stored_digests: bytes = b""
    packed: bytes | None = None


@dataclass(slots=True)
class Story:
    """What a rank has to tell beside tables; mostly the same on all ranks of a pipeline stage.

    Attributes:
        matched: Rules that spoke here, with the number of keys.
        patterns: All rules there are, where they are known.
        stateless: Parameters without optimizer state where others have it.
        notes: What is let pass here but ought to be known.
        numbered: What its rename says of numbers of experts and layers.
        renames: What the checkpoint is to keep of its rename.
    """

    matched: Mapping[str, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    numbered: tuple[Numbered, ...] = ()
    renames: tuple[Step, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Story, _values(self)


@dataclass(slots=True)
class PickedOffer:
    """What a rank has of tensors whose rows each rank names itself.

    Attributes:
        table: The table of them. Its digests are all in one, under 0: of every item, in entry
            order.
        rows: The rows that are here, a packed ``RowLists``.
    """

    table: TableOffer
    rows: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return PickedOffer, (self.table, self.rows)


@dataclass(slots=True)
class Loose:
    """What no layout class describes: items that travel one by one.

    Attributes:
        items: The write items.
        digests: One per item; None where there is no evidence. Empty when digests are off.
        stored_digests: One per item, for full digests.
        paths: Where their keys stand in the nested state dict.
        rules_of: The rule that spoke, by key.
        row_maps: The rows that an ``IndexShard`` names here, by key; none of several dims.
    """

    items: list[WriteItem] = field(default_factory=list)
    digests: list[bytes | None] = field(default_factory=list)
    stored_digests: list[bytes | None] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    rules_of: dict[str, str] = field(default_factory=dict)
    row_maps: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Offer:
    """All that one rank sends to the coordinator; a few hundred bytes beside its tables.

    Attributes:
        rank: Its global rank.
        tables: Its tables.
        positions: Its position along every named mesh axis that it knows of.
        sizes: The sizes of those axes.
        digests: What kind they are: ``"sampled"``, ``"full"`` or ``"off"``.
        bucketed: Whether digests are folded into buckets.
        picked: Tensors whose rows it names.
        loose: Items that no table holds.
        story: What else it has to tell.
    """

    rank: int
    tables: list[TableOffer]
    positions: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    digests: str = "off"
    bucketed: bool = False
    picked: PickedOffer | None = None
    loose: Loose | None = None
    story: Story | None = None

    @property
    def all_tables(self) -> list[TableOffer]:
        """Its tables, and that of picked rows."""
        return self.tables if self.picked is None else [*self.tables, self.picked.table]

    def __reduce__(self) -> tuple[Any, ...]:
        # Neither the names of fields nor that of a table's class travel.
        tables = tuple(map(_values, self.tables))
        return _offer, (tables, *[getattr(self, name) for name in _BESIDE_TABLES])


_BESIDE_TABLES = tuple(known.name for known in fields(Offer) if known.name != "tables")


def _offer(tables: Sequence[tuple[Any, ...]], *beside: Any) -> Offer:
    told = dict(zip(_BESIDE_TABLES, beside, strict=True))
    return Offer(tables=[TableOffer(*values) for values in tables], **told)


def _values(told: Any) -> tuple[Any, ...]:
    return tuple([getattr(told, name) for name in told.__slots__])


@dataclass(frozen=True, slots=True)
class Shadowing:
    """Which shadows one rank writes.

    Attributes:
        place: The number of the rank in the names of its files.
        wanted: The bytes that it may write more, or patterns.
        unlike: For each table, entries of objects that are not the same on all ranks; None where
            nothing is known of objects.
    """

    place: int
    wanted: int | tuple[str, ...]
    unlike: tuple[tuple[int, ...] | None, ...]


@dataclass(slots=True)
class Answer:
    """What the coordinator sends to one rank: which of its items are its own to write.

    Attributes:
        slots: For each table, packed: for each class (objects last) how many ranks hold what this
            rank holds, and then for each class which of them it is.
        elsewhere: For each table, entries that others write, as a bitmap; empty for none.
        picked: The rows that are its own, a packed ``RowLists``; empty where it has none at all.
        loose: Positions of the loose items that are its own.
        extra: Keys and offsets of table entries that are its own though they are elsewhere.
        spreads: For each table, ``(replicas, writers)``: how many of so many replicas share; the
            lowest writes all that is not named. Empty for none.
        writers: Ranks that write anything.
        in_pieces: Some keys of which one rank writes several chunks, with the rank and how many:
            files that know a tensor by its name alone cannot hold those.
        objects: Some keys that are no tensors, which files of tensors cannot hold.
        shadows: Which copies it writes beside; None for none.
        save_id: Names this save, in 16 bytes.
    """

    slots: tuple[bytes, ...]
    elsewhere: tuple[bytes, ...] = ()
    picked: bytes = b""
    loose: tuple[int, ...] = ()
    extra: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    spreads: tuple[tuple[tuple[int, int], ...], ...] = ()
    writers: int = 1
    in_pieces: tuple[tuple[str, int, int], ...] = ()
    objects: tuple[str, ...] = ()
    shadows: Shadowing | None = None
    save_id: bytes = b""

    def all_slots(self) -> list[list[tuple[int, int]]]:
        """Return ``(replicas, slot)`` for each table and class, objects last."""
        halves = [unpacked_ints(packed).reshape(2, -1).tolist() for packed in self.slots]
        return [list(zip(replicas, slots, strict=True)) for replicas, slots in halves]

    def by_table(self) -> Iterator[tuple[list[tuple[int, int]], bytes, dict[int, int]]]:
        """Yield for each table ``(replicas, slot)`` by class, what is elsewhere, and the spread."""
        tables = len(self.slots)
        elsewhere = self.elsewhere or (b"",) * tables
        spreads = self.spreads or ((),) * tables
        for slots, bitmap, spread in zip(self.all_slots(), elsewhere, spreads, strict=True):
            yield slots, bitmap, dict(spread)


class Tables:
    """The tables that a coordinator knows, by what names them."""

    def __init__(self) -> None:
        self._known: dict[bytes, Table] = {}

    def learn(self, offers: Sequence[Offer]) -> None:
        """Take in the tables that were sent, each once."""
        for offer in offers:
            for sent in offer.all_tables:
                if sent.packed is not None and sent.table_id not in self._known:
                    self._known[sent.table_id] = unpacked(sent.packed)

    def add(self, table_id: bytes, table: Table) -> None:
        """Take in a table that is here already."""
        self._known.setdefault(table_id, table)

    def __contains__(self, table_id: bytes) -> bool:
        return table_id in self._known

    def __getitem__(self, table_id: bytes) -> Table:
        return self._known[table_id]
