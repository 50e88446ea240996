"""Pickles of unknown origin: the standard library's unpickler in Python, with a list of names.

``pickle.load`` calls whatever a file names and sets attributes on whatever a file reaches. This
unpickler looks names up in a list, which has a value, or a ``Call``: that checks its arguments, or
stands for a class of which the file may fill empty instances once. Memory is in proportion to the
file.

The unpickler in C allocates what a file claims (a slot of the memo, the length of a ``bytearray``),
and hashes keys before they can be checked: nested tuples that a few hundred bytes describe take
hours, or end the process. The unpickler in Python has a method for each opcode. Methods that hash
keys, fill instances or create them are replaced here, and opcodes that torch does not use are left
out; it takes twice the time.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch

from dcp_placements.short_text import format_name

MAX_NAME_CHARS = 200
_MAX_FIELDS = 64
LARGEST_KEY = 1 << 60
"""Larger integers may have equal hashes; a dict of thousands of these takes hours."""
MAX_KEY_VALUES = 128
"""The most values in one key of a dict or one element of a set, at all levels of nesting."""

_UNFOLDED_RATIO = 4
_SPARE = 1 << 16
_SPARE_OF_CALL = 1 << 12
"""A value may have this many elements per byte of its pickle, and some more in all or per call."""


class RefusedGlobal(pickle.UnpicklingError):
    """A pickle names something that its kind of file does not use.

    Args:
        name: The name, as ``module.name``.
        subject: The kind of file, for the message.
    """

    def __init__(self, name: str, subject: str) -> None:
        shown = format_name(name[:MAX_NAME_CHARS])
        super().__init__(f"it asks for {shown}, which is no part of {subject}")
        self.name = name


def refusal(text: str) -> pickle.UnpicklingError:
    """Return the error for a pickle that is broken or refused."""
    return pickle.UnpicklingError(text)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a file may call by a name.

    Attributes:
        name: The name in the file.
        make: Returns the result; None if the name may be mentioned, but not called.
        kinds: Types of the arguments; None if ``make`` checks them.
        fills: The class of which the file may have empty instances, which is never called.
    """

    name: str
    make: Callable[..., Any] | None = None
    kinds: tuple[type[Any], ...] | None = None
    fills: type[Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Return the result for arguments of a file."""
        if self.make is None:
            raise refusal(f"it calls {self.name}")
        if self.kinds not in (None, tuple(map(type, args))):
            raise refusal(f"it calls {self.name} with other arguments than it takes")
        return self.make(*args)


class Stub:
    """Stands for an object of a pickle that is not created.

    Attributes:
        by: The callable that would create it, as ``module.name``; empty if that has no name.
        args: Arguments of the call.
        state: State that the pickle sets on the object; None for no state.
        elements: Number of elements at all levels of nesting.
    """

    def __init__(self, by: str = "", args: tuple[Any, ...] = (), elements: int = 1) -> None:
        self.by = by
        self.args = args
        self.state: Any = None
        self.elements = elements

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes in ``state``, which may be a tuple of dicts."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for state in states if state is not None for key, value in state.items()}


class _Opcodes(dict[int, Any]):
    """The method of each opcode."""

    def __missing__(self, opcode: int) -> Any:
        raise refusal(f"it has an opcode {bytes([opcode])!r}, which torch does not use")


_OPCODES = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
)
"""Opcodes with the standard methods: none of these allocates by a number, hashes or calls."""


class SafeUnpickler(pickle._Unpickler):
    """Reads one pickle.

    Args:
        data: The pickle.
    """

    subject: ClassVar[str]
    """The kind of file, for messages."""

    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {}
    """Values and calls that a file may name, by module and name."""

    kinds: ClassVar[Collection[type[Any]]] = ()
    """Classes of which a file may have empty instances, to be filled."""

    hashed: ClassVar[Collection[type[Any]]] = {
        *(str, bytes, bool, int, float, type(None), frozenset, torch.dtype),
        *(PurePosixPath, PureWindowsPath),
    }
    """Types of keys, and of the values in a key that is a tuple."""

    memo: dict[int, Any]
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        self._stream, self._nbytes = io.BytesIO(data), len(data)
        self._fields: set[tuple[str, ...]] = set()
        self._unseen = most_elements(data)
        self._most_of_call = _UNFOLDED_RATIO * len(data) + _SPARE_OF_CALL
        super().__init__(self._stream)

    def load(self) -> Any:
        """Return the value of the pickle.

        Raises:
            RefusedGlobal: The pickle names something that ``allowed`` lacks; nothing was called.
            pickle.UnpicklingError: The pickle is broken or refused.
        """
        try:
            value = self._value()
            if max(self.memo, default=0) > self._nbytes:
                raise refusal("it has a slot of the memo far beyond its size")  # in C, an array
            return value
        except (pickle.UnpicklingError, MemoryError):
            raise
        except EOFError as error:
            raise refusal("it is cut short") from error
        except Exception as error:  # arbitrary bytes can raise anything
            raise refusal(f"it is broken ({type(error).__name__})") from error

    def _value(self) -> Any:
        """Do what ``super().load()`` does, and read from memory: frames double its time."""
        self.read, self.readline = self._stream.read, self._stream.readline
        self.metastack: list[Any] = []
        self.stack = []
        self.append = self.stack.append
        self.proto = 0
        read, dispatch = self.read, self.dispatch
        try:
            while opcode := read(1):
                dispatch[opcode[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise EOFError

    def find_class(self, module: str, name: str) -> Any:
        """Return the value of a name; refuse long names."""
        if len(module) + len(name) > MAX_NAME_CHARS:
            raise refusal("it has a name of very many characters")
        return self.named(module, name)

    def named(self, module: str, name: str) -> Any:
        """Return the value of a name."""
        # Protocols before 3 name modules as Python 2 did.
        value = self.allowed.get(("builtins" if module == "__builtin__" else module, name))
        if value is None:
            raise RefusedGlobal(f"{module}.{name}", self.subject)
        return value

    def persistent_load(self, pid: Any) -> Any:
        """Return the value of a persistent id."""
        raise refusal("it has a persistent id")

    def call(self, called: Any, args: Any) -> Any:
        """Return the result of a call."""
        return called(*args)

    def new(self, kind: Any, args: Any) -> Any:
        """Return an empty instance."""
        if type(kind) is not Call or kind.fills is None or args != ():
            raise refusal(f"it makes an instance of {describe(kind)}")
        return object.__new__(kind.fills)

    def fill(self, instance: Any, state: Any) -> Any:
        """Set attributes that an instance does not have yet, and return the instance."""
        if type(instance) not in self.kinds:
            raise refusal(f"it changes {describe(instance)}")
        names: Any = tuple(state) if type(state) is dict else (None,)
        if len(names) > _MAX_FIELDS:
            raise refusal(f"it has very many attributes of {describe(instance)}")
        if names not in self._fields:  # most instances have the names of earlier ones
            if not all(type(name) is str and not name.startswith("_") for name in names):
                raise refusal(f"it has attributes of {describe(instance)} that are no fields")
            self._fields.add(names)
        if not vars(instance).keys().isdisjoint(names):
            raise refusal(f"it changes {describe(instance)}")
        vars(instance).update(state)
        return instance

    def set_items(self, held: Any, items: Sequence[Any]) -> Any:
        """Set alternating keys and values in a dict, and return the dict."""
        if type(held) not in (dict, OrderedDict):
            raise TypeError
        keys = items[::2]
        if set(map(type, keys)) != {str}:
            self.check_keys(keys)
        held.update(zip(keys, items[1::2], strict=True))
        return held

    def add_items(self, held: Any, items: Sequence[Any]) -> Any:
        """Append values to a list, and return the list."""
        if type(held) is not list:
            raise TypeError
        held.extend(items)
        return held

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that take long to hash."""
        for key in keys:
            self.check_key(key)

    def look_at(self, values: Sized) -> None:
        """Refuse a file that refers to the same values very often, which takes few bytes.

        Args:
            values: Values that are visited now; their number is subtracted from what is left.
        """
        self._unseen -= len(values)
        if self._unseen < 0:
            raise refusal("it makes far more of itself than its size")

    def elements_of(self, *values: Any) -> int:
        """Return the number of elements of values, at all levels of nesting.

        A file can refer to one value many times: ``t = (t, t)`` sixty times has a text, or a hash,
        of 2**60 elements.

        Raises:
            pickle.UnpicklingError: The values have far more elements than the file has bytes.
        """
        todo, count = list(values), 0
        while todo:
            value = todo.pop()
            if isinstance(value, Stub):
                count += value.elements
            elif isinstance(value, str | bytes):
                count += len(value)
            elif isinstance(value, tuple | list | set | frozenset | dict):
                self.look_at(value)
                todo.extend(value)
                if isinstance(value, dict):
                    todo.extend(value.values())
            if count > self._most_of_call:
                break
            count += 1
        if count > self._most_of_call:
            raise refusal("it makes far more of itself than its size")
        return count

    def check_key(self, key: Any) -> None:
        """Refuse a key that takes long to hash."""
        todo, count = [key], 0
        while todo:
            value = todo.pop()
            if type(value) in (tuple, torch.Size):
                count += len(value)
                if count > MAX_KEY_VALUES:
                    raise refusal("it has a key of very many values")
                todo.extend(value)
            elif type(value) not in self.hashed:
                raise refusal(f"it has a key that is {describe(value)}")
            elif type(value) is int and not -LARGEST_KEY < value < LARGEST_KEY:
                raise refusal("it has a key that is a number of very many digits")

    def _load_frame(self) -> None:
        # Frames only say how much to read ahead.
        nbytes = int.from_bytes(self._stream.read(8), "little")
        left = self._nbytes - self._stream.tell()
        if nbytes > left:
            raise refusal(f"it has a frame of {nbytes:,} bytes, where {left:,} are left")

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)

    def _load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.new(self.stack[-1], args)

    def _load_build(self) -> None:
        state = self.stack.pop()
        self.stack[-1] = self.fill(self.stack[-1], state)

    def _load_append(self) -> None:
        value = self.stack.pop()
        self.stack[-1] = self.add_items(self.stack[-1], [value])

    def _load_appends(self) -> None:
        items = self.pop_mark()
        self.stack[-1] = self.add_items(self.stack[-1], items)

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1] = self.set_items(self.stack[-1], (key, value))

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        self.stack[-1] = self.set_items(self.stack[-1], items)

    dispatch = _Opcodes(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
        | {
            pickle.FRAME[0]: _load_frame,
            pickle.REDUCE[0]: _load_reduce,
            pickle.NEWOBJ[0]: _load_newobj,
            pickle.BUILD[0]: _load_build,
            pickle.APPEND[0]: _load_append,
            pickle.APPENDS[0]: _load_appends,
            pickle.SETITEM[0]: _load_setitem,
            pickle.SETITEMS[0]: _load_setitems,
        }
    )


def most_elements(data: bytes) -> int:
    """Return how many elements the value of a pickle may have, at all levels of nesting."""
    return _UNFOLDED_RATIO * len(data) + _SPARE


def check_unfolded(values: Iterable[Any], most: int) -> None:
    """Refuse values that have very many elements, at all levels of nesting.

    A file can refer to one value many times, and a value can refer to itself.

    Raises:
        pickle.UnpicklingError: The values have more than ``most`` elements.
    """
    todo, seen = list(values), set()
    while todo and most >= 0:
        value = todo.pop()
        if isinstance(value, str | bytes | tuple | list | set | frozenset | dict):
            most -= len(value)
            if most >= 0 and isinstance(value, dict):
                todo.extend(value.values())
            elif most >= 0 and not isinstance(value, str | bytes):
                todo.extend(value)
        elif isinstance(value, Stub) and value not in seen:
            seen.add(value)
            todo += value.args, value.state
    if most < 0:
        raise refusal("it makes far more of itself than its size")


def describe(value: Any) -> str:
    """Return the text of a value of a pickle for messages."""
    if isinstance(value, Call | type):
        return value.name if isinstance(value, Call) else value.__name__
    return f"a {type(value).__name__}"


DTYPES = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
ORDERED_DICT = {("collections", "OrderedDict"): Call("OrderedDict", OrderedDict, ())}
