"""The pickle of DCP's metadata, read as ``pickle.load`` does, or without calling what it names.

Both return torch's own objects, and read what any torch from 2.10 and Python from 3.11 on wrote.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, islice, repeat
from numbers import Integral
from operator import attrgetter
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_placements._torch import MemoryFormat, StorageInfo, layout_named
from dcp_placements.layout.boxes import as_array
from dcp_placements.layout.sharding import Box
from dcp_placements.short_text import format_error
from dcp_placements.storage.index import index_of_locations
from dcp_placements.storage.process_limits import limited_time
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    MOST_BITS,
    ORDERED_DICT,
    Call,
    RefusedGlobal,
    SafeUnpickler,
    check_unfolded,
    refusal,
    stand_in,
)
from dcp_placements.storage.torch_metadata import (
    PICKLED_PROPERTIES,
    PORTABLE_PROPERTIES,
    PROPERTIES,
    ChunkList,
    Entries,
    StoredLocation,
    check_count,
    check_files,
    check_values,
)

PATHS = "pathlib"
PATHS_OF_3_13 = "pathlib._local"
"""The module of paths in pickles of Python 3.13; older versions have no such module."""

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"
"""Megatron-Core's class of metadata, which adds a field."""

PLACE = StorageInfo.__name__
"""Torch's class for a place. Other writers pickle a copy of it under a module of their own: it is
read by its fields, and their module is not imported."""

MAX_DIMS = 64
_MAX_PATH_CHARS = 1 << 14


def load_metadata_pickle(stream: IO[bytes]) -> Any:
    """Return the value of a pickle of DCP's metadata, as ``pickle.load`` does."""
    return _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Megatron's class adds nothing that a load needs, and importing it needs Megatron.
        if (module, name) == MEGATRON:
            return Metadata
        if name == PLACE:
            return StorageInfo
        substitute = PICKLED_PROPERTIES.get((module, name))
        if substitute is not None:
            return substitute
        return super().find_class(PATHS if module == PATHS_OF_3_13 else module, name)


def load_safely(stream: IO[bytes], newer: set[str] | None = None) -> Any:
    """Return the value of a pickle of DCP's metadata without calling what it names.

    Args:
        stream: The file.
        newer: Receives texts of what ``pickle.load`` with this torch and Python would fail at.

    Raises:
        RefusedGlobal: The pickle names something else; nothing has been called then.
        pickle.UnpicklingError: The pickle is broken, or is not one of metadata.
    """
    unpickler = _SafeMetadata(stream.read())
    with limited_time(unpickler.nbytes):
        value = unpickler.load()
        unknown, most = unpickler.newer, unpickler.most_elements
        del unpickler  # which refers to all that it read
        # In an index the metadata are the first of two values, and the forms of entries the other.
        is_index = type(value) is tuple and len(value) == 2 and type(value[0]) is _OF_ALL
        metadata, *forms = value if is_index else (value,)
        try:
            if type(metadata) is _OF_ALL:
                _become(metadata)
                _become(metadata.storage_meta)
                if not is_index:
                    _put_columns(metadata, unknown)
            for listed in forms:
                entries = _entries([], listed, unknown, rows=0)
                listed[:] = map(entries.forms.__getitem__, entries.form_of)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise refusal(f"it is no metadata: {format_error(error)}") from error
        if newer is not None:
            newer.update(unknown)
        if type(metadata) is Metadata:
            _check_unfolded(metadata, most)
        return value


def _put_columns(metadata: Metadata, newer: set[str]) -> None:
    """Replace the entries and places of a pickle, which are stand-ins, by columns, checked.

    Values of one attribute of all stand-ins are taken and checked at a time, without code of Python
    for each: there are some hundred thousand of them.

    Args:
        metadata: The metadata.
        newer: Receives texts, as in ``load_safely``.
    """
    stored, places = (vars(metadata).pop(n, None) for n in ("state_dict_metadata", "storage_data"))
    check_values("storage_data", [places], dict)
    check_values("state_dict_metadata", [stored], dict)
    check_values("planner_data", [metadata.planner_data], (Mapping, type(None)))
    check_values("a key", stored, str)
    fqns, held = list(stored), list(stored.values())
    del stored  # from here on, what was read is freed as soon as possible
    entries = _entries(fqns, held, newer, rows=len(places))
    del held
    locations = _locations(places)
    del places
    metadata.storage_data = index_of_locations(locations, entries)
    metadata.state_dict_metadata = entries.stored()


def _entries(fqns: list[str], listed: Sequence[Any], newer: set[str], *, rows: int) -> Entries:
    """Return the entries of a pickle by what keys have in common.

    Args:
        fqns: The keys; empty for the forms of an index.
        listed: The entries, which are stand-ins.
        newer: Receives texts, as in ``load_safely``.
        rows: Number of places of chunks.
    """
    check_values("the metadata of a key", listed, (_TENSOR, _OF_OBJECT))
    tensors = [entry for entry in listed if type(entry) is _TENSOR]
    chunks_of = list(map(attrgetter("chunks"), tensors))
    check_values("the chunks of a tensor", chunks_of, list)
    check_count(sum(map(len, chunks_of)), rows)  # keys may share a list
    chunks = list(chain.from_iterable(chunks_of))
    check_values("a chunk", chunks, _CHUNK)
    boxes = zip(_tuples("offsets", chunks), _tuples("sizes", chunks), strict=True)
    boxes_of = map(tuple, map(islice, repeat(boxes), map(len, chunks_of)))
    contents = zip(_states(tensors, newer), _tuples("size", tensors), boxes_of, strict=True)
    every = [next(contents) if kind is _TENSOR else None for kind in map(type, listed)]
    numbers = {content: number for number, content in enumerate(dict.fromkeys(every))}
    form_of = list(map(numbers.__getitem__, every))
    entries = Entries(fqns, form_of, [], [], [])
    properties: dict[Any, TensorProperties] = {}
    lists: dict[Any, int] = {}
    for content in numbers:
        form: Any = BytesStorageMetadata()
        number = -1
        if content is not None:
            state, size, held = content
            check_values("size", size, Integral)
            if state not in properties:
                properties[state] = _properties(state)
            number = lists.setdefault((len(size), held), len(lists))
            if number == len(entries.lists):
                entries.lists.append(_chunk_list(len(size), held))
            shared: Any = entries.lists[number]
            form = TensorStorageMetadata(properties[state], torch.Size(size), shared)
        entries.forms.append(form)
        entries.list_of.append(number)
    return entries


def _tuples(name: str, owners: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the value of an attribute of stand-ins: sizes, or other sequences of integers."""
    values = list(map(attrgetter(name), owners))
    is_of_torch = set(map(type, values)) <= {torch.Size}
    check_values(name, values, tuple | list)
    if max(map(len, values), default=0) > MAX_DIMS:
        raise ValueError(f"{name} of more than {MAX_DIMS} dims")
    if is_of_torch:
        return values
    check_values(name, list(chain.from_iterable(values)), Integral)
    return list(map(tuple, values))


def _chunk_list(ndim: int, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> ChunkList:
    """Return the chunks of a tensor of ``ndim`` dims, whose offsets and sizes are checked."""
    if any({len(offsets), len(sizes)} != {ndim} for offsets, sizes in boxes):
        raise ValueError("a chunk has other dims than its tensor")
    for name, column in zip(("offsets", "sizes"), zip(*boxes, strict=True), strict=False):
        check_values(name, list(chain.from_iterable(column)), Integral)
    return ChunkList(as_array([Box(*map(tuple, box)) for box in boxes], ndim))


def _states(tensors: Sequence[Any], newer: set[str]) -> list[tuple[Any, ...]]:
    """Return the states of the properties of tensors: the fields that every torch has."""
    held = list(map(attrgetter("properties"), tensors))
    check_values("the properties of a tensor", held, _PROPERTY_STATE)
    states = list(map(attrgetter("state"), held))
    check_values("the state of a tensor's properties", states, tuple)
    lengths = set(map(len, states))
    if max(lengths, default=0) > PROPERTIES:
        newer.add(f"a TensorProperties of {max(lengths)} fields (torch 2.15 or newer)")
    if min(lengths, default=PORTABLE_PROPERTIES) < PORTABLE_PROPERTIES:
        raise TypeError(f"properties of a tensor: {min(lengths)} fields")
    columns = list(islice(zip(*states, strict=False), PORTABLE_PROPERTIES))
    for name, column, kind in zip(_STATE_FIELDS, columns, _STATE_KINDS, strict=False):
        check_values(name, column, kind)
    return list(zip(*columns, strict=True))


def _properties(state: tuple[Any, ...]) -> TensorProperties:
    """Return torch's properties of a tensor with a state of a pickle."""
    dtype, layout, requires_grad, memory_format, pin_memory = state
    properties = TensorProperties()
    properties.__setstate__(
        (dtype, layout, requires_grad, MemoryFormat(int(memory_format)), pin_memory)
    )
    return properties


def _locations(places: Mapping[Any, Any]) -> list[StoredLocation]:
    """Return the places of a pickle, whose keys and values are stand-ins, checked."""
    check_values("the index of a place", places, _INDEX)
    check_values("a place", places.values(), _PLACE)
    if not places:
        return []
    fqns, offsets = zip(*map(attrgetter("fqn", "offset"), places), strict=True)
    if {*map(type, fqns)} - {str} or {*map(type, offsets)} - {torch.Size, type(None)}:
        raise TypeError("the index of a chunk that is no key and offset")
    names = "relative_path", "offset", "length", "transform_descriptors"
    columns = zip(*map(attrgetter(*names), places.values()), strict=True)
    files, starts, lengths, steps = columns
    check_values("relative_path", files, str)
    check_files(set(files))
    check_values("offset", starts, Integral)
    check_values("length", lengths, Integral)
    check_values("transform_descriptors", steps, (list, tuple, type(None)))
    check_values("a transform", chain.from_iterable(filter(None, steps)), str)
    transforms = [None if listed is None else tuple(listed) for listed in steps]
    return list(map(StoredLocation, fqns, offsets, files, starts, lengths, transforms))


def _become(value: Any) -> Any:
    """Make a stand-in an instance of the class that it stands for; return any value."""
    kind = _KINDS.get(type(value))
    if kind is not None:
        value.__class__ = kind
    return value


class _Format(int):
    """The number of a memory format: members of the enumeration could be changed."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> NoReturn:
        raise refusal("it changes a memory format")


_STATE_FIELDS = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
_STATE_KINDS = (torch.dtype, torch.layout, bool, _Format, bool)
"""The state of torch's properties of a tensor: names and types of its fields."""


class _Size:
    """What a pickle calls for a size, several times per key."""

    __slots__ = ()

    def __call__(self, values: Any) -> torch.Size:
        # A tuple of a file may be referred to ten thousand times, and each size is a copy.
        if type(values) is not tuple or len(values) > MAX_DIMS:
            raise refusal("it has a size that is no sequence of integers")
        return torch.Size(values)

    def __setstate__(self, state: Any) -> NoReturn:
        raise refusal("it changes torch.Size")


def _path(kind: type[PurePath]) -> Call:
    def text(*parts: Any) -> str:
        is_short = len(parts) <= _MAX_PATH_CHARS and not set(map(type, parts)) - {str}
        if not is_short or sum(map(len, parts)) > _MAX_PATH_CHARS:
            raise refusal("it has a path that is not made of short text")
        return str(kind(*parts))

    return Call(kind.__name__, text)


def _member(owner: Any, name: str) -> _Format:
    """Return a member of the enumeration, which some versions of Python pickle as ``getattr``."""
    if owner is not _FORMAT:
        raise RefusedGlobal("builtins.getattr", _SafeMetadata.subject)
    return _Format(MemoryFormat.__members__[name].value)


def _set_properties(properties: Any, state: Any) -> None:
    if vars(properties):
        raise refusal("it changes properties of a tensor")
    properties.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_FORMAT = Call("_MEM_FORMAT_ENCODING", _Format, (int,))

_PROPERTY_STATE = stand_in(TensorProperties, __setstate__=_set_properties)
_CHUNK, _TENSOR = stand_in(ChunkStorageMetadata), stand_in(TensorStorageMetadata)
_OF_OBJECT = stand_in(BytesStorageMetadata)
# Torch pickles no field that is None, and an older one has no transforms.
_INDEX = stand_in(MetadataIndex, offset=None)
_PLACE = stand_in(StorageInfo, transform_descriptors=None)
_OF_ALL, _OF_STORAGE = stand_in(Metadata), stand_in(StorageMeta)
_KINDS: dict[type[Any], type[Any]] = {_OF_ALL: Metadata, _OF_STORAGE: StorageMeta}
_STAND_INS = _PROPERTY_STATE, _CHUNK, _TENSOR, _OF_OBJECT, _INDEX, _PLACE, _OF_ALL, _OF_STORAGE


class _SafeMetadata(SafeUnpickler):
    """Creates stand-ins of torch's objects.

    Attributes:
        newer: Texts, as in ``load_safely``.
    """

    subject = "DCP's metadata"
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **DTYPES,
        **ORDERED_DICT,
        **{(_METADATA, held.__name__): held for held in _STAND_INS},
        (_OLDER, "TensorProperties"): _PROPERTY_STATE,
        MEGATRON: _OF_ALL,
        (_METADATA, "_MEM_FORMAT_ENCODING"): _FORMAT,
        (_OLDER, "MEM_FORMAT_ENCODING"): _FORMAT,
        ("torch.serialization", "_get_layout"): Call("_get_layout", layout_named, (str,)),
        # A ChunkList in metadata that another writer pickles.
        ("builtins", "list"): Call("list", lambda values: values, (list,)),
        # Its type is written in C: nothing changes it, and it takes integers alone.
        ("torch", "Size"): _Size(),
        ("builtins", "getattr"): Call("getattr", _member, (Call, str)),
        # Pure paths reach no file system.
        **{
            (module, prefix + kind.__name__.removeprefix("Pure")): _path(kind)
            for module in (PATHS, PATHS_OF_3_13)
            for prefix in ("", "Pure")
            for kind in (PurePosixPath, PureWindowsPath)
        },
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.newer: set[str] = set()

    def named(self, module: str, name: str) -> Any:
        if name == PLACE:
            return _PLACE
        if module == PATHS_OF_3_13 and sys.version_info < (3, 13):
            self.newer.add("a path as Python 3.13 pickles it")
        return super().named(module, name)


def _check_unfolded(metadata: Metadata, most: int) -> None:
    """Refuse metadata whose facts about save and storage unfold to far more than their file.

    A pickle can refer to one value many times, and a value can refer to itself.

    Args:
        metadata: The metadata.
        most: The most elements that these facts may have.
    """
    meta, data = metadata.storage_meta, metadata.planner_data
    todo: list[Any] = [metadata.version, vars(meta) if type(meta) is StorageMeta else meta]
    if type(data) is dict:
        # A loop in Python over the paths of all keys would take longer than the pickle.
        paths = [path for path in data.values() if type(path) is tuple]
        parts = list(chain.from_iterable(paths))
        longest = max([part.bit_length() for part in parts if type(part) is int], default=0)
        if {*map(type, parts)} <= {str, int} and longest <= MOST_BITS:
            most -= len(parts) + sum([len(part) for part in parts if type(part) is str])
            data = {key: value for key, value in data.items() if type(value) is not tuple}
    check_unfolded([*todo, data], most)
