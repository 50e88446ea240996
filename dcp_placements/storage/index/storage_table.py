"""``Metadata.storage_data`` by an index: torch's objects are made for the rows looked up."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from torch.distributed.checkpoint import Metadata, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import Fault, PlacementError, format_faults
from dcp_placements.storage.index.building import build_index, by_file
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import LookedUp, RowIndex
from dcp_placements.storage.metadata.table import (
    Rows,
    StoredPlace,
    rows_of_places,
)


class HasMetadata(Protocol):
    """What reads metadata when they are used."""

    @property
    def metadata(self) -> Metadata:
        """The metadata; their ``storage_data`` is a ``StorageTable``."""


class StorageTable(Mapping[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data``: a read-only mapping as torch's dict.

    Args:
        held: Its rows, of which the later one counts where two are for the same chunk; or their
            index, which may be packed, as ``__reduce__`` has it, until it is used; or what has
            read it when it is used.
        sent: What is pickled for the rows; None to pack their index.
    """

    def __init__(
        self,
        held: Rows | RowIndex | bytes | HasMetadata,
        sent: HasMetadata | None = None,
    ) -> None:
        self._held = held
        self._sent = sent

    @property
    def index(self) -> RowIndex:
        """The index of its rows."""
        if isinstance(self._held, RowIndex):
            return self._held  # asked for by every look-up
        if isinstance(self._held, bytes):
            held: RowIndex = pickle.loads(zlib.decompress(self._held))
            self._held = held
        elif isinstance(self._held, Rows):
            self._held = build_index(by_file(self._held))
        else:
            read = self._held.metadata.storage_data
            assert isinstance(read, StorageTable)
            self._held = read.index
        return self._held

    def index_for(self, entries: Entries) -> RowIndex:
        """Return the index of its rows that has the keys and the chunks of a state dict."""
        if isinstance(self._held, RowIndex) and self._held.entries is entries:
            return self._held
        return build_index(by_file(self.rows), entries)

    @cached_property
    def rows(self) -> Rows:
        """All rows. A rank that loads does not need them."""
        if isinstance(self._held, Rows):
            return self._held
        index = self.index
        return rows_of_places(
            StoredPlace(fqn, offset, file, start, length, index.transforms[transforms])
            for fqn in index.fqns
            for offset, (file, transforms, start, length) in index.rows_of(fqn)
        )

    def paths(self) -> set[str]:
        """Return the names of all files."""
        return set(self.index.writers.files())

    def beginning(self, prefix: str) -> list[tuple[MetadataIndex, StorageInfo]]:
        """Return the items whose keys begin with ``prefix``, without a search of other rows."""
        fqns = [fqn for fqn in self.index.fqns if fqn.startswith(prefix)]
        return [(index, self[index]) for fqn in fqns for index in self._indices(fqn)]

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        held = self.index
        row = held.row(index.fqn, index.offset, index.index)
        if row is None:
            raise KeyError(index)
        path, transforms, start, length = row
        steps = held.transforms[transforms]
        return StorageInfo(path, start, length, None if steps is None else list(steps))

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn in list(self.index.fqns):
            yield from self._indices(fqn)

    def __repr__(self) -> str:
        return f"StorageTable({len(self)} entries)"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._sent is not None:
            return StorageTable, (self._sent, self._sent)
        if isinstance(self._held, bytes):
            return StorageTable, (self._held,)
        return StorageTable, (self._packed(),)

    def _packed(self) -> bytes:
        held = replace(self.index, entries=None, looked_up=LookedUp())
        return zlib.compress(pickle.dumps(held, pickle.HIGHEST_PROTOCOL), 1)

    def _indices(self, fqn: str) -> list[MetadataIndex]:
        places = [places for _, places in self.index.places_of(fqn)]
        return [MetadataIndex(fqn, offset) for one in places for offset in one.all_offsets()]


def paths_of(data: Mapping[MetadataIndex, StorageInfo]) -> set[str]:
    """Return the files that ``storage_data`` names."""
    if isinstance(data, StorageTable):
        return data.paths()
    return {info.relative_path for info in data.values()}


DAMAGED_METADATA = (
    "likely:      .metadata was damaged, or another tool wrote it",
    "way out:     copy .metadata again, or load another checkpoint",
)


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
