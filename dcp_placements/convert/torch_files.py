"""Untrusted ``torch.save`` files, mapped into memory, without executing anything from them.

A training run saves more with its weights: arguments, enumerations, random states, DTensors. Of
these what stands for them is kept, with its arguments and state (``Made``). Any other class than
those of the training stack is refused. A DTensor becomes a ``RankShard`` by what it is made of
(mesh, placements), so that no process group is needed, and the torch that wrote it may be another.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from dcp_placements._torch import RANK, SPEC, StridedShard
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.errors import CannotLook, CannotPlace, PlacementError, format_names
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.storage.safe_pickle import Made
from dcp_placements.storage.saved_file import SavedFile, saved_tensor
from dcp_placements.storage.tensor_record import StridedTensor

_INERT_MODULES = (
    *("megatron", "transformer_engine", "transformer_engine_torch", "modelopt", "numpy", "signal"),
    *("pathlib", "datetime", "_io", "torch.torch_version", "torch.distributed"),
)
"""Modules whose classes, and those of their submodules, become stand-ins."""

_INERT_NAMES = (
    *("builtins.bytes", "builtins.frozenset", "builtins.slice", "builtins.range"),
    # Python 3.11 before 3.11.4 pickles a member of an enumeration as a call of getattr.
    *("builtins.getattr", "__builtin__.getattr", "argparse.Namespace"),
)
"""Single names that become stand-ins; an empty stream needs ``bytes()``."""


REBUILT = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
"""What makes tensors begins with one of these."""


class RefusedFile(CannotLook):
    """A file that needs a class or function that is not admitted. Nothing of it was executed."""


class UnreadableFile(CannotLook):
    """A file that is not a ``torch.save`` file, or incomplete."""


class SavedDTensor(NamedTuple):
    """A DTensor as it is in a file; ``rank_shard`` reads it."""

    local: torch.Tensor
    shape: torch.Size
    spec: Made  # its mesh and placements


def load_torch_file(path: Path) -> Any:
    """Return the contents of a ``torch.save`` file; tensors are mapped, not read.

    What is neither a tensor, nor a ``SavedDTensor``, a dict or a list, is as ``SavedFile`` has it.

    Raises:
        RefusedFile: It needs a class or function that is not admitted.
        UnreadableFile: It is missing, truncated, or of another format.
    """

    def value(own: Any, tensor: StridedTensor, dtensor: Made | None) -> Any:
        local = file.mapped(tensor, mapping)
        if dtensor is None:
            return local
        _, _, (_, _, shape, *_), dtensor.state = dtensor.args
        return SavedDTensor(local, torch.Size(shape), dtensor.fields[SPEC])

    try:
        with open(path, "rb") as stream:
            file = SavedFile(path.name, stream)
            needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            refused = [name for name in sorted(needed) if not _is_admitted(name)]
            if not refused:
                nbytes = path.stat().st_size
                mapping: Any = torch.UntypedStorage.from_file(str(path), False, nbytes)
                return file.state(value)
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        reason = error.__cause__ if isinstance(error, PlacementError) else error
        if isinstance(reason, RecursionError):
            reason = ValueError("dicts are nested too deeply in it")
        if isinstance(reason, pickle.UnpicklingError):
            raise RefusedFile(
                f"{path}: refused, it is not a pickle of tensors and plain values\n"
                f"    found:       {_first_line(reason)}"
            ) from None
        raise UnreadableFile(
            f"{path}: cannot be read: {_first_line(reason)}\n"
            "    likely:      truncated while it was written or copied, or written by torch < 1.6"
        ) from None
    raise RefusedFile(
        f"{path}: refused, nothing of it was executed\n"
        f"    asks for:    {format_names(refused)}\n"
        "    way out:     if you trust the file, load it where its classes are installed, and save "
        "it again without these objects"
    )


def _is_admitted(name: str) -> bool:
    return name in _INERT_NAMES or any(name.startswith(f"{module}.") for module in _INERT_MODULES)


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rank_shard(tensor: SavedDTensor, rank: int) -> RankShard:
    """Return what a DTensor from ``load_torch_file`` says of itself.

    Args:
        tensor: The DTensor.
        rank: That wrote the file; it places the rank on meshes that do not say it themselves.

    Raises:
        CannotPlace: It says something else than any torch's DTensors do, or is partial.
    """
    try:
        spec = tensor.spec.fields
        mesh = _mesh_of(spec["mesh"].fields, rank)
        placements = tuple(map(_placement_of, spec["placements"]))
        if len(placements) != len(mesh.shape):
            raise ValueError("the number of its placements is another")
    except CannotPlace:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CannotPlace(
            f"holds a DTensor of another form than torch writes: {_first_line(error)}",
            "way out:     save it again as a plain tensor, with rules that place it",
        ) from error
    return RankShard(tensor.local, mesh, placements, tensor.shape)


def _mesh_of(state: Mapping[str, Any], rank: int) -> MeshCoordinate:
    """Return a mesh as its rank sees it; torch before 2.10 stores a tensor of the ranks."""
    ranks, coordinate = state.get("mesh"), state.get("_coordinate_on_dim")
    if isinstance(ranks, torch.Tensor):
        sizes = tuple(ranks.shape)
        found = (ranks == rank).nonzero().tolist()
        if coordinate is None and len(found) == 1:
            coordinate = found[0]
    else:
        axes = [axis.fields["shape"] for axis in state["_layout"].fields["axes"]]
        sizes = tuple([prod(axis) for axis in axes])
    names = state.get("_mesh_dim_names") or state.get("mesh_dim_names")
    names = names or [f"dim_{dim}" for dim in range(len(sizes))]
    if coordinate is None:
        raise ValueError("its mesh does not say where its rank is")
    if state.get(RANK) not in (None, rank):
        raise CannotPlace(
            f"was written by rank {state[RANK]}, in the file of rank {rank}",
            "likely:      the file was renamed, or copied over another one",
        )
    return MeshCoordinate(tuple(names), sizes, tuple(coordinate))


def _placement_of(placement: Made) -> Any:
    """Return torch's placement for what stands for it."""
    kind = placement.by.rpartition(".")[2]
    if kind == "Shard":
        return Shard(int(placement.fields["dim"]))
    if kind == "Replicate":
        return Replicate()
    if kind == "_StridedShard":
        fields = placement.fields
        return StridedShard(int(fields["dim"]), split_factor=int(fields["split_factor"]))
    raise CannotPlace(
        f"is {kind} over an axis: each rank has a summand, and no part of it",
        "way out:     reduce it before it is saved",
    )


def nbytes_in(value: Any) -> int:
    """Return the bytes of all tensors in what a file has somewhere."""
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
            nbytes += prod(tensor.shape) * tensor.dtype.itemsize
        elif isinstance(inner, Made) and inner not in seen:
            seen.add(inner)
            todo += inner.args, inner.state
    return nbytes
