"""What results say: families of keys, ranges of numbers, tables.

A family is the keys that differ in numbers alone: ``layers.0-57.experts.0-255.w1`` is the name of
those of 58 layers with 256 experts each.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

from dcp_placements.errors import format_name, format_names, format_ranks

MIN_FOLDED = 5
"""The first column of a table is folded to no less."""

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
    return ranges(numbers).replace(", ", ",")


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges; ``-`` for none.

    >>> ranges([3, 0, 1, 2]), ranges([])
    ('0-3', '-')
    """
    listed = list(numbers)
    return format_ranks(listed).partition(" ")[2] if listed else "-"


def short(names: Sequence[str], limit: int = 3) -> str:
    """Return some names; ``-`` for none."""
    return format_names(names, limit) if names else "-"


def format_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: str = "",
    width: int | None = None,
) -> list[str]:
    """Return the lines of a table: its headings, then its rows.

    Args:
        columns: Headings.
        rows: Texts, one for each column.
        right: Headings of the columns of numbers, separated by spaces.
        width: Of a terminal: where a line would be longer, the first column is folded.

    >>> for line in format_table(("key", "bytes"), [("layers.0", "8")], right="bytes", width=12):
    ...     print(line)
    key    bytes
    layer      8
    s.0
    """
    cells = [list(columns), *[[format_name(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        rest = sum(widths[1:]) + 2 * len(widths[1:])
        widths[0] = max(min(widths[0], width - rest), MIN_FOLDED)
    lines = []
    for first, *others in cells:
        folds = [first[at : at + widths[0]] for at in range(0, max(len(first), 1), widths[0])]
        for fold, texts in zip_longest(folds, [others], fillvalue=None):
            padded = [
                text.rjust(size) if heading in right.split() else text.ljust(size)
                for text, size, heading in zip(texts or (), widths[1:], columns[1:], strict=False)
            ]
            lines.append("  ".join([(fold or "").ljust(widths[0]), *padded]).rstrip())
    return lines
