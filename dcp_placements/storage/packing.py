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

LARGEST = 1 << 62
"""Above all numbers of an index."""

MOST_NUMBERS = 1 << 27
"""Integers that columns which are read at once may have."""

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


def unpacked_columns(packed: Ints, most: int = MOST_NUMBERS) -> list[Ints]:
    """Return the columns again.

    Args:
        packed: As of ``packed_columns``.
        most: Numbers that they may have in all.

    Raises:
        IndexDamage: It is not what ``packed_columns`` returned.
    """
    count = int(packed[0]) if len(packed) else -1
    sizes = packed[1 : 1 + 2 * max(count, 0)].tolist()
    lengths, counts = sizes[:count], sizes[count:]
    at = 1 + 2 * count
    if count < 0 or min(sizes, default=0) < 0 or at + 2 * sum(counts) != len(packed):
        raise IndexDamage("columns of other sizes than they have")
    if sum(lengths) > most:
        raise IndexDamage(f"it has {sum(lengths):,} numbers, and at most {most:,} are read")
    columns = []
    for length, runs in zip(lengths, counts, strict=True):
        steps, times = packed[at : at + 2 * runs].reshape(2, runs)
        # Summed as Python's integers: a sum that wraps around would look right.
        if min(times.tolist(), default=1) < 1 or sum(times.tolist()) != length:
            raise IndexDamage("runs of other lengths than their column")
        columns.append(np.cumsum(np.repeat(steps, times), dtype=np.int64))
        at += 2 * runs
    return columns


def packed_texts(texts: Sequence[str]) -> tuple[list[list[str]], list[Column]]:
    """Return texts without the numbers in them, each once; and which text has which numbers.

    >>> packed_texts(["w.0", "w.1", "w.2"])
    ([['w.', '']], [[0, 0, 0], [0, 1, 2]])
    """
    forms: dict[tuple[str, ...], list[Any]] = {}
    form_of = []
    for text in texts:
        parts = _NUMBER.split(text)
        numbers = forms.setdefault(tuple(parts[::2]), [len(forms)])
        numbers.append(parts[1::2])
        form_of.append(numbers[0])
    # Those of one form count up, place by place.
    columns = [
        int(number)
        for _, *rows in forms.values()
        for column in zip(*rows, strict=True)
        for number in column
    ]
    return [list(form) for form in forms], [form_of, columns]


def unpacked_texts(forms: Sequence[Sequence[str]], form_of: Ints, numbers: Ints) -> list[str]:
    """Return the texts again.

    Raises:
        IndexDamage: They are none.
    """
    check_below(form_of, len(forms))
    counts = np.bincount(form_of, minlength=len(forms)).tolist()
    chars = sum(sum(map(len, form)) * n for form, n in zip(forms, counts, strict=True))
    if chars > _TEXT_CHARS or min(map(len, forms), default=1) < 1:
        raise IndexDamage("texts of other numbers than they have")
    sizes = [(len(form) - 1) * count for form, count in zip(forms, counts, strict=True)]
    made = []
    for form, count, part in zip(forms, counts, split(numbers, sizes), strict=True):
        rows = part.reshape(len(form) - 1, count).T.tolist()
        template = "%d".join(piece.replace("%", "%%") for piece in form)
        made.append(iter([template % tuple(row) for row in rows]))
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
