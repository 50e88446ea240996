"""Digests of what a rank holds: what travels with its plan, and what a checkpoint stores."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from dcp_placements._torch import MetadataIndex, has_hooks
from dcp_placements.layout.sharding import Box
from dcp_placements.save.digest_folding import Digests, Slots, buckets_needed, may_have_replicas
from dcp_placements.save.key_table import OBJECT
from dcp_placements.save.local_plan import Held, Holding, LocalPlan, chunk_data, held_chunks
from dcp_placements.storage.hashing import (
    FULL_NBYTES,
    SAMPLED_NBYTES,
    full_digest,
    object_digest,
    sampled_digests,
)
from dcp_placements.storage.metadata.provenance import StoredDigests

Objects = dict[str, io.BytesIO]
"""Objects as a file will hold them, by key."""


def add_digests(
    plan: LocalPlan,
    holding: Holding,
    kind: str,
    *,
    world: int,
    lookup: Callable[[MetadataIndex], Any],
    exact: bool = False,
) -> Objects:
    """Put digests of what this rank holds into its plan; return the objects as files hold them.

    Args:
        plan: Where the digests go.
        holding: What the rank holds.
        kind: ``"sampled"``, ``"full"`` or ``"off"``; only full ones are worth storing.
        world: Number of ranks.
        lookup: Gives the data of a tensor that names its own chunks.
        exact: Whether every key keeps a digest of its own, however many there are.
    """
    plan.digest_kind = kind
    if kind == "off":
        return {}
    full = kind == "full"
    counts = [[len(boxes) for boxes in groups] for groups in holding.boxes]
    plan.buckets = 0 if exact else buckets_needed(holding.tables, counts, world)
    objects: Objects = {}
    tensors: list[torch.Tensor] = []
    groups = []
    for table, number, keys in holding.by_group():
        group, boxes = holding.tables[table].groups[number], holding.boxes[table][number]
        compared = may_have_replicas(group, world)
        if (compared or full) and boxes:
            start = len(tensors)
            if group.kind != OBJECT:
                tensors += [piece for held in keys for piece in _data(held, boxes, lookup)]
            groups.append((keys, compared, group.kind == OBJECT, slice(start, len(tensors))))
    digests = [full_digest(one) for one in tensors] if full else sampled_digests(tensors)
    vectors, stored = [], []
    for keys, compared, is_object, place in groups:
        if compared:
            found = [object_digest(held.value) for held in keys] if is_object else digests[place]
            numbered = holding.tables[keys[0].table].numbered_of(keys[0].group)
            column = _as_ints(found).reshape(len(keys), -1)
            vectors.append(Slots(numbered, plan.buckets).vector(column).tobytes())
        if full:
            stored += (
                [_object_bytes(held, objects) for held in keys]
                if is_object
                else [digest or bytes(FULL_NBYTES) for digest in digests[place]]
            )
    plan.digests = b"".join(vectors)
    plan.stored_digests = b"".join(stored)
    return objects


def digests_by_chunk(
    holding: Holding, keys: Collection[str], lookup: Callable[[MetadataIndex], Any]
) -> StoredDigests:
    """Return a sampled digest of each chunk and object, of those that can be read.

    A rank that saves alone stores them, so that they are compared when its metadata are merged with
    those of other ranks.

    Args:
        holding: What the rank holds.
        keys: The keys that it writes.
        lookup: As of ``add_digests``.
    """
    found: StoredDigests = {}
    places: list[tuple[str, Box]] = []
    tensors: list[torch.Tensor] = []
    for held in holding.keys:
        if held.fqn not in keys:
            continue
        if holding.tables[held.table].groups[held.group].kind == OBJECT:
            if (digest := object_digest(held.value)) is not None:
                found[held.fqn] = {None: digest}
        elif boxes := holding.boxes[held.table][held.group]:
            places += [(held.fqn, box) for box in boxes]
            tensors += _data(held, boxes, lookup)
    for (fqn, box), digest in zip(places, sampled_digests(tensors), strict=True):
        if digest is not None:
            found.setdefault(fqn, {})[box.offsets] = digest
    return found


def _data(
    held: Held, boxes: Sequence[Box], lookup: Callable[[MetadataIndex], Any]
) -> list[torch.Tensor]:
    """Return what a rank holds of one tensor, box by box: views."""
    if held.placed is not None:
        return [chunk_data(held.placed, chunk) for chunk in held_chunks(held.placed)]
    if type(held.value) is torch.Tensor or not has_hooks(held.value):
        return [held.value]
    return [lookup(MetadataIndex(held.fqn, torch.Size(box.offsets))) for box in boxes]


def _as_ints(digests: Sequence[bytes | None]) -> Digests:
    """Return digests of 8 bytes as numbers; 0 where there is none."""
    joined = b"".join([(one or _NO_DIGEST)[:SAMPLED_NBYTES] for one in digests])
    return np.frombuffer(joined, "<u8").astype(np.uint64)


_NO_DIGEST = bytes(SAMPLED_NBYTES)


def _object_bytes(held: Held, objects: Objects) -> bytes:
    """Return the digest of an object's bytes, and keep those."""
    buffer = objects[held.fqn] = io.BytesIO()
    torch.save(held.value, buffer)
    return xxhash.xxh3_128_digest(buffer.getbuffer())
