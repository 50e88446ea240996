"""Provenance: which save wrote a checkpoint, and the digests of its chunks.

It is stored in ``Metadata.planner_data`` under one reserved key, which torch's readers ignore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dcp_placements._torch import Metadata, MetadataIndex

RESERVED_KEY = "dcp_placements"
"""The key in ``Metadata.planner_data``."""

StoredDigests = dict[str, dict[tuple[int, ...] | None, bytes]]
"""FQN to offset (None for an object) to digest."""


def identity(save_id: bytes, *, world_size: int, step: int | None) -> dict[str, Any]:
    """Return the provenance that every checkpoint has.

    Keys: ``save_id``, ``versions``, ``world_size``, and ``step`` where there is one.
    """
    provenance: dict[str, Any] = {
        "save_id": save_id.hex(),
        "versions": {"dcp_placements": own_version(), "torch": str(torch.__version__)},
        "world_size": world_size,
    }
    if step is not None:
        provenance["step"] = step
    return provenance


def stored(metadata: Metadata) -> Mapping[str, Any] | None:
    """Return the provenance of a checkpoint; None where it has none."""
    data = metadata.planner_data
    provenance = data.get(RESERVED_KEY) if isinstance(data, Mapping) else None
    if isinstance(provenance, Mapping) and "save_id" in provenance:
        return provenance
    return None


def saved_by(metadata: Metadata) -> str:
    """Return a short text that names the save; empty where nothing tells, or each rank saved alone.

    The metadata that a rank wrote without collectives has an id of its own.
    """
    provenance = stored(metadata)
    if provenance is None or provenance.get("world_size", 1) == 1:
        return ""
    step = f" (step {provenance['step']})" if "step" in provenance else ""
    return f"save {provenance['save_id'][:8]}{step}"


def stored_digest(provenance: Mapping[str, Any], index: MetadataIndex) -> bytes | None:
    """Return the digest of one stored chunk or object."""
    offset = None if index.offset is None else tuple(index.offset)
    digest = provenance.get("digests", {}).get(index.fqn, {}).get(offset)
    return digest if isinstance(digest, bytes) else None


def merged_provenance(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the provenance of ranks that each wrote their own; the lowest rank's entries win."""
    merged = dict(parts[0])
    for name in ("rules", "row_maps", "digests"):
        joined: dict[str, Any] = {}
        for part in parts:
            for fqn, value in part.get(name, {}).items():
                if isinstance(value, Mapping):
                    joined[fqn] = {**value, **joined.get(fqn, {})}
                else:
                    joined.setdefault(fqn, value)
        if joined or name in merged:
            merged[name] = joined
    merged["world_size"] = max(len(parts), merged.get("world_size", 1))
    return merged


@cache
def own_version() -> str:
    """Return the installed version of this package; ``"unknown"`` from a source tree."""
    try:
        return version("dcp-placements")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
