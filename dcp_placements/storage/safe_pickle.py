"""Pickles of unknown origin: the unpickler in C, whose names are looked up in a list.

``pickle.load`` calls whatever a file names and sets attributes on whatever a file reaches. Here a
name is a value that nothing can change, a ``Call``, which checks its arguments, or a ``StandIn`` of
a class, whose instances are empty objects. So nothing that a file names is executed or imported,
and a file changes its own objects alone.

Memory and time are bounded where that is cheap: by the number of elements of values that are
printed or given to torch. A file of some hundred bytes can still ask for gigabytes (a slot of the
memo), or for hours (the hash of nested tuples). The command line therefore reads in a process of
its own, under limits of memory and time: see ``process_limits``.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn

import torch

from dcp_placements.short_text import format_name
from dcp_placements.storage.process_limits import limited_time

MAX_NAME_CHARS = 200

MOST_BITS = 1 << 13
"""Python refuses to print an integer of 4,300 digits or more."""

_UNFOLDED_RATIO = 4
_SPARE = 1 << 16
"""A value may have this many elements per byte of its pickle, and some more."""


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


class Call:
    """What a file may call by a name.

    Args:
        name: The name in the file.
        make: Returns the result.
        kinds: Types of the arguments; None if ``make`` checks them.
    """

    __slots__ = ("_kinds", "_make", "name")

    def __init__(
        self, name: str, make: Callable[..., Any], kinds: tuple[type[Any], ...] | None = None
    ) -> None:
        self.name = name
        self._make, self._kinds = make, kinds

    def __call__(self, *args: Any) -> Any:
        """Return the result for arguments of a file."""
        if self._kinds not in (None, tuple(map(type, args))):
            raise refusal(f"it calls {self.name} with other arguments than it takes")
        return self._make(*args)

    def __setstate__(self, state: Any) -> NoReturn:
        raise refusal(f"it changes {self.name}")


class StandIn(type):
    """The class of stand-ins, which no pickle can change.

    An unpickler sets attributes on whatever a file reaches, also on classes.
    """

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise refusal(f"it changes {cls.__name__}")

    def __setstate__(cls, state: Any) -> NoReturn:
        raise refusal(f"it changes {cls.__name__}")


def stand_in(kind: type[Any], **attributes: Any) -> StandIn:
    """Return a class without methods of ``kind``, whose instances can become instances of it.

    Its instances are compared and hashed by identity: nothing of a file decides how long that
    takes.

    Args:
        kind: The class.
        attributes: Attributes of the new class.
    """
    return StandIn(kind.__name__, (), attributes)


class SafeUnpickler(pickle.Unpickler):
    """Reads one pickle.

    Args:
        data: The pickle.

    Attributes:
        nbytes: Size of the pickle.
        most_elements: The most elements that its value may have, at all levels of nesting.
    """

    subject: ClassVar[str]
    """The kind of file, for messages."""

    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {}
    """Values, calls and stand-ins that a file may name, by module and name."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_Memory(data))
        self.nbytes, self.most_elements = len(data), most_elements(data)

    def load(self) -> Any:
        """Return the value of the pickle.

        Raises:
            RefusedGlobal: The pickle names something that ``allowed`` lacks; nothing was called.
            pickle.UnpicklingError: The pickle is broken or refused.
            MemoryError: It asks for more memory than there is.
        """
        try:
            with limited_time(self.nbytes):
                return super().load()
        except (pickle.UnpicklingError, MemoryError):
            raise
        except EOFError as error:
            raise refusal("it is cut short") from error
        except Exception as error:  # arbitrary bytes can raise anything
            raise refusal(f"it is broken ({type(error).__name__})") from error

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


class _Memory(io.BytesIO):
    """A pickle in memory, of which the unpickler takes many bytes at a time."""

    def peek(self, nbytes: int) -> memoryview:
        start = self.tell()
        return self.getbuffer()[start : start + nbytes]


class GlobalStandIn(StandIn):
    """The class of what a pickle names and a reader does not know: a call of it is a stub.

    Attributes:
        name: The name, as ``module.name``.
    """

    name: str


class Stub:
    """Stands for an object of a pickle that is not created.

    Attributes:
        by: The callable that would create it, as ``module.name``; empty if that has no name.
        args: Arguments of the call.
        state: State that the pickle sets on the object; None for no state.
        contents: The items or elements of a dict or list of another class; None for other objects.
    """

    __slots__ = ("args", "by", "contents", "state")

    def __init__(self, by: str = "", args: tuple[Any, ...] = ()) -> None:
        self.by = by
        self.args = args
        self.state: Any = None
        self.contents: dict[Any, Any] | list[Any] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes in ``state``, which may be a tuple of dicts."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for state in states if state is not None for key, value in state.items()}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any) -> Stub:
        if self.by not in _CALLABLE:
            raise refusal(f"it calls {describe(self)}")
        return Stub("", args)

    def __getitem__(self, key: Any) -> Any:
        if self.contents is None:
            raise LookupError(key)
        return self.contents[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.contents is None:
            self.contents = {}
        self.contents[key] = value

    def extend(self, values: Iterable[Any]) -> None:
        """Append values, as to a list."""
        if self.contents is None:
            self.contents = []
        if not isinstance(self.contents, list):
            raise refusal("it appends to a dict")
        self.contents.extend(values)

    def append(self, value: Any) -> None:
        """Append a value, as to a list."""
        self.extend([value])


_CALLABLE = {"functools.partial", "builtins.getattr", "__builtin__.getattr"}
"""Names whose result a pickle may call; ``torch.load`` refuses them by name."""


def most_elements(data: bytes) -> int:
    """Return how many elements the value of a pickle may have, at all levels of nesting."""
    return _UNFOLDED_RATIO * len(data) + _SPARE


def check_unfolded(
    values: Iterable[Any], most: int, elements: Mapping[Stub, int] | None = None
) -> int:
    """Refuse values that have very many elements, at all levels of nesting; return their number.

    A file can refer to one value many times, and a value can refer to itself: ``t = (t, t)`` sixty
    times has a text, or a hash, of 2**60 elements.

    Args:
        values: The values.
        most: The most elements that they may have.
        elements: Elements of stubs, which are added for each reference to one. By default a stub
            counts once, with what is in it.

    Raises:
        pickle.UnpicklingError: The values have more than ``most`` elements, or an integer that
            cannot be printed.
    """
    todo, seen, left = list(values), set(), most
    while todo and left >= 0:
        value = todo.pop()
        if isinstance(value, str | bytes | tuple | list | set | frozenset | dict):
            left -= len(value)
            if left >= 0 and isinstance(value, dict):
                todo += [key for key in value if type(key) is not str]
                todo += value.values()
            elif left >= 0 and not isinstance(value, str | bytes):
                todo.extend(value)
        elif isinstance(value, Stub) and elements is not None:
            left -= elements.get(value, 1)
        elif isinstance(value, Stub) and value not in seen:
            seen.add(value)
            todo += value.args, value.state, value.contents
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise refusal("it has a number of thousands of digits")
    if left < 0:
        raise refusal("it makes far more of itself than its size")
    return most - left


def describe(value: Any) -> str:
    """Return the text of a value of a pickle for messages."""
    if isinstance(value, Call | GlobalStandIn):
        return format_name(value.name)
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


DTYPES = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
ORDERED_DICT = {("collections", "OrderedDict"): Call("OrderedDict", OrderedDict, ())}
