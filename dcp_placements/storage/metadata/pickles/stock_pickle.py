"""``.metadata`` as torch's own pickle: its beginning, which torch's objects are pickled for."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import pickletools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MemoryFormat,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import RowIndex
from dcp_placements.storage.metadata.pickles.metadata_pickle import PATHS_OF_3_13
from dcp_placements.storage.metadata.pickles.stock_body import (
    NAMES,
    Memo,
    memo_of,
    put,
)
from dcp_placements.storage.metadata.pickles.tensor_properties import (
    portable_state,
    torch_properties,
)

_CLASSES = (
    *(MetadataIndex, StorageInfo, ChunkStorageMetadata, TensorStorageMetadata),
    *(BytesStorageMetadata, torch.Size),
)


def plain_metadata(metadata: Metadata, fqns: Sequence[str]) -> Metadata:
    """Return metadata without entries and rows, in the form that every torch reads.

    Args:
        metadata: All of it.
        fqns: The keys. Equal texts in ``planner_data`` become these, so that they are pickled once.
    """
    rest = copy.copy(metadata)
    for name in ("state_dict_metadata", "storage_data"):
        vars(rest).pop(name, None)
    if metadata.storage_meta is not None:
        rest.storage_meta = _portable_meta(metadata.storage_meta)
    if type(metadata.planner_data) is dict:
        data, texts = metadata.planner_data, dict(zip(fqns, fqns, strict=True))
        # The path of many keys is the key alone.
        rest.planner_data = {
            text: (text,)
            if type(path) is tuple and len(path) == 1 and type(path[0]) is str and path[0] == text
            else path
            for text, path in zip(map(texts.get, data, data), data.values(), strict=True)
        }
    return rest


def portable_pickler(buffer: io.BytesIO) -> pickle.Pickler:
    """Return a pickler of the form that every torch reads."""
    # Protocol 3 has no frames, which would need the length of the records, and it numbers its
    # memo in order.
    pickler = pickle.Pickler(buffer, 3)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        TensorProperties: _portable,
        # Python 3.11 before 3.11.4 would pickle a call of getattr.
        MemoryFormat: lambda member: (MemoryFormat, (member.value,)),
    }
    return pickler


def pickled_head(plain: Metadata, entries: Entries, index: RowIndex) -> tuple[bytes, Memo]:
    """Return the pickle from the marker to the records, and the memo; the stack has the metadata.

    Args:
        plain: Of ``plain_metadata``.
        entries: Written as its ``state_dict_metadata``.
        index: Written as its ``storage_data``.
    """
    buffer = io.BytesIO()
    pickler = portable_pickler(buffer)
    transforms = [None if steps is None else list(steps) for steps in index.transforms]
    pickler.dump((_CLASSES, NAMES, tuple(index.fqns), list(index.writers.files()), transforms))
    held = sorted(pickler.memo.copy().values(), key=itemgetter(0))
    parts = [buffer.getvalue()[2:-1], b"0"]
    dumped = []
    listed = map(torch_properties, entries.properties)
    for value in (*listed, *entries.others, plain):
        start = buffer.tell()
        pickler.dump(value)
        dumped.append(buffer.getvalue()[start:-1])
    # The memo numbers its values in order; a copy of it would take longer than all dumps.
    start = buffer.tell()
    pickler.dump("the next of the memo")
    opcodes = pickletools.genops(buffer.getvalue()[start:])
    first: int = next(at for code, at, _ in opcodes if at is not None and "PUT" in code.name)
    for number, data in enumerate(dumped[:-1], first):
        parts += [data, put(number)]
    parts.append(dumped[-1])
    classes = {value.__name__: number for number, value in held[: len(_CLASSES)]}
    memo = memo_of(held, classes, first + len(dumped) - 1, entries, index)
    return b"".join(parts), memo


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
