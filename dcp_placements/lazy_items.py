"""A plan's items: created on first access and never pickled, or with their save or load.

A rank's plan stays small when it is sent: the coordinator needs no items, and each rank creates the
items of its final plan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar, overload

from dcp_placements._torch import MetadataIndex, ReadItem, WriteItem
from dcp_placements.quiet_gc import quiet_gc

T = TypeVar("T")


class LazyItems(Sequence[T]):
    """A plan's items, created on first access; pickled without them.

    Args:
        make: Returns the items; None after unpickling.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], list[T]] | None = None) -> None:
        self._make = make
        self._made: list[T] | None = None

    @property
    def all(self) -> list[T]:
        """The items."""
        if self._made is None:
            if self._make is None:
                raise RuntimeError(
                    "these plan items were not sent; finish_plan() makes them anew\n"
                    "    likely:      the coordinator uses another planner than this rank\n"
                    "    way out:     the same planner on every rank; installed() on every rank"
                )
            with quiet_gc():
                self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return len(self.all)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self.all[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self.all)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self.all, *other]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.all == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        state = "not sent" if self._make is None else "not made yet"
        return f"LazyItems({state if self._made is None else self._made})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyItems, ()


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


@dataclass(frozen=True, eq=False)
class IndexOfRun(_Sent, MetadataIndex):
    """The place of an item that knows its save or load."""

    run: Any = field(default=None, compare=False, repr=False)


_OF_RUN: dict[type, type] = {
    WriteItem: WriteItemOfRun,
    ReadItem: ReadItemOfRun,
    MetadataIndex: IndexOfRun,
}
_PLAIN = {kind: plain for plain, kind in _OF_RUN.items()}


def of_run(value: Any, run: object) -> Any:
    """Return a write item, a read item or an index that knows its save or load."""
    kind = type(value)
    return _OF_RUN.get(kind, kind)(**{**vars(value), "run": run})


def items_of_run(items: Sequence[Any], run: object) -> Any:
    """Return items that know their save or load."""
    return [of_run(item, run) for item in items]
