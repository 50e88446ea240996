"""Patterns with a number: the position of the number of an expert or a layer in a key."""

from __future__ import annotations

import re
from functools import lru_cache

from dcp_placements.errors import PlacementError
from dcp_placements.rules.patterns import compile_pattern

NUMBER = "number"
"""The group of a compiled pattern that the number is in."""


def check_one_number(pattern: str) -> None:
    """Refuse a pattern that does not have exactly one ``{}`` and no other placeholder."""
    compile_pattern(pattern)
    if re.findall(r"\{(\w*)\}", pattern) != [""]:
        raise PlacementError(
            f"pattern {pattern!r} must have one {{}} where the number stands, as in 'experts.{{}}'"
        )


@lru_cache(maxsize=1 << 10)
def number_finder(pattern: str) -> re.Pattern[str]:
    """Return a regex that finds the number of ``pattern`` in ``"." + key`` as group ``NUMBER``."""
    named = re.findall(r"\{(\w+)\}", pattern)
    return compile_with_number(pattern, named[0] if named else None)


@lru_cache(maxsize=1 << 10)
def compile_with_number(pattern: str, selector: str | None) -> re.Pattern[str]:
    """Return a regex with ``{}`` of a pattern as group ``NUMBER`` and ``{selector}`` as ``by``."""
    # The placeholders pass through compile_pattern as characters that it leaves alone.
    plain = pattern.replace("{}", "\0")
    if selector is not None:
        plain = plain.replace(f"{{{selector}}}", "\1")
    regex = compile_pattern(plain).pattern
    # Beside a * of the same component the number is all of the digits.
    regex = regex.replace("\0", rf"(?<!\d)(?P<{NUMBER}>\d+)(?!\d)")
    return re.compile(regex.replace("\1", "(?P<by>[^.]+)"))


@lru_cache(maxsize=1 << 10)
def compile_without_number(pattern: str) -> re.Pattern[str]:
    """Return a regex with the position of the missing number as the empty group ``NUMBER``."""
    # A component of its own comes with its dot.
    regex = compile_pattern(pattern.replace("{}", "\0")).pattern
    absent = "\\.\0" if is_component(pattern) else "\0"
    return re.compile(regex.replace(absent, f"(?P<{NUMBER}>)"))


def is_component(pattern: str) -> bool:
    """Whether ``{}`` is a component of the pattern by itself, not a part of one."""
    return "{}" in pattern.split(".")
