"""Metadata of unknown origin, checked before anything relies on them.

The restricted reader of pickles calls nothing. What it returns may still be of any size, and name
any file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.metadata.provenance import SAMPLED
from dcp_placements.storage.metadata.table import Rows
from dcp_placements.storage.safetensors_files import LARGEST, counts

_SPARE_CHUNKS = 1 << 16


def check_entries(entries: Entries, rows: int) -> None:
    """Check sizes, and that entries do not unfold to far more than their file.

    Args:
        entries: Their lists of chunks may be read later: what an index has of them is in range.
        rows: Places of chunks.
    """
    shapes = [counts(shape) for shape in entries.shapes]
    keys = np.bincount(entries.form_of, minlength=len(entries.forms)).tolist()
    listed = 0
    for form, count in zip(entries.forms, keys, strict=True):
        if form.properties < 0:
            continue
        if prod(shapes[form.shape]) * entries.properties[form.properties].dtype.itemsize >= LARGEST:
            raise ValueError("a size that no tensor has")
        listed += count * entries.list_counts[form.chunks]
    check_count(listed, rows)


def check_count(listed: int, rows: int) -> None:
    """Check that keys do not list far more chunks than there are places."""
    if listed > 4 * rows + _SPARE_CHUNKS:
        raise ValueError(f"{listed:,} chunks or more, and places for {rows:,}")


def check_rows(rows: Rows) -> None:
    """Check that rows name what is there, and files of the checkpoint."""
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
    check_files(rows.paths)


def check_files(names: Iterable[str]) -> None:
    """Check that names are those of files in the checkpoint."""
    for file in names:
        if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/"):
            raise ValueError(f"a file outside of the checkpoint: {file!r}")
        os.fsencode(file)
        if "\0" in file:
            raise ValueError("a file's name that no file can have")


def check_provenance(provenance: Mapping[str, Any]) -> None:
    """Check the types of what provenance holds."""
    kinds: dict[str, Any] = {"save_id": str, "step": int | str, "world_size": int}
    for name, held in kinds.items():
        value = provenance.get(name)
        if value is not None and not isinstance(value, held):
            raise TypeError(f"its provenance is broken: {name} is a {type(value).__name__}")
    mappings = ("rules", "digests", SAMPLED, "shadows", "axes", "versions", "options", "row_maps")
    for name in mappings:
        value = provenance.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"its provenance is broken: {name} are a {type(value).__name__}")
    by_key: dict[str, Any] = {"rules": str, "digests": Mapping, SAMPLED: Mapping}
    by_key["shadows"] = (list, tuple)
    for name, kind in by_key.items():
        items = (provenance.get(name) or {}).items()
        if not all(type(key) is str and isinstance(value, kind) for key, value in items):
            raise TypeError(f"its provenance is broken: {name} are not by key")
