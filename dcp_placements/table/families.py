"""Families of numbered names: keys that are alike up to a number.

A ``Renumber`` gives experts and layers their numbers in the whole. A rank that has one of the keys
with number ``n`` has element ``n`` of the family, as another has a box of a tensor. So what shows
that ranks hold the same boxes, and none the others, shows it of numbers, too; and a family of which
``Renumber(total=)`` declares the size has to be whole, as any tensor.

Two ep ranks that hold two experts each of four, and that gave both of them the numbers 0 and 1::

    Family("layers.3.experts.{}", "experts.{}", {{0, 1}: [0]})    # one cohort: their keys are equal
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from dcp_placements.errors import Fault, format_numbers, format_ranks
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import number_in
from dcp_placements.rules.patterns import matches_any
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


def numbers_of(
    fqns: Iterable[str], patterns: Collection[str], states: OptimizerStates
) -> dict[tuple[str, str], set[int]]:
    """Return the numbers that keys have of each family, by its name and pattern.

    Optimizer state counts for nothing: a parameter that was never stepped has none.

    Args:
        fqns: The keys.
        patterns: Where the number stands in the checkpoint's keys, as in ``Renumber``.
        states: Which keys are optimizer state.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for fqn in fqns:
        for pattern in patterns:
            found = number_in(pattern, fqn)
            if found is None:
                continue
            if states.of(fqn) is not None:
                break
            family = f"{found.head}{{}}{found.tail.partition('.')[0]}", pattern
            numbers.setdefault(family, set()).add(found.number)
    return numbers


def families_of(world: World, patterns: Collection[str], states: OptimizerStates) -> list[Family]:
    """Return the families of the keys of a world; the arguments are those of ``numbers_of``."""
    of_tables = [
        numbers_of(chain.from_iterable(table.keys), patterns, states) for table in world.tables
    ]
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


def numbering_faults(
    world: World,
    totals: Mapping[str, Mapping[int, Sequence[int]]],
    waived: Sequence[re.Pattern[str]] = (),
) -> list[Fault]:
    """Return what is missing of the numbers that the ranks' renames give.

    Args:
        world: What the ranks hold.
        totals: By pattern, the ranks by how many numbers they declare.
        waived: Patterns of keys whose families need not have all numbers, as in a save of some
            layers' adapters alone.
    """
    faults = []
    fqns = [fqn for piece in world.pieces for fqn in piece.fqns]
    excused = [fqn for fqn in fqns if matches_any(waived, fqn)]
    families = families_of(world, totals, OptimizerStates(dict.fromkeys(fqns, UNSEEN)))
    for pattern, (total, *others) in totals.items():
        if others:
            ranks = [f"{one} on {format_ranks(totals[pattern][one])}" for one in (total, *others)]
            headline = f"the ranks do not agree on total=: {'; '.join(ranks)}"
            way_out = "way out:     the number in the whole model, on every rank"
            faults.append(Fault(pattern, headline, (way_out,)))
        else:
            of_pattern = [family for family in families if family.pattern == pattern]
            faults += _missing_faults(of_pattern, total, excused)
    return faults


def _missing_faults(
    families: Sequence[Family], total: int, excused: Sequence[str]
) -> Iterator[Fault]:
    """Yield the families of one pattern that are not whole.

    A family of another kind that lacks numbers throughout may: statistics of some layers, beside a
    model of all of them.
    """
    if all(family.numbers == [*range(total)] for family in families):
        return
    # By name without numbers, which is the same for its like in all layers.
    kinds = [re.sub(r"\d+", "#", family.name) for family in families]
    anywhere: set[int] = set()
    of_kind: dict[str, set[int]] = {}
    for kind, family in zip(kinds, families, strict=True):
        anywhere.update(family.numbers)
        of_kind.setdefault(kind, set()).update(family.numbers)
    for kind, family in zip(kinds, families, strict=True):
        elsewhere = anywhere - of_kind[kind]
        missing = sorted(set(range(total)) - set(family.numbers) - elsewhere)
        if missing and next(family.members(excused), None) is None:
            yield Fault(
                family.name,
                f"no rank holds {format_numbers(missing)} of 0-{total - 1}",
                (
                    f"held are:    {format_numbers(family.numbers)}",
                    "way out:     ids that make 0 .. total-1 on all ranks together; where some are "
                    "left out on purpose, waive={pattern: reason} for this save, or total=None for "
                    "all",
                ),
            )
