"""The ranks that have one table, and which part of each tensor each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dcp_placements.evidence import Ints, TableOffer, unpacked_ints
from dcp_placements.layout import Box
from dcp_placements.ownership import set_in_bitmap
from dcp_placements.table import OBJECT, Table, boxes


@dataclass(slots=True)
class Members:
    """The ranks that have one table.

    Attributes:
        table: The table.
        plans: Their plans' positions, ascending.
        offers: What each says of the table.
        cells: By class, which part each holds; parts that are equal boxes have equal numbers.
        counts: By class, how many hold each part.
        coordinates: One row per rank: where it stands along the axes of each class.
        replicas: By class, the holders that every part has.
        slots: By class, each one's number among the holders of its part. Objects stand last in
            this and in ``replicas``: all of them hold all.
        elsewhere: Bitmap of the entries that are not written by way of this table.
    """

    table: Table
    plans: list[int]
    offers: list[TableOffer]
    coordinates: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    cells: list[Ints] = field(default_factory=list)
    counts: list[Ints] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    slots: list[Ints] = field(default_factory=list)
    elsewhere: bytearray = field(default_factory=bytearray)

    def standing(self, at: int) -> list[int]:
        """Return one rank's position along the axes of each class."""
        standing: list[int] = self.coordinates[at].tolist()
        return standing

    def boxes(self, index: int, at: int) -> tuple[Box, ...]:
        """Return the boxes that one rank has of each tensor of a class."""
        classes = self.table.classes
        start = sum(len(known.sharding.axis_sizes) for known in classes[:index])
        stop = start + len(classes[index].sharding.axis_sizes)
        return boxes(classes[index], self.standing(at)[start:stop])

    def drop(self, entry: int) -> None:
        """Note that an entry is not written by way of this table."""
        if not self.elsewhere:
            self.elsewhere = bytearray((len(self.table.fqns) + 7) // 8)
        set_in_bitmap(self.elsewhere, entry)

    def cells_of(self, index: int) -> list[int]:
        """Return which part of a class each rank holds; of an object each holds the one."""
        return [0] * len(self.plans) if index == OBJECT else self.cells[index].tolist()

    def stand(self) -> None:
        """Work out who of the ranks holds which part."""
        count = len(self.plans)
        coordinates = self.coordinates = np.stack(
            [unpacked_ints(told.coordinates) for told in self.offers]
        )
        start = 0
        for known in self.table.classes:
            sizes = known.sharding.axis_sizes
            cell = np.zeros(count, dtype=np.int64)
            for axis in known.cut_axes:
                cell = cell * sizes[axis] + coordinates[:, start + axis]
            start += len(sizes)
            holders = np.bincount(cell, minlength=known.cells)
            self.cells.append(cell)
            self.counts.append(holders)
            self.replicas.append(int(holders[holders > 0].min()))
            self.slots.append(_ordinals(cell))
        self.replicas.append(count)
        self.slots.append(np.arange(count))


def _ordinals(cell: Ints) -> Ints:
    """Return each one's number among those of its cell, in order."""
    order = np.argsort(cell, kind="stable")
    ordered = cell[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ordinals = np.arange(len(cell)) - np.repeat(begins, np.diff(np.r_[begins, len(cell)]))
    slots = np.empty_like(ordinals)
    slots[order] = ordinals
    return slots
