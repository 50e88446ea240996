"""The current save or load of a planner, and the items of plans, which know theirs.

A planner may have several saves or loads under way, written and read in threads, so each item of a
plan knows its own. The hooks that plan get no items: they use what ``set_up_planner`` began last.
Two saves of one planner, of which the first is still written when the second begins::

    planner.set_up_planner(...)               # planner._save is RankSave 1
    planner.finish_plan(...)                  # WriteItemOfSave(..., save=RankSave 1, tensor=...)
    planner.set_up_planner(...)               # planner._save is RankSave 2
    planner.resolve_data(WriteItemOfSave(..., save=RankSave 1, tensor=...))

Planning creates millions of small objects, and none of them is garbage. The collector nevertheless
traverses all of them again and again: nine tenths of the time of unpickling a large plan. So it is
paused meanwhile (``quiet_gc``).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import ReadItem, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements.errors import PlacementError

T = TypeVar("T")


@dataclass
class RankWork:
    """One save or load on one rank: what its planning hooks have found so far.

    It is pickled empty: the state of a save is not sent to another process.

    Attributes:
        thread: The thread that began it, in which DCP calls all hooks that plan.
    """

    thread: int = field(default_factory=threading.get_ident, kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def check_thread(self) -> None:
        """Refuse a hook that plans in another thread.

        Raises:
            PlacementError: Another thread has set up the planner since.
        """
        if self.thread != threading.get_ident():
            raise PlacementError(INTERLEAVED)


INTERLEAVED = (
    "another thread has set up this planner before this one had planned with it\n"
    "    likely:      two threads save or load with one planner at the same time\n"
    "    way out:     a planner for each thread; or plan one after the other: what is planned may "
    "be written or read while the next is planned"
)
OVERTAKEN = (
    "this planner was set up again before {} had asked for all of its tensors\n"
    "    likely:      {}() of a subclass: it is given an index, of whichever save or load\n"
    "    way out:     a planner for each save and load; or a subclass without that hook"
)


def held_by(work: str, name: str) -> Any:
    """Return an attribute of a planner that its current save or load has.

    Torch's planners have it as an attribute of their own, which subclasses get and set.

    Args:
        work: The attribute of the planner that is its current save or load.
        name: The name of the attribute.
    """
    return property(
        lambda planner: getattr(getattr(planner, work), name),
        lambda planner, value: setattr(getattr(planner, work), name, value),
    )


def _as_torch_has_it(item: Any) -> tuple[Any, ...]:
    """Pickle an item as torch's item, without its save or load."""
    plain: Any = type(item).__base__
    values = {column.name: getattr(item, column.name) for column in fields(plain)}
    return partial(plain, **values), ()


@dataclass(frozen=True, eq=False)
class WriteItemOfSave(WriteItem):
    """A write item that knows its save, and what it writes.

    Attributes:
        save: The save; it has the objects.
        tensor: The tensor that is written; None for an object, or where the planner looks it up.
        copied: Whether other ranks write the same into their files.
    """

    save: Any = field(default=None, compare=False, repr=False)
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)
    copied: bool = field(default=False, compare=False, repr=False)

    __reduce__ = _as_torch_has_it


@dataclass(frozen=True, eq=False)
class ReadItemOfLoad(ReadItem):
    """A read item that knows its load, and the tensor that it fills a part of.

    Attributes:
        load: The load.
        tensor: The memory of the whole destination; None where the planner looks it up.
    """

    load: Any = field(default=None, compare=False, repr=False)
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)

    __reduce__ = _as_torch_has_it


def with_fields(like: T, **values: Any) -> T:
    """Return a copy of an item or an index with other values of some fields.

    It is ``dataclasses.replace`` without the initialiser of a frozen class, which takes four times
    the time: a plan has an item of each key, with an index or two.

    >>> with_fields(MetadataIndex("a", [2, 0], 1), fqn="b")
    MetadataIndex(fqn='b', offset=torch.Size([2, 0]), index=1)
    """
    changed = object.__new__(type(like))
    held = changed.__dict__
    held.update(like.__dict__)
    held.update(values)
    return changed


def object_read(index: MetadataIndex, load: Any = None) -> ReadItemOfLoad:
    """Return an item that reads all of one record, such as that of an object.

    Args:
        index: The object's, in the checkpoint and in the state dict.
        load: The load that the item knows.
    """
    size = torch.Size((0,))
    return ReadItemOfLoad(LoadItemType.BYTE_IO, index, size, index, size, size, load)


class ItemsToCome(Sequence[Any]):
    """The items of a plan that is not finished; every use of them is refused.

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


_LOCK = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector inside; enable it again if it was enabled.

    Several threads may be inside at a time; the last that leaves enables it.
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
    """Enable it in a child process, which lacks the other threads that would."""
    global _LOCK, _inside
    _LOCK = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
