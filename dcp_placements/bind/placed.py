"""The tensors of a rank at their places in the checkpoint.

Nothing is copied: every chunk is a view. The chunks of a stack are views of several local tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from dcp_placements.bind.rule_and_dtensor import Binding
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk

Place = tuple[Binding, tuple[Chunk, ...]]
"""A layout with the axes that led to it, and its chunks in the local tensor."""


@dataclass(slots=True)
class Placed:
    """One tensor of this rank and its place in the checkpoint.

    Attributes:
        fqn: The checkpoint's key.
        tensor: The local tensor itself, no copy.
        binding: Its place; shared by all tensors of the same layout.
        chunks: The non-empty boxes, in C order of the local tensor; shared, too. The binding and
            their number determine the boxes: a rank may hold a row several times.
        rule: The name of its rule for messages; None if no rule matches.
        mesh: The mesh of its DTensor; None for a plain tensor.
    """

    fqn: str
    tensor: torch.Tensor
    binding: Binding
    chunks: tuple[Chunk, ...]
    rule: str | None
    mesh: Any = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.binding.global_shape

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The local tensors that it stands for: one, unless rows are stacked."""
        return [self.tensor]

    @property
    def has_own_key(self) -> bool:
        """Whether other ranks of its mesh may not have the key at all."""
        return False

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements of ``chunk``: a view of the local tensor, no copy."""
        return narrowed(self.tensor.detach(), chunk)


def narrowed(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the elements of a chunk as a view of its local tensor."""
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


@dataclass(slots=True)
class StackedPlaced(Placed):
    """Local tensors that are rows of one tensor of the checkpoint.

    Attributes:
        parts: The tensors, one per row that this rank holds; ``tensor`` is the first of them.
        dims: The dims of the checkpoint's tensor that the rows lie along, ascending. On each of
            them the local offset of a chunk is the index in ``parts``.
    """

    parts: list[torch.Tensor] = field(default_factory=list)
    dims: tuple[int, ...] = (0,)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.parts

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements of ``chunk``: a view of a row, with the checkpoint's dims."""
        part = self.parts[chunk.local_offsets[self.dims[0]]].detach()
        for dim in self.dims:
            part = part.unsqueeze(dim)
        return narrowed(part, chunk)


@dataclass(slots=True)
class RowPlaced(Placed):
    """A row of a local tensor, or a part of it, which is a tensor of its own in the checkpoint.

    Attributes:
        parts: The local tensors of that row: one, unless this rank holds it several times. Then the
            last local offset of a chunk, beyond those of the dims, is the index in ``parts``.
    """

    parts: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, fqn: str, place: Place, rule: str | None, parts: list[torch.Tensor]) -> RowPlaced:
        """Return a row that this rank holds as each of ``parts``, at the same place each time."""
        binding, chunks = place
        if len(parts) > 1:
            chunks = _repeated(chunks, len(parts))
        return cls(fqn, parts[0], binding, chunks, rule, None, parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The local tensors that it stands for."""
        return self.parts

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements of ``chunk``: a view of one of its tensors."""
        which = chunk.local_offsets[-1] if len(self.parts) > 1 else 0
        return narrowed(self.parts[which].detach(), chunk)

    @property
    def has_own_key(self) -> bool:
        """Other ranks of the mesh may hold other rows."""
        return True


@lru_cache(maxsize=64)
def _repeated(chunks: tuple[Chunk, ...], count: int) -> tuple[Chunk, ...]:
    return tuple(
        [
            Chunk((*chunk.local_offsets, at), chunk.offsets, chunk.sizes)
            for at in range(count)
            for chunk in chunks
        ]
    )
