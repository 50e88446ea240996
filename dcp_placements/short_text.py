"""Names, numbers, ranks, counts and bytes as the short text that messages have.

Keys that differ in numbers alone are folded into one name, so that the experts of a layer take one
line. Those that a rank of two ep ranks holds, of two layers::

    layers.0.experts.0.w1, layers.0.experts.1.w1, layers.1.experts.0.w1, layers.1.experts.1.w1
    -> layers.0-1.experts.0-1.w1
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import product
from typing import NamedTuple

MAX_NAME, MAX_LINE = 500, 2_000
"""Characters of a name, and of a line of a message; what is longer lacks its middle."""


class FoldedKeys(NamedTuple):
    """Keys that differ in numbers alone: ``FoldedKeys("h.0-1.w", ("h.0.w", "h.1.w"))``.

    Attributes:
        name: The keys as one name, with ranges of numbers; every combination of them is a key.
        keys: In natural order.
    """

    name: str
    keys: tuple[str, ...]


def natural_key(name: str) -> tuple[tuple[int, str, int], ...]:
    """Return a sort key that orders names by the numbers in them.

    >>> sorted(["layers.10.w", "layers.2.w", "embed"], key=natural_key)
    ['embed', 'layers.2.w', 'layers.10.w']
    """
    texts = [text for text in _DIGITS.split(name[:MAX_NAME]) if text]
    return tuple([(0, "", int(text)) if text.isdecimal() else (1, text, 0) for text in texts])


def folded_keys(keys: Iterable[str] | Mapping[str, Hashable]) -> list[FoldedKeys]:
    """Fold keys into as few names as possible, in the natural order of their first keys.

    Args:
        keys: The keys. In a mapping, only keys with equal values are folded together.

    >>> [folded.name for folded in folded_keys(["h.0.w", "h.1.w", "h.1.b", "head"])]
    ['h.0-1.w', 'h.1.b', 'head']
    """
    values: Mapping[str, Hashable] = keys if isinstance(keys, Mapping) else dict.fromkeys(keys)
    by_text: dict[tuple[_Texts, _Texts, Hashable], dict[_Numbers, str]] = {}
    split = cache(_split)  # keys have most of their beginnings and ends in common
    for key, value in values.items():
        head, dot, tail = key.rpartition(".") if len(key) <= MAX_NAME else ("", "", "")
        head_texts, head_numbers = split(head)
        tail_texts, tail_numbers = split(dot + tail) if len(key) <= MAX_NAME else ((key,), ())
        numbers = head_numbers + tail_numbers
        by_text.setdefault((head_texts, tail_texts, value), {})[numbers] = key
    result = []
    for (head_texts, tail_texts, _), members in by_text.items():
        texts = (*head_texts[:-1], head_texts[-1] + tail_texts[0], *tail_texts[1:])
        for ranges in _products(frozenset(members)):
            formatted = [format_numbers(numbers).replace(", ", ",") for numbers in ranges]
            between = zip(formatted, texts[1:], strict=True)
            name = texts[0] + "".join([numbers + text for numbers, text in between])
            keys_of_name = tuple([members[numbers] for numbers in product(*ranges)])
            result.append(FoldedKeys(name, keys_of_name))
    return sorted(result, key=lambda folded: natural_key(folded.keys[0]))


def _split(text: str) -> tuple[_Texts, _Numbers]:
    """Return the texts between the numbers of a text, and the numbers.

    ``"layers.0.w"`` is ``(("layers.", ".w"), (0,))``.
    """
    parts = _FOLDED.split(text)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def numbers_in(key: str) -> Iterator[tuple[str, int, str]]:
    """Yield the numbers of a key that may be folded into a range.

    >>> [*numbers_in("layers.0.experts.12.w1")]
    [('layers.', 0, '.experts.12.w1'), ('layers.0.experts.', 12, '.w1')]

    Yields:
        The text before the number, the number, and the text after it.
    """
    for match in _FOLDED.finditer(key):
        yield key[: match.start()], int(match[0]), key[match.end() :]


def without_numbers(key: str) -> str:
    """Return a key with ``{}`` for its numbers.

    >>> without_numbers("layers.0.experts.12.w1")
    'layers.{}.experts.{}.w1'
    """
    return _FOLDED.sub("{}", key)


def _products(members: frozenset[_Numbers]) -> list[tuple[_Numbers, ...]]:
    """Return tuples of numbers as products of one tuple per position.

    ``{(0, 1), (0, 2), (3, 1), (3, 2)}`` is ``[((0, 3), (1, 2))]``.
    """
    if () in members:
        return [()]
    rests: dict[int, set[_Numbers]] = {}
    for numbers in members:
        rests.setdefault(numbers[0], set()).add(numbers[1:])
    by_rest: dict[frozenset[_Numbers], list[int]] = {}
    for first in sorted(rests):
        by_rest.setdefault(frozenset(rests[first]), []).append(first)
    return [
        (tuple(firsts), *others) for rest, firsts in by_rest.items() for others in _products(rest)
    ]


_Numbers = tuple[int, ...]
_Texts = tuple[str, ...]

_DIGITS = re.compile(r"(\d+)")
# A whole component, or the expert in Megatron's weight3; the digit of w1 belongs to the name.
# The test for a first digit makes the search twice as fast. Numbers have at most 18 digits, since
# Python refuses to read one of thousands.
_FOLDED = re.compile(r"(?=[0-9])(?:^|(?<=\.)|(?<=\.weight)|(?<=\.bias))(0|[1-9]\d{0,17})(?=\.|\Z)")


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as short text.

    >>> format_numbers([5, 0, 1, 2])
    '0-2, 5'
    """
    ordered = sorted(set(numbers))
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    texts = ["-".join(map(str, numbers)) for numbers in ranges[:12]]
    if len(ranges) > 12:
        texts.append(f"... ({len(ordered)} in all)")
    return ", ".join(texts)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as short text.

    >>> format_ranks([3, 0, 1, 2, 7]), format_ranks([5])
    ('ranks 0-3, 7', 'rank 5')
    """
    ranks = set(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {format_numbers(ranks)}"


def folded_names(names: Iterable[str]) -> list[str]:
    """Return names, those that differ in numbers alone folded into one."""
    return [folded.name for folded in folded_keys(list(names))]


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """Return up to ``limit`` names, and how many more there are.

    >>> format_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    text = ", ".join([format_name(name) for name in names[:limit]])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def shortened(text: str, limit: int) -> str:
    """Return a text without its middle if it is longer than ``limit`` characters.

    >>> shortened("layers.0.w", 10), shortened("a" * 50 + "b" * 50, 10)
    ('layers.0.w', 'aaaaa... (90 more characters) ...bbbbb')
    """
    if len(text) <= limit:
        return text
    left = f"... ({len(text) - limit // 2 * 2:,} more characters) ..."
    return f"{text[: limit // 2]}{left}{text[-(limit // 2) :]}"


def near_names(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Return up to ``count`` names with nearly the same spelling; none where the search is slow.

    >>> near_names("lm_hed", ["lm_head", "embed"])
    ['lm_head']
    """
    if len(name) > _MAX_COMPARED:
        return []
    short = [other for other in names if len(other) <= _MAX_COMPARED]
    return get_close_matches(name, short, count) if len(short) <= _MAX_NEAR else []


_MAX_COMPARED, _MAX_NEAR = 200, 5_000
"""Characters of a name, and names, that are compared by their spelling."""


def format_name(name: object, limit: int = MAX_NAME) -> str:
    """Return a name, or any text from a file, as one line that is safe to print.

    Line breaks, terminal control sequences and other unprintable characters are escaped.

    >>> print(format_name("layers.0.w"), format_name("w\\nall sound\\x1b[2K"))
    layers.0.w w\\nall sound\\x1b[2K
    """
    text = shortened(str(name), limit)
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def format_error(error: BaseException) -> str:
    """Return the message of an error as one line that is safe to print, or its class without one.

    >>> format_error(ValueError("of another save")), format_error(EOFError())
    ('of another save', 'EOFError without a message')
    >>> format_error(MemoryError())
    'it asks for more memory than there is'
    """
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return format_name(error, MAX_LINE) or f"{type(error).__name__} without a message"


def format_count(count: int, noun: str) -> str:
    """Return a number and what it counts.

    >>> format_count(1, "chunk"), format_count(2000, "chunk")
    ('1 chunk', '2,000 chunks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_nbytes(nbytes: int) -> str:
    """Return a byte count as short text, in binary units.

    >>> format_nbytes(512), format_nbytes(8 * 2**20)
    ('512 B', '8.0 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min((nbytes.bit_length() - 1) // 10, 5)
    return f"{nbytes / 1024**power:.1f} {'KMGTP'[power - 1]}iB"
