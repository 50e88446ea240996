"""A memo keyed by the content of a sequence.

Thousands of tensors are cut in a few ways: they share lists of chunks, or have equal lists of their
own. The address of a list is not a key, because another list may have it later; hashing all
elements for each lookup would cost more than the memo saves. So sequences are looked up by length,
first and last element, and then compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_CANDIDATES = 8
"""The number of sequences of one length, first and last element that are kept: the latest."""


class BySequence(Generic[T]):
    """Values by sequence. The sequences must not change while it is in use.

    Args:
        end: Maps the first and the last element to a key; None if they are hashable themselves.
    """

    def __init__(self, end: Callable[[Any], Hashable] | None = None) -> None:
        self._end = end
        self._values: dict[Hashable, list[tuple[Sequence[Any], T]]] = {}

    def get(self, values: Sequence[Any], like: Hashable = None) -> T | None:
        """Return the value of an equal sequence, or None.

        Args:
            values: The sequence.
            like: A second key, which has to be equal, too.
        """
        for candidate, value in self._values.get(self._key(values, like), ()):
            if candidate is values or candidate == values:
                return value
        return None

    def put(self, values: Sequence[Any], value: T, like: Hashable = None) -> T:
        """Keep the value of a sequence that ``get`` does not know, and return it."""
        candidates = self._values.setdefault(self._key(values, like), [])
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
