"""What a tensor says of itself, its place in the checkpoint, and why it may not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dcp_placements.errors import PlacementError
from dcp_placements.layout.sharding import Chunk, Sharding
from dcp_placements.rules.mesh import Axis, Mesh, format_mesh
from dcp_placements.rules.placement import format_placements, kind_of


class BindError(Exception):
    """Why a tensor and its rule do not fit together; becomes a ``Fault`` with the key.

    Args:
        headline: What does not fit.
        details: Causes and the way out.
        place: Facts about this rank alone.
    """

    def __init__(self, headline: str, *details: str, place: tuple[str, ...] = ()) -> None:
        super().__init__(headline)
        self.headline = headline
        self.details = details
        self.place = place


@dataclass(frozen=True, slots=True)
class Own:
    """The tensor's own description: its DTensor mesh and placements, or just its shape.

    Attributes:
        shape: The shape over ``mesh``; a plain tensor's own shape.
        mesh: The DTensor's mesh; None for a plain tensor.
        placements: One per mesh axis.

    Raises:
        BindError: A placement of another library.
    """

    shape: tuple[int, ...]
    mesh: Mesh | None = None
    placements: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        try:
            for placement in self.placements:
                kind_of(placement)
        except PlacementError as error:
            headline, *details = str(error).splitlines()
            raise BindError(f"its own DTensor: {headline}", *map(str.strip, details)) from None

    def format(self) -> str:
        """Return it as short text."""
        if self.mesh is None:
            return f"plain tensor of shape {self.shape}"
        return (
            f"DTensor of shape {self.shape}, {format_placements(self.placements)} "
            f"on mesh {format_mesh(self.mesh)}"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors of one layout lie in the checkpoint.

    Places are keys of many tables, so the hash is computed once.

    Attributes:
        sharding: How the whole tensor is cut, over the axes of both sources.
        axes: Those axes seen from this rank, in the order of ``sharding.axis_sizes``.
        chunks: The non-empty boxes that this rank holds, in C order of the local tensor. A rank may
            hold a row several times.
        homes: For each axis its mesh and its position there.
        is_exact: Whether ``sharding`` and the rows that are listed determine what each rank holds;
            false for a part of a fused dim that an axis cuts.
    """

    sharding: Sharding
    axes: tuple[Axis, ...]
    chunks: tuple[Chunk, ...]
    homes: tuple[tuple[Any, int], ...] = field(default=(), repr=False)
    is_exact: bool = True
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.sharding, self.chunks, self.axes)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The hash of a string differs between processes.
        args = self.sharding, self.axes, self.chunks, self.homes, self.is_exact
        return Place, args

    @property
    def is_uniform(self) -> bool:
        """Whether ``sharding`` describes all ranks: no ``IndexShard``, no stack, no part."""
        return self.is_exact and self.sharding.is_uniform

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's position along each axis."""
        return tuple([axis.position for axis in self.axes])

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.sharding.global_shape

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole tensor, as one chunk."""
        shape = self.global_shape
        return 0 in shape or (len(self.chunks) == 1 and self.chunks[0].sizes == shape)
