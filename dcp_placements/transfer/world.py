"""What a user declares of one of the two worlds of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dcp_placements.errors import PlacementError
from dcp_placements.rules.mesh import MeshCoordinate


@dataclass(frozen=True, eq=False)
class TransferWorld:
    """One side of a ``transfer_plan``: its mesh, rules, shapes and names.

    Args:
        axes: The mesh: ranks by axis name, the last axis fastest in rank order.
        rules: Called with each rank's place in the mesh. Returns ``Placements``, or what
            ``Placements`` takes as rules. There are no DTensors, so the rules have to cover every
            axis that cuts a tensor but ``fsdp``; a rank holds all of a tensor without a rule. From
            the ``Renumber`` of its ``rename`` follows which experts and layers a rank holds.
            ``Stack``, ``Unstack`` and ``Split`` after it give the names by which the two worlds
            are matched.
        tensors: The whole tensors, by the keys of this world with global numbers: anything with a
            ``shape`` in elements and a ``dtype``, such as meta tensors. None, for a target: what
            the source's tensors become by their renames.
        fsdp: Axes over which FSDP cuts dim 0 of every tensor (of one dim or more), inside what
            the rules cut, as one flattened axis without the axes that a tensor's rule cuts over.
        ranks: The global rank at each place of the mesh; by default from 0 up. A rank of both
            worlds is one process, which copies what it already has. For two jobs without a common
            process, give the second other ranks.
        hosts: The host of each place of the mesh, or the number of consecutive ranks per host. If
            both worlds have hosts, a replica on the receiver's host is preferred.
        absent: Called with each rank's place in the mesh. Returns patterns, as in
            ``PlacementRules``, of keys that the rank has no part of and whose names have no
            number: the embedding on all pipeline stages but the first.

    Raises:
        PlacementError: A number of ranks or hosts that is not that of the mesh, or a rank twice.
    """

    axes: Mapping[str, int]
    rules: Callable[[MeshCoordinate], Any]
    tensors: Mapping[str, Any] | None = None
    fsdp: Sequence[str] = ()
    ranks: Sequence[int] | None = None
    hosts: Sequence[Hashable] | int | None = None
    absent: Callable[[MeshCoordinate], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        size = prod(self.axes.values())
        for name in ("ranks", "hosts"):
            values = getattr(self, name)
            if values is not None and not isinstance(values, int) and len(values) != size:
                raise PlacementError(
                    f"{name}= has {len(values)} entries, but the mesh {dict(self.axes)} has {size} "
                    "places\n    way out:     one entry per place, the last axis fastest"
                )
        if isinstance(self.hosts, int) and self.hosts < 1:
            raise PlacementError(f"hosts={self.hosts} is no number of ranks per host")
        ranks = self.global_ranks
        if len(set(ranks)) != size or min(ranks) < 0:
            raise PlacementError("ranks= must be different numbers from 0 up, one per place")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    @property
    def global_ranks(self) -> list[int]:
        """The global rank at each place of the mesh."""
        return list(range(self.size)) if self.ranks is None else list(self.ranks)

    @property
    def host_names(self) -> list[Hashable] | None:
        """The host at each place of the mesh; None if it is unknown."""
        if isinstance(self.hosts, int):
            return [rank // self.hosts for rank in self.global_ranks]
        return None if self.hosts is None else list(self.hosts)
