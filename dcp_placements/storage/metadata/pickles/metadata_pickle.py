"""The pickle of DCP's metadata: as ``pickle.load`` reads it, and as nothing is called.

Both make torch's own objects, of what any torch and any Python from 2.10 and 3.11 on wrote.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_placements._torch import MemoryFormat, StorageInfo, layout_named
from dcp_placements.storage.metadata.pickles.tensor_properties import (
    PICKLED_PROPERTIES,
    PROPERTIES,
)
from dcp_placements.storage.metadata.record import DIGESTS_OF_RANK, stored
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    ORDERED_DICT,
    Call,
    RefusedGlobal,
    SafeUnpickler,
    check_unfolded,
    most_elements,
    refusal,
)

PATHS = "pathlib"
PATHS_OF_3_13 = "pathlib._local"
"""Where Python 3.13 says that its paths are; older ones have no such module."""

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"
"""Megatron-Core's class of metadata, which adds a field."""

MAX_DIMS = 64
_MAX_PATH_CHARS = 1 << 14
_BY_KEY = ("digests", DIGESTS_OF_RANK, "row_maps", "rules")


def load_metadata_pickle(stream: IO[bytes]) -> Any:
    """Return the value of a pickle of DCP's metadata, as ``pickle.load`` does."""
    return _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Megatron's class adds nothing that a load needs. It needs Megatron.
        if (module, name) == MEGATRON:
            return Metadata
        found = PICKLED_PROPERTIES.get((module, name))
        if found is not None:
            return found
        return super().find_class(PATHS if module == PATHS_OF_3_13 else module, name)


def load_safely(stream: IO[bytes], newer: set[str] | None = None) -> Any:
    """Return the value of a pickle of DCP's metadata, of which nothing is called.

    Args:
        stream: The file.
        newer: What ``pickle.load`` with this torch and Python would fail at is added here, as text.

    Raises:
        RefusedGlobal: It names anything else; nothing has been called then.
        pickle.UnpicklingError: It is broken, or is no pickle of metadata.
    """
    data = stream.read()
    unpickler = _SafeMetadata(data)
    value = unpickler.load()
    if newer is not None:
        newer.update(unpickler.newer)
    # In an index they are the first of a tuple.
    metadata = value[0] if type(value) is tuple and value else value
    if type(metadata) is Metadata:
        _check_unfolded(metadata, most_elements(data))
    return value


def _size(values: Any = ()) -> torch.Size:
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS or not are_int64(values):
        raise refusal("it has a size that is no sequence of 64-bit integers")
    return torch.Size(values)


def are_int64(values: Sequence[Any]) -> bool:
    """Whether values are integers of 64 bits."""
    return set(map(type, values)) <= {int} and all(-(1 << 63) <= one < 1 << 63 for one in values)


def _list(values: Any) -> list[Any]:
    if type(values) is not list:
        raise refusal("it has a list that is not made of a list")
    return values


def _path(kind: type[PurePath]) -> Call:
    def make(*parts: Any) -> PurePath:
        if set(map(type, parts)) - {str} or sum(map(len, parts)) > _MAX_PATH_CHARS:
            raise refusal("it has a path that is not made of short text")
        return kind(*parts)

    return Call(kind.__name__, make)


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or not name.startswith("torch."):
        raise refusal("it calls _get_layout with something else than the name of a layout")
    return layout_named(name)


def _format(value: Any) -> MemoryFormat:
    if type(value) is not int:
        raise refusal("it calls _MEM_FORMAT_ENCODING with something else than one number")
    return MemoryFormat(value)


_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_FORMAT = Call("_MEM_FORMAT_ENCODING", _format)


def _member(owner: Any, name: Any) -> MemoryFormat:
    """Return a member of the enumeration, which some versions of Python pickle as ``getattr``."""
    if owner is not _FORMAT or type(name) is not str:
        raise RefusedGlobal("builtins.getattr", _SafeMetadata.subject)
    return MemoryFormat.__members__[name]


class _SafeMetadata(SafeUnpickler):
    """Makes torch's objects.

    Attributes:
        newer: As of ``load_safely``.
    """

    subject = "DCP's metadata"
    fillable = (
        *(MetadataIndex, StorageInfo, ChunkStorageMetadata, TensorStorageMetadata),
        *(BytesStorageMetadata, TensorProperties, StorageMeta, Metadata),
    )
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **DTYPES,
        **ORDERED_DICT,
        **{(_METADATA, kind.__name__): kind for kind in fillable if kind is not StorageInfo},
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
        (_OLDER, "TensorProperties"): TensorProperties,
        MEGATRON: Metadata,
        (_METADATA, "_MEM_FORMAT_ENCODING"): _FORMAT,
        (_OLDER, "MEM_FORMAT_ENCODING"): _FORMAT,
        ("torch.serialization", "_get_layout"): Call("_get_layout", _layout),
        # A ChunkList in metadata that another writer pickles.
        ("builtins", "list"): Call("list", _list),
        ("torch", "Size"): Call("Size", _size),
        ("builtins", "getattr"): Call("getattr", _member),
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

    def find_class(self, module: str, name: str) -> Any:
        if module == PATHS_OF_3_13 and sys.version_info < (3, 13):
            self.newer.add("a path as Python 3.13 pickles it")
        return super().find_class(module, name)

    def fill(self, instance: Any, state: Any) -> None:
        if type(instance) is Metadata and vars(instance).keys().isdisjoint(state):
            # A file fills its storage_data after all other fields.
            vars(instance).update(state)
            return
        if type(instance) is not TensorProperties or vars(instance):
            super().fill(instance, state)
            return
        if type(state) is not tuple:
            raise TypeError
        if len(state) > PROPERTIES:
            self.newer.add(f"a TensorProperties of {len(state)} fields (torch 2.15 or newer)")
        instance.__setstate__(state[:PROPERTIES])

    def check_key(self, key: Any) -> None:
        if type(key) is not MetadataIndex:
            super().check_key(key)
        elif type(key.fqn) is not str or type(key.offset) not in (torch.Size, type(None)):
            raise refusal("it has the index of a chunk that is no key and offset")
        else:
            self.check_hash((key.fqn, key.offset))


def _check_unfolded(metadata: Metadata, most: int) -> None:
    """Refuse values that are far longer than their file when all of them is looked at.

    A file can refer to one value again and again, and a value to itself.

    Args:
        metadata: The facts about its save and its storage are looked at.
        most: Elements that they may have.
    """
    meta = metadata.storage_meta
    todo: list[Any] = [metadata.version, vars(meta) if type(meta) is StorageMeta else meta]
    for name, value in (stored(metadata) or {}).items():
        if name in _BY_KEY and type(value) is dict:
            # Entries of keys, of values that many keys share.
            most -= len(value) + sum(len(one) for one in value.values() if type(one) is dict)
        else:
            todo.append(value)
    check_unfolded(todo, most)
