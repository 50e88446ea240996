"""Untrusted ``torch.save`` files, mapped into memory, without executing anything from them.

torch's restricted unpickler makes tensors and plain values only. A training run saves more with its
weights: arguments, enumerations, random states. An object of a class of the training stack becomes
a ``StandIn``, which keeps its arguments and state; the class's module is not imported. Any other
class is refused before an object is created.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.storage.checked_load import check_saved
from dcp_placements.storage.safe_pickle import check_unfolded

INERT_MODULES = (
    *("megatron", "transformer_engine", "transformer_engine_torch", "modelopt", "numpy", "signal"),
    *("pathlib", "datetime", "_io", "torch.torch_version"),
)
"""Modules whose classes, and those of their submodules, become stand-ins."""

INERT_NAMES = ("builtins.bytes", "builtins.frozenset", "builtins.slice", "builtins.range")
"""Single names that become stand-ins; an empty stream needs ``bytes()``."""


class RefusedFile(CannotLook):
    """A file that needs a class or function that is not admitted. Nothing of it was executed."""


class UnreadableFile(CannotLook):
    """A file that is not a ``torch.save`` file, or incomplete.

    Args:
        path: The file.
        reason: The error of reading it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: cannot be read\n"
            f"    found:       {reason}\n"
            "    likely:      truncated while it was written or copied, or written by torch < 1.6"
        )
        self.reason = reason


class StandIn:
    """Replaces an object of a class that is not imported.

    Attributes:
        args: The arguments of the class.
        state: The state of the object, if any.
    """

    source = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        stand_in = super().__new__(cls)
        stand_in.args, stand_in.state = args, None
        return stand_in

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments that ``__new__`` keeps."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.source}{self.args}"


def load_torch_file(path: Path) -> Any:
    """Return the contents of a ``torch.save`` file; tensors are mapped, not read.

    Raises:
        RefusedFile: It needs a class or function that is not admitted.
        UnreadableFile: It is missing, truncated, or of another format.
    """
    try:
        with open(path, "rb") as stream:
            most = check_saved(stream)
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in sorted(needed) if not _is_admitted(name)]
        if not refused:
            admitted: list[Any] = [argparse.Namespace]
            admitted += [(_member, name) for name in needed if name in _GETATTR]
            stand_ins = set(needed) - {_NAMESPACE, *_GETATTR}
            admitted += [(_stand_in(name), name) for name in sorted(stand_ins)]
            with torch.serialization.safe_globals(admitted):
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            check_unfolded([loaded], most)
            return loaded
    except pickle.UnpicklingError as error:
        raise RefusedFile(
            f"{path}: refused, it is not a pickle of tensors and plain values\n"
            f"    torch says:  {_first_line(error)}"
        ) from None
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        raise UnreadableFile(path, _first_line(error)) from None
    raise RefusedFile(
        f"{path}: refused, nothing of it was executed\n"
        f"    asks for:    {format_names(refused)}\n"
        "    way out:     if you trust the file, load it where its classes are installed, and save "
        "it again without these objects"
    )


_NAMESPACE = "argparse.Namespace"
_GETATTR = ("builtins.getattr", "__builtin__.getattr")


def _is_admitted(name: str) -> bool:
    return name in (_NAMESPACE, *_GETATTR, *INERT_NAMES) or any(
        name.startswith(f"{module}.") for module in INERT_MODULES
    )


def _member(owner: Any, name: str) -> StandIn:
    """Return the stand-in of a member of an enumeration.

    Python 3.11 before 3.11.4 pickles it as a call of ``getattr``, which is not made here.
    """
    if not (isinstance(owner, type) and issubclass(owner, StandIn)):
        raise pickle.UnpicklingError("an attribute of something else than an enumeration")
    return owner(name)


def _stand_in(name: str) -> type[StandIn]:
    return type(name.rpartition(".")[2], (StandIn,), {"source": name})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts, lists, tuples and stand-ins."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, StandIn):
        yield from tensors_in([value.args, value.state])
    elif isinstance(value, argparse.Namespace):
        yield from tensors_in(vars(value))
