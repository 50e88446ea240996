"""The ``.metadata`` file: torch's pickle, and behind its end an index that is read in part.

Torch ignores what stands behind the pickle. Both are put in place in one step, so a file has both
of one save, or of another. The beginning of the pickle names the index, so that a mixture of two
files is noticed.

What is written has the form that every torch from 2.10 on reads, under every Python: fields that a
later torch added are left out. What is read may have been written by any of them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain
from typing import IO, Any

from dcp_placements._torch import Metadata, StorageMeta
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.index.blocks import Blocks, Opener, blocks_of
from dcp_placements.storage.index.columns import IndexDamage
from dcp_placements.storage.index.packing import packed_index
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.index.stored_entries import Stock, StoredEntries, entries_of
from dcp_placements.storage.index.unpacking import PackedIndex
from dcp_placements.storage.metadata.description import (
    Description,
    StockPickle,
    read_description,
    read_parts,
)
from dcp_placements.storage.metadata.pickles.metadata_pickle import (
    MEGATRON,
    PATHS,
    PATHS_OF_3_13,
    PlainStorageMeta,
)
from dcp_placements.storage.metadata.pickles.stock_body import Body, marker, refusing_pickle
from dcp_placements.storage.metadata.pickles.stock_pickle import (
    pickled_head,
)
from dcp_placements.storage.metadata.pickles.tensor_properties import (
    PICKLED_PROPERTIES,
    plain_properties,
)


def write_metadata(
    metadata: Metadata, stream: IO[bytes], *, stock_metadata: bool = True
) -> SentIndex:
    """Write a ``.metadata`` file.

    Args:
        metadata: Its ``storage_data`` is a ``StorageTable``.
        stream: The file.
        stock_metadata: Whether to write what plain DCP reads; otherwise it is refused.

    Returns:
        The index in the file.
    """
    with quiet_gc():
        entries = entries_of(metadata.state_dict_metadata)
        assert isinstance(metadata.storage_data, StorageTable)
        if isinstance(metadata.planner_data, SentPart):
            metadata = replace(metadata, planner_data=dict(metadata.planner_data))
        index = metadata.storage_data.index_for(entries)
        head = pickled_head(metadata, entries, index)
        blocks, end, digest = packed_index(head.values, entries, index)
        pieces = (
            chain([marker(digest), head.data], Body(head.memo, entries, index).pieces())
            if stock_metadata
            else [refusing_pickle(digest)]
        )
        nbytes = 0
        for piece in pieces:
            stream.write(piece)
            nbytes += len(piece)
        for block in (*blocks, end(nbytes)):
            stream.write(block)
        return SentIndex(b"".join([*blocks, end(0)]))


class SentIndex:
    """The index of a ``.metadata`` file, as it is sent to other ranks; it is read when it is used.

    Torch sends the metadata to all ranks after a save, where they are mostly not used. Their
    objects are many times as large as the index, and take as long to make as a rank's plan.

    Args:
        packed: The index, without the pickle before it.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata, as they are read from the file."""
        with quiet_gc():
            blocks = blocks_of(lambda: io.BytesIO(self._packed), io.BytesIO(self._packed))
            assert blocks is not None
            return _indexed(blocks, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentIndex, (self._packed,)


class SentPart(Mapping[str, Any]):
    """A mapping of ``Metadata`` that is sent as a part of its index.

    Args:
        index: The index.
        name: The attribute of ``Metadata``.
        held: Its value, where that is at hand.
    """

    def __init__(self, index: SentIndex, name: str, held: Mapping[str, Any] | None = None) -> None:
        self._index = index
        self._name = name
        self._held = held

    @property
    def _mapping(self) -> Mapping[str, Any]:
        if self._held is None:
            held: Mapping[str, Any] = getattr(self._index.metadata, self._name)
            self._held = held
        return self._held

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __repr__(self) -> str:
        return f"SentPart({self._name!r}, {len(self)} keys)"

    def __reduce__(self) -> tuple[Any, ...]:
        return SentPart, (self._index, self._name)


def read_metadata(opener: Opener, *, restricted: bool = False) -> Metadata:
    """Return the metadata in a ``.metadata`` file, whoever wrote it, with whichever torch.

    Of a file with an index the parts that are used are read, when they are used. Where one is
    damaged, the pickle serves from then on, with a warning.

    Args:
        opener: Opens the file, for reading by position.
        restricted: Whether it may be anybody's: it is read as by ``read_description`` then.

    Raises:
        PlacementError: The index is that of another save; or it is damaged, and there is no stock
            metadata. The result raises it as well, if it finds the damage when a part is used.
        Exception: It is restricted, and refused, as of ``read_description``.
    """
    if restricted:
        return torch_metadata(read_description(opener))
    metadata: Metadata = read_parts(opener, _indexed, _load)
    return metadata


def torch_metadata(description: Description) -> Metadata:
    """Return metadata in torch's form; torch's objects are made for what is looked up."""
    meta, stock = description.storage_meta, description.stock
    if isinstance(meta, PlainStorageMeta):
        known = {field.name for field in fields(StorageMeta)}
        meta = StorageMeta(**{name: held for name, held in vars(meta).items() if name in known})
    in_stock: Stock | None = None if stock is None else lambda damage: torch_metadata(stock(damage))
    entries: Any = StoredEntries(description.entries, in_stock)
    rows = StorageTable(description.rows, in_stock)
    metadata = Metadata(entries, description.planner_data, rows, meta)
    metadata.version = description.version
    return metadata


def description_of(metadata: Metadata) -> Description:
    """Return torch's metadata, with a ``StorageTable``, without torch's objects."""
    assert isinstance(metadata.storage_data, StorageTable)
    entries = entries_of(metadata.state_dict_metadata)
    rows = metadata.storage_data.index_for(entries)
    rest = metadata.planner_data, metadata.storage_meta, metadata.version
    return Description(entries, rows, *rest)


def _indexed(blocks: Blocks, stock: StockPickle[Metadata] | None) -> Metadata:
    packed = PackedIndex(blocks)
    value = _load(io.BytesIO(packed.values))
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not Metadata:
        raise IndexDamage("its values are not those of metadata")
    metadata: Metadata
    metadata, properties, others = value
    entries = packed.entries(list(map(plain_properties, properties)), others)
    stored: Any = StoredEntries(entries, stock)
    metadata.state_dict_metadata = stored
    metadata.storage_data = StorageTable(packed.rows(entries), stock)
    return metadata


def _load(file: IO[bytes]) -> Any:
    return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Megatron's class adds nothing that a load needs. It needs Megatron.
        if (module, name) == MEGATRON:
            return Metadata
        found = PICKLED_PROPERTIES.get((module, name))
        if found is not None:
            return found
        return super().find_class(PATHS if module == PATHS_OF_3_13 else module, name)
