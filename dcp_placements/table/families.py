"""Which numbers of a family the ranks hold together: lists of keys that a rename numbers.

A ``Renumber`` gives experts and layers their numbers in the whole. A rank that has a key with
number ``n`` has element ``n`` of the family, as another has a box of a tensor. So what shows that
ranks hold the same boxes, and none the others, shows it of numbers, too; and a family of which the
rename declares the size has to be whole, as any tensor.

Two ep ranks that hold two experts each of four, and that gave both of them the numbers 0 and 1::

    family   Family("layers.3.experts.", "")    Numbering(4, "Renumber('experts.{}', total=4)")
    held     {{0, 1}: [0, 1]}                   numbers, and the positions of the ranks with them
    fault    layers.3.experts.{}: no rank holds 2-3 of 0-3
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from dcp_placements.errors import Fault
from dcp_placements.names.numbers import Family, Numbering, numbers_of
from dcp_placements.rules.patterns import matches_any
from dcp_placements.short_text import format_numbers, format_ranks
from dcp_placements.table.world import World

HeldNumbers = Mapping[frozenset[int], Sequence[int]]
"""By the numbers of a family, the positions in the world of the ranks that have these."""


def held_numbers(world: World, families: Collection[Family]) -> dict[Family, HeldNumbers]:
    """Return which ranks have which numbers of each family of which a rank has any."""
    of_tables = [numbers_of(chain(*table.keys), families) for table in world.tables]
    held: dict[Family, dict[frozenset[int], list[int]]] = {}
    for cohort in world.cohorts:
        for family in families:
            numbers = frozenset[int]().union(*[of_tables[at][family] for at in cohort.tables])
            if numbers:
                held.setdefault(family, {}).setdefault(numbers, []).extend(cohort.ranks.tolist())
    return dict(held)


def numbering_faults(
    world: World,
    declared: Mapping[Family, Mapping[Numbering, Sequence[int]]],
    waived: Sequence[re.Pattern[str]] = (),
) -> list[Fault]:
    """Return what is missing of the numbers that the ranks' renames give.

    Args:
        world: What the ranks hold.
        declared: By family how it is numbered, and the ranks that number it so.
        waived: Patterns of keys whose families need not have all numbers, as in a save of some
            layers' adapters alone.
    """
    faults: list[Fault] = []
    totals: dict[Family, int] = {}
    steps: dict[Family, str] = {}
    for family, numberings in declared.items():
        ranks_of: dict[int, list[int]] = {}
        for numbering, ranks in numberings.items():
            if numbering.total is not None:
                ranks_of.setdefault(numbering.total, []).extend(ranks)
                totals[family], steps[family] = numbering.total, numbering.step
        if len(ranks_of) > 1:
            of_total = [f"{total} on {format_ranks(ranks)}" for total, ranks in ranks_of.items()]
            headline = f"the ranks do not agree on total=: {'; '.join(of_total)}"
            way_out = "way out:     the number in the whole model, on every rank"
            faults.append(Fault(str(family), headline, (way_out,)))
            del totals[family]
    fqns = [fqn for piece in world.pieces for fqn in piece.fqns]
    numbers = numbers_of(fqns, totals)
    missing = {f: set(range(total)).difference(numbers[f]) for f, total in totals.items()}
    if waived and any(missing.values()):
        excused = numbers_of([fqn for fqn in fqns if matches_any(waived, fqn)], totals)
        missing = {f: some for f, some in missing.items() if not excused[f]}
    for family, some in missing.items():
        if some:
            alike = [one for one, step in steps.items() if step == steps[family]]
            details = (
                f"held are:    {format_numbers(sorted(numbers[family]))}",
                f"numbered by: {steps[family]}",
                *_other_lists(family, [one for one in alike if not missing.get(one, {0})]),
                "way out:     ids that make 0 .. total-1 on all ranks together; where some are "
                "left out on purpose, waive={pattern: reason} for this save, or total=None for "
                "all",
            )
            headline = f"no rank holds {format_numbers(sorted(some))} of 0-{totals[family] - 1}"
            faults.append(Fault(str(family), headline, details))
    return faults


def _other_lists(family: Family, whole: Sequence[Family]) -> Iterator[str]:
    """Yield why a family may be another list than those that are whole, and how to say so.

    Args:
        family: The family that lacks numbers.
        whole: Families that the same step numbers, and that lack none.
    """
    if not whole or _any_number(family) == _any_number(whole[0]):
        return
    yield f"likely:      it is another list than {whole[0]}, which is whole"
    pattern = _pattern_of_first(whole[0], family)
    if pattern is not None:
        yield f"or:          Renumber({pattern!r}, ...), which does not number this list"


def _any_number(family: Family) -> str:
    return re.sub(r"\d+", "*", str(family))


def _pattern_of_first(one: Family, other: Family) -> str | None:
    """Return the shortest pattern that finds the first of two families alone; None without one.

    >>> _pattern_of_first(Family("model.layers.", ""), Family("mtp.layers.", ""))
    'model.layers.{}'
    """
    components = _any_number(one).split(".")
    at = next(at for at, component in enumerate(components) if "{}" in component)
    for start in reversed(range(at)):
        pattern = ".".join(components[start:])
        if not f".{_any_number(other)}".endswith(f".{pattern}"):
            return pattern
    return None
