"""What both planners have in common: options, and apart from them the state of saves and loads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, TypeVar

from dcp_placements._torch import LoadPlan, MetadataIndex, ReadItem, WriteItem
from dcp_placements.errors import PlacementError
from dcp_placements.rules.patterns import compile_pattern

Run = TypeVar("Run")


class Runs(Generic[Run]):
    """The saves or loads of one planner.

    Many may be under way: items and their indices know theirs. The hooks that plan one get no
    items; DCP calls all of them in the thread that began it. Pickled it is empty: the state of a
    save is not sent to another process.

    Args:
        kind: Makes the state of a save or load that has not begun.

    Attributes:
        latest: The one that began last.
    """

    def __init__(self, kind: Callable[[], Run]) -> None:
        self._kind = kind
        self._of_thread = threading.local()
        self.latest = kind()

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, (self._kind,)

    def begin(self) -> Run:
        """Return a new one, which this thread plans."""
        self.latest = self._of_thread.planned = self._kind()
        return self.latest

    @property
    def planned(self) -> Run:
        """The one that this thread plans; of a thread that began none, the latest."""
        run: Run = getattr(self._of_thread, "planned", self.latest)
        return run

    def of(self, value: Any) -> Run:
        """Return that of an item or index; where it knows none, the one that is planned."""
        run: Run | None = getattr(value, "run", None)
        return self.planned if run is None else run


class ItemsToCome(Sequence[Any]):
    """The items of a plan that is not finished: whoever looks at them is refused.

    Raises:
        PlacementError: At each use.
    """

    def __len__(self) -> int:
        raise PlacementError(NOT_FINISHED)

    def __getitem__(self, index: Any) -> Any:
        raise PlacementError(NOT_FINISHED)


NOT_FINISHED = (
    "a plan of this package has no items before finish_plan() of the rank that made it\n"
    "    likely:      the coordinator uses another planner than this rank; or a subclass reads or "
    "replaces the items of a plan\n"
    "    way out:     the same planner on every rank; installed() on every rank; in a subclass the "
    "items that super().finish_plan() returns"
)


class _Sent:
    """Pickled it is torch's, without the save or load; compared it equals torch's."""

    def __eq__(self, other: object) -> bool:
        plain = _PLAIN[type(self)]
        if type(other) not in (plain, type(self)):
            return NotImplemented
        names = [each.name for each in fields(plain) if each.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __hash__(self) -> int:
        return super().__hash__()  # as torch's: that class is next in line

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: value for name, value in vars(self).items() if name != "run"}
        return partial(_PLAIN[type(self)], **values), ()


@dataclass(frozen=True, eq=False)
class WriteItemOfRun(_Sent, WriteItem):
    """A write item that knows its save."""

    run: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class ReadItemOfRun(_Sent, ReadItem):
    """A read item that knows its load."""

    run: Any = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class LoadPlanOfRun(_Sent, LoadPlan):
    """A load plan that knows its load."""

    run: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class IndexOfRun(_Sent, MetadataIndex):
    """The place of an item that knows its save or load."""

    run: Any = field(default=None, compare=False, repr=False)


_OF_RUN: dict[type, type] = {
    WriteItem: WriteItemOfRun,
    ReadItem: ReadItemOfRun,
    LoadPlan: LoadPlanOfRun,
    MetadataIndex: IndexOfRun,
}
_PLAIN = {kind: plain for plain, kind in _OF_RUN.items()}


def of_run(value: Any, run: object) -> Any:
    """Return an item, an index or a load plan that knows its save or load."""
    kind = type(value)
    return _OF_RUN.get(kind, kind)(**{**vars(value), "run": run})


def items_of_run(items: Sequence[Any], run: object) -> list[Any]:
    """Return items that know their save or load."""
    return [of_run(item, run) for item in items]


class RunAttribute:
    """An attribute of a planner that is one of the save or load which the thread plans.

    Torch's planners have it, so that subclasses of theirs get and set it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, planner: Any, owner: type) -> Any:
        return self if planner is None else getattr(planner._runs.planned, self._name)

    def __set__(self, planner: Any, value: Any) -> None:
        setattr(planner._runs.planned, self._name, value)


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
