"""What a checkpoint says of its own making, and the digests of its chunks.

It stands in ``Metadata.planner_data`` under one reserved key, where torch's readers look up their
own keys only and ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Return what every checkpoint says of its making.

    Keys: ``save_id``, ``versions``, ``world_size``, and ``step`` where there is one.
    """
    told: dict[str, Any] = {
        "save_id": save_id.hex(),
        "versions": {"dcp_placements": _own_version(), "torch": str(torch.__version__)},
        "world_size": world_size,
    }
    if step is not None:
        told["step"] = step
    return told


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


@cache
def _own_version() -> str:
    try:
        return version("dcp-placements")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
