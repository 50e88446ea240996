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
from dcp_placements.rules.patterns import matches_any
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
    faults = []
    fqns = [fqn for piece in world.pieces for fqn in piece.fqns]
    excused = [fqn for fqn in fqns if matches_any(waived, fqn)]
    families = Families(totals, fqns).of(world)
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
    """Yield the families of one pattern that are not whole."""
    if all(family.numbers == [*range(total)] for family in families):
        return
    # By name without numbers, which is the same for its like in all layers.
    kinds = [_DIGITS.sub("#", family.name) for family in families]
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
