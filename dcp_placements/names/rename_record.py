"""What others are to know of a rename: its steps as a checkpoint keeps them, and a rank's keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from dcp_placements.names.numbers import NUMBER, number_finder
from dcp_placements.names.renames import Renames
from dcp_placements.names.renumber import Renumber, Replace
from dcp_placements.names.stacks import Split, Stack, Unstack

FUNCTION = "function"

Step = tuple[str, str, int | None]
"""The class of a rename, its pattern in the checkpoint's keys, and how many numbers there are."""


def renames_in_force(
    rename: object, local: Collection[str], renamed: Collection[str]
) -> tuple[Step, ...]:
    """Return what a checkpoint is to keep of a rename.

    Of a function that is none of the above it is where its numbers stand, as far as the keys of
    this rank show.

    Args:
        rename: The rename.
        local: This rank's keys.
        renamed: The same as the checkpoint's.
    """
    if rename is None:
        return ()
    found: dict[Step, None] = {}
    steps = rename.steps if isinstance(rename, Renames) else (rename,)
    for at, step in enumerate(steps):
        if isinstance(step, Renumber | Stack | Unstack | Split):
            pattern = step.pattern
            for later in steps[at + 1 :]:
                if isinstance(later, Replace):
                    pattern = later(pattern)
            total = step.total if isinstance(step, Renumber | Stack) else None
            found[type(step).__name__, pattern, total] = None
        elif isinstance(step, Replace):
            found[type(step).__name__, str(step), None] = None
        else:
            patterns: set[str] = set()
            if len(local) == len(renamed):
                for one, other in zip(local, renamed, strict=True):
                    if one != other:
                        patterns.update(_renumbered(one, other))
            name = getattr(step, "__qualname__", type(step).__name__)
            for pattern in sorted(patterns) or [name]:
                found[FUNCTION, pattern, None] = None
    return tuple(found)


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


def holder(rename: object) -> Callable[[str], bool] | None:
    """Return whether a rank has a key of the checkpoint, as far as the numbers in it say.

    >>> holds = holder(Renumber("experts.{}", [6, 1], total=8))
    >>> holds("layers.3.experts.6.w1"), holds("layers.3.experts.0.w1"), holds("norm.weight")
    (True, False, True)

    Returns:
        None for a rename that is none of the above: nobody knows what keys it makes.
    """
    steps = rename.steps if isinstance(rename, Renames) else (rename,)
    known: list[tuple[re.Pattern[str], dict[str, set[int]]]] = []
    for at, step in enumerate(steps):
        if isinstance(step, Renumber):
            pattern = step.pattern
            for later in steps[at + 1 :]:
                if isinstance(later, Replace):
                    pattern = later(pattern)
            known.append((number_finder(pattern), step.numbers(pattern)))
        elif not isinstance(step, Replace):
            return None

    def holds(key: str) -> bool:
        for finder, numbers in known:
            found = finder.search("." + key)
            if found is not None:
                selector = found["by"] if "by" in finder.groupindex else ""
                if int(found[NUMBER]) not in numbers.get(selector, ()):
                    return False
        return True

    return holds
