"""Runs: records of small tensors of one kind that follow one another in a file.

Where a planner hands over its reads by group, neither items nor records are made for each of the
keys: where the records are is looked up in arrays, and the elements of all go into the tensors in
one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dcp_placements._torch import StorageInfo
from dcp_placements.storage.index.columns import Ints
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.protocols import ReadGroup
from dcp_placements.storage.record_contents import Record
from dcp_placements.storage.records.rows import fill_each, values_of
from dcp_placements.storage.tensor_record import TensorRecord

SHORTEST = 4
"""Records in a run."""

LONGEST_NBYTES = 64 << 10
"""Of a record in a run."""


@dataclass(frozen=True, slots=True)
class Run:
    """Records of one length without gaps between them, each wanted whole.

    Attributes:
        start: Where in the file the first begins.
        length: Of each.
        group: What is read.
        keys: For each record, position of its key in the group.
    """

    start: int
    length: int
    group: ReadGroup
    keys: Ints

    @property
    def end(self) -> int:
        """Where the last of them ends in the file."""
        return self.start + self.length * len(self.keys)

    def part(self, first: int, stop: int) -> Run:
        """Return some of its records."""
        start = self.start + first * self.length
        return Run(start, self.length, self.group, self.keys[first:stop])

    def records(self, path: str) -> list[Record]:
        """Return the records one by one."""
        starts = range(self.start, self.end, self.length)
        places = zip(starts, self.keys.tolist(), strict=True)
        return [
            Record(StorageInfo(path, at, self.length, None), [self.group.item(key)])
            for at, key in places
        ]


def runs_of(group: ReadGroup, table: StorageTable) -> Iterator[tuple[str, Run]]:
    """Yield files with the runs in which keys of a group are there; other keys are left out."""
    index = group.first.storage_index
    for path, keys, rows in table.rows_alike(group.fqns, index.offset, index.index):
        order = np.argsort(rows[:, 0], kind="stable")
        starts, lengths = rows[order].T
        breaks = (starts[1:] != starts[:-1] + lengths[:-1]) | (lengths[1:] != lengths[:-1])
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(starts)]
        for first, stop in pairwise(bounds):
            length = int(lengths[first])
            # A length of 0 is damage, which is named where the records are read one by one.
            is_short = 0 < length <= LONGEST_NBYTES
            if stop - first >= SHORTEST and is_short:
                yield path, Run(int(starts[first]), length, group, keys[order[first:stop]])


def fill(run: Run, tensor: TensorRecord, held: bytearray) -> bool:
    """Put the elements of records into the tensors; False, and nothing, where they do not fit.

    Args:
        run: The records.
        tensor: Where the elements of the first are.
        held: Begins with their bytes.
    """
    head, length = held[: tensor.start], run.length
    targets = [run.group.tensors[key] for key in run.keys.tolist()]
    rows = np.frombuffer(held, np.uint8, length * len(targets)).reshape(-1, length)
    return (
        tensor.shape == tuple(run.group.first.lengths)
        and all([held.startswith(head, at) for at in range(0, rows.size, length)])
        and fill_each(targets, values_of(rows, tensor))
    )
