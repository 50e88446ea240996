"""The pickle of DCP's metadata: as ``pickle.load`` reads it, and as nothing is called.

Both make torch's own objects, of what any torch and any Python from 2.10 and 3.11 on wrote.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from functools import lru_cache
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
from dcp_placements.storage.provenance import stored
from dcp_placements.storage.safe_pickle import (
    DTYPES,
    LARGEST_KEY,
    ORDERED_DICT,
    Call,
    RefusedGlobal,
    SafeUnpickler,
    check_unfolded,
    most_elements,
    refusal,
)
from dcp_placements.storage.torch_metadata import (
    PICKLED_PROPERTIES,
    PROPERTIES,
)

PATHS = "pathlib"
PATHS_OF_3_13 = "pathlib._local"
"""Where Python 3.13 says that its paths are; older ones have no such module."""

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"
"""Megatron-Core's class of metadata, which adds a field."""

MAX_DIMS = 64
_MAX_PATH_CHARS = 1 << 14
_BY_KEY = ("digests", "row_maps", "rules")


def load_metadata_pickle(stream: IO[bytes]) -> Any:
    """Return the value of a pickle of DCP's metadata, as ``pickle.load`` does."""
    return _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Megatron's class adds nothing that a load needs. It needs Megatron.
        if (module, name) == MEGATRON:
            return Metadata
        substitute = PICKLED_PROPERTIES.get((module, name))
        if substitute is not None:
            return substitute
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


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple or len(values) > MAX_DIMS or not set(map(type, values)) <= _INT:
        raise refusal("it has a size that is no sequence of integers")
    return _shared_size(values)


_INT = frozenset({int})


@lru_cache(maxsize=1 << 10)
def _shared_size(values: tuple[int, ...]) -> torch.Size:
    """Return a size; thousands of keys have equal ones."""
    if max(values, default=0) >= LARGEST_KEY:
        raise refusal("it has a size of more elements than there are")
    return torch.Size(values)


def _path(kind: type[PurePath]) -> Call:
    def make(*parts: Any) -> PurePath:
        is_short = len(parts) <= _MAX_PATH_CHARS and not set(map(type, parts)) - {str}
        if not is_short or sum(map(len, parts)) > _MAX_PATH_CHARS:
            raise refusal("it has a path that is not made of short text")
        return kind(*parts)

    return Call(kind.__name__, make)


def _member(owner: Any, name: str) -> MemoryFormat:
    """Return a member of the enumeration, which some versions of Python pickle as ``getattr``."""
    if owner is not _FORMAT:
        raise RefusedGlobal("builtins.getattr", _SafeMetadata.subject)
    return MemoryFormat.__members__[name]


_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_FORMAT = Call("_MEM_FORMAT_ENCODING", MemoryFormat, (int,))


class _SafeMetadata(SafeUnpickler):
    """Makes torch's objects.

    Attributes:
        newer: As of ``load_safely``.
    """

    subject = "DCP's metadata"
    kinds = (
        *(MetadataIndex, StorageInfo, ChunkStorageMetadata, TensorStorageMetadata),
        *(BytesStorageMetadata, TensorProperties, StorageMeta, Metadata),
    )
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        **DTYPES,
        **ORDERED_DICT,
        **{(_METADATA, kind.__name__): Call(kind.__name__, fills=kind) for kind in kinds},
        (_FILES, "_StorageInfo"): Call("_StorageInfo", fills=StorageInfo),
        (_OLDER, "TensorProperties"): Call("TensorProperties", fills=TensorProperties),
        MEGATRON: Call("Metadata", fills=Metadata),
        (_METADATA, "_MEM_FORMAT_ENCODING"): _FORMAT,
        (_OLDER, "MEM_FORMAT_ENCODING"): _FORMAT,
        ("torch.serialization", "_get_layout"): Call("_get_layout", layout_named, (str,)),
        # A ChunkList in metadata that another writer pickles.
        ("builtins", "list"): Call("list", lambda values: values, (list,)),
        ("torch", "Size"): _size,  # there are several per key
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
        if module == PATHS_OF_3_13 and sys.version_info < (3, 13):
            self.newer.add("a path as Python 3.13 pickles it")
        return super().named(module, name)

    def fill(self, instance: Any, state: Any) -> Any:
        if type(instance) is not TensorProperties or type(state) is not tuple or vars(instance):
            return super().fill(instance, state)
        if len(state) > PROPERTIES:
            self.newer.add(f"a TensorProperties of {len(state)} fields (torch 2.15 or newer)")
        instance.__setstate__(state[:PROPERTIES])
        return instance

    def check_key(self, key: Any) -> None:
        if type(key) is not MetadataIndex:
            super().check_key(key)
        elif type(key.fqn) is not str or type(key.offset) not in (torch.Size, type(None)):
            raise refusal("it has the index of a chunk that is no key and offset")


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
            most -= len(value) + sum(len(inner) for inner in value.values() if type(inner) is dict)
        else:
            todo.append(value)
    check_unfolded(todo, most)
