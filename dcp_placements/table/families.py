"""Which numbers of a family the ranks hold together: lists of keys that a rename numbers.

A ``Renumber`` gives experts and layers their numbers in the whole. A rank that has a key with
number ``n`` holds element ``n`` of the family, as it holds a box of a tensor. The checks of boxes
therefore apply to numbers, too: a family whose size the rename declares has to be whole, as any
tensor.

Two ep ranks that hold two experts each of four, and that gave both of them the numbers 0 and 1::

    family   Family("layers.3.experts.", "")    Numbering(4, "Renumber('experts.{}', total=4)")
    held     {{0, 1}: [0, 1]}                   numbers, and the positions of the ranks with them
    fault    layers.3.experts.{}: no rank holds 2-3 of 0-3
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from dcp_placements.errors import Fault
from dcp_placements.names.recorded_numbers import Family, Numberings, numbers_of
from dcp_placements.pages import NAMES_PAGE
from dcp_placements.rules.patterns import matches_any
from dcp_placements.short_text import format_numbers
from dcp_placements.table.world import World

HeldNumbers = Mapping[frozenset[int], Sequence[int]]
"""The positions in the world of the ranks that have each set of numbers of a family."""


def held_numbers(world: World, families: Collection[Family]) -> dict[Family, HeldNumbers]:
    """Return which ranks have which numbers of each family; only families that some rank has."""
    of_tables = [numbers_of(chain(*table.keys), families) for table in world.tables]
    held: dict[Family, dict[frozenset[int], list[int]]] = {}
    for cohort in world.cohorts:
        for family in families:
            numbers = frozenset[int]().union(*[of_tables[table][family] for table in cohort.tables])
            if numbers:
                held.setdefault(family, {}).setdefault(numbers, []).extend(cohort.ranks.tolist())
    return dict(held)


def numbering_faults(
    world: World,
    given: Iterable[Numberings],
    waived: Sequence[re.Pattern[str]] = (),
) -> list[Fault]:
    """Return a fault for each family of which no rank has some numbers below its total.

    Args:
        world: What the ranks hold.
        given: The numberings of all ranks, which agree on the totals.
        waived: Patterns of keys whose families need not have all numbers, as in a save of some
            layers' adapters alone.
    """
    numbered = {
        family: numbering
        for numberings in given
        for family, numbering in numberings.items()
        if numbering.total is not None
    }
    if not numbered:
        return []
    faults: list[Fault] = []
    totals = {family: numbering.total or 0 for family, numbering in numbered.items()}
    steps = {family: numbering.step for family, numbering in numbered.items()}
    fqns = [fqn for piece in world.pieces for fqn in piece.fqns]
    numbers = numbers_of(fqns, totals)
    missing = {f: set(range(total)).difference(numbers[f]) for f, total in totals.items()}
    if waived and any(missing.values()):
        excused = numbers_of([fqn for fqn in fqns if matches_any(waived, fqn)], totals)
        missing = {f: some for f, some in missing.items() if not excused[f]}
    for family, some in missing.items():
        if some:
            of_step = [other for other, step in steps.items() if step == steps[family]]
            held = sorted(numbers[family])
            details = (
                f"held are:    {format_numbers(held)}",
                f"numbered by: {steps[family]}",
                *_smaller_total(held),
                *_other_lists(family, [other for other in of_step if not missing.get(other, {0})]),
                "way out:     ids that make 0 .. total-1 on all ranks together; where some are "
                "left out on purpose, waive={pattern: reason} for this save, or total=None for "
                "all",
                NAMES_PAGE,
            )
            headline = f"no rank holds {format_numbers(sorted(some))} of 0-{totals[family] - 1}"
            faults.append(Fault(str(family), headline, details))
    return faults


def _smaller_total(held: Sequence[int]) -> list[str]:
    """Return a line with the total that the numbers of all ranks make, if they have no gap."""
    is_whole = 0 < len(held) == held[-1] + 1
    return [f"likely:      total={len(held)}, or ranks that lack the last"] if is_whole else []


def _other_lists(family: Family, whole: Sequence[Family]) -> Iterator[str]:
    """Yield lines saying that a family may be another list than the whole ones, with the way out.

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


def _pattern_of_first(first: Family, second: Family) -> str | None:
    """Return the shortest pattern that matches the first of two families alone; None without one.

    >>> _pattern_of_first(Family("model.layers.", ""), Family("mtp.layers.", ""))
    'model.layers.{}'
    """
    components = _any_number(first).split(".")
    numbered = next(index for index, text in enumerate(components) if "{}" in text)
    for start in reversed(range(numbered)):
        pattern = ".".join(components[start:])
        if not f".{_any_number(second)}".endswith(f".{pattern}"):
            return pattern
    return None
