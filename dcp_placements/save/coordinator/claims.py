"""What the ranks claim of one key: the material of most faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements.layout.sharding import Box
from dcp_placements.save.coordinator.cohorts import Cohorts
from dcp_placements.save.coordinator.contents import own_digests
from dcp_placements.save.coordinator.pieces import Piece
from dcp_placements.save.key_table import Group

Plans = list[int]
"""Positions of local plans."""


@dataclass(slots=True)
class Claims:
    """What the ranks claim of one key.

    Attributes:
        fqn: The key.
        groups: The plans that have it in each group.
        boxes: The plans that hold each box, with the digest of what they hold; 0 for none.
    """

    fqn: str
    groups: dict[Group, Plans] = field(default_factory=dict)
    boxes: dict[Box, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def plans(self) -> Plans:
        """The plans that have the key."""
        return sorted({plan for plans in self.groups.values() for plan in plans})

    def by(self, attribute: str) -> dict[Any, Plans]:
        """Return the plans by one attribute of their groups."""
        plans_by: dict[Any, Plans] = {}
        for group, plans in self.groups.items():
            plans_by.setdefault(getattr(group, attribute), []).extend(plans)
        return {value: sorted(plans) for value, plans in plans_by.items()}


def claims_of(cohorts: Cohorts, piece: Piece, position: int) -> Claims:
    """Return what the ranks claim of one key of a piece."""
    claims = Claims(piece.fqns[position])
    for source in piece.sources:
        claims.groups.setdefault(source.group, []).extend(cohorts.members[source.table].tolist())
    # Row by row: tables may disagree on the number of dims.
    rows = [row for held in piece.rows for row in held.boxes.tolist()]
    digests = own_digests(piece, [position])[:, 0].tolist()
    for plan, row, digest in zip(piece.plans.tolist(), rows, digests, strict=True):
        ndim = len(row) // 2
        box = Box(tuple(row[:ndim]), tuple(row[ndim:]))
        claims.boxes.setdefault(box, []).append((plan, digest))
    return claims


def plans_by_digest(held: Sequence[tuple[int, int]]) -> dict[int, Plans]:
    """Return the plans by the digest of what they hold, where several plans hold something."""
    plans_by: dict[int, Plans] = {}
    for plan, digest in held if len(held) > 1 else ():
        if digest:
            plans_by.setdefault(digest, []).append(plan)
    return plans_by
