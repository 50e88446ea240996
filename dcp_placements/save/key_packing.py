"""Keys as they travel: text and numbers apart.

The keys of a model repeat themselves from layer to layer but for a number. With the numbers taken
out the same few pieces of text come round again and again, and the numbers count up; both shrink
to next to nothing when they are compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

_MAX_DIGITS = 9


def packed_column(values: Sequence[int] | np.ndarray[Any, Any]) -> tuple[str, bytes]:
    """Return integers in as few bytes each as they all fit into."""
    column = np.asarray(values, np.int32)
    if not len(column):
        return "B", b""
    kind = np.result_type(*map(np.min_scalar_type, (column.min(), column.max())))
    return kind.char, column.astype(kind).tobytes()


def unpacked_column(packed: tuple[str, bytes]) -> list[int]:
    """Return the integers that were packed.

    >>> unpacked_column(packed_column([3, -1, 70000]))
    [3, -1, 70000]
    """
    values: list[int] = np.frombuffer(packed[1], packed[0]).tolist()
    return values


def packed_keys(keys: Sequence[str]) -> Any:
    """Return keys as a value that pickles to bytes that compress well.

    It is the pieces of text between numbers, each once; which of them come one after the other;
    and by how much the number after each is larger than the last one after the same piece. What
    cannot be written so (a number with a leading zero, a line break, other scripts) comes as it is.
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
    return "0".join(pieces), packed_column(order), packed_column(steps)


def unpacked_keys(packed: Any) -> list[str]:
    """Return the keys that were packed.

    >>> unpacked_keys(packed_keys(["layers.0.w", "layers.1.w"]))
    ['layers.0.w', 'layers.1.w']
    """
    if isinstance(packed, list):
        return packed
    pieces = packed[0].split("0")
    order, steps = map(unpacked_column, packed[1:])
    last = [0] * len(pieces)
    parts = []
    for piece, step in zip(order, steps, strict=False):
        last[piece] += step
        parts += [pieces[piece], str(last[piece])]
    parts.append(pieces[order[-1]])
    return "".join(parts).split("\n")
