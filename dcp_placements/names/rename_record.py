"""A rename as others see it: the steps that a checkpoint keeps, and the keys of a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from dcp_placements.names.numbers import NUMBER, number_finder
from dcp_placements.names.renames import Renames, declared_step, expected_steps, steps_of
from dcp_placements.names.renumber import Renumber, Replace
from dcp_placements.names.stacks import Split, Stack, Unstack
from dcp_placements.rules.matches import Declared

FUNCTION = "function"

Step = tuple[str, str, int | None]
"""The class of a rename, its pattern in the checkpoint's keys, and the count of numbers."""


def renames_in_force(
    rename: object, local: Collection[str], renamed: Collection[str]
) -> tuple[Step, ...]:
    """Return the steps of a rename that a checkpoint keeps.

    Of a user's function it keeps where numbers change, as far as the keys of this rank show.

    Args:
        rename: The rename.
        local: This rank's keys.
        renamed: The same as the checkpoint's.
    """
    if rename is None:
        return ()
    kept: dict[Step, None] = {}
    renames = _steps_of(rename)
    for at, step in enumerate(renames.flat):
        if isinstance(step, Renumber | Stack | Unstack | Split):
            pattern = renames.pattern_after(at, step.pattern)
            total = step.total if isinstance(step, Renumber | Stack) else None
            kept[type(step).__name__, pattern, total] = None
        elif isinstance(step, Replace):
            kept[type(step).__name__, str(step), None] = None
        else:
            patterns: set[str] = set()
            if len(local) == len(renamed):
                for one, other in zip(local, renamed, strict=True):
                    if one != other:
                        patterns.update(_renumbered(one, other))
            name = getattr(step, "__qualname__", type(step).__name__)
            for pattern in sorted(patterns) or [name]:
                kept[FUNCTION, pattern, None] = None
    return tuple(kept)


def _steps_of(rename: Any) -> Renames:
    return rename if isinstance(rename, Renames) else Renames(rename)


def _renumbered(local: str, renamed: str) -> Iterator[str]:
    """Yield a pattern for each number that differs between two names of one tensor.

    >>> list(_renumbered("experts.0.w1", "model.experts.4.w1"))
    ['experts.{}']
    """
    one, other = _DIGITS.split(local), _DIGITS.split(renamed)
    # From the end, as long as the text is the same: a prefix may have been put before it.
    for at in range(1, min(len(one), len(other)) - 1, 2):
        component = one[-at - 2].rpartition(".")[2]
        if one[-at] != other[-at] or component != other[-at - 2].rpartition(".")[2]:
            return
        if one[-at - 1] != other[-at - 1]:
            head = "".join(other[: -at - 1])
            before, _, stem = head.rpartition(".")
            pattern = f"{stem}{{}}{other[-at].partition('.')[0]}"
            yield f"{before.rpartition('.')[2]}.{pattern}" if before and not stem else pattern


_DIGITS = re.compile(r"(\d+)")


Numbers = tuple[tuple[str, tuple[tuple[str, frozenset[int]], ...]], ...]
"""``(pattern in the checkpoint's keys, ((selector, numbers), ...))`` of each ``Renumber``."""


def held_numbers(rename: object) -> Numbers | None:
    """Return the numbers that determine which keys of the checkpoint a rank has.

    >>> held_numbers(Renumber("experts.{}", [6, 1], total=8))
    (('experts.{}', (('', frozenset({1, 6})),)),)

    Returns:
        None for a function of the user's: its keys are not known in advance.
    """
    renames = _steps_of(rename)
    numbers = []
    for at, step in enumerate(renames.flat):
        if isinstance(step, Renumber):
            pattern = renames.pattern_after(at, step.pattern)
            by_selector = step.numbers(pattern).items()
            numbers.append((pattern, tuple([(name, frozenset(ids)) for name, ids in by_selector])))
        elif not isinstance(step, Replace):
            return None
    return tuple(numbers)


def stored_numbers(rename: Any) -> dict[Declared, str]:
    """Return, by ``Renumber`` of a rename, the pattern that keys of the checkpoint should match.

    Nothing of a rename with other steps than ``Renumber`` and ``Replace``, after which the keys may
    have no number, and of ``Renames(..., optional=True)``.
    """
    renames, expected = Renames(*steps_of(rename)), set(expected_steps(rename))
    if held_numbers(renames) is None:
        return {}
    return {
        declared_step(step): renames.pattern_after(at, step.pattern)
        for at, step in enumerate(renames.flat)
        if isinstance(step, Renumber) and step in expected
    }


def number_matches(numbers: Mapping[Declared, str], keys: Collection[str]) -> dict[Declared, bool]:
    """Return whether a key of the checkpoint has a number of each, as ``stored_numbers`` has it."""
    return {
        declared: any(number_in(pattern, key) for key in keys)
        for declared, pattern in numbers.items()
    }


def number_in(pattern: str, key: str) -> tuple[str, int] | None:
    """Return selector and number of a pattern in a key of the checkpoint; None without a match."""
    finder = number_finder(pattern)
    match = finder.search("." + key)
    if match is None:
        return None
    return match["by"] if "by" in finder.groupindex else "", int(match[NUMBER])


def holder(rename: object) -> Callable[[str], bool] | None:
    """Return a test of whether a rank has a key of the checkpoint, by the numbers in the key.

    >>> holds = holder(Renumber("experts.{}", [6, 1], total=8))
    >>> holds("layers.3.experts.6.w1"), holds("layers.3.experts.0.w1"), holds("norm.weight")
    (True, False, True)

    Returns:
        None for a function of the user's: its keys are not known in advance.
    """
    held = held_numbers(rename)
    if held is None:
        return None
    numbered = [(pattern, dict(numbers)) for pattern, numbers in held]

    def holds(key: str) -> bool:
        for pattern, numbers in numbered:
            at = number_in(pattern, key)
            if at is not None and at[1] not in numbers.get(at[0], ()):
                return False
        return True

    return holds
