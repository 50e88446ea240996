"""Which stored chunks fill a rank's tensors, and the proof that they do.

The reads must tile every destination chunk. Stock planners do not check this: where the checkpoint
lacks a chunk, they leave old values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import sub
from typing import NamedTuple

import numpy as np
import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import tiles, uncovered
from dcp_placements.storage.metadata.chunk_list import ChunkList


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
        chunks = ChunkList.of(metadata.chunks, len(metadata.size))
        order = np.flatnonzero((chunks.sizes > 0).all(axis=1))
        # np.unique would import numpy.ma, which takes longer than all of this.
        cuts = [np.count_nonzero(np.diff(np.sort(column))) for column in chunks.offsets.T]
        self._dim = cuts.index(max(cuts)) if cuts else None
        if self._dim is not None:
            order = order[np.argsort(chunks.offsets[order, self._dim], kind="stable")]
        self._order = order
        self._offsets, self._sizes = chunks.offsets[order], chunks.sizes[order]
        if self._dim is not None:
            self._starts = np.ascontiguousarray(self._offsets[:, self._dim])
            self._longest = int(self._sizes[:, self._dim].max(initial=0))

    def meeting(self, box: Box) -> list[tuple[int, Box, Box]]:
        """Return ``(chunk index, chunk, shared box)`` of the stored chunks that meet ``box``.

        A chunk that equals ``box`` is returned alone.
        """
        wanted = np.array(box, np.int64)
        stops = wanted.sum(axis=0)
        candidates = slice(0, len(self._order))
        if self._dim is not None:
            low = self._starts.searchsorted(wanted[0, self._dim] - self._longest, "right")
            high = self._starts.searchsorted(stops[self._dim])
            candidates = slice(int(low), int(high))
        offsets, sizes = self._offsets[candidates], self._sizes[candidates]
        starts = np.maximum(offsets, wanted[0])
        extents = np.minimum(offsets + sizes, stops) - starts
        met = np.flatnonzero((extents > 0).all(axis=1))
        equal = met[((offsets[met] == wanted[0]) & (sizes[met] == wanted[1])).all(axis=1)]
        if len(equal):
            return [(int(self._order[candidates][equal[0]]), box, box)]
        found = zip(
            self._order[candidates][met].tolist(),
            ChunkList(offsets[met], sizes[met]).boxes(),
            ChunkList(starts[met], extents[met]).boxes(),
            strict=True,
        )
        return list(found)


class Reads:
    """Plans reads. Tensors with equal destinations share a search.

    In a checkpoint of thousands of tensors on thousands of ranks, a search through all chunks of
    each would dominate the cost of planning a load.
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple[tuple[Box, ...], torch.Size, int], tuple[Read, ...]] = {}
        self._last_position = 0

    def of(
        self, stored: TensorStorageMetadata, destinations: Sequence[Box]
    ) -> tuple[tuple[Read, ...], list[Box]]:
        """Return the reads that fill ``destinations``, and the boxes that no stored chunk holds.

        Args:
            stored: The metadata of the checkpoint's tensor.
            destinations: Boxes of that tensor.
        """
        key = (tuple(destinations), stored.size, len(stored.chunks))
        earlier = self._earlier.get(key)
        # These chunks were proved to fill the destinations, whatever the others are.
        if earlier is not None and all(
            _is_at(stored.chunks, read.at, read.stored) for read in earlier
        ):
            return earlier, []
        reads: list[Read] = []
        holes: list[Box] = []
        # Often the only chunk is stored as it is needed: the others are not sorted then.
        at = self._position(stored.chunks, *destinations) if len(destinations) == 1 else None
        chunks: StoredChunks | None = None
        for position, box in enumerate(destinations):
            if at is not None:
                meeting = [(at, box, box)]
            else:
                chunks = chunks or StoredChunks(stored)
                meeting = chunks.meeting(box)
            reads += [_read(position, box, *piece) for piece in meeting]
            pieces = [piece for _, _, piece in meeting]
            if pieces != [box] and not tiles(box, pieces):
                holes += uncovered(box, pieces)
        if not holes:
            self._earlier[key] = tuple(reads)
        return tuple(reads), holes

    def _position(self, chunks: Sequence[ChunkStorageMetadata], box: Box) -> int | None:
        """Return the position of a chunk that equals a box; None without one."""
        if 0 in box.sizes:
            return None
        # Other tensors have their chunk at the same position if the topology is that of the save.
        if _is_at(chunks, self._last_position, box):
            return self._last_position
        offsets, sizes = box
        at: int | None
        if isinstance(chunks, ChunkList):
            equal = (chunks.offsets == offsets).all(axis=1) & (chunks.sizes == sizes).all(axis=1)
            at = int(equal.argmax()) if equal.any() else None
        else:
            pairs = enumerate(chunks)
            at = next((i for i, c in pairs if c.offsets == offsets and c.sizes == sizes), None)
        if at is not None:
            self._last_position = at
        return at


def _is_at(chunks: Sequence[ChunkStorageMetadata], at: int, box: Box) -> bool:
    if at >= len(chunks):
        return False
    if isinstance(chunks, ChunkList):
        # Without torch's objects, of which a search would make one for each key.
        held = chunks.offsets[at].tolist(), chunks.sizes[at].tolist()
        return held == (list(box.offsets), list(box.sizes))
    chunk = chunks[at]
    return chunk.offsets == box.offsets and chunk.sizes == box.sizes


def _read(position: int, box: Box, at: int, stored: Box, piece: Box) -> Read:
    if stored == box == piece:
        offsets, sizes = map(torch.Size, box)
        origin = torch.Size((0,) * len(offsets))
        return Read(position, offsets, origin, at, Box(offsets, sizes), origin, sizes)
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
    return torch.Size(list(map(sub, offsets, origin)))


def read_items(reads: Iterable[tuple[str, Sequence[Read] | None]]) -> list[ReadItem]:
    """Return torch's read items of ``(key, reads)``; the reads of an object are None."""
    items: list[ReadItem] = []
    for fqn, parts in reads:
        if parts is None:
            items.append(read_object(fqn))
            continue
        for position, dest, dest_offsets, at, stored, stored_offsets, lengths in parts:
            item = ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, dest, position),
                dest_offsets=dest_offsets,
                storage_index=MetadataIndex(fqn, stored.offsets, at),
                storage_offsets=stored_offsets,
                lengths=lengths,
            )
            items.append(item)
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
