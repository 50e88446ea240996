"""What a checkpoint says of its own making, and the digests of its chunks.

It stands in ``Metadata.planner_data`` under one reserved key, where torch's readers look up their
own keys only and ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dcp_placements.digests import FULL_NBYTES
from dcp_placements.evidence import Answer, Offer, Tables, unpacked_ints
from dcp_placements.interop import Metadata, MetadataIndex
from dcp_placements.items import PickedItems, TableItems
from dcp_placements.ownership import owned_entries
from dcp_placements.picked import unpacked_rows

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


def provenance(
    offers: Sequence[Offer], tables: Tables, *, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return how a checkpoint was saved, beside its identity: plain values only.

    Keys: ``axes`` (sizes by name), ``rules`` (rule by FQN), ``options``, ``row_maps`` (FQN to rank
    to the rows that it names as its own).
    """
    rules: dict[str, str] = {}
    row_maps: dict[str, dict[int, tuple[int, ...]]] = {}
    for name in {told.table_id for offer in offers for told in offer.all_tables}:
        table = tables[name]
        for fqn, rule in zip(table.fqns, table.rule_of, strict=True):
            if rule >= 0:
                rules[fqn] = table.rules[rule]
    for offer in offers:
        if offer.picked is not None:
            rows = unpacked_rows(offer.picked.rows)
            for entry, fqn in enumerate(tables[offer.picked.table.table_id].fqns):
                row_maps.setdefault(fqn, {})[offer.rank] = rows.of(entry)
        if offer.loose is not None:
            rules.update(offer.loose.rules_of)
            for fqn, indices in offer.loose.row_maps.items():
                if indices:
                    row_maps.setdefault(fqn, {})[offer.rank] = indices
    return {
        "axes": {name: size for offer in offers for name, size in offer.sizes.items()},
        "rules": rules,
        "options": dict(options),
        "row_maps": row_maps,
    }


def written_digests(
    offers: Sequence[Offer], answers: Sequence[Answer], tables: Tables
) -> StoredDigests:
    """Return the digests of what is written."""
    found: StoredDigests = {}
    for offer, answer in zip(offers, answers, strict=True):
        extra = set(answer.extra)
        for told, share in zip(offer.tables, answer.by_table(), strict=True):
            table = tables[told.table_id]
            maker = TableItems(table, unpacked_ints(told.coordinates).tolist())
            owned = set(owned_entries(table, *share))
            position = 0
            for entry in range(len(table.fqns)):
                for item in maker.of(entry):
                    place = _offset(item.index)
                    if entry in owned or (item.index.fqn, place) in extra:
                        _keep(found, item.index, told.stored_digests, position)
                    position += 1
        if offer.picked is not None:
            told = offer.picked.table
            table = tables[told.table_id]
            coordinates = unpacked_ints(told.coordinates).tolist()
            held = PickedItems(table, coordinates, unpacked_rows(offer.picked.rows))
            rows = unpacked_rows(answer.picked) if answer.picked else None
            position = 0
            for entry, fqn in enumerate(table.fqns):
                owned = set() if rows is None else set(rows.of(entry))
                dim = table.classes[table.class_of[entry]].rows
                for box in held.boxes(entry):
                    if box.offsets[dim] in owned or (fqn, box.offsets) in extra:
                        index = MetadataIndex(fqn, box.offsets)
                        _keep(found, index, told.stored_digests, position)
                    position += 1
        for at in answer.loose:
            assert offer.loose is not None
            item, kept = offer.loose.items[at], offer.loose.stored_digests[at]
            if kept is not None:
                found.setdefault(item.index.fqn, {})[_offset(item.index)] = kept
    return found


def _keep(found: StoredDigests, index: MetadataIndex, digests: bytes, position: int) -> None:
    digest = digests[position * FULL_NBYTES : (position + 1) * FULL_NBYTES]
    if any(digest):
        found.setdefault(index.fqn, {})[_offset(index)] = digest


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
