"""DCP metadata read from files that nobody vouches for.

The restricted reader of pickles calls nothing. What it returns may still be of any type and size,
so every key, chunk and row is checked before anything relies on it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorStorageMetadata,
)
from dcp_placements.errors import CannotLook, PlacementError, format_name
from dcp_placements.offline.directory import Directory
from dcp_placements.storage.metadata.file import read_metadata
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.rank_files import rank_file_rank
from dcp_placements.storage.metadata.table import Rows, StorageTable, rows_of_entries
from dcp_placements.storage.restricted_pickle import RefusedGlobal
from dcp_placements.storage.safetensors_files import LARGEST, counts

TORCH_DIST = "torch_dist"


def is_torch_dist(directory: Directory) -> bool:
    """Whether Megatron's ``metadata.json`` beside ``.metadata`` names the backend torch_dist."""
    try:
        with directory.open("metadata.json") as stream:
            content = json.loads(stream.read(1 << 20))
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == TORCH_DIST


def read_rank_parts(
    directory: Directory, newer: set[str] | None = None
) -> list[tuple[int, Metadata]]:
    """Return the metadata of every rank of a save without collectives, by rank.

    Args:
        directory: Of the checkpoint.
        newer: As of ``read_metadata``.

    Raises:
        CannotLook: As ``read_pickle``.
    """
    ranks = sorted((r, n) for n in directory.names() if (r := rank_file_rank(n)) is not None)
    parts = [(rank, read_pickle(directory, name, newer)) for rank, name in ranks]
    for (_, name), (_, part) in zip(ranks, parts, strict=True):
        checked_rows(f"{directory.path}/{name}", part)
    return parts


def read_pickle(directory: Directory, name: str, newer: set[str] | None = None) -> Metadata:
    """Return the content of a metadata file; nothing that it names is executed.

    Args:
        directory: Of the checkpoint.
        name: Of the file.
        newer: As of ``read_metadata``.

    Raises:
        CannotLook: It is refused, or cannot be read.
    """
    where = f"{directory.path}/{name}"
    try:
        with directory.open(name) as stream:
            return read_metadata(stream, restricted=True, newer=newer)
    except RefusedGlobal as error:
        raise CannotLook(
            f"{where}: refused, {error}\n"
            "    why:         a pickle calls what it names; nothing of it was executed\n"
            "    way out:     a file of unknown origin should not be loaded by anything else either"
        ) from error
    except OSError as error:
        raise CannotLook(f"{where}: cannot be read: {format_name(error)}") from error
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        raise _unreadable(where, error) from error


def checked_rows(path: str, metadata: Any) -> Rows:
    """Return the rows of ``storage_data``, after a check of the types and numbers of everything.

    Args:
        path: Of the metadata, for messages.
        metadata: What a pickle contained.

    Raises:
        CannotLook: Something is not what DCP's own readers expect.
    """
    try:
        if type(metadata) is not Metadata:
            raise TypeError(f"a {type(metadata).__name__} in place of a Metadata")
        seen: deque[tuple[Any, int]] = deque(maxlen=16)
        for fqn, entry in metadata.state_dict_metadata.items():
            _check_entry(fqn, entry, seen)
        data = metadata.storage_data
        rows = data.rows if isinstance(data, StorageTable) else _rows_of_dict(data)
        _check_rows(rows)
        _check_provenance(stored(metadata) or {})
    except PlacementError:
        raise
    except Exception as error:
        # Objects in a pickle can have attributes of any type, or none.
        raise _unreadable(path, error) from error
    return rows


def _unreadable(where: str, error: object) -> CannotLook:
    return CannotLook(
        f"{where}: this is no metadata of DCP's that can be read\n"
        f"    found:       {format_name(error)}\n"
        "    likely:      the file was damaged or cut short"
    )


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
    for file in rows.paths:
        if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/"):
            raise ValueError(f"a file outside of the checkpoint: {file!r}")
        os.fsencode(file)
        if "\0" in file:
            raise ValueError("a file's name that no file can have")
    if not all(type(fqn) is str for fqn in rows.fqns):
        raise TypeError("a key that is no text")


def _check_provenance(provenance: Mapping[str, Any]) -> None:
    for name in ("rules", "digests", "shadows", "axes", "versions", "options", "row_maps"):
        value = provenance.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"its provenance is broken: {name} are a {type(value).__name__}")
    for name, kind in (("rules", str), ("digests", Mapping), ("shadows", (list, tuple))):
        items = (provenance.get(name) or {}).items()
        if not all(type(key) is str and isinstance(value, kind) for key, value in items):
            raise TypeError(f"its provenance is broken: {name} are not by key")
