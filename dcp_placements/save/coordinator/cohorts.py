"""The local plans of all ranks side by side, as arrays.

Ranks that sent the same key tables and as many boxes of each group are a *cohort*: what they hold
is one integer array, and so are their digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dcp_placements.save.digest_vector import Digests, Slots, may_have_replicas
from dcp_placements.save.key_table import KeyTable, unpacked_table
from dcp_placements.save.local_plan import Ints, LocalPlan, unpacked_ints


@dataclass(slots=True)
class Cohort:
    """Ranks whose plans differ in numbers only.

    Attributes:
        tables: Positions of their tables in ``Cohorts.tables``, in their order.
        plans: Positions of their plans.
        counts: By table and group, boxes of each rank.
        boxes: One row per rank: offsets and sizes, group after group.
        digests: One row per rank, likewise; None where there are none.
        stored: One row per rank and item, 16 bytes as two numbers; None where there are none.
        buckets: As in ``LocalPlan``.
    """

    tables: tuple[int, ...]
    plans: Ints
    counts: list[list[int]]
    boxes: Ints
    digests: Digests | None
    stored: Digests | None
    buckets: int


@dataclass(slots=True)
class Rows:
    """What one cohort holds of a group.

    Attributes:
        cohort: The cohort.
        plans: By row (rank after rank, box after box), the position of the plan.
        boxes: By row, offsets and sizes.
        first: Where the group's boxes begin among all boxes of a rank of the cohort.
        count: Boxes of a rank.
        digests: Columns of the cohort's digests that are the group's, slots by boxes.
        items: Where the group's items, keys by boxes, stand among all items of a rank.
    """

    cohort: Cohort
    plans: Ints
    boxes: Ints
    first: int
    count: int
    digests: slice | None = None
    items: slice = field(default_factory=lambda: slice(0))


@dataclass(slots=True)
class Held:
    """A group of a table, on all ranks that have the table.

    Attributes:
        table: Position in ``Cohorts.tables``.
        group: Number of the group there.
        rows: Cohort by cohort.
    """

    table: int
    group: int
    rows: list[Rows] = field(default_factory=list)


class Cohorts:
    """All local plans, side by side.

    Args:
        plans: One per rank.

    Attributes:
        plans: The same.
        world: Number of plans.
        tables: The different key tables.
        members: By table, positions of the plans that have it, ascending.
    """

    def __init__(self, plans: Sequence[LocalPlan], world: int) -> None:
        self.plans = plans
        self.world = world
        self._numbers: dict[bytes, int] = {}
        numbers = self._numbers
        self.tables: list[KeyTable] = []
        by_tables: dict[tuple[bytes, ...], tuple[int, ...]] = {}
        alike: dict[Any, list[int]] = {}
        for at, plan in enumerate(plans):
            tables = by_tables.get(plan.tables)
            if tables is None:
                for packed in plan.tables:
                    if packed not in numbers:
                        numbers[packed] = len(numbers)
                        self.tables.append(unpacked_table(packed))
                tables = by_tables[plan.tables] = tuple([numbers[p] for p in plan.tables])
            alike.setdefault((tables, len(plan.digests), plan.buckets), []).append(at)
        self.cohorts: list[Cohort] = []
        for (tables, _, buckets), members in alike.items():
            self.cohorts += self._cohorts(tables, members, buckets)
        having: list[list[Ints]] = [[] for _ in self.tables]
        for cohort in self.cohorts:
            for table in cohort.tables:
                having[table].append(cohort.plans)
        self.members: list[Ints] = [np.sort(np.concatenate(found)) for found in having]

    def tables_of(self, plan: LocalPlan) -> list[KeyTable]:
        """Return the key tables of a plan, unpacked."""
        return [self.tables[self._numbers[packed]] for packed in plan.tables]

    def _cohorts(self, tables: tuple[int, ...], plans: list[int], buckets: int) -> Iterator[Cohort]:
        groups = [len(self.tables[table].groups) for table in tables]
        width = sum(groups)
        by_counts: dict[bytes, list[tuple[int, Ints]]] = {}
        for at in plans:
            flat = unpacked_ints(self.plans[at].boxes)
            by_counts.setdefault(flat[:width].tobytes(), []).append((at, flat[width:]))
        for counts, found in by_counts.items():
            flat_counts: list[int] = np.frombuffer(counts, np.int64).tolist()
            ends = np.cumsum(groups).tolist()
            split = [flat_counts[end - n : end] for end, n in zip(ends, groups, strict=True)]
            raw = [self.plans[at].digests for at, _ in found]
            digests = None
            if raw[0]:
                digests = np.frombuffer(b"".join(raw), np.uint64).reshape(len(found), -1)
            stored = None
            if self.plans[found[0][0]].stored_digests:
                joined = b"".join([self.plans[at].stored_digests for at, _ in found])
                stored = np.frombuffer(joined, np.uint64).reshape(len(found), -1, 2)
            yield Cohort(
                tables,
                np.array([at for at, _ in found], np.int64),
                split,
                np.stack([boxes for _, boxes in found]),
                digests,
                stored,
                buckets,
            )

    @cached_property
    def groups(self) -> list[list[Held]]:
        """By table and group, what all ranks hold."""
        found = [
            [Held(at, group) for group in range(len(table.groups))]
            for at, table in enumerate(self.tables)
        ]
        for cohort in self.cohorts:
            column = first = at_digest = at_item = 0
            for table, counts in zip(cohort.tables, cohort.counts, strict=True):
                key_table = self.tables[table]
                for group, count in enumerate(counts):
                    width = 2 * len(key_table.groups[group].shape)
                    stop = column + count * width
                    boxes = cohort.boxes[:, column:stop].reshape(len(cohort.plans) * count, width)
                    rows = Rows(cohort, np.repeat(cohort.plans, count), boxes, first, count)
                    if (
                        count
                        and cohort.digests is not None
                        and may_have_replicas(key_table.groups[group], self.world)
                    ):
                        nbr = self.slots(table, group, cohort.buckets).count * count
                        rows.digests = slice(at_digest, at_digest + nbr)
                        at_digest += nbr
                    rows.items = slice(at_item, at_item + key_table.sizes[group] * count)
                    found[table][group].rows.append(rows)
                    column, first, at_item = stop, first + count, rows.items.stop
        return found

    def slots(self, table: int, group: int, buckets: int) -> Slots:
        """Return which keys of a group have digests of their own."""
        key = table, group, buckets
        slots = self._slots.get(key)
        if slots is None:
            numbered = self.tables[table].numbered_of(group)
            slots = self._slots[key] = Slots(numbered, buckets)
        return slots

    @cached_property
    def _slots(self) -> dict[tuple[int, int, int], Slots]:
        return {}
