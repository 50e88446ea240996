"""A DTensor in a file of ``torch.save``: its mesh and placements, read without a process group.

For rank 1 of two, which has rows 2 and 3 of a ``(4, 6)`` tensor::

    rank_shard(local, dtensor, 1)
    RankShard(local, MeshCoordinate(("fsdp",), (2,), (1,)), (Shard(0),), torch.Size((4, 6)))
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from dcp_placements._torch import RANK, SPEC, StridedShard
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.errors import CannotPlace
from dcp_placements.rules.mesh_axes import MeshCoordinate
from dcp_placements.short_text import format_error
from dcp_placements.storage.record_head import strided_tensor
from dcp_placements.storage.safe_pickle import Stub


def rank_shard(local: torch.Tensor, dtensor: Stub, rank: int) -> RankShard | None:
    """Return the shard that a DTensor describes; None if its mesh does not have the rank.

    Args:
        local: The local tensor.
        dtensor: The stub of the DTensor, as ``saved_tensor`` returns it.
        rank: The rank that wrote the file.

    Raises:
        CannotPlace: Another rank wrote the DTensor, it has a form that no torch writes, or it is
            partial.
    """
    check_rank(dtensor, rank)
    try:
        _, _, (_, _, shape, *_), _ = dtensor.args
        spec = _spec_of(dtensor)
        mesh = _mesh_of(spec["mesh"].fields)
        placements = tuple(map(_placement_of, spec["placements"]))
        if mesh is not None and len(placements) != len(mesh.shape):
            raise ValueError("the number of its placements is another")
        sizes = torch.Size(shape)
    except CannotPlace:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CannotPlace(
            f"holds a DTensor of another form than torch writes: {format_error(error)}",
            "way out:     save it again as a plain tensor, with rules that place it",
        ) from error
    return None if mesh is None else RankShard(local, mesh, placements, sizes)


def check_rank(dtensor: Stub, rank: int) -> None:
    """Refuse a DTensor that another rank wrote.

    Raises:
        CannotPlace: The rank in its mesh is another one.
    """
    try:
        saved_rank = _spec_of(dtensor)["mesh"].fields.get(RANK)
    except (AttributeError, KeyError, IndexError):
        return  # no torch writes this form
    if saved_rank not in (None, rank):
        raise CannotPlace(
            f"was written by rank {saved_rank}, in the file of rank {rank}",
            "likely:      the file was renamed, or copied over another one",
        )


def _spec_of(dtensor: Stub) -> dict[str, Any]:
    """Return the fields of a DTensor's spec: its mesh and placements."""
    dtensor.state = dtensor.args[3]  # the call that creates a DTensor has its attributes
    spec: Stub = dtensor.fields[SPEC]
    return spec.fields


def _mesh_of(state: Mapping[str, Any]) -> MeshCoordinate | None:
    """Return a mesh with the coordinate of its rank; None if the rank is not in it.

    Torch before 2.10 stores a tensor of the ranks, and before 2.13 the sizes of all axes together.
    """
    ranks = strided_tensor(state.get("mesh"))
    if ranks is None:
        layout = state["_layout"].fields
        axes = layout.get("axes")
        shapes = layout["shape"] if axes is None else [axis.fields["shape"] for axis in axes]
        sizes = tuple([shape if type(shape) is int else prod(shape) for shape in shapes])
    else:
        sizes = ranks.shape
    names = state.get("_mesh_dim_names") or state.get("mesh_dim_names")
    names = names or [f"dim_{dim}" for dim in range(len(sizes))]
    coordinate = state["_coordinate_on_dim"]
    return None if coordinate is None else MeshCoordinate(tuple(names), sizes, tuple(coordinate))


def _placement_of(placement: Stub) -> Any:
    """Return torch's placement for its stub."""
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
