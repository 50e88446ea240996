"""The tensors of a rank at their places in the checkpoint.

Nothing is copied: every chunk is a view. The chunks of a stack are views of several local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements.bind.binding import Place
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk


@dataclass(slots=True)
class Placed:
    """One tensor of the checkpoint, as far as this rank holds it, and its place.

    Attributes:
        fqn: The checkpoint's key.
        tensor: The local tensor itself, no copy; of several the first.
        place: Its place; shared by all tensors of the same layout.
        rule: The name of its rule for messages; None if no rule matches.
        mesh: The mesh of its DTensor; None for a plain tensor.
        parts: The rows of a stack, or the copies of a row that this rank holds several times, as
            views with the checkpoint's dims; ``Chunk.part`` is an index in it. Empty where
            ``tensor`` is all.
        is_stack: Whether its rows are tensors of their own on this rank.
        has_own_key: Whether other ranks of its mesh may not have the key at all: a row, or a part
            of a row, of a local tensor.
    """

    fqn: str
    tensor: torch.Tensor
    place: Place
    rule: str | None
    mesh: Any = None
    parts: Sequence[torch.Tensor] = ()
    is_stack: bool = False
    has_own_key: bool = False

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The non-empty boxes, in C order of the local tensor."""
        return self.place.chunks

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.place.global_shape

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.parts or (self.tensor,)

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements of a chunk: a view of a local tensor, with the checkpoint's dims."""
        tensor = (self.parts[chunk.part] if self.parts else self.tensor).detach()
        if tensor.shape == chunk.sizes:
            return tensor
        for dim, size in enumerate(chunk.sizes):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, chunk.local_offsets[dim], size)
        return tensor


@dataclass(slots=True)
class Placing:
    """A rank's flat state dict, bound.

    Attributes:
        placed: By key, the tensors that have a place. Keys that are neither here nor in
            ``absent`` are left to torch's default planner.
        absent: Keys whose DTensor mesh does not include this rank: nothing to save or load here.
        faults: Of tensors that do not fit.
        matched: The number of keys per rule that matched.
        stack_axes: By stack, the position of the rule's axis that shards each dim of its rows; -1
            for none.
    """

    placed: dict[str, Placed] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    matched: dict[str, int] = field(default_factory=dict)
    stack_axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _places: dict[Place, Place] = field(default_factory=dict)

    def shared(self, place: Place) -> Place:
        """Return the one object that all tensors of equal places share."""
        return self._places.setdefault(place, place)
