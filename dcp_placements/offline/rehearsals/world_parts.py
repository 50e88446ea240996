"""What each rank of a world holds of a checkpoint, by the rules alone; the world need not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from dcp_placements.errors import PlacementError
from dcp_placements.layout.sharding import LayoutError, Sharding
from dcp_placements.names.renames import held_numbers, number_in, steps
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import MeshAxes, rules_at
from dcp_placements.offline.rehearsals.costs import Part, RankPart, parts_by_rule, tensor_classes
from dcp_placements.offline.rehearsals.refusals import Refusals
from dcp_placements.offline.views.cutting import (
    cut_signature,
    fsdp_axes,
    in_mesh_order,
    layout_at,
    whole_sharding,
)
from dcp_placements.rules.matches import (
    Declared,
    Matches,
    matched_nowhere,
    rule_matches,
)
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules, Rules, asked, rule_name
from dcp_placements.rules.placement import CheckpointPlacement


class RankParts(NamedTuple):
    """What one rank holds."""

    rank: int  # its number, the last axis fastest
    coordinate: tuple[int, ...]  # its position along each axis
    parts: list[RankPart]  # its tensors, by class and rule; those whose rule fits them
    rename: Any  # its rename; None without one


class WorldParts:
    """What all ranks hold, rank after rank.

    Args:
        checkpoint: The checkpoint.
        function: Called with each rank's place in the mesh, as ``rehearse`` has it.
        axes: The mesh.
        fsdp: Axes over which FSDP cuts dim 0, as ``rehearse`` has it.
        expected: The keys to include; None for all.

    Attributes:
        checkpoint: The checkpoint.
        axes: The mesh.
        classes: The tensors by class.
        file_numbers: The number of every data file, by name.
        refusals: What a load on the ranks seen so far would be refused for.

    Raises:
        CannotLook: An axis in ``fsdp`` is unknown.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        function: Callable[[MeshCoordinate], Any],
        axes: MeshAxes,
        fsdp: Sequence[str],
        expected: set[str] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._function = function
        self.axes = dict(axes)
        self._fsdp = in_mesh_order(axes, fsdp)
        self.file_numbers = {name: number for number, name in enumerate(checkpoint.files)}
        self.classes = tensor_classes(checkpoint, expected, self.file_numbers)
        self.refusals = Refusals(checkpoint.metadata, self.axes)
        self._matches: list[Matches] = []  # of rules
        self._numbers: dict[Declared, str] = {}
        self._parts: dict[tuple[tuple[str, ...], str], list[Part]] = {}
        self._shardings: dict[Any, Sharding] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    def ranks(self) -> Iterator[RankParts]:
        """Yield what each rank holds, after its refusals are added.

        Raises:
            CannotLook: The function fails, or returns no rules.
        """
        for rank, coordinate in enumerate(product(*map(range, self.axes.values()))):
            rules, rename, waive = rules_at(self._function, self.axes, rank)
            parts = self._parts_of(rules, rename)
            held = [p for part in parts if (p := self._rank_part(rank, coordinate, part, rules))]
            for one in held:
                self.refusals.check_local_shape(rank, coordinate, one, renamed=rename is not None)
            self.refusals.compare_with_save(rank, parts, held, rename, waive)
            yield RankParts(rank, coordinate, held, rename)

    def unmatched(self) -> tuple[Declared, ...]:
        """Return what the ranks seen so far declare by pattern and no key matches."""
        keys = [fqn for tensors in self.classes for fqn in tensors.fqns]
        numbers = {
            declared: any(number_in(pattern, key) for key in keys)
            for declared, pattern in self._numbers.items()
        }
        return matched_nowhere([*self._matches, numbers])

    def _parts_of(self, rules: Rules, rename: Any) -> list[Part]:
        """Return the tensors that a rank has, by class and rule."""
        numbers = held_numbers(rename)
        for step in () if numbers is None else steps(rename):
            if step.declared is not None and step.kind == "Renumber":
                self._numbers[step.declared] = step.pattern
        if not isinstance(rules, PlacementRules):
            return parts_by_rule(
                self.classes,
                lambda fqn, tensors: cut_signature(asked(rules, fqn, tensors.example)),
                numbers,
            )
        # Ranks with equal patterns and equal numbers have equal parts.
        key = (rules.patterns, "" if numbers is None else repr(rename))
        if key not in self._parts:
            parts = parts_by_rule(self.classes, lambda fqn, _: rules.pattern_of(fqn), numbers)
            matched = {repr(rules.pattern_of(part.fqn)) for part in parts if part.tensors.shape}
            self._matches.append(rule_matches(rules, matched))
            self._parts[key] = parts
        return self._parts[key]

    def _rank_part(
        self, rank: int, coordinate: Sequence[int], part: Part, rules: Rules
    ) -> RankPart | None:
        """Return how a rank holds a part; None, and a fault, if its rule does not fit."""
        tensors = part.tensors
        placement = asked(rules, part.fqn, tensors.example) if tensors.shape else None
        try:
            return self._cut(coordinate, part, placement, rules)
        except (PlacementError, LayoutError) as error:
            if tensors.are_steps:
                # The rule is that of the parameter, and planners ask none about scalars.
                return self._cut(coordinate, part, None, rules)
            detail = f"by rule:     {rule_name(rules, part.fqn)}"
            for fqn in part.fqns:
                self.refusals.add(rank, fqn, str(error), detail)
            return None

    def _cut(
        self,
        coordinate: Sequence[int],
        part: Part,
        placement: CheckpointPlacement | None,
        rules: Rules,
    ) -> RankPart:
        """Return how a rank holds a part by a placement, which may not fit it."""
        shape = part.tensors.shape
        rule = None if placement is None else rule_name(rules, part.fqn)
        own = fsdp_axes(shape, placement, self._fsdp)
        key = (part.tensors, cut_signature(placement))
        if key not in self._shardings:
            self._shardings[key] = whole_sharding(shape, placement, self.axes, own)
        sharding = self._shardings[key]
        layout = layout_at(sharding, placement, self.axes, own, coordinate)
        return RankPart(part, placement, rule, key, own, sharding, layout)
