"""Digests: what a rank sends of the contents that it holds, and their comparison over all ranks.

Two ranks that claim the same box of the same key must hold the same bytes. A rank sends one digest
for each key and box, group by group. Two ep ranks that both hold all of ``experts.w1`` and
``experts.w2``, and differ in the second::

    [[0x91f3, 0x27a0],      # rank 0: by row the digests of the keys of the group
     [0x91f3, 0x5c1e]]      # rank 1

Beyond a budget (``WORLD_BUDGET_NBYTES`` for all ranks) the digests of the keys of a group that have
a number in their name, thousands in a large model, are folded into one per box. What differs is
then known by group. Keys without a number (embeddings, norms, the head) keep theirs, because ranks
that hold otherwise different keys share them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements.bind.one_tensor import Placed
from dcp_placements.layout.boxes import Bools
from dcp_placements.layout.sharding import Chunk
from dcp_placements.storage.hashing import (
    SAMPLED_NBYTES,
    full_digest,
    object_digest,
    sampled_digests,
)
from dcp_placements.storage.metadata.record import StoredDigests
from dcp_placements.table.cover import Cover, cover_of
from dcp_placements.table.table import OBJECT, Group, Held, Holding
from dcp_placements.table.world import Piece, World

Digests = np.ndarray[Any, np.dtype[np.uint64]]
"""0 where there is none."""

Lookup = Callable[[MetadataIndex], Any]
"""Gives the data of a tensor that names its own chunks."""

WORLD_BUDGET_NBYTES = 64 << 20
"""What the digests of all ranks may take together before a rank folds its own."""

_DIGESTS: Mapping[str, Callable[[Sequence[torch.Tensor]], list[bytes | None]]] = {
    "sampled": lambda tensors: sampled_digests(tensors),
    "full": lambda tensors: list(map(full_digest, tensors)),
}
_NO_DIGEST = bytes(SAMPLED_NBYTES)
_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)
_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


class SentDigests(NamedTuple):
    """What a rank sends of its contents.

    Attributes:
        packed: For each group that may have replicas, the digests by key and box.
        is_folded: Whether keys with a number have one digest together, the last of the group.
        undigested: Keys of tensors whose contents cannot be read, so that they have no digest.
    """

    packed: bytes = b""
    is_folded: bool = False
    undigested: tuple[str, ...] = ()


def may_have_replicas(group: Group, world: int) -> bool:
    """Whether another rank may hold the same box: not if there are as many parts as ranks."""
    return group.parts != world or world == 1


def has_number(fqn: str) -> bool:
    """Whether one of the components of a key is a number."""
    return _NUMBER.search(fqn) is not None


def folded(digests: Digests, fqns: Sequence[str]) -> Digests:
    """Return digests by key and box with one row, the last, for all keys that have a number."""
    numbered = np.array([has_number(fqn) for fqn in fqns], bool)
    # Multiplied by their places, so that two exchanged tensors do not fold to the same.
    weights = 2 * np.arange(numbered.sum(), dtype=np.uint64) + 1
    together = (digests[numbered] * weights[:, None]).sum(axis=0, dtype=np.uint64)
    return np.concatenate([digests[~numbered], together[None]])


def digests_of(
    holding: Holding, kind: str, *, world: int, lookup: Lookup, exact: bool
) -> SentDigests:
    """Return the digests of what a rank holds.

    Args:
        holding: What the rank holds.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks.
        lookup: Gives the data of a tensor that names its own chunks.
        exact: Whether every key keeps a digest of its own, however many there are.
    """
    if kind == "off":
        return SentDigests()
    groups = [held for held in holding.groups if may_have_replicas(held.group, world)]
    # A rank that holds nothing of a group counts as the others do, which hold one box.
    count = sum(len(held.fqns) * max(len(held.boxes), 1) for held in groups)
    is_folded = not exact and count * SAMPLED_NBYTES * world > WORLD_BUDGET_NBYTES
    packed = []
    undigested: dict[str, None] = {}
    for held, digests in _by_group(groups, kind, lookup):
        if not held.boxes:
            continue
        if None in digests:
            items = zip(product(held.fqns, held.boxes), digests, strict=True)
            undigested.update(dict.fromkeys(fqn for (fqn, _), one in items if one is None))
        joined = b"".join([(one or _NO_DIGEST)[:SAMPLED_NBYTES] for one in digests])
        vector = np.frombuffer(joined, "<u8").astype(np.uint64).reshape(len(held.fqns), -1)
        packed.append((folded(vector, held.fqns) if is_folded else vector).tobytes())
    return SentDigests(b"".join(packed), is_folded, tuple(undigested))


def digests_by_chunk(holding: Holding, kind: str, lookup: Lookup) -> StoredDigests:
    """Return a digest of each chunk and object, of those that can be read.

    A rank that saves alone stores them, so that they are compared when its metadata are merged with
    those of other ranks. Arguments are those of ``digests_of``.
    """
    found: StoredDigests = {}
    for held, digests in _by_group(holding.groups, kind, lookup):
        for (fqn, box), digest in zip(product(held.fqns, held.boxes), digests, strict=True):
            if digest is not None:
                place = None if held.group.kind == OBJECT else box.offsets
                found.setdefault(fqn, {})[place] = digest
    return found


def differing_repeats(placed: Iterable[Placed], kind: str) -> Iterator[tuple[Placed, list[Chunk]]]:
    """Yield the boxes that this rank holds several times, with different contents.

    Redundant experts, or an ``IndexShard`` with repeats: one of the copies is written, so they are
    compared as those of two ranks are.

    Args:
        placed: This rank's tensors.
        kind: ``"sampled"``, ``"full"`` or ``"off"``.
    """
    for tensor in placed if kind != "off" else ():
        chunks = tensor.chunks
        if len({chunk.offsets for chunk in chunks}) == len(chunks) or 0 in tensor.global_shape:
            continue
        by_box: dict[Any, list[Chunk]] = {}
        for chunk in chunks:
            by_box.setdefault(chunk.box, []).append(chunk)
        for copies in by_box.values():
            views = list(map(tensor.view, copies))
            if len({*_DIGESTS[kind](views)} - {None}) > 1:
                yield tensor, copies


def _by_group(
    groups: Sequence[Held], kind: str, lookup: Lookup
) -> Iterator[tuple[Held, list[bytes | None]]]:
    """Yield groups with the digests of their keys and boxes; all tensors are hashed in one call."""
    tensors: list[torch.Tensor] = []
    for held in groups:
        if held.group.kind != OBJECT:
            places = product(held.fqns, held.boxes)
            tensors += [
                lookup(MetadataIndex(fqn, torch.Size(box.offsets))) if data is None else data
                for (fqn, box), data in zip(places, held.data(), strict=True)
            ]
    digests = iter(_DIGESTS[kind](tensors))
    for held in groups:
        if held.group.kind == OBJECT:
            yield held, list(map(object_digest, held.values))
        else:
            yield held, list(islice(digests, len(held.fqns) * len(held.boxes)))


class Contents:
    """The digests of all ranks, beside the rows of a ``World``.

    Where some ranks have folded theirs, those of the others are folded, too.

    Args:
        world: What the ranks hold; ranks of one cohort have folded, or have not.
        sent: By rank, its digests.
        size: Number of ranks that there are.

    Attributes:
        is_folded: Whether the keys with a number share one digest by group and box.
    """

    def __init__(self, world: World, sent: Sequence[SentDigests], size: int) -> None:
        self.is_folded = any(one.is_folded for one in sent)
        self._world = world
        parts: dict[tuple[int, int], list[Digests]] = {}
        for cohort in world.cohorts if any(one.packed for one in sent) else ():
            members, first = [sent[rank] for rank in cohort.ranks.tolist()], 0
            joined = b"".join([one.packed for one in members])
            digests = np.frombuffer(joined, np.uint64).reshape(len(members), -1)
            for table, number, count in cohort.groups:
                if not count or not may_have_replicas(world.tables[table].groups[number], size):
                    continue
                fqns = world.tables[table].keys[number]
                folds = sum(map(has_number, fqns)) - 1 if members[0].is_folded else 0
                width = len(fqns) - folds
                by_rank = digests[:, first : first + width * count].reshape(-1, width, count)
                mine = by_rank.transpose(0, 2, 1).reshape(-1, width)
                if self.is_folded and not members[0].is_folded:
                    mine = folded(mine.T, fqns).T
                parts.setdefault((table, number), []).append(mine)
                first += width * count
        # By table and group, by row and key of the group the digests; where digests are folded,
        # those of the keys without a number, then the folded one. And the column of each key.
        self._digests = {key: np.concatenate(of_group) for key, of_group in parts.items()}
        self._columns = {
            (table, number): np.cumsum([not (self.is_folded and has_number(fqn)) for fqn in fqns])
            - 1
            for table, number in self._digests
            for fqns in [world.tables[table].keys[number]]
        }

    def compared(self, piece: Piece) -> list[int]:
        """Return positions of the keys of a piece that have digests of their own."""
        is_folded = self.is_folded
        return [at for at, fqn in enumerate(piece.fqns) if not (is_folded and has_number(fqn))]

    def differing(self, piece: Piece) -> tuple[list[int], Digests]:
        """Return the keys of which two ranks hold one box with other contents.

        Returns:
            Their positions in the piece, and their digests by row and key.
        """
        positions = self.compared(piece) if self._digests else []
        parts = [np.zeros((0, len(positions)), np.uint64)]
        for source in piece.sources if positions else ():
            group = source.table, source.number
            if group in self._digests:
                keys = self._columns[group][[source.positions[at] for at in positions]]
                parts.append(self._digests[group][:, keys])
            else:
                parts.append(np.zeros((len(source.ranks), len(positions)), np.uint64))
        digests = np.concatenate(parts)
        differing = _differing(digests, piece.cover).any(axis=0) if positions else positions
        found = np.flatnonzero(differing).tolist()
        return [positions[at] for at in found], digests[:, found]

    def uncompared(self, piece: Piece) -> int:
        """Return how many keys of a piece are folded with other keys on some ranks than on others.

        Where no box is on ranks of two tables, there is nothing to compare between them.
        """
        cover = piece.cover
        if len(piece.sources) < 2 or not cover.has_replicas:
            return 0
        source_of = piece.by_row(range(len(piece.sources)))[cover.order]
        starts = cover.starts[:-1]
        if (np.maximum.reduceat(source_of, starts) == np.minimum.reduceat(source_of, starts)).all():
            return 0
        return len(piece.fqns) - len(self.compared(piece))

    def folded_conflicts(self) -> Iterator[tuple[Group, list[str], list[int]]]:
        """Yield each group whose folded digests differ: its folded keys, and ranks that differ."""
        sources = {(s.table, s.number): s for one in self._world.pieces for s in one.sources}
        for (table, number), digests in self._digests.items():
            source = sources[table, number]
            fqns = list(filter(has_number, self._world.tables[table].keys[number]))
            cover = cover_of(source.ranks, source.boxes)
            differing = _differing(digests[:, -1:], cover)
            if fqns and differing.any():
                yield source.group, fqns, cover.holders(int(differing.argmax())).tolist()


def _differing(digests: Digests, cover: Cover) -> Bools:
    """Return by box and column whether two of its rows have different digests."""
    starts = cover.starts[:-1]
    first_of_row = cover.order[starts][cover.box_of] if len(starts) else starts
    if (digests == digests[first_of_row]).all():
        # Nearly always, and several times faster than what follows.
        return np.zeros((len(starts), digests.shape[1]), bool)
    ordered = digests[cover.order]
    highest = np.maximum.reduceat(ordered, starts)
    lowest = np.minimum.reduceat(np.where(ordered == 0, _MOST, ordered), starts)
    return np.asarray(lowest < highest, bool)
