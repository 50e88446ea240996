"""The plan of an earlier save, for a save of the same tensors.

A plan is reused when the items that it was made of are equal: names, kinds, shapes, dtypes and
boxes. What the storage writer puts into a plan is never kept, so another writer finds its own.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements.interop import Metadata, SavePlan, WriteItem

MAX_CACHES = 8


@dataclass(slots=True)
class PlanCache:
    """What one planner remembers of its last finished save.

    Attributes:
        uid: Names the cache, so that a planner that is pickled into a long-lived process (as
            ``async_save`` in a process does) finds there what its last save left.
        local_items: What this rank offered.
        mappings: Where its keys stood in the nested state dict.
        final_items: What this rank wrote.
        resolved: One entry per item that the writer asked the data of.
        finished: Whether the plan was finished, so that writing began.
        generation: The global plan that all this belongs to.
        all_plans: Coordinator only: what all ranks offered, with their evidence.
        global_plan: Coordinator only: what they were let write.
        metadata: Coordinator only.
    """

    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    local_items: Sequence[WriteItem] | None = None
    mappings: Mapping[str, Any] | None = None
    final_items: list[WriteItem] | None = None
    resolved: list[None] = field(default_factory=list)
    finished: bool = False
    generation: str | None = None
    all_plans: list[SavePlan] | None = None
    global_plan: list[SavePlan] | None = None
    metadata: Metadata | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return cache_of, (self.uid,)

    def why_unusable(self, items: Sequence[WriteItem], mappings: Mapping[str, Any]) -> str | None:
        """Return why these items cannot reuse the plan; None when they can."""
        if self.local_items is None:
            return "no plan yet"
        if not self.finished or len(self.resolved) < len(self.final_items or ()):
            return "the last save did not finish"
        if len(items) != len(self.local_items):
            return f"{len(items)} items instead of {len(self.local_items)}"
        for item, known in zip(items, self.local_items, strict=True):
            if item != known:
                return f"{item.index.fqn} changed"
        return None if mappings == self.mappings else "the nesting of the state dict changed"

    def forget(self) -> None:
        """Drop what this rank remembers of its own; the coordinator's part is kept by content."""
        self.local_items = self.mappings = self.final_items = None
        self.finished = False


_caches: OrderedDict[str, PlanCache] = OrderedDict()


def cache_of(uid: str) -> PlanCache:
    """Return the cache of that name in this process; the last few used are kept."""
    if uid not in _caches:
        _caches[uid] = PlanCache(uid)
    _caches.move_to_end(uid)
    while len(_caches) > MAX_CACHES:
        _caches.popitem(last=False)
    return _caches[uid]
