"""Which keys of a checkpoint a pattern of an option matches: ``fqn=``, ``exclude=``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.rules.patterns import compile_pattern
from dcp_placements.short_text import format_names


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a key matches a pattern of ``PlacementRules``.

    Raises:
        CannotLook: The pattern has an empty component.
    """
    try:
        compiled = compile_pattern(pattern)
    except PlacementError as error:
        raise CannotLook(str(error)) from error
    return lambda fqn: fqn == pattern or compiled.search("." + fqn) is not None


def matching_keys(pattern: str | None, keys: Iterable[str]) -> set[str]:
    """Return the keys that match a pattern of ``PlacementRules``; all of them for None.

    Raises:
        CannotLook: No key matches the pattern, or the pattern has an empty component.
    """
    if pattern is None:
        return set(keys)
    matches = matcher(pattern)
    matching = {key for key in keys if matches(key)}
    if not matching:
        there = format_names(sorted(keys), 3) or "none"
        raise CannotLook(f"no key matches {pattern!r}\n    there are:   {there}")
    return matching
