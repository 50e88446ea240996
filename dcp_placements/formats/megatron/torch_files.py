"""A ``torch.save`` file of somebody else's, read so that it can do nothing, and mapped, not copied.

torch's restricted unpickler makes tensors and plain values only. A training run keeps more beside
its weights: arguments, enumerations, random states. What of that comes from a module of the
training stack becomes a ``StandIn``, an empty shell that remembers what it was made of; the module
is not imported. Anything else is refused before anything is made.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dcp_placements.errors import CannotLook, format_names

INERT_MODULES = (
    *("megatron", "transformer_engine", "transformer_engine_torch", "modelopt", "numpy", "signal"),
    *("pathlib", "datetime", "_io", "torch.torch_version"),
)
"""Modules whose names become stand-ins, with all that is below them."""

INERT_NAMES = ("builtins.bytes", "builtins.frozenset", "builtins.slice", "builtins.range")
"""Single names that become stand-ins; an empty stream is made of ``bytes()``."""


class RefusedFile(CannotLook):
    """A file that asks for what no checkpoint needs. Nothing of it has been made or called."""


class UnreadableFile(CannotLook):
    """A file that is no ``torch.save`` file, or not all of one.

    Args:
        path: The file.
        reason: What reading it came to.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: this cannot be read\n"
            f"    found:       {reason}\n"
            "    likely:      cut off while it was written or copied, or written by torch < 1.6"
        )
        self.reason = reason


class StandIn:
    """Stands for an object of a class that is not imported.

    Attributes:
        args: What it was made of.
        state: What was to be set on it; None where nothing was.
    """

    source = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything: what there is to keep is kept already."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.source}{self.args}"


def load_torch_file(path: Path) -> Any:
    """Return what a ``torch.save`` file holds; tensors are mapped, and read when looked at.

    Raises:
        RefusedFile: It asks for a class or function that is not admitted.
        UnreadableFile: It is not there, cut off, or of another format.
    """
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in sorted(asked) if not _is_admitted(name)]
        if not refused:
            admitted: list[Any] = [argparse.Namespace]
            admitted += [(_stand_in(name), name) for name in asked if name != _NAMESPACE]
            with torch.serialization.safe_globals(admitted):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise RefusedFile(
            f"{path}: refused, it is not a pickle of tensors and plain values\n"
            f"    torch says:  {_first_line(error)}"
        ) from None
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise UnreadableFile(path, _first_line(error)) from None
    raise RefusedFile(
        f"{path}: refused, nothing of it was run\n"
        f"    asks for:    {format_names(refused)}\n"
        "    way out:     if you trust the file, load it where its classes are, and save it anew "
        "without these objects"
    )


_NAMESPACE = "argparse.Namespace"


def _is_admitted(name: str) -> bool:
    return name in (_NAMESPACE, *INERT_NAMES) or any(
        name.startswith(f"{module}.") for module in INERT_MODULES
    )


def _stand_in(name: str) -> type[StandIn]:
    return type(name.rpartition(".")[2], (StandIn,), {"source": name})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(dotted path, tensor)`` of all tensors in nested dicts, lists, tuples, stand-ins."""
    if isinstance(value, torch.Tensor):
        yield ".".join(map(str, path)), value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_in(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, (*path, number))
    elif isinstance(value, StandIn):
        yield from tensors_in([value.args, value.state], path)
    elif isinstance(value, argparse.Namespace):
        yield from tensors_in(vars(value), path)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaNs too, and -0.0 is not 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = _BITS.get(one.itemsize)
    if bits is None:
        one, other, bits = torch.view_as_real(one), torch.view_as_real(other), torch.int64
    return torch.equal(one.view(bits), other.view(bits))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
