"""What a rank wrote, as it sends it: by reference to its plan where that is possible.

The coordinator made the plan, so it knows which chunks a rank writes. What it cannot know is where
their records are in files, which is the same for thousands of ranks: the length of a record depends
on shape and dtype alone, and records follow one another. So a rank sends lengths and order, and the
coordinator works the rows out.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np

from dcp_placements._torch import MetadataIndex, StorageInfo, WriteResult
from dcp_placements.storage.index.building import Written, written_rows
from dcp_placements.storage.metadata.table import (
    ROW,
    Array,
    Offset,
    Rows,
    place_of,
    rows_of_places,
)


@dataclass(frozen=True, slots=True)
class Outline:
    """Which chunks a rank writes, in an order that the rank and the coordinator agree on.

    Attributes:
        fqns: By chunk, its key.
        slots: By chunk, a number; chunks of one number have one offset, and most of them one record
            length. Packed int64.
        offsets: By number; None of objects.
    """

    fqns: tuple[str, ...]
    slots: bytes
    offsets: tuple[Offset, ...]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a rank sends of its rows; its outline has the rest.

    Attributes:
        places: Packed: order, lengths and starts of the records; equal on many ranks.
        paths: The files.
    """

    places: bytes
    paths: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return Confirmation, (self.places, self.paths)

    def written(self, outline: Outline) -> Written:
        """Return what was written.

        Args:
            outline: Of the plan of the rank that sent this.
        """
        like = self.places, outline.fqns, outline.slots
        return Written(like, partial(_rows, *like), outline.offsets, self.paths)

    def rows(self, outline: Outline) -> Rows:
        """Return the rows.

        Args:
            outline: Of the plan of the rank that sent this.
        """
        rows = _rows(self.places, outline.fqns, outline.slots)
        numbers: dict[Offset, int] = {}
        by_slot = [numbers.setdefault(offset, len(numbers)) for offset in outline.offsets]
        numbered = rows.rows.copy()
        numbered["offset"] = np.array(by_slot, np.uint32)[numbered["offset"]]
        return Rows(rows.fqns, tuple(numbers), self.paths, (None,), numbered)


def confirmation_of(rows: Rows, outline: Outline) -> Confirmation | None:
    """Return what is to be sent of rows; None where they are not those of the outline."""
    slots = np.frombuffer(outline.slots, np.int64)
    if not len(rows.rows) or len(rows.rows) != len(slots) or rows.transforms != (None,):
        return None
    order = _places_in(outline, slots, rows)
    if order is None:
        return None
    by_row = slots[order]
    length, path, start = rows.rows["length"], rows.rows["path"], rows.rows["start"]
    # By slot the length of its records; -1 where they differ, as those of objects do.
    lengths = np.full(len(outline.offsets), -1, np.int64)
    lengths[by_row] = length
    lengths[by_row[lengths[by_row] != length]] = -1
    explicit = length[lengths[by_row] < 0]
    follow = bool((_following(path, length) == start).all())
    # Chunks of one slot are mostly written in the order of the plan.
    by_slot = by_row.astype(np.int32)
    is_in_order = bool((_order_of(by_slot, slots) == order).all())
    sent = (
        by_slot.tobytes() if is_in_order else None,
        None if is_in_order else order.tolist(),
        lengths.tolist(),
        explicit.tolist(),
        path.tobytes() if len(rows.paths) > 1 else None,
        None if follow else start.tobytes(),
    )
    return Confirmation(zlib.compress(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL), 6), rows.paths)


def _places_in(outline: Outline, slots: Array, rows: Rows) -> Array | None:
    """Return the position of every row's chunk in an outline; None where it has other chunks."""
    in_order = np.arange(len(slots))
    if rows.fqns == outline.fqns and (rows.rows["fqn"] == in_order).all():
        # Mostly a rank writes one chunk of each key, in the order of the plan.
        offsets_of = {offset: at for at, offset in enumerate(rows.offsets)}
        numbers = np.array([offsets_of.get(one, -1) for one in outline.offsets], np.int64)
        if (numbers[slots] == rows.rows["offset"]).all():
            return in_order
    keys = {fqn: at for at, fqn in enumerate(rows.fqns)}
    offsets = {offset: at for at, offset in enumerate(rows.offsets)}
    key = np.array([keys.get(fqn, -1) for fqn in outline.fqns], np.int64)
    offset = np.array([offsets.get(one, -1) for one in outline.offsets], np.int64)[slots]
    if (key < 0).any() or (offset < 0).any():
        return None
    planned = key * len(offsets) + offset
    written = rows.rows["fqn"] * np.int64(len(offsets)) + rows.rows["offset"]
    sorted_, by_row = np.argsort(planned, kind="stable"), np.argsort(written, kind="stable")
    if (planned[sorted_] != written[by_row]).any() or (np.diff(planned[sorted_]) == 0).any():
        return None
    order = np.empty_like(sorted_)
    order[by_row] = sorted_
    return order


class WriteResults(Sequence[WriteResult]):
    """What one rank wrote: a sequence of torch's ``WriteResult``, in columns.

    Args:
        rows: One per item.
        outline: Returns that of the rank's plan, for a coordinator that has it, too; None to send
            all rows.

    Attributes:
        outline: On the coordinator to be set to that of the plan which the rank got.
    """

    def __init__(self, rows: Rows, outline: Callable[[], Outline] | None = None) -> None:
        self._rows: Rows | None = rows
        self._sent: Confirmation | tuple[bytes, bytes] | None = None
        self.outline = outline

    @property
    def rows(self) -> Rows:
        """The rows; worked out where they were not sent."""
        if self._rows is None:
            if not isinstance(self._sent, Confirmation):
                assert self._sent is not None
                self._rows = Rows.unpacked(*self._sent)
            elif self.outline is None:
                raise RuntimeError("these results were sent without what is in the rank's plan")
            else:
                self._rows = self._sent.rows(self.outline())
        return self._rows

    @property
    def written(self) -> Written:
        """The rows by what they have in common with those of other ranks."""
        if self._rows is None and isinstance(self._sent, Confirmation) and self.outline is not None:
            return self._sent.written(self.outline())
        return written_rows(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._sent is None:
            assert self._rows is not None
            sent = None if self.outline is None else confirmation_of(self._rows, self.outline())
            self._sent = sent or self._rows.packed()
        return _arrived, (self._sent,)

    def __len__(self) -> int:
        return len(self.rows.rows)

    @overload
    def __getitem__(self, index: int) -> WriteResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteResult]: ...
    def __getitem__(self, index: int | slice) -> WriteResult | list[WriteResult]:
        if isinstance(index, slice):
            return [self._result(row) for row in self.rows.rows[index]]
        return self._result(self.rows.rows[index])

    def _result(self, row: Any) -> WriteResult:
        rows, start, length = self.rows, int(row["start"]), int(row["length"])
        index = MetadataIndex(rows.fqns[row["fqn"]], rows.offsets[row["offset"]])
        steps = rows.transforms[row["transforms"]]
        transforms = None if steps is None else list(steps)
        info = StorageInfo(rows.paths[row["path"]], start, length, transforms)
        return WriteResult(index, length, info)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _arrived(sent: Confirmation | tuple[bytes, bytes]) -> WriteResults:
    results = WriteResults.__new__(WriteResults)
    results._rows, results._sent, results.outline = None, sent, None
    return results


def written_by(results: Sequence[WriteResult]) -> Written:
    """Return what a rank wrote by its results, whatever storage writer they are from."""
    if isinstance(results, WriteResults):
        return results.written
    return written_rows(
        rows_of_places(place_of(r.index.fqn, r.index.offset, r.storage_data) for r in results)
    )


def _rows(places: bytes, fqns: tuple[str, ...], slots: bytes) -> Rows:
    """Return rows with the numbers of slots as offsets, and of files as paths, and no lists."""
    in_order, order, lengths, explicit, paths, begins = pickle.loads(zlib.decompress(places))
    numbers = np.frombuffer(slots, np.int64)
    if order is None:
        order = _order_of(np.frombuffer(in_order, np.int32), numbers)
    by_row = numbers[order]
    length = np.array(lengths, np.int64)[by_row]
    length[length < 0] = explicit
    path = np.zeros(len(order), np.uint32)
    if paths is not None:
        path = np.frombuffer(paths, np.uint32)
    held = list(map(fqns.__getitem__, order.tolist() if in_order else order))
    names = dict.fromkeys(held)
    rows = np.zeros(len(order), ROW)
    rows["fqn"] = np.arange(len(held))
    if len(names) < len(held):
        at = dict(zip(names, range(len(names)), strict=True))
        rows["fqn"] = list(map(at.__getitem__, held))
    rows["offset"] = by_row
    rows["path"] = path
    rows["start"] = _following(path, length) if begins is None else np.frombuffer(begins, np.int64)
    rows["length"] = length
    return Rows(tuple(names), (), (), (None,), rows)


def _order_of(by_row: Array, slots: Array) -> Array:
    """Return the plan's position of every row, where the chunks of each slot are in order."""
    if len(by_row) == len(slots) and (by_row == slots).all():
        return np.arange(len(slots))
    order = np.empty(len(by_row), np.int64)
    order[np.argsort(by_row, kind="stable")] = np.argsort(slots, kind="stable")
    return order


def _following(path: Array, length: Array) -> Array:
    """Return where records begin that follow one another in their files."""
    if not path.any():
        return np.cumsum(length) - length
    order = np.argsort(path, kind="stable")
    ends = np.cumsum(length[order])
    begins = ends - length[order]
    is_first = np.diff(path[order].astype(np.int64), prepend=-1) != 0
    # Each file begins at 0.
    begins -= begins[is_first][np.cumsum(is_first) - 1]
    start = np.empty_like(begins)
    start[order] = begins
    return start
