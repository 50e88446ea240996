"""Provenance: which save wrote a checkpoint.

It is stored in ``Metadata.planner_data`` under one reserved key, which torch's readers ignore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcp_placements import __version__

RESERVED_KEY = "dcp_placements"
"""The key in ``Metadata.planner_data``."""

OWN_PREFIX = f"{RESERVED_KEY}."
"""Begins the keys in ``storage_data`` of records beside those of tensors and objects."""

DIGESTS_OF_RANK = "sampled_digests"
"""The key of the digests in the provenance of a rank that saved alone."""

REPLACED = "replaced"
"""The key in the provenance of a rank that saved alone: how often it had saved there before."""

StoredDigests = dict[str, dict[tuple[int, ...] | None, bytes]]
"""FQN to offset (None for an object) to digest."""


def identity(save_id: bytes, *, world_size: int, step: int | None) -> dict[str, Any]:
    """Return the provenance that every checkpoint has.

    Keys: ``save_id``, ``versions``, ``world_size``, and ``step`` where there is one.
    """
    provenance: dict[str, Any] = {
        "save_id": save_id.hex(),
        "versions": {"dcp_placements": __version__, "torch": str(torch.__version__)},
        "world_size": world_size,
    }
    if step is not None:
        provenance["step"] = step
    return provenance


def stored(metadata: Any) -> Mapping[str, Any] | None:
    """Return the provenance of a checkpoint; None where it has none.

    Args:
        metadata: Torch's ``Metadata``, or what has ``planner_data`` as that has.
    """
    data = metadata.planner_data
    provenance = data.get(RESERVED_KEY) if isinstance(data, Mapping) else None
    if isinstance(provenance, Mapping) and "save_id" in provenance:
        return provenance
    return None


def saved_by(metadata: Any) -> str:
    """Return a short text that names the save; empty where nothing tells, or each rank saved alone.

    The metadata that a rank wrote without collectives has an id of its own.
    """
    provenance = stored(metadata)
    if provenance is None or provenance.get("world_size", 1) == 1:
        return ""
    step = f" (step {provenance['step']})" if "step" in provenance else ""
    return f"save {provenance['save_id'][:8]}{step}"


def stored_digest(
    provenance: Mapping[str, Any], fqn: str, offset: Sequence[int] | None
) -> bytes | None:
    """Return the digest of a chunk, or of an object, of a rank that saved alone.

    Args:
        provenance: Of the rank.
        fqn: The key.
        offset: Of the chunk; an object has none.
    """
    at = None if offset is None else tuple(offset)
    digest = provenance.get(DIGESTS_OF_RANK, {}).get(fqn, {}).get(at)
    return digest if isinstance(digest, bytes) else None


def merged_provenance(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the provenance of ranks that each wrote their own; the lowest rank's entries win."""
    merged = dict(parts[0])
    for name in (DIGESTS_OF_RANK, REPLACED):
        merged.pop(name, None)
    for name in ("rules", "row_maps"):
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
