"""Columns of integers as the runs of their steps, and texts without the numbers in them.

Offsets, positions and the numbers of layers and experts mostly count up in equal steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_placements.layout.boxes import Ints

Column = Sequence[int] | Ints

_TEXT_CHARS = 1 << 28
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})")


class IndexDamage(ValueError):
    """An index, or a part of it, that is not what was written."""


def packed_columns(columns: Sequence[Column]) -> Ints:
    """Return columns of any lengths as one array: sizes, then the runs of their steps.

    >>> packed_columns([[5, 6, 7, 8]]).tolist()  # 1 column of 4 in 2 runs: 5 once, 1 three times
    [1, 4, 2, 5, 1, 1, 3]
    """
    lengths, counts, runs = [], [], []
    for values in columns:
        column = np.asarray(values, np.int64).ravel()
        # The differences of two's complement numbers, modulo 2**64, add up to them again.
        steps = np.diff(column, prepend=np.int64(0))
        starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] ^ 1))
        lengths.append(len(column))
        counts.append(len(starts))
        runs += [steps[starts], np.diff(starts, append=len(column))]
    sizes = np.array([len(lengths), *lengths, *counts], np.int64)
    return np.concatenate([sizes, *runs])


def unpacked_columns(packed: Ints, most: int | None = None) -> list[Ints]:
    """Return the columns again.

    Args:
        packed: What ``packed_columns`` returned.
        most: Integers that all of them may have.

    Raises:
        IndexDamage: It is none.
    """
    count = int(packed[0]) if len(packed) else -1
    if not 0 <= count <= len(packed):
        raise IndexDamage("a number of columns that is none")
    sizes = packed[1 : 1 + 2 * count].tolist()
    lengths, counts = sizes[:count], sizes[count:]
    if min(sizes, default=0) < 0 or 1 + 2 * count + 2 * sum(counts) != len(packed):
        raise IndexDamage("columns of other sizes than they have")
    if most is not None and sum(lengths) > most:
        raise IndexDamage(f"it has {sum(lengths):,} numbers, and at most {most:,} are read")
    columns, at = [], 1 + 2 * count
    for length, runs in zip(lengths, counts, strict=True):
        steps, times = packed[at : at + 2 * runs].reshape(2, runs)
        # Summed as Python's integers: a sum that wraps around would look right.
        if runs and (int(times.min()) < 1 or sum(times.tolist()) != length):
            raise IndexDamage("runs of other lengths than their column")
        if not runs and length:
            raise IndexDamage("a column without runs")
        columns.append(np.cumsum(np.repeat(steps, times), dtype=np.int64))
        at += 2 * runs
    return columns


def packed_texts(texts: Sequence[str]) -> tuple[list[list[str]], list[Column]]:
    """Return texts without the numbers in them, each once; and which text has which numbers.

    >>> packed_texts(["w.0", "w.1", "w.2"])
    ([['w.', '']], [[0, 0, 0], [0, 1, 2]])
    """
    forms: dict[tuple[str, ...], int] = {}
    numbers: list[list[Any]] = []
    form_of = []
    for text in texts:
        parts = _NUMBER.split(text)
        form = forms.setdefault(tuple(parts[::2]), len(forms))
        if form == len(numbers):
            numbers.append([])
        numbers[form].append(parts[1::2])
        form_of.append(form)
    # Those of one form count up, place by place.
    columns = [
        int(number) for rows in numbers for column in zip(*rows, strict=True) for number in column
    ]
    return [list(form) for form in forms], [form_of, columns]


def unpacked_texts(forms: Sequence[Sequence[str]], form_of: Ints, numbers: Ints) -> list[str]:
    """Return the texts again.

    Raises:
        IndexDamage: They are none.
    """
    check_below(form_of, len(forms))
    counts = np.bincount(form_of, minlength=len(forms)).tolist()
    needed = [(len(form) - 1) * count for form, count in zip(forms, counts, strict=True)]
    chars = sum(sum(map(len, form)) * n for form, n in zip(forms, counts, strict=True))
    if sum(needed) != len(numbers) or chars > _TEXT_CHARS or min(map(len, forms), default=1) < 1:
        raise IndexDamage("texts of other numbers than they have")
    made, at = [], 0
    for form, count, size in zip(forms, counts, needed, strict=True):
        rows = numbers[at : at + size].reshape(len(form) - 1, count).T.tolist()
        template = "%d".join(part.replace("%", "%%") for part in form)
        made.append(iter([template % tuple(row) for row in rows]))
        at += size
    return [next(made[form]) for form in form_of.tolist()]


def check_below(column: Ints, below: int, least: int = 0) -> None:
    """Refuse a column with a number that is out of range."""
    if len(column) and (int(column.min()) < least or int(column.max()) >= below):
        raise IndexDamage(f"a number out of {below:,}")


def split(column: Ints, counts: Sequence[int]) -> list[Ints]:
    """Return parts of these lengths."""
    if sum(counts) != len(column):
        raise IndexDamage(f"{len(column):,} values for {sum(counts):,} places")
    return np.split(column, np.cumsum(counts)[:-1]) if len(counts) else []
