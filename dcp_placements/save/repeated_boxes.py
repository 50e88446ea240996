"""Boxes that one rank holds several times: redundant experts, an ``IndexShard`` with repeats.

One of the copies is written, so they are compared as those of two ranks are. No other rank is
needed for it, so it is done before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dcp_placements.bind.placed import Placed
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Box, Chunk
from dcp_placements.layout.tiling import format_box
from dcp_placements.storage.hashing import full_digest, sampled_digests


def repeat_faults(placed: Iterable[Placed], *, digests: str) -> list[Fault]:
    """Return the boxes that this rank holds several times, with different contents.

    Args:
        placed: This rank's tensors.
        digests: ``"sampled"``, ``"full"`` or ``"off"``.
    """
    if digests == "off":
        return []
    repeats = [
        (tensor, copies)
        for tensor in placed
        if len(tensor.chunks) > 1 and 0 not in tensor.global_shape
        for copies in _repeated(tensor.chunks)
    ]
    pieces = [tensor.view(copy) for tensor, copies in repeats for copy in copies]
    computed = iter(map(full_digest, pieces) if digests == "full" else sampled_digests(pieces))
    faults = []
    for tensor, copies in repeats:
        contents = {digest for _, digest in zip(copies, computed, strict=False)} - {None}
        if len(contents) > 1:
            faults.append(_fault(tensor, copies))
    return faults


def _repeated(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the chunks of each box that there are several of."""
    if len({chunk.offsets for chunk in chunks}) == len(chunks):
        return []
    by_box: dict[Box, list[Chunk]] = {}
    for chunk in chunks:
        by_box.setdefault(chunk.box, []).append(chunk)
    return [copies for copies in by_box.values() if len(copies) > 1]


def _fault(placed: Placed, copies: list[Chunk]) -> Fault:
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
