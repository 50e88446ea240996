"""Which ranks of a world have a key, by the numbers in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dcp_placements.names.rename_record import Numbers, number_in
from dcp_placements.offline.declared import matcher
from dcp_placements.storage.metadata.table import Array


class KeysHeld:
    """Which ranks have a key. Keys with the same numbers are looked up once, not rank by rank.

    Args:
        ranks: The numbers of each rank, and the patterns of keys that are absent from it.
    """

    def __init__(self, ranks: Sequence[tuple[Numbers, tuple[str, ...]]]) -> None:
        # By pattern the different sets of numbers, and which of them each rank has.
        sets: dict[str, dict[tuple[tuple[str, frozenset[int]], ...], int]] = {}
        absent: dict[str, list[int]] = {}
        self._size = len(ranks)
        self._set_of: dict[str, Array] = {}
        for rank, (numbers, patterns) in enumerate(ranks):
            for pattern, by_selector in numbers:
                found = sets.setdefault(pattern, {})
                column = self._set_of.setdefault(pattern, np.full(self._size, -1))
                column[rank] = found.setdefault(by_selector, len(found))
            for pattern in patterns:
                absent.setdefault(pattern, []).append(rank)
        self._sets = {pattern: [dict(one) for one in found] for pattern, found in sets.items()}
        self._absent = [(matcher(pattern), on) for pattern, on in absent.items()]
        self._by_token: dict[Hashable, bytes] = {}
        self._by_content: dict[bytes, tuple[int, Array]] = {}

    def __call__(self, key: str) -> tuple[int, Array]:
        """Return a mask of the ranks that have a key, ``[ranks]``, and a number of its content."""
        at = tuple([number_in(pattern, key) for pattern in self._sets])
        token = at, tuple([matches(key) for matches, _ in self._absent])
        content = self._by_token.get(token)
        if content is None:
            held = self._held(*token)
            content = self._by_token[token] = np.packbits(held).tobytes()
            self._by_content.setdefault(content, (len(self._by_content), held))
        return self._by_content[content]

    def _held(
        self, numbers: tuple[tuple[str, int] | None, ...], is_absent: tuple[bool, ...]
    ) -> Array:
        held = np.ones(self._size, bool)
        for at, (pattern, sets) in zip(numbers, self._sets.items(), strict=True):
            if at is not None:
                has = [at[1] in numbers_by.get(at[0], ()) for numbers_by in sets]
                # The last is for ranks without this pattern.
                held &= np.array([*has, True])[self._set_of[pattern]]
        for absent, (_, ranks) in zip(is_absent, self._absent, strict=True):
            if absent:
                held[ranks] = False
        return held
