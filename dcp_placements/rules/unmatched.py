"""Whether a pattern of the rules or of a rename matches a key: a typing error declares nothing.

Each rank knows of its own keys only. A pattern is reported where it matches no key on any rank.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from dcp_placements.errors import Fault, format_names
from dcp_placements.rules.patterns import PlacementRules, Rules, compile_pattern, why_unmatched


class Declared(NamedTuple):
    """A pattern that a user declares.

    Attributes:
        pattern: The pattern, as ``PlacementRules`` name it.
        step: The class of the step of a rename that has it; empty for a pattern of the rules.
    """

    pattern: str
    step: str = ""

    def __str__(self) -> str:
        return f"rename={self.step}({self.pattern!r})" if self.step else repr(self.pattern)


Matches = Mapping[Declared, bool]
"""Whether a key of a rank matches what should match a key on some rank."""


def rule_matches(rules: Rules | None, matched: Container[str]) -> dict[Declared, bool]:
    """Return the patterns of rules; ``matched`` has the names of those that matched a key."""
    if not isinstance(rules, PlacementRules) or rules.optional:
        return {}
    return {Declared(pattern): repr(pattern) in matched for pattern in rules.patterns}


def matched_nowhere(of_ranks: Iterable[Matches]) -> tuple[Declared, ...]:
    """Return what no rank has a match for."""
    merged: dict[Declared, bool] = {}
    for matches in of_ranks:
        for declared, is_matched in matches.items():
            merged[declared] = is_matched or merged.get(declared, False)
    return tuple(declared for declared, is_matched in merged.items() if not is_matched)


def names_of(unmatched: Iterable[Declared]) -> tuple[str, ...]:
    """Return the names for reports: patterns of rules, and steps of renames with theirs."""
    return tuple(str(one) if one.step else one.pattern for one in unmatched)


def unmatched_faults(unmatched: Sequence[Declared], keys: Sequence[str]) -> list[Fault]:
    """Return the fault, or the note, on what matches nothing.

    Args:
        unmatched: What does; for nothing there is no fault.
        keys: Those that the likely cause is derived from.
    """
    if not unmatched:
        return []
    details = [f"the keys are {format_names(keys, 4)}"] if keys else []
    for one in unmatched:
        if reason := _likely_cause(one, keys):
            of = f"for {one}, " if len(unmatched) > 1 else ""
            details.append(f"likely:      {of}{reason}")
    way_out = "way out:     correct the pattern, or drop it"
    if any(one.step for one in unmatched):
        way_out += "; Renames(..., optional=True) where steps may match nothing"
    names = ", ".join(map(str, unmatched))
    return [Fault(names, "no key on any rank matches", (*details, way_out))]


def _likely_cause(declared: Declared, keys: Sequence[str]) -> str | None:
    if not declared.step:
        return why_unmatched(declared.pattern, keys)
    starred = re.sub(r"\{\w*\}", "*", declared.pattern)
    if any(compile_pattern(starred).search(f".{key}") for key in keys):
        return "the keys that all steps leave match it: the order of the steps"
    return why_unmatched(starred, keys)
