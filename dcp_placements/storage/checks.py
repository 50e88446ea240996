"""Metadata, checked before anything relies on them.

A pickle may have put anything into the fields of torch's classes. What is of unknown origin may
also name any file, and list far more than its file has bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from numbers import Integral
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import PlacementError, format_name
from dcp_placements.storage.provenance import DIGESTS_OF_RANK, stored
from dcp_placements.storage.torch_metadata import ChunkList, Entries

_SPARE_CHUNKS = 1 << 16

_ENTRIES = (TensorStorageMetadata, BytesStorageMetadata)

_PROVENANCE: dict[str, Any] = {
    **{"save_id": str, "step": int | str, "world_size": int, "copies": bool},
    **dict.fromkeys(("rules", DIGESTS_OF_RANK, "axes", "versions", "options", "row_maps"), Mapping),
}
"""The types of what is recorded of a save."""


def check_entries(entries: Entries, rows: int) -> None:
    """Check properties, sizes, and that entries do not unfold to far more than their file.

    Args:
        entries: What an index has of their lists of chunks is in range.
        rows: Places of chunks.
    """
    _check_types("the metadata of a key", entries.forms, _ENTRIES)
    keys = np.bincount(np.array(entries.form_of, np.int64), minlength=len(entries.forms)).tolist()
    listed = 0
    for form, count in zip(entries.forms, keys, strict=True):
        if isinstance(form, TensorStorageMetadata):
            check_properties([form.properties])
            if prod(counts(form.size)) * form.properties.dtype.itemsize >= LARGEST:
                raise ValueError("a size that no tensor has")
            listed += count * len(form.chunks)
    check_count(listed, rows)


def check_count(listed: int, rows: int) -> None:
    """Check that keys do not list far more chunks than there are places."""
    if listed > 4 * rows + _SPARE_CHUNKS:
        raise ValueError(f"{listed:,} chunks or more, and places for {rows:,}")


def check_files(names: Iterable[str]) -> None:
    """Check that names are those of files in the checkpoint."""
    for file in names:
        if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/"):
            raise ValueError(f"a file outside of the checkpoint: {file!r}")
        os.fsencode(file)
        if not file or "\0" in file:
            raise ValueError("a file's name that no file can have")


def check_provenance(provenance: Mapping[str, Any]) -> None:
    """Check the types of what provenance holds."""
    for name, kind in _PROVENANCE.items():
        if name in provenance and not isinstance(value := provenance[name], kind):
            verb = "are" if kind is Mapping else "is"
            raise TypeError(f"its provenance is broken: {name} {verb} a {type(value).__name__}")
    for name, kind in (("rules", str), (DIGESTS_OF_RANK, Mapping)):
        items = provenance.get(name, {}).items()
        if not all(type(key) is str and isinstance(value, kind) for key, value in items):
            raise TypeError(f"its provenance is broken: {name} are not by key")


@contextmanager
def refusing() -> Iterator[None]:
    """Raise what a check of metadata raises as the error of a load.

    Raises:
        PlacementError: In place of ``AttributeError``, ``TypeError`` and ``ValueError``.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise PlacementError(
            "the metadata of this checkpoint are not what DCP writes\n"
            f"    found:       {format_name(error)}\n"
            "    likely:      .metadata was damaged, or another tool wrote it\n"
            "    way out:     load another checkpoint"
        ) from error


def check_facts(metadata: Metadata) -> None:
    """Check the types of the facts about a save and its storage, which a reader relies on.

    Raises:
        TypeError: One is of another type.
    """
    _check_types("storage_data", [metadata.storage_data], Mapping)
    _check_types("storage_meta", [metadata.storage_meta], (StorageMeta, type(None)))
    check_provenance(stored(metadata) or {})


def check_fields(metadata: Metadata) -> None:
    """Check the types of entries and places.

    Only plain dicts and lists are looked at. Others are those of an index, which was checked, or of
    another reader.

    Raises:
        TypeError: A field is missing or of another type.
        ValueError: A number is negative, or larger than any tensor.
    """
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    _check_types("state_dict_metadata", [entries], Mapping)
    _check_types("planner_data", [metadata.planner_data], (Mapping, type(None)))
    check_provenance(stored(metadata) or {})
    if type(entries) is dict:
        _check_types("a key", entries, str)
        # Chunks in arrays are those of an index.
        listed = [
            one for one in entries.values() if type(getattr(one, "chunks", None)) is not ChunkList
        ]
        _check_types("the metadata of a key", listed, _ENTRIES)
        tensors = [one for one in listed if isinstance(one, TensorStorageMetadata)]
        check_properties([one.properties for one in tensors])
        _check_types("size", [one.size for one in tensors], tuple | list)
        lists = [one.chunks for one in tensors]
        _check_types("the chunks of a tensor", lists, Sequence)
        chunks = list(chain.from_iterable(lists))
        _check_types("a chunk", chunks, ChunkStorageMetadata)
        for boxes in (tensors, ("size",)), (chunks, ("offsets", "sizes")):
            for name in boxes[1]:
                sizes = list(map(attrgetter(name), boxes[0]))
                _check_types(name, sizes, tuple | list)
                _check_counts(name, list(chain.from_iterable(sizes)))
        dims = {
            (len(one.size), len(at.offsets), len(at.sizes)) for one in tensors for at in one.chunks
        }
        if any(len(set(found)) > 1 for found in dims):
            raise ValueError("a chunk has other dims than its tensor")
    if type(places) is dict and any(isinstance(one, StorageInfo) for one in places.values()):
        _check_types("the index of a place", places, MetadataIndex)
        _check_types("the key of a place", [index.fqn for index in places], str)
        infos = places.values()
        _check_types("a place", infos, StorageInfo)
        _check_types("relative_path", map(attrgetter("relative_path"), infos), str)
        for name in ("offset", "length"):
            _check_counts(name, list(map(attrgetter(name), infos)))
        steps = [getattr(one, "transform_descriptors", None) for one in infos]
        _check_types("transform_descriptors", steps, (list, tuple, type(None)))
        _check_types("a transform", chain.from_iterable(filter(None, steps)), str)


def check_properties(properties: Sequence[TensorProperties]) -> None:
    """Check the types of the properties of tensors."""
    _check_types("the properties of a tensor", properties, TensorProperties)
    kinds = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    kinds |= {"requires_grad": bool, "pin_memory": bool}
    for types in {tuple(map(type, one)) for one in map(attrgetter(*kinds), properties)}:
        for found, (name, kind) in zip(types, kinds.items(), strict=True):
            if not issubclass(found, kind):
                raise TypeError(f"{name} is a {found.__name__}")


def _check_types(name: str, values: Iterable[Any], kind: Any) -> None:
    for found in set(map(type, values)):
        if not issubclass(found, kind):
            raise TypeError(f"{name} is a {found.__name__}")


def _check_counts(name: str, values: Sequence[Any]) -> None:
    _check_types(name, values, Integral)
    if min(values, default=0) < 0:
        raise ValueError(f"{name} is negative")
    if max(values, default=0) >= LARGEST:
        raise ValueError(f"{name} is larger than any tensor")


LARGEST = 1 << 63
"""No tensor has as many bytes."""

MAX_DIMS = 256


def counts(values: Any) -> tuple[int, ...]:
    """Return counts of elements or bytes that came from a file.

    Raises:
        TypeError: They are something else.
        ValueError: They are negative, too large, or too many.
    """
    if not isinstance(values, list | tuple):
        raise TypeError(f"a {type(values).__name__} where counts should be")
    if len(values) > MAX_DIMS:
        raise ValueError(f"{len(values)} counts, as of a tensor of so many dims")
    for value in values:
        if type(value) is not int:
            raise TypeError(f"a {type(value).__name__} where a count should be")
        if not 0 <= value < LARGEST:
            raise ValueError("a count that is negative, or larger than any tensor")
    return tuple(values)
