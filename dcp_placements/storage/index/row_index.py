"""The rows of a checkpoint as what determines them: who wrote which chunks, and in which order.

A row is the place of one chunk in a file. Thousands of ranks write their files alike, but for the
names of the files and for the offsets of the chunks. So three things are kept, each once:

- a *template*: for each key that a writer writes, where in its files the records are. Writers that
  wrote alike have the same template.
- *places*: for each chunk of a key its offset and its writer. Keys that are cut and assigned alike
  have the same places.
- per writer its template, and the names of its files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dcp_placements.storage.index.columns import IndexDamage, Ints
from dcp_placements.storage.index.coordinates import Numbering
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.metadata.table import ROW, Offset, Rows, Starts, Transforms

TEMPLATE = np.dtype(
    [(name, np.int64) for name in ("key", "ordinal", "file", "transforms", "start", "length")]
)
"""A row of a template: the number of its key; its number among the rows of that key; the number of
the file among those of the writer; then as in ``ROW``. Sorted by key and ordinal."""

Naming = tuple[tuple[str, str | None], ...]
"""For each file of a writer what stands in its name before and behind the writer's number; None
where the name has no such number."""

_Row = tuple[str, int, int, int]
"""Name of the file, transforms, start and length."""

_Rows = dict[tuple[int, int], tuple[int, int, int, int]]
"""By key and ordinal: number of the file, transforms, start and length."""

_PIECE_ROWS = 1 << 16


@dataclass(slots=True)
class Places:
    """Where the chunks of some keys are.

    Attributes:
        offsets: ``(chunks, ndim)``; None of an object.
        writers: By chunk, the number of its writer.
        ordinals: By chunk, the number of its row among those of the key in the writer's template.
        listed: The number of the list of chunks that has the same offsets in the same order; -1
            where none has.
    """

    offsets: Ints | None
    writers: Ints
    ordinals: Ints
    listed: int = -1
    _order: Ints | None = None
    _at: dict[Offset, int] = field(default_factory=dict)

    @property
    def content(self) -> tuple[Hashable, ...]:
        """A value that is equal for equal places."""
        offsets = None if self.offsets is None else (self.offsets.shape, self.offsets.tobytes())
        return offsets, self.listed, self.writers.tobytes(), self.ordinals.tobytes()

    def find(self, offset: Offset, hint: int | None = None) -> int | None:
        """Return the position of a chunk; None where there is none.

        Args:
            offset: Of the chunk; None of an object.
            hint: Where it may be.
        """
        if (at := self._at.get(offset)) is not None:
            return at
        if self.offsets is None or offset is None:
            return 0 if offset is None and self.offsets is None and len(self.writers) else None
        offsets, wanted = self.offsets, list(offset)
        if len(wanted) != offsets.shape[1]:
            return None
        if hint is not None and 0 <= hint < len(offsets) and offsets[hint].tolist() == wanted:
            self._at[offset] = hint
            return hint
        if self._order is None:
            self._order = np.lexsort(offsets.T[::-1]) if len(wanted) else np.arange(len(offsets))
        order, low, high = self._order, 0, len(offsets)
        for dim, start in enumerate(wanted):
            column = offsets[order[low:high], dim]
            low, high = (
                low + int(column.searchsorted(start)),
                low + int(column.searchsorted(start, side="right")),
            )
        if low == high:
            return None
        at = self._at[offset] = int(order[high - 1])
        return at


@dataclass
class Writers:
    """Who wrote the files.

    Attributes:
        templates: By writer, the number of its template.
        namings: How files are named; each way once.
        naming_of: By writer, the number of its naming.
        numbers: By writer, the number in the names of its files.
    """

    templates: Ints
    namings: Sequence[Naming]
    naming_of: Ints
    numbers: Ints

    def files_of(self, writer: int) -> list[str]:
        """Return the names of the files of a writer."""
        naming, number = self.namings[int(self.naming_of[writer])], int(self.numbers[writer])
        return [_name(parts, number) for parts in naming]

    def files(self) -> Iterator[str]:
        """Yield the names of all files, writer by writer."""
        for naming, number in zip(self.naming_of.tolist(), self.numbers.tolist(), strict=True):
            for parts in self.namings[naming]:
                yield _name(parts, number)

    @cached_property
    def first_files(self) -> Ints:
        """By writer, the position of its first file among all files."""
        counts = np.array([len(naming) for naming in self.namings], np.int64)
        ends = np.cumsum(counts[self.naming_of]) if len(counts) else self.naming_of
        return ends - counts[self.naming_of] if len(counts) else ends


@dataclass(slots=True)
class LookedUp:
    """What was read of an index, in the form in which single rows are looked up.

    Attributes:
        places: By key.
        rows: By template.
        sources: By number of places and position in them: the files of the writer, the rows of
            its template, and the ordinal.
    """

    places: dict[str, list[tuple[int, Places]]] = field(default_factory=dict)
    rows: dict[int, _Rows] = field(default_factory=dict)
    sources: dict[tuple[int, int], tuple[list[str], _Rows, int]] = field(default_factory=dict)


@dataclass
class RowIndex:
    """The rows of a checkpoint. What is read from a file is read when it is used.

    Attributes:
        fqns: Keys, those of the state dict first.
        transforms: Each list of transforms once; None for none.
        starts: Of small tensors, as of ``Rows``.
        writers: The ranks, or files, that rows are from.
        templates: By number.
        places: By number.
        counts: By number, the chunks of the places.
        pairs: ``(2, pairs)``: number of a key and of places, by key.
        entries: Of the state dict whose lists of chunks the places refer to.
        looked_up: A memo of the rest.
    """

    fqns: Sequence[str]
    transforms: Sequence[Transforms]
    starts: Starts | None
    writers: Writers
    templates: Sequence[np.ndarray]
    places: Sequence[Places]
    counts: Ints
    pairs: Ints
    entries: Entries | None = None
    looked_up: LookedUp = field(default_factory=LookedUp)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By key, its number."""
        return {fqn: number for number, fqn in enumerate(self.fqns)}

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = np.searchsorted(self.pairs[0], np.arange(len(self.fqns) + 1)).tolist()
        return bounds

    def __len__(self) -> int:
        return int(self.counts[self.pairs[1]].sum()) if len(self.counts) else 0

    def places_of(self, fqn: str) -> list[tuple[int, Places]]:
        """Return number and places of the places of a key; none where there is no such key."""
        held = self.looked_up.places.get(fqn)
        if held is None:
            key = self.numbers.get(fqn)
            bounds = (0, 0) if key is None else self._bounds[key : key + 2]
            numbers = self.pairs[1, slice(*bounds)].tolist()
            held = [(number, self.places[number]) for number in numbers]
            self.looked_up.places[fqn] = held
        return held

    def row(self, fqn: str, offset: Offset, hint: int | None) -> _Row | None:
        """Return the row of a chunk; None where there is none.

        Args:
            fqn: Of its key.
            offset: Of the chunk; None of an object.
            hint: Its likely position in the list of chunks.
        """
        for number, places in self.places_of(fqn):
            at = places.find(offset, hint)
            if at is None:
                continue
            source = self.looked_up.sources.get((number, at))
            if source is None:
                writer = int(places.writers[at])
                rows = self._rows(int(self.writers.templates[writer]))
                source = self.writers.files_of(writer), rows, int(places.ordinals[at])
                self.looked_up.sources[number, at] = source
            files, rows, ordinal = source
            row = rows.get((self.numbers[fqn], ordinal))
            if row is None or row[0] >= len(files):
                raise IndexDamage("a chunk is not among what its writer wrote")
            file, transforms, start, length = row
            return files[file], transforms, start, length
        return None

    def _rows(self, template: int) -> _Rows:
        """Return the rows of a template by key and ordinal."""
        rows = self.looked_up.rows.get(template)
        if rows is None:
            columns = [self.templates[template][name].tolist() for name in TEMPLATE.names or ()]
            keys = zip(*columns[:2], strict=True)
            rows = self.looked_up.rows[template] = dict(
                zip(keys, zip(*columns[2:], strict=True), strict=True)
            )
        return rows

    def classes(self) -> Iterator[tuple[int, Ints]]:
        """Yield ``(number of places, numbers of their keys)``."""
        order = np.argsort(self.pairs[1], kind="stable")
        keys, places = self.pairs[:, order]
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        for start, stop in zip(starts, [*starts, len(places)][1:], strict=True):
            yield int(places[start]), keys[start:stop]

    def pieces(self) -> Iterator[tuple[Ints, int, Ints]]:
        """Yield all rows in pieces.

        Yields:
            The numbers of some keys; of the places that they have; and, for each of them and each
            chunk, ``(keys, chunks, 4)``: position among all files, transforms, start, length.
        """
        for number, keys in self.classes():
            places = self.places[number]
            chunks = len(places.writers)
            if not chunks:
                continue
            templates = self.writers.templates[places.writers]
            kinds, kind_of = np.unique(
                np.stack([templates, places.ordinals]), axis=1, return_inverse=True
            )
            kind_of = kind_of.reshape(-1)
            first_files = self.writers.first_files[places.writers]
            step = max(_PIECE_ROWS // chunks, 1)
            for start in range(0, len(keys), step):
                some = keys[start : start + step]
                by_kind = np.stack(
                    [
                        self._template_rows(template, ordinal, some)
                        for template, ordinal in kinds.T.tolist()
                    ]
                )
                rows = by_kind[kind_of].swapaxes(0, 1)
                rows[..., 0] += first_files
                yield some, number, rows

    def unfolded(self) -> Rows:
        """Return all rows."""
        chunks = [(at, one) for at, one in enumerate(self.places) if one.offsets is not None]
        numbering = Numbering([one.offsets for _, one in chunks if one.offsets is not None])
        numbers = dict(zip([at for at, _ in chunks], numbering.numbers, strict=True))
        offsets: list[Offset] = [None]
        for table in numbering.unique:
            offsets += map(tuple, table.tolist())
        rows = np.empty(len(self), ROW)
        at = 0
        for keys, number, places in self.pieces():
            piece = rows[at : at + places.shape[0] * places.shape[1]].reshape(places.shape[:2])
            piece["fqn"] = keys[:, None]
            piece["offset"] = numbers[number] + 1 if number in numbers else 0
            for column, name in enumerate(("path", "transforms", "start", "length")):
                piece[name] = places[..., column]
            at += piece.size
        paths = tuple(self.writers.files())
        return Rows(
            tuple(self.fqns), tuple(offsets), paths, tuple(self.transforms), rows, self.starts
        )

    def _template_rows(self, template: int, ordinal: int, keys: Ints) -> Ints:
        held = self.templates[template]
        # Keys are in order, and most have one row.
        at = np.searchsorted(held["key"], keys) + ordinal
        at_most = np.minimum(at, len(held) - 1)
        if (
            not len(held)
            or not ((held["key"][at_most] == keys) & (held["ordinal"][at_most] == ordinal)).all()
        ):
            raise IndexDamage("a chunk is not among what its writer wrote")
        rows = held[at_most]
        return np.stack([rows[name] for name in ("file", "transforms", "start", "length")], axis=1)


def _name(parts: tuple[str, str | None], number: int) -> str:
    before, behind = parts
    return before if behind is None else f"{before}{number}{behind}"
