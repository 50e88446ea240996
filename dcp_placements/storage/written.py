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
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements._torch import StorageInfo
from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.columns import (
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

    def by_file(self, *, copies: bool = False) -> Iterator[Rows]:
        """Yield the rows of each file.

        Args:
            copies: Whether files may have rows for the same chunk; otherwise the later one counts.
        """
        table = self.table if copies else self.table[:, _last_of(self)]
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


class Own(NamedTuple):
    """What one rank alone has of ``Written``."""

    offsets: Ints  # of all slots, one after another
    paths: Sequence[str]
    transforms: tuple[Transforms, ...]  # as in ``Rows``
    fqns: Sequence[str]  # of keys apart
    apart: Ints  # ``(5, keys)``: file, transforms, start and length; dims, -1 of an object


class Template(NamedTuple):
    """What ranks have in common of ``Written``."""

    fqns: Sequence[str]
    dims: Sequence[int]  # by slot, of its offset; -1 of objects
    transforms: Sequence[Transforms]
    table: Ints  # ``(6, rows)``, as in ``Rows``: slots in place of offsets


class Written(NamedTuple):
    """What one rank sends: its template, which other ranks have, too; and what is its own.

    A rank that wrote 64 bytes of ``experts`` at (2, 0), and behind them an object ``rng.1``::

        template:  experts, slot 0 of offsets of 2 dims, file 0, no transforms, 64 bytes
        own:       offset 0 is (2, 0); file 0 is __1_0.distcp; rng.1 is at byte 64 of file 0

    Keys of one chunk in all are apart from the template, and the writer puts them at the end of a
    file: so their lengths move no record of a template.
    """

    template: bytes
    own: Own

    @staticmethod
    def of(rows: Rows, whole: Collection[str]) -> Written:
        """Return what a rank sends.

        Args:
            rows: In the order in which they were written; the later one of a chunk counts.
            whole: Keys of which all is in one row.
        """
        table = rows.table[:, _last_of(rows)]
        is_start = np.array([not any(offset or ()) for offset in rows.offsets], bool)
        is_whole = np.array([fqn in whole for fqn in rows.fqns], bool)
        is_whole &= np.bincount(table[0], minlength=len(rows.fqns)) == 1
        is_apart = is_whole[table[0]] & is_start[table[1]]
        apart, rest = table[:, is_apart], table[:, ~is_apart]
        fqns, rest[0] = _in_order(rows.fqns, rest[0])
        offsets, rest[1] = _in_order(rows.offsets, rest[1])
        rest[4] = from_ends(rest[4], rest[5])
        forms, columns = packed_texts(fqns)
        packed = packed_columns([[dims_of(offset) for offset in offsets], *columns, *rest])
        template = pickle.dumps((forms, rows.transforms, packed.tobytes()), _PROTOCOL)
        dims = np.array([dims_of(rows.offsets[at]) for at in apart[1].tolist()], np.int64)
        own = Own(
            np.array([number for offset in offsets for number in offset or ()], np.int64),
            tuple(rows.paths),
            tuple(rows.transforms),
            tuple([rows.fqns[key] for key in apart[0].tolist()]),
            np.stack([*apart[2:], dims]),
        )
        return Written(zlib.compress(template, 6), own)

    def rows(self) -> Rows:
        """Return the rows: those of the template, then those of the keys apart."""
        template, own = template_of(self.template), self.own
        listed = iter(own.offsets.tolist())
        slots: list[Offset] = [
            None if ndim < 0 else tuple([next(listed) for _ in range(ndim)])
            for ndim in template.dims
        ]
        offsets = list(dict.fromkeys([*slots, *map(origin, own.apart[4].tolist())]))
        number = {offset: at for at, offset in enumerate(offsets)}
        rest = template.table.copy()
        rest[1] = np.array([number[offset] for offset in slots], np.int64)[rest[1]]
        of_apart = [number[origin(ndim)] for ndim in own.apart[4].tolist()]
        keys = np.arange(len(own.fqns)) + len(template.fqns)
        apart = np.stack([keys, np.array(of_apart, np.int64), *own.apart[:4]])
        table = np.concatenate([rest, apart], axis=1)
        return Rows((*template.fqns, *own.fqns), offsets, own.paths, template.transforms, table)


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


def is_whole(item: WriteItem) -> bool:
    """Whether an item alone writes all of a key: no other rank writes a copy."""
    data = item.tensor_data
    if getattr(item, "copied", False):
        return False
    return data is None or data.chunk.sizes == data.size


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
                        index = item.index
                        if is_whole(item):
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
        template, own = self.written
        columns = packed_columns([own.offsets, *own.apart]).tobytes()
        packed = pickle.dumps((*own[1:4], columns), _PROTOCOL)
        return _arrived, (template, zlib.compress(packed, 1))

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


def _arrived(template: bytes, packed: bytes) -> WriteResults:
    paths, transforms, fqns, columns = pickle.loads(zlib.decompress(packed))
    offsets, *apart = unpacked_columns(np.frombuffer(columns, np.int64))
    return WriteResults(Written(template, Own(offsets, paths, transforms, fqns, np.stack(apart))))


def _result(place: StoredPlace) -> WriteResult:
    offset = None if place.offset is None else torch.Size(place.offset)
    steps = None if place.transforms is None else list(place.transforms)
    info = StorageInfo(place.path, place.start, place.length, steps)
    return WriteResult(MetadataIndex(place.fqn, offset), place.length, info)
