"""DTensors on any rank: a look-alike, and torch's own without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .mesh import FakeMesh
from .reference import cut


class FakeDTensor:
    """Has the attributes of a ``DTensor`` that a checkpoint uses, and no others.

    Args:
        local: The local tensor, held as it is.
        device_mesh: The mesh, seen from this rank.
        placements: One per mesh axis.
        shape: The shape over the mesh, in elements.

    Raises:
        ValueError: The placements are not as many as the axes, or the local tensor has other dims.
    """

    def __init__(
        self,
        local: torch.Tensor,
        device_mesh: FakeMesh,
        placements: Sequence[Any],
        shape: Sequence[int],
    ) -> None:
        if len(placements) != device_mesh.ndim:
            raise ValueError(f"{len(placements)} placements for a mesh of {device_mesh.ndim} axes")
        if local.dim() != len(shape):
            raise ValueError(f"local shape {tuple(local.shape)} for a {len(shape)}-dim tensor")
        self._local = local
        self.device_mesh = device_mesh
        self.placements = tuple(placements)
        self.shape = torch.Size(shape)

    @classmethod
    def distribute(
        cls, whole: torch.Tensor, device_mesh: FakeMesh, placements: Sequence[Any]
    ) -> FakeDTensor:
        """Return the rank's part of ``whole``, cut by plain slicing."""
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            local = whole.new_empty((0,) * whole.dim())
        else:
            local = cut(whole, placements, device_mesh.shape, coordinate)
        return cls(local, device_mesh, placements, whole.shape)

    def to_local(self) -> torch.Tensor:
        """Return the local tensor itself."""
        return self._local

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the local tensor."""
        return self._local.dtype

    def __repr__(self) -> str:
        return f"FakeDTensor({tuple(self.shape)}, {self.placements}, {self.device_mesh})"


def real_dtensor(
    local: torch.Tensor, mesh: FakeMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """Return torch's own ``DTensor`` on the rank of ``mesh``, with no process group.

    Args:
        local: What the rank holds.
        mesh: The mesh, as the rank sees it.
        placements: One placement per axis.
        shape: Shape of the whole tensor.
    """
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, _real_mesh(mesh), placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@lru_cache(maxsize=256)  # the tensors of a rank share its mesh, as a trainer's do
def _real_mesh(mesh: FakeMesh) -> DeviceMesh:
    return DeviceMesh(
        "cpu",
        mesh.mesh,
        mesh_dim_names=mesh.mesh_dim_names,
        _init_backend=False,
        _rank=mesh.rank,
    )
