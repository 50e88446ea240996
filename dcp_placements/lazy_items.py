"""A plan's items, made where they are needed.

In the process that made a plan its items are there as soon as anybody looks; sent to another
process they stay behind, because that process can make its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class LazyItems(Sequence[T]):
    """A plan's items, made when they are first looked at; pickled without them.

    Args:
        make: Makes the items; None where they were left behind in another process.
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
                raise RuntimeError("these plan items were not sent; finish_plan() makes them anew")
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
