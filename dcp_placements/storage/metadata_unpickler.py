"""The pickle of DCP's metadata, read as ``pickle.load`` does, or without calling what it names.

Both return torch's own objects, and read what any torch from 2.10 and Python from 3.11 on wrote.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from itertools import chain
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
from dcp_placements.short_text import format_error
from dcp_placements.storage.provenance import provenance_of
from dcp_placements.storage.safe_pickle import (
    DTYPES,
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
_BY_KEY = ("digests", "row_maps", "rules")


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
    value = unpickler.load()
    # In an index the metadata are the first value of a tuple, and the forms of entries the second.
    is_index = type(value) is tuple and len(value) == 2 and type(value[0]) is _OF_ALL
    metadata, *forms = value if is_index else (value,)
    try:
        restore = _Restored(unpickler.newer)
        restore.metadata(metadata)
        for listed in forms:
            listed[:] = map(restore.entry, listed)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refusal(f"it is no metadata: {format_error(error)}") from error
    if newer is not None:
        newer.update(unpickler.newer)
    if type(metadata) is Metadata:
        _check_unfolded(metadata, unpickler.most_elements)
    return value


class _Restored:
    """Makes torch's objects of the stand-ins of a pickle.

    Args:
        newer: Receives texts, as in ``load_safely``.
    """

    def __init__(self, newer: set[str]) -> None:
        self._newer = newer
        self._properties: dict[Any, TensorProperties] = {}
        self._entries: dict[Any, TensorStorageMetadata] = {}

    def metadata(self, metadata: Any) -> None:
        """Restore metadata, with the entries and places in them."""
        _become(metadata)
        if type(metadata) is not Metadata:
            return
        _become(metadata.storage_meta)
        # An index has neither of them.
        stored, places = map(vars(metadata).get, ("state_dict_metadata", "storage_data"))
        if type(stored) is dict:
            metadata.state_dict_metadata = {fqn: self.entry(entry) for fqn, entry in stored.items()}
        if type(places) is dict:
            for value in chain(places, places.values()):
                _become(value)
            # Stand-ins are hashed by identity, and these keys by their fields.
            kinds = {(type(key.fqn), type(key.offset)) for key in places}
            if not kinds <= {(str, torch.Size), (str, type(None))}:
                raise TypeError("the index of a chunk that is no key and offset")
            metadata.storage_data = dict(zip(places, places.values(), strict=True))

    def entry(self, entry: Any) -> Any:
        """Return the entry of a key; equal entries are one object, as thousands of keys have."""
        if type(entry) is not _TENSOR:
            return _become(entry)
        size, chunks = entry.size, entry.chunks
        state, properties = self._properties_of(entry.properties)
        content: Any = entry  # a stand-in, which equals no other one
        if state is not None and type(chunks) is list and {*map(type, chunks)} <= {_CHUNK}:
            boxes = tuple([(chunk.offsets, chunk.sizes) for chunk in chunks])
            if {type(size), *[type(sizes) for box in boxes for sizes in box]} <= {torch.Size}:
                content = state, size, boxes
        if content not in self._entries:
            for chunk in chunks if type(chunks) is list else ():
                _become(chunk)
            self._entries[content] = TensorStorageMetadata(properties, size, chunks)
        return self._entries[content]

    def _properties_of(self, properties: Any) -> tuple[Any, Any]:
        """Return the state of a tensor's properties, None for another form than torch's; and them.

        Equal ones are one object.
        """
        state = getattr(properties, "state", None)
        if type(properties) is not _PROPERTY_STATE or type(state) is not tuple:
            return None, _become(properties)
        if len(state) > PROPERTIES:
            self._newer.add(f"a TensorProperties of {len(state)} fields (torch 2.15 or newer)")
        state = state[:PORTABLE_PROPERTIES]
        kinds = tuple(map(type, state))
        if kinds != _STATE_KINDS:
            pairs = zip(_STATE_FIELDS, kinds, _STATE_KINDS, strict=False)
            odd = [f"{name} is a {kind.__name__}" for name, kind, own in pairs if kind is not own]
            raise TypeError(f"properties of a tensor: {' and '.join(odd) or len(kinds)}")
        if state not in self._properties:
            dtype, layout, requires_grad, memory_format, pin_memory = state
            restored = TensorProperties()
            restored.__setstate__(
                (dtype, layout, requires_grad, MemoryFormat(int(memory_format)), pin_memory)
            )
            self._properties[state] = restored
        return state, self._properties[state]


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
    vars(properties).update(state if type(state) is dict else {"state": state})


_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_FORMAT = Call("_MEM_FORMAT_ENCODING", _Format, (int,))

_PROPERTY_STATE = stand_in(TensorProperties, __setstate__=_set_properties)
_CHUNK, _TENSOR = stand_in(ChunkStorageMetadata), stand_in(TensorStorageMetadata)
_PLACE, _OF_ALL = stand_in(StorageInfo), stand_in(Metadata)
_KINDS: dict[type[Any], type[Any]] = {
    **{_PROPERTY_STATE: TensorProperties, _CHUNK: ChunkStorageMetadata},
    **{_TENSOR: TensorStorageMetadata, _PLACE: StorageInfo, _OF_ALL: Metadata},
    **{stand_in(kind): kind for kind in (MetadataIndex, BytesStorageMetadata, StorageMeta)},
}


class _SafeMetadata(SafeUnpickler):
    """Creates stand-ins of torch's objects.

    Attributes:
        newer: Texts, as in ``load_safely``.
    """

    subject = "DCP's metadata"
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **DTYPES,
        **ORDERED_DICT,
        **{(_METADATA, kind.__name__): held for held, kind in _KINDS.items()},
        (_OLDER, "TensorProperties"): _PROPERTY_STATE,
        MEGATRON: _OF_ALL,
        (_METADATA, "_MEM_FORMAT_ENCODING"): _FORMAT,
        (_OLDER, "MEM_FORMAT_ENCODING"): _FORMAT,
        ("torch.serialization", "_get_layout"): Call("_get_layout", layout_named, (str,)),
        # A ChunkList in metadata that another writer pickles.
        ("builtins", "list"): Call("list", lambda values: values, (list,)),
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
    meta = metadata.storage_meta
    todo: list[Any] = [metadata.version, vars(meta) if type(meta) is StorageMeta else meta]
    for name, value in (provenance_of(metadata) or {}).items():
        if name in _BY_KEY and type(value) is dict:
            # Many keys share the values of these entries.
            most -= len(value) + sum(len(inner) for inner in value.values() if type(inner) is dict)
        else:
            todo.append(value)
    check_unfolded(todo, most)
