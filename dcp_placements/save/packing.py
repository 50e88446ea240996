"""Keys and integers as they travel.

The keys of a model repeat themselves from layer to layer but for a number. With the numbers taken
out the same few pieces of text recur, and the numbers count up; both compress to little.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

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
    kind, data = packed[:1], packed[1:]
    if kind == _COMPRESSED:
        kind, data = data[:1], zlib.decompress(data[1:])
    return np.frombuffer(data, kind.decode()).astype(np.int64)


def packed_keys(keys: Sequence[str]) -> Any:
    """Return keys as a value that pickles to bytes that compress well.

    The value has the pieces of text between numbers, each once; the order of the pieces; and by how
    much the number after each is larger than the last one after the same piece. Keys that do not
    fit this form (a number with a leading zero, a line break, other scripts) come as a list.
    """
    joined = "\n".join(keys)
    if not joined.isascii() or joined.count("\n") != len(keys) - 1:
        return list(keys)
    # Several times faster than a regular expression.
    is_digit = np.frombuffer(joined.encode(), np.uint8) - ord("0") < 10
    edges = np.flatnonzero(np.diff(is_digit, prepend=False, append=False)).tolist()
    parts = [joined[start:stop] for start, stop in pairwise([0, *edges, len(joined)])]
    text, digits = parts[0::2], parts[1::2]
    if any([len(d) > 1 and (d[0] == "0" or len(d) > _MAX_DIGITS) for d in digits]):
        return list(keys)
    pieces = {piece: number for number, piece in enumerate(dict.fromkeys(text))}
    order = np.array([pieces[piece] for piece in text], np.int32)
    numbers = np.array(digits, np.int32) if digits else np.zeros(0, np.int32)
    by_piece = np.argsort(order[:-1], kind="stable")
    first = np.diff(order[by_piece], prepend=-1) != 0
    steps = np.empty_like(numbers)
    steps[by_piece] = np.where(first, numbers[by_piece], np.diff(numbers[by_piece], prepend=0))
    # No piece has a digit in it.
    return "0".join(pieces), packed_ints(order, compress=False), packed_ints(steps, compress=False)


def unpacked_keys(packed: Any) -> list[str]:
    """Return the keys that were packed.

    >>> unpacked_keys(packed_keys(["layers.0.w", "layers.1.w"]))
    ['layers.0.w', 'layers.1.w']
    """
    if isinstance(packed, list):
        return packed
    pieces = packed[0].split("0")
    order, steps = [unpacked_ints(column).tolist() for column in packed[1:]]
    last = [0] * len(pieces)
    parts = []
    for piece, step in zip(order, steps, strict=False):
        last[piece] += step
        parts += [pieces[piece], str(last[piece])]
    parts.append(pieces[order[-1]])
    return "".join(parts).split("\n")
