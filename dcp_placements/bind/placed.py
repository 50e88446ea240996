"""Tensors of a rank at their places in the checkpoint, as all that comes after takes them.

Nothing is copied: every chunk is a view. The chunks of a stack are views of several local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk, Position, Sharding
from dcp_placements.names.flat import Path
from dcp_placements.rules.mesh import Axis


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors of one layout lie in the checkpoint.

    Of expert weights of shape ``(2, 3)`` on the second of two ep ranks, as ``{"ep": Shard(0)}``::

        Place(Sharding((4, 3), (Cut(0, "ep", 2),)), (Axis("ep", 2, 1, ...),), (),
              (Chunk((0, 0), (2, 0), (2, 3)),), (1,))

    Places are keys of many tables, so the hash is computed once.

    Attributes:
        sharding: How the whole tensor is cut.
        axes: Those that the rule and the DTensor name, the rule's first, seen from this rank.
        replicating: Those of ``axes`` that cut nothing.
        chunks: The non-empty boxes that this rank holds, in C order of the local tensor. A rank may
            hold a row several times.
        positions: This rank's in each of the cuts.
        is_exact: Whether ``sharding`` and the rows that are listed determine what each rank holds;
            false for a part of a fused dim that an axis cuts.
    """

    sharding: Sharding
    axes: tuple[Axis, ...]
    replicating: tuple[Axis, ...]
    chunks: tuple[Chunk, ...]
    positions: tuple[Position, ...] = ()
    is_exact: bool = True
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.sharding, self.chunks, self.axes)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_uniform(self) -> bool:
        """Whether ``sharding`` describes all ranks: no ``IndexShard``, no stack, no part."""
        return self.is_exact and self.sharding.is_uniform

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.sharding.global_shape

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole tensor, as one chunk."""
        shape = self.global_shape
        return 0 in shape or (len(self.chunks) == 1 and self.chunks[0].sizes == shape)


@dataclass(slots=True)
class Placed:
    """One tensor of the checkpoint, as far as this rank holds it.

    Attributes:
        fqn: The checkpoint's key.
        tensor: The local tensor itself, no copy; of several the first.
        place: Where it lies; shared by all tensors of the same layout.
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
        tensor = self.tensors[chunk.part].detach()
        for dim, size in enumerate(chunk.sizes):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, chunk.local_offsets[dim], size)
        return tensor


@dataclass(slots=True)
class Placing:
    """A rank's flat state dict, bound, with one value per key of the checkpoint.

    Attributes:
        placed: By key, the tensors that have a place. Keys that are neither here nor in
            ``absent`` are left to torch's default planner.
        absent: Keys whose DTensor mesh does not include this rank: nothing to save or load here.
        faults: Of tensors that do not fit.
        matched: The number of keys per rule that matched.
        state_dict: The values.
        mappings: The path of each key in the nested dict.
        copies: Further paths of an object that several local keys have as one.
        shared: The name of a scalar or an object whose one value stands for several keys.
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``.
    """

    placed: dict[str, Placed] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    matched: dict[str, int] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    copies: dict[str, list[Path]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    def add(self, fqn: str, value: Any, path: Path | None) -> None:
        """Note a value under its key in the checkpoint."""
        if fqn in self.state_dict:
            self.fault(
                fqn,
                "rename= gives this one name to a row and to another value",
                "way out:     map every key of a rank to a key of its own",
            )
        self.state_dict[fqn] = value
        if path is not None:
            self.mappings[fqn] = path

    def fault(self, fqn: str, headline: str, *details: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(fqn, headline, details))
