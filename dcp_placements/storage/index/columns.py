"""Columns of integers and lists of text as bytes, read back with their sizes checked.

Offsets and positions of thousands of ranks count up in equal steps, so a column is stored as the
runs of its differences where these are few.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]

_HEAD = struct.Struct("<BBQQ")
_PLAIN, _STEPS, _RUNS = range(3)
_KINDS = tuple(map(np.dtype, ("<u1", "<u2", "<u4", "<i1", "<i2", "<i4", "<i8")))
_CODES = "".join([kind.char for kind in map(np.dtype, ("u1", "u2", "u4", "i1", "i2", "i4"))]) + "q"
_RANGES = [(int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for kind in _KINDS]
_FEW = 16
_SPARE = 1 << 22
_LENGTH = struct.Struct("<Q")


class IndexDamage(ValueError):
    """An index, or a part of it, that is not what was written."""


class ColumnWriter:
    """Packs columns and texts, one after another."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def ints(self, values: Sequence[int] | Ints) -> None:
        """Add a column of integers between ``-2**63`` and ``2**63 - 1``."""
        if len(values) <= _FEW and not isinstance(values, np.ndarray):
            # Arrays take longer than so few integers.
            low, high = min(values, default=0), max(values, default=0)
            kind = _kind_of(low, high)
            head = _HEAD.pack(_PLAIN, kind, len(values), len(values))
            self._parts += [head, struct.pack(f"<{len(values)}{_CODES[kind]}", *values)]
            return
        column = np.asarray(values, np.int64).ravel()
        # The differences of two's complement numbers, modulo 2**64, add up to them again.
        steps = column.copy()
        steps[1:] -= column[:-1]
        # Where runs end, but for the last one.
        (changes,) = (steps[1:] != steps[:-1]).nonzero()
        if 2 * (len(changes) + 1) < len(column):
            bounds = np.empty(len(changes) + 2, np.int64)
            bounds[0], bounds[1:-1], bounds[-1] = 0, changes, len(column)
            bounds[1:-1] += 1
            kind, stored = _narrow(steps[bounds[:-1]])
            count_kind, counts = _narrow(bounds[1:] - bounds[:-1])
            head = _HEAD.pack(_RUNS, kind, len(column), len(changes) + 1)
            self._parts += [head, stored.tobytes(), bytes([count_kind]), counts.tobytes()]
            return
        form = _PLAIN
        kind, stored = _narrow(column)
        if stored.itemsize > 1:
            step_kind, stepped = _narrow(steps)
            if stepped.itemsize < stored.itemsize:
                form, kind, stored = _STEPS, step_kind, stepped
        head = _HEAD.pack(form, kind, len(column), len(column))
        self._parts += [head, stored.tobytes()]

    def texts(self, values: Iterable[str]) -> None:
        """Add a list of texts."""
        held = list(values)
        joined = "".join(held)
        data = joined.encode("utf-8", "surrogatepass")
        if len(data) > len(joined):
            self.ints([len(value.encode("utf-8", "surrogatepass")) for value in held])
        else:
            self.ints(list(map(len, held)))
        self.data(data)

    def data(self, value: bytes) -> None:
        """Add bytes."""
        self._parts += [_LENGTH.pack(len(value)), value]

    def packed(self) -> bytes:
        """Return all that was added."""
        return b"".join(self._parts)


class ColumnReader:
    """Unpacks what a ``ColumnWriter`` packed, in its order.

    Args:
        packed: The bytes.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._at = 0

    def ints(
        self, count: int | None = None, *, most: int | None = None, below: int | None = None
    ) -> Ints:
        """Return the next column.

        Args:
            count: How many integers it has; None for any number up to ``most``.
            most: By default some millions more than there are bytes.
            below: Where given, all have to be less, and not negative.

        Raises:
            IndexDamage: It is no such column. Nothing larger is allocated then.
        """
        form, kind, length, stored = _HEAD.unpack(self._take(_HEAD.size))
        limit = len(self._packed) + _SPARE if most is None else most
        limit = limit if count is None else count
        if length > limit or (count is not None and length != count) or stored > length:
            raise IndexDamage(f"a column of {length:,} numbers where {limit:,} were expected")
        values = self._array(kind, stored)
        if form == _RUNS:
            counts = self._array(self._take(1)[0], stored)
            if len(counts) and int(counts.min()) < 1:
                raise IndexDamage("a run of no numbers")
            # Summed as Python's integers: a sum that wraps around would look right.
            if sum(counts.tolist()) != length:
                raise IndexDamage("runs of other lengths than their column")
            column = np.cumsum(np.repeat(values, counts), dtype=np.int64)
        elif form in (_PLAIN, _STEPS) and stored == length:
            column = np.cumsum(values, dtype=np.int64) if form == _STEPS else values
        else:
            raise IndexDamage("a column of an unknown form")
        if below is not None and len(column):
            low, high = int(column.min()), int(column.max())
            if low < 0 or high >= below:
                raise IndexDamage(f"a number out of its range: {low if low < 0 else high}")
        return column

    def texts(self) -> list[str]:
        """Return the next list of texts."""
        lengths = self.ints(below=len(self._packed) + 1).tolist()
        data = self.data()
        if sum(lengths) != len(data):
            raise IndexDamage("texts of other lengths than they have")
        if data.isascii():
            return list(map(io.StringIO(data.decode("ascii")).read, lengths))
        try:
            parts = map(io.BytesIO(data).read, lengths)
            return [part.decode("utf-8", "surrogatepass") for part in parts]
        except UnicodeDecodeError as error:
            raise IndexDamage("a text that is none") from error

    def data(self) -> bytes:
        """Return the next bytes."""
        return self._take(_LENGTH.unpack(self._take(_LENGTH.size))[0])

    def _array(self, kind: int, count: int) -> Ints:
        if kind >= len(_KINDS):
            raise IndexDamage(f"numbers of an unknown kind {kind}")
        dtype = _KINDS[kind]
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).astype(np.int64)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._packed):
            raise IndexDamage("a part that is cut off")
        taken = self._packed[self._at : end]
        self._at = end
        return taken


def _narrow(column: Ints) -> tuple[int, np.ndarray[Any, Any]]:
    """Return integers in as few bytes each as they all fit into, and which kind has these."""
    number = _kind_of(int(column.min()), int(column.max())) if len(column) else 0
    return number, column.astype(_KINDS[number])


def _kind_of(low: int, high: int) -> int:
    for number, (least, most) in enumerate(_RANGES):
        if least <= low and high <= most:
            return number
    raise AssertionError("integers of more than 64 bits")
