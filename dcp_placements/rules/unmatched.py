"""Whether a pattern of the rules or of a rename matches a key: a typing error declares nothing.

Each rank knows of its own keys only. A pattern is reported where it matches no key on any rank. It
is named as in messages: ``'experts'`` of the rules, ``rename=Replace('module')`` of a rename.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from difflib import get_close_matches

from dcp_placements.errors import Fault, format_names
from dcp_placements.rules.patterns import PlacementRules, Rules

Matches = Mapping[str, bool]
"""By name, whether a pattern matches a key of a rank."""


def rule_matches(rules: Rules | None, matched: Container[str]) -> dict[str, bool]:
    """Return the patterns of rules; ``matched`` has the names of those that matched a key."""
    if not isinstance(rules, PlacementRules) or rules.optional:
        return {}
    return {repr(pattern): repr(pattern) in matched for pattern in rules.patterns}


def matched_nowhere(of_ranks: Iterable[Matches]) -> tuple[str, ...]:
    """Return what no rank has a match for."""
    merged: dict[str, bool] = {}
    for matches in of_ranks:
        for name, is_matched in matches.items():
            merged[name] = is_matched or merged.get(name, False)
    return tuple([name for name, is_matched in merged.items() if not is_matched])


def unmatched_faults(unmatched: Sequence[str], keys: Sequence[str]) -> list[Fault]:
    """Return the fault, or the note, on what matches nothing.

    Args:
        unmatched: What does; for nothing there is no fault.
        keys: Those that there are.
    """
    if not unmatched:
        return []
    details = [f"the keys are {format_names(keys, 4)}"] if keys else []
    known = {component for key in keys for component in key.split(".")}
    declared = " ".join([name.rpartition("(")[2] for name in unmatched])
    for word in dict.fromkeys(re.findall(r"\w+", declared)):
        if word not in known and (near := get_close_matches(word, known, 1)):
            details.append(f"likely:      {word!r} is no component of any key; {near[0]!r} is")
    way_out = "correct the pattern, or drop it; Renames(..., optional=True) may have it"
    details.append(f"way out:     {way_out}")
    return [Fault(", ".join(unmatched), "no key on any rank matches", tuple(details))]
