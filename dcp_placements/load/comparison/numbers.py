"""Numbers that a save or a load renames, and which of them each rank asks for in a load.

A rename gives the local numbers of experts or layers those that they have in the whole model. A
load that lacks it finds every key that it asks for, but the wrong ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.load.comparison.asked import AllAsked
from dcp_placements.load.comparison.parts import Bits, Part, gap_of
from dcp_placements.load.policy import Policy
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.names.renames import NUMBER, number_finder
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord

_DIGITS = re.compile(r"\d+")

NUMBERING = ("Renumber", "Unstack", "function")
"""Renames that leave a number in the checkpoint's keys."""


class Families:
    """The families of numbers that renames give.

    A family is a key up to the component with the number, which ``{}`` stands for.

    Args:
        renames: The renames that were in force.
        stored: The checkpoint's keys, by which optimizer state is recognized.
    """

    def __init__(self, renames: Iterable[SavedRename], stored: Iterable[str]) -> None:
        self._states = OptimizerStates(dict.fromkeys(stored, UNSEEN))
        self._finders: list[tuple[re.Pattern[str], SavedRename]] = [
            (number_finder(step.pattern), step)
            for step in renames
            if step.kind in NUMBERING and step.pattern.count("{}") == 1
        ]

    def __bool__(self) -> bool:
        return bool(self._finders)

    def of(self, fqn: str) -> Iterator[tuple[str, int, SavedRename]]:
        """Yield each family of a key, its number there, and the rename that gave it.

        Optimizer state has none: that of a parameter may be missing.
        """
        dotted = "." + fqn
        for finder, step in self._finders:
            match = finder.search(dotted)
            if match is None:
                continue
            if self._states.of(fqn) is not None:
                return
            start, stop = match.span(NUMBER)
            tail = fqn[stop - 1 :].partition(".")[0]
            yield f"{fqn[: start - 1]}{{}}{tail}", int(match[NUMBER]), step

    def step_of(self, family: str) -> SavedRename | None:
        """Return the rename that gave a family its numbers."""
        steps = (step for name, _, step in self.of(family.replace("{}", "0")) if name == family)
        return next(steps, None)


def number_faults(
    asked: AllAsked,
    families: Families,
    record: SaveRecord | None,
    keys: Sequence[str],
    renames: Mapping[int, Sequence[SavedRename]],
) -> list[Fault]:
    """Return the families of which several ranks ask for one part, and none for the rest.

    Args:
        asked: What all ranks ask for.
        families: Those of the save and of this load.
        record: The checkpoint's; None where it has none.
        keys: The checkpoint's keys that are tensors, in the checkpoint's order.
        renames: By rank, the renames that are in force in this load.
    """
    stored, by_family = _numbers(asked, families, keys)
    faults = []
    for family, ranks_of in by_family.items():
        whole = np.array(sorted(stored[family]))
        if set().union(*ranks_of).issuperset(whole.tolist()):
            continue
        parts: dict[Part, list[int]] = {}
        for numbers, ranks in ranks_of.items():
            bits = np.packbits(np.isin(whole, numbers)).tobytes()
            parts.setdefault((bits, ()), []).extend(ranks)
        gap = gap_of(parts, len(whole))
        if gap is None:
            continue
        here = dict.fromkeys(str(one) for rank in gap.ranks for one in renames.get(rank, ()))
        likely = "rename= of this load gives some ranks the numbers of another rank"
        if not here:
            likely = (
                "rename= was forgotten in this load, so that every rank asks by its local numbers"
            )
        step = families.step_of(family)
        recorded = record is not None and step in record.renames
        faults.append(
            gap.fault(
                family,
                partial(_format_members, whole),
                of="it",
                saved=(f"saved with:  rename={step}",) if recorded else (),
                loaded=f"rename={', '.join(here)}" if here else "no rename=",
                likely=likely,
                way_out=f"{'the rename= of the save' if recorded else 'rename='} in "
                "PlacementLoadPlanner, on each rank with its own numbers",
            )
        )
    return faults


def local_number_faults(
    asked: AllAsked,
    families: Families,
    keys: Sequence[str],
    renames: Mapping[int, Sequence[SavedRename]],
) -> list[Fault]:
    """Return the families of which ranks that load alone ask for the first numbers only.

    Args:
        asked: What these ranks ask for.
        families: Those of the save.
        keys: The checkpoint's keys that are tensors, in the checkpoint's order.
        renames: By rank, the renames that are in force in this load.
    """
    stored, by_family = _numbers(asked, families, keys)
    faults = []
    for family, ranks_of in by_family.items():
        for numbers, ranks in ranks_of.items():
            local = [one for one in ranks if not any(map(_gives_numbers, renames[one]))]
            rest = stored[family].difference(numbers)
            if local and rest and numbers == tuple(range(len(numbers))):
                faults.append(_local_number_fault(family, numbers, rest, families, local))
    return faults


def _gives_numbers(rename: SavedRename) -> bool:
    return rename.kind in NUMBERING


def _numbers(
    asked: AllAsked, families: Families, keys: Sequence[str]
) -> tuple[dict[str, set[int]], dict[str, dict[tuple[int, ...], list[int]]]]:
    """Return the numbers of each family that are stored, and the ranks by those they ask for."""
    stored: dict[str, set[int]] = {}
    by_family: dict[str, dict[tuple[int, ...], list[int]]] = {}
    if not families:
        return stored, by_family
    numbers_of: dict[int, list[tuple[str, int]]] = {}
    for position, fqn in enumerate(keys):
        for family, number, _ in families.of(fqn):
            stored.setdefault(family, set()).add(number)
            numbers_of.setdefault(position, []).append((family, number))
    for ranks, positions, excused in asked.requests:
        requested: dict[str, set[int]] = {}
        for position in positions:
            for family, number in numbers_of.get(position, ()):
                requested.setdefault(family, set()).add(number)
        for family, members in requested.items():
            if family not in excused:
                part = tuple(sorted(members))
                by_family.setdefault(family, {}).setdefault(part, []).extend(ranks)
    return stored, by_family


def _local_number_fault(
    family: str,
    numbers: Iterable[int],
    rest: Iterable[int],
    families: Families,
    ranks: Sequence[int],
) -> Fault:
    return Fault(
        family,
        f"asked for {format_numbers(numbers)} of it, and not for {format_numbers(rest)}, by a load "
        "without the other ranks",
        (
            f"saved with:  rename={families.step_of(family)}",
            "this load:   no rename= that gives numbers",
            "likely:      rename= was forgotten in this load, so that every rank asks by its local "
            "numbers",
            "way out:     the rename= of the save in PlacementLoadPlanner; waive={pattern: reason} "
            "where these are the numbers of the checkpoint",
        ),
        ranks=tuple(ranks),
    )


def _format_members(whole: npt.NDArray[Any], bits: Bits) -> str:
    return format_numbers(whole[bits].tolist())


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as short text.

    >>> format_numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    return format_ranks(numbers).partition(" ")[2]


def total_faults(
    totals: Mapping[str, int | None],
    record: SaveRecord,
    fqns: Iterable[str],
) -> list[Fault]:
    """Return the renames of a load that declare another total than the save's did.

    Args:
        totals: What this load's rename declares, by pattern.
        record: The checkpoint's.
        fqns: The checkpoint's keys that this rank asks for.
    """
    saved = {step.pattern: step for step in record.renames if step.kind == "Renumber"}
    differing = {
        (pattern, step.pattern): step
        for pattern, total in totals.items()
        for step in saved.values()
        if step.total not in (None, total)
    }
    # Patterns of other text are the same declaration where they find the same number of a key.
    matched = {pair: step for pair, step in differing.items() if pair[0] == pair[1]}
    others = {pair: step for pair, step in differing.items() if pair[0] not in saved}
    finders = {pattern: number_finder(pattern) for pair in others for pattern in pair}
    for fqn in fqns if others else ():
        for pair, step in others.items():
            one, other = (finders[pattern].search("." + fqn) for pattern in pair)
            if one is not None and other is not None and one.span(NUMBER) == other.span(NUMBER):
                matched[pair] = step
        if len(matched) == len(differing):
            break
    return [
        Fault(
            pattern,
            f"this load has total={totals[pattern]} of it, but it was saved as one of {step.total}",
            (
                f"saved with:  rename={step}",
                f"this load:   rename=Renumber({pattern!r}, total={totals[pattern]})",
                "likely:      the rename= of another model, whose numbers mean other tensors",
                "way out:     the total= of the save; optional=[pattern] or "
                "waive={pattern: reason} where this model has another number on purpose",
            ),
        )
        for (pattern, _), step in matched.items()
    ]


def unstacked_faults(
    totals: Mapping[str, int], stored: Iterable[str], policy: Policy
) -> list[Fault]:
    """Return the families of which a load asks for the first numbers only, row by row of a stack.

    Args:
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``.
        stored: The checkpoint's keys.
        policy: What is accepted.
    """
    if not totals:
        return []
    states = OptimizerStates(dict.fromkeys(stored, UNSEEN))
    beyond: dict[tuple[str, int], set[int]] = {}
    for fqn in stored:
        for match in _DIGITS.finditer(fqn):
            head, tail = fqn[: match.start()], fqn[match.end() :]
            total = totals.get(f"{head}{{}}{tail}")
            if total is None or states.of(fqn) is not None or policy.excuses(fqn):
                continue
            if (number := int(match[0])) >= total:
                family = f"{head}{{}}{tail.partition('.')[0]}"
                beyond.setdefault((family, total), set()).add(number)
    return [
        Fault(
            family,
            f"this load asks for {format_numbers(range(total))} of it, and not for "
            f"{format_numbers(numbers)}, which the checkpoint has, too",
            (
                f"this load:   a stacked tensor of {total} rows, which rename= unstacks",
                "likely:      a model with fewer of them than the one that was saved",
                "way out:     the model of the save; optional=[pattern] or "
                "waive={pattern: reason} where this model has fewer on purpose",
            ),
        )
        for (family, total), numbers in beyond.items()
    ]
