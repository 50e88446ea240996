"""Numbers that a save renamed, and who asks for which of them in a load.

A rename gives the local numbers of experts or layers those that they have in the whole. A load that
forgets it, or has that of another rank, finds every key that it asks for: the wrong ones. No rank
can see that; all together can, because several of them ask for the same numbers of a family, and
for the others nobody does.
"""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.names.numbers import NUMBER, number_finder
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord

NUMBERING = ("Renumber", "Unstack", "function")
"""Renames that leave a number in the checkpoint's keys."""

Asked = dict[str, set[int]]
"""Numbers by family: the key up to the component that the number is in, ``{}`` in its place."""


class Families:
    """The families of numbers that a save renamed.

    Args:
        renames: What was in force when it was saved.
        stored: The checkpoint's keys, which tell what is optimizer state.
    """

    def __init__(self, renames: Iterable[SavedRename], stored: Iterable[str]) -> None:
        self._states = OptimizerStates(dict.fromkeys(stored, UNSEEN))
        self._finders: list[tuple[re.Pattern[str], SavedRename]] = []
        for step in renames:
            if step.kind in NUMBERING and step.pattern.count("{}") == 1:
                self._finders.append((number_finder(step.pattern), step))

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

    def numbers(self, fqns: Iterable[str]) -> Asked:
        """Return the numbers that keys have, by family."""
        asked: Asked = {}
        for fqn in fqns:
            for family, number, _ in self.of(fqn):
                asked.setdefault(family, set()).add(number)
        return asked

    def step_of(self, family: str) -> SavedRename | None:
        """Return the rename that gave a family its numbers."""
        steps = (step for name, _, step in self.of(family.replace("{}", "0")) if name == family)
        return next(steps, None)


def packed_numbers(asked: Asked) -> bytes:
    """Return numbers as they travel; layers mostly have the same ones."""
    families: dict[tuple[int, ...], list[str]] = {}
    for family, numbers in sorted(asked.items()):
        families.setdefault(tuple(sorted(numbers)), []).append(family)
    return zlib.compress(pickle.dumps(families), 1) if asked else b""


def _unpacked(packed: bytes) -> dict[tuple[int, ...], list[str]]:
    found: dict[tuple[int, ...], list[str]] = pickle.loads(zlib.decompress(packed))
    return found


def asked_faults(
    asked: Mapping[int, bytes],
    record: SaveRecord,
    stored: Iterable[str],
    renames: Mapping[int, Sequence[str]],
) -> list[Fault]:
    """Return the families of which several ranks ask for the same part, and none for the rest.

    Args:
        asked: By rank, what it asks for, packed.
        record: The checkpoint's.
        stored: The checkpoint's keys.
        renames: By rank, the renames that are in force in this load.
    """
    holders: dict[bytes, list[int]] = {}
    for rank, packed in asked.items():
        if packed:
            holders.setdefault(packed, []).append(rank)
    by_family: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for packed, ranks in holders.items():
        for numbers, families in _unpacked(packed).items():
            for family in families:
                by_family.setdefault(family, {}).setdefault(numbers, []).extend(ranks)
    keys = list(stored)
    saved = Families(record.renames, keys)
    there = saved.numbers(keys) if by_family else {}
    faults = []
    for family, parts in by_family.items():
        together = set().union(*parts)
        missing = there.get(family, set()) - together
        if missing and (twice := _twice(parts)):
            faults.append(_fault(family, parts, missing, twice, saved.step_of(family), renames))
    return faults


def _twice(parts: Mapping[tuple[int, ...], Sequence[int]]) -> set[int]:
    """Return the numbers that are all that a rank asks for, and that another asks for, too.

    Ranks that ask by local numbers ask for ``0 .. n - 1`` each. Parts that only overlap are those
    of ranks with copies of some experts.
    """
    twice: set[int] = set()
    for numbers, ranks in parts.items():
        part = set(numbers)
        if len(ranks) > 1 or any(part < set(other) for other in parts):
            twice |= part
    return twice


def _fault(
    family: str,
    parts: Mapping[tuple[int, ...], Sequence[int]],
    missing: set[int],
    twice: set[int],
    step: SavedRename | None,
    renames: Mapping[int, Sequence[str]],
) -> Fault:
    ordered = sorted(parts.items(), key=lambda part: min(part[1]))
    asked = [f"{format_numbers(numbers)} by {format_ranks(r)}" for numbers, r in ordered[:4]]
    more = f" and {len(ordered) - 4} other parts" if len(ordered) > 4 else ""
    ranks = {rank for _, held in ordered for rank in held}
    here = dict.fromkeys(one for rank in sorted(ranks) for one in renames.get(rank, ()))
    likely = "rename= of this load gives some ranks the numbers of another rank"
    if not here:
        likely = "rename= was forgotten in this load, so that every rank asks by its local numbers"
    return Fault(
        family,
        f"several ranks ask for {format_numbers(twice)} of it, and none for "
        f"{format_numbers(missing)}",
        (
            f"saved with:  rename={step}",
            f"this load:   {'rename=' + ', '.join(here) if here else 'no rename='}",
            f"asked for:   {'; '.join(asked)}{more}",
            f"likely:      {likely}",
            "way out:     the rename= of the save in PlacementLoadPlanner, on each rank with its "
            "own numbers; optional=[pattern] or waive={pattern: reason} where the rest is left "
            "out on purpose",
        ),
    )


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as short text.

    >>> format_numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    return format_ranks(numbers).partition(" ")[2]


def total_faults(
    totals: Iterable[tuple[str, int]],
    record: SaveRecord,
    keys: Iterable[str],
    who: str,
) -> list[Fault]:
    """Return the renames of a load that declare another total than the save's did.

    Args:
        totals: What this load's rename declares, as ``(pattern, total)``.
        record: The checkpoint's.
        keys: The checkpoint's keys that this rank asks for.
        who: What to call this rank.
    """
    declared = dict(totals)
    saved = {step.pattern: step for step in record.renames if step.kind == "Renumber"}
    differing = {
        (pattern, step.pattern): step
        for pattern, total in declared.items()
        for step in saved.values()
        if step.total not in (None, total)
    }
    if not differing:
        return []
    found = {pair: step for pair, step in differing.items() if pair[0] == pair[1]}
    others = {pair: step for pair, step in differing.items() if pair[0] not in saved}
    finders = {pattern: number_finder(pattern) for pair in others for pattern in pair}
    for fqn in keys if others else ():
        for pair, step in others.items():
            one, other = (finders[pattern].search("." + fqn) for pattern in pair)
            if one is not None and other is not None and one.span(NUMBER) == other.span(NUMBER):
                found[pair] = step
        if len(found) == len(differing):
            break
    return [
        Fault(
            pattern,
            f"{who} loads it with total={declared[pattern]}, but it was saved as one of "
            f"{step.total}",
            (
                f"saved with:  rename={step}",
                f"this load:   rename=Renumber({pattern!r}, total={declared[pattern]})",
                "likely:      the rename= of another model, whose numbers mean other tensors",
                "way out:     the total= of the save; optional=[pattern] or "
                "waive={pattern: reason} where this model has another number on purpose",
            ),
        )
        for (pattern, _), step in found.items()
    ]
