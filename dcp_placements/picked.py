"""Rows that a rank names itself: of an ``IndexShard``, or of a stack of experts.

All else of such a tensor is a layout class like any other. So a rank tells of its rows beside its
coordinate, once for all tensors of which it has the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dcp_placements.binding import Binding
from dcp_placements.layout import Pick

Rows = tuple[int, ...]
"""Rows of the checkpoint's tensor, each once."""


@dataclass(slots=True)
class RowLists:
    """The rows that a rank has, or writes, of each key of a table.

    Attributes:
        lists: The lists that occur.
        list_of: By entry of the table, position in ``lists``.
    """

    lists: list[Rows] = field(default_factory=list)
    list_of: list[int] = field(default_factory=list)

    def of(self, entry: int) -> Rows:
        """Return the rows of one key."""
        return self.lists[self.list_of[entry]]

    def packed(self) -> bytes:
        """Return them as they travel."""
        told = [len(self.lists)]
        for rows in self.lists:
            told += [len(rows), *rows]
        return zlib.compress(np.asarray(told + self.list_of, dtype="<u4").tobytes(), 1)


def unpacked_rows(packed: bytes) -> RowLists:
    """Return the lists that were packed."""
    told: list[int] = np.frombuffer(zlib.decompress(packed), dtype="<u4").tolist()
    position = 1
    lists = []
    for _ in range(told[0]):
        stop = position + 1 + told[position]
        lists.append(tuple(told[position + 1 : stop]))
        position = stop
    return RowLists(lists, told[position:])


def picked_rows(binding: Binding) -> tuple[int, Rows] | None:
    """Return the dim whose rows a rank names, and those that it has, in the order of their chunks.

    None where rows are named of no dim or of several, or where a chunk is more than a row.
    """
    layout = binding.layout
    dims = {cut.dim for cut in binding.sharding.cuts if isinstance(cut, Pick)}
    if len(dims) != 1 or 0 in layout.global_shape:
        return None
    (dim,) = dims
    size = layout.global_shape[dim]
    held = [(start, stop) for start, stop in layout.intervals[dim] if start < size]
    if any(stop - start != 1 for start, stop in held):
        return None
    return dim, _once([start for start, _ in held])


def _once(rows: Sequence[int]) -> Rows:
    """Return rows each where it comes last, as chunks that a rank has twice are written."""
    return tuple(reversed(dict.fromkeys(reversed(rows))))
