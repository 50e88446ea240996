"""Keys and integers as they travel.

The keys of a model repeat themselves from layer to layer but for a number. With the numbers taken
out the same few names recur, and the numbers count up; both compress to little.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

Ints = np.ndarray[Any, np.dtype[np.int64]]

_MAX_DIGITS = 9
_SHORT_NBYTES = 128
_COMPRESSED = b"z"


def packed_ints(values: Sequence[int] | np.ndarray[Any, Any], *, compress: bool = True) -> bytes:
    """Return integers in as few bytes each as they all fit into.

    Args:
        values: The integers, between ``-2**31`` and ``2**63 - 1``; none above ``2**31`` where any
            is negative.
        compress: Whether to compress long rows; they mostly repeat themselves.
    """
    array = np.asarray(values, np.int64)
    kind = np.dtype(np.uint8)
    if array.size:
        kind = np.result_type(*map(np.min_scalar_type, (array.min(), array.max())))
    prefix, data = kind.char.encode(), array.astype(kind).tobytes()
    if not compress or len(data) <= _SHORT_NBYTES:
        return prefix + data
    return _COMPRESSED + prefix + zlib.compress(data, 1)


def unpacked_ints(packed: bytes) -> Ints:
    """Return the integers that were packed.

    >>> unpacked_ints(packed_ints([3, -1, 70000])).tolist()
    [3, -1, 70000]
    """
    row = _inflated(packed)
    return np.frombuffer(row[1:], row[:1].decode()).astype(np.int64)


def unpacked_rows(packed: Sequence[bytes]) -> Iterator[tuple[list[int], Ints]]:
    """Yield rows of integers that were packed, those of equal form together.

    Returns:
        Positions in ``packed``, and the rows there as one array.
    """
    inflated = cache(_inflated)
    rows = [inflated(row) if row[:1] == _COMPRESSED else row for row in packed]
    alike: dict[tuple[bytes, int], list[int]] = {}
    for at, row in enumerate(rows):
        alike.setdefault((row[:1], len(row)), []).append(at)
    for (kind, _), positions in alike.items():
        data = b"".join([rows[at][1:] for at in positions])
        table = np.frombuffer(data, kind.decode()).reshape(len(positions), -1)
        yield positions, table.astype(np.int64)


def _inflated(packed: bytes) -> bytes:
    if packed[:1] != _COMPRESSED:
        return packed
    return packed[1:2] + zlib.decompress(packed[2:])


def numbered(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return the different values, and the number of each value among them.

    >>> numbered("abca")
    (['a', 'b', 'c'], [0, 1, 2, 0])
    """
    numbers: defaultdict[T, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    number_of = list(map(numbers.__getitem__, values))
    return list(numbers), number_of


def packed_keys(keys: Sequence[str]) -> Any:
    """Return keys as a value that pickles to bytes that compress well.

    The value has the names of the keys, with 0 for each number, each name once; the name of each
    key; and by how much each number is larger than that at its place in the last key of that name.
    Keys that do not fit this form (a number with a leading zero, a line break, other scripts) come
    as a list.
    """
    joined = "\n".join(keys)
    if not joined.isascii() or joined.count("\n") != len(keys) - 1:
        return list(keys)
    # Several times faster than a regular expression.
    text = np.frombuffer(joined.encode(), np.uint8)
    digits = text - ord("0")
    is_digit = digits < 10
    bounds = np.flatnonzero(np.diff(is_digit, prepend=False, append=False))
    starts, stops = bounds[0::2], bounds[1::2]
    lengths = stops - starts
    if ((lengths > _MAX_DIGITS) | ((lengths > 1) & (digits[starts] == 0))).any():
        return list(keys)
    at = np.flatnonzero(is_digit)
    values = digits[at] * 10 ** (np.repeat(stops, lengths) - 1 - at)
    numbers = np.add.reduceat(values, np.cumsum(lengths) - lengths) if len(at) else values
    is_digit[starts] = False
    zeros = text.copy()
    zeros[starts] = ord("0")
    names, name_of = numbered(zeros[~is_digit].tobytes().decode().split("\n"))
    order = np.array(name_of)
    by_place, is_first = _by_place(names, order)
    steps = np.empty_like(numbers)
    steps[by_place] = np.where(is_first, numbers[by_place], np.diff(numbers[by_place], prepend=0))
    columns = [packed_ints(column, compress=False) for column in (order, steps)]
    return "\n".join(names), *columns


def unpacked_keys(packed: Any) -> list[str]:
    """Return the keys that were packed.

    >>> unpacked_keys(packed_keys(["layers.0.w", "layers.1.w"]))
    ['layers.0.w', 'layers.1.w']
    """
    if isinstance(packed, list):
        return packed
    names = packed[0].split("\n")
    order, steps = [unpacked_ints(column) for column in packed[1:]]
    by_place, is_first = _by_place(names, order)
    sums = np.cumsum(steps[by_place])
    before = (sums - steps[by_place])[is_first]
    numbers = np.empty_like(steps)
    numbers[by_place] = sums - before[np.cumsum(is_first) - 1]
    values = iter(numbers.tolist())
    forms = [(name.replace("%", "%%").replace("0", "%d"), name.count("0")) for name in names]
    return [
        form % tuple(islice(values, count))
        for form, count in map(forms.__getitem__, order.tolist())
    ]


def _by_place(
    names: Sequence[str], order: Ints
) -> tuple[Ints, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return the numbers of all keys sorted by their place in a name, and which are first there.

    Args:
        names: With 0 for each number.
        order: The name of each key.
    """
    counts = np.array([name.count("0") for name in names])
    of_key = counts[order]
    # Places are numbered name after name.
    shift = (np.cumsum(counts) - counts)[order] - (np.cumsum(of_key) - of_key)
    places = np.arange(of_key.sum()) + np.repeat(shift, of_key)
    by_place = np.argsort(places, kind="stable")
    return by_place, np.diff(places[by_place], prepend=-1) != 0
