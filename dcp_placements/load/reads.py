"""Which stored chunks fill a rank's tensors, and the proof that they do.

The reads must tile every destination chunk. Stock planners do not check this: where the checkpoint
lacks a chunk, they leave old values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
    filled,
)
from dcp_placements.layout.alike import BySequence
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import intersection, tiles, uncovered


class Read(NamedTuple):
    """A part of a stored chunk and where it goes; the same for all tensors of one layout.

    Attributes:
        position: The number of the destination.
        dest: Where the destination begins in the checkpoint's tensor.
        dest_offsets: Where in the destination the part begins.
        at: The index of the stored chunk.
        stored: The stored chunk.
        stored_offsets: Where in the stored chunk the part begins.
        lengths: Sizes of the part.
    """

    position: int
    dest: torch.Size
    dest_offsets: torch.Size
    at: int
    stored: Box
    stored_offsets: torch.Size
    lengths: torch.Size


class StoredChunks:
    """The stored chunks of one tensor, searched by position.

    Chunks are sorted along the dim with the most different offsets, so that a search for those that
    meet a box skips most others.
    """

    def __init__(self, metadata: TensorStorageMetadata) -> None:
        self._chunks = chunks = metadata.chunks
        order = [at for at, chunk in enumerate(chunks) if 0 not in chunk.sizes]
        self._dim = max(
            range(len(metadata.size)),
            key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}),
            default=None,
        )
        if self._dim is not None:
            dim = self._dim
            order.sort(key=lambda at: chunks[at].offsets[dim])
            self._starts = [chunks[at].offsets[dim] for at in order]
            self._longest = max((chunks[at].sizes[dim] for at in order), default=0)
        self._order = order

    def meeting(self, box: Box) -> list[tuple[int, Box, Box]]:
        """Return ``(chunk index, chunk, shared box)`` of the stored chunks that meet ``box``.

        A chunk that equals ``box`` is returned alone.
        """
        candidates: Sequence[int] = self._order
        if self._dim is not None:
            start = box.offsets[self._dim]
            low = bisect_right(self._starts, start - self._longest)
            candidates = self._order[low : bisect_left(self._starts, start + box.sizes[self._dim])]
        meeting = []
        for at in candidates:
            stored = _box(self._chunks[at])
            if stored == box:
                return [(at, box, box)]
            shared = intersection(stored, box)
            if shared is not None:
                meeting.append((at, stored, shared))
        return meeting


class Reads:
    """Plans reads. Tensors of one layout share a search.

    In a checkpoint of thousands of tensors on thousands of ranks, a search through all chunks of
    each would dominate the cost of planning a load.
    """

    def __init__(self) -> None:
        self._stored: BySequence[StoredChunks] = BySequence(_ends)
        self._by_layout: dict[tuple[Hashable, torch.Size, int], tuple[Read, ...]] = {}
        self._latest: list[int] = []

    def of(
        self,
        stored: TensorStorageMetadata,
        destinations: Sequence[Box],
        *,
        layout: Hashable = None,
    ) -> tuple[tuple[Read, ...], list[Box]]:
        """Return the reads that fill ``destinations``, and the boxes that no stored chunk holds.

        Args:
            stored: The metadata of the checkpoint's tensor.
            destinations: Boxes of that tensor.
            layout: Equal for tensors with these destinations; None for a search of its own.
        """
        key = (layout, stored.size, len(stored.chunks))
        earlier = None if layout is None else self._by_layout.get(key)
        # These chunks were proved to fill the destinations, whatever the others are.
        if earlier is not None and all(
            _is_at(stored.chunks, read.at, read.stored) for read in earlier
        ):
            return earlier, []
        reads: list[Read] = []
        holes: list[Box] = []
        for position, box in enumerate(destinations):
            # Often one chunk equals the box; then the others need not be sorted.
            at = self._index(stored.chunks, box) if len(destinations) == 1 else None
            meeting = [(at, box, box)] if at is not None else self._chunks(stored).meeting(box)
            reads += [_read(position, box, *piece) for piece in meeting]
            pieces = [piece for _, _, piece in meeting]
            if pieces != [box] and not tiles(box, pieces):
                holes += uncovered(box, pieces)
        if layout is not None and not holes:
            self._by_layout[key] = tuple(reads)
        return tuple(reads), holes

    def _chunks(self, stored: TensorStorageMetadata) -> StoredChunks:
        """Return the chunks of a tensor; the same object for all tensors with equal chunks."""
        dims = len(stored.size)
        chunks = self._stored.get(stored.chunks, dims)
        return chunks or self._stored.put(stored.chunks, StoredChunks(stored), dims)

    def _index(self, chunks: Sequence[ChunkStorageMetadata], box: Box) -> int | None:
        """Return the index of a box in the list; the latest indices, often this rank's, first."""
        for at in self._latest:
            if _is_at(chunks, at, box):
                return at
        offsets, sizes = box
        for at, chunk in enumerate(chunks):
            if chunk.offsets == offsets and chunk.sizes == sizes:
                self._latest = [at, *self._latest[:3]]
                return at
        return None


def _ends(chunk: ChunkStorageMetadata) -> Hashable:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _is_at(chunks: Sequence[ChunkStorageMetadata], at: int, box: Box) -> bool:
    if at >= len(chunks):
        return False
    chunk = chunks[at]
    return chunk.offsets == box.offsets and chunk.sizes == box.sizes


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _read(position: int, box: Box, at: int, stored: Box, piece: Box) -> Read:
    return Read(
        position,
        torch.Size(box.offsets),
        _relative(piece.offsets, box.offsets),
        at,
        Box(torch.Size(stored.offsets), torch.Size(stored.sizes)),
        _relative(piece.offsets, stored.offsets),
        torch.Size(piece.sizes),
    )


def _relative(offsets: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([a - b for a, b in zip(offsets, origin, strict=True)])


def read_items(reads: Iterable[tuple[str, Sequence[Read] | None]]) -> list[ReadItem]:
    """Return torch's read items of ``(key, reads)``; the reads of an object are None."""
    items: list[ReadItem] = []
    for fqn, parts in reads:
        if parts is None:
            items.append(read_object(fqn))
            continue
        for position, dest, dest_offsets, at, stored, stored_offsets, lengths in parts:
            into = filled(MetadataIndex, {"fqn": fqn, "offset": dest, "index": position})
            of = filled(MetadataIndex, {"fqn": fqn, "offset": stored.offsets, "index": at})
            attributes = {
                "type": LoadItemType.TENSOR,
                "dest_index": into,
                "dest_offsets": dest_offsets,
                "storage_index": of,
                "storage_offsets": stored_offsets,
                "lengths": lengths,
            }
            items.append(filled(ReadItem, attributes))
    return items


def read_object(fqn: str) -> ReadItem:
    """Return the read of an object that is no tensor."""
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=torch.Size((0,)),
        storage_index=MetadataIndex(fqn),
        storage_offsets=torch.Size((0,)),
        lengths=torch.Size((0,)),
    )
