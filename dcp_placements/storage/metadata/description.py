"""A ``.metadata`` file of unknown origin: read without torch, checked, and never executed.

Torch ignores what stands behind the pickle. There is the index, which is read in its place.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Generic, TypeVar

from dcp_placements.errors import PlacementError
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.index.blocks import Blocks, Opener, blocks_of
from dcp_placements.storage.index.building import build_index, by_file
from dcp_placements.storage.index.columns import IndexDamage
from dcp_placements.storage.index.entries import Entries, build_entries
from dcp_placements.storage.index.row_index import RowIndex
from dcp_placements.storage.index.unpacking import MOST_NUMBERS, PackedIndex
from dcp_placements.storage.metadata.checks import (
    check_count,
    check_entries,
    check_files,
    check_provenance,
    check_rows,
)
from dcp_placements.storage.metadata.pickles.metadata_pickle import (
    PlainBytes,
    PlainChunk,
    PlainInfo,
    PlainMetadata,
    PlainProperties,
    PlainStorageMeta,
    PlainTensor,
    load_restricted,
)
from dcp_placements.storage.metadata.pickles.stock_body import is_refusing, marked_digest
from dcp_placements.storage.metadata.properties import Properties
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.table import StoredPlace, place_of, rows_of_places
from dcp_placements.storage.restricted_pickle import refusal

T = TypeVar("T")

_HEAD_NBYTES = 1 << 10
MOST_ROWS = 1 << 26
"""Chunks of a checkpoint of unknown origin that are handled one by one."""


@dataclass(slots=True)
class Description:
    """What metadata say of a checkpoint, without torch's objects.

    Attributes:
        entries: Of the keys.
        rows: The places of all chunks.
        planner_data: As the planner of the save left it.
        storage_meta: As its storage writer left it.
        version: Of DCP's format.
        stock: Serves where a part of an index is damaged that is read later; None for none.
    """

    entries: Entries
    rows: RowIndex
    planner_data: Any = None
    storage_meta: Any = None
    version: Any = None
    stock: Callable[[IndexDamage], Description] | None = None

    def files(self) -> set[str]:
        """Return the names of all files."""
        return set(self.rows.writers.files())


def read_description(
    opener: Opener, *, whole: bool = False, newer: set[str] | None = None
) -> Description:
    """Return what a ``.metadata`` file says, whoever wrote it, with whichever torch.

    Of a file with an index the parts that are used are read, when they are used.

    Args:
        opener: Opens the file, for reading by position.
        whole: Whether to check every block of an index.
        newer: What ``pickle.load`` with this torch and Python would fail at is added here, as text.

    Raises:
        RefusedGlobal: It names something that DCP's metadata do not.
        PlacementError: The index is that of another save; or it is damaged, and there is no stock
            metadata.
        Exception: It is broken, or something is not what DCP's own readers expect; of any type.
    """
    load = partial(load_restricted, newer=newer)

    def indexed(blocks: Blocks, stock: StockPickle[Description]) -> Description:
        packed = PackedIndex(blocks, MOST_NUMBERS)
        description = _indexed(packed, load(io.BytesIO(packed.values)))
        description.stock = stock
        return description

    def checked(blocks: Blocks, stock: StockPickle[Description]) -> Description:
        blocks.check()
        try:
            return indexed(blocks, stock)
        except IndexDamage as damage:
            blocks.check()  # the file may be another one by now
            # A load may go by the parts of it that are right.
            raise refusal(f"its index has right checksums, but: {damage}") from damage

    read = checked if whole else indexed
    return read_parts(opener, read, lambda stream: _pickled(load(stream)))


def read_file_names(opener: Opener) -> set[str]:
    """Return the names of the data files of a checkpoint; of an index nothing else is read.

    Args:
        opener: Opens its ``.metadata``, for reading by position.

    Raises:
        Exception: As of ``read_description``.
    """
    return read_parts(
        opener,
        lambda blocks, stock: set(PackedIndex(blocks, MOST_NUMBERS).writers.files()),
        lambda stream: _pickled(load_restricted(stream)).files(),
    )


def read_stock_pickle(opener: Opener) -> Description | None:
    """Return what the pickle before an index says, which torch reads; None where one is missing.

    Args:
        opener: Opens the ``.metadata`` file, for reading by position.

    Raises:
        Exception: As of ``read_description``.
    """
    with quiet_gc(), opener() as stream:
        head = stream.read(_HEAD_NBYTES)
        if marked_digest(head) is None or is_refusing(head):
            return None
        stream.seek(0)
        return _pickled(load_restricted(stream))


class StockPickle(Generic[T]):
    """The pickle before an index, which serves where the index is damaged.

    Args:
        opener: Opens the file.
        load: Reads the pickle.
        digest: Of the index, which the pickle begins with; None where it does not.
    """

    def __init__(
        self, opener: Opener, load: Callable[[IO[bytes]], T], digest: bytes | None
    ) -> None:
        self._opener, self._load, self._digest = opener, load, digest
        self._read: T | None = None

    def __call__(self, damage: IndexDamage) -> T:
        """Return what the pickle says, with a warning at the first call.

        Args:
            damage: What is wrong with the index.

        Raises:
            PlacementError: There is none, or it is another save's by now.
        """
        if self._read is not None:
            return self._read
        with quiet_gc(), self._opener() as stream:
            head = stream.read(_HEAD_NBYTES)
            if marked_digest(head) != self._digest:
                raise PlacementError(
                    ".metadata is not the file that was opened: another save has replaced it\n"
                    "    way out:     load again"
                )
            if is_refusing(head):
                raise PlacementError(
                    f"the index of .metadata cannot be used: {damage}\n"
                    "    why:         it was saved with stock_metadata=False, so nothing else says "
                    "what is where\n"
                    "    way out:     copy .metadata again, or load another checkpoint"
                ) from damage
            warnings.warn(
                f"the index of .metadata cannot be used: {damage}; all of .metadata is read in "
                "its place\n"
                "    way out:     dcp-placements merge-metadata PATH --rewrite",
                stacklevel=2,
            )
            stream.seek(0)
            self._read = self._load(stream)
        return self._read


def read_parts(
    opener: Opener,
    indexed: Callable[[Blocks, StockPickle[T]], T],
    pickled: Callable[[IO[bytes]], T],
) -> T:
    """Return what is read of a ``.metadata`` file: of its index, or of its pickle without one.

    Args:
        opener: Opens the file, for reading by position.
        indexed: Reads the index. Parts that it reads later may be damaged: the pickle serves then.
        pickled: Reads the pickle.

    Raises:
        PlacementError: The index is that of another save; or it is damaged, and there is no stock
            metadata.
    """
    with quiet_gc(), opener() as stream:
        digest = marked_digest(stream.read(_HEAD_NBYTES))
        stock = StockPickle(opener, pickled, digest)
        try:
            blocks = blocks_of(opener, stream)
            if blocks is not None:
                _check_same(blocks, digest)
                return indexed(blocks, stock)
        except IndexDamage as damage:
            return stock(damage)
        if digest is not None:
            return stock(IndexDamage("it is missing"))
        stream.seek(0)
        return pickled(stream)


def _check_same(blocks: Blocks, digest: bytes | None) -> None:
    """Check that an index is that of the pickle before it, which has its digest."""
    if blocks.digest != digest:
        raise PlacementError(
            "the index at the end of .metadata is not that of the metadata before it\n"
            "    likely:      it was copied over the .metadata of another save, and the copy was "
            "cut off\n"
            "    way out:     copy it again, or load another checkpoint"
        )


def _indexed(packed: PackedIndex, value: Any) -> Description:
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not PlainMetadata:
        raise IndexDamage("its values are not those of metadata")
    metadata, properties, others = value
    if others:
        raise TypeError(f"a {type(others[0]).__name__} in place of a key's metadata")
    if not all(type(one) is PlainProperties for one in properties):
        raise TypeError("properties of a tensor that are none")
    entries = packed.entries([one.value for one in properties], ())
    rows = packed.rows(entries)
    check_entries(entries, len(rows))
    check_files(rows.writers.files())
    return _description(metadata, entries, rows)


def _pickled(metadata: Any) -> Description:
    if type(metadata) is not PlainMetadata:
        raise TypeError(f"a {type(metadata).__name__} in place of a Metadata")
    keys, data = metadata.state_dict_metadata, metadata.storage_data
    if data is None:
        raise TypeError("no places of chunks")
    listed = 0

    def properties_of(entry: Any) -> Properties | None:
        nonlocal listed
        if type(entry) is PlainBytes:
            return None
        if type(entry) is not PlainTensor:
            raise TypeError(f"a {type(entry).__name__} in place of a key's metadata")
        listed += len(entry.chunks)
        check_count(listed, len(data))
        dims = len(entry.size)
        for chunk in entry.chunks:
            if type(chunk) is not PlainChunk:
                raise TypeError(f"a {type(chunk).__name__} in place of a chunk")
            if len(chunk.offsets) != dims or len(chunk.sizes) != dims:
                raise ValueError(f"a chunk of other dims than the {dims} of its tensor")
        return entry.properties.value

    if not all(type(fqn) is str for fqn in keys):
        raise TypeError("a key that is no text")
    rows = rows_of_places(_places(data))
    check_rows(rows)
    entries = build_entries(keys, properties_of)
    check_entries(entries, len(rows.rows))
    for chunks in entries.lists:
        if min(chunks.offsets.min(initial=0), chunks.sizes.min(initial=0)) < 0:
            raise ValueError("a chunk at a negative offset, or of a negative size")
    return _description(metadata, entries, build_index(by_file(rows), entries))


def _places(data: Mapping[Any, Any]) -> Iterator[StoredPlace]:
    for (fqn, offset), info in data.items():
        if type(info) is not PlainInfo:
            raise TypeError(f"a {type(info).__name__} in place of a chunk's place")
        if not all(type(step) is str for step in info.transform_descriptors or ()):
            raise TypeError("a transform that is no name")
        yield place_of(fqn, offset, info)


def _description(metadata: PlainMetadata, entries: Entries, rows: RowIndex) -> Description:
    check_provenance(stored(metadata) or {})
    meta = metadata.storage_meta
    if meta is not None and type(meta) is not PlainStorageMeta:
        raise TypeError(f"a {type(meta).__name__} in place of a StorageMeta")
    rest = metadata.planner_data, metadata.storage_meta, metadata.version
    return Description(entries, rows, *rest)
