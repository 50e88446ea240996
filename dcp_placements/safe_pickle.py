"""A pickle of DCP's own metadata, read so that it can do nothing else.

``pickle.load`` calls whatever the file names. Here a file may name DCP's classes and a few plain
ones, and nothing more. It does not get the classes themselves but stand-ins that make their
instances: a pickle can set attributes on what it names, and so change a class for the process.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from enum import EnumType
from pathlib import PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch

from dcp_placements.interop import METADATA_CLASSES, METADATA_HELPERS


class RefusedGlobal(pickle.UnpicklingError):
    """A pickle that names something that is no part of a checkpoint's metadata.

    Args:
        name: What it asks for, as ``module.name``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"it asks for {name}, which is no part of DCP's metadata")
        self.name = name


class RestrictedUnpickler(pickle.Unpickler):
    """Reads pickles of DCP's metadata; refuses every other global before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of what the file names.

        Raises:
            RefusedGlobal: It is not one of those that are known.
        """
        found = _ADMITTED.get((module, name))
        if found is None and module == "torch":
            found = _DTYPES.get(name)
        if found is None:
            raise RefusedGlobal(f"{module}.{name}")
        return found


class _Locked(type):
    """The class of stand-ins: nothing can be set on them, and a call makes the real thing."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes the class {cls.__name__}")

    def __delattr__(cls, name: str) -> None:
        raise pickle.UnpicklingError(f"it changes the class {cls.__name__}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__dict__["made"](*args, **kwargs)


def _stand_in(made: Any) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return made.__new__(made, *args, **kwargs)

    return _Locked(made.__name__, (), {"__slots__": (), "__new__": new, "made": staticmethod(made)})


def _stand_in_function(made: Any) -> Any:
    return _Locked(made.__name__, (), {"__slots__": (), "made": staticmethod(made)})


_DTYPES = {
    name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}

_PATHS = {
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib", "PureWindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}
"""Paths become such that reach no file system."""

_PLAIN = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
}


def _member(cls: Any, name: str) -> Any:
    """Return a member of an enumeration, which some versions of Python pickle as ``getattr``."""
    for key, made in METADATA_HELPERS.items():
        if _ADMITTED[key] is cls and isinstance(made, EnumType):
            return made.__members__[name]
    raise RefusedGlobal("builtins.getattr")


_ADMITTED: dict[tuple[str, str], Any] = {
    **{key: _stand_in(made) for key, made in {**_PATHS, **_PLAIN, **METADATA_CLASSES}.items()},
    **{key: _stand_in_function(made) for key, made in METADATA_HELPERS.items()},
    ("builtins", "getattr"): _stand_in_function(_member),
}


def load_restricted(stream: IO[bytes]) -> Any:
    """Return what a pickle of DCP's metadata holds.

    Raises:
        RefusedGlobal: It names anything else; nothing has been called then.
        Exception: Whatever else a broken pickle makes of itself.
    """
    return RestrictedUnpickler(stream).load()
