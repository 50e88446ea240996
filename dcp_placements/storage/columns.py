"""Columns of integers as differences, and of texts by component, which deflate compresses well.

Offsets, positions and the numbers of layers and experts mostly count up in equal steps, and keys
have most of their components in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_placements.layout.boxes import Ints

LARGEST_VALUE = 1 << 62
"""An upper bound of all numbers in an index."""


class IndexDamage(ValueError):
    """An index that is not what was written."""


def differences(columns: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the differences along the last dim, in the narrowest integers that hold them.

    >>> differences([[5, 6, 7, 8], [0, 0, 0, 300]])
    array([[  5,   1,   1,   1],
           [  0,   0,   0, 300]], dtype=int16)
    """
    deltas = np.diff(np.asarray(columns, np.int64), prepend=0, axis=-1)
    lowest, highest = int(deltas.min(initial=0)), int(deltas.max(initial=0))
    return deltas.astype(np.min_scalar_type(min(lowest, -1 - highest)))


def summed(deltas: npt.NDArray[Any]) -> Ints:
    """Return the columns that have these differences."""
    columns: Ints = np.cumsum(deltas, axis=-1, dtype=np.int64)
    return columns


def components(texts: Sequence[str]) -> list[list[str | None]]:
    """Return dotted texts as one column per component; None after the last component of a text.

    >>> components(["layers.0.w", "layers.1.w", "step"])
    [['layers', 'layers', 'step'], ['0', '1', None], ['w', 'w', None]]
    """
    return list(map(list, zip_longest(*[text.split(".") for text in texts])))


def joined(columns: Sequence[Sequence[str | None]]) -> list[str]:
    """Return the texts that have these components."""
    rows: Any = zip(*columns, strict=True)
    if any(None in column for column in columns):
        rows = [[component for component in row if component is not None] for row in rows]
    return list(map(".".join, rows))


def check_below(column: Ints, below: int, least: int = 0) -> None:
    """Refuse a column with a number that is out of range."""
    if len(column) and (int(column.min()) < least or int(column.max()) >= below):
        raise IndexDamage(f"a number out of {below:,}")


def split(column: Ints, counts: Sequence[int]) -> list[Ints]:
    """Split a column into columns of these lengths."""
    if sum(counts) != len(column):
        raise IndexDamage(f"{len(column):,} values for {sum(counts):,} places")
    return np.split(column, np.cumsum(counts)[:-1]) if len(counts) else []
