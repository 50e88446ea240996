"""``.metadata`` as torch's own pickle: its beginning, which torch's objects are pickled for."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from collections.abc import Hashable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_placements._torch import MemoryFormat, StorageInfo
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import RowIndex
from dcp_placements.storage.metadata.pickles.metadata_pickle import PATHS_OF_3_13
from dcp_placements.storage.metadata.pickles.stock_body import (
    NAMES,
    PROTOCOL,
    Memo,
    memo_of,
    put,
    values_end,
)
from dcp_placements.storage.metadata.pickles.tensor_properties import portable_state

_CLASSES = (
    *(MetadataIndex, StorageInfo, ChunkStorageMetadata, TensorStorageMetadata),
    *(BytesStorageMetadata, torch.Size),
)


class Head(NamedTuple):
    """The pickle from the marker to the records; the stack has the metadata.

    Attributes:
        data: Its bytes.
        memo: What it leaves in the memo.
        values: A pickle of its own of the same metadata, properties and other entries, as a tuple.
    """

    data: bytes
    memo: Memo
    values: bytes


def pickled_head(metadata: Metadata, entries: Entries, index: RowIndex) -> Head:
    """Return the beginning of a pickle, in the form that every torch reads.

    Args:
        metadata: Its ``state_dict_metadata`` and ``storage_data`` are left out.
        entries: Written as its ``state_dict_metadata``.
        index: Written as its ``storage_data``.
    """
    pickling = _Pickling()
    begin = [pickling.dump(_CLASSES), b"0"]
    classes = {c.__name__: n for n, c in pickling.memo() if isinstance(c, type)}
    # Different texts are different objects: each gets a number.
    texts = dict.fromkeys((*NAMES, *index.fqns))
    numbers: dict[Hashable, int] = dict(zip(texts, count(pickling.next_number())))
    begin += [pickling.dump(tuple(texts)), b"0", _plain_metadata(pickling, metadata, entries.fqns)]
    shared = [pickling.dump(value) for value in (*entries.properties, *entries.others)]
    # From here on numbers are given one by one.
    number = pickling.next_number()
    end = []
    for value in (*index.writers.files(), *index.transforms):
        if value is not None and value not in numbers:
            dumped = value if isinstance(value, str) else list(value)
            end += [pickling.dump(dumped, fast=True), put(number)]
            numbers[value] = number
            number += 1
    for at, data in enumerate(shared, number):
        begin += [data, put(at)]
    memo = memo_of(numbers, classes, number + len(shared), entries, index)
    return Head(b"".join(begin + end), memo, b"".join([PROTOCOL, *begin, values_end(memo)]))


def _plain_metadata(pickling: _Pickling, metadata: Metadata, fqns: Sequence[str]) -> bytes:
    """Return the pickle of metadata without entries and rows, in the form that every torch reads.

    Args:
        pickling: Its memo has the keys.
        metadata: All of it.
        fqns: The keys.
    """
    plain = copy.copy(metadata)
    for name in ("state_dict_metadata", "storage_data"):
        vars(plain).pop(name, None)
    if metadata.storage_meta is not None:
        plain.storage_meta = _portable_meta(metadata.storage_meta)
    data = metadata.planner_data
    if type(data) is not dict:
        return pickling.dump(plain)
    del plain.planner_data
    texts = dict(zip(fqns, fqns, strict=True))
    paths = {
        texts.get(key, key): path
        for key, path in data.items()
        if type(path) is tuple and type(key) is str
    }
    if not set(map(type, chain.from_iterable(paths.values()))) <= {str, int}:
        paths = {}
    if 1 in set(map(len, paths.values())):
        # The path of many keys is the key alone.
        paths = {key: (key,) if path == (key,) else path for key, path in paths.items()}
    parts = [pickling.dump(plain), b"}", pickling.dump("planner_data")]
    # In the memo paths would take half of the index, and nothing refers to them.
    parts.append(pickling.dump(paths, fast=True))
    for item in [item for item in data.items() if item[0] not in paths]:
        parts += [*map(pickling.dump, item), b"s"]
    return b"".join([*parts, b"sb"])


class _Pickling:
    """One pickle, piece by piece; later pieces refer to what earlier ones put into the memo."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        # Protocol 3 has no frames, which would need the length of the records, and it numbers its
        # memo in order.
        self._pickler = pickle.Pickler(self._buffer, 3)
        self._pickler.dispatch_table = {
            **copyreg.dispatch_table,
            TensorProperties: _portable,
            # Python 3.11 before 3.11.4 would pickle a call of getattr.
            MemoryFormat: lambda member: (MemoryFormat, (member.value,)),
        }

    def dump(self, value: Any, *, fast: bool = False) -> bytes:
        """Return what puts a value on the stack.

        Args:
            value: What to pickle.
            fast: Whether to put nothing of it into the memo. It must have no cycles.
        """
        self._pickler.fast = fast
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[2:-1]

    def next_number(self) -> int:
        """Return the number that the next value in the memo gets; it is the one behind a list's."""
        return int.from_bytes(self.dump([])[2:], "little") + 1

    def memo(self) -> list[tuple[int, Any]]:
        """Return numbers and values of the memo."""
        return list(self._pickler.memo.copy().values())


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
