"""Pickles of unknown origin: the standard library's unpickler, with a list of what a file may name.

``pickle.load`` calls whatever a file names and sets attributes on whatever a file reaches. Here a
name becomes what the list has for it: a value, a class of which the file may fill empty instances
once, or a ``Call``, which checks its arguments. Memory is in proportion to the file.

The unpickler in C allocates what a file claims (a slot of the memo, the length of a ``bytearray``),
and hashes keys before anything here sees them: tuples of tuples that a few hundred bytes describe
take hours, or end the process. So the opcodes are checked first, by a regular expression, and those
that fill instances or put keys into a dict become persistent ids, for which the unpickler asks this
module: ``b"b"``, with an instance and its state on the stack, becomes ``b"K\x00\x87Q"``, the
persistent id ``(instance, state, 0)``.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch

from dcp_placements.errors import format_name

MAX_NAME_CHARS = 200
MAX_KEY_VALUES = 128
"""Values that one key of a dict or one element of a set has in all, however it nests."""

_COPIES = 4
_SPARE = 1 << 16


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
class Call:
    """What a file may call by a name.

    Attributes:
        name: What the file names.
        make: Returns the result; None where it may only be mentioned.
        kinds: The types of its arguments; None where ``make`` checks them.
    """

    name: str
    make: Callable[..., Any] | None = None
    kinds: tuple[type[Any], ...] | None = None

    def __call__(self, *args: Any) -> Any:
        """Return the result for arguments of a file."""
        if self.make is None:
            raise refusal(f"it calls {self.name}")
        if self.kinds not in (None, tuple(map(type, args))):
            raise refusal(f"it calls {self.name} with other arguments than it takes")
        return self.make(*args)


class _NeverCalled(type):
    """The type of stand-ins for classes: a file may have empty instances, and not call them."""

    def __call__(cls, *args: Any) -> Any:
        raise refusal(f"it calls {cls.__name__}")


def fillable(kind: type[Any]) -> type[Any]:
    """Return what stands for a class of which a file may have empty instances.

    Args:
        kind: The class, whose ``__init__`` is never called.
    """
    return _NeverCalled(kind.__name__, (), {"__new__": partial(object.__new__, kind)})


class SafeUnpickler(pickle.Unpickler):
    """Reads one pickle.

    Args:
        data: The pickle.
    """

    subject: ClassVar[str]
    """The kind of file, for messages."""

    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {}
    """By module and name: what a file may name."""

    kinds: ClassVar[Collection[type[Any]]] = ()
    """Classes of which a file may have empty instances, to be filled."""

    hashed: ClassVar[Collection[type[Any]]] = {
        *(str, bytes, bool, int, float, type(None), frozenset, torch.dtype),
        *(PurePosixPath, PureWindowsPath),
    }
    """Types of keys, and of what stands in a key that is a tuple."""

    steps: ClassVar[Mapping[bytes, bytes]] = {
        pickle.BUILD: b"K\x00\x87Q",
        pickle.SETITEMS: b"tK\x01\x87Q",
        pickle.SETITEM: b"\x86K\x01\x87Q",
        pickle.SETITEMS + pickle.BUILD: b"t\x87Q",
    }
    """What opcodes become: a tuple of what they take from the stack, and the number of a step."""

    takers: ClassVar[Sequence[str]] = ("fill", "set_items")
    """The methods of the steps, by number."""

    def __init__(self, data: bytes) -> None:
        self._checked = io.BytesIO()
        super().__init__(self._checked)
        self._data = data
        self._names: dict[type[Any], tuple[str, ...]] = {}

    def load(self) -> Any:
        """Return the value of the pickle.

        Raises:
            RefusedGlobal: It names something else than its kind of file; nothing has been called.
            pickle.UnpicklingError: It is broken, or asks for something it may not have.
        """
        try:
            self._checked.write(_with_steps(self._data, self.steps, self.subject))
            self._checked.seek(0)
            return super().load()
        except (pickle.UnpicklingError, MemoryError):
            raise
        except Exception as error:  # all that arbitrary bytes make of it
            raise refusal(f"it is broken ({type(error).__name__})") from error

    def find_class(self, module: str, name: str) -> Any:
        """Return what a file gets for a name."""
        # Protocols before 3 name modules as Python 2 did.
        found = self.allowed.get(("builtins" if module == "__builtin__" else module, name))
        if found is None:
            raise RefusedGlobal(f"{module}.{name}", self.subject)
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Return the result of a step, or the value of a persistent id."""
        if type(pid) is not tuple or len(pid) != 3:
            return self.persistent(pid)
        target, operand, step = pid
        if type(step) is not tuple:
            return getattr(self, self.takers[step])(target, operand)
        # Fields of an instance. Thousands of instances have fields of the same names.
        names, is_new = step[::2], type(operand) is dict and not operand
        if is_new and names == self._names.get(type(target)) and not vars(target):
            operand.update(zip(names, step[1::2], strict=True))
            target.__dict__.update(operand)
            return target
        return self.fill(target, self.set_items(operand, step))

    def persistent(self, pid: Any) -> Any:
        """Return the value of a persistent id."""
        raise refusal("it has a persistent id")

    def fill(self, instance: Any, state: Any) -> Any:
        """Give an instance that the file had made attributes that it has not yet; return it."""
        if type(instance) not in self.kinds:
            raise refusal(f"it changes {describe(instance)}")
        names = tuple(state) if type(state) is dict else (None,)
        if not all(type(name) is str and not name.startswith("_") for name in names):
            raise refusal(f"it has attributes of {describe(instance)} that are no fields")
        if not vars(instance).keys().isdisjoint(names):
            raise refusal(f"it changes {describe(instance)}")
        self._names[type(instance)] = names
        vars(instance).update(state)
        return instance

    def set_items(self, held: Any, items: tuple[Any, ...]) -> Any:
        """Put keys and values into a dict; return it."""
        if type(held) not in (dict, OrderedDict) or type(items) is not tuple or len(items) % 2:
            raise TypeError
        keys = items[::2]
        if set(map(type, keys)) != {str}:
            self.check_keys(keys)
        held.update(zip(keys, items[1::2], strict=True))
        return held

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that take long to hash."""
        for key in keys:
            self.check_key(key)

    def check_key(self, key: Any) -> None:
        """Refuse one such key."""
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


_SIZED = {
    pickle.SHORT_BINUNICODE: 1,
    pickle.SHORT_BINBYTES: 1,
    pickle.LONG1: 1,
    pickle.BINUNICODE: 4,
    pickle.BINBYTES: 4,
    pickle.BINUNICODE8: 8,
    pickle.BINBYTES8: 8,
}
"""Opcodes before a length of so many bytes, and as many bytes."""

_FRAME_NBYTES = 8

_WITHOUT_ARGUMENT = (
    *(pickle.POP, pickle.POP_MARK, pickle.MARK, pickle.MEMOIZE, pickle.NONE, pickle.NEWTRUE),
    *(pickle.NEWFALSE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.BINPERSID, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ),
)
_ONE_BYTE = (pickle.PROTO, pickle.BINPUT, pickle.BINGET, pickle.BININT1)
_FOUR_BYTES = (pickle.LONG_BINGET, pickle.BININT)


def _any_of(opcodes: Iterable[bytes]) -> bytes:
    return b"[" + b"".join(map(re.escape, opcodes)) + b"]"


def _plain_opcodes(nbytes: int, steps: Collection[bytes]) -> re.Pattern[bytes]:
    """Return what matches opcodes that need no look, and a step, in a pickle of so many bytes."""
    # The memo has slots up to the largest that is named.
    most = max(nbytes, 256).to_bytes(4, "little")
    top = max(at for at in range(4) if most[at])
    slot = b"." * top + b"[\\x00-" + re.escape(most[top : top + 1]) + b"]" + b"\\x00" * (3 - top)
    one, four = _any_of(_ONE_BYTE), _any_of(_FOUR_BYTES)
    none = _any_of(set(_WITHOUT_ARGUMENT).difference(steps))
    step = b"|".join(sorted(map(re.escape, steps), reverse=True))
    # Without ``+`` the regular expression would remember each of them.
    pattern = b"(?:%b++|%b.|%b....|M..|G.{8}|r%b)*+(%b)?" % (none, one, four, slot, step)
    return re.compile(pattern, re.DOTALL)


def _with_steps(data: bytes, steps: Mapping[bytes, bytes], subject: str) -> bytearray:
    """Return a pickle in which steps are persistent ids, and frames are left out.

    None of its opcodes needs protocol 0 or 5, uses extensions, or allocates by a number.

    Raises:
        pickle.UnpicklingError: It is broken, or has other opcodes.
    """
    checked, at = bytearray(), 0
    plain: Any = _plain_opcodes(len(data), steps).match  # matches nothing, too
    while True:
        match = plain(data, at)
        end, step = match.end(), match[1]
        if step is not None:
            checked += data[at : end - len(step)]
            checked += steps[step]
            at = end
            continue
        checked += data[at:end]
        opcode = data[end : end + 1]
        at = end + 1
        if (size := _SIZED.get(opcode)) is not None:
            start = at + size
            at = start + int.from_bytes(data[at:start], "little")
            if at > len(data):
                raise refusal(f"it is broken at byte {end}, which has a length beyond its end")
            checked += data[end:at]
        elif opcode == pickle.GLOBAL:
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            checked += data[end:at]
        elif opcode == pickle.FRAME:
            start = at + _FRAME_NBYTES
            nbytes, left = int.from_bytes(data[at:start], "little"), len(data) - start
            if nbytes > left:
                raise refusal(f"it has a frame of {nbytes:,} bytes, where {left:,} are left")
            at = start
        elif opcode == pickle.STOP:
            checked += opcode
            return checked
        elif plain(data, end).end() > end:
            at = end
        elif opcode == pickle.LONG_BINPUT:
            slot = int.from_bytes(data[at : at + 4], "little")
            raise refusal(f"it has a memo slot {slot:,} in {len(data):,} bytes")
        elif not opcode:
            raise refusal("it is cut short")
        else:
            raise refusal(f"it has an opcode {opcode!r}, which {subject} does not use")


def most_elements(data: bytes) -> int:
    """Return how many elements the value of a pickle may have when all of it is looked at."""
    return _COPIES * len(data) + _SPARE


def check_unfolded(values: Iterable[Any], most: int) -> None:
    """Refuse values that have very many elements when all of them are looked at.

    A file can refer to one value again and again, and a value to itself.

    Raises:
        pickle.UnpicklingError: They have more than ``most``.
    """
    todo = list(values)
    while todo and most >= 0:
        value = todo.pop()
        if isinstance(value, str | bytes | tuple | list | set | frozenset | dict):
            most -= len(value)
            if most >= 0 and isinstance(value, dict):
                todo.extend(value.values())
            elif most >= 0 and not isinstance(value, str | bytes):
                todo.extend(value)
    if most < 0:
        raise refusal("it makes far more of itself than its size")


def describe(value: Any) -> str:
    """Return what a message calls a value of a pickle."""
    if isinstance(value, Call | type):
        return value.name if isinstance(value, Call) else value.__name__
    return f"a {type(value).__name__}"


DTYPES = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
ORDERED_DICT = {("collections", "OrderedDict"): Call("OrderedDict", OrderedDict, ())}
