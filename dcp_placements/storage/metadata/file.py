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
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import IO, Any

from dcp_placements._torch import Metadata
from dcp_placements.errors import PlacementError
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.index.blocks import Blocks, Opener, blocks_of
from dcp_placements.storage.index.columns import IndexDamage
from dcp_placements.storage.index.entries import Stock, StoredEntries, entries_of
from dcp_placements.storage.index.packing import MOST_NUMBERS, PackedIndex, packed_index
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.metadata.checks import check_metadata
from dcp_placements.storage.metadata.pickles.metadata_pickle import (
    PATHS,
    PATHS_OF_3_13,
    load_restricted,
)
from dcp_placements.storage.metadata.pickles.pickle_check import check_stock_pickle
from dcp_placements.storage.metadata.pickles.stock_pickle import (
    Body,
    is_refusing,
    marked_digest,
    marker,
    pickled_head,
    plain_metadata,
    portable_pickler,
    refusing_pickle,
)
from dcp_placements.storage.metadata.pickles.tensor_properties import PICKLED_PROPERTIES

_HEAD_NBYTES, _CLASS_NBYTES = 1 << 10, 1 << 8


def write_metadata(metadata: Metadata, stream: IO[bytes], *, stock_metadata: bool = True) -> None:
    """Write a ``.metadata`` file.

    Args:
        metadata: Its ``storage_data`` is a ``StorageTable``.
        stream: The file.
        stock_metadata: Whether to write what plain DCP reads; otherwise it is refused.
    """
    with quiet_gc():
        entries = entries_of(metadata.state_dict_metadata)
        assert isinstance(metadata.storage_data, StorageTable)
        index = metadata.storage_data.index_for(entries)
        buffer = io.BytesIO()
        portable_pickler(buffer).dump(
            (plain_metadata(metadata), list(entries.properties), list(entries.others))
        )
        head, memo = pickled_head(metadata, entries, index) if stock_metadata else (b"", None)
        values = buffer.getvalue()
        blocks, end, digest = packed_index(values, entries, index, head_nbytes=len(head))
        pieces = (
            [refusing_pickle(digest)]
            if memo is None
            else chain([marker(digest), head], Body(memo, entries, index).pieces())
        )
        nbytes = 0
        for piece in pieces:
            stream.write(piece)
            nbytes += len(piece)
        for block in (*blocks, end(nbytes)):
            stream.write(block)


def read_metadata(
    opener: Opener,
    *,
    restricted: bool = False,
    whole: bool = False,
    newer: set[str] | None = None,
) -> Metadata:
    """Return the metadata in a ``.metadata`` file, whoever wrote it, with whichever torch.

    Of a file with an index the parts that are used are read, when they are used. Where one is
    damaged, the pickle serves from then on, with a warning.

    Args:
        opener: Opens the file, for reading by position.
        restricted: Whether it may be anybody's: only DCP's own classes are made then.
        whole: Whether to check all of a file with an index: every block of the index, and that its
            pickle is the one that the index describes, which calls nothing.
        newer: What ``pickle.load`` with this torch and Python would fail at is added here, as
            text. Only where it is restricted.

    Raises:
        RefusedGlobal: It is restricted and names something else.
        PlacementError: The index is that of another save; or it is damaged, and there is no stock
            metadata. The result raises it as well, if it finds the damage when a part is used.
        pickle.UnpicklingError: It is restricted, and broken.
    """
    with quiet_gc(), opener() as stream:
        head = stream.read(_HEAD_NBYTES)
        # Megatron's metadata have a class of their own, which adds nothing: read as DCP's they do
        # not need Megatron. The class is the first name in the file.
        restricted = restricted or b"megatron" in head[:_CLASS_NBYTES]
        load: Callable[[IO[bytes]], Any] = (
            partial(load_restricted, newer=newer) if restricted else _load
        )
        digest = marked_digest(head)
        stock = _StockPickle(opener, load, digest, is_checked=restricted)
        try:
            blocks = blocks_of(opener, stream)
            if blocks is not None:
                _check_same(blocks, digest)
                packed = PackedIndex(blocks, MOST_NUMBERS if restricted else None)
                indexed = _indexed(packed, load, stock)
                if whole:
                    blocks.check()
                    _check_pickle(opener, blocks, packed.head_nbytes, indexed)
                return indexed
        except IndexDamage as damage:
            return stock(damage)
        if digest is not None:
            return stock(IndexDamage("it is missing"))
        stream.seek(0)
        metadata: Metadata = load(stream)
        return metadata


class _StockPickle:
    """The pickle before an index, which serves where the index is damaged.

    Args:
        opener: Opens the file.
        load: Loads the pickle.
        digest: Of the index, which the pickle begins with; None where it does not.
        is_checked: Whether the file may be anybody's.
    """

    def __init__(
        self,
        opener: Opener,
        load: Callable[[IO[bytes]], Any],
        digest: bytes | None,
        *,
        is_checked: bool,
    ) -> None:
        self._opener, self._load, self._digest = opener, load, digest
        self._is_checked = is_checked
        self._metadata: Metadata | None = None

    def __call__(self, damage: IndexDamage) -> Metadata:
        """Return its metadata, with a warning at the first call.

        Args:
            damage: What is wrong with the index.

        Raises:
            PlacementError: There is none, or it is another save's by now.
        """
        if self._metadata is not None:
            return self._metadata
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
            metadata: Metadata = self._load(stream)
        if self._is_checked:
            check_metadata(metadata)
        self._metadata = metadata
        return metadata


def _check_same(blocks: Blocks, digest: bytes | None) -> None:
    """Check that an index is that of the pickle before it, which has its digest."""
    if blocks.digest != digest:
        raise PlacementError(
            "the index at the end of .metadata is not that of the metadata before it\n"
            "    likely:      it was copied over the .metadata of another save, and the copy was "
            "cut off\n"
            "    way out:     copy it again, or load another checkpoint"
        )


def _check_pickle(opener: Opener, blocks: Blocks, head_nbytes: int, metadata: Metadata) -> None:
    check_metadata(metadata)
    assert isinstance(metadata.storage_data, StorageTable)
    check_stock_pickle(
        opener,
        entries_of(metadata.state_dict_metadata),
        metadata.storage_data.index,
        digest=blocks.digest,
        nbytes=blocks.pickle_nbytes,
        head=head_nbytes,
    )


def _indexed(packed: PackedIndex, load: Callable[[IO[bytes]], Any], stock: Stock) -> Metadata:
    value = load(io.BytesIO(packed.values))
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not Metadata:
        raise IndexDamage("its values are not those of metadata")
    metadata: Metadata
    metadata, properties, others = value
    entries = packed.entries(properties, others)
    stored: Any = StoredEntries(entries, stock)
    metadata.state_dict_metadata = stored
    metadata.storage_data = StorageTable(packed.rows(entries), stock)
    return metadata


def _load(file: IO[bytes]) -> Any:
    return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = PICKLED_PROPERTIES.get((module, name))
        if found is not None:
            return found
        return super().find_class(PATHS if module == PATHS_OF_3_13 else module, name)
