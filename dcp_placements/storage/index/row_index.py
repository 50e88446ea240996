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
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.metadata.table import Offset, Transforms

TEMPLATE = np.dtype(
    [(name, np.int64) for name in ("key", "ordinal", "file", "transforms", "start", "length")]
)
"""A row of a template: the number of its key; its number among the rows of that key; the number of
the file among those of the writer; then as in ``ROW``. Sorted by key and ordinal."""

Naming = tuple[tuple[str, str | None], ...]
"""For each file of a writer what stands in its name before and behind the writer's number; None
where the name has no such number."""

Row = tuple[str, int, int, int]
"""Name of the file, transforms, start and length."""

_Rows = dict[tuple[int, int], tuple[int, int, int, int]]
"""By key and ordinal: number of the file, transforms, start and length."""

_Source = tuple[list[str], _Rows, int]
"""Of a chunk: the files of its writer, the rows of the template, and the ordinal."""

_PIECE_ROWS = 1 << 16
_UNWRITTEN = "a chunk is not among what its writer wrote"


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

    @property
    def content(self) -> tuple[Hashable, ...]:
        """A value that is equal for equal places."""
        offsets = None if self.offsets is None else (self.offsets.shape, self.offsets.tobytes())
        return offsets, self.listed, self.writers.tobytes(), self.ordinals.tobytes()

    def all_offsets(self) -> list[Offset]:
        """Return the offsets of all chunks, in order."""
        table = self.offsets
        return [None] * len(self.writers) if table is None else list(map(tuple, table.tolist()))

    def find(self, offset: Offset, hint: int | None = None) -> int | None:
        """Return the position of a chunk; None where there is none.

        Args:
            offset: Of the chunk; None of an object.
            hint: Where it may be.
        """
        if self.offsets is None or offset is None:
            return 0 if offset is None and self.offsets is None and len(self.writers) else None
        offsets, wanted = self.offsets, list(offset)
        if len(wanted) != offsets.shape[1]:
            return None
        if hint is not None and 0 <= hint < len(offsets) and offsets[hint].tolist() == wanted:
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
        return int(order[high - 1])


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
    def file_counts(self) -> Ints:
        """By writer, the number of its files."""
        return np.array([len(naming) for naming in self.namings], np.int64)[self.naming_of]

    @cached_property
    def first_files(self) -> Ints:
        """By writer, the position of its first file among all files."""
        return np.cumsum(self.file_counts) - self.file_counts


@dataclass(slots=True)
class LookedUp:
    """What was read of an index, in the form in which single rows are looked up.

    Attributes:
        rows: By template.
        sources: By number of places and offset.
        all_sources: By number of places, the offset and the source of each chunk.
    """

    rows: dict[int, _Rows] = field(default_factory=dict)
    sources: dict[tuple[int, Offset], _Source] = field(default_factory=dict)
    all_sources: dict[int, list[tuple[Offset, _Source]]] = field(default_factory=dict)


@dataclass
class RowIndex:
    """The rows of a checkpoint.

    Attributes:
        fqns: Keys, those of the state dict first.
        transforms: Each list of transforms once; None for none.
        writers: The ranks, or files, that rows are from.
        templates: By number.
        places: By number.
        pairs: ``(2, pairs)``: number of a key and of places, by key.
        entries: Of the state dict whose lists of chunks the places refer to.
        looked_up: A memo of the rest.
    """

    fqns: Sequence[str]
    transforms: Sequence[Transforms]
    writers: Writers
    templates: Sequence[np.ndarray]
    places: Sequence[Places]
    pairs: Ints
    entries: Entries | None = None
    looked_up: LookedUp = field(default_factory=LookedUp)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By key, its number."""
        return dict(zip(self.fqns, range(len(self.fqns)), strict=True))

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = np.searchsorted(self.pairs[0], np.arange(len(self.fqns) + 1)).tolist()
        return bounds

    @cached_property
    def _numbers_by_key(self) -> list[int]:
        numbers: list[int] = self.pairs[1].tolist()
        return numbers

    def __len__(self) -> int:
        counts = np.array([len(places.writers) for places in self.places], np.int64)
        return int(counts[self.pairs[1]].sum())

    def numbers_of(self, fqn: str) -> list[int]:
        """Return the numbers of the places of a key; none where there is no such key."""
        key = self.numbers.get(fqn)
        if key is None:
            return []
        return self._numbers_by_key[self._bounds[key] : self._bounds[key + 1]]

    def places_of(self, fqn: str) -> list[tuple[int, Places]]:
        """Return number and places of the places of a key."""
        return [(number, self.places[number]) for number in self.numbers_of(fqn)]

    def row(self, fqn: str, offset: Offset, hint: int | None) -> Row | None:
        """Return the row of a chunk; None where there is none.

        Args:
            fqn: Of its key.
            offset: Of the chunk; None of an object.
            hint: Its likely position in the list of chunks.
        """
        known = self.looked_up.sources
        for number in self.numbers_of(fqn):
            source = known.get((number, offset))
            if source is None:
                places = self.places[number]
                at = places.find(offset, hint)
                if at is None:
                    continue
                source = known[number, offset] = self._source(places, at)
            return _row(source, self.numbers[fqn])
        return None

    def rows_of(self, fqn: str) -> list[tuple[Offset, Row]]:
        """Return offset and row of each chunk of a key."""
        found = []
        for number in self.numbers_of(fqn):
            sources = self.looked_up.all_sources.get(number)
            if sources is None:
                places = self.places[number]
                of_places = [self._source(places, at) for at in range(len(places.writers))]
                sources = list(zip(places.all_offsets(), of_places, strict=True))
                self.looked_up.all_sources[number] = sources
            key = self.numbers[fqn]
            found += [(offset, _row(source, key)) for offset, source in sources]
        return found

    def _source(self, places: Places, at: int) -> _Source:
        writer = int(places.writers[at])
        rows = self._rows(int(self.writers.templates[writer]))
        return self.writers.files_of(writer), rows, int(places.ordinals[at])

    def check(self) -> None:
        """Check that each chunk is among what its writer wrote.

        Raises:
            IndexDamage: One is not.
        """
        for number, keys in self.classes():
            places = self.places[number]
            kinds, kind_of = self._kinds(places)
            counts = np.full(len(kinds), np.iinfo(np.int64).max)
            np.minimum.at(counts, kind_of, self.writers.file_counts[places.writers])
            for (template, ordinal), count in zip(kinds, counts.tolist(), strict=True):
                if int(self._template_rows(template, ordinal, keys)[:, 0].max()) >= count:
                    raise IndexDamage(_UNWRITTEN)

    def files(self) -> list[tuple[str, ...]]:
        """Return by key the files that hold any of its chunks, sorted."""
        names = list(self.writers.files())
        files: list[tuple[str, ...]] = [()] * len(self.fqns)
        for number, keys in self.classes():
            places = self.places[number]
            kinds, kind_of = self._kinds(places)
            if not kinds:
                continue
            by_kind = np.stack([self._template_rows(t, o, keys)[:, 0] for t, o in kinds], axis=1)
            first_files = self.writers.first_files[places.writers]
            # Most keys of one class are in the same files of their writers.
            known: dict[bytes, tuple[str, ...]] = {}
            for key, numbers in zip(keys.tolist(), by_kind, strict=True):
                content = numbers.tobytes()
                if content not in known:
                    positions = set((first_files + numbers[kind_of]).tolist())
                    known[content] = tuple(sorted([names[at] for at in positions]))
                held = known[content]
                files[key] = tuple(sorted({*files[key], *held})) if files[key] else held
        return files

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

    def pieces(self, number: int, keys: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield the rows of keys with the same places, in pieces.

        Args:
            number: Of the places.
            keys: Their numbers.

        Yields:
            The numbers of some keys; and, for each of them and each chunk, ``(keys, chunks, 4)``:
            position among all files, transforms, start, length.
        """
        places = self.places[number]
        chunks = len(places.writers)
        if not chunks:
            return
        kinds, kind_of = self._kinds(places)
        first_files = self.writers.first_files[places.writers]
        step = max(_PIECE_ROWS // chunks, 1)
        for start in range(0, len(keys), step):
            some = keys[start : start + step]
            by_kind = np.stack([self._template_rows(t, o, some) for t, o in kinds])
            rows = by_kind[kind_of].swapaxes(0, 1)
            rows[..., 0] += first_files
            yield some, rows

    def _kinds(self, places: Places) -> tuple[list[tuple[int, int]], Ints]:
        """Return each template and ordinal of the chunks of places once, and by chunk which."""
        factor = int(places.ordinals.max(initial=0)) + 1
        codes = self.writers.templates[places.writers] * factor + places.ordinals
        kinds, kind_of = np.unique(codes, return_inverse=True)
        return [divmod(code, factor) for code in kinds.tolist()], kind_of.reshape(-1)

    def _template_rows(self, template: int, ordinal: int, keys: Ints) -> Ints:
        held = self.templates[template].view(np.int64).reshape(-1, len(TEMPLATE.names or ()))
        if not len(held):
            raise IndexDamage(_UNWRITTEN)
        # Keys are in order, and most have one row.
        at = held[:, 0].searchsorted(keys) + ordinal
        rows = held[np.minimum(at, len(held) - 1)]
        if not ((rows[:, 0] == keys) & (rows[:, 1] == ordinal)).all():
            raise IndexDamage(_UNWRITTEN)
        return rows[:, 2:]


def _name(parts: tuple[str, str | None], number: int) -> str:
    before, behind = parts
    return before if behind is None else f"{before}{number}{behind}"


def _row(source: _Source, key: int) -> Row:
    files, rows, ordinal = source
    file, transforms, start, length = rows[key, ordinal]
    return files[file], transforms, start, length
