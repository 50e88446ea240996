"""Are all numbers there: those of experts and layers that ``Renumber(total=)`` declares.

A family of numbered keys is a tensor of one dim (see ``table.families``), and has to be whole as
any other. Four ranks with the experts 0-2 and 5-7 of ``total=9``::

    experts.{}: no rank holds 3-4, 8 of 0-8

A family of another kind that lacks numbers throughout may: statistics of some layers, beside a
model of all of them. So may a family with a waived key: a save of some layers' adapters alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.table.families import Families, Family, format_numbers
from dcp_placements.table.world import World

_DIGITS = re.compile(r"\d+")


def numbering_faults(
    world: World,
    totals: Mapping[str, Mapping[int, Sequence[int]]],
    waived: Sequence[re.Pattern[str]] = (),
) -> list[Fault]:
    """Return what is missing of the numbers that the ranks' renames give.

    Args:
        world: What the ranks hold.
        totals: By pattern, the ranks by how many numbers they declare.
        waived: Patterns of keys whose families need not have all numbers.
    """
    faults = [_totals_fault(*one) for one in totals.items() if len(one[1]) > 1]
    fqns = [fqn for piece in world.pieces for fqn in piece.fqns]
    excused = [fqn for fqn in fqns if any(one.search("." + fqn) for one in waived)]
    by_pattern: dict[str, list[Family]] = {}
    for family in Families(totals, fqns).of(world):
        by_pattern.setdefault(family.pattern, []).append(family)
    for pattern, families in by_pattern.items():
        total, *others = totals[pattern]
        if not others:
            faults += _missing_faults(families, total, excused)
    return faults


def _missing_faults(
    families: Sequence[Family], total: int, excused: Sequence[str]
) -> Iterator[Fault]:
    """Yield the families of one pattern that are not whole."""
    if all(family.cover.is_whole((total,)) for family in families):
        return
    anywhere: set[int] = set()
    of_kind: dict[str, set[int]] = {}
    for family in families:
        anywhere.update(family.numbers)
        of_kind.setdefault(_kind(family), set()).update(family.numbers)
    for family in families:
        elsewhere = anywhere - of_kind[_kind(family)]
        missing = sorted(set(range(total)) - set(family.numbers) - elsewhere)
        if missing and next(family.members(excused), None) is None:
            yield Fault(
                family.name,
                f"no rank holds {format_numbers(missing)} of 0-{total - 1}",
                (
                    f"held are:    {format_numbers(family.numbers)}",
                    "likely:      a rank's Renumber has the ids of another one, or its total= is "
                    "not the model's; or a rank's keys are not in its state dict",
                    "way out:     ids that make 0 .. total-1 on all ranks together; where some are "
                    "left out on purpose, waive={pattern: reason} for this save, or total=None for "
                    "all",
                ),
            )


def _kind(family: Family) -> str:
    """Return the name of a family without numbers: the same for its like in all layers."""
    return _DIGITS.sub("#", family.name)


def _totals_fault(pattern: str, totals: Mapping[int, Sequence[int]]) -> Fault:
    text = "; ".join(f"{total} on {format_ranks(ranks)}" for total, ranks in totals.items())
    return Fault(
        pattern,
        f"the ranks do not agree on total=: {text}",
        ("way out:     the number in the whole model, on every rank",),
    )
