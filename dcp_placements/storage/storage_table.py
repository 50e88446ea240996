"""``Metadata.storage_data`` by an index: torch's objects are made for the rows looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.distributed.checkpoint import ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import Fault, PlacementError, format_faults
from dcp_placements.storage.entries import Entries
from dcp_placements.storage.index import RowIndex, index_of_rows
from dcp_placements.storage.written import Rows, place_of


class StorageTable(Mapping[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data``: a read-only mapping as torch's dict, and pickled as that.

    Args:
        index: Of its rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self.index = index

    def beginning(self, prefix: str) -> list[tuple[MetadataIndex, StorageInfo]]:
        """Return the items whose keys begin with ``prefix``, without a search of other rows."""
        fqns = [fqn for fqn in self.index.fqns if fqn.startswith(prefix)]
        return [(index, self[index]) for fqn in fqns for index in self._indices(fqn)]

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        (info,) = self.infos([index])
        if info is None:
            raise KeyError(index)
        return info

    def infos(self, indices: Sequence[MetadataIndex]) -> list[StorageInfo | None]:
        """Return the rows of chunks; None where there is none."""
        files, steps = self.index.files, self.index.transforms
        return [
            None
            if file < 0
            else StorageInfo(
                files[file], start, length, None if (one := steps[number]) is None else list(one)
            )
            for file, number, start, length in self.index.find(indices).T.tolist()
        ]

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn in self.index.fqns:
            yield from self._indices(fqn)

    def __repr__(self) -> str:
        return f"StorageTable({len(self)} entries)"

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _indices(self, fqn: str) -> Iterator[MetadataIndex]:
        for position, offset in enumerate(self.index.offsets_of(fqn)):
            yield MetadataIndex(fqn, offset, position)


def index_for(data: Mapping[MetadataIndex, StorageInfo], entries: Entries) -> RowIndex:
    """Return the index of ``storage_data`` that has the keys and the chunks of a state dict."""
    if isinstance(data, StorageTable):
        if data.index.entries is entries:
            return data.index
        return index_of_rows(Rows.of(data.index.all_rows()), entries)
    rows = Rows.of(place_of(index.fqn, index.offset, info) for index, info in data.items())
    return index_of_rows(rows, entries)


def paths_of(data: Mapping[MetadataIndex, StorageInfo]) -> set[str]:
    """Return the files that ``storage_data`` names."""
    if isinstance(data, StorageTable):
        return set(data.index.files)
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
    infos = (
        places.infos(indices)
        if isinstance(places, StorageTable)
        else list(map(places.get, indices))
    )
    faults = [
        Fault(
            index.fqn,
            "the metadata name no file for "
            + ("it" if index.offset is None else f"the chunk at {tuple(index.offset)}"),
            DAMAGED_METADATA,
        )
        for index, info in zip(indices, infos, strict=True)
        if info is None
    ]
    if faults:
        raise PlacementError(format_faults("the checkpoint is not whole", faults))
    return cast(list[StorageInfo], infos)
