"""Which file holds each box of a checkpoint that is rewritten for a world: the one rule.

A box goes into the file of the lowest rank that holds it. A rank whose boxes no other holds then
reads one file; replicas read that of the lowest among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_placements.layout.sharding import Box
from dcp_placements.offline.rehearsals.costs import Part, RankPart, TensorClass


@dataclass(slots=True, eq=False)
class OwnedTensors:
    """Tensors of one class of which the same ranks own the same boxes."""

    tensors: TensorClass  # the class
    members: list[int]  # their positions in it
    owners: dict[Box, int]  # the rank by box; empty for tensors that no rank has

    @property
    def fqns(self) -> list[str]:
        """Their keys."""
        return [self.tensors.fqns[member] for member in self.members]


class Owners:
    """The owner of every box. Ranks are added in their order."""

    def __init__(self) -> None:
        # Of each class its parts, and the lowest rank that holds each box of them.
        self._parts: dict[TensorClass, dict[Any, tuple[Part, dict[Box, int]]]] = {}
        self._boxes: dict[Any, tuple[Box, ...]] = {}
        self._groups: dict[TensorClass, list[OwnedTensors]] = {}
        self._files: dict[Any, frozenset[int]] = {}

    def add(self, rank: int, held: RankPart) -> None:
        """Add what a rank holds of a part."""
        if held.content in self._boxes:
            return  # a lower rank holds the same
        tensors = held.part.tensors
        boxes = tuple(dict.fromkeys(chunk.box for chunk in held.layout.chunks()))
        if 0 in tensors.shape:
            boxes = (Box.whole(tensors.shape),)
        self._boxes[held.content] = boxes
        parts = self._parts.setdefault(tensors, {})
        _, lowest = parts.setdefault(held.part.key, (held.part, {}))
        for box in boxes:
            lowest.setdefault(box, rank)

    def groups(self, tensors: TensorClass) -> list[OwnedTensors]:
        """Return the tensors of a class with their owners, when all ranks are added."""
        if tensors not in self._groups:
            parts = list(self._parts.get(tensors, {}).values())
            parts_of: list[list[int]] = [[] for _ in tensors.fqns]
            for number, (part, _) in enumerate(parts):
                for member in part.members.tolist():
                    parts_of[member].append(number)
            alike: dict[tuple[int, ...], list[int]] = {}
            for member, numbers in enumerate(parts_of):
                alike.setdefault(tuple(numbers), []).append(member)
            groups = self._groups[tensors] = []
            for numbers_of_parts, members in alike.items():
                owners: dict[Box, int] = {}
                for number in numbers_of_parts:
                    for box, rank in parts[number][1].items():
                        owners[box] = min(rank, owners.get(box, rank))
                groups.append(OwnedTensors(tensors, members, owners))
        return self._groups[tensors]

    def ranks(self, held: RankPart) -> frozenset[int]:
        """Return the ranks in whose files a rank finds a part, when all ranks are added."""
        if held.content not in self._files:
            members = set(held.part.members.tolist())
            self._files[held.content] = frozenset(
                group.owners[box]
                for group in self.groups(held.part.tensors)
                if not members.isdisjoint(group.members)
                for box in self._boxes[held.content]
            )
        return self._files[held.content]
