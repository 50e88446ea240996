"""What both planners have in common: options, and the state of one save or load apart from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from dcp_placements.errors import PlacementError
from dcp_placements.rules.patterns import compile_pattern

Run = TypeVar("Run")


class OneRunPlanner(Generic[Run]):
    """A planner that keeps its options, and in ``_run`` the state of one save or load.

    Each thread has the run that it began: an ``async_save`` may still write while the next save
    begins. A thread that began none has the latest. Pickled the planner is the options alone: the
    state of a run is not sent to another process.

    Attributes:
        run_class: Makes the state of a run that has not begun.
    """

    run_class: ClassVar[Callable[[], Any]]
    _latest: Run

    def __getstate__(self) -> dict[str, Any]:
        runs = ("_latest", "_of_thread")
        return {name: value for name, value in vars(self).items() if name not in runs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget_runs()

    def forget_runs(self) -> None:
        """Begin anew, with a run that has not begun."""
        self._of_thread = threading.local()
        self._latest = type(self).run_class()

    @property
    def _run(self) -> Run:
        run: Run = getattr(self._of_thread, "run", self._latest)
        return run

    @_run.setter
    def _run(self, run: Run) -> None:
        self._of_thread.run = self._latest = run

    def joining(self) -> Callable[[], None]:
        """Return what another thread calls to take part in the save or load of this one."""
        run = self._run

        def join() -> None:
            self._of_thread.run = run

        return join


class OfRun:
    """An attribute of torch's planner that belongs to one save or load: it is kept in ``_run``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, planner: OneRunPlanner[Any] | None, owner: type) -> Any:
        return self if planner is None else getattr(planner._run, self._name)

    def __set__(self, planner: OneRunPlanner[Any], value: Any) -> None:
        setattr(planner._run, self._name, value)


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
    if isinstance(rename, type):
        raise PlacementError(
            f"rename={rename.__name__} is a class\n"
            f'    way out:     an instance, as rename=Renumber("experts.{{}}", ids, total=8)'
        )
    if rename is not None and not callable(rename):
        raise PlacementError(
            "rename= must be Renumber, Replace, Renames or another callable key -> key, or None, "
            f"not {type(rename).__name__}"
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
