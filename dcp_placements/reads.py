"""Which stored chunks fill a rank's tensors, and the proof that they do.

Every destination chunk must be tiled by what is read into it. Stock planners do not look, so a
chunk that nobody stored leaves old values behind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence

import torch

from dcp_placements.interop import LoadItemType, MetadataIndex, ReadItem, TensorStorageMetadata
from dcp_placements.layout import Box
from dcp_placements.tiling import intersection, tiles, uncovered


class StoredChunks:
    """The stored chunks of one tensor, found by where they lie.

    Chunks are sorted along the dim that is cut most, so that the few that a box meets are found
    without looking at the others.
    """

    def __init__(self, metadata: TensorStorageMetadata) -> None:
        self.chunks = metadata.chunks
        self.boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in metadata.chunks]
        self._exact = {box: index for index, box in enumerate(self.boxes)}
        order = [index for index, box in enumerate(self.boxes) if box.numel]
        ndim = len(metadata.size)
        self._dim = max(
            range(ndim),
            key=lambda dim: len({self.boxes[index].offsets[dim] for index in order}),
            default=None,
        )
        if self._dim is not None:
            dim = self._dim
            order.sort(key=lambda index: self.boxes[index].offsets[dim])
            self._starts = [self.boxes[index].offsets[dim] for index in order]
            self._longest = max((self.boxes[index].sizes[dim] for index in order), default=0)
        self._order = order

    def meeting(self, box: Box) -> list[tuple[int, Box]]:
        """Return ``(chunk index, shared box)`` for every stored chunk that meets ``box``."""
        exact = self._exact.get(box)
        if exact is not None:
            return [(exact, box)]
        candidates: Sequence[int] = self._order
        if self._dim is not None:
            start = box.offsets[self._dim]
            low = bisect_right(self._starts, start - self._longest)
            candidates = self._order[low : bisect_left(self._starts, start + box.sizes[self._dim])]
        shared = ((index, intersection(self.boxes[index], box)) for index in candidates)
        return [(index, piece) for index, piece in shared if piece is not None]


class Reads:
    """Makes read items. Tensors that lie alike find their chunks alike, so one search serves many.

    In a checkpoint of thousands of tensors on thousands of ranks, looking at all chunks of each is
    what planning a load costs.
    """

    def __init__(self) -> None:
        # Lists are found by identity (metadata may share one), then by what they hold.
        self._by_list: dict[int, StoredChunks] = {}
        self._by_size: dict[tuple[torch.Size, int], StoredChunks] = {}
        self._at: dict[tuple[Hashable, int], int] = {}

    def of(
        self,
        fqn: str,
        stored: TensorStorageMetadata,
        destinations: Sequence[Box],
        *,
        like: Hashable = None,
    ) -> tuple[list[ReadItem], list[Box]]:
        """Return the reads that fill ``destinations``, and the boxes that no stored chunk holds.

        Args:
            fqn: The checkpoint's key.
            stored: Its metadata.
            destinations: Boxes of the checkpoint's tensor; a read item's ``dest_index`` carries the
                position in this list, and its offsets are relative to that box.
            like: What tensors with these destinations have in common.
        """
        items: list[ReadItem] = []
        holes: list[Box] = []
        for position, box in enumerate(destinations):
            at = self._at.get((like, position)) if like is not None else None
            if at is not None and _is_at(stored, at, box):
                items.append(_whole_read(fqn, box, position, at))
                continue
            # Often the chunk is stored as it is wanted: found without sorting all the others.
            at = _find(stored, box)
            if at is not None:
                self._at[like, position] = at
                items.append(_whole_read(fqn, box, position, at))
                continue
            known = self._chunks(stored)
            found = known.meeting(box)
            items += [_read(fqn, box, position, i, known.boxes[i], piece) for i, piece in found]
            pieces = [piece for _, piece in found]
            if pieces != [box] and not tiles(box, pieces):
                holes += uncovered(box, pieces)
        return items, holes

    def _chunks(self, stored: TensorStorageMetadata) -> StoredChunks:
        known = self._by_list.get(id(stored.chunks))
        if known is not None:
            return known
        alike = self._by_size.get((stored.size, len(stored.chunks)))
        if alike is None or alike.chunks != stored.chunks:
            alike = self._by_size[stored.size, len(stored.chunks)] = StoredChunks(stored)
        self._by_list[id(stored.chunks)] = alike
        return alike


def _find(stored: TensorStorageMetadata, box: Box) -> int | None:
    matches = (
        at
        for at, chunk in enumerate(stored.chunks)
        if chunk.offsets == box.offsets and chunk.sizes == box.sizes
    )
    return next(matches, None)


def _is_at(stored: TensorStorageMetadata, at: int, box: Box) -> bool:
    if at >= len(stored.chunks):
        return False
    chunk = stored.chunks[at]
    return chunk.offsets == box.offsets and chunk.sizes == box.sizes


def _whole_read(fqn: str, box: Box, position: int, at: int) -> ReadItem:
    origin = _ORIGINS[len(box.sizes)] if len(box.sizes) < len(_ORIGINS) else _origin(len(box.sizes))
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(fqn, box.offsets, position),
        origin,
        MetadataIndex(fqn, box.offsets, at),
        origin,
        torch.Size(box.sizes),
    )


def _read(fqn: str, box: Box, position: int, at: int, stored: Box, piece: Box) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(fqn, box.offsets, position),
        _relative(piece.offsets, box.offsets),
        MetadataIndex(fqn, stored.offsets, at),
        _relative(piece.offsets, stored.offsets),
        torch.Size(piece.sizes),
    )


def _origin(ndim: int) -> torch.Size:
    return torch.Size([0] * ndim)


_ORIGINS = [_origin(ndim) for ndim in range(8)]


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


def _relative(offsets: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([a - b for a, b in zip(offsets, origin, strict=True)])
