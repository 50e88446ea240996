"""Which copy of a stored chunk is read, where there are several.

A copy in this rank's own file comes first, then one in a file that is opened anyway. For the other
chunks, rank r of a larger world takes the copies of rank r modulo the world that saved, so that
ranks spread over files. The choice is deterministic. Without a copy the canonical chunk is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_placements._torch import Metadata, MetadataIndex, ReadItem, StorageInfo
from dcp_placements.errors import Fault, PlacementError, format_faults
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.shadow_records import shadowed


@dataclass(frozen=True, slots=True)
class Packed:
    """The position of an entry in a pack.

    Attributes:
        position: Its number.
        count: Entries of the pack.
    """

    position: int
    count: int


DAMAGED_METADATA = (
    "likely:      .metadata was damaged, or another tool wrote it",
    "way out:     copy .metadata again, or load another checkpoint",
)

Source = tuple[StorageInfo, Packed | None]
"""A record, and the entry in it if it is a pack."""


class Copies:
    """The shadows of a checkpoint, as one rank sees them.

    Args:
        metadata: The checkpoint's.
        rank: This rank's number in the group that loads.
    """

    def __init__(self, metadata: Metadata, rank: int) -> None:
        provenance = stored(metadata)
        self._places: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
        self._reader = rank
        self._stand_in = rank % max(int((provenance or {}).get("world_size", 1)), 1)
        self._packs: dict[str, list[tuple[str, Packed]]] = {}
        for key, fqns in shadowed(provenance).items():
            for position, fqn in enumerate(fqns):
                self._packs.setdefault(fqn, []).append((key, Packed(position, len(fqns))))
        self._looked_up: dict[tuple[str, int, Any], StorageInfo | None] = {}

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self._packs)

    def sources(self, items: Sequence[ReadItem]) -> list[Source]:
        """Return where each of the items is read from.

        Raises:
            PlacementError: The metadata have no place of a chunk.
        """
        sources: list[Source] = [(info, None) for info in places_of(items, self._places)]
        if not self._packs:
            return sources
        own = f"__{self._reader}_"
        opened: set[str] = set()
        left = []
        for at, item in enumerate(items):
            path = sources[at][0].relative_path
            if item.storage_index.fqn in self._packs and not path.startswith(own):
                copy = self._of(item, (self._reader,))
                if copy is None:
                    left.append(at)
                    continue
                sources[at] = copy
            opened.add(sources[at][0].relative_path)
        for at in left:
            if sources[at][0].relative_path in opened:
                continue
            copy = self._of(items[at], self._writers(opened)) or self._of(
                items[at], (self._stand_in,)
            )
            if copy is not None:
                sources[at] = copy
            opened.add(sources[at][0].relative_path)
        return sources

    def _of(self, item: ReadItem, writers: Iterable[int]) -> Source | None:
        """Return a copy of what an item reads that one of these ranks wrote."""
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        chunk = () if offset is None else tuple(offset)
        for writer in writers:
            for key, packed in self._packs[fqn]:
                info = self._at(key, writer, chunk)
                if info is not None:
                    return info, packed
        return None

    def _at(self, key: str, writer: int, chunk: tuple[int, ...]) -> StorageInfo | None:
        # Tensors of one pack share one look-up.
        place = (key, writer, chunk)
        if place not in self._looked_up:
            index = MetadataIndex(key, torch.Size((writer, *chunk)))
            self._looked_up[place] = self._places.get(index)
        return self._looked_up[place]

    def _writers(self, opened: Iterable[str]) -> list[int]:
        """Return the ranks that wrote files."""
        names = (path.split("_")[2] for path in opened if path.startswith("__"))
        return sorted({int(name) for name in names if name.isdigit()})


def places_of(
    items: Iterable[ReadItem], places: Mapping[MetadataIndex, StorageInfo]
) -> list[StorageInfo]:
    """Return the places of the chunks and objects that items are read from.

    Raises:
        PlacementError: There is none of some; all of them in one error.
    """
    indices = [item.storage_index for item in items]
    try:
        return [places[index] for index in indices]
    except KeyError:
        faults = [
            Fault(
                index.fqn,
                "the metadata name no file for "
                + ("it" if index.offset is None else f"the chunk at {tuple(index.offset)}"),
                DAMAGED_METADATA,
            )
            for index in indices
            if index not in places
        ]
        raise PlacementError(format_faults("the checkpoint is not whole", faults)) from None
