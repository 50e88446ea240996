"""The rows of a checkpoint as what determines them: who wrote which chunks, and in which order.

Thousands of ranks write their files alike, but for the names of the files, the offsets of the
chunks, and the keys that one rank alone has. So four things are kept, each once:

- a *template*: the records of a writer in its own order. Writers that wrote alike share one.
- *places*: for each chunk of a key its writer, and its slot among the offsets of that writer. Keys
  that are cut and assigned alike have the same places. A chunk has several places where ranks wrote
  copies; a reader takes that of its own rank's file, and otherwise the first, as torch does.
- keys *apart*, which have one chunk in all.
- per writer its template, and the names of its files.

Two ranks of ``ep`` with half of ``experts`` and a key of its own each, ``rng.0`` and ``rng.1``::

    template 0:  experts, slot 0, file 0, from byte 0, 64 bytes
    places 0:    chunk (0, 0): writer 0, slot 0; chunk (2, 0): writer 1, slot 0
    apart:       rng.0: __0_0.distcp, from byte 0, 900 bytes; rng.1: __1_0.distcp, ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from torch.distributed.checkpoint import ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import Fault, PlacementError, format_faults, format_names
from dcp_placements.layout.boxes import Ints, unique
from dcp_placements.storage.columns import IndexDamage, check_below
from dcp_placements.storage.save_ids import writer_of
from dcp_placements.storage.torch_metadata import Entries
from dcp_placements.storage.written import (
    Offset,
    Own,
    Rows,
    StoredPlace,
    Transforms,
    Written,
    origin,
    place_of,
    template_of,
)

APART, NOWHERE = -1, -2
"""In place of a number of places: of a key apart, and of one without rows."""

LARGEST = 1 << 62

_PIECE_ROWS = 1 << 16

Row = tuple[str, int, int, int]
"""Name of the file, transforms, start and length."""


class Places(NamedTuple):
    """Where the chunks of some keys are.

    Attributes:
        listed: The number of the list of chunks that has their offsets, in order; -1 for none.
        own: Their offsets, where no list has them.
        chunks: By place, the number of its chunk, ascending. Every chunk has a place.
        writers: By place, the number of its writer, ascending for a chunk.
        slots: By place, the number of its offset among those of the writer.
    """

    listed: int
    own: Sequence[Offset]
    chunks: Ints
    writers: Ints
    slots: Ints


@dataclass(eq=False)
class RowIndex:
    """The rows of a checkpoint.

    Attributes:
        entries: Of the state dict, to whose lists of chunks places refer.
        fqns: Keys, those of the state dict first.
        transforms: Each list of transforms once; None for none.
        files: Names of the files of all writers, one writer after another.
        file_counts: By writer, the number of its files.
        template_of: By writer, the number of its template.
        rows: ``(7, rows)``, template by template: its number, key, slot, number of the file among
            those of the writer, transforms, start, length.
        apart: ``(6, keys)``: key, position of the file in ``files``, transforms, start, length, and
            dims; -1 of objects. Of two for one key the later one counts.
        place_of: By key, the number of its places; ``APART``, or ``NOWHERE``.
        places: By number.
    """

    entries: Entries
    fqns: Sequence[str]
    transforms: Sequence[Transforms]
    files: Sequence[str]
    file_counts: Ints
    template_of: Ints
    rows: Ints
    apart: Ints
    place_of: Ints
    places: Sequence[Places]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By key, its number."""
        return dict(zip(self.fqns, range(len(self.fqns)), strict=True))

    @cached_property
    def first_files(self) -> Ints:
        """By writer, the position of its first file in ``files``."""
        return np.cumsum(self.file_counts) - self.file_counts

    @cached_property
    def _apart_of(self) -> Ints:
        """By key, where it is in ``apart``; -1 where it is not."""
        found = np.full(len(self.fqns), -1)
        found[self.apart[0]] = np.arange(self.apart.shape[1])
        return found

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        """The codes of ``rows``, sorted, and their order."""
        codes = self._codes(*self.rows[:3])
        order = np.argsort(codes, kind="stable")
        return codes[order], order

    @cached_property
    def _slots(self) -> int:
        return int(self.rows[2].max(initial=0)) + 1

    def _codes(self, template: Ints, key: Ints | int, slot: Ints) -> Ints:
        return (template * len(self.fqns) + key) * self._slots + slot

    @cached_property
    def has_copies(self) -> bool:
        """Whether any chunk has several places."""
        return any(len(one.chunks) > int(one.chunks[-1]) + 1 for one in self.places)

    @cached_property
    def _rank_of(self) -> Ints:
        """By writer, the rank whose number its first file has; -1 where there is none."""
        has_files = self.file_counts > 0
        ranks = [writer_of(self.files[at]) for at in self.first_files[has_files].tolist()]
        found = np.full(len(has_files), -1)
        found[has_files] = [-1 if rank is None else rank for rank in ranks]
        return found

    @cached_property
    def _positions(self) -> dict[int, dict[Offset, int]]:
        return {}

    def __len__(self) -> int:
        counts = [int(one.chunks[-1]) + 1 for one in self.places]
        # NOWHERE and APART count from the end.
        return int(np.array([*counts, 0, 1], np.int64)[self.place_of].sum())

    def offsets(self, number: int) -> Sequence[Offset]:
        """Return the offsets of all chunks of places, in order."""
        one = self.places[number]
        if one.listed < 0:
            return one.own
        return list(map(tuple, self.entries.lists[one.listed].offsets.tolist()))

    def offsets_of(self, fqn: str) -> Sequence[Offset]:
        """Return the offsets of all chunks of a key, in order."""
        key = self.numbers.get(fqn, -1)
        number = int(self.place_of[key]) if key >= 0 else NOWHERE
        if number == APART:
            return [origin(int(self.apart[5, self._apart_of[key]]))]
        return () if number == NOWHERE else self.offsets(number)

    def find(self, indices: Sequence[MetadataIndex], rank: int | None = None) -> Ints:
        """Return where chunks are.

        Args:
            indices: Of the chunks; their positions in lists of chunks are tried first.
            rank: Of several places of a chunk that in a file of this rank counts, and otherwise the
                first.

        Returns:
            ``(4, chunks)``: position among all files, transforms, start, length; -1 where there is
            none.
        """
        keys = np.array([self.numbers.get(one.fqn, -1) for one in indices], np.int64)
        numbers = np.append(self.place_of, NOWHERE)[keys]
        found = np.full((4, len(keys)), -1)
        for number in np.unique(numbers[numbers != NOWHERE]).tolist():
            at = np.flatnonzero(numbers == number)
            chunks = self._chunks(number, keys[at], [indices[one] for one in at.tolist()])
            at, chunks = at[chunks >= 0], chunks[chunks >= 0]
            found[:, at] = self._rows_at(number, keys[at], self._nearest(number, chunks, rank))
        return found

    def rows_of(self, fqn: str, *, copies: bool = False) -> list[tuple[Offset, Row]]:
        """Return offset and row of each chunk of a key; with ``copies`` of each of its places."""
        offsets = self.offsets_of(fqn)
        if not offsets:
            return []
        key = self.numbers[fqn]
        number, chunks = int(self.place_of[key]), np.arange(len(offsets))
        at = self._nearest(number, chunks, None)
        if copies and number != APART:
            chunks = self.places[number].chunks
            at = np.arange(len(chunks))
        rows = self._rows_at(number, np.full_like(at, key), at).T.tolist()
        return [
            (offsets[chunk], (self.files[file], steps, start, length))
            for chunk, (file, steps, start, length) in zip(chunks.tolist(), rows, strict=True)
        ]

    def _nearest(self, number: int, chunks: Ints, rank: int | None) -> Ints:
        """Return which of its places counts of each chunk: of ``rank``, or else the first."""
        if number == APART:
            return chunks
        one = self.places[number]
        at = one.chunks.searchsorted(chunks)
        if rank is None or not self.has_copies:
            return at
        own = np.flatnonzero(self._rank_of[one.writers] == rank)
        of_chunk = np.full(int(one.chunks[-1]) + 1, -1)
        of_chunk[one.chunks[own]] = own
        return np.where(of_chunk[chunks] >= 0, of_chunk[chunks], at)

    def _chunks(self, number: int, keys: Ints, indices: Sequence[MetadataIndex]) -> Ints:
        """Return which chunk of keys of one class each index means; -1 for none."""
        if number == APART:
            dims = self.apart[5, self._apart_of[keys]].tolist()
            pairs = zip(indices, dims, strict=True)
            return np.array([-(one.offset != origin(ndim)) for one, ndim in pairs], np.int64)
        listed = self.places[number].listed
        offsets = self.entries.lists[listed].offsets if listed >= 0 else np.zeros((0, 0), np.int64)
        chunks = []
        for one in indices:
            chunk = -1 if one.index is None or one.index >= len(offsets) else one.index
            if chunk < 0 or one.offset != tuple(offsets[chunk].tolist()):
                if number not in self._positions:
                    held = {offset: at for at, offset in enumerate(self.offsets(number))}
                    self._positions[number] = held
                chunk = self._positions[number].get(one.offset, -1)
            chunks.append(chunk)
        return np.array(chunks, np.int64)

    def _rows_at(self, number: int, keys: Ints, at: Ints) -> Ints:
        """Return rows of keys of one class, at one of its places each, as ``find`` does."""
        if number == APART:
            return self.apart[1:5, self._apart_of[keys]]
        one, (codes, order) = self.places[number], self._order
        writers = one.writers[at]
        wanted = self._codes(self.template_of[writers], keys, one.slots[at])
        rows = self.rows[3:, order[codes.searchsorted(wanted)]]
        rows[0] += self.first_files[writers]
        return rows

    def all_rows(self) -> Iterator[StoredPlace]:
        """Yield every row, those of copies, too."""
        for fqn in self.fqns:
            for offset, (file, steps, start, length) in self.rows_of(fqn, copies=True):
                yield StoredPlace(fqn, offset, file, start, length, self.transforms[steps])

    def classes(self) -> Iterator[tuple[int, Ints]]:
        """Yield ``(number of places or APART, numbers of their keys)``."""
        order = np.argsort(self.place_of, kind="stable")
        numbers = self.place_of[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=NOWHERE))
        for start, stop in zip(starts, [*starts, len(numbers)][1:], strict=True):
            yield int(numbers[start]), order[start:stop]

    def pieces(self, number: int, keys: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield the rows of keys of one class, in pieces.

        Args:
            number: Of the class.
            keys: Their numbers.

        Yields:
            The numbers of some keys; and, for each of them and each chunk, ``(keys, chunks, 4)``:
            position among all files, transforms, start, length.
        """
        if number == APART:
            yield keys, self.apart[1:5, self._apart_of[keys]].T[:, None]
            return
        every = self.places[number]
        one = _chosen(every, np.diff(every.chunks, prepend=-1) != 0)
        kinds, kind_of = self._kinds(one)
        step = max(_PIECE_ROWS // max(len(kind_of), 1), 1)
        for start in range(0, len(keys), step):
            some = keys[start : start + step]
            rows = self._rows_by_kind(kinds, some)[kind_of].swapaxes(0, 1)
            rows[..., 0] += self.first_files[one.writers]
            yield some, rows

    def files_by_key(self) -> list[tuple[str, ...]]:
        """Return by key the files that hold any of its chunks, sorted."""
        found: list[tuple[str, ...]] = [()] * len(self.fqns)
        for number, keys in self.classes():
            if number == APART:
                positions = self.apart[1, self._apart_of[keys]].tolist()
                for key, position in zip(keys.tolist(), positions, strict=True):
                    found[key] = (self.files[position],)
                continue
            one = self.places[number]
            kinds, kind_of = self._kinds(one)
            of_kinds = self._rows_by_kind(kinds, keys)[:, :, 0].T
            # Most keys of one class are in the same files of their writers.
            known: dict[bytes, tuple[str, ...]] = {}
            for key, numbers in zip(keys.tolist(), of_kinds, strict=True):
                content = numbers.tobytes()
                if content not in known:
                    at = set((self.first_files[one.writers] + numbers[kind_of]).tolist())
                    known[content] = tuple(sorted({self.files[position] for position in at}))
                found[key] = known[content]
        return found

    def _kinds(self, one: Places) -> tuple[Ints, Ints]:
        """Return template and slot of chunks, each pair once, and by chunk which."""
        pairs = np.stack([self.template_of[one.writers], one.slots], axis=1)
        first, kind_of = unique(pairs)
        return pairs[first], kind_of

    def _rows_by_kind(self, kinds: Ints, keys: Ints) -> Ints:
        """Return the rows of keys by template and slot: ``(kinds, keys, 4)``."""
        codes, order = self._order
        if len(kinds) * len(keys) > len(codes):
            raise IndexDamage("more chunks than its writers wrote")
        wanted = self._codes(kinds[:, :1], keys, kinds[:, 1:])
        at = codes.searchsorted(wanted)
        if wanted.size and (at.max() == len(codes) or (codes[at] != wanted).any()):
            raise IndexDamage("a chunk is not among what its writer wrote")
        return np.moveaxis(self.rows[3:][:, order[at]], 0, 2)

    def check(self) -> None:
        """Check that every number refers to what is there, before anything is looked up.

        Raises:
            IndexDamage: One does not.
        """
        keys, writers = len(self.fqns), len(self.template_of)
        check_below(self.file_counts, LARGEST)
        if len(self.file_counts) != writers or sum(self.file_counts.tolist()) != len(self.files):
            raise IndexDamage("other files than its writers have")
        check_below(self.template_of, writers)
        counts = np.full(writers, LARGEST)
        np.minimum.at(counts, self.template_of, self.file_counts)
        if writers * keys * self._slots >= LARGEST:
            raise IndexDamage("more writers, keys and slots than there can be")
        steps, most = len(self.transforms), LARGEST
        for column, below in zip(
            self.rows, (writers, keys, most, most, steps, most, most), strict=True
        ):
            check_below(column, below)
        if (self.rows[3] >= counts[self.rows[0]]).any():
            raise IndexDamage("a file that its writer does not have")
        for column, below in zip(
            self.apart, (keys, len(self.files), steps, most, most), strict=False
        ):
            check_below(column, below)
        check_below(self.apart[5], 65, -1)
        check_below(self.place_of, len(self.places), NOWHERE)
        if ((self.place_of == APART) != (self._apart_of >= 0)).any():
            raise IndexDamage("a key apart that is not there")
        for one in self.places:
            check_below(one.writers, writers)
            check_below(one.slots, self._slots)
            check_below(one.chunks, LARGEST)
            ordered = np.diff(one.chunks * writers + one.writers) > 0
            if not ordered.all() or (np.diff(one.chunks, prepend=-1) > 1).any():
                raise IndexDamage("places in another order than that of their chunks")
        for number, some in self.classes():
            if number != APART:
                self._rows_by_kind(self._kinds(self.places[number])[0], some)


def _chosen(one: Places, chosen: Ints) -> Places:
    return Places(one.listed, one.own, one.chunks[chosen], one.writers[chosen], one.slots[chosen])


def index_of_rows(rows: Rows, entries: Entries, *, copies: bool = False) -> RowIndex:
    """Return the index of rows of any origin, as if each file had a writer of its own."""
    counts = np.bincount(rows.table[0], minlength=len(rows.fqns)).tolist()
    whole = {fqn for fqn, count in zip(rows.fqns, counts, strict=True) if count == 1}
    parts = rows.by_file(copies=copies)
    return build_index([Written.of(part, whole) for part in parts], entries, copies=copies)


def build_index(written: Sequence[Written], entries: Entries, *, copies: bool = False) -> RowIndex:
    """Return the index of what writers wrote.

    Args:
        written: By writer, in order.
        entries: Of the state dict: their keys come first in the index, and places are in the order
            of their chunks.
        copies: Whether rows of several writers for one chunk are copies, which all count; otherwise
            the later one counts.
    """
    owns = [one.own for one in written]
    groups: dict[bytes, list[int]] = {}
    for writer, one in enumerate(written):
        groups.setdefault(one.template, []).append(writer)
    templates = list(map(template_of, groups))
    numbers = {fqn: number for number, fqn in enumerate(entries.fqns)}
    transforms: dict[Transforms, int] = {}
    tables = [np.zeros((7, 0), np.int64)]
    for number, template in enumerate(templates):
        keys = [numbers.setdefault(fqn, len(numbers)) for fqn in template.fqns]
        steps = [transforms.setdefault(one, len(transforms)) for one in template.transforms]
        key, slot, file, step, start, length = template.table
        key, step = np.array(keys, np.int64)[key], np.array(steps, np.int64)[step]
        tables.append(np.stack([np.full_like(key, number), key, slot, file, step, start, length]))
    rows = np.concatenate(tables, axis=1)
    apart = _apart(owns, numbers, transforms)
    conflicts = _conflicts(rows[1], apart)
    if len(conflicts):
        fqns = list(numbers)
        mixed = {fqns[key] for key in conflicts.tolist()}
        return build_index(
            [one if mixed.isdisjoint(one.own.fqns) else _without(one, mixed) for one in written],
            entries,
            copies=copies,
        )
    template_of_writer = np.zeros(len(written), np.int64)
    offsets: list[list[Ints]] = []
    for number, (writers, template) in enumerate(zip(groups.values(), templates, strict=True)):
        template_of_writer[writers] = number
        joined = np.stack([owns[writer].offsets for writer in writers])
        slots = np.cumsum([max(ndim, 0) for ndim in template.dims])[:-1]
        offsets.append(np.split(joined, slots, axis=1))
    of_slot = _Slots(list(groups.values()), [template.dims for template in templates], offsets)
    place_of, places = _all_places(rows, of_slot, entries, len(numbers))
    if not copies:
        # Of two rows for the same chunk the later one counts.
        places = [_chosen(one, np.diff(one.chunks, append=-1) != 0) for one in places]
    place_of[apart[0]] = APART
    return RowIndex(
        entries,
        tuple(numbers),
        tuple(transforms),
        list(chain.from_iterable(own.paths for own in owns)),
        np.array([len(own.paths) for own in owns], np.int64),
        template_of_writer,
        rows,
        apart,
        place_of,
        places,
    )


def _apart(owns: Sequence[Own], numbers: dict[str, int], transforms: dict[Transforms, int]) -> Ints:
    """Return the keys apart of all writers, and number them."""
    counts = [len(own.fqns) for own in owns]
    apart = np.zeros((6, sum(counts)), np.int64)
    apart[0] = [numbers.setdefault(fqn, len(numbers)) for own in owns for fqn in own.fqns]
    if not apart.size:
        return apart
    apart[1:] = np.concatenate([own.apart for own in owns], axis=1)
    files = np.array([len(own.paths) for own in owns], np.int64)
    apart[1] += np.repeat(np.cumsum(files) - files, counts)
    at = 0
    known: dict[tuple[Transforms, ...], Ints] = {}
    for own, count in zip(owns, counts, strict=True):
        if own.transforms not in known:
            steps = [transforms.setdefault(step, len(transforms)) for step in own.transforms]
            known[own.transforms] = np.array(steps, np.int64)
        apart[2, at : at + count] = known[own.transforms][apart[2, at : at + count]]
        at += count
    return apart


def _conflicts(keys: Ints, apart: Ints) -> Ints:
    """Return the keys that are apart by some writers, and by others not, or of other dims."""
    of_dims = np.unique(apart[[0, 5]], axis=1)[0]
    return np.union1d(of_dims[1:][of_dims[1:] == of_dims[:-1]], np.intersect1d(keys, apart[0]))


def _without(written: Written, fqns: Collection[str]) -> Written:
    """Return the same rows with these keys in the template."""
    return Written.of(written.rows(), set(written.own.fqns).difference(fqns))


class _Slots(NamedTuple):
    """What is in the slots of templates; everything is by template."""

    writers: Sequence[Sequence[int]]
    dims: Sequence[Sequence[int]]
    offsets: Sequence[Sequence[Ints]]  # by slot: ``(writers, ndim)``


def _all_places(rows: Ints, held: _Slots, entries: Entries, keys: int) -> tuple[Ints, list[Places]]:
    """Return by key the number of its places, and the places."""
    lists = np.full(keys, -1)
    lists[: len(entries.fqns)] = entries.list_numbers()
    template, key, slot = rows[:3, np.lexsort((rows[2], rows[0], rows[1]))]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    table = np.stack([lists[key], template, slot], axis=1)
    content, nbytes = table.tobytes(), table.itemsize * 3
    bounds = pairwise([*(nbytes * starts).tolist(), len(content)])
    # Keys that are in one list of chunks, and in the same slots of the same templates.
    kinds: dict[bytes, int] = {}
    place_of = np.full(keys, NOWHERE)
    place_of[key[starts]] = [
        kinds.setdefault(content[start:stop], len(kinds)) for start, stop in bounds
    ]
    tables = [np.frombuffer(kind, np.int64).reshape(-1, 3) for kind in kinds]
    return place_of, [_places(one[:, 1:].tolist(), int(one[0, 0]), held, entries) for one in tables]


def _places(kinds: Sequence[Sequence[int]], listed: int, held: _Slots, entries: Entries) -> Places:
    """Return the places of keys that are in these slots of these templates.

    Args:
        kinds: Template and slot.
        listed: The number of the list of chunks of the keys; -1 for none.
        held: By all writers.
        entries: That have the list.
    """
    parts = [held.offsets[template][slot] for template, slot in kinds]
    dims = [held.dims[template][slot] for template, slot in kinds]
    writers = np.concatenate([held.writers[template] for template, _ in kinds])
    slots = np.repeat([slot for _, slot in kinds], list(map(len, parts)))
    wanted = entries.lists[listed].offsets if listed >= 0 else None
    chunks = None
    own: Sequence[Offset] = ()
    if wanted is not None and set(dims) == {wanted.shape[1]}:
        chunks = _positions(np.concatenate(parts), wanted)
    if chunks is None:
        offsets: list[Offset] = []
        for ndim, part in zip(dims, parts, strict=True):
            offsets += [None] * len(part) if ndim < 0 else map(tuple, part.tolist())
        numbers = {offset: number for number, offset in enumerate(dict.fromkeys(offsets))}
        chunks = np.array([numbers[offset] for offset in offsets], np.int64)
        listed, own = -1, list(numbers)
    order = np.lexsort((slots, writers, chunks))
    every = Places(listed, own, chunks[order], writers[order], slots[order])
    # A writer has one row for a chunk, of whatever slot: the later one counts.
    last = np.diff(every.chunks, append=-1) != 0
    return _chosen(every, last | (np.diff(every.writers, append=-1) != 0))


def _positions(rows: Ints, wanted: Ints) -> Ints | None:
    """Return where each row is in ``wanted``; None if these are not the same rows."""
    if np.array_equal(rows, wanted):
        return np.arange(len(rows))
    first, number = unique(np.concatenate([wanted, rows]))
    at = first[number[len(wanted) :]]
    # Empty chunks may stand at the offset of another.
    is_same = len(first) == len(wanted) == len(np.unique(at))
    return at if is_same else None


class StorageTable(Mapping[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data``: a read-only mapping as torch's dict, and pickled as that.

    Args:
        index: Of its rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self.index = index

    def beginning(self, prefix: str) -> list[tuple[MetadataIndex, StorageInfo]]:
        """Return the items whose keys begin with ``prefix``, without a search of other rows."""
        fqns = [fqn for fqn in self.index.fqns if fqn.startswith(prefix)]
        return [(index, self[index]) for fqn in fqns for index in self._indices(fqn)]

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        ((file, number, start, length),) = self.index.find([index]).T.tolist()
        if file < 0:
            raise KeyError(index)
        steps = self.index.transforms[number]
        own = None if steps is None else list(steps)
        return StorageInfo(self.index.files[file], start, length, own)

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn in self.index.fqns:
            yield from self._indices(fqn)

    def __repr__(self) -> str:
        return f"StorageTable({len(self)} entries)"

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _indices(self, fqn: str) -> Iterator[MetadataIndex]:
        for position, offset in enumerate(self.index.offsets_of(fqn)):
            yield MetadataIndex(fqn, offset, position)


def index_for(data: Mapping[MetadataIndex, StorageInfo], entries: Entries) -> RowIndex:
    """Return the index of ``storage_data`` that has the keys and the chunks of a state dict."""
    if isinstance(data, StorageTable):
        if data.index.entries is entries:
            return data.index
        rows = Rows.of(data.index.all_rows())
        return index_of_rows(rows, entries, copies=data.index.has_copies)
    rows = Rows.of(place_of(index.fqn, index.offset, info) for index, info in data.items())
    return index_of_rows(rows, entries)


def paths_of(data: Mapping[MetadataIndex, StorageInfo]) -> set[str]:
    """Return the files that ``storage_data`` names."""
    if isinstance(data, StorageTable):
        return set(data.index.files)
    return {info.relative_path for info in data.values()}


DAMAGED_METADATA = (
    "likely:      .metadata was damaged, or another tool wrote it",
    "way out:     copy .metadata again, or load another checkpoint",
)


def with_copies(
    fault: Fault, places: Mapping[MetadataIndex, StorageInfo], item: ReadItem, file: str
) -> Fault:
    """Return a fault of the chunk of an item in a file, with where other copies of it are."""
    if not isinstance(places, StorageTable) or not places.index.has_copies:
        return fault
    fqn, offset = item.storage_index.fqn, item.storage_index.offset
    rows = places.index.rows_of(fqn, copies=True)
    wanted = None if offset is None else tuple(offset)
    others = [f"byte {row[2]} of {row[0]}" for at, row in rows if at == wanted and row[0] != file]
    if not others:
        return fault
    return replace(fault, place=(*fault.place, f"a copy:      {format_names(others, 2)}"))


Place = tuple[str, int, int, Sequence[str] | None]
"""Name of the file, start, length, and the names of transforms."""


def places_of(
    items: Iterable[ReadItem],
    places: Mapping[MetadataIndex, StorageInfo],
    rank: int | None = None,
) -> list[Place]:
    """Return the places of the chunks and objects that items are read from.

    Args:
        items: The items.
        places: A checkpoint's ``storage_data``.
        rank: Whose copies count, as in ``RowIndex.find``.

    Raises:
        PlacementError: There is none of some; all of them in one error.
    """
    indices = [item.storage_index for item in items]
    found: list[Place | None]
    if isinstance(places, StorageTable):
        files, steps = places.index.files, places.index.transforms
        found = [
            None if file < 0 else (files[file], start, length, steps[number])
            for file, number, start, length in places.index.find(indices, rank).T.tolist()
        ]
    else:
        rows = [(index, places.get(index)) for index in indices]
        found = [None if one is None else place_of(at.fqn, at.offset, one)[2:] for at, one in rows]
    faults = [
        Fault(
            index.fqn,
            "the metadata name no file for "
            + ("it" if index.offset is None else f"the chunk at {tuple(index.offset)}"),
            DAMAGED_METADATA,
        )
        for index, place in zip(indices, found, strict=True)
        if place is None
    ]
    if faults:
        raise PlacementError(format_faults("the checkpoint is not whole", faults))
    return cast(list[Place], found)
