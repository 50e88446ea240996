"""The names that a pickle of DCP's metadata may use, and the fields that it may fill.

What is made is new, checked field by field, and filled once; nothing that others share is handed to
the file to be changed. In place of an instance of torch's class it is one of a plain class here, so
that metadata are read without torch.
"""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, ClassVar, NoReturn

from dcp_placements.storage.metadata.properties import LAYOUTS, Dtype, MemoryFormat, Properties
from dcp_placements.storage.metadata.provenance import DIGESTS_OF_RANK, stored
from dcp_placements.storage.restricted_pickle import (
    RefusedGlobal,
    RestrictedUnpickler,
    StandIn,
    describe,
    make_set,
    refusal,
)


class Size(tuple[int, ...]):
    """A ``torch.Size``: 64-bit integers."""

    __slots__ = ()


class Plain:
    """An instance of a class of torch's, with its fields alone."""

    name: ClassVar[str]
    """Of torch's class."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(f"a {self.name} that was read from a file of unknown origin")


class PlainMetadata(Plain):
    """What a ``.metadata`` file has."""

    name = "Metadata"
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: dict[tuple[str, Size | None], PlainInfo] | None = None
    """By key and offset."""
    storage_meta: Any = None
    version: Any = None


class PlainTensor(Plain):
    """The entry of a tensor."""

    name = "TensorStorageMetadata"
    properties: PlainProperties
    size: Size
    chunks: list[PlainChunk]


class PlainBytes(Plain):
    """The entry of an object."""

    name = "BytesStorageMetadata"


class PlainChunk(Plain):
    """A chunk of a tensor."""

    name = "ChunkStorageMetadata"
    offsets: Size
    sizes: Size


class PlainIndex(Plain):
    """The key and the offset of a stored chunk, or object."""

    name = "MetadataIndex"
    fqn: str
    offset: Size | None = None


class PlainInfo(Plain):
    """The place of a stored chunk, or object."""

    name = "StorageInfo"
    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | tuple[str, ...] | None = None


class PlainProperties(Plain):
    """Properties of a tensor."""

    name = "TensorProperties"
    value: Properties


class PlainStorageMeta(Plain):
    """Where and when a checkpoint was saved."""

    name = "StorageMeta"


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
    # In an index they are the first of a tuple.
    metadata = value[0] if type(value) is tuple and value else value
    if type(metadata) is PlainMetadata:
        unpickler.check_provenance(stored(metadata) or {})
    return value


class MetadataUnpickler(RestrictedUnpickler):
    subject = "DCP's metadata"
    hashed = RestrictedUnpickler.hashed | {Size, PurePosixPath, PureWindowsPath}

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.newer: set[str] = set()
        self._forms: set[tuple[Any, ...]] = set()
        self._made: dict[Any, Properties] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == PATHS_OF_3_13 and sys.version_info < (3, 13):
            self.newer.add("a path as Python 3.13 pickles it")
        # Protocols before 3 name modules as Python 2 did.
        admitted = _ADMITTED.get(("builtins" if module == "__builtin__" else module, name))
        return admitted or super().find_class(module, name)

    def key(self, value: Any) -> Any:
        if type(value) is not PlainIndex:
            return super().key(value)
        fqn, offset = value.fqn, value.offset
        if type(fqn) is not str or type(offset) not in (Size, _NONE):
            raise TypeError
        self.spend(len(offset or ()))
        return self.compared((fqn, offset))

    def check_provenance(self, provenance: Mapping[Any, Any]) -> None:
        """Refuse provenance that is far longer than the file when all of it is looked at.

        A file can refer to one value again and again, and a value to itself.
        """
        todo: list[Any] = []
        for name, value in provenance.items():
            if name in ("digests", DIGESTS_OF_RANK, "row_maps", "rules") and isinstance(
                value, Mapping
            ):
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
        held = getattr(instance, "__dict__", {})
        # A file fills storage_data of Metadata after all other fields.
        if checks is None or (held and kind is not PlainMetadata):
            raise refusal(f"it changes {describe(instance)}")
        if kind is PlainProperties:
            instance.value = self._properties(state)
            if len(state) > len(Properties._fields) and not _reads_strides():
                self.newer.add(f"a TensorProperties of {len(state)} fields (torch 2.15 or newer)")
            return
        if type(state) is not dict:
            raise TypeError
        # Thousands of instances have fields of the same names and types.
        form = (kind, *state, *map(type, state.values()))
        if held or form not in self._forms:
            _check_fields(kind, checks, held, state)
            self._forms.add(form)
        instance.__dict__ = {**held, **state}

    def _properties(self, state: Any) -> Properties:
        """Return the properties of a tensor; most tensors have the same."""
        kinds = tuple(map(type, state))
        if kinds not in self._forms or state[len(Properties._fields) :]:
            checked = _checked_properties(state)
            self._forms.add(kinds)
            return checked
        # Values of the types that were checked: they have short hashes.
        if state not in self._made:
            self._made[state] = _checked_properties(state)
        return self._made[state]


def _check_fields(
    kind: type[Plain],
    checks: Mapping[str, set[type[Any]]],
    held: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    for name, value in state.items():
        if held.get(name) is not None:
            raise refusal(f"it changes a {kind.__name__}")
        check = checks.get(name)
        if check is None:
            if type(name) is not str or name.startswith("_") or hasattr(kind, name):
                raise refusal(f"it sets an attribute of a {kind.name} that is no field")
        elif type(value) not in check:
            raise refusal(f"{kind.name}.{name} is a {type(value).__name__}")


_NONE = type(None)
_ANY: set[type[Any]] = {
    *(_NONE, str, bytes, bool, int, float, tuple, list, dict, set, frozenset, OrderedDict),
    *(Size, PurePosixPath, PureWindowsPath),
    *Plain.__subclasses__(),
}

_FIELDS: dict[type[Any], Mapping[str, set[type[Any]]]] = {
    PlainIndex: {"fqn": {str}, "offset": {Size, _NONE}, "index": {int, _NONE}},
    PlainInfo: {
        "relative_path": {str},
        "offset": {int},
        "length": {int},
        "transform_descriptors": {list, tuple, _NONE},
    },
    PlainChunk: {"offsets": {Size}, "sizes": {Size}},
    PlainTensor: {"properties": {PlainProperties}, "size": {Size}, "chunks": {list}},
    PlainBytes: {},
    PlainProperties: {},
    PlainStorageMeta: dict.fromkeys(("checkpoint_id", "save_id", "load_id", "modules"), _ANY),
    PlainMetadata: {
        **dict.fromkeys(("planner_data", "storage_meta", "version"), _ANY),
        "state_dict_metadata": {dict, OrderedDict},
        "storage_data": {dict, OrderedDict, _NONE},
    },
}
"""What may be filled, and the types of its fields. A file may fill lists later than fields."""


def _checked_properties(state: Any) -> Properties:
    dtype, layout, grad, form, pinned, *later = state
    kinds = ((dtype, Dtype), (form, MemoryFormat), (grad, bool), (pinned, bool))
    if type(state) is not tuple or not all(type(value) is kind for value, kind in kinds):
        raise refusal("the properties of a tensor are of other types")
    if type(layout) is not str or layout not in LAYOUTS:
        raise refusal("the layout of a tensor is none of torch's")
    strides = later[0] if later else None
    if strides is not None and (type(strides) is not tuple or not _are_int64(strides)):
        raise refusal("the strides of a tensor are no tuple of 64-bit integers")
    return Properties(dtype, layout, grad, form, pinned)


def _reads_strides() -> bool:
    """Whether the installed torch reads the sixth field of ``TensorProperties``."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 15)


def _make_size(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> Size:
    values = args[0] if args else ()
    if len(args) > 1 or type(values) not in (tuple, list) or not _are_int64(values):
        raise refusal("it has a size that is no sequence of 64-bit integers")
    unpickler.spend(len(values))
    return Size(values)


def _make_list(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> list[Any]:
    if len(args) != 1 or type(args[0]) is not list:
        raise refusal("it has a list that is not made of a list")
    unpickler.spend(len(args[0]))
    return list(args[0])


def _are_int64(values: Sequence[Any]) -> bool:
    if not set(map(type, values)) <= {int}:
        return False
    return not values or (max(values) < 1 << 63 and min(values) >= -(1 << 63))


def _make_path(kind: type[PurePath]) -> Callable[[Any, tuple[Any, ...]], PurePath]:
    def make(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> PurePath:
        if not all(type(part) is str for part in args):
            raise refusal("it has a path that is not made of text")
        unpickler.spend(sum(map(len, args)) + len(args))
        return kind(*args)

    return make


def _make_layout(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> str:
    if len(args) != 1 or type(args[0]) is not str or args[0] not in LAYOUTS:
        raise refusal("it calls _get_layout with something else than the name of a layout")
    return args[0]


def _make_format(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> MemoryFormat:
    if len(args) != 1 or type(args[0]) is not int:
        raise refusal("it calls _MEM_FORMAT_ENCODING with something else than one number")
    return MemoryFormat(args[0])


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

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"
"""Megatron-Core's class of metadata, which adds a field."""

_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_FORMAT = StandIn("_MEM_FORMAT_ENCODING", _make_format, enum=MemoryFormat)

CLASSES: dict[tuple[str, str], type[Plain]] = {
    **{(_METADATA, kind.name): kind for kind in Plain.__subclasses__() if kind is not PlainInfo},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): PlainInfo,
    (_OLDER, "TensorProperties"): PlainProperties,
    MEGATRON: PlainMetadata,
}
"""The classes that a ``.metadata`` file names, by module and name."""

_ADMITTED: dict[tuple[str, str], StandIn] = {
    **{key: StandIn(key[1], _make_path(kind)) for key, kind in _PATHS.items()},
    **{key: StandIn(key[1], new=kind) for key, kind in CLASSES.items()},
    (_METADATA, "_MEM_FORMAT_ENCODING"): _FORMAT,
    (_OLDER, "MEM_FORMAT_ENCODING"): _FORMAT,
    ("torch.serialization", "_get_layout"): StandIn("_get_layout", _make_layout),
    # A ChunkList in metadata that another writer pickles.
    ("builtins", "list"): StandIn("list", _make_list),
    ("builtins", "set"): StandIn("set", make_set(set)),
    ("builtins", "frozenset"): StandIn("frozenset", make_set(frozenset)),
    ("torch", "Size"): StandIn("Size", _make_size),
    ("builtins", "getattr"): StandIn("getattr", _enum_member),
}
