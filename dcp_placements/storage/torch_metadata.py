"""Torch's metadata: entries of keys, locations of chunks, and checks of both.

Thousands of keys have a few *forms*: entries with equal dtype, shape and chunks. At thousands of
ranks a list of torch's objects has thousands of elements for each way in which tensors are cut, and
a rank needs few of them. So each form is kept once, and each list of chunks once, as an array. All
of them are pickled as torch's own objects.

A pickle can put any value into the fields of torch's classes, so these are checked before use.
Metadata of unknown origin can also name any file, and list far more chunks than their file has
bytes.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from itertools import chain
from math import prod
from numbers import Integral
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import PlacementError
from dcp_placements.layout.boxes import Boxes, Ints, as_array
from dcp_placements.layout.sharding import Box
from dcp_placements.short_text import format_name
from dcp_placements.storage.provenance import provenance_of

PORTABLE_PROPERTIES = 5
"""Number of fields of ``TensorProperties`` in a pickle that every torch reads."""

PROPERTIES = len(fields(TensorProperties))
"""Number of its fields in this torch; 2.15 added ``strides``, which no reader uses."""


class _PickledProperties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[:PROPERTIES])


PICKLED_PROPERTIES = {(TensorProperties.__module__, "TensorProperties"): _PickledProperties}
"""The class that ``pickle`` uses for ``TensorProperties`` of any torch, by module and name."""


def portable_state(instance: TensorProperties) -> tuple[Any, ...]:
    """Return the state of ``instance`` that every torch unpickles."""
    state: tuple[Any, ...] = instance.__getstate__()
    return state[:PORTABLE_PROPERTIES]


class ChunkList(Sequence[ChunkStorageMetadata]):
    """``TensorStorageMetadata.chunks`` as an array of boxes, which must not change.

    Each access to an element creates torch's object. The list equals any sequence of equal chunks,
    and is pickled as torch's list, so that every reader of DCP loads it.

    Args:
        array: ``int64[chunks, 2, ndim]``, as ``layout/boxes`` has it.

    Raises:
        ValueError: The array has another shape.
    """

    __slots__ = ("array",)

    def __init__(self, array: npt.ArrayLike) -> None:
        self.array: Boxes = np.asarray(array, np.int64)
        if self.array.ndim != 3 or self.array.shape[1] != 2:
            raise ValueError(f"an array of {self.array.shape}: it has to be (chunks, 2, ndim)")

    @property
    def offsets(self) -> Ints:
        """Where each chunk begins, ``(chunks, ndim)``."""
        return self.array[:, 0]

    @property
    def sizes(self) -> Ints:
        """The sizes of each chunk, ``(chunks, ndim)``."""
        return self.array[:, 1]

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ChunkList(self.array[index])
        offsets, sizes = self.array[index].tolist()
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkList):
            return np.array_equal(self.array, other.array)
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(
            chunk == other_chunk for chunk, other_chunk in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkList({len(self)} chunks)"

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.as_list(),)

    def as_list(self) -> list[ChunkStorageMetadata]:
        """Return torch's list. Equal sizes are one object, which is pickled once."""
        size = cache(torch.Size)
        return [
            ChunkStorageMetadata(*[size(tuple(row)) for row in box]) for box in self.array.tolist()
        ]


def chunk_boxes(chunks: Sequence[ChunkStorageMetadata], ndim: int) -> Boxes:
    """Return the boxes of chunks of a tensor of ``ndim`` dims.

    Raises:
        ValueError: Chunks have another number of dims.
    """
    boxes: list[Box] = []
    if isinstance(chunks, ChunkList):
        dims = {chunks.array.shape[2]}
    else:
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in chunks]
        dims = {len(row) for box in boxes for row in box}
    if not dims <= {ndim}:
        text = " and ".join(map(str, sorted(dims)))
        raise ValueError(f"chunks of {text} dims, of a tensor of {ndim} dims")
    return chunks.array if isinstance(chunks, ChunkList) else as_array(boxes, ndim)


class Entries(NamedTuple):
    """``Metadata.state_dict_metadata`` by what keys have in common.

    Attributes:
        fqns: The keys.
        form_of: Number of the form of each key.
        forms: Different entries, as torch's objects; the chunks of tensors are a ``ChunkList``.
        lists: Different lists of chunks.
        list_of: Number of the list of each form; -1 for a form without chunks.
    """

    fqns: list[str]
    form_of: list[int]
    forms: list[Any]
    lists: list[ChunkList]
    list_of: list[int]

    def stored(self) -> dict[str, Any]:
        """Return torch's dict. Keys of one form have one object."""
        forms = map(self.forms.__getitem__, self.form_of)
        return dict(zip(self.fqns, forms, strict=True))


_PORTABLE = attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def build_entries(stored: Mapping[str, Any]) -> Entries:
    """Return the entries of ``Metadata.state_dict_metadata``."""
    numbers: dict[Hashable, int] = {}
    lists: dict[Hashable, tuple[int, ChunkList]] = {}
    entries = Entries(list(stored), [], [], [], [])
    # The planner lists one object for all keys that are cut alike.
    latest: dict[Any, tuple[Any, int]] = {}
    for entry in stored.values():
        size = getattr(entry, "size", None)
        size = size if isinstance(size, tuple) else None
        before, number = latest.get(size, (None, -1))
        if before is not entry:
            content: Any = type(entry)
            if type(entry) is TensorStorageMetadata:
                content = _PORTABLE(entry.properties), tuple(entry.size), _content(entry.chunks)
            elif type(entry) is not BytesStorageMetadata:
                content = type(entry), len(numbers)
            number = numbers.setdefault(content, len(numbers))
            latest[size] = entry, number
            if number == len(entries.forms):
                listed = -1
                if type(entry) is TensorStorageMetadata:
                    chunks = ChunkList(chunk_boxes(entry.chunks, len(entry.size)))
                    held = chunks.array.shape, chunks.array.tobytes()
                    listed, chunks = lists.setdefault(held, (len(lists), chunks))
                    array: Any = chunks
                    if entry.chunks is not array:
                        entry = replace(entry, chunks=array)
                entries.forms.append(entry)
                entries.list_of.append(listed)
        entries.form_of.append(number)
    entries.lists.extend(chunks for _, chunks in lists.values())
    return entries


def differing_keys(entries: Entries, other: Entries) -> set[str]:
    """Return the keys whose entries differ in two checkpoints, or are in one of them only."""
    numbers, others = (dict(zip(e.fqns, e.form_of, strict=True)) for e in (entries, other))
    pairs = {fqn: (numbers.get(fqn, -1), others.get(fqn, -1)) for fqn in {**numbers, **others}}
    equal = {
        pair
        for pair in set(pairs.values())
        if min(pair) >= 0 and _same_form(entries.forms[pair[0]], other.forms[pair[1]])
    }
    return {fqn for fqn, pair in pairs.items() if pair not in equal}


def _same_form(form: Any, other: Any) -> bool:
    if type(form) is not type(other) or not isinstance(form, TensorStorageMetadata):
        return bool(form == other)
    properties, others = map(_PORTABLE, (form.properties, other.properties))
    return bool(properties == others and form.size == other.size and form.chunks == other.chunks)


def _content(chunks: Sequence[ChunkStorageMetadata]) -> Hashable:
    """Return a value that is equal for equal lists of chunks, and for no others."""
    if isinstance(chunks, ChunkList):
        return chunks.array.shape, chunks.array.tobytes()
    return tuple([(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])


Offset = tuple[int, ...] | None
Transforms = tuple[str, ...] | None


class StoredLocation(NamedTuple):
    """Key and offset of a stored chunk, and the location of its record.

    An object has offset None. The chunk at (2, 0) of ``experts`` in the first 64 bytes of a file is
    ``StoredLocation("experts", (2, 0), "__1_0.distcp", 0, 64)``.
    """

    fqn: str
    offset: Offset
    path: str
    start: int
    length: int
    transforms: Transforms = None

    @staticmethod
    def of(index: MetadataIndex, info: Any) -> StoredLocation:
        """Return the location of a chunk by torch's ``MetadataIndex`` and ``_StorageInfo``."""
        offset = None if index.offset is None else tuple(index.offset)
        # Checkpoints of older torch versions have no such field.
        steps = getattr(info, "transform_descriptors", None)
        steps = None if steps is None else tuple(steps)
        return StoredLocation(
            index.fqn, offset, info.relative_path, info.offset, info.length, steps
        )

    def info(self) -> StorageInfo:
        """Return the location as torch's value in ``Metadata.storage_data``."""
        steps = None if self.transforms is None else list(self.transforms)
        return StorageInfo(self.path, self.start, self.length, steps)


_SPARE_CHUNKS = 1 << 16

_ENTRIES = (TensorStorageMetadata, BytesStorageMetadata)

_PROVENANCE: dict[str, Any] = {
    **{"save_id": str, "step": int | str, "world_size": int, "copies": bool, "versions": Mapping},
}
"""The types of what is recorded of a save."""


def check_entries(entries: Entries, rows: int) -> None:
    """Check properties, sizes, and that entries do not unfold to far more than their file.

    Args:
        entries: Entries whose lists of chunks are in range.
        rows: Number of locations of chunks.
    """
    check_values("the metadata of a key", entries.forms, _ENTRIES)
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
    """Check that keys do not list far more chunks than there are locations."""
    if listed > 4 * rows + _SPARE_CHUNKS:
        raise ValueError(f"{listed:,} chunks or more, and places for {rows:,}")


def check_files(names: Iterable[str]) -> None:
    """Check that names are names of files inside the checkpoint."""
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


@contextmanager
def refusing() -> Iterator[None]:
    """Convert errors of checks of metadata to the error of a load.

    Raises:
        PlacementError: A check raised ``AttributeError``, ``TypeError`` or ``ValueError``.
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
    """Check the types of the facts about a save and its storage, on which a reader relies.

    Raises:
        TypeError: A fact has another type.
    """
    check_values("storage_data", [metadata.storage_data], Mapping)
    check_values("storage_meta", [metadata.storage_meta], (StorageMeta, type(None)))
    check_provenance(provenance_of(metadata) or {})


def check_fields(metadata: Metadata) -> None:
    """Check the types of entries and locations.

    Only plain dicts and lists are checked. Other mappings are of an index, which was checked, or of
    another reader.

    Raises:
        TypeError: A field is missing or has another type.
        ValueError: A number is negative, or larger than any tensor.
    """
    entries, locations = metadata.state_dict_metadata, metadata.storage_data
    check_values("state_dict_metadata", [entries], Mapping)
    check_values("planner_data", [metadata.planner_data], (Mapping, type(None)))
    check_provenance(provenance_of(metadata) or {})
    if type(entries) is dict:
        check_values("a key", entries, str)
        # Chunks in arrays are those of an index, which was checked.
        listed = [
            entry
            for entry in _distinct(entries.values())
            if type(getattr(entry, "chunks", None)) is not ChunkList
        ]
        check_values("the metadata of a key", listed, _ENTRIES)
        tensors = [entry for entry in listed if isinstance(entry, TensorStorageMetadata)]
        check_properties([tensor.properties for tensor in tensors])
        check_values("size", [tensor.size for tensor in tensors], tuple | list)
        lists = [tensor.chunks for tensor in tensors]
        check_values("the chunks of a tensor", lists, Sequence)
        chunks = list(chain.from_iterable(lists))
        check_values("a chunk", chunks, ChunkStorageMetadata)
        for boxes in (tensors, ("size",)), (chunks, ("offsets", "sizes")):
            for name in boxes[1]:
                sizes = list(map(attrgetter(name), boxes[0]))
                check_values(name, sizes, tuple | list)
                check_values(name, list(chain.from_iterable(sizes)), Integral)
        dims = {
            (len(tensor.size), len(chunk.offsets), len(chunk.sizes))
            for tensor in tensors
            for chunk in tensor.chunks
        }
        if any(len(set(counts_of_dims)) > 1 for counts_of_dims in dims):
            raise ValueError("a chunk has other dims than its tensor")
    if type(locations) is dict and any(
        isinstance(info, StorageInfo) for info in locations.values()
    ):
        check_values("the index of a place", locations, MetadataIndex)
        check_values("the key of a place", [index.fqn for index in locations], str)
        infos = locations.values()
        check_values("a place", infos, StorageInfo)
        check_values("relative_path", map(attrgetter("relative_path"), infos), str)
        for name in ("offset", "length"):
            check_values(name, list(map(attrgetter(name), infos)), Integral)
        steps = [getattr(info, "transform_descriptors", None) for info in infos]
        check_values("transform_descriptors", steps, (list, tuple, type(None)))
        check_values("a transform", chain.from_iterable(filter(None, steps)), str)


def _distinct(entries: Iterable[Any]) -> Iterator[Any]:
    """Yield entries, without those that are the object of the last entry of their size."""
    latest: dict[torch.Size | None, Any] = {}
    for entry in entries:
        size = getattr(entry, "size", None)
        size = size if type(size) is torch.Size else None
        if latest.get(size) is not entry:
            latest[size] = entry
            yield entry


def check_properties(properties: Sequence[TensorProperties]) -> None:
    """Check the types of the properties of tensors."""
    check_values("the properties of a tensor", properties, TensorProperties)
    kinds = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    kinds |= {"requires_grad": bool, "pin_memory": bool}
    for types in {tuple(map(type, values)) for values in map(attrgetter(*kinds), properties)}:
        for value_type, (name, kind) in zip(types, kinds.items(), strict=True):
            if not issubclass(value_type, kind):
                raise TypeError(f"{name} is a {value_type.__name__}")


def check_values(name: str, values: Iterable[Any], kind: Any) -> None:
    """Check the types of values, and that integers are counts of elements or bytes.

    Raises:
        TypeError: A value is of another type.
        ValueError: An integer is negative, or larger than any tensor.
    """
    for value_type in set(map(type, values)):
        if not issubclass(value_type, kind):
            raise TypeError(f"{name} is a {value_type.__name__}")
    if kind is Integral and min(values, default=0) < 0:
        raise ValueError(f"{name} is negative")
    if kind is Integral and max(values, default=0) >= LARGEST:
        raise ValueError(f"{name} is larger than any tensor")


LARGEST = 1 << 63
"""No tensor has as many bytes."""

MOST_DIMS_OF_TORCH = 256


def counts(values: Any) -> tuple[int, ...]:
    """Return counts of elements or bytes that came from a file.

    Raises:
        TypeError: A value is no integer, or there is no list of them.
        ValueError: A count is negative or too large, or there are too many.
    """
    if not isinstance(values, list | tuple):
        raise TypeError(f"a {type(values).__name__} where counts should be")
    if len(values) > MOST_DIMS_OF_TORCH:
        raise ValueError(f"{len(values)} counts, as of a tensor of so many dims")
    for value in values:
        if type(value) is not int:
            raise TypeError(f"a {type(value).__name__} where a count should be")
        if not 0 <= value < LARGEST:
            raise ValueError("a count that is negative, or larger than any tensor")
    return tuple(values)
