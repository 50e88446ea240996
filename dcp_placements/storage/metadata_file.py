"""The ``.metadata`` file: torch's pickle, followed by an index.

Torch ignores the bytes after the pickle. One rename puts both in place, so both are always of the
same save. The beginning of the pickle has the digest of the index, so that a mixture of two files
is noticed.

The file has the form that every torch from 2.10 on reads, under every Python: fields that a later
torch added are left out. Files of all these versions can be read.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import IO, Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import PlacementError
from dcp_placements.items import quiet_gc
from dcp_placements.storage.columns import IndexDamage, components, joined
from dcp_placements.storage.index import (
    INDEX_VERSION,
    OtherVersion,
    RowIndex,
    archive_in,
    files_in_archive,
    index_of,
    packed_index,
    unpacked_archive,
    unpacked_index,
)
from dcp_placements.storage.metadata_pickler import (
    is_refusing,
    marked_digest,
    refusing_pickle,
    stock_pickle,
    values_pickle,
)
from dcp_placements.storage.metadata_unpickler import load_metadata_pickle, load_safely
from dcp_placements.storage.torch_metadata import (
    ChunkList,
    Entries,
    build_entries,
    check_entries,
    check_facts,
)

Opener = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens a file for reading by position; it may be called several times."""

Load = Callable[[IO[bytes]], Any]
"""Returns the value of a pickle of metadata."""

UnusedIndex = IndexDamage | OtherVersion
"""Why torch's pickle is read in place of an index."""

_HEAD_NBYTES = 1 << 10


def write_metadata(metadata: Metadata, stream: IO[bytes], *, stock_metadata: bool = True) -> bytes:
    """Write a ``.metadata`` file.

    Args:
        metadata: Metadata with entries and rows.
        stream: The file.
        stock_metadata: Whether to write what plain DCP reads; otherwise plain DCP refuses the file.

    Returns:
        The index in the file, without the pickle before it.
    """
    with quiet_gc():
        index = index_of(metadata)
        packed, digest = packed_index(index, values_pickle(metadata, index.entries.forms))
        blocks = (
            stock_pickle(metadata, index, digest) if stock_metadata else [refusing_pickle(digest)]
        )
        for block in chain(blocks, [packed]):
            stream.write(block)
        return packed


class SentRows(Mapping[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data`` of a save as the packed index, which is unpacked when it is used.

    Torch sends the metadata of a save to all ranks, which rarely use them. As torch's
    objects, the rows would be many times as large, and take as long to create as a rank's plan.

    Args:
        packed: The index, as ``write_metadata`` returns it.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    @cached_property
    def _rows(self) -> Any:
        with quiet_gc():
            return _indexed(self._packed, load_metadata_pickle).storage_data

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        location: StorageInfo = self._rows[index]
        return location

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> Any:
        return SentRows, (self._packed,)


class SentEntries(dict[str, Any]):
    """``Metadata.state_dict_metadata`` whose pickle has each form of an entry once."""

    def __reduce__(self) -> Any:
        with quiet_gc():
            try:
                entries = build_entries(self)
            except (AttributeError, TypeError, ValueError):
                return dict, (dict(self),)  # a user has added values that no checkpoint has
            forms = [
                form if number < 0 else replace(form, chunks=entries.lists[number].array)
                for form, number in zip(entries.forms, entries.list_of, strict=True)
            ]
            columns = components(entries.fqns), entries.form_of, forms, entries.list_of
            return _received_entries, (zlib.compress(pickle.dumps(columns), 1),)


def _received_entries(packed: bytes) -> SentEntries:
    with quiet_gc():
        fqns, form_of, forms, list_of = pickle.loads(zlib.decompress(packed))
        whole = [
            form if number < 0 else replace(form, chunks=ChunkList(form.chunks))
            for form, number in zip(forms, list_of, strict=True)
        ]
        return SentEntries(Entries(joined(fqns), form_of, whole, [], list_of).stored())


def send_compactly(metadata: Metadata, packed: bytes) -> None:
    """Make the pickle of metadata small: replace their entries and rows by compact mappings.

    Args:
        metadata: Metadata of a save.
        packed: Their index, as ``write_metadata`` returns it.
    """
    metadata.state_dict_metadata = SentEntries(metadata.state_dict_metadata)
    metadata.storage_data = SentRows(packed)


def read_metadata(
    opener: Opener,
    *,
    restricted: bool = False,
    newer: set[str] | None = None,
    unused: list[UnusedIndex] | None = None,
) -> Metadata:
    """Return the metadata in a ``.metadata`` file, of any writer and any torch.

    If the file has an index, the index is read. If the index is damaged or of another version, the
    pickle is read, with a warning.

    Args:
        opener: Opens the file.
        restricted: Whether the file is of unknown origin: nothing that it names is called then,
            everything is checked, and entries and rows are in columns.
        newer: With ``restricted``, receives texts of what ``pickle.load`` with this torch and
            Python would fail at.
        unused: Receives the reasons for which an index is not used.

    Raises:
        PlacementError: The index is that of another save; or it cannot be used, and there is no
            stock metadata.
        RefusedGlobal: A restricted file names something that DCP's metadata do not use.
        Exception: The file is broken, or has values that DCP's own readers do not expect; of any
            type.
    """
    load: Load = partial(load_safely, newer=newer) if restricted else load_metadata_pickle
    with quiet_gc(), opener() as stream:
        head = stream.read(_HEAD_NBYTES)
        metadata = None
        try:
            data = _archive_of(stream, head)
            metadata = None if data is None else _indexed(data, load)
        except (IndexDamage, OtherVersion) as unusable:
            way_out, serves = _ways_out(unusable)
            if is_refusing(head):
                raise PlacementError(
                    f"the index of .metadata cannot be used: {unusable}\n"
                    "    why:         it was saved with stock_metadata=False, so nothing else says "
                    "what is where\n"
                    f"    way out:     {way_out}"
                ) from unusable
            if unused is not None:
                unused.append(unusable)
            warnings.warn(
                f"the index of .metadata cannot be used: {unusable}; the pickle before it is read "
                f"in its place\n    way out:     {serves}",
                stacklevel=2,
            )
        if metadata is None:
            stream.seek(0)
            metadata = load(stream)
        return in_columns(metadata) if restricted else metadata


def _ways_out(unusable: UnusedIndex) -> tuple[str, str]:
    """Return two ways out of an unusable index: without stock metadata, and with them."""
    renewed = "dcp-placements stock-metadata PATH"
    if isinstance(unusable, IndexDamage):
        return "copy .metadata again, or load another checkpoint", renewed
    release = f"a {'newer' if unusable.version > INDEX_VERSION else 'older'} dcp-placements"
    return release, release if unusable.version > INDEX_VERSION else renewed


def read_file_names(opener: Opener) -> set[str]:
    """Return the names of data files in the index of a checkpoint; empty without an index.

    Args:
        opener: Opens the ``.metadata`` file.

    Raises:
        Exception: The index is damaged, or names files that no checkpoint has.
    """
    with opener() as stream:
        data = _archive_of(stream, stream.read(_HEAD_NBYTES))
        return set() if data is None else set(files_in_archive(data))


def read_stock_pickle(opener: Opener) -> Metadata | None:
    """Return the metadata in the pickle before an index; None unless the file has both.

    Args:
        opener: Opens the ``.metadata`` file.

    Raises:
        Exception: The same errors as those of ``read_metadata`` with ``restricted``.
    """
    with quiet_gc(), opener() as stream:
        head = stream.read(_HEAD_NBYTES)
        if marked_digest(head) is None or is_refusing(head):
            return None
        stream.seek(0)
        return in_columns(load_safely(stream))


def in_columns(metadata: Any) -> Metadata:
    """Return metadata of unknown origin, checked, with entries and rows in columns.

    Raises:
        TypeError: The value is no ``Metadata``, or a field is missing or of another type.
        ValueError: No checkpoint has such a number or file name.
    """
    if type(metadata) is not Metadata:
        raise TypeError(f"a {type(metadata).__name__} in place of a Metadata")
    check_facts(metadata)
    rows = metadata.storage_data
    assert isinstance(rows, RowIndex), "its entries and places are in columns since they were read"
    check_entries(rows.entries, len(rows))
    return metadata


def with_columns(metadata: Metadata, rows: RowIndex) -> Metadata:
    """Give metadata the entries and rows of an index; return it."""
    metadata.state_dict_metadata = rows.entries.stored()
    metadata.storage_data = rows
    return metadata


def _archive_of(stream: IO[bytes], head: bytes) -> bytes | None:
    """Return the archive of the index of a file that begins with ``head``; None without an index.

    Raises:
        IndexDamage: The index is missing although ``head`` names one, or is damaged.
        OtherVersion: The index is of another version.
        PlacementError: The index is that of another save.
    """
    archive = archive_in(stream)
    if archive is None:
        if marked_digest(head) is not None:
            raise IndexDamage("it is missing")
        return None
    data, digest = archive
    if digest != marked_digest(head):
        raise PlacementError(
            "the index at the end of .metadata is not that of the metadata before it\n"
            "    likely:      it was copied over the .metadata of another save, and the copy was "
            "cut off\n"
            "    way out:     copy it again, or load another checkpoint"
        )
    return data


def _indexed(data: bytes, load: Load) -> Metadata:
    """Return the metadata in an archive."""
    members = unpacked_archive(data)
    value = load(io.BytesIO(members["values"]))
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not Metadata:
        raise IndexDamage("its values are not those of metadata")
    metadata, forms = value
    return with_columns(metadata, unpacked_index(members, forms))
