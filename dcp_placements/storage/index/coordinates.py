"""Coordinates of many chunks, numbered and sorted."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from dcp_placements.storage.index.columns import Ints


def row_codes(rows: Ints) -> Ints:
    """Return by row a number: equal for equal rows, and in their lexicographic order.

    Args:
        rows: ``(rows, columns)``, not negative.
    """
    if not rows.size:
        return np.zeros(len(rows), np.int64)
    extents = [int(extent) + 1 for extent in rows.max(axis=0)]
    if prod(extents) >= 1 << 62:
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    codes = np.zeros(len(rows), np.int64)
    for column, extent in zip(rows.T, extents, strict=True):
        codes = codes * extent + column
    return codes


def run_starts(column: Ints) -> Ints:
    """Return where runs of equal integers begin."""
    changes = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=changes[1:])
    return changes.nonzero()[0]


def places_in_runs(starts: Ints, count: int) -> Ints:
    """Return 0, 1, 2 ... for each run.

    Args:
        starts: Where the runs begin.
        count: Of all their elements.
    """
    places = np.arange(count)
    begin = np.zeros(count, np.int64)
    begin[starts] = starts
    np.maximum.accumulate(begin, out=begin)
    places -= begin
    return places


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """Return where each different row is first, in their order, and by row which one it is.

    Args:
        rows: ``(rows, columns)``, not negative.
    """
    codes = row_codes(rows)
    _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
    return first, numbers.reshape(-1)


class Numbering:
    """Different coordinates, by number of dims: each once, in one numbering.

    Args:
        tables: Of coordinates, ``(rows, ndim)`` each.

    Attributes:
        unique: The different ones of each number of dims, in the order of their numbers.
        numbers: By table and row, the number.
    """

    def __init__(self, tables: Sequence[Ints]) -> None:
        self.unique: list[Ints] = []
        self.numbers: list[Ints] = [np.zeros(0, np.int64)] * len(tables)
        first = 0
        for ndim in sorted({table.shape[1] for table in tables}):
            chosen = [at for at, table in enumerate(tables) if table.shape[1] == ndim]
            rows = np.concatenate([tables[at] for at in chosen])
            first_rows, of_row = distinct(rows)
            self.unique.append(rows[first_rows])
            ends = np.cumsum([len(tables[at]) for at in chosen])
            for at, numbers in zip(chosen, np.split(of_row, ends[:-1]), strict=True):
                self.numbers[at] = numbers + first
            first += len(first_rows)

    def __len__(self) -> int:
        return sum(map(len, self.unique))


def matching_order(rows: Ints, wanted: Ints) -> Ints | None:
    """Return the order of ``rows`` that gives ``wanted``; None where they are not the same rows."""
    if rows.shape != wanted.shape:
        return None
    if np.array_equal(rows, wanted):
        return np.arange(len(rows))
    codes = row_codes(np.concatenate([rows, wanted]))
    ours, theirs = codes[: len(rows)], codes[len(rows) :]
    by_ours, by_theirs = np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable")
    if not np.array_equal(ours[by_ours], theirs[by_theirs]):
        return None
    order = np.empty(len(rows), np.int64)
    order[by_theirs] = by_ours
    return order
