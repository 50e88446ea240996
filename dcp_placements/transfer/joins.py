"""Rows of arrays: equal ones as one; and which boxes of two lists share elements.

Boxes are two integer arrays ``[boxes, dims]``: offsets and sizes, in elements.
"""

from __future__ import annotations

import numpy as np

from dcp_placements.storage.metadata.table import Array


def distinct_rows(rows: Array) -> tuple[Array, Array]:
    """Return where each distinct row is first, sorted by rows, and each row's number there."""
    if not rows.shape[1]:
        return np.arange(min(len(rows), 1)), np.zeros(len(rows), np.int64)
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(1)
    number = np.empty(len(rows), np.int64)
    number[order] = np.cumsum(is_first) - 1
    return order[is_first], number


def meeting(
    offsets: Array, sizes: Array, other_offsets: Array, other_sizes: Array
) -> tuple[Array, Array]:
    """Return the index pairs ``(box, other box)`` that share elements, sorted.

    The candidates of a box are found by a binary search along the dim that leaves the fewest.
    """
    dims = offsets.shape[1]
    if not len(offsets) or not len(other_offsets):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first, counts = np.zeros(len(offsets), np.int64), np.full(len(offsets), len(other_offsets))
    order = np.arange(len(other_offsets))
    for dim in range(dims):
        by_start = np.argsort(other_offsets[:, dim], kind="stable")
        starts = other_offsets[by_start, dim]
        longest = other_sizes[:, dim].max()
        low = np.searchsorted(starts, offsets[:, dim] - longest, "right")
        high = np.searchsorted(starts, offsets[:, dim] + sizes[:, dim], "left")
        if (high - low).sum() < counts.sum():
            first, counts, order = low, high - low, by_start
    one, position = expanded(first, counts)
    other = order[position]
    low = np.maximum(offsets[one], other_offsets[other])
    high = np.minimum(offsets[one] + sizes[one], other_offsets[other] + other_sizes[other])
    shares = (low < high).all(1)
    one, other = one[shares], other[shares]
    ordered = np.lexsort((other, one))
    return one[ordered], other[ordered]


def expanded(first: Array, counts: Array) -> tuple[Array, Array]:
    """Return ``(range number, value)`` of all values of the ranges ``first .. first + counts``.

    >>> expanded(np.array([5, 0]), np.array([2, 1]))
    (array([0, 0, 1]), array([5, 6, 0]))
    """
    number = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    within = np.arange(len(number)) - np.repeat(ends - counts, counts)
    return number, first[number] + within
