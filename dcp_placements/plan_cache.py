"""The plan of an earlier save, for a save of the same tensors.

A plan is a function of the ranks' tables and coordinates, and a table is named by its content. So
a plan that is found by those cannot be stale: another shape, dtype or layout is another table.
What the storage writer puts into a plan is never kept; another writer finds its own.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements.evidence import Offer, Tables
from dcp_placements.interop import WriteItem
from dcp_placements.kept_places import KeptPlaces
from dcp_placements.naming import Path
from dcp_placements.table import Table
from dcp_placements.world_plan import WorldPlan

MAX_CACHES = 8

Standing = tuple[tuple[tuple[bytes, bytes], ...], bytes, list[WriteItem] | None]
"""What a rank's plan depends on: its tables and coordinates, its rows, and its loose items."""


@dataclass(slots=True)
class PlanCache:
    """What one planner remembers of its last finished save.

    Attributes:
        uid: Names the cache, so that a planner that is pickled into a long-lived process (as
            ``async_save`` in a process does) finds there what its last save left.
        last: This rank's tables of the last save.
        known: Names of the tables that the coordinator keeps.
        places: This rank's places in the last save, where they can be kept.
        expected: Items that this rank was to write.
        resolved: One entry per item that the writer asked the data of.
        tables: Coordinator only: the tables that were sent.
        standings: Coordinator only: what the plan depends on, one per rank.
        plan: Coordinator only: the plan.
        record: Coordinator only: what a checkpoint says of the plan; None if not known yet.
        paths: Coordinator only: where the keys of the plan's tables stand; None if not known yet.
    """

    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    last: list[Table] | None = None
    known: frozenset[bytes] = frozenset()
    places: KeptPlaces | None = None
    expected: int | None = None
    resolved: list[None] = field(default_factory=list)
    tables: Tables = field(default_factory=Tables)
    standings: list[Standing] | None = None
    plan: WorldPlan | None = None
    record: dict[str, Any] | None = None
    paths: dict[str, Path] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return cache_of, (self.uid,)

    def begin(self, tables: list[Table]) -> str | None:
        """Start a save of these tables; return why the last one's plan cannot be reused, if so."""
        why = self._why_unusable(tables)
        if self.expected is None or len(self.resolved) < self.expected:
            self.known = frozenset()
        self.last, self.expected = tables, None
        return why

    def end(self, names: Sequence[bytes], items: int) -> None:
        """Note that planning has ended well and writing begins."""
        self.known = frozenset(names)
        self.expected = items
        self.resolved.clear()

    def keep(self, standings: list[Standing] | None, plan: WorldPlan) -> None:
        """Note the plan of all ranks and what it depends on."""
        if standings != self.standings:
            self.paths = self.record = None
        self.standings, self.plan = standings, plan

    def _why_unusable(self, tables: list[Table]) -> str | None:
        if self.last is None:
            return "no plan yet"
        if self.expected is None or len(self.resolved) < self.expected:
            return "the last save did not finish"
        if len(tables) != len(self.last):
            return "the tensors live on other meshes"
        for table, known in zip(tables, self.last, strict=True):
            if (why := difference(known, table)) is not None:
                return why
        return None


def difference(known: Table, table: Table) -> str | None:
    """Return the first difference between two tables in words; None where they are equal."""
    if known is table:
        return None
    if known.fqns != table.fqns:
        gone = sorted(set(known.fqns) - set(table.fqns))
        new = sorted(set(table.fqns) - set(known.fqns))
        return f"{(new or gone or ['the order of keys'])[0]} is {'new' if new else 'gone or moved'}"
    for entry, fqn in enumerate(table.fqns):
        one, other = known.class_of[entry], table.class_of[entry]
        if min(one, other) < 0:
            if one != other:
                return f"{fqn} is a tensor no longer, or is one now"
            continue
        if known.classes[one] != table.classes[other]:
            return f"{fqn} changed its shape or its layout"
        if known.looks[known.look_of[entry]] != table.looks[table.look_of[entry]]:
            return f"{fqn} changed its dtype"
        if known.paths[known.path_of[entry]] != table.paths[table.path_of[entry]]:
            return f"{fqn} is nested otherwise"
    return None


def standing(offer: Offer) -> Standing:
    """Return what the plan depends on, of what a rank offers."""
    tables = tuple([(told.table_id, told.coordinates) for told in offer.all_tables])
    rows = b"" if offer.picked is None else offer.picked.rows
    return tables, rows, None if offer.loose is None else offer.loose.items


_caches: OrderedDict[str, PlanCache] = OrderedDict()


def cache_of(uid: str) -> PlanCache:
    """Return the cache of that name in this process; the last few used are kept."""
    if uid not in _caches:
        _caches[uid] = PlanCache(uid)
    _caches.move_to_end(uid)
    while len(_caches) > MAX_CACHES:
        _caches.popitem(last=False)
    return _caches[uid]
