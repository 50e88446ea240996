"""The places of chunks in files: one row per chunk, in columns.

Torch keeps them in a dict of two objects per chunk. Columns are what a rank collects while it
writes, and what it sends.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex

Offset = tuple[int, ...] | None
Transforms = tuple[str, ...] | None
Array = np.ndarray[Any, Any]

ROW = np.dtype(
    [
        *((name, np.uint32) for name in ("fqn", "offset", "path", "transforms")),
        *((name, np.int64) for name in ("start", "length")),
    ]
)
"""A row: positions in four lists of names, then the place in the file."""


@dataclass(slots=True)
class Rows:
    """Rows, and the lists of names that they refer to; each name is listed once.

    Attributes:
        fqns: Keys.
        offsets: Of chunks; None of objects.
        paths: Files, relative to the checkpoint.
        transforms: The transforms that wrote the bytes; None for none.
        rows: Of dtype ``ROW``.
    """

    fqns: tuple[str, ...]
    offsets: tuple[Offset, ...]
    paths: tuple[str, ...]
    transforms: tuple[Transforms, ...]
    rows: Array

    def packed(self) -> tuple[bytes, bytes]:
        """Return what ranks that write alike have in common, and the rest; compressed."""
        columns = np.stack([self.rows[name].astype(np.int64) for name in ROW.names or ()])
        # What numbers that mostly rise in steps compress well by are the steps.
        steps = np.diff(columns, prepend=0).tobytes()
        return _compressed((self.fqns, self.transforms, steps)), _compressed(
            (self.offsets, self.paths)
        )

    @staticmethod
    def unpacked(common: bytes, own: bytes) -> Rows:
        """Return the rows again."""
        fqns, transforms, rows = _common(common)
        offsets, paths = pickle.loads(zlib.decompress(own))
        return Rows(fqns, offsets, paths, transforms, rows)


class RowsBuilder:
    """Takes rows, one after another."""

    def __init__(self) -> None:
        self._names: tuple[dict[Any, int], ...] = ({}, {}, {}, {})
        self._fqns: list[int] = []
        self._offsets: list[int] = []
        self._added: list[tuple[int, ...]] = []
        self._ends: dict[str, int] = {}

    def add(
        self,
        index: MetadataIndex,
        *,
        path: str,
        start: int,
        length: int,
        transforms: Sequence[str] | None = None,
    ) -> None:
        """Add a row."""
        self._add([index.fqn], [self._offset(index.offset)], path, start, length, transforms)

    def append(self, indices: Sequence[MetadataIndex], *, path: str, length: int) -> None:
        """Add rows for records of one length behind those that their file has so far."""
        start = self._ends.get(path, 0)
        self._ends[path] = start + length * len(indices)
        offsets = [self._offset(index.offset) for index in indices]
        self._add([index.fqn for index in indices], offsets, path, start, length)

    def _offset(self, offset: Sequence[int] | None) -> int:
        numbers = self._names[1]
        return numbers.setdefault(offset, len(numbers))

    def _add(
        self,
        fqns: Sequence[str],
        offsets: Sequence[int],
        path: str,
        start: int,
        length: int,
        transforms: Sequence[str] | None = None,
    ) -> None:
        numbers, _, paths, every = self._names
        transform = None if transforms is None else tuple(transforms)
        self._fqns += [numbers.setdefault(fqn, len(numbers)) for fqn in fqns]
        self._offsets += offsets
        number = every.setdefault(transform, len(every))
        self._added.append((len(fqns), paths.setdefault(path, len(paths)), number, start, length))

    def rows(self) -> Rows:
        """Return all rows, in the order in which they were added."""
        fqns, sizes, paths, transforms = map(tuple, self._names)
        offsets = tuple([None if offset is None else tuple(offset) for offset in sizes])
        added = np.array(self._added, np.int64).reshape(-1, 5)
        counts = added[:, 0]
        rows = np.empty(counts.sum(), ROW)
        rows["fqn"], rows["offset"] = self._fqns, self._offsets
        for name, column in zip((ROW.names or ())[2:], added.T[1:], strict=True):
            rows[name] = np.repeat(column, counts)
        position = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows["start"] += position * rows["length"]
        return Rows(fqns, offsets, paths, transforms, rows)


def join(parts: Iterable[Rows]) -> Rows:
    """Return the rows of all parts, one after another."""
    held = list(parts)
    if len(held) == 1:
        return held[0]
    lists: tuple[dict[Any, int], ...] = ({}, {}, {}, {})
    # Ranks that write the same keys share one tuple of them, and the columns for it.
    maps: dict[tuple[Any, ...], Array] = {}
    arrays = []
    for part in held:
        rows = part.rows.copy()
        named = (part.fqns, part.offsets, part.paths, part.transforms)
        for column, numbers, names in zip(ROW.names or (), lists, named, strict=False):
            places = maps.get(names) if column == "fqn" else None
            if places is None:
                places = np.array(
                    [numbers.setdefault(name, len(numbers)) for name in names], np.uint32
                )
                if column == "fqn":
                    maps[names] = places
            rows[column] = places[rows[column]] if len(rows) else rows[column]
        arrays.append(rows)
    fqns, offsets, paths, transforms = map(tuple, lists)
    joined = np.concatenate(arrays) if arrays else np.empty(0, ROW)
    return Rows(fqns, offsets, paths, transforms, joined)


class StoredPlace(NamedTuple):
    """Key and offset of a stored chunk, and where it is."""

    fqn: str
    offset: Offset
    path: str
    start: int
    length: int
    transforms: Transforms = None


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


def rows_of_places(places: Iterable[StoredPlace]) -> Rows:
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
    rows = np.array(table, ROW)
    return Rows(tuple(fqns), tuple(offsets), tuple(paths), tuple(every), rows)


def _compressed(value: Any) -> bytes:
    return zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), 1)


@lru_cache(maxsize=64)
def _common(packed: bytes) -> tuple[tuple[str, ...], tuple[Transforms, ...], Array]:
    """Return keys, transforms and rows; ranks that have the same share them."""
    fqns, transforms, steps = pickle.loads(zlib.decompress(packed))
    names = ROW.names or ()
    columns = np.cumsum(np.frombuffer(steps, np.int64).reshape(len(names), -1), axis=1)
    rows = np.empty(columns.shape[1], ROW)
    for name, column in zip(names, columns, strict=True):
        rows[name] = column
    return fqns, transforms, rows
