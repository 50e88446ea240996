"""Checks of what a planner is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Any, TypeVar, cast

from dcp_placements.errors import PlacementError
from dcp_placements.rules.patterns import compile_pattern

F = TypeVar("F", bound=Callable[..., Any])


def of_instance(method: F) -> F:
    """Let a method say so where it is called on the class instead of an instance.

    ``dcp.save(..., planner=PlacementSavePlanner)`` would end in a text about arguments.
    """
    return cast(F, _OfInstance(method))


class _OfInstance:
    """A method that knows its class; on an instance an ordinary one."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._owner: type = object
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        if instance is not None:
            bound: Callable[..., Any] = self._method.__get__(instance, owner)
            return bound

        def unbound(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], self._owner):
                return self._method(*args, **kwargs)
            raise PlacementError(
                f"planner={owner.__name__} is a class, not a planner\n"
                f"    way out:     an instance: planner={owner.__name__}(rules)"
            )

        return update_wrapper(unbound, self._method)


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
