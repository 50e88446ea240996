"""The ``.metadata`` file: a plain pickle of torch's classes, written without making the objects.

In torch's pickle the entries of two stored chunks differ only in a few numbers. The part that grows
with chunks and ranks is therefore written as an array of records of equal length, which refer to
shared values in the pickle's memo. ``pickle.load`` makes torch's objects of it. A footer behind the
end of the pickle, which torch ignores, describes how to read the records back as an array.

What is written has the form that every torch from 2.10 on reads, under every Python: fields that a
later torch added are left out. What is read may have been written by any of them.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import struct
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import IO, Any

import numpy as np
import torch

from dcp_placements._torch import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.layout.alike import BySequence
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.metadata.pickles.metadata_pickle import (
    PATHS,
    PATHS_OF_3_13,
    load_restricted,
)
from dcp_placements.storage.metadata.pickles.pickled_rows import (
    MemoNumbers,
    RecordKind,
    records_of,
    rows_by_kind,
    rows_of_records,
)
from dcp_placements.storage.metadata.pickles.tensor_properties import (
    PICKLED_PROPERTIES,
    portable_state,
)
from dcp_placements.storage.metadata.table import ROW, Rows, StorageTable

MAGIC = b"dcp_placements/1"
_TRAILER = struct.Struct("<QQ16s")
_PART_ROWS = 1 << 20
_INFLATED = 4
"""The inflated footer is at most this many times the file's length."""

_END = b"sb."
_END_NBYTES = len(_END)


def write_metadata(metadata: Metadata, table: StorageTable, stream: IO[bytes]) -> None:
    """Write a ``.metadata`` file.

    Args:
        metadata: Its ``storage_data`` is ignored.
        table: Written in its place.
        stream: The file.
    """
    with quiet_gc():
        head, memo = _head(metadata, table.rows)
        stream.write(head)
        position = len(head)
        rows = table.unique()
        parts = []
        for part, chosen in rows_by_kind(table.rows, rows):
            layout = part.layout(memo)
            parts.append((part, position, len(chosen)))
            for start in range(0, len(chosen), _PART_ROWS):
                stream.write(records_of(part, memo, chosen[start : start + _PART_ROWS]))
            position += layout.itemsize * len(chosen)
        # Put the dict into "storage_data", and that into the Metadata.
        stream.write(_END)
        footer = _footer(table.rows, memo, parts)
        stream.write(footer)
        stream.write(_TRAILER.pack(len(head), position + _END_NBYTES, MAGIC))


def read_metadata(
    stream: IO[bytes], *, restricted: bool = False, newer: set[str] | None = None
) -> Metadata:
    """Return the metadata in a ``.metadata`` file, whoever wrote it, with whichever torch.

    Args:
        stream: The file.
        restricted: Whether it may be anybody's: only DCP's own classes are made then, and
            the records are checked for what ``pickle.load`` would do with them.
        newer: What ``pickle.load`` with this torch and Python would fail at is added here, as
            text. Only where it is restricted.

    Raises:
        RefusedGlobal: It is restricted and names something else.
        pickle.UnpicklingError: It is restricted, and its records are no records.
    """
    load: Callable[[IO[bytes]], Any] = (
        partial(load_restricted, newer=newer) if restricted else _load
    )
    with quiet_gc():
        trailer = _trailer(stream)
        if trailer is None:
            stream.seek(0)
            plain: Metadata = load(stream)
            return plain
        head_end, footer_start = trailer
        stream.seek(0)
        head = stream.read(head_end)
        # With an empty "storage_data": the records are read as an array.
        metadata: Metadata = load(io.BytesIO(head + _END))
        stream.seek(footer_start)
        footer = load(io.BytesIO(_inflated(stream.read()[: -_TRAILER.size], footer_start)))
        arrays = []
        reached = head_end
        for part, position, count in footer["parts"]:
            layout = RecordKind(*part).layout(None)
            if count < 0 or position + layout.itemsize * count > footer_start:
                raise pickle.UnpicklingError("its records are beyond its end")
            stream.seek(position)
            records = np.frombuffer(stream.read(layout.itemsize * count), layout, count)
            if restricted and (position != reached or not RecordKind(*part).is_form_of(records)):
                raise pickle.UnpicklingError("its records are not those of chunks")
            reached += records.nbytes
            arrays.append(rows_of_records(records, footer))
        if restricted:
            stream.seek(reached)
            if stream.read(_END_NBYTES) != _END or reached + _END_NBYTES != footer_start:
                raise pickle.UnpicklingError("something stands behind its records")
        rows = np.concatenate(arrays) if arrays else np.empty(0, ROW)
        metadata.storage_data = StorageTable(
            Rows(
                footer["fqns"],
                footer["offsets"],
                footer["paths"],
                footer["transforms"],
                rows,
                footer.get("starts"),
            )
        )
        return metadata


def _load(file: IO[bytes]) -> Any:
    return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = PICKLED_PROPERTIES.get((module, name))
        if found is not None:
            return found
        return super().find_class(PATHS if module == PATHS_OF_3_13 else module, name)


def _inflated(data: bytes, before: int) -> bytes:
    """Return the footer, which cannot be much larger than the pickle that it describes."""
    limit = _INFLATED * (before + len(data)) + _PART_ROWS
    inflating = zlib.decompressobj()
    footer = inflating.decompress(data, limit)
    if inflating.unconsumed_tail:
        raise pickle.UnpicklingError("its end inflates to far more than the file")
    return footer + inflating.flush()


def _trailer(stream: IO[bytes]) -> tuple[int, int] | None:
    if not stream.seekable():
        return None
    size = stream.seek(0, io.SEEK_END)
    if size < _TRAILER.size:
        return None
    stream.seek(size - _TRAILER.size)
    head_end, footer_start, magic = _TRAILER.unpack(stream.read(_TRAILER.size))
    if magic != MAGIC:
        return None
    if not head_end <= footer_start <= size:
        raise pickle.UnpicklingError("its records are beyond its end")
    return head_end, footer_start


# Records refer to these by one byte; they are dumped first, so that their numbers are small.
_WORDS = ("fqn", "offset", "relative_path", "length", "transform_descriptors")


def _head(metadata: Metadata, rows: Rows) -> tuple[bytes, MemoNumbers]:
    """Return the pickle up to the records, and the memo numbers of the values that they share."""
    fqns, chunks, sizes = _shared(metadata.state_dict_metadata)
    offsets = [
        None if offset is None else sizes.setdefault(offset, torch.Size(offset))
        for offset in rows.offsets
    ]
    names: dict[str, Sequence[Any]] = {
        "fqn": [fqns.get(fqn, fqn) for fqn in rows.fqns],
        "offset": offsets,
        "path": rows.paths,
        "transforms": [None if steps is None else list(steps) for steps in rows.transforms],
    }
    buffer = io.BytesIO()
    # Protocol 3 has no frames, which would need the length of the records, and it numbers its
    # memo in order.
    pickler = pickle.Pickler(buffer, 3)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _portable}
    words = [MetadataIndex, StorageInfo, *_WORDS]
    pickler.dump((words, names))
    # Of equal values the first one counts: that of a word, if it is one.
    numbers = {
        _memo_key(value): number
        for number, value in sorted(pickler.memo.copy().values(), key=itemgetter(0), reverse=True)
        if isinstance(value, str | type | torch.Size) or _is_strings(value)
    }
    memo = MemoNumbers(
        words={word: numbers[_memo_key(word)] for word in words},
        columns={
            name: np.array([0 if n is None else numbers[_memo_key(n)] for n in values], np.uint32)
            for name, values in names.items()
        },
    )
    shared = copy.copy(metadata)
    shared.state_dict_metadata = chunks
    shared.storage_data = None
    if metadata.storage_meta is not None:
        shared.storage_meta = _portable_meta(metadata.storage_meta)
    first = buffer.tell()
    pickler.dump(shared)
    dumped = buffer.getvalue()
    # Pop the names; then the Metadata, whose state ends with an empty "storage_data" dict.
    opening = b"}" + pickle.dumps("storage_data", 3)[2:-1].partition(b"q")[0] + b"}"
    return dumped[: first - 1] + b"0" + dumped[first:-1] + opening, memo


def _portable(properties: TensorProperties) -> tuple[Any, ...]:
    """Return how to pickle properties: as ``pickle`` does, with fewer fields."""
    return copyreg.__newobj__, (TensorProperties,), portable_state(properties)  # type: ignore[attr-defined]


def _portable_meta(meta: StorageMeta) -> StorageMeta:
    path = meta.checkpoint_id
    if type(path).__module__ != PATHS_OF_3_13:
        return meta
    meta = copy.copy(meta)
    meta.checkpoint_id = str(path)
    return meta


def _memo_key(value: Any) -> Hashable:
    """Return a key for a value of the memo: its type and its content."""
    return type(value), tuple(value) if type(value) is list else value


def _is_strings(value: Any) -> bool:
    return type(value) is list and all(type(entry) is str for entry in value)


def _shared(
    stored: Mapping[str, Any],
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], torch.Size]]:
    """Return keys, the metadata with one object for equal parts, and the sizes in it."""
    sizes: dict[tuple[int, ...], torch.Size] = {}
    chunks: dict[Any, ChunkStorageMetadata] = {}
    lists: BySequence[list[ChunkStorageMetadata]] = BySequence(_place)
    properties: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for fqn, metadata in stored.items():
        if type(metadata) is not TensorStorageMetadata:
            shared[fqn] = metadata
            continue
        chunk_list = lists.get(metadata.chunks)
        if chunk_list is None:
            parts = []
            for chunk in metadata.chunks:
                key = _place(chunk)
                if key not in chunks:
                    offsets, extent = (sizes.setdefault(size, torch.Size(size)) for size in key)
                    chunks[key] = ChunkStorageMetadata(offsets, extent)
                parts.append(chunks[key])
            chunk_list = lists.put(metadata.chunks, parts)
        whole = tuple(metadata.size)
        shared[fqn] = TensorStorageMetadata(
            properties.setdefault(repr(metadata.properties), metadata.properties),
            sizes.setdefault(whole, torch.Size(whole)),
            chunk_list,
        )
    return {fqn: fqn for fqn in stored}, shared, sizes


def _place(chunk: ChunkStorageMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _footer(held: Rows, memo: MemoNumbers, parts: Sequence[tuple[RecordKind, int, int]]) -> bytes:
    footer = {
        "fqns": held.fqns,
        "offsets": held.offsets,
        "paths": held.paths,
        "transforms": held.transforms,
        "starts": held.starts,
        "numbers": {name: numbers.tobytes() for name, numbers in memo.columns.items()},
        "parts": [
            ((part.chunk, part.transformed, part.wide), position, count)
            for part, position, count in parts
        ],
    }
    return zlib.compress(pickle.dumps(footer, 4), 1)
