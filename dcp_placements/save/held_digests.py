"""Digests of what a rank holds, which travel with its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import MetadataIndex, has_hooks
from dcp_placements.bind.placed import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import format_box
from dcp_placements.layout.sharding import Box, Chunk
from dcp_placements.save.digest_folding import Digests, Slots, exceeds_budget, may_have_replicas
from dcp_placements.save.local_plan import LocalPlan
from dcp_placements.storage.hashing import (
    SAMPLED_NBYTES,
    full_digest,
    object_digest,
    sampled_digests,
)
from dcp_placements.storage.metadata.provenance import StoredDigests
from dcp_placements.table.table import OBJECT, Held, Holding, held_chunks

Lookup = Callable[[MetadataIndex], Any]
"""Gives the data of a tensor that names its own chunks."""

_NO_DIGEST = bytes(SAMPLED_NBYTES)


def with_digests(
    plan: LocalPlan, holding: Holding, kind: str, *, world: int, lookup: Lookup, exact: bool
) -> LocalPlan:
    """Return a plan with the digests of what the rank holds.

    Args:
        plan: The rest of the plan.
        holding: What the rank holds.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks.
        lookup: Gives the data of a tensor that names its own chunks.
        exact: Whether every key keeps a digest of its own, however many there are.
    """
    if kind == "off":
        return plan
    # A rank that holds nothing of a group counts as the others do, which hold one box.
    count = sum(
        len(held.fqns) * max(len(held.boxes), 1)
        for held in holding.groups
        if may_have_replicas(held.group, world)
    )
    is_folded = not exact and exceeds_budget(count, world)
    hashed = [
        held for held in holding.groups if held.boxes and may_have_replicas(held.group, world)
    ]
    of_tensors = iter(_digests([data for held in hashed for data in _data(held, lookup)], kind))
    vectors = []
    undigested: list[str] = []
    for held in hashed:
        if held.group.kind == OBJECT:
            digests = list(map(object_digest, held.values))
        else:
            digests = list(islice(of_tensors, len(held.fqns) * len(held.boxes)))
            if None in digests:
                items = product(held.fqns, held.boxes)
                undigested += [
                    fqn for (fqn, _), one in zip(items, digests, strict=True) if one is None
                ]
        slots = Slots(held.fqns, is_folded)
        vectors.append(slots.vector(_as_ints(digests).reshape(len(held.fqns), -1)).tobytes())
    return plan._replace(
        digest_kind=kind,
        digests=b"".join(vectors),
        is_folded=is_folded,
        undigested=tuple(dict.fromkeys(undigested)),
    )


def digests_by_chunk(holding: Holding, kind: str, lookup: Lookup) -> StoredDigests:
    """Return a digest of each chunk and object, of those that can be read.

    A rank that saves alone stores them, so that they are compared when its metadata are merged with
    those of other ranks.

    Args:
        holding: What the rank holds.
        kind: ``"sampled"`` or ``"full"``.
        lookup: Gives the data of a tensor that names its own chunks.
    """
    found: StoredDigests = {}
    for held in holding.groups:
        if held.group.kind == OBJECT:
            digests = list(map(object_digest, held.values))
        else:
            digests = _digests(_data(held, lookup), kind)
        for (fqn, box), digest in zip(product(held.fqns, held.boxes), digests, strict=True):
            if digest is not None:
                place = None if held.group.kind == OBJECT else box.offsets
                found.setdefault(fqn, {})[place] = digest
    return found


def repeat_faults(placed: Iterable[Placed], kind: str) -> list[Fault]:
    """Return the boxes that this rank holds several times, with different contents.

    Redundant experts, or an ``IndexShard`` with repeats: one of the copies is written, so they are
    compared as those of two ranks are.

    Args:
        placed: This rank's tensors.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
    """
    if kind == "off":
        return []
    repeats = [
        (tensor, copies)
        for tensor in placed
        if len(tensor.place.chunks) > 1 and 0 not in tensor.global_shape
        for copies in _repeated(tensor.chunks)
    ]
    digests = iter(_digests([one.view(copy) for one, copies in repeats for copy in copies], kind))
    faults = []
    for tensor, copies in repeats:
        if len({next(digests) for _ in copies} - {None}) > 1:
            faults.append(_repeat_fault(tensor, copies))
    return faults


def _repeated(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the chunks of each box that there are several of."""
    if len({chunk.offsets for chunk in chunks}) == len(chunks):
        return []
    by_box: dict[Box, list[Chunk]] = {}
    for chunk in chunks:
        by_box.setdefault(chunk.box, []).append(chunk)
    return [copies for copies in by_box.values() if len(copies) > 1]


def _repeat_fault(placed: Placed, copies: list[Chunk]) -> Fault:
    shape = placed.global_shape
    return Fault(
        placed.fqn,
        f"{len(copies)} copies of {format_box(copies[0].box, shape)} of {shape} on one rank have "
        "different contents",
        (
            "likely:      copies of one expert on this rank that have drifted apart; or a number "
            "that IndexShard or rename= names once too often",
            "way out:     make the copies equal before saving, or correct the numbers",
            '             on_conflict="warn" saves one of the copies anyway',
            f"by rule:     {placed.rule or 'no rule'}",
        ),
    )


def _digests(tensors: Sequence[torch.Tensor], kind: str) -> list[bytes | None]:
    return list(map(full_digest, tensors)) if kind == "full" else sampled_digests(tensors)


def _data(held: Held, lookup: Lookup) -> list[torch.Tensor]:
    """Return what a rank holds of a group, key by key and box by box: views; none of objects."""
    data: list[torch.Tensor] = []
    if held.group.kind == OBJECT:
        return data
    for fqn, value in zip(held.fqns, held.values, strict=True):
        if type(value) is Placed:
            data += [chunk_data(value, chunk) for chunk in held_chunks(value)]
        elif type(value) is torch.Tensor or not has_hooks(value):
            data.append(value)
        else:
            data += [lookup(MetadataIndex(fqn, torch.Size(box.offsets))) for box in held.boxes]
    return data


def _as_ints(digests: Sequence[bytes | None]) -> Digests:
    """Return the first 8 bytes of digests as numbers; 0 where there is none."""
    joined = b"".join([(one or _NO_DIGEST)[:SAMPLED_NBYTES] for one in digests])
    return np.frombuffer(joined, "<u8").astype(np.uint64)


def chunk_data(placed: Placed, chunk: Chunk) -> torch.Tensor:
    """Return the data of a chunk: a view of the local tensor, no copy."""
    if 0 in placed.global_shape:
        return placed.tensor.detach().new_empty(placed.global_shape)
    return placed.view(chunk)
