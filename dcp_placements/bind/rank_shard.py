"""A rank's part of a tensor, with what a planner asks of a DTensor, and without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class RankShard:
    """A rank's part of a tensor, as a DTensor of another process.

    Rows 3 to 5 of a (12, 3) tensor, on the second of four ranks::

        RankShard(tensor of (3, 3), MeshCoordinate(("fsdp",), (4,), (1,)), (Shard(0),), (12, 3))
    """

    local: torch.Tensor
    device_mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.local.dtype

    def to_local(self) -> torch.Tensor:
        """Return the local tensor."""
        return self.local
