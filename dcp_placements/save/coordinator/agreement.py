"""Do the ranks agree: on the options, the step and the directory, and on the numbers of experts.

Of the numbers that ``Renumber`` gives, the checkpoint's keys count. Those that are alike up to the
number make a family (``layers.3.mlp.experts.{}``), and the numbers of a family must be ``0 .. total
- 1``. Optimizer state does not count: an expert that was never stepped has none. Nor does a family
of another kind that lacks numbers throughout: statistics of some layers beside a model of all of
them. Of a family with a waived key (a save of some layers' adapters alone) any number may be
missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import NUMBER, number_finder
from dcp_placements.save.local_plan import LocalPlan, Statement
from dcp_placements.table.table import Table

T = TypeVar("T")

_DIGITS = re.compile(r"\d+")
_MOST_SHOWN = 4


def unlike_digests(plans: Sequence[LocalPlan]) -> list[Fault]:
    """Return that ranks were given different ``digests=``, if they were."""
    kinds = _ranks_by([plan.digest_kind for plan in plans], plans)
    if not kinds:
        return []
    return [
        Fault(
            "this save",
            f"the ranks do not agree on digests=: {_shown(kinds)}",
            ("way out:     give every rank's PlacementSavePlanner the same options",),
        )
    ]


def unlike_steps(plans: Sequence[LocalPlan], statements: Sequence[Statement]) -> list[Fault]:
    """Return that the ranks save different training steps, if they do."""
    by_step = _ranks_by([statement.step for statement in statements], plans)
    steps = {step: ranks for step, ranks in by_step.items() if step is not None}
    if len(steps) < 2:
        return []
    return [
        Fault(
            "this save",
            f"the ranks save {len(steps)} different steps: {_shown(dict(sorted(steps.items())))}",
            (
                "reason:      tensors of different training steps make no checkpoint",
                "way out:     set planner.step to the same number on all ranks before each save",
            ),
        )
    ]


def unlike_directories(plans: Sequence[LocalPlan], statements: Sequence[Statement]) -> list[Fault]:
    """Return that ranks write into directories of different names, if they do."""
    targets = _ranks_by([statement.target for statement in statements], plans)
    if not targets:
        return []
    shown = "; ".join(map(format_ranks, list(targets.values())[:_MOST_SHOWN]))
    more = "; ..." if len(targets) > _MOST_SHOWN else ""
    return [
        Fault(
            "this save",
            f"the ranks write into {len(targets)} different directories: {shown}{more}",
            (
                "reason:      .metadata is written into one of them only, and a load looks for "
                "all files beside it",
                "likely:      the name has the rank or a time of day in it",
                "way out:     choose the name on one rank, and broadcast it to the others",
            ),
        )
    ]


def _ranks_by(values: Sequence[T], plans: Sequence[LocalPlan]) -> dict[T, list[int]]:
    """Return the ranks by value; nothing where all have the same."""
    ranks_by: dict[T, list[int]] = {}
    if len(set(values)) > 1:
        for value, plan in zip(values, plans, strict=True):
            ranks_by.setdefault(value, []).append(plan.rank)
    return ranks_by


def _shown(ranks_by: Mapping[T, Sequence[int]]) -> str:
    shown = [f"{value!r} on {format_ranks(ranks)}" for value, ranks in ranks_by.items()]
    return "; ".join(shown[:_MOST_SHOWN]) + ("; ..." if len(shown) > _MOST_SHOWN else "")


def numbering_faults(
    plans: Sequence[LocalPlan],
    statements: Sequence[Statement],
    tables: Sequence[Table],
    waived: Sequence[re.Pattern[str]] = (),
) -> list[Fault]:
    """Return what is missing or held twice of the numbers that the ranks' renames name.

    Args:
        plans: Those of all ranks.
        statements: The same.
        tables: All keys.
        waived: Patterns of keys whose families need not have all numbers.
    """
    totals_of: dict[str, dict[int, list[int]]] = {}
    ranges: dict[tuple[str, str], dict[tuple[int, int], list[int]]] = {}
    for plan, statement in zip(plans, statements, strict=True):
        for numbered in statement.numbered:
            totals = totals_of.setdefault(numbered.pattern, {})
            totals.setdefault(numbered.total, []).append(plan.rank)
            for selector, start, stop in numbered.ranges:
                held = ranges.setdefault((numbered.pattern, selector), {})
                held.setdefault((start, stop), []).append(plan.rank)
    if not totals_of:
        return []
    faults = []
    families, partial = _families(list(totals_of), tables, waived)
    for pattern, totals in totals_of.items():
        if len(totals) > 1:
            faults.append(
                Fault(
                    pattern,
                    f"the ranks do not agree on total=: {_shown(totals)}",
                    ("way out:     the number in the whole model, on every rank",),
                )
            )
            continue
        (total,) = totals
        found = families[pattern]
        anywhere: set[int] = set().union(*found.values())
        alike: dict[str, set[int]] = {}
        for family, numbers in found.items():
            alike.setdefault(_kind(family), set()).update(numbers)
        for family, numbers in found.items():
            elsewhere = anywhere - alike[_kind(family)]
            missing = sorted(set(range(total)) - numbers - elsewhere)
            if missing and family not in partial:
                faults.append(_missing_fault(family, total, numbers, missing))
    for (pattern, _), held in ranges.items():
        faults += _doubled_faults(pattern, held)
    return faults


def _families(
    patterns: Sequence[str], tables: Sequence[Table], waived: Sequence[re.Pattern[str]]
) -> tuple[dict[str, dict[str, set[int]]], set[str]]:
    """Return by pattern the numbers of each of its families, and the families of waived keys."""
    finders = [(number_finder(pattern), pattern) for pattern in patterns]
    families: dict[str, dict[str, set[int]]] = {pattern: {} for pattern in patterns}
    partial: set[str] = set()
    fqns = [fqn for table in tables for fqn in table.fqns]
    states = OptimizerStates(dict.fromkeys(fqns, UNSEEN))
    for fqn in fqns:
        for finder, pattern in finders:
            match = finder.search("." + fqn)
            if match is None:
                continue
            if states.of(fqn) is not None:
                break
            start, stop = match.span(NUMBER)
            # Up to the end of the component: layers differ in what they have inside.
            tail = fqn[stop - 1 :].partition(".")[0]
            family = f"{fqn[: start - 1]}{{}}{tail}"
            families[pattern].setdefault(family, set()).add(int(match[NUMBER]))
            if family not in partial and any(one.search("." + fqn) for one in waived):
                partial.add(family)
    return families, partial


def _kind(family: str) -> str:
    """Return a family without the numbers that tell it from its like in other layers."""
    return _DIGITS.sub("#", family)


def _missing_fault(family: str, total: int, numbers: set[int], missing: Sequence[int]) -> Fault:
    return Fault(
        family,
        f"no rank holds {_format_numbers(missing)} of 0-{total - 1}",
        (
            f"held are:    {_format_numbers(sorted(numbers))}",
            "likely:      a rank's Renumber has the ids of another one, or its total= is not the "
            "model's; or a rank's keys are not in its state dict",
            "way out:     ids that make 0 .. total-1 on all ranks together; where some are left "
            "out on purpose, waive={pattern: reason} for this save, or total=None for all",
        ),
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
