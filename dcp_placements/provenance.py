"""What a checkpoint says of its own making, and the digests of its chunks.

It stands in ``Metadata.planner_data`` under one reserved key, where torch's readers look up their
own keys only and ignore it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dcp_placements.evidence import Evidence
from dcp_placements.interop import Metadata, MetadataIndex, SavePlan

RESERVED_KEY = "dcp_placements"
"""The key in ``Metadata.planner_data``."""


def provenance(
    evidence: Sequence[Evidence], *, options: Mapping[str, Any], step: int | None
) -> dict[str, Any]:
    """Return who wrote a checkpoint, how: plain values only.

    Keys: ``save_id``, ``step``, ``versions``, ``world_size``, ``axes`` (sizes by name), ``rules``
    (rule by FQN), ``options``, ``row_maps`` (FQN to rank to the rows that an ``IndexShard`` names).
    """
    rules: dict[str, str] = {}
    row_maps: dict[str, dict[int, tuple[int, ...]]] = {}
    for told in evidence:
        rules.update(told.rules_of)
        for fqn, rows in told.row_maps.items():
            row_maps.setdefault(fqn, {})[told.rank] = rows
    return {
        "save_id": uuid.uuid4().hex,
        "step": step,
        "versions": {"dcp_placements": _own_version(), "torch": torch.__version__},
        "world_size": len(evidence),
        "axes": {n: size for told in evidence for n, (_, size) in told.axes.items()},
        "rules": rules,
        "options": dict(options),
        "row_maps": row_maps,
    }


def written_digests(
    offered: Sequence[SavePlan], owned: Sequence[SavePlan], evidence: Sequence[Evidence]
) -> dict[str, dict[tuple[int, ...] | None, bytes]]:
    """Return the digests of what is written: FQN to offset (None for an object) to digest."""
    found: dict[str, dict[tuple[int, ...] | None, bytes]] = {}
    for plan, kept, told in zip(offered, owned, evidence, strict=True):
        wanted = {item.index for item in kept.items}
        for item, digest in zip(plan.items, told.stored_digests, strict=True):
            if item.index in wanted and digest is not None:
                found.setdefault(item.index.fqn, {})[_offset(item.index)] = digest
    return found


def stored(metadata: Metadata) -> Mapping[str, Any] | None:
    """Return what a checkpoint says of its making; None where it says nothing."""
    data = metadata.planner_data
    found = data.get(RESERVED_KEY) if isinstance(data, Mapping) else None
    return found if isinstance(found, Mapping) and "save_id" in found else None


def stored_digest(told: Mapping[str, Any], index: MetadataIndex) -> bytes | None:
    """Return the digest of one stored chunk or object."""
    digest = told.get("digests", {}).get(index.fqn, {}).get(_offset(index))
    return digest if isinstance(digest, bytes) else None


def _offset(index: MetadataIndex) -> tuple[int, ...] | None:
    return None if index.offset is None else tuple(index.offset)


def _own_version() -> str:
    try:
        return version("dcp-placements")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
