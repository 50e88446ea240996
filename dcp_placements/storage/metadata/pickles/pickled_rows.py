"""The rows of chunks as records of equal length inside the pickle of ``.metadata``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_placements._torch import MetadataIndex, StorageInfo
from dcp_placements.storage.metadata.table import ROW, Array, Rows

_I32 = 1 << 31


@dataclass(slots=True)
class MemoNumbers:
    """The numbers in the pickle's memo of the values that records share.

    Attributes:
        words: Of classes and attribute names.
        columns: Of the names of each column of the rows; 0 for None.
    """

    words: dict[Any, int]
    columns: dict[str, Array]


@dataclass(frozen=True, slots=True)
class RecordKind:
    """One kind of records: which fields they have.

    Attributes:
        chunk: Whether they have an offset.
        transformed: Whether they have transforms.
        wide: Whether positions in files take 8 bytes instead of 4.
    """

    chunk: bool
    transformed: bool
    wide: bool

    def layout(self, memo: MemoNumbers | None) -> np.dtype[Any]:
        """Return the records' dtype."""
        return np.dtype([(name, *kind) for name, kind, _ in self._fields(memo)])

    def fixed(self, memo: MemoNumbers | None) -> dict[str, Array]:
        """Return the bytes that all records have in common."""
        fields = self._fields(memo)
        return {name: np.frombuffer(data, np.uint8) for name, _, data in fields if data}

    def is_form_of(self, records: Array) -> bool:
        """Whether records from a file are of this kind: they make an index and a place, no more.

        The memo numbers of words may be any, but the same in all records.
        """
        for name, fixed in self.fixed(None).items():
            actual = records[name]
            if not len(actual):
                continue
            expected = fixed.copy()
            # The byte after "h" is a memo number.
            numbers = np.flatnonzero(expected[:-1] == ord("h")) + 1
            expected[numbers] = actual[0][numbers]
            if not (actual == expected).all():
                return False
        return True

    def _fields(self, memo: MemoNumbers | None) -> list[tuple[str, tuple[Any, ...], bytes]]:
        fields: list[tuple[str, tuple[Any, ...], bytes]] = []
        pending = b""

        def word(name: Any) -> bytes:
            return b"h" + bytes([0 if memo is None else memo.words[name]])

        def field(name: str, kind: Any) -> None:
            nonlocal pending
            fields.append((f"bytes{len(fields)}", (np.uint8, (len(pending),)), pending))
            fields.append((name, (kind,), b""))
            pending = b""

        def number(name: str) -> None:
            nonlocal pending
            pending += b"\x8a\x08" if self.wide else b"J"
            field(name, "<i8" if self.wide else "<i4")

        # NEWOBJ of the class, then BUILD with a dict of its attributes; "j" gets a shared name.
        pending += word(MetadataIndex) + b")\x81}(" + word("fqn") + b"j"
        field("fqn", "<u4")
        if self.chunk:
            pending += word("offset") + b"j"
            field("offset", "<u4")
        pending += b"ub" + word(StorageInfo) + b")\x81}(" + word("relative_path") + b"j"
        field("path", "<u4")
        pending += word("offset")
        number("start")
        pending += word("length")
        number("length")
        if self.transformed:
            pending += word("transform_descriptors") + b"j"
            field("transforms", "<u4")
        # Into the dict.
        pending += b"ubs"
        fields.append((f"bytes{len(fields)}", (np.uint8, (len(pending),)), pending))
        return fields


def rows_by_kind(held: Rows, rows: Array) -> Iterator[tuple[RecordKind, Array]]:
    """Yield the rows by kind of record."""
    chunk = np.array([offset is not None for offset in held.offsets], bool)[rows["offset"]]
    moved = np.array([steps is not None for steps in held.transforms], bool)[rows["transforms"]]
    for has_offset in (False, True):
        for transformed in (False, True):
            chosen = rows[(chunk == has_offset) & (moved == transformed)]
            if len(chosen):
                largest = max(int(chosen["start"].max()), int(chosen["length"].max()))
                yield RecordKind(has_offset, transformed, largest >= _I32), chosen


def records_of(part: RecordKind, memo: MemoNumbers, rows: Array) -> bytes:
    layout = part.layout(memo)
    records = np.empty(len(rows), layout)
    for name, data in part.fixed(memo).items():
        records[name] = data
    for name in ROW.names or ():
        if name in (layout.names or ()):
            numbers = memo.columns.get(name)
            records[name] = rows[name] if numbers is None else numbers[rows[name]]
    return records.tobytes()


def rows_of_records(records: Array, footer: Mapping[str, Any]) -> Array:
    rows = np.zeros(len(records), ROW)
    for name in ROW.names or ():
        numbers = footer["numbers"].get(name)
        memo_numbers = None if numbers is None else np.frombuffer(numbers, np.uint32)
        if name not in (records.dtype.names or ()):
            # Left out of these records, which have None there.
            names = footer[f"{name}s" if not name.endswith("s") else name]
            rows[name] = names.index(None)
        elif memo_numbers is None:
            rows[name] = records[name]
        else:
            order = np.argsort(memo_numbers)
            found = order[np.searchsorted(memo_numbers[order], records[name])]
            if not (memo_numbers[found] == records[name]).all():
                raise pickle.UnpicklingError(f"its records have a {name} that is not listed")
            rows[name] = found
    return rows
