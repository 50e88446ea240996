"""Families of numbered names: keys that are alike up to a number.

A ``Renumber`` gives experts and layers their numbers in the whole. A rank that has one of the keys
with number ``n`` has element ``n`` of the family, as another has a box of a tensor. So what shows
that ranks hold the same boxes, and none the others, shows it of numbers, too.

Two ep ranks that hold two experts each of four, and that gave both of them the numbers 0 and 1::

    Family("layers.3.experts.{}", "experts.{}", {{0, 1}: [0]})    # one cohort: their keys are equal
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from dcp_placements.errors import format_ranks
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import number_in
from dcp_placements.table.world import World


class Family(NamedTuple):
    """Keys that are alike up to a number.

    Attributes:
        name: A key up to the component with the number, which ``{}`` stands for: layers differ in
            what they have inside.
        pattern: What found the number.
        cohorts: By the numbers that they have, positions in ``World.cohorts``, whose ranks have
            equal keys.
    """

    name: str
    pattern: str
    cohorts: dict[frozenset[int], list[int]]

    @property
    def numbers(self) -> list[int]:
        """The numbers that there are, ascending."""
        return sorted(frozenset[int]().union(*self.cohorts))

    def parts(self, world: World) -> dict[frozenset[int], list[int]]:
        """Return the ranks of a world by the numbers that they have."""
        return {
            part: [rank for at in cohorts for rank in world.cohorts[at].ranks.tolist()]
            for part, cohorts in self.cohorts.items()
        }

    def members(self, fqns: Iterable[str]) -> Iterator[str]:
        """Yield the keys that are of it."""
        head, _, tail = self.name.partition("{}")
        member = re.compile(rf"{re.escape(head)}\d+{re.escape(tail)}(\.|$)")
        return (fqn for fqn in fqns if member.match(fqn))


class Families:
    """Finds the families of keys.

    Optimizer state counts for nothing: a parameter that was never stepped has none.

    Args:
        patterns: Where the number stands in the checkpoint's keys, as in ``Renumber``.
        fqns: All keys, by which optimizer state is recognized.
    """

    def __init__(self, patterns: Iterable[str], fqns: Iterable[str]) -> None:
        self._states = OptimizerStates(dict.fromkeys(fqns, UNSEEN))
        self._patterns = list(patterns)

    def numbers(self, fqns: Iterable[str]) -> dict[tuple[str, str], set[int]]:
        """Return the numbers that keys have of each family, by its name and pattern."""
        numbers: dict[tuple[str, str], set[int]] = {}
        for fqn in fqns if self._patterns else ():
            for pattern in self._patterns:
                found = number_in(pattern, fqn)
                if found is None:
                    continue
                if self._states.of(fqn) is not None:
                    break
                family = f"{found.head}{{}}{found.tail.partition('.')[0]}", pattern
                numbers.setdefault(family, set()).add(found.number)
        return numbers

    def of(self, world: World) -> list[Family]:
        """Return the families of the keys of a world, with who has which number."""
        of_tables = [self.numbers(chain.from_iterable(table.keys)) for table in world.tables]
        families: dict[tuple[str, str], Family] = {}
        for at, cohort in enumerate(world.cohorts):
            mine: dict[tuple[str, str], set[int]] = {}
            for table in cohort.tables:
                for family, numbers in of_tables[table].items():
                    mine.setdefault(family, set()).update(numbers)
            for family, numbers in mine.items():
                one = families.setdefault(family, Family(*family, {}))
                one.cohorts.setdefault(frozenset(numbers), []).append(at)
        return list(families.values())


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as short text.

    >>> format_numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    return format_ranks(numbers).partition(" ")[2]
