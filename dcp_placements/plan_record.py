"""What a checkpoint says of the plan that it was saved by, for the first save after a restart.

A plan is a function of the ranks' tables and coordinates, so their hash stands for it. The tables
stand beside it, as plain values in a kilobyte or two, so that what has changed can be said. The
plan itself is made anew, and the ranks send their tables: that takes less than a second for
thousands of ranks, and works where some of them resumed from another checkpoint.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from dcp_placements.errors import PlacementError
from dcp_placements.evidence import Offer, Tables
from dcp_placements.interop import Metadata
from dcp_placements.plan_cache import Standing, difference
from dcp_placements.provenance import RESERVED_KEY
from dcp_placements.table import table_id, table_of

PLAN_KEY = "plan"
"""Under the reserved key in ``Metadata.planner_data``."""

MAX_NBYTES = 64 << 10
"""Tables that take more, compressed, are left out; then it is not said what has changed."""

_MAX_COLUMN_NBYTES = 256 << 20


def plan_record(
    offers: Sequence[Offer], tables: Tables, standings: Sequence[Standing]
) -> dict[str, Any]:
    """Return what a plan was made from: its hash, the number of ranks, and the tables."""
    names = dict.fromkeys(told.table_id for offer in offers for told in offer.all_tables)
    told = tuple([_squeezed(tables[name].told()) for name in names])
    kept = len(repr(told)) <= MAX_NBYTES
    return {
        "made_from": _hash_of(standings),
        "ranks": len(offers),
        "tables": told if kept else None,
    }


def signed(record: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return the record of one save: with an id of its own."""
    return {**record, "id": uuid.uuid4().hex, "step": step}


def record_of(loaded: Any) -> Mapping[str, Any] | None:
    """Return what the checkpoint that a planner has loaded says of its plan; None for nothing.

    Raises:
        PlacementError: A planner that has not loaded.
    """
    metadata = getattr(loaded, "metadata", None)
    if not isinstance(metadata, Metadata):
        raise PlacementError(
            "after= takes a load planner that has loaded a checkpoint, and this one has not\n"
            "    way out:     make the save planner after dcp.load(..., planner=load_planner)"
        )
    data = metadata.planner_data
    own = data.get(RESERVED_KEY) if isinstance(data, Mapping) else None
    found = own.get(PLAN_KEY) if isinstance(own, Mapping) else None
    return found if isinstance(found, Mapping) else None


def said_of(
    record: Mapping[str, Any],
    offers: Sequence[Offer],
    tables: Tables,
    standings: Sequence[Standing],
) -> str:
    """Return how a plan differs from a recorded one, in words."""
    if record.get("made_from") == _hash_of(standings):
        step = record.get("step")
        at = "" if step is None else f", step {step}"
        return f"as in save {str(record.get('id'))[:8]}{at}"
    return f"made anew: {_why(record, offers, tables)}"


def _why(record: Mapping[str, Any], offers: Sequence[Offer], tables: Tables) -> str:
    ranks = record.get("ranks")
    if ranks != len(offers):
        return f"{len(offers)} ranks, and {ranks} saved what was loaded"
    names = dict.fromkeys(told.table_id for offer in offers for told in offer.all_tables)
    try:
        known = [table_of(_loosened(told)) for told in record["tables"] or ()]
    except Exception:  # written by another version, or damaged: no more than a line of the log
        known = []
    if not known:
        return "the tensors are other ones, or lie otherwise"
    if len(known) != len(names):
        return "the tensors live on other meshes"
    for one, name in zip(known, names, strict=True):
        if (why := difference(one, tables[name])) is not None:
            return why
        if table_id(one.packed()) != name:
            return "rules have other names"
    return "the ranks hold other parts"


def _hash_of(standings: Sequence[Standing]) -> bytes:
    hasher = xxhash.xxh3_128()
    for told in standings:
        hasher.update(repr(told).encode())
    return hasher.digest()


def _squeezed(value: Any) -> Any:
    """Return a value with the bytes in its tuples compressed."""
    if isinstance(value, bytes):
        return zlib.compress(value, 9)
    return tuple(map(_squeezed, value)) if type(value) is tuple else value


def _loosened(value: Any) -> Any:
    if isinstance(value, bytes):
        return zlib.decompressobj().decompress(value, _MAX_COLUMN_NBYTES)
    return tuple(map(_loosened, value)) if type(value) is tuple else value
