"""The names that a pickle of DCP's metadata may use, and the fields that it may fill.

What is made is new, checked field by field, and filled once; nothing that others share is handed to
the file to be changed.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import EnumType
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch

from dcp_placements._torch import (
    METADATA_CLASSES,
    METADATA_HELPERS,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.storage.metadata.pickles.tensor_properties import (
    has_unknown_properties,
    set_properties,
)
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.restricted_pickle import (
    RefusedGlobal,
    RestrictedUnpickler,
    StandIn,
    describe,
    make_set,
    refusal,
)


def load_restricted(stream: IO[bytes], newer: set[str] | None = None) -> Any:
    """Return the value of a pickle of DCP's metadata.

    Args:
        stream: The file.
        newer: What ``pickle.load`` with this torch and Python would fail at is added here, as text.

    Raises:
        RefusedGlobal: It names anything else; nothing has been called then.
        pickle.UnpicklingError: It is broken, or is no pickle of metadata.
    """
    unpickler = MetadataUnpickler(stream.read())
    value = unpickler.load()
    if newer is not None:
        newer.update(unpickler.newer)
    if type(value) is Metadata:
        unpickler.check_provenance(stored(value) or {})
    return value


class MetadataUnpickler(RestrictedUnpickler):
    subject = "DCP's metadata"
    hashed = RestrictedUnpickler.hashed | {PurePosixPath, PureWindowsPath}

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.newer: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module == PATHS_OF_3_13 and sys.version_info < (3, 13):
            self.newer.add("a path as Python 3.13 pickles it")
        # Protocols before 3 name modules as Python 2 did.
        admitted = _ADMITTED.get(("builtins" if module == "__builtin__" else module, name))
        return admitted or super().find_class(module, name)

    def check_hashed(self, value: Any, depth: int = 0) -> None:
        if type(value) is not MetadataIndex:
            super().check_hashed(value, depth)
            return
        self.spend(len(value.offset or ()))
        if type(value.fqn) is not str:
            raise TypeError

    def check_provenance(self, provenance: Mapping[Any, Any]) -> None:
        """Refuse provenance that is far longer than the file when all of it is looked at.

        A file can refer to one value again and again, and a value to itself.
        """
        todo: list[Any] = []
        for name, value in provenance.items():
            if name in ("digests", "row_maps", "rules") and isinstance(value, Mapping):
                # One entry per key, of values that many keys share.
                self.spend(len(value))
                self.spend(sum(len(of_key) for of_key in value.values() if type(of_key) is dict))
            else:
                todo.append(value)
        while todo:
            value = todo.pop()
            if isinstance(value, str | bytes | tuple | list | set | frozenset | Mapping):
                self.spend(len(value))
            if isinstance(value, Mapping):
                todo.extend(value.values())
            if isinstance(value, tuple | list | set | frozenset | Mapping):
                todo.extend(value)

    def set_state(self, instance: Any, state: Any) -> None:
        kind = type(instance)
        checks = _FIELDS.get(kind)
        # A file fills storage_data of Metadata after all other fields.
        if checks is None or (instance.__dict__ and kind is not Metadata):
            raise refusal(f"it changes {describe(instance)}")
        if kind is TensorProperties:
            _check_properties(state)
            set_properties(instance, state)
            if has_unknown_properties(state):
                self.newer.add(f"a TensorProperties of {len(state)} fields (torch 2.15 or newer)")
            return
        if type(state) is not dict:
            raise TypeError
        held = instance.__dict__
        for name, value in state.items():
            if held and held.get(name) is not None:
                raise refusal(f"it changes {describe(instance)}")
            check = checks.get(name)
            if check is None:
                if type(name) is not str or name.startswith("_") or hasattr(kind, name):
                    raise refusal(f"it sets an attribute of a {kind.__name__} that is no field")
            elif type(value) not in check:
                raise refusal(f"{kind.__name__}.{name} is a {type(value).__name__}")
        held.update(state)


_NONE = type(None)
_ANY = {
    *(_NONE, str, bytes, bool, int, float, tuple, list, dict, set, frozenset, OrderedDict),
    *(torch.Size, PurePosixPath, PureWindowsPath, StorageMeta, *METADATA_CLASSES.values()),
}

_FIELDS: dict[type[Any], Mapping[str, set[type[Any]]]] = {
    MetadataIndex: {"fqn": {str}, "offset": {torch.Size, _NONE}, "index": {int, _NONE}},
    StorageInfo: {
        "relative_path": {str},
        "offset": {int},
        "length": {int},
        "transform_descriptors": {list, tuple, _NONE},
    },
    ChunkStorageMetadata: {"offsets": {torch.Size}, "sizes": {torch.Size}},
    TensorStorageMetadata: {
        "properties": {TensorProperties},
        "size": {torch.Size},
        "chunks": {list},
    },
    BytesStorageMetadata: {},
    TensorProperties: {},
    StorageMeta: {field.name: _ANY for field in fields(StorageMeta)},
    Metadata: {
        **{field.name: _ANY for field in fields(Metadata)},
        "state_dict_metadata": {dict, OrderedDict},
        "storage_data": {dict, OrderedDict, _NONE},
    },
}
"""What may be filled, and the types of its fields. A file may fill lists later than fields."""


def _check_properties(state: Any) -> None:
    dtype, layout, grad, encoding, pinned, *later = state
    kinds = ((dtype, torch.dtype), (layout, torch.layout), (grad, bool), (pinned, bool))
    if type(state) is not tuple or not all(type(value) is kind for value, kind in kinds):
        raise refusal("the properties of a tensor are of other types")
    strides = later[0] if later else None
    if strides is not None and (type(strides) is not tuple or not all(map(_is_int64, strides))):
        raise refusal("the strides of a tensor are no tuple of 64-bit integers")
    if type(type(encoding)) is not EnumType:
        raise refusal("the memory format of a tensor is no member of its enumeration")


def _make_size(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> torch.Size:
    values = args[0] if args else ()
    if len(args) > 1 or type(values) not in (tuple, list) or not all(map(_is_int64, values)):
        raise refusal("it has a size that is no sequence of 64-bit integers")
    unpickler.spend(len(values))
    return torch.Size(values)


def _make_list(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> list[Any]:
    if len(args) != 1 or type(args[0]) is not list:
        raise refusal("it has a list that is not made of a list")
    unpickler.spend(len(args[0]))
    return list(args[0])


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _make_path(kind: type[PurePath]) -> Callable[[Any, tuple[Any, ...]], PurePath]:
    def make(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> PurePath:
        if not all(type(part) is str for part in args):
            raise refusal("it has a path that is not made of text")
        unpickler.spend(sum(map(len, args)) + len(args))
        return kind(*args)

    return make


def _helper(key: tuple[str, str]) -> StandIn:
    helper = METADATA_HELPERS[key]

    def make(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or type(args[0]) not in (int, str):
            raise refusal(f"it calls {key[1]} with something else than one number or name")
        return helper(args[0])

    return StandIn(key[1], make, enum=helper if isinstance(helper, EnumType) else None)


def _enum_member(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> Any:
    """Return a member of an enumeration, which some versions of Python pickle as ``getattr``."""
    if len(args) == 2 and type(args[0]) is StandIn and type(args[1]) is str:
        enum = args[0].enum
        if enum is not None:
            return enum.__members__[args[1]]
    raise RefusedGlobal("builtins.getattr", unpickler.subject)


PATHS = "pathlib"
PATHS_OF_3_13 = "pathlib._local"
"""Where Python 3.13 says that its paths are; older ones have no such module."""

# Pure paths reach no file system.
_PATHS = {
    (module, prefix + kind.__name__.removeprefix("Pure")): kind
    for module in (PATHS, PATHS_OF_3_13)
    for prefix in ("", "Pure")
    for kind in (PurePosixPath, PureWindowsPath)
}

_ADMITTED: dict[tuple[str, str], StandIn] = {
    **{key: StandIn(key[1], _make_path(kind)) for key, kind in _PATHS.items()},
    **{key: StandIn(key[1], new=kind) for key, kind in METADATA_CLASSES.items()},
    **{key: _helper(key) for key in METADATA_HELPERS},
    # A ChunkList in metadata that another writer pickles.
    ("builtins", "list"): StandIn("list", _make_list),
    ("builtins", "set"): StandIn("set", make_set(set)),
    ("builtins", "frozenset"): StandIn("frozenset", make_set(frozenset)),
    ("torch", "Size"): StandIn("Size", _make_size),
    ("builtins", "getattr"): StandIn("getattr", _enum_member),
}
