"""Which stored chunks fill a rank's tensors, and the proof that they do.

Every destination chunk must be tiled by what is read into it. Stock planners do not look, so a
chunk that nobody stored leaves old values behind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

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


def read_items(
    fqn: str, stored: StoredChunks, destinations: Sequence[Box]
) -> tuple[list[ReadItem], list[Box]]:
    """Return the reads that fill ``destinations``, and the boxes that no stored chunk holds.

    Args:
        fqn: The checkpoint's key.
        stored: Its stored chunks.
        destinations: Boxes of the checkpoint's tensor; a read item's ``dest_index`` carries the
            position in this list, and its offsets are relative to that box.
    """
    items: list[ReadItem] = []
    holes: list[Box] = []
    for position, box in enumerate(destinations):
        found = stored.meeting(box)
        for index, piece in found:
            origin = stored.boxes[index].offsets
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(fqn, box.offsets, position),
                    dest_offsets=_relative(piece.offsets, box.offsets),
                    storage_index=MetadataIndex(fqn, origin, index),
                    storage_offsets=_relative(piece.offsets, origin),
                    lengths=torch.Size(piece.sizes),
                )
            )
        pieces = [piece for _, piece in found]
        if pieces != [box] and not tiles(box, pieces):
            holes += uncovered(box, pieces)
    return items, holes


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
