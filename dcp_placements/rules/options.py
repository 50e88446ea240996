"""Checks of the options that both planners have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcp_placements.errors import PlacementError
from dcp_placements.rules.patterns import compile_pattern


def check_declaration(
    rules: Any, rename: Any, waive: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the waivers; refuse rules, a rename or waivers that cannot be used.

    Raises:
        PlacementError: Rules or a rename that cannot be called; a waiver without a reason, or one
            for every key.
    """
    if hasattr(rules, "save_planner"):
        raise PlacementError(
            "a Placements stands in the place of rules\n"
            "    way out:     its own .save_planner(...) or .load_planner(...)"
        )
    if rules is not None and not callable(rules):
        raise PlacementError(
            f"rules= is of type {type(rules).__name__}\n"
            "    way out:     PlacementRules({pattern: placement}), a function (fqn, tensor) that "
            "returns a CheckpointPlacement or None, or None for DTensors alone"
        )
    if rename is not None and (isinstance(rename, type) or not callable(rename)):
        raise PlacementError(
            f"rename={rename!r} is no function of a key\n"
            '    way out:     Renumber("experts.{}", ids, total=8), Replace(...), Renames(...), or '
            "another callable key -> key"
        )
    if waive is not None and not isinstance(waive, Mapping):
        raise PlacementError(
            f"waive= must be {{pattern: reason}}, not {type(waive).__name__}: each waiver needs a "
            "reason, which is kept"
        )
    waivers = dict(waive or {})
    for pattern, reason in waivers.items():
        compile_pattern(pattern)
        if not reason:
            raise PlacementError(f"waive={{{pattern!r}: ...}} needs a reason, which is kept")
        if not pattern.replace("*", "").replace(".", ""):
            raise PlacementError(f"waive={{{pattern!r}: ...}} would silence every key: name some")
    return waivers


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise PlacementError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
