"""The tensors of a rank at their places in the checkpoint.

Nothing is copied: every chunk is a view. The chunks of a stack are views of several local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements.bind.binding import Binding
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors of one layout lie in the checkpoint.

    Attributes:
        binding: The layout, with the axes that led to it.
        chunks: The non-empty boxes, in C order of the local tensor. A rank may hold a row several
            times.
        number: Of the place in its ``Placing``; equal places have one number.
    """

    binding: Binding
    chunks: tuple[Chunk, ...]
    number: int


@dataclass(slots=True)
class Placed:
    """One tensor of the checkpoint, as far as this rank holds it, and its place.

    Attributes:
        fqn: The checkpoint's key.
        tensor: The local tensor itself, no copy; of several the first.
        place: Its place; shared by all tensors of the same layout.
        rule: The name of its rule for messages; None if no rule matches.
        mesh: The mesh of its DTensor; None for a plain tensor.
        parts: The local tensors of a stack, or of a row that this rank holds several times; empty
            where ``tensor`` is all.
        dims: Of a stack, the dims of the checkpoint's tensor that its rows lie along, ascending. On
            each of them the local offset of a chunk is the index in ``parts``. Of a row that is
            held several times, that index is the last local offset, beyond those of the dims.
        has_own_key: Whether other ranks of its mesh may not have the key at all: a row, or a part
            of a row, of a local tensor.
    """

    fqn: str
    tensor: torch.Tensor
    place: Place
    rule: str | None
    mesh: Any = None
    parts: Sequence[torch.Tensor] = ()
    dims: tuple[int, ...] = ()
    has_own_key: bool = False

    @property
    def binding(self) -> Binding:
        """The layout, with the axes that led to it."""
        return self.place.binding

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The non-empty boxes, in C order of the local tensor."""
        return self.place.chunks

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.place.binding.global_shape

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.parts or (self.tensor,)

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements of a chunk: a view of a local tensor, with the checkpoint's dims."""
        tensor = self.tensor
        if self.parts:
            tensor = self.parts[chunk.local_offsets[self.dims[0] if self.dims else -1]]
        tensor = tensor.detach()
        for dim in self.dims:
            tensor = tensor.unsqueeze(dim)
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
    """

    placed: dict[str, Placed] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    matched: dict[str, int] = field(default_factory=dict)
    _places: dict[tuple[Binding, tuple[Chunk, ...]], Place] = field(default_factory=dict)

    def place_of(self, binding: Binding, chunks: tuple[Chunk, ...]) -> Place:
        """Return the place of tensors with this layout; a new one gets the next number."""
        place = self._places.get((binding, chunks))
        if place is None:
            place = self._places[binding, chunks] = Place(binding, chunks, len(self._places))
        return place

    def place_row(
        self, fqn: str, place: Place, rule: str | None, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Place a row that this rank holds as each of ``tensors``, at the same place each time."""
        if len(tensors) == 1:
            self.placed[fqn] = Placed(fqn, tensors[0], place, rule, has_own_key=True)
            return
        chunks = tuple(
            [
                Chunk((*chunk.local_offsets, at), chunk.offsets, chunk.sizes)
                for at in range(len(tensors))
                for chunk in place.chunks
            ]
        )
        several = self.place_of(place.binding, chunks)
        self.placed[fqn] = Placed(fqn, tensors[0], several, rule, parts=tensors, has_own_key=True)
