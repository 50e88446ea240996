"""Copies of replicated tensors in the files of the ranks that would otherwise read elsewhere.

A shadow is never the only copy: it stands beside the canonical one, where only
``PlacementFileSystemReader`` looks. Tensors that lie alike and have one owner are a *pack*: every
other rank that holds them writes them in a row, as one record. Which keys a pack has is stored
once, whatever the number of ranks; the record's place in a file stands in ``storage_data``, under
the pack's name, the writer's number and the chunk's offsets. ``state_dict_metadata`` knows nothing
of it, so that readers which load all that there is find the canonical tensors alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
import xxhash

from dcp_placements.digests import FULL_NBYTES
from dcp_placements.errors import PlacementError
from dcp_placements.evidence import Answer, Offer, Tables, unpacked_ints
from dcp_placements.interop import (
    MetadataIndex,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dcp_placements.items import TableItems, chunk_metadata, tensor_properties
from dcp_placements.ownership import in_bitmap, owner_slots
from dcp_placements.rules import compile_pattern
from dcp_placements.table import OBJECT, Table, boxes

PREFIX = "dcp_placements.shadows."
"""Keys in ``storage_data`` that begin so are packs."""

PACK_NBYTES = 1 << 20
"""A pack of several tensors is no larger; larger tensors are a pack each."""

OBJECTS_NBYTES = 1 << 20
"""A rank whose objects take more than this writes no shadows of them."""

Wanted = int | tuple[str, ...]
"""A budget in bytes, or patterns."""


def check_shadows(option: Any) -> Wanted | None:
    """Return what ``shadows=`` asks for; None for nothing.

    Raises:
        PlacementError: It is neither ``"off"``, nor a budget, nor patterns.
    """
    if isinstance(option, str):
        option = None if option == "off" else (option,)
    if option is None or (isinstance(option, int) and not isinstance(option, bool) and option >= 0):
        return option or None
    if isinstance(option, Iterable):
        patterns = tuple(option)
        if patterns and all(isinstance(pattern, str) for pattern in patterns):
            for pattern in patterns:
                compile_pattern(pattern)
            return patterns
    raise PlacementError(
        f"shadows={option!r}: give 'off', the bytes that a rank may write more, or patterns of keys"
    )


@dataclass(frozen=True, slots=True)
class Pack:
    """Keys of one table that lie alike and are written by the same of their holders.

    Attributes:
        key: What it is called in ``storage_data``.
        table: Position of the table among those of a rank.
        index: The layout class, or ``OBJECT``.
        look: Position of the look.
        owner: Which of the holders writes the canonical tensors, and needs no shadow.
        fqns: The keys, in table order.
    """

    key: str
    table: int
    index: int
    look: int
    owner: int
    fqns: tuple[str, ...]


def packs_of(tables: Sequence[tuple[bytes, Table]], answer: Answer) -> list[Pack]:
    """Return the packs of the ranks that have these tables; the same on each of them.

    Args:
        tables: A rank's, with what names them.
        answer: The coordinator's to that rank.
    """
    told = answer.shadows
    if told is None:
        return []
    found: list[tuple[int, bytes, int, int, int]] = []
    shares = zip(tables, answer.by_table(), told.unlike, strict=True)
    for at, ((name, table), (slots, bitmap, spread), unlike) in enumerate(shares):
        owners = owner_slots(table, [count for count, _ in slots], bitmap, spread)
        differing = set(unlike or ())
        for entry, index in enumerate(table.class_of):
            if slots[index][0] == 1 or in_bitmap(bitmap, entry):
                continue
            nbytes = 0
            if index == OBJECT:
                if unlike is None or entry in differing:
                    continue
            else:
                nbytes = table.nbytes(entry) // table.classes[index].cells
                if not nbytes or table.looks[table.look_of[entry]].layout != torch.strided:
                    continue
            found.append((nbytes, name, entry, at, owners[entry]))
    groups: dict[tuple[int, bytes, int, int, int, int], list[int]] = {}
    for nbytes, name, entry, at, owner in _chosen(found, tables, told.wanted):
        table = tables[at][1]
        index = table.class_of[entry]
        look = 0 if index == OBJECT else table.look_of[entry]
        groups.setdefault((at, name, index, look, owner, nbytes), []).append(entry)
    packs = []
    for (at, name, index, look, owner, nbytes), entries in groups.items():
        entries.sort()
        many = len(entries) if index == OBJECT else max(PACK_NBYTES // nbytes, 1)
        for start in range(0, len(entries), many):
            some = entries[start : start + many]
            called = repr((name, index, look, owner, some)).encode()
            key = f"{PREFIX}{xxhash.xxh3_64_hexdigest(called)}"
            fqns = tuple([tables[at][1].fqns[entry] for entry in some])
            packs.append(Pack(key, at, index, look, owner, fqns))
    return packs


def _chosen(
    found: list[tuple[int, bytes, int, int, int]],
    tables: Sequence[tuple[bytes, Table]],
    wanted: Wanted,
) -> list[tuple[int, bytes, int, int, int]]:
    if not isinstance(wanted, int):
        patterns = [compile_pattern(pattern) for pattern in wanted]
        return [
            one
            for one in found
            if any(pattern.search(f".{tables[one[3]][1].fqns[one[2]]}") for pattern in patterns)
        ]
    # By what is alike on all ranks that have the tables, in whatever order they have them.
    found.sort(key=lambda one: one[:3])
    total = 0
    for number, one in enumerate(found):
        total += one[0]
        if total > wanted:
            return found[:number]
    return found


def pack_items(
    packs: Sequence[Pack], tables: Sequence[tuple[Table, Sequence[int]]], answer: Answer
) -> list[WriteItem]:
    """Return the shadows that one rank writes.

    Args:
        packs: Those of its tables.
        tables: The tables, with the rank's coordinates.
        answer: The coordinator's.
    """
    assert answer.shadows is not None
    place, slots = answer.shadows.place, answer.all_slots()
    made = []
    for pack in packs:
        if slots[pack.table][pack.index][1] == pack.owner:
            continue
        if pack.index == OBJECT:
            index = MetadataIndex(pack.key, torch.Size((place,)))
            made.append(WriteItem(index, WriteItemType.BYTE_IO))
            continue
        table, coordinates = tables[pack.table]
        start = sum(len(known.sharding.axis_sizes) for known in table.classes[: pack.index])
        known = table.classes[pack.index]
        here = coordinates[start : start + len(known.sharding.axis_sizes)]
        for box in boxes(known, here):
            sizes = (len(pack.fqns), *box.sizes)
            chunk = chunk_metadata((0,) * len(sizes), sizes)
            properties = tensor_properties(table.looks[pack.look])
            made.append(
                WriteItem(
                    MetadataIndex(pack.key, torch.Size((place, *box.offsets))),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, properties, torch.Size(sizes)),
                )
            )
    return made


def packed_objects(objects: Sequence[bytes | memoryview]) -> BytesIO:
    """Return the record of a pack of objects: their lengths, then their bytes."""
    lengths = struct.pack(f"<{len(objects)}q", *map(len, objects))
    return BytesIO(b"".join((lengths, *objects)))


def packed_object(record: memoryview, position: int, count: int) -> memoryview:
    """Return one object of a pack of ``count``.

    Raises:
        ValueError: The record is no pack of so many.
    """
    try:
        lengths = struct.unpack_from(f"<{count}q", record)
    except struct.error as error:
        raise ValueError(f"{record.nbytes} bytes are no pack of {count} objects") from error
    start = 8 * count + sum(lengths[:position])
    if min(lengths) < 0 or 8 * count + sum(lengths) != record.nbytes:
        raise ValueError(f"{record.nbytes} bytes are no pack of {count} objects")
    return record[start : start + lengths[position]]


def unlike_objects(offers: Sequence[Offer], tables: Tables) -> dict[bytes, tuple[int, ...] | None]:
    """Return by table the entries of objects that differ by rank; None where nothing is known."""
    digests: dict[bytes, list[bytes]] = {}
    bucketed = any(offer.bucketed and offer.digests != "full" for offer in offers)
    for offer in offers:
        for told in offer.tables:
            table = tables[told.table_id]
            one = told.digests.get(OBJECT, b"")
            if offer.digests == "full":
                # What files hold, and not only what it means, has to be the same.
                one = _stored_of_objects(table, told.coordinates, told.stored_digests)
            digests.setdefault(told.table_id, []).append(one)
    found: dict[bytes, tuple[int, ...] | None] = {}
    for name, known in digests.items():
        entries = [entry for entry, index in enumerate(tables[name].class_of) if index == OBJECT]
        if not entries or not known[0] or len({len(one) for one in known}) > 1:
            found[name] = None
            continue
        if bucketed:
            # Which ones differ is not to be seen in a large world.
            found[name] = () if len(set(known)) == 1 else None
            continue
        rows = np.stack([np.frombuffer(one, np.uint8).reshape(len(entries), -1) for one in known])
        unlike = (rows != rows[0]).any(axis=(0, 2)) | ~rows[0].any(axis=1)
        found[name] = tuple(entry for entry, other in zip(entries, unlike, strict=True) if other)
    return found


def _stored_of_objects(table: Table, coordinates: bytes, stored: bytes) -> bytes:
    maker = TableItems(table, unpacked_ints(coordinates).tolist())
    parts, position = [], 0
    for index in table.class_of:
        if index == OBJECT:
            parts.append(stored[position : position + FULL_NBYTES])
        position += FULL_NBYTES * maker.count(index)
    return b"".join(parts)


def all_packs(
    offers: Sequence[Offer], answers: Sequence[Answer], tables: Tables
) -> dict[str, tuple[str, ...]]:
    """Return the keys of every pack that is written."""
    found: dict[str, tuple[str, ...]] = {}
    seen = set()
    for offer, answer in zip(offers, answers, strict=True):
        assert answer.shadows is not None
        names = tuple([told.table_id for told in offer.tables])
        replicas = tuple([tuple([n for n, _ in slots]) for slots in answer.all_slots()])
        # What else a pack depends on is the same for all that have the tables.
        if (names, replicas) in seen:
            continue
        seen.add((names, replicas))
        for pack in packs_of([(name, tables[name]) for name in names], answer):
            found[pack.key] = pack.fqns
    return found


def shadowed(told: Mapping[str, Any] | None) -> Mapping[str, Sequence[str]]:
    """Return the packs and their keys that a checkpoint says it has."""
    found = None if told is None else told.get("shadows")
    return found if isinstance(found, Mapping) else {}
