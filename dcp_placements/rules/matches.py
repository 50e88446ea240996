"""Whether what a user declares by pattern matches a key: a typing error declares nothing.

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
        form: How the option is written, ``{}`` for the pattern.
        pattern: The pattern, as ``PlacementRules`` name it.
    """

    form: str
    pattern: str

    def __str__(self) -> str:
        return self.form.format(repr(self.pattern))


OF_RULES = "{}"
"""The form of a pattern of the rules."""

Matches = Mapping[Declared, bool]
"""Whether a key of a rank matches what should match a key on some rank."""


def rule_matches(rules: Rules | None, matched: Container[str]) -> dict[Declared, bool]:
    """Return the patterns of rules; ``matched`` has the names of those that matched a key."""
    if not isinstance(rules, PlacementRules) or rules.optional:
        return {}
    return {Declared(OF_RULES, pattern): repr(pattern) in matched for pattern in rules.patterns}


def option_matches(
    option: str, patterns: Iterable[str], keys: Iterable[str]
) -> dict[Declared, bool]:
    """Return the patterns of an option, such as ``waive``, whose keys are the checkpoint's."""
    regexes = {pattern: compile_pattern(_with_stars(pattern)) for pattern in patterns}
    return {
        Declared(f"{option}={{}}", pattern): any(regex.search(f".{key}") for key in keys)
        for pattern, regex in regexes.items()
    }


def matched_nowhere(of_ranks: Iterable[Matches]) -> tuple[Declared, ...]:
    """Return what no rank has a match for."""
    merged: dict[Declared, bool] = {}
    for matches in of_ranks:
        for declared, is_matched in matches.items():
            merged[declared] = is_matched or merged.get(declared, False)
    return tuple(declared for declared, is_matched in merged.items() if not is_matched)


def names_of(unmatched: Iterable[Declared]) -> tuple[str, ...]:
    """Return the names for reports: the patterns of rules alone, those of options with them."""
    return tuple(one.pattern if one.form == OF_RULES else str(one) for one in unmatched)


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
    if any(one.form.startswith("rename=") for one in unmatched):
        way_out += "; Renames(..., optional=True) where steps may match nothing"
    names = ", ".join(map(str, unmatched))
    return [Fault(names, "no key on any rank matches", (*details, way_out))]


def _likely_cause(declared: Declared, keys: Sequence[str]) -> str | None:
    pattern = declared.pattern
    if declared.form == OF_RULES:
        return why_unmatched(pattern, keys)
    starred = _with_stars(pattern)
    if any(compile_pattern(starred).search(f".{key}") for key in keys):
        return "the keys that all steps leave match it: the order of the steps"
    return why_unmatched(starred, keys)


def _with_stars(pattern: str) -> str:
    """Return a pattern with ``*`` for the placeholders of a rename."""
    return re.sub(r"\{\w*\}", "*", pattern)
