"""A pickle reader that calls nothing a file names.

``pickle.load`` calls whatever a file names, sets attributes on whatever a file reaches, and takes
as much memory as a file asks for. ``RestrictedUnpickler`` knows only the opcodes that checkpoints
need. A name becomes a ``StandIn``, or a value that a subclass returns for it; a stand-in makes only
what it was written to make. Memory and time are at most proportional to the size of the file.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import EnumType
from typing import Any, ClassVar

from dcp_placements.errors import format_name
from dcp_placements.storage.metadata.properties import DTYPES, Dtype

MAX_NAME_CHARS = 200
_SPARE = 1 << 16
_COPIES = 4
"""How many copies of an element may be made on average."""

_KEY_DEPTH = 8
_COLLISIONS = 1000
"""How many keys may share their hash with a key before them. Each is compared with all of these,
and a file can choose numbers whose hashes are equal."""

_FLAT = {str, bytes, bool, int, float, type(None)}


class RefusedGlobal(pickle.UnpicklingError):
    """A pickle names something that its kind of file does not use.

    Args:
        name: What it asks for, as ``module.name``.
        subject: The kind of file.
    """

    def __init__(self, name: str, subject: str) -> None:
        shown = format_name(name[:MAX_NAME_CHARS])
        super().__init__(f"it asks for {shown}, which is no part of {subject}")
        self.name = name


def refusal(text: str) -> pickle.UnpicklingError:
    """Return the error for a pickle that is broken, or asks for something it may not have."""
    return pickle.UnpicklingError(text)


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """Takes the place of what a file names.

    Attributes:
        name: What the file names.
        make: Returns the result of a call, from the unpickler and the arguments; None where a file
            has no reason to call it.
        new: The class of which a file may have empty instances, to be filled once.
        enum: The enumeration that it is.
    """

    name: str
    make: Callable[[Any, tuple[Any, ...]], Any] | None = None
    new: type[Any] | None = None
    enum: EnumType | None = None


class RestrictedUnpickler:
    """The stack and the memo of one pickle. Subclasses admit names and fill instances.

    Args:
        data: The pickle.

    Attributes:
        at: Position in ``data``.
        stack: What has been put on the stack since the last mark.
        memo: Values by number.
    """

    subject: ClassVar[str]
    """The kind of file, for messages."""

    hashed: ClassVar[frozenset[type[Any]]] = frozenset(
        {str, bytes, bool, float, type(None), frozenset, Dtype}
    )
    """Types of keys, besides integers and tuples, whose hash is kept or short to compute."""

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._data = data
        self._marks: list[list[Any]] = []
        self._left = _COPIES * len(data) + _SPARE
        self._by_hash: dict[int, Any] = {}
        self._collisions = 0

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in or a value for a name; None refuses it."""
        if module == "torch":
            return DTYPES.get(name)
        return _ORDERED_DICT if (module, name) == ("collections", "OrderedDict") else None

    def persistent_load(self, pid: Any) -> Any:
        """Return the value of a persistent id."""
        raise refusal("it has a persistent id")

    def set_state(self, instance: Any, state: Any) -> None:
        """Fill an instance that the file had made."""
        raise refusal(f"it changes {describe(instance)}")

    def load(self) -> Any:
        """Return the value of the pickle.

        Raises:
            RefusedGlobal: It names something else than its kind of file; nothing has been called.
            pickle.UnpicklingError: It is broken, or asks for something it may not have.
        """
        try:
            return self._run()
        except pickle.UnpicklingError:
            raise
        except (
            # All that arbitrary bytes make of this reader.
            *(AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError),
            struct.error,
        ) as error:
            raise refusal(f"it is broken at byte {self.at} ({type(error).__name__})") from error

    def _run(self) -> Any:
        data, memo, table, marks = self._data, self.memo, _TABLE, self._marks
        at, stack = self.at, self.stack
        # One chunk of DCP's metadata is a hundred opcodes. The most frequent, three quarters of
        # them, are handled in place: a call for each would take four times as long.
        while (opcode := data[at]) != _STOP:
            at += 1
            if opcode == _BINGET:
                stack.append(memo[data[at]])
                at += 1
                continue
            if opcode == _LONG_BINGET:
                stack.append(memo[_U4(data, at)[0]])
                at += 4
                continue
            if opcode == _BININT1:
                stack.append(data[at])
                at += 1
                continue
            if opcode == _MARK:
                marks.append(stack)
                stack = []
                continue
            if opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
                continue
            if opcode in _TEXTS:
                start = at + _TEXTS[opcode]
                at = start + int.from_bytes(data[at:start], "little")
                if at > len(data):
                    raise refusal("it is cut off")
                stack.append(str(data[start:at], "utf-8", "surrogatepass"))
            elif opcode == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == _TUPLE2:
                value = stack.pop()
                stack[-1] = (stack[-1], value)
            elif opcode == _EMPTY_DICT:
                stack.append({})
            elif handler := table.get(opcode):
                self.at, self.stack = at, stack
                handler(self)
                at, stack = self.at, self.stack
            else:
                name = bytes([opcode])
                raise refusal(f"it has an opcode {name!r}, which {self.subject} does not use")
            # Most of what is made is put into the memo at once.
            if (opcode := data[at]) == _MEMOIZE:
                memo[len(memo)] = stack[-1]
                at += 1
            elif opcode == _LONG_BINPUT:
                memo[_U4(data, at + 1)[0]] = stack[-1]
                at += 5
        self.stack = stack
        return stack.pop()

    def spend(self, count: int) -> None:
        """Count elements that are copied; a file can ask for the same ones again and again."""
        self._left -= count
        if self._left < 0:
            raise refusal("it makes far more of itself than its size")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.at + count
        if end > len(self._data):
            raise refusal("it is cut off")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def number(self, nbytes: int) -> int:
        """Return the next bytes as a number."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        """Return the next line."""
        end = self._data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def marked(self) -> list[Any]:
        """Return what was put on the stack since the mark."""
        values, self.stack = self.stack, self._marks.pop()
        return values

    def pop(self) -> None:
        """Drop the top of the stack, or an empty mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

    def tuple_of_three(self) -> None:
        """Replace the top three values by a tuple of them."""
        third, second = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], second, third)

    def extend(self, values: list[Any]) -> None:
        """Put values into the list on top."""
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(values)

    def add(self, values: list[Any]) -> None:
        """Put values into the set on top."""
        if type(self.stack[-1]) is not set:
            raise TypeError
        self.stack[-1].update(map(self.key, values))

    def set_items(self, pairs: list[Any]) -> None:
        """Put keys and values into the dict on top."""
        held, keys = self.stack[-1], pairs[::2]
        if type(held) not in (dict, OrderedDict) or len(pairs) % 2:
            raise TypeError
        if set(map(type, keys)) != {str}:
            keys = [key if type(key) is str else self.key(key) for key in keys]
        held.update(zip(keys, pairs[1::2], strict=True))

    def key(self, value: Any) -> Any:
        """Return a value that is to be hashed, if its look-up takes bounded time."""
        self.check_hashed(value)
        return self.compared(value)

    def compared(self, value: Any) -> Any:
        """Return a value to be hashed; refuse very many values of one hash."""
        if self._by_hash.setdefault(hash(value), value) != value:
            self._collisions += 1
            if self._collisions > _COLLISIONS:
                raise refusal("it has very many keys of one hash")
        return value

    def check_hashed(self, value: Any, depth: int = 0) -> None:
        """Refuse a value whose hash takes longer than the file is long.

        The hash of a tuple is computed anew from everything in it each time, however deep.
        """
        kind = type(value)
        if kind is tuple and depth < _KEY_DEPTH:
            self.spend(len(value))
            if not set(map(type, value)) <= _FLAT:
                for inner in value:
                    self.check_hashed(inner, depth + 1)
        elif kind is not int and kind not in self.hashed:
            raise refusal(f"it has a key that is a {kind.__name__}")

    def push_name(self, module: Any, name: Any) -> None:
        """Put the stand-in of a name on the stack."""
        if type(name) is not str or type(module) is not str:
            raise TypeError
        value = self.find_class(module, name)
        if value is None:
            raise RefusedGlobal(f"{module}.{name}", self.subject)
        self.stack.append(value)

    def call(self) -> None:
        """Replace a stand-in and its arguments by what the stand-in makes."""
        args, called = self.stack.pop(), self.stack[-1]
        if type(called) is not StandIn or called.make is None or type(args) is not tuple:
            raise refusal(f"it calls {describe(called)}")
        self.stack[-1] = called.make(self, args)

    def new(self) -> None:
        """Replace a stand-in by an empty instance of its class."""
        args, called = self.stack.pop(), self.stack[-1]
        if type(called) is not StandIn or called.new is None or args != ():
            raise refusal(f"it makes an instance of {describe(called)}")
        self.stack[-1] = object.__new__(called.new)


def describe(value: Any) -> str:
    """Return what a message calls a value of a pickle."""
    return value.name if type(value) is StandIn else f"a {type(value).__name__}"


def make_set(kind: type[Any]) -> Callable[[RestrictedUnpickler, tuple[Any, ...]], Any]:
    """Return what makes a set or frozenset of a list."""

    def make(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> Any:
        values = args[0] if args else []
        if len(args) > 1 or type(values) is not list:
            raise refusal(f"it has a {kind.__name__} that is not made of a list")
        unpickler.spend(len(values))
        return kind(map(unpickler.key, values))

    return make


def _ordered(unpickler: RestrictedUnpickler, args: tuple[Any, ...]) -> Any:
    if args:
        raise refusal("it has an OrderedDict that is not made empty")
    return OrderedDict()


_ORDERED_DICT = StandIn("OrderedDict", _ordered)


def _proto(unpickler: RestrictedUnpickler) -> None:
    if unpickler.number(1) > pickle.HIGHEST_PROTOCOL:
        raise refusal("it is of an unknown protocol")


_STOP, _MARK, _EMPTY_DICT = pickle.STOP[0], pickle.MARK[0], pickle.EMPTY_DICT[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
_MEMOIZE, _LONG_BINPUT, _BININT1 = pickle.MEMOIZE[0], pickle.LONG_BINPUT[0], pickle.BININT1[0]
_TUPLE1, _TUPLE2 = pickle.TUPLE1[0], pickle.TUPLE2[0]
_CONSTANTS: dict[int, Any] = {
    pickle.NONE[0]: None,
    pickle.NEWTRUE[0]: True,
    pickle.NEWFALSE[0]: False,
    pickle.EMPTY_TUPLE[0]: (),
}
_TEXTS = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8}
"""The bytes of the length of a text, by opcode."""

_U4 = struct.Struct("<I").unpack_from

# The opcodes that ``_run`` does not handle in place.
_HANDLERS: dict[bytes, Callable[[RestrictedUnpickler], object]] = {
    pickle.PROTO: _proto,
    pickle.FRAME: lambda u: u.take(8),
    pickle.POP: RestrictedUnpickler.pop,
    pickle.POP_MARK: RestrictedUnpickler.marked,
    pickle.MEMOIZE: lambda u: u.memo.__setitem__(len(u.memo), u.stack[-1]),
    pickle.BINPUT: lambda u: u.memo.__setitem__(u.number(1), u.stack[-1]),
    pickle.LONG_BINPUT: lambda u: u.memo.__setitem__(u.number(4), u.stack[-1]),
    # Plain values.
    pickle.BININT2: lambda u: u.push(u.number(2)),
    pickle.BININT: lambda u: u.push(int.from_bytes(u.take(4), "little", signed=True)),
    pickle.LONG1: lambda u: u.push(int.from_bytes(u.take(u.number(1)), "little", signed=True)),
    pickle.BINFLOAT: lambda u: u.push(struct.unpack(">d", u.take(8))[0]),
    pickle.SHORT_BINBYTES: lambda u: u.push(u.take(u.number(1))),
    pickle.BINBYTES: lambda u: u.push(u.take(u.number(4))),
    pickle.BINBYTES8: lambda u: u.push(u.take(u.number(8))),
    # Containers.
    pickle.TUPLE3: RestrictedUnpickler.tuple_of_three,
    pickle.TUPLE: lambda u: u.push(tuple(u.marked())),
    pickle.EMPTY_LIST: lambda u: u.push([]),
    pickle.APPEND: lambda u: u.extend([u.stack.pop()]),
    pickle.APPENDS: lambda u: u.extend(u.marked()),
    pickle.EMPTY_SET: lambda u: u.push(set()),
    pickle.ADDITEMS: lambda u: u.add(u.marked()),
    pickle.FROZENSET: lambda u: u.push(make_set(frozenset)(u, (u.marked(),))),
    pickle.SETITEM: lambda u: u.set_items([u.stack.pop(), u.stack.pop()][::-1]),
    pickle.SETITEMS: lambda u: u.set_items(u.marked()),
    # Names, and what is made of them.
    pickle.BINPERSID: lambda u: u.push(u.persistent_load(u.stack.pop())),
    pickle.GLOBAL: lambda u: u.push_name(u.line(), u.line()),
    pickle.STACK_GLOBAL: lambda u: u.push_name(*[u.stack.pop(), u.stack.pop()][::-1]),
    pickle.REDUCE: RestrictedUnpickler.call,
    pickle.NEWOBJ: RestrictedUnpickler.new,
    pickle.BUILD: lambda u: u.set_state(u.stack[-2], u.stack.pop()),
}

_TABLE = {opcode[0]: handler for opcode, handler in _HANDLERS.items()}
