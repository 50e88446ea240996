"""Are the numbers that ``Renumber`` gives complete: the coordinator's check over all ranks.

What counts are the checkpoint's keys. Those that are alike up to the number make a family
(``layers.3.mlp.experts.{}``), and the numbers of a family must be ``0 .. total - 1``. Optimizer
state does not count: an expert that was never stepped has none. Nor does a family of another kind
that lacks numbers throughout: statistics of some layers beside a model of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.names.numbers import NUMBER, number_finder
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.save.key_table import KeyTable
from dcp_placements.save.rank_notes import Statement


def numbering_faults(
    ranks: Sequence[int], statements: Sequence[Statement], tables: Sequence[KeyTable]
) -> list[Fault]:
    """Return what is missing or held twice of the numbers that the ranks' renames name.

    Args:
        ranks: The ranks that take part.
        statements: What each of them says.
        tables: All key tables of the save.
    """
    totals_of: dict[str, dict[int, list[int]]] = {}
    ranges: dict[tuple[str, str], dict[tuple[int, int], list[int]]] = {}
    for rank, statement in zip(ranks, statements, strict=True):
        for numbered in statement.numbered:
            totals_of.setdefault(numbered.pattern, {}).setdefault(numbered.total, []).append(rank)
            for selector, start, stop in numbered.ranges:
                held = ranges.setdefault((numbered.pattern, selector), {})
                held.setdefault((start, stop), []).append(rank)
    if not totals_of:
        return []
    faults = []
    families = _Families(list(totals_of))
    states = OptimizerStates({fqn: UNSEEN for table in tables for fqn in table.fqns})
    for table in tables:
        families.note(table.fqns, states)
    for pattern, totals in totals_of.items():
        if len(totals) > 1:
            faults.append(_totals_fault(pattern, totals))
            continue
        (total,) = totals
        found = families.found[pattern]
        anywhere: set[int] = set().union(*found.values())
        alike: dict[str, set[int]] = {}
        for family, numbers in found.items():
            alike.setdefault(_kind(family), set()).update(numbers)
        for family, numbers in found.items():
            elsewhere = anywhere - alike[_kind(family)]
            missing = sorted(set(range(total)) - numbers - elsewhere)
            if missing:
                faults.append(_missing_fault(family, total, numbers, missing))
    for (pattern, _), held in ranges.items():
        faults += _doubled_faults(pattern, held)
    return faults


class _Families:
    def __init__(self, patterns: Sequence[str]) -> None:
        self._finders = [(number_finder(pattern), pattern) for pattern in patterns]
        self.found: dict[str, dict[str, set[int]]] = {pattern: {} for pattern in patterns}

    def note(self, fqns: Iterable[str], states: OptimizerStates) -> None:
        for fqn in fqns:
            for finder, pattern in self._finders:
                match = finder.search("." + fqn)
                if match is None:
                    continue
                if states.of(fqn) is not None:
                    break
                start, stop = match.span(NUMBER)
                # Up to the end of the component: layers differ in what they have inside.
                tail = fqn[stop - 1 :].partition(".")[0]
                family = f"{fqn[: start - 1]}{{}}{tail}"
                numbers = self.found[pattern].setdefault(family, set())
                numbers.add(int(match[NUMBER]))


def _kind(family: str) -> str:
    """Return a family without the numbers that tell it from its like in other layers."""
    return _DIGITS.sub("#", family)


_DIGITS = re.compile(r"\d+")


def _missing_fault(family: str, total: int, numbers: set[int], missing: Sequence[int]) -> Fault:
    return Fault(
        family,
        f"no rank holds {_format_numbers(missing)} of 0-{total - 1}",
        (
            f"held are:    {_format_numbers(sorted(numbers))}",
            "likely:      a rank's Renumber has the ids of another one, or its total= is not the "
            "model's; or a rank's keys are not in its state dict",
            "way out:     ids that make 0 .. total-1 on all ranks together; total=None where some "
            "are left out on purpose",
        ),
    )


def _totals_fault(pattern: str, totals: dict[int, list[int]]) -> Fault:
    text = "; ".join(f"{total} on {format_ranks(ranks)}" for total, ranks in totals.items())
    return Fault(
        pattern,
        f"the ranks do not agree on total=: {text}",
        ("way out:     the number in the whole model, on every rank",),
    )


def _doubled_faults(pattern: str, held: dict[tuple[int, int], list[int]]) -> Iterable[Fault]:
    ordered = sorted(held)
    for one, other in pairwise(ordered):
        if other[0] < one[1]:
            both = range(other[0], min(one[1], other[1]))
            yield Fault(
                pattern,
                f"{_format_numbers(both)} of it are held twice",
                (
                    f"they hold:   {_format_numbers(range(*one))} on {format_ranks(held[one])}; "
                    f"{_format_numbers(range(*other))} on {format_ranks(held[other])}",
                    "likely:      the ranks do not agree on the counts, or on who comes first",
                    "way out:     one list of counts on all ranks; where copies are meant, ids= as "
                    "a list instead of a range",
                ),
            )


def _format_numbers(numbers: Sequence[int]) -> str:
    return format_ranks(numbers).partition(" ")[2] if len(numbers) else "nothing"
