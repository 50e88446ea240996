"""Which file holds each box of a checkpoint that is rewritten for a world: the one rule.

A box goes into the file of the lowest rank that holds it. A rank whose boxes no other holds then
reads one file; replicas read that of the lowest among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_placements.layout.sharding import Box
from dcp_placements.offline.rehearsals.costs import TensorClass
from dcp_placements.offline.rehearsals.refusals import RankPart


@dataclass(slots=True, eq=False)
class OwnedTensors:
    """Tensors of one class of which the same ranks own the same boxes.

    Attributes:
        tensors: The class.
        members: Their positions in it.
        owners: The rank by box; empty for tensors that no rank has.
    """

    tensors: TensorClass
    members: list[int]
    owners: dict[Box, int]

    @property
    def fqns(self) -> list[str]:
        """Their keys."""
        return [self.tensors.fqns[member] for member in self.members]


@dataclass(slots=True, eq=False)
class _PartBoxes:
    """The boxes of a part, each with the lowest rank that holds it."""

    members: list[int]
    lowest: dict[Box, int]


class Owners:
    """The owner of every box. Ranks are added in their order."""

    def __init__(self) -> None:
        self._parts: dict[TensorClass, dict[bytes, _PartBoxes]] = {}
        self._boxes: dict[Any, tuple[Box, ...]] = {}
        self._groups: dict[TensorClass, list[OwnedTensors]] = {}
        self._files: dict[Any, frozenset[int]] = {}

    def add(self, rank: int, held: RankPart) -> None:
        """Add what a rank holds of a part."""
        key = _key(held)
        if key in self._boxes:
            return  # a lower rank holds the same
        members = held.part.members
        parts = self._parts.setdefault(held.part.tensors, {})
        part = parts.setdefault(members.tobytes(), _PartBoxes(members.tolist(), {}))
        boxes = tuple(dict.fromkeys(chunk.box for chunk in held.layout.chunks()))
        if 0 in held.part.tensors.shape:
            boxes = (Box((0,) * len(held.part.tensors.shape), held.part.tensors.shape),)
        self._boxes[key] = boxes
        for box in boxes:
            part.lowest.setdefault(box, rank)

    def groups(self, tensors: TensorClass) -> list[OwnedTensors]:
        """Return the tensors of a class with their owners, when all ranks are added."""
        if tensors not in self._groups:
            parts = list(self._parts.get(tensors, {}).values())
            parts_of: list[list[int]] = [[] for _ in tensors.fqns]
            for number, part in enumerate(parts):
                for member in part.members:
                    parts_of[member].append(number)
            alike: dict[tuple[int, ...], list[int]] = {}
            for member, numbers in enumerate(parts_of):
                alike.setdefault(tuple(numbers), []).append(member)
            groups = []
            for numbers_of_parts, members in alike.items():
                owners: dict[Box, int] = {}
                for number in numbers_of_parts:
                    for box, rank in parts[number].lowest.items():
                        owners[box] = min(rank, owners.get(box, rank))
                groups.append(OwnedTensors(tensors, members, owners))
            self._groups[tensors] = groups
        return self._groups[tensors]

    def ranks(self, held: RankPart) -> frozenset[int]:
        """Return the ranks in whose files a rank finds a part, when all ranks are added."""
        key = _key(held)
        if key not in self._files:
            members = set(held.part.members.tolist())
            self._files[key] = frozenset(
                group.owners[box]
                for group in self.groups(held.part.tensors)
                if not members.isdisjoint(group.members)
                for box in self._boxes[key]
            )
        return self._files[key]


def _key(held: RankPart) -> Any:
    part = held.part
    return part.tensors, part.members.tobytes(), held.layout.intervals
