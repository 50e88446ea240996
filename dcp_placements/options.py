"""Checks of what a planner is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcp_placements.errors import PlacementError
from dcp_placements.rules import compile_pattern


def check_rules(rules: Any) -> None:
    """Refuse what cannot be asked for a placement."""
    if hasattr(rules, "save_planner"):
        raise PlacementError(
            "a Placements stands in the place of rules\n"
            "    way out:     its own .save_planner(...) or .load_planner(...)"
        )
    if rules is not None and not callable(rules):
        raise PlacementError(
            "rules must be PlacementRules, a callable (fqn, tensor) -> CheckpointPlacement or "
            f"None, or None, not {type(rules).__name__}"
        )


def check_rename(rename: Any) -> None:
    """Refuse what cannot be called with a key."""
    if rename is not None and not callable(rename):
        raise PlacementError(
            "rename= must be Renumber, Replace, Renames or another callable key -> key, or None, "
            f"not {type(rename).__name__}"
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse an option that there is not."""
    if value not in choices:
        raise PlacementError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_waivers(waive: Mapping[str, str] | None) -> dict[str, str]:
    """Return the waivers; refuse one without a reason, and one for everything."""
    checked = dict(waive or {})
    for pattern, reason in checked.items():
        compile_pattern(pattern)
        if not reason:
            raise PlacementError(f"waive={{{pattern!r}: ...}} needs a reason, which is kept")
        if not pattern.replace("*", "").replace(".", ""):
            raise PlacementError(f"waive={{{pattern!r}: ...}} would silence every key: name some")
    return checked
