"""Columns of integers and lists of text as bytes, read back with their sizes checked.

Offsets and positions of thousands of ranks count up in equal steps, so a column is stored as the
runs of its differences where these are few.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]

_HEAD = struct.Struct("<BBQQ")
_PLAIN, _STEPS, _RUNS = range(3)
_KINDS = tuple(map(np.dtype, ("<u1", "<u2", "<u4", "<i1", "<i2", "<i4", "<i8")))
_RANGES = [(kind, np.iinfo(kind).min, np.iinfo(kind).max) for kind in _KINDS]
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
        start: Where to begin in them.
    """

    def __init__(self, packed: bytes, start: int = 0) -> None:
        self._packed = packed
        self._at = start

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
        limit = len(self._packed) + _SPARE if most is None else most
        stored = self._stored(count, limit)
        column: Ints = _columns([stored], stored.length, below)[0]
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

    def rest(self) -> bytes:
        """Return all that follows."""
        return self._packed[self._at :]

    def _stored(self, count: int | None, limit: int) -> _Stored:
        start = self._at + _HEAD.size
        if start > len(self._packed):
            raise IndexDamage("a part that is cut off")
        form, kind, length, stored = _HEAD.unpack_from(self._packed, self._at)
        limit = limit if count is None else count
        if length > limit or (count is not None and length != count) or stored > length:
            raise IndexDamage(f"a column of {length:,} numbers where {limit:,} were expected")
        self._at = start
        values, count_kind, counts = self._take(stored * _itemsize(kind)), 0, b""
        if form == _RUNS:
            count_kind = self._take(1)[0]
            counts = self._take(stored * _itemsize(count_kind))
        elif form not in (_PLAIN, _STEPS) or stored != length:
            raise IndexDamage("a column of an unknown form")
        return _Stored(length, (form, kind, count_kind), stored, values, counts)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._packed):
            raise IndexDamage("a part that is cut off")
        taken = self._packed[self._at : end]
        self._at = end
        return taken


class _Stored(NamedTuple):
    """A column as it is stored: how many integers, in which form and kinds, and their bytes."""

    length: int
    form: tuple[int, int, int]
    stored: int
    values: bytes
    counts: bytes


def tables(readers: Sequence[ColumnReader], shape: tuple[int, int], *, below: int) -> Ints:
    """Return the next columns of several readers: short columns take no longer than a long one.

    Args:
        readers: Each of a part of its own.
        shape: How many columns each has, and how many integers each column.
        below: All integers have to be less, and not negative.

    Returns:
        ``(readers, columns, integers)``.

    Raises:
        IndexDamage: As of ``ColumnReader.ints``.
    """
    columns, count = shape
    stored = [reader._stored(count, count) for reader in readers for _ in range(columns)]
    return _columns(stored, count, below).reshape(len(readers), columns, count)


def _columns(columns: Sequence[_Stored], length: int, below: int | None) -> Ints:
    """Return columns of one length as rows of an array; those stored alike are read at once."""
    by_form: dict[tuple[int, int, int], list[int]] = {}
    for number, column in enumerate(columns):
        by_form.setdefault(column.form, []).append(number)
    table = np.empty((len(columns), length), np.int64)
    for (form, kind, count_kind), numbers in by_form.items():
        alike = [columns[number] for number in numbers]
        values = _integers([column.values for column in alike], kind)
        if form == _RUNS:
            counts = _integers([column.counts for column in alike], count_kind)
            values = _repeated(values, counts, [column.stored for column in alike], length)
        rows = values.reshape(len(alike), length)
        table[numbers] = rows if form == _PLAIN else np.cumsum(rows, axis=1)
    if below is not None and table.size:
        low, high = int(table.min()), int(table.max())
        if low < 0 or high >= below:
            raise IndexDamage(f"a number out of its range: {low if low < 0 else high}")
    return table


def _repeated(values: Ints, counts: Ints, runs: Sequence[int], length: int) -> Ints:
    """Return each value as often as its count says, in columns of so many runs each."""
    if len(counts) and int(counts.min()) < 1:
        raise IndexDamage("a run of no numbers")
    stops = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=stops[1:])
    bounds = stops[np.cumsum([0, *runs])]
    # Where a sum of positive numbers wraps around, it is less than the one before.
    if (stops[1:] < stops[:-1]).any() or (bounds[1:] - bounds[:-1] != length).any():
        raise IndexDamage("runs of other lengths than their column")
    return np.repeat(values, counts)


def _itemsize(kind: int) -> int:
    if kind >= len(_KINDS):
        raise IndexDamage(f"numbers of an unknown kind {kind}")
    return _KINDS[kind].itemsize


def _integers(parts: Sequence[bytes], kind: int) -> Ints:
    return np.frombuffer(b"".join(parts), _KINDS[kind]).astype(np.int64)


def _narrow(column: Ints) -> tuple[int, np.ndarray[Any, Any]]:
    """Return integers in as few bytes each as they all fit into, and which kind has these."""
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for number, (kind, least, most) in enumerate(_RANGES):
        if least <= low and high <= most:
            return number, column.astype(kind)
    raise AssertionError("integers of more than 64 bits")
