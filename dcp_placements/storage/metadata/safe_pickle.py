"""A pickle of DCP's own metadata, read so that it can do nothing else.

``pickle.load`` calls whatever a file names, sets attributes on whatever a file reaches, and takes
as much memory as a file says. So this is a reader of its own, for the few opcodes and names that
metadata are made of. A name becomes a stand-in, which the file can only ask to have made what is
listed here. What is made is new, checked field by field, and set once; nothing that others share is
ever handed to the file to be changed. Memory and time grow with the size of the file, no faster.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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
from dcp_placements.errors import format_name

MAX_NAME_TOLD = 200
_SPARE = 1 << 16
_COPIES = 4
"""How many copies of an element may be made on average."""

_KEY_DEPTH = 8
_KEY_INT = 1 << 61
"""Whole numbers up to this have hashes of their own."""


class RefusedGlobal(pickle.UnpicklingError):
    """A pickle that names something that is no part of a checkpoint's metadata.

    Args:
        name: What it asks for, as ``module.name``.
    """

    def __init__(self, name: str) -> None:
        told = format_name(name[:MAX_NAME_TOLD])
        super().__init__(f"it asks for {told}, which is no part of DCP's metadata")
        self.name = name


def load_restricted(stream: IO[bytes]) -> Any:
    """Return what a pickle of DCP's metadata holds.

    Raises:
        RefusedGlobal: It names anything else; nothing has been called then.
        pickle.UnpicklingError: It is broken, or is no pickle of metadata.
    """
    machine = _Machine(stream.read())
    try:
        return machine.run()
    except pickle.UnpicklingError:
        raise
    except (
        # All that bytes which are no pickle make of this reader.
        *(AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError),
        struct.error,
    ) as error:
        raise _refusal(f"it is broken at byte {machine.at} ({type(error).__name__})") from error


def _refusal(text: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(text)


@dataclass(frozen=True, slots=True, eq=False)
class _StandIn:
    """Stands for what a file names.

    Attributes:
        name: What it names.
        made: Returns what a call of it makes, by the machine and the arguments; None where a file
            has no reason to call it.
        new: The class of which it may have empty instances, to be filled once.
        helper: The enumeration that it is.
    """

    name: str
    made: Callable[[_Machine, tuple[Any, ...]], Any] | None = None
    new: type[Any] | None = None
    helper: EnumType | None = None


class _Machine:
    """The stack and the memo of one pickle.

    Attributes:
        at: Position in the file.
    """

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left = _COPIES * len(data) + _SPARE

    def run(self) -> Any:
        """Return what the pickle makes."""
        data, memo, table = self._data, self._memo, _TABLE
        at, stack = 0, self._stack
        # Eighty opcodes make one chunk. Those that are three quarters of them are done here: with
        # a call for each this would take four times as long.
        while True:
            opcode = data[at]
            at += 1
            if opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode == _LONG_BINGET:
                stack.append(memo[_U4(data, at)[0]])
                at += 4
            elif opcode == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif opcode == _BININT1:
                stack.append(data[at])
                at += 1
            elif opcode == _BININT2:
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif opcode == _BININT:
                stack.append(_I4(data, at)[0])
                at += 4
            elif opcode == _SHORT_BINUNICODE:
                start = at + 1
                at = start + data[at]
                stack.append(str(data[start:at], "utf-8", "surrogatepass"))
            elif opcode == _EMPTY_DICT:
                stack.append({})
            elif opcode == _EMPTY_TUPLE:
                stack.append(())
            elif opcode == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == _TUPLE2:
                value = stack.pop()
                stack[-1] = (stack[-1], value)
            elif opcode == _STOP:
                return stack.pop()
            else:
                handler = table.get(opcode)
                if handler is None:
                    raise _refusal(f"it has an opcode {bytes([opcode])!r}, which metadata have not")
                self.at = at
                handler(self)
                at, stack = self.at, self._stack

    def spend(self, count: int) -> None:
        """Count elements that are copied; a file can ask for the same ones again and again."""
        self._left -= count
        if self._left < 0:
            raise _refusal("it makes far more of itself than its size")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.at + count
        if end > len(self._data):
            raise _refusal("it is cut off")
        found = self._data[self.at : end]
        self.at = end
        return found

    def number(self, count: int) -> int:
        """Return the next bytes as a number."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """Return the next line."""
        end = self._data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def popped(self) -> Any:
        """Return what is on top, taken off."""
        return self._stack.pop()

    def put(self, number: int) -> None:
        """Remember what is on top."""
        self._memo[number] = self._stack[-1]

    def mark(self) -> None:
        """Begin anew, until what is collected is asked for."""
        self._marks.append(self._stack)
        self._stack = []

    def marked(self) -> list[Any]:
        """Return what was put on the stack since the mark."""
        found, self._stack = self._stack, self._marks.pop()
        return found

    def pop(self) -> None:
        """Drop what is on top, or an empty mark."""
        if self._stack:
            self._stack.pop()
        else:
            self.marked()

    def tuple_of_three(self) -> None:
        """Make a tuple of what is on top."""
        third, second = self._stack.pop(), self._stack.pop()
        self._stack[-1] = (self._stack[-1], second, third)

    def append(self, values: list[Any]) -> None:
        """Put values into the list on top."""
        held = self._stack[-1]
        if type(held) is not list:
            raise TypeError
        held.extend(values)

    def add(self, values: list[Any]) -> None:
        """Put values into the set on top."""
        held = self._stack[-1]
        if type(held) is not set:
            raise TypeError
        held.update(map(self.key, values))

    def set(self, pairs: list[Any]) -> None:
        """Put keys and values into the dict on top."""
        held = self._stack[-1]
        if type(held) not in (dict, OrderedDict) or len(pairs) % 2:
            raise TypeError
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            held[key if type(key) is str else self.key(key)] = value

    def key(self, value: Any, depth: int = 0) -> Any:
        """Return what is to be hashed, if that is soon done and ends.

        A tuple's hash is that of all that is in it, over and over, however deep.
        """
        kind = type(value)
        if kind is tuple and depth < _KEY_DEPTH:
            self.spend(len(value))
            if not set(map(type, value)) <= _FLAT:
                for inner in value:
                    self.key(inner, depth + 1)
        elif kind is MetadataIndex:
            self.spend(len(value.offset or ()))
            if type(value.fqn) is not str:
                raise TypeError
        elif kind is int:
            if not -_KEY_INT < value < _KEY_INT:
                raise _refusal("it has a key that is a very large number")
        elif kind not in _HASHED:
            raise _refusal(f"it has a key that is a {kind.__name__}")
        return value

    def name(self, module: str, name: str) -> None:
        """Put the stand-in of a name on the stack."""
        found: Any = _ADMITTED.get((module, name))
        if found is None and module == "torch":
            found = _DTYPES.get(name)
        if found is None:
            raise RefusedGlobal(f"{module}.{name}")
        self._stack.append(found)

    def stack_name(self) -> None:
        """Likewise, of a name that is on the stack."""
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError
        self.name(module, name)

    def call(self) -> None:
        """Make what a stand-in makes."""
        args, called = self._stack.pop(), self._stack[-1]
        if type(called) is not _StandIn or called.made is None or type(args) is not tuple:
            raise _refusal(f"it calls {_told(called)}")
        self._stack[-1] = called.made(self, args)

    def new(self) -> None:
        """Make an empty instance of one of torch's records."""
        args, called = self._stack.pop(), self._stack[-1]
        if type(called) is not _StandIn or called.new is None or args != ():
            raise _refusal(f"it makes an instance of {_told(called)}")
        self._stack[-1] = object.__new__(called.new)

    def build(self) -> None:
        """Fill an empty instance."""
        state, made = self._stack.pop(), self._stack[-1]
        checks = _FIELDS.get(type(made))
        # Metadata get their storage_data when all else is there.
        if checks is None or (made.__dict__ and type(made) is not Metadata):
            raise _refusal(f"it changes {_told(made)}")
        if type(made) is TensorProperties:
            _check_properties(state)
            made.__setstate__(state)
            return
        if type(state) is not dict:
            raise TypeError
        held = made.__dict__
        for name, value in state.items():
            if held and held.get(name) is not None:
                raise _refusal(f"it changes {_told(made)}")
            check = checks.get(name)
            if check is None:
                if type(name) is not str or name.startswith("_") or hasattr(type(made), name):
                    raise _refusal(f"it sets something on a {type(made).__name__} that is no field")
            elif type(value) not in check:
                raise _refusal(f"{type(made).__name__}.{name} is a {type(value).__name__}")
        held.update(state)


def _told(value: Any) -> str:
    return value.name if type(value) is _StandIn else f"a {type(value).__name__}"


_DTYPES = {
    name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}

_HASHED = {
    *(str, bytes, bool, float, type(None), frozenset, torch.Size, torch.dtype),
    *(PurePosixPath, PureWindowsPath),
}
"""Of what may be a key, besides numbers, tuples and indices: their hashes are kept, or short."""


_FLAT = {str, bytes, bool, int, float, type(None)}


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_number(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


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
"""What may be filled, and the types of its fields. What is in lists may come after them."""


def _check_properties(state: Any) -> None:
    dtype, layout, grad, encoding, pinned = state
    kinds = (
        (dtype, torch.dtype),
        (layout, torch.layout),
        (grad, bool),
        (pinned, bool),
    )
    if type(state) is not tuple or not all(type(value) is kind for value, kind in kinds):
        raise _refusal("the properties of a tensor are none")
    if type(type(encoding)) is not EnumType:
        raise _refusal("the memory format of a tensor is none")


def _size(machine: _Machine, args: tuple[Any, ...]) -> torch.Size:
    values = args[0] if args else ()
    if len(args) > 1 or type(values) not in (tuple, list) or not all(map(_is_number, values)):
        raise _refusal("it has a size that is none")
    machine.spend(len(values))
    return torch.Size(values)


def _path(kind: type[PurePath]) -> Callable[[_Machine, tuple[Any, ...]], PurePath]:
    def made(machine: _Machine, args: tuple[Any, ...]) -> PurePath:
        if not all(map(_is_text, args)):
            raise _refusal("it has a path that is none")
        machine.spend(sum(map(len, args)) + len(args))
        return kind(*args)

    return made


def _set(kind: type[Any]) -> Callable[[_Machine, tuple[Any, ...]], Any]:
    def made(machine: _Machine, args: tuple[Any, ...]) -> Any:
        values = args[0] if args else []
        if len(args) > 1 or type(values) is not list:
            raise _refusal(f"it has a {kind.__name__} that is none")
        machine.spend(len(values))
        return kind(map(machine.key, values))

    return made


def _ordered(machine: _Machine, args: tuple[Any, ...]) -> Any:
    if args:
        raise _refusal("it has an OrderedDict of another kind")
    return OrderedDict()


def _helper(key: tuple[str, str]) -> _StandIn:
    made = METADATA_HELPERS[key]

    def look_up(machine: _Machine, args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or type(args[0]) not in (int, str):
            raise _refusal(f"it asks {key[1]} for something that is not there")
        return made(args[0])

    return _StandIn(key[1], look_up, helper=made if isinstance(made, EnumType) else None)


def _member(machine: _Machine, args: tuple[Any, ...]) -> Any:
    """Return a member of an enumeration, which some versions of Python pickle as ``getattr``."""
    if len(args) == 2 and type(args[0]) is _StandIn and type(args[1]) is str:
        helper = args[0].helper
        if helper is not None:
            return helper.__members__[args[1]]
    raise RefusedGlobal("builtins.getattr")


# Paths become such that reach no file system.
_PATHS = {
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib", "PureWindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}

_ADMITTED: dict[tuple[str, str], _StandIn] = {
    **{key: _StandIn(key[1], _path(kind)) for key, kind in _PATHS.items()},
    **{key: _StandIn(key[1], new=kind) for key, kind in METADATA_CLASSES.items()},
    **{key: _helper(key) for key in METADATA_HELPERS},
    ("builtins", "set"): _StandIn("set", _set(set)),
    ("builtins", "frozenset"): _StandIn("frozenset", _set(frozenset)),
    ("collections", "OrderedDict"): _StandIn("OrderedDict", _ordered),
    ("torch", "Size"): _StandIn("Size", _size),
    ("builtins", "getattr"): _StandIn("getattr", _member),
}


def _text(machine: _Machine, count: int) -> None:
    machine.push(machine.take(count).decode("utf-8", "surrogatepass"))


def _frozen(machine: _Machine) -> None:
    machine.push(_set(frozenset)(machine, (machine.marked(),)))


def _proto(machine: _Machine) -> None:
    if machine.number(1) > pickle.HIGHEST_PROTOCOL:
        raise _refusal("it is of a protocol that is not known")


_STOP, _MEMOIZE, _EMPTY_DICT = pickle.STOP[0], pickle.MEMOIZE[0], pickle.EMPTY_DICT[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
_BININT, _BININT1, _BININT2 = pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0]
_EMPTY_TUPLE, _TUPLE1, _TUPLE2 = pickle.EMPTY_TUPLE[0], pickle.TUPLE1[0], pickle.TUPLE2[0]
_SHORT_BINUNICODE = pickle.SHORT_BINUNICODE[0]
_U4, _I4 = struct.Struct("<I").unpack_from, struct.Struct("<i").unpack_from

# All others.
_HANDLERS: dict[bytes, Callable[[_Machine], object]] = {
    pickle.PROTO: _proto,
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _Machine.mark,
    pickle.POP: _Machine.pop,
    pickle.POP_MARK: _Machine.marked,
    # What is remembered.
    pickle.BINPUT: lambda m: m.put(m.number(1)),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(4)),
    # Plain values.
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.LONG1: lambda m: m.push(int.from_bytes(m.take(m.number(1)), "little", signed=True)),
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.BINUNICODE: lambda m: _text(m, m.number(4)),
    pickle.BINUNICODE8: lambda m: _text(m, m.number(8)),
    pickle.SHORT_BINBYTES: lambda m: m.push(m.take(m.number(1))),
    pickle.BINBYTES: lambda m: m.push(m.take(m.number(4))),
    pickle.BINBYTES8: lambda m: m.push(m.take(m.number(8))),
    # Containers.
    pickle.TUPLE3: _Machine.tuple_of_three,
    pickle.TUPLE: lambda m: m.push(tuple(m.marked())),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: lambda m: m.append([m.popped()]),
    pickle.APPENDS: lambda m: m.append(m.marked()),
    pickle.EMPTY_SET: lambda m: m.push(set()),
    pickle.ADDITEMS: lambda m: m.add(m.marked()),
    pickle.FROZENSET: _frozen,
    pickle.SETITEM: lambda m: m.set([m.popped(), m.popped()][::-1]),
    pickle.SETITEMS: lambda m: m.set(m.marked()),
    # Names, and what is made of them.
    pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL: _Machine.stack_name,
    pickle.REDUCE: _Machine.call,
    pickle.NEWOBJ: _Machine.new,
    pickle.BUILD: _Machine.build,
}

_TABLE = {opcode[0]: handler for opcode, handler in _HANDLERS.items()}
