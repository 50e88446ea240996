"""What both planners stand on: their saves or loads, and items by the thousand.

A planner may have several saves or loads under way, in threads, so each item of a plan knows to
which of them it belongs. Two loads of one planner, and an item of each::

    runs.begin()                  # Load 1, which this thread plans
    runs.begin()                  # Load 2, in another thread
    runs.current(ReadItemOfLoad(..., run=load_1))    # Load 1, in whatever thread it is read

Planning creates millions of small objects, and none of them is garbage. The collector nevertheless
traverses all of them again and again: nine tenths of the time of unpickling a large plan. So it is
paused meanwhile (``quiet_gc``).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.checkpoint import ReadItem, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements.errors import Fault, PlacementError, raise_faults

Run = TypeVar("Run")
T = TypeVar("T")
R = TypeVar("R")


class Runs(Generic[Run]):
    """The saves or loads of one planner.

    The hooks that plan one get no items; DCP calls all of them in the thread that began it. Pickled
    it is empty: the state of a save is not sent to another process.

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
        run = self._kind()
        self.latest = self._of_thread.run = run  # another thread may begin one at any time
        return run

    def current(self, item: Any = None) -> Run:
        """Return the one that an item is of; without an item that knows it, what this thread plans.

        Of a thread that began none it is the latest.
        """
        run: Run | None = getattr(item, "run", None) or getattr(self._of_thread, "run", None)
        return self.latest if run is None else run

    def inside(self, run: Run, hook: Callable[[T], R], value: T) -> R:
        """Return ``hook(value)``; inside ``current`` is this run, which the value does not name."""
        state = self._of_thread
        before, state.run = getattr(state, "run", None), run
        try:
            return hook(value)
        finally:
            state.run = before


def of_run(name: str) -> Any:
    """Return an attribute of a planner that is one of the save or load which the thread plans.

    Torch's planners have it, so that subclasses of theirs get and set it.
    """
    return property(
        lambda planner: getattr(planner._runs.current(), name),
        lambda planner, value: setattr(planner._runs.current(), name, value),
    )


def _as_torch_has_it(item: Any) -> tuple[Any, ...]:
    """Pickle an item as torch's, without what it knows."""
    plain: Any = type(item).__base__
    values = {each.name: getattr(item, each.name) for each in fields(plain)}
    return partial(plain, **values), ()


@dataclass(frozen=True, eq=False)
class WriteItemOfSave(WriteItem):
    """A write item that knows its save, and what it writes.

    Attributes:
        run: The save.
        chunk: The tensor that is written; None where the planner looks it up.
        copied: Whether other ranks write the same into their files.
    """

    run: Any = field(default=None, compare=False, repr=False)
    chunk: torch.Tensor | None = field(default=None, compare=False, repr=False)
    copied: bool = field(default=False, compare=False, repr=False)

    __reduce__ = _as_torch_has_it


@dataclass(frozen=True, eq=False)
class ReadItemOfLoad(ReadItem):
    """A read item that knows its load, and what the chunk is that it fills a part of.

    Attributes:
        run: The load.
        chunk: The memory of the whole destination; None where the planner looks it up.
    """

    run: Any = field(default=None, compare=False, repr=False)
    chunk: torch.Tensor | None = field(default=None, compare=False, repr=False)

    __reduce__ = _as_torch_has_it


def object_read(index: MetadataIndex, load: Any = None) -> ReadItemOfLoad:
    """Return what reads all of one record, as of an object.

    Args:
        index: What it is of, in the checkpoint and in the state dict.
        load: The load that the item knows.
    """
    size = torch.Size((0,))
    return ReadItemOfLoad(LoadItemType.BYTE_IO, index, size, index, size, size, load)


class ItemsToCome(Sequence[Any]):
    """The items of a plan that is not finished: whoever looks at them is refused.

    Raises:
        PlacementError: At each use.
    """

    def __len__(self) -> int:
        raise PlacementError(NOT_FINISHED)

    def __getitem__(self, index: Any) -> Any:
        raise PlacementError(NOT_FINISHED)


def messages_of(what: str, plans: Sequence[Any], kind: type[T]) -> list[T]:
    """Return what the ranks sent with their plans.

    Args:
        what: ``"save"`` or ``"load"``.
        plans: Of all ranks.
        kind: Of what a planner of this package sends.

    Raises:
        PlacementError: Another planner made some of the plans.
    """
    sent = [plan.planner_data for plan in plans]
    ours = [isinstance(message, kind) for message in sent]
    if not all(ours):
        fault = Fault(
            f"this {what}",
            f"{ours.count(False)} of {len(ours)} ranks planned it with another planner, the first "
            f"at position {ours.index(False)}",
            ("way out:     the same planner on every rank; installed() on every rank",),
        )
        raise_faults(f"the ranks do not {what} together", [fault])
    return sent


NOT_FINISHED = (
    "a plan of this package has no items before finish_plan() of the rank that made it\n"
    "    likely:      the coordinator uses another planner than this rank; or a subclass reads or "
    "replaces the items of a plan\n"
    "    way out:     the same planner on every rank; installed() on every rank; in a subclass the "
    "items that super().finish_plan() returns"
)


_LOCK = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector inside; enable it again if it was enabled.

    Threads may be inside at a time: the last one that leaves enables it.
    """
    global _inside, _was_on
    with _LOCK:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside = max(_inside - 1, 0)
            if not _inside and _was_on:
                gc.enable()


def _after_fork() -> None:
    """Enable it in a child process, which has none of the other threads that would."""
    global _LOCK, _inside
    _LOCK = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
