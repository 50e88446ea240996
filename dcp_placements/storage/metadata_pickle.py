"""The pickle of DCP's metadata, read as ``pickle.load`` does, or without calling what it names.

Both return torch's own objects, and read what any torch from 2.10 and Python from 3.11 on wrote.
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
from dcp_placements.storage.provenance import provenance_of
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
"""The module of paths in pickles of Python 3.13; older versions have no such module."""

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
        # Megatron's class adds nothing that a load needs, and importing it needs Megatron.
        if (module, name) == MEGATRON:
            return Metadata
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
    data = stream.read()
    unpickler = _SafeMetadata(data)
    value = unpickler.load()
    if newer is not None:
        newer.update(unpickler.newer)
    # In an index the metadata are the first value of a tuple.
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
    """Return a size that equal sizes share, as thousands of keys have equal ones."""
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
    """Creates torch's objects.

    Attributes:
        newer: Texts, as in ``load_safely``.
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
