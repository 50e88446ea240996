"""The local plans of all ranks side by side, as arrays.

Ranks that sent the same key tables and as many boxes of each group are a *cohort*: what they hold
is one integer array, and so are their digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np

from dcp_placements.save.digest_folding import Digests, Slots, may_have_replicas
from dcp_placements.save.key_table import KeyTable, unpacked_table
from dcp_placements.save.local_plan import Holding, LocalPlan, sent_holding, unpacked_boxes
from dcp_placements.save.packing import Ints, unpacked_rows


@dataclass(frozen=True, slots=True)
class Cohort:
    """Ranks whose plans differ in numbers only.

    Attributes:
        number: Position in ``Cohorts.cohorts``.
        tables: Positions of their tables in ``Cohorts.tables``, in their order.
        plans: Positions of their plans, ascending.
    """

    number: int
    tables: tuple[int, ...]
    plans: Ints


@dataclass(slots=True)
class Rows:
    """What one cohort holds of a group: a row per rank and box.

    Attributes:
        cohort: Number of the cohort.
        plans: By row, the position of the plan.
        boxes: By row, offsets and sizes.
        slots: Which digests a row has; None where it has none.
        digests: By row and slot.
    """

    cohort: int
    plans: Ints
    boxes: Ints
    slots: Slots | None = None
    digests: Digests = field(default_factory=lambda: np.zeros((0, 0), np.uint64))


class Cohorts:
    """All local plans, side by side.

    Args:
        plans: One per rank.
        world: Number of ranks that there are.
        own: This rank's key tables, by their packed form.

    Attributes:
        plans: The same.
        world: The same.
        tables: The different key tables.
        cohorts: The cohorts.
        rows: By table and group, what each cohort holds.
        members: By table, positions of the plans that have it, ascending.
    """

    def __init__(
        self,
        plans: Sequence[LocalPlan],
        world: int,
        own: Mapping[bytes, KeyTable] = MappingProxyType({}),
    ) -> None:
        self.plans = plans
        self.world = world
        self.tables: list[KeyTable] = []
        self.cohorts: list[Cohort] = []
        self.rows: list[list[list[Rows]]] = []
        self._own = own
        self._numbers: dict[bytes, int] = {}
        self._slots_of = cache(self._slots)
        self._unpacked_boxes = cache(unpacked_boxes)
        alike: dict[tuple[tuple[bytes, ...], str, bool], list[int]] = {}
        for at, plan in enumerate(plans):
            alike.setdefault((plan.tables, plan.digest_kind, plan.is_folded), []).append(at)
        for (packed_tables, _, is_folded), members in alike.items():
            tables = tuple([self._number(packed) for packed in packed_tables])
            self._add(tables, members, is_folded)
        having: list[list[Ints]] = [[] for _ in self.tables]
        for cohort in self.cohorts:
            for table in cohort.tables:
                having[table].append(cohort.plans)
        self.members: list[Ints] = [np.sort(np.concatenate(parts)) for parts in having]

    def tables_of(self, plan: LocalPlan) -> list[KeyTable]:
        """Return the key tables of a plan, unpacked."""
        return [self.tables[self._numbers[packed]] for packed in plan.tables]

    def holding(self, plan: LocalPlan) -> Holding:
        """Return what the rank of a plan holds; replicas sent the same bytes of boxes."""
        tables = self.tables_of(plan)
        dims = tuple([len(group.shape) for table in tables for group in table.groups])
        return sent_holding(tables, self._unpacked_boxes(plan.boxes, dims))

    def _number(self, packed: bytes) -> int:
        """Return the position of a table, unpacking it where it is new."""
        number = self._numbers.setdefault(packed, len(self.tables))
        if number == len(self.tables):
            self.tables.append(self._own.get(packed) or unpacked_table(packed))
            self.rows.append([[] for _ in self.tables[-1].groups])
        return number

    def _add(self, tables: tuple[int, ...], members: list[int], is_folded: bool) -> None:
        """Make cohorts of plans with the same tables."""
        width = sum(len(self.tables[table].groups) for table in tables)
        # By the number of boxes of each group: positions of plans, and their boxes.
        alike: dict[bytes, list[tuple[Ints, Ints]]] = {}
        for at, table in unpacked_rows([self.plans[member].boxes for member in members]):
            plans = np.array([members[position] for position in at], np.int64)
            by_counts: dict[bytes, list[int]] = {}
            for row, counts in enumerate(table[:, :width]):
                by_counts.setdefault(counts.tobytes(), []).append(row)
            for counts, rows in by_counts.items():
                alike.setdefault(counts, []).append((plans[rows], table[rows, width:]))
        for counts, parts in alike.items():
            plans, boxes = map(np.concatenate, zip(*parts, strict=True))
            order = np.argsort(plans)
            cohort = Cohort(len(self.cohorts), tables, plans[order])
            self.cohorts.append(cohort)
            per_group: list[int] = np.frombuffer(counts, np.int64).tolist()
            self._add_rows(cohort, per_group, boxes[order], is_folded)

    def _add_rows(self, cohort: Cohort, counts: list[int], boxes: Ints, is_folded: bool) -> None:
        """Append what a cohort holds to the rows of each of its groups."""
        plans = [self.plans[at] for at in cohort.plans.tolist()]
        digests = _side_by_side([plan.digests for plan in plans])
        column = slot = 0
        places = [
            (table, number, group)
            for table in cohort.tables
            for number, group in enumerate(self.tables[table].groups)
        ]
        for (table, number, group), count in zip(places, counts, strict=True):
            width = 2 * len(group.shape)
            held = boxes[:, column : column + count * width]
            column += count * width
            of_row = cohort.plans if count == 1 else np.repeat(cohort.plans, count)
            rows = Rows(cohort.number, of_row, held.reshape(len(of_row), width))
            if count and digests is not None and may_have_replicas(group, self.world):
                slots = rows.slots = self._slots_of(table, number, is_folded)
                mine = digests[:, slot : slot + slots.count * count]
                mine = mine.reshape(-1, slots.count, count).transpose(0, 2, 1)
                rows.digests = mine.reshape(-1, slots.count)
                slot += slots.count * count
            self.rows[table][number].append(rows)

    def _slots(self, table: int, group: int, is_folded: bool) -> Slots:
        return Slots(self.tables[table].keys(group), is_folded)


def _side_by_side(packed: list[bytes]) -> Digests | None:
    """Return digests of several ranks, a row per rank; None where there are none."""
    if not packed[0]:
        return None
    return np.frombuffer(b"".join(packed), np.uint64).reshape(len(packed), -1)
