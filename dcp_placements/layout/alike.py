"""What is worked out of a sequence, found again for every sequence of the same content.

Thousands of tensors are cut in a few ways, and share their lists of chunks or have lists of their
own that are equal. Where a list lies in memory tells nothing, since another one lies there later;
to hash all its elements each time would cost more than is saved. So sequences are looked up by
length, first and last element, and then compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_CANDIDATES = 8
"""So many sequences of one length, first and last are kept at most, the latest."""


class BySequence(Generic[T]):
    """Values by sequence. The sequences must not change while it is in use.

    Args:
        end: What an element is told apart by; None where it can be hashed itself.
    """

    def __init__(self, end: Callable[[Any], Hashable] | None = None) -> None:
        self._end = end
        self._known: dict[Hashable, list[tuple[Sequence[Any], T]]] = {}

    def get(self, values: Sequence[Any], like: Hashable = None) -> T | None:
        """Return the value of an equal sequence, or None.

        Args:
            values: The sequence.
            like: What else has to be equal.
        """
        for known, value in self._known.get(self._key(values, like), ()):
            if known is values or known == values:
                return value
        return None

    def put(self, values: Sequence[Any], value: T, like: Hashable = None) -> T:
        """Keep the value of a sequence that ``get`` does not know, and return it."""
        candidates = self._known.setdefault(self._key(values, like), [])
        candidates.insert(0, (values, value))
        del candidates[MAX_CANDIDATES:]
        return value

    def _key(self, values: Sequence[Any], like: Hashable) -> Hashable:
        if not len(values):
            return like, 0
        first, last = values[0], values[-1]
        if self._end is not None:
            first, last = self._end(first), self._end(last)
        return like, len(values), first, last
