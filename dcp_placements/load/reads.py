"""Which stored chunks fill a rank's tensors, and the proof that they do.

The reads must tile every destination chunk. Stock planners do not check this: where the checkpoint
lacks a chunk, they leave old values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import sub
from typing import NamedTuple

import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
)
from dcp_placements.layout.boxes import Index, as_array, as_boxes, intersect, uncovered
from dcp_placements.layout.sharding import Box
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


def pieces_of(box: Box, stored: Index) -> list[tuple[int, Box, Box]]:
    """Return ``(chunk index, chunk, shared box)`` of the stored chunks that fill a box.

    A chunk that equals the box is returned alone.
    """
    wanted = as_array([box], len(box.sizes))
    _, met = stored.meeting(wanted)
    chunks = stored.boxes[met]
    equal = met[(chunks == wanted).all(axis=(1, 2))]
    if len(equal):
        return [(int(equal[0]), box, box)]
    shared = as_boxes(intersect(chunks, wanted))
    return list(zip(met.tolist(), as_boxes(chunks), shared, strict=True))


def holes_of(box: Box, pieces: Iterable[tuple[int, Box, Box]]) -> list[Box]:
    """Return the parts of a box that are in no piece, as of ``pieces_of``."""
    shared = [one for _, _, one in pieces]
    return [] if shared == [box] else uncovered(box, as_array(shared, len(box.sizes)))


class Reads:
    """Plans reads. Tensors with equal destinations share a search.

    In a checkpoint of thousands of tensors on thousands of ranks, a search through all chunks of
    each would dominate the cost of planning a load.
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple[tuple[Box, ...], torch.Size, int], tuple[Read, ...]] = {}

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
        chunks = Index(ChunkList.of(stored.chunks, len(stored.size)).array)
        for position, box in enumerate(destinations):
            pieces = pieces_of(box, chunks)
            reads += [_read(position, box, *piece) for piece in pieces]
            holes += holes_of(box, pieces)
        if not holes:
            self._earlier[key] = tuple(reads)
        return tuple(reads), holes


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
