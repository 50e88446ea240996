"""Families of keys: keys that differ in numbers alone, as one name.

``layers.0-57.experts.0-255.w1`` is the name of the keys of 58 layers with 256 experts each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from dcp_placements.errors import format_ranks

_Numbers = tuple[int, ...]

_DIGITS = re.compile(r"(\d+)")
# A whole component, or the expert in Megatron's weight3; the digit of w1 belongs to the name.
# That it begins with a digit is tested first: the search is twice as fast.
_NUMBER = re.compile(r"(?=[0-9])(?:^|(?<=\.)|(?<=\.weight)|(?<=\.bias))(0|[1-9]\d*)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Family:
    """Keys that differ in numbers alone. Every combination of the numbers in its name is a key."""

    name: str  # the keys as one name, with ranges of numbers
    keys: tuple[str, ...]  # in natural order


def natural_key(name: str) -> tuple[tuple[int, str, int], ...]:
    """Return what sorts names by the numbers in them.

    >>> sorted(["layers.10.w", "layers.2.w", "embed"], key=natural_key)
    ['embed', 'layers.2.w', 'layers.10.w']
    """
    parts = [part for part in _DIGITS.split(name) if part]
    return tuple([(0, "", int(part)) if part.isdecimal() else (1, part, 0) for part in parts])


def families(keys: Iterable[str] | Mapping[str, Hashable]) -> list[Family]:
    """Return the families of keys, in natural order of their first keys.

    Args:
        keys: The keys. Of a mapping, only keys with equal values form one family.

    >>> [family.name for family in families(["h.0.w", "h.1.w", "h.1.b", "head"])]
    ['h.0-1.w', 'h.1.b', 'head']
    """
    values: Mapping[str, Hashable] = keys if isinstance(keys, Mapping) else dict.fromkeys(keys)
    by_text: dict[tuple[tuple[str, ...], Hashable], dict[_Numbers, str]] = {}
    for key, value in values.items():
        parts = _NUMBER.split(key)  # texts and numbers alternate
        numbers = tuple(map(int, parts[1::2]))
        by_text.setdefault((tuple(parts[::2]), value), {})[numbers] = key
    result = []
    for (texts, _), members in by_text.items():
        for ranges in _products(frozenset(members)):
            name = texts[0] + "".join(
                _format_range(numbers) + text
                for numbers, text in zip(ranges, texts[1:], strict=True)
            )
            result.append(Family(name, tuple([members[each] for each in product(*ranges)])))
    return sorted(result, key=lambda family: natural_key(family.keys[0]))


def whole_branches(keys: Iterable[str], all_keys: Iterable[str]) -> dict[str, list[str]]:
    """Return keys by the shortest branch of which all keys are among them.

    Args:
        keys: Some of ``all_keys``.
        all_keys: The keys of a checkpoint.

    Returns:
        Keys by branch: ``experts.*`` for all keys that begin with ``experts.``, where there are
        several; else the key itself.

    >>> whole_branches(["a.b.c", "a.b.d", "a.e"], ["a.b.c", "a.b.d", "a.e", "a.f"])
    {'a.b.*': ['a.b.c', 'a.b.d'], 'a.e': ['a.e']}
    """
    keys = list(keys)
    counts = Counter(branch for key in keys for branch in _branches(key))
    totals = Counter(branch for key in all_keys for branch in _branches(key))
    result: dict[str, list[str]] = {}
    for key in keys:
        whole = (b for b in _branches(key) if counts[b] == totals[b] > 1)
        branch = next(whole, None)
        result.setdefault(key if branch is None else f"{branch}.*", []).append(key)
    return result


def _branches(key: str) -> list[str]:
    """Return the prefixes of a key that end before a dot, the shortest first."""
    return [key[: match.start()] for match in re.finditer(r"\.", key)]


def _products(members: frozenset[_Numbers]) -> list[tuple[_Numbers, ...]]:
    """Return tuples of numbers as products: per position, the numbers that it takes."""
    if () in members:
        return [()]
    rests: dict[int, set[_Numbers]] = {}
    for first, *rest in members:
        rests.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[_Numbers], list[int]] = {}
    for first in sorted(rests):
        alike.setdefault(frozenset(rests[first]), []).append(first)
    return [
        (tuple(firsts), *others) for rest, firsts in alike.items() for others in _products(rest)
    ]


def _format_range(numbers: _Numbers) -> str:
    return format_ranks(numbers).partition(" ")[2].replace(", ", ",")
