"""Untrusted ``torch.save`` files, mapped into memory, without executing anything from them.

A training run saves more with its weights: arguments, enumerations, random states, DTensors. For
each a stand-in with its arguments and state (``Stub``) is kept. Classes from outside the training
stack are refused. Another version of torch may have written a DTensor.
"""

from __future__ import annotations

import errno
import os
import pickle
from typing import Any, NamedTuple

import torch

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.short_text import (
    format_error,
    format_name,
    format_names,
)
from dcp_placements.storage.file_reads import read_only_mapping
from dcp_placements.storage.record import Record
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.safe_pickle import Stub
from dcp_placements.storage.state_dict_file import SavedFile, saved_tensor
from dcp_placements.storage.store import Store

_INERT_MODULES = (
    *("megatron.", "transformer_engine.", "transformer_engine_torch.", "modelopt.", "numpy."),
    *("signal.", "pathlib.", "datetime.", "_io.", "torch.torch_version.", "torch.distributed."),
)
"""Modules whose classes, and those of their submodules, become stand-ins."""

_INERT_NAMES = (
    *("builtins.bytes", "builtins.frozenset", "builtins.slice", "builtins.range"),
    # Python 3.11 before 3.11.4 pickles a member of an enumeration as a call of getattr.
    *("builtins.getattr", "__builtin__.getattr", "argparse.Namespace"),
)
"""Single names that become stand-ins; an empty stream needs ``bytes()``."""


REBUILT = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
"""Beginnings of the names of functions that rebuild tensors."""


class RefusedFile(CannotLook):
    """A file that needs a class or function that is not admitted. Nothing of it was executed."""


class UnreadableFile(CannotLook):
    """A file that is not a ``torch.save`` file, or incomplete."""


class SavedDTensor(NamedTuple):
    """A DTensor as it is in a file; ``rank_shard`` reads it."""

    local: torch.Tensor
    stub: Stub


def load_torch_file(directory: Store, name: str) -> Any:
    """Return the contents of a ``torch.save`` file; tensors are mapped, not read.

    Values other than tensors, ``SavedDTensor``, dicts and lists are those of ``SavedFile``.

    Args:
        directory: A directory of this machine.
        name: Name of the file, or its path below the directory.

    Raises:
        RefusedFile: It needs a class or function that is not admitted.
        UnreadableFile: It is missing, truncated, or of another format.
        MemoryError: There is no room for its pickle.
    """

    def value(own: Any, tensor: RecordHead, dtensor: Stub | None) -> Any:
        local = file.mapped(tensor, storage)
        return local if dtensor is None else SavedDTensor(local, dtensor)

    path = f"{directory.path}/{name}"
    try:
        with directory.open(name) as stream:
            file = SavedFile(os.path.basename(name), stream)
            stream.seek(0)
            needed = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
            others = [name for name in sorted(needed) if not name.startswith(_INERT_MODULES)]
            refused = [name for name in others if name not in _INERT_NAMES]
            if not refused:
                nbytes = os.fstat(stream.fileno()).st_size
                storage = read_only_mapping(stream.fileno(), nbytes).untyped_storage()
                return file.state(value)
    except MemoryError:
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{path}: {error.strerror}") from None
        why = format_name(error.strerror or error)
        raise UnreadableFile(f"{path}: cannot be read: {why}") from None
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        reason = (isinstance(error, PlacementError) and error.__cause__) or error
        if isinstance(reason, RecursionError):
            reason = ValueError("dicts are nested too deeply in it")
        if isinstance(reason, pickle.UnpicklingError):
            raise RefusedFile(
                f"{path}: refused, it is not a pickle of tensors and plain values\n"
                f"    found:       {format_error(reason)}"
            ) from None
        raise UnreadableFile(
            f"{path}: cannot be read: {format_error(reason)}\n"
            "    likely:      truncated while it was written or copied, or written by torch < 1.6"
        ) from None
    raise RefusedFile(
        f"{path}: refused, nothing of it was executed\n"
        f"    asks for:    {format_names(refused)}\n"
        "    way out:     if you trust the file, load it where its classes are installed, and save "
        "it again without these objects"
    )


def check_contents(directory: Store, name: str) -> None:
    """Compare the contents of a file of ``torch.save`` with their CRC-32, where it has any.

    Raises:
        UnreadableFile: The contents are not what was written.
    """
    with directory.open(name) as stream:
        problem = Record.of_stream(stream).check().problem
    if problem is not None:
        raise UnreadableFile(
            f"{directory.path}/{name}: is not what was written: {format_name(problem)}\n"
            "    likely:      damaged by a disk or a copy: take another copy of the file"
        )


def nbytes_in(value: Any) -> int:
    """Return the bytes of all tensors in a nested value of a file."""
    nbytes, todo, seen = 0, [value], set()
    while todo:
        inner = todo.pop()
        if isinstance(inner, SavedDTensor):
            nbytes += inner.local.nbytes
        elif isinstance(inner, torch.Tensor):
            nbytes += inner.nbytes
        elif isinstance(inner, dict):
            todo += inner.values()
        elif isinstance(inner, list | tuple):
            todo += inner
        elif (tensor := saved_tensor(inner)[0]) is not None:
            nbytes += tensor.nbytes
        elif isinstance(inner, Stub) and inner not in seen:
            seen.add(inner)
            todo += inner.args, inner.state, inner.contents
    return nbytes
