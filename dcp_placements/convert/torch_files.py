"""Untrusted ``torch.save`` files, mapped into memory, without executing anything from them.

torch's restricted unpickler makes tensors and plain values only. A training run saves more with its
weights: arguments, enumerations, random states, DTensors. An object of a class of the training
stack becomes a ``StandIn``, which keeps its arguments and state; the class's module is not
imported. Any other class is refused before an object is created. A DTensor becomes a ``RankShard``:
what it is made of (mesh, placements) are stand-ins too, so that no process group is needed, and the
torch that wrote them may be another.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_placements._torch import RANK, StridedShard, parts_of
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.errors import CannotLook, CannotPlace, format_names
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.storage.checked_load import check_saved
from dcp_placements.storage.safe_pickle import check_unfolded

_INERT_MODULES = (
    *("megatron", "transformer_engine", "transformer_engine_torch", "modelopt", "numpy", "signal"),
    *("pathlib", "datetime", "_io", "torch.torch_version", "torch.distributed"),
)
"""Modules whose classes, and those of their submodules, become stand-ins."""

_INERT_NAMES = ("builtins.bytes", "builtins.frozenset", "builtins.slice", "builtins.range")
"""Single names that become stand-ins; an empty stream needs ``bytes()``."""

_DTENSOR = (
    *("torch.distributed.tensor.DTensor", "torch.distributed.tensor._api.DTensor"),
    *("torch.distributed._tensor.api.DTensor", "torch.distributed._tensor.DTensor"),
)
_NAMESPACE = "argparse.Namespace"
_GETATTR = ("builtins.getattr", "__builtin__.getattr")


class RefusedFile(CannotLook):
    """A file that needs a class or function that is not admitted. Nothing of it was executed."""


class UnreadableFile(CannotLook):
    """A file that is not a ``torch.save`` file, or incomplete."""


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

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of the object."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {name: value for part in parts if part is not None for name, value in part.items()}


def load_torch_file(path: Path) -> Any:
    """Return the contents of a ``torch.save`` file; tensors are mapped, not read.

    DTensors in it are for ``rank_shard`` alone.

    Raises:
        RefusedFile: It needs a class or function that is not admitted.
        UnreadableFile: It is missing, truncated, or of another format.
    """
    before = torch.serialization.get_safe_globals()
    try:
        with open(path, "rb") as stream:
            most = check_saved(stream)
        # What a DTensor is made of is admitted by torch.distributed, as itself.
        torch.serialization.clear_safe_globals()
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in sorted(needed) if not _is_admitted(name)]
        if not refused:
            with torch.serialization.safe_globals([_admitted(name) for name in needed]):
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
        raise UnreadableFile(
            f"{path}: cannot be read: {_first_line(error)}\n"
            "    likely:      truncated while it was written or copied, or written by torch < 1.6"
        ) from None
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    raise RefusedFile(
        f"{path}: refused, nothing of it was executed\n"
        f"    asks for:    {format_names(refused)}\n"
        "    way out:     if you trust the file, load it where its classes are installed, and save "
        "it again without these objects"
    )


def _is_admitted(name: str) -> bool:
    return name in (_NAMESPACE, *_GETATTR, *_INERT_NAMES) or any(
        name.startswith(f"{module}.") for module in _INERT_MODULES
    )


def _admitted(name: str) -> Any:
    """Return what stands for a name of a pickle."""
    if name == _NAMESPACE:
        return argparse.Namespace
    if name in _GETATTR:
        return _member, name
    if name in _DTENSOR:
        return DTensor, name
    return type(name.rpartition(".")[2], (StandIn,), {"source": name}), name


def _member(owner: Any, name: str) -> StandIn:
    """Return the stand-in of a member of an enumeration.

    Python 3.11 before 3.11.4 pickles it as a call of ``getattr``, which is not made here.
    """
    if not (isinstance(owner, type) and issubclass(owner, StandIn)):
        raise pickle.UnpicklingError("an attribute of something else than an enumeration")
    return owner(name)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rank_shard(tensor: DTensor, rank: int) -> RankShard:
    """Return what a DTensor from ``load_torch_file`` says of itself.

    Args:
        tensor: Its mesh and placements are stand-ins.
        rank: That wrote the file; it places the rank on meshes that do not say it themselves.

    Raises:
        CannotPlace: It says something else than any torch's DTensors do, or is partial.
    """
    try:
        local, stored = parts_of(tensor)
        spec = stored.fields
        mesh = _mesh_of(spec["mesh"].fields, rank)
        placements = tuple(map(_placement_of, spec["placements"]))
        if type(local) is not torch.Tensor or len(placements) != len(mesh.shape):
            raise ValueError("its local tensor, or the number of its placements, is another")
    except CannotPlace:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CannotPlace(
            f"holds a DTensor of another form than torch writes: {_first_line(error)}",
            "way out:     save it again as a plain tensor, with rules that place it",
        ) from error
    return RankShard(local, mesh, placements, tensor.shape)


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


def _placement_of(placement: StandIn) -> Any:
    """Return torch's placement for a stand-in of it."""
    kind = type(placement).__name__
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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts, lists, tuples and stand-ins."""
    if isinstance(value, DTensor):
        yield parts_of(value)[0]
    elif isinstance(value, torch.Tensor):
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
