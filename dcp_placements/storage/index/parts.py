"""Parts of an index that are read when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Parts(Sequence[T], Generic[T]):
    """Parts of an index, each read when it is used.

    Args:
        read: Returns parts by their numbers.
        count: How many there are.
    """

    def __init__(self, read: Callable[[Sequence[int]], Iterable[T]], count: int) -> None:
        self._read = read
        self._held: list[T | None] = [None] * count

    def hold(self, numbers: Iterable[int]) -> None:
        """Read parts at once that are used next."""
        missing = [number for number in numbers if self._held[number] is None]
        for number, part in zip(missing, self._read(missing), strict=True):
            self._held[number] = part

    def __len__(self) -> int:
        return len(self._held)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            numbers = range(len(self))[index]
            self.hold(numbers)
            return [self[at] for at in numbers]
        if self._held[index] is None:
            self.hold([range(len(self))[index]])
        held = self._held[index]
        assert held is not None
        return held
