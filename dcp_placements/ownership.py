"""Who writes what several ranks hold.

Small tensors and objects go to the lowest rank that holds them, so that a load finds them in one
file; big ones to whichever of their holders has least to write. Sizes are those of the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dcp_placements.agreement import nbytes_of
from dcp_placements.interop import MetadataIndex, SavePlan

SMALL_NBYTES = 1 << 20
"""Replicated items below this size stay together in one file."""


def drop_replicas(plans: Sequence[SavePlan], *, lowest_rank: bool = False) -> list[SavePlan]:
    """Return the plans with every item on exactly one of its holders.

    Args:
        plans: One per rank; items of equal key and offset must be equal boxes.
        lowest_rank: Leave every replica to its lowest rank (``dedup_save_to_lowest_rank``).
    """
    holders: dict[MetadataIndex, list[int]] = {}
    for index, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(index)
    load = [0] * len(plans)
    shared: list[tuple[int, MetadataIndex]] = []
    owner: dict[MetadataIndex, int] = {}
    for plan in plans:
        for item in plan.items:
            held_by = holders[item.index]
            if item.index in owner:
                continue
            nbytes = nbytes_of(item)
            owner[item.index] = held_by[0]
            if len(held_by) == 1 or lowest_rank or nbytes < SMALL_NBYTES:
                load[held_by[0]] += nbytes
            else:
                shared.append((nbytes, item.index))
    shared.sort(key=lambda entry: -entry[0])
    for nbytes, item_index in shared:
        chosen = min(holders[item_index], key=lambda rank: load[rank])
        owner[item_index] = chosen
        load[chosen] += nbytes
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if owner[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
