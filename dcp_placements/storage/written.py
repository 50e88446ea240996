"""What one rank wrote: the places of its chunks, as it sends them, and as torch's results.

A row is the place of one chunk in a file. Ranks write their files alike, but for the offsets of the
chunks, the names of the files, and the keys of which one rank has all: random states, positions in
the data. So a rank sends its *template*, which many ranks have in common, apart from its own.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements._torch import StorageInfo
from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.packing import (
    packed_columns,
    packed_texts,
    unpacked_columns,
    unpacked_texts,
)

Offset = tuple[int, ...] | None
Transforms = tuple[str, ...] | None

_PROTOCOL = pickle.HIGHEST_PROTOCOL


class StoredPlace(NamedTuple):
    """Key and offset of a stored chunk, and where it is."""

    fqn: str
    offset: Offset
    path: str
    start: int
    length: int
    transforms: Transforms = None


class Rows(NamedTuple):
    """Rows in columns.

    Attributes:
        fqns: Keys, each once.
        offsets: Of chunks, each once; None of objects.
        paths: Files, relative to the checkpoint, each once.
        transforms: The transforms that wrote the bytes, each list once; None for none.
        table: ``(6, rows)``: positions in these four, then start and length.
    """

    fqns: Sequence[str]
    offsets: Sequence[Offset]
    paths: Sequence[str]
    transforms: Sequence[Transforms]
    table: Ints

    @staticmethod
    def of(places: Iterable[StoredPlace]) -> Rows:
        """Return the rows of stored chunks."""
        fqns: dict[str, int] = {}
        offsets: dict[Offset, int] = {}
        paths: dict[str, int] = {}
        every: dict[Transforms, int] = {}
        table = [
            (
                fqns.setdefault(fqn, len(fqns)),
                offsets.setdefault(offset, len(offsets)),
                paths.setdefault(path, len(paths)),
                every.setdefault(steps, len(every)),
                start,
                length,
            )
            for fqn, offset, path, start, length, steps in places
        ]
        rows = np.array(table, np.int64).reshape(-1, 6).T
        return Rows(tuple(fqns), tuple(offsets), tuple(paths), tuple(every), rows)

    def places(self) -> Iterator[StoredPlace]:
        """Yield them one by one."""
        for fqn, offset, path, steps, start, length in self.table.T.tolist():
            names = self.fqns[fqn], self.offsets[offset], self.paths[path]
            yield StoredPlace(*names, start, length, self.transforms[steps])

    def by_file(self) -> Iterator[Rows]:
        """Yield the rows of each file; of two rows for one chunk the later one counts."""
        table = self.table[:, _last_of(self)]
        order = np.argsort(table[2], kind="stable")
        starts = np.flatnonzero(np.diff(table[2][order], prepend=-1))
        for some in np.split(order, starts[1:]) if len(starts) else []:
            part = table[:, some]
            path, part[2] = self.paths[int(part[2, 0])], 0
            fqns, part[0] = _in_order(self.fqns, part[0])
            offsets, part[1] = _in_order(self.offsets, part[1])
            yield Rows(fqns, offsets, (path,), self.transforms, part)


def place_of(fqn: str, offset: Sequence[int] | None, info: Any) -> StoredPlace:
    """Return the place of a chunk by torch's ``_StorageInfo``."""
    # Checkpoints of older torch versions have no such field.
    steps = getattr(info, "transform_descriptors", None)
    return StoredPlace(
        fqn,
        None if offset is None else tuple(offset),
        info.relative_path,
        info.offset,
        info.length,
        None if steps is None else tuple(steps),
    )


class Written(NamedTuple):
    """What one rank sends: its template, which other ranks have, too; and what is its own.

    A rank that wrote 64 bytes of ``experts`` at (2, 0), and behind them an object ``rng.1``::

        template:  experts, slot 0 of offsets of 2 dims, file 0, no transforms, 64 bytes
        own:       offset 0 is (2, 0); file 0 is __1_0.distcp; rng.1 is at byte 64 of file 0

    Starts in a template are those without the keys apart. These are the keys of one chunk in all.
    """

    template: bytes
    own: bytes

    @staticmethod
    def of(rows: Rows, whole: Collection[str]) -> Written:
        """Return what a rank sends.

        Args:
            rows: In the order in which they were written; the later one of a chunk counts.
            whole: Keys of which all is in one row. They are taken apart, but where records lie one
                over the other.
        """
        table = rows.table[:, _last_of(rows)]
        is_start = np.array([not any(offset or ()) for offset in rows.offsets], bool)
        is_whole = np.array([fqn in whole for fqn in rows.fqns], bool)
        is_whole &= np.bincount(table[0], minlength=len(rows.fqns)) == 1
        is_apart = is_whole[table[0]] & is_start[table[1]]
        apart, rest = table[:, is_apart], table[:, ~is_apart]
        gaps = Gaps(apart[2], apart[4], apart[5])
        squeezed = gaps.squeezed(rest[2], rest[4])
        is_same = np.array_equal(gaps.starts(rest[2], squeezed), rest[4])
        if not (is_same and gaps.are_apart and (squeezed >= 0).all()):
            return Written.of(rows, ())
        rest[4] = squeezed
        fqns, rest[0] = _in_order(rows.fqns, rest[0])
        offsets, rest[1] = _in_order(rows.offsets, rest[1])
        rest[4] = from_ends(rest[4], rest[5])
        forms, columns = packed_texts(fqns)
        packed = packed_columns([[dims_of(offset) for offset in offsets], *columns, *rest])
        template = pickle.dumps((forms, rows.transforms, packed.tobytes()), _PROTOCOL)
        own = Own(
            np.array([number for offset in offsets for number in offset or ()], np.int64),
            tuple(rows.paths),
            tuple(rows.transforms),
            tuple([rows.fqns[key] for key in apart[0].tolist()]),
            [dims_of(rows.offsets[at]) for at in apart[1].tolist()],
            apart[2:],
        )
        return Written(zlib.compress(template, 6), own.packed())

    def rows(self) -> Rows:
        """Return the rows: those of the template, then those of the keys apart."""
        template, own = template_of(self.template), Own.unpacked(self.own)
        listed = iter(own.offsets.tolist())
        numbers: dict[Offset, int] = {}
        slots = []
        for ndim in template.dims:
            offset = None if ndim < 0 else tuple([next(listed) for _ in range(ndim)])
            slots.append(numbers.setdefault(offset, len(numbers)))
        apart = np.empty((6, len(own.fqns)), np.int64)
        apart[0] = np.arange(len(own.fqns)) + len(template.fqns)
        apart[1] = [numbers.setdefault(origin(n), len(numbers)) for n in own.dims]
        apart[2:] = own.apart
        rest = template.table.copy()
        rest[4] = Gaps(apart[2], apart[4], apart[5]).starts(rest[2], rest[4])
        fqns = *template.fqns, *own.fqns
        table = np.concatenate([rest, apart], axis=1)
        return Rows(fqns, tuple(numbers), own.paths, template.transforms, table)


class Own(NamedTuple):
    """What one rank alone has of ``Written``: offsets, files, and keys apart."""

    offsets: Ints  # of all slots, one after another
    paths: Sequence[str]
    transforms: tuple[Transforms, ...]  # as in ``Rows``
    fqns: Sequence[str]  # of keys apart
    dims: Sequence[int]  # of keys apart: they begin at 0; -1 of objects
    apart: Ints  # ``(4, keys)``: file, transforms, start and length, as in ``Rows``

    def packed(self) -> bytes:
        """Return it as bytes."""
        arrays = self.offsets.tobytes(), self.apart.tobytes()
        return zlib.compress(pickle.dumps((arrays[0], *self[1:5], arrays[1]), _PROTOCOL), 1)

    @staticmethod
    def unpacked(packed: bytes) -> Own:
        """Return it again."""
        offsets, paths, transforms, fqns, dims, apart = pickle.loads(zlib.decompress(packed))
        table = np.frombuffer(apart, np.int64).reshape(4, -1)
        return Own(np.frombuffer(offsets, np.int64), paths, transforms, fqns, dims, table)


class Template(NamedTuple):
    """What ranks have in common of ``Written``."""

    fqns: Sequence[str]
    dims: Sequence[int]  # by slot, of its offset; -1 of objects
    transforms: Sequence[Transforms]
    table: Ints  # ``(6, rows)``, as in ``Rows``: slots in place of offsets, starts without gaps


@lru_cache(maxsize=64)
def template_of(packed: bytes) -> Template:
    """Return a template again."""
    forms, transforms, columns = pickle.loads(zlib.decompress(packed))
    dims, form_of, numbers, *rest = unpacked_columns(np.frombuffer(columns, np.int64))
    table = np.stack(rest)
    table[4] = to_starts(table[4], table[5])
    fqns = unpacked_texts(forms, form_of, numbers)
    return Template(fqns, dims.tolist(), transforms, table)


def from_ends(starts: Ints, lengths: Ints) -> Ints:
    """Return starts counted from the ends of the records before: most are 0."""
    found: Ints = np.diff(starts, prepend=0) - np.concatenate([[0], lengths])[: len(lengths)]
    return found


def to_starts(from_ends: Ints, lengths: Ints) -> Ints:
    """Return the starts again."""
    starts: Ints = np.cumsum(from_ends) + np.cumsum(lengths) - lengths
    return starts


def dims_of(offset: Offset) -> int:
    """Return the number of dims; -1 of an object."""
    return -1 if offset is None else len(offset)


def origin(ndim: int) -> Offset:
    """Return where a whole tensor begins, by its dims; -1 of an object."""
    return None if ndim < 0 else (0,) * ndim


def _last_of(rows: Rows) -> Ints:
    """Return which rows count: of each chunk the last one."""
    codes = rows.table[0] * len(rows.offsets) + rows.table[1]
    _, last = np.unique(codes[::-1], return_index=True)
    return np.sort(len(codes) - 1 - last)


def _in_order(names: Sequence[Any], column: Ints) -> tuple[list[Any], Ints]:
    """Return the names that a column refers to, in its order, and the column."""
    _, first, numbers = np.unique(column, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return [names[at] for at in column[first[order]].tolist()], np.argsort(order)[numbers]


class Gaps:
    """The records of keys apart, between those of templates: what they add to starts.

    Args:
        files: By record, the number of its file; numbers may be of many writers.
        starts: In the file.
        lengths: In bytes.
    """

    def __init__(self, files: Ints, starts: Ints, lengths: Ints) -> None:
        order = np.lexsort((starts, files))
        self._files, self._starts = files[order], starts[order]
        self._sums = np.concatenate([[0], np.cumsum(lengths[order])])
        firsts = self._files.searchsorted(self._files)
        # Where they would begin without those before them.
        self._squeezed = self._starts - (self._sums[:-1] - self._sums[firsts])
        self._codes: dict[str, tuple[Ints, Ints]] = {}

    @property
    def are_apart(self) -> bool:
        """Whether no record lies over another."""
        same_file = np.diff(self._files) == 0
        is_behind = (np.diff(self._squeezed) >= 0) | ~same_file
        return bool(is_behind.all() and (self._squeezed >= 0).all())

    def squeezed(self, files: Ints, starts: Ints) -> Ints:
        """Return starts without the records before them."""
        return starts - self._before("left", files, starts)

    def starts(self, files: Ints, squeezed: Ints) -> Ints:
        """Return starts with the records before them."""
        return squeezed + self._before("right", files, squeezed)

    def _before(self, side: Literal["left", "right"], files: Ints, starts: Ints) -> Ints:
        if not len(self._files):
            return np.zeros_like(starts)
        if side not in self._codes:
            held = self._starts if side == "left" else self._squeezed
            # Positions among the different starts: with the file one number, which fits 64 bits.
            different = np.unique(held)
            codes = self._files * (len(different) + 1) + different.searchsorted(held)
            self._codes[side] = different, codes
        different, codes = self._codes[side]
        wanted = files * (len(different) + 1) + different.searchsorted(starts, side)
        firsts = self._files.searchsorted(files)
        before: Ints = self._sums[codes.searchsorted(wanted)] - self._sums[firsts]
        return before


class RowsBuilder:
    """Takes what is written, file by file; a file by one thread."""

    def __init__(self) -> None:
        self._records: dict[str, list[tuple[Sequence[WriteItem], int]]] = {}

    def append(self, items: Sequence[WriteItem], *, path: str, length: int) -> None:
        """Add records of one length behind those that their file has so far."""
        self._records.setdefault(path, []).append((items, length))

    def written(self, paths: Iterable[str]) -> Written:
        """Return all rows, in the order of these files."""
        whole: set[str] = set()

        def places() -> Iterator[StoredPlace]:
            for path in paths:
                start = 0
                for items, length in self._records.get(path, ()):
                    for item in items:
                        index, data = item.index, item.tensor_data
                        if data is None or data.chunk.sizes == data.size:
                            whole.add(index.fqn)
                        yield StoredPlace(index.fqn, index.offset, path, start, length)
                        start += length

        return Written.of(Rows.of(places()), whole)


class WriteResults(Sequence[WriteResult]):
    """What one rank wrote: a sequence of torch's ``WriteResult``, small to send.

    Args:
        written: As it is sent.
    """

    def __init__(self, written: Written) -> None:
        self.written = written

    @cached_property
    def _places(self) -> list[StoredPlace]:
        return list(self.written.rows().places())

    def __reduce__(self) -> tuple[Any, ...]:
        return WriteResults, (self.written,)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> WriteResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteResult]: ...
    def __getitem__(self, index: int | slice) -> WriteResult | list[WriteResult]:
        if isinstance(index, slice):
            return list(map(_result, self._places[index]))
        return _result(self._places[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _result(place: StoredPlace) -> WriteResult:
    offset = None if place.offset is None else torch.Size(place.offset)
    steps = None if place.transforms is None else list(place.transforms)
    info = StorageInfo(place.path, place.start, place.length, steps)
    return WriteResult(MetadataIndex(place.fqn, offset), place.length, info)
