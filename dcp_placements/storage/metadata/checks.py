"""Metadata of unknown origin, checked before anything relies on it.

The restricted reader of pickles calls nothing. What it returns may still be of any type and size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.storage.index.entries import Entries, StoredEntries
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.table import Rows, rows_of_entries
from dcp_placements.storage.safetensors_files import LARGEST, counts

_SPARE_CHUNKS = 1 << 16
MOST_ROWS = 1 << 26
"""Rows of an index of unknown origin that are unfolded."""


def check_metadata(metadata: Any) -> None:
    """Check the types and numbers of everything; of metadata with an index, of what is read of it.

    Raises:
        Exception: As of ``checked_rows``.
    """
    if type(metadata) is Metadata and isinstance(metadata.state_dict_metadata, StoredEntries):
        _check_index(metadata.state_dict_metadata.entries, len(metadata.storage_data))
        _check_files(metadata.storage_data.paths())
        _check_provenance(stored(metadata) or {})
    else:
        checked_rows(metadata)


def checked_rows(metadata: Any) -> Rows:
    """Return the rows of ``storage_data``, after a check of the types and numbers of everything.

    Raises:
        Exception: Something is not what DCP's own readers expect; of any type, since objects in a
            pickle can have attributes of any type, or none.
    """
    if type(metadata) is not Metadata:
        raise TypeError(f"a {type(metadata).__name__} in place of a Metadata")
    data = metadata.storage_data
    if isinstance(metadata.state_dict_metadata, StoredEntries):
        check_metadata(metadata)
        if len(data) > MOST_ROWS:
            raise ValueError(f"{len(data):,} chunks, and at most {MOST_ROWS:,} are read")
        rows: Rows = data.rows
    else:
        rows = data.rows if isinstance(data, StorageTable) else _rows_of_dict(data)
        listed = 0
        seen: deque[tuple[Any, int]] = deque(maxlen=16)
        for fqn, entry in metadata.state_dict_metadata.items():
            _check_entry(fqn, entry, seen)
            listed += len(getattr(entry, "chunks", ()))
            _check_count(listed, len(rows.rows))
        _check_provenance(stored(metadata) or {})
    _check_rows(rows)
    return rows


def _check_index(entries: Entries, rows: int) -> None:
    """Check what an index has beside its columns, and that it does not unfold to far more."""
    if entries.others:
        raise TypeError(f"a {type(entries.others[0]).__name__} in place of a key's metadata")
    for properties in entries.properties:
        if type(properties) is not TensorProperties or type(properties.dtype) is not torch.dtype:
            raise TypeError("properties of a tensor that are none")
    keys = np.bincount(entries.form_of, minlength=len(entries.forms)).tolist()
    listed = 0
    for form, count in zip(entries.forms, keys, strict=True):
        if form.properties < 0:
            continue
        shape = counts(entries.shapes[form.shape])
        if prod(shape) * entries.properties[form.properties].dtype.itemsize >= LARGEST:
            raise ValueError("a size that no tensor has")
        listed += count * entries.list_counts[form.chunks]
    _check_count(listed, rows)


def _check_count(listed: int, rows: int) -> None:
    if listed > 4 * rows + _SPARE_CHUNKS:
        raise ValueError(f"{listed:,} chunks or more, and places for {rows:,}")


def _check_entry(fqn: Any, entry: Any, seen: deque[tuple[Any, int]]) -> None:
    """Check one key. ``seen`` holds lists of chunks that were checked, with their dims."""
    if type(fqn) is not str:
        raise TypeError(f"a key that is a {type(fqn).__name__}")
    if type(entry) is BytesStorageMetadata:
        return
    if type(entry) is not TensorStorageMetadata:
        raise TypeError(f"{fqn}: a {type(entry).__name__}")
    dims = len(counts(entry.size))
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{fqn}: a dtype that is a {type(dtype).__name__}")
    if prod(entry.size) * dtype.itemsize >= LARGEST:
        raise ValueError(f"{fqn}: a size that no tensor has")
    # Tensors that are cut alike share one list, which is checked once.
    if any(chunks is entry.chunks and dims == checked for chunks, checked in seen):
        return
    for chunk in entry.chunks:
        if len(counts(chunk.offsets)) != dims or len(counts(chunk.sizes)) != dims:
            raise ValueError(f"{fqn}: a chunk of other dims than its {dims}")
    seen.append((entry.chunks, dims))


def _rows_of_dict(data: Any) -> Rows:
    for index, info in data.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise TypeError(f"a {type(info).__name__} for a {type(index).__name__}")
    return rows_of_entries(data.items())


def _check_rows(rows: Rows) -> None:
    columns = {"fqn": rows.fqns, "offset": rows.offsets, "path": rows.paths}
    for name, values in (*columns.items(), ("transforms", rows.transforms)):
        if len(rows.rows) and int(rows.rows[name].max()) >= len(values):
            raise ValueError(f"a row names a {name} that is not there")
    for name in ("start", "length"):
        if len(rows.rows) and int(rows.rows[name].min()) < 0:
            raise ValueError(f"a negative {name}")
    for offset in rows.offsets:
        if offset is not None:
            counts(offset)
    for steps in rows.transforms:
        if not all(type(step) is str for step in steps or ()):
            raise TypeError("a transform that is no name")
    _check_files(rows.paths)
    if not all(type(fqn) is str for fqn in rows.fqns):
        raise TypeError("a key that is no text")


def _check_files(names: Iterable[str]) -> None:
    for file in names:
        if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/"):
            raise ValueError(f"a file outside of the checkpoint: {file!r}")
        os.fsencode(file)
        if "\0" in file:
            raise ValueError("a file's name that no file can have")


def _check_provenance(provenance: Mapping[str, Any]) -> None:
    kinds: dict[str, Any] = {"save_id": str, "step": int | str, "world_size": int}
    for name, held in kinds.items():
        value = provenance.get(name)
        if value is not None and not isinstance(value, held):
            raise TypeError(f"its provenance is broken: {name} is a {type(value).__name__}")
    for name in ("rules", "digests", "shadows", "axes", "versions", "options", "row_maps"):
        value = provenance.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"its provenance is broken: {name} are a {type(value).__name__}")
    for name, kind in (("rules", str), ("digests", Mapping), ("shadows", (list, tuple))):
        items = (provenance.get(name) or {}).items()
        if not all(type(key) is str and isinstance(value, kind) for key, value in items):
            raise TypeError(f"its provenance is broken: {name} are not by key")
