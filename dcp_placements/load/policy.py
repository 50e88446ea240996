"""What a load accepts, as its user declared it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_placements.errors import PlacementError
from dcp_placements.rules.patterns import compile_pattern


@dataclass(frozen=True, slots=True)
class Policy:
    """What a load accepts.

    Attributes:
        partial: Any key may be missing, as long as one is there; but no part of the optimizer
            state of a parameter while another part is there.
        cast: ``"error"``, ``"warn"`` or ``"allow"``, for what loses precision.
        optional: Patterns of keys that may be missing.
        waived: Patterns of keys whose differences from the save are right.
    """

    partial: bool = False
    cast: str = "warn"
    optional: tuple[re.Pattern[str], ...] = ()
    waived: tuple[re.Pattern[str], ...] = ()

    def is_optional(self, fqn: str) -> bool:
        """Whether a key may be missing by name."""
        return any(pattern.search(f".{fqn}") for pattern in self.optional)

    def waives(self, fqn: str) -> bool:
        """Whether a waiver names a key."""
        return any(pattern.search(f".{fqn}") for pattern in self.waived)

    def excused(self, fqns: Iterable[str]) -> set[str]:
        """Return the keys that are waived, or may be missing by name."""
        if not self.optional and not self.waived:
            return set()
        return {fqn for fqn in fqns if self.excuses(fqn)}

    def excuses(self, fqn: str) -> bool:
        """Whether a key is waived, or may be missing by name."""
        return self.waives(fqn) or self.is_optional(fqn)


def optional_patterns(optional: str | Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that ``optional=`` gives.

    Raises:
        PlacementError: They are no patterns.
    """
    if not isinstance(optional, Iterable):
        raise PlacementError(f"optional={optional!r}: give patterns of keys")
    patterns = (optional,) if isinstance(optional, str) else tuple(optional)
    compiled(patterns)
    return patterns


def compiled(patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Return patterns of keys as ``Policy`` has them.

    Raises:
        PlacementError: They are no patterns.
    """
    return tuple([compile_pattern(pattern) for pattern in patterns])
