"""The numbers that a rename gives to keys, recorded where they are given.

A step that numbers a key returns a ``NumberedKey``: the new key, and the position of the number in
it. Later steps move the position along as they change the text around it, so that no code has to
search for the number afterwards. With ``Renames(Renumber("pp*.layers.{}", [2, 3], total=4),
Replace("pp*", "model"))``, the key ``pp1.layers.0.w`` becomes::

    after the Renumber   "pp1.layers.2.w"     2 at [11:12]
    after the Replace    "model.layers.2.w"   2 at [13:14]
    its family           Family("model.layers.", "")   numbers 0 .. 3 on all ranks together

A family is one list of the checkpoint: keys that are equal up to the number, under one head. Lists
with different heads (``model.layers.``, ``mtp.layers.``) are different families, also where one
step numbers both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dcp_placements.errors import CannotPlace
from dcp_placements.names.rename_results import Rename, Renamed, Row, texts_of, with_texts

_STAND_IN = "700000000007"
"""A number that no list has: where a function puts it is where it puts the real one."""

ROW = "{}"
"""The text in a key that stands for the number of each row of a tensor."""

_ANY_NUMBER = re.compile(r"\d+")


class Numbering(NamedTuple):
    """How a list of keys is numbered.

    Attributes:
        total: The count of numbers on all ranks together; None if some are left out on purpose, or
            for the rows of a tensor, whose shape has the count.
        step: The step of the rename that gives the numbers, as text.
    """

    total: int | None
    step: str


class Number(NamedTuple):
    """A number that a rename gave, by its position in a key.

    The ``2`` of ``"pp1.layers.2.w"``: ``Number(11, 12, 12, Numbering(4, "Renumber(...)"))``.

    Attributes:
        start: Position of its first digit.
        stop: Position after its last digit.
        end: Position after the text that the pattern of the step matched.
        numbering: How its list is numbered.
    """

    start: int
    stop: int
    end: int
    numbering: Numbering


class NumberedKey(str):
    """A key, and the numbers in it that a rename gave. It equals the key as plain text.

    Attributes:
        numbers: The numbers, in the order in which they were given.
    """

    numbers: tuple[Number, ...]

    def __new__(cls, key: str, numbers: Iterable[Number] = ()) -> NumberedKey:
        self = super().__new__(cls, key)
        self.numbers = tuple(numbers)
        return self


def numbers_given(key: str) -> tuple[Number, ...]:
    """Return the numbers that a rename gave to a key; none for plain text."""
    return key.numbers if isinstance(key, NumberedKey) else ()


class Family(NamedTuple):
    """A list of the checkpoint: the keys that are ``head``, a number, ``tail`` and what follows.

    >>> str(Family("model.layers.", ""))
    'model.layers.{}'
    """

    head: str
    tail: str

    def __str__(self) -> str:
        return f"{self.head}{{}}{self.tail}"


Numberings = Mapping[Family, Numbering]


def spliced(key: str, start: int, stop: int, text: str) -> str:
    """Return a key with other text in place of ``[start:stop]``; its numbers move along.

    >>> key = NumberedKey("pp1.layers.2.w", [Number(11, 12, 12, Numbering(4, "Renumber"))])
    >>> new = spliced(key, 0, 3, "model")
    >>> new, [new[number.start : number.stop] for number in numbers_given(new)]
    ('model.layers.2.w', ['2'])

    Raises:
        CannotPlace: The replaced text has a number of a list that must be whole.
    """
    new = key[:start] + text + key[stop:]
    moved = _moved(key, start, stop, text)
    return NumberedKey(new, moved) if moved else new


def _moved(key: str, start: int, stop: int, text: str) -> list[Number]:
    """Return the numbers of a key where ``text`` has taken the place of ``[start:stop]``."""
    moved = []
    shift = len(text) - (stop - start)
    for number in numbers_given(key):
        first, last, end, numbering = number
        if end > start:
            end = max(end, stop) + shift
        if last <= start:
            moved.append(Number(first, last, end, numbering))
        elif first >= stop:
            moved.append(Number(first + shift, last + shift, end, numbering))
        elif key[first:last] == ROW and ROW in text:
            new_first = start + text.index(ROW)
            new_last = new_first + len(ROW)
            new_end = new_last if number.end == last else end
            moved.append(Number(new_first, new_last, new_end, numbering))
        elif _must_stay(key, number):
            raise _lost(key, number, f"{key[start:stop]!r} is replaced by {text!r}")
    return moved


def with_number(key: str, number: Number, text: str) -> str:
    """Return a key with the number ``text`` where a step puts it, recorded.

    Args:
        key: The key before the step.
        number: Positions in ``key``: ``[start:stop]`` is replaced, also where an earlier step gave
            a number there.
        text: The number in the whole, as text.
    """
    start, stop, end, numbering = number
    moved = _moved(without_number(key, start), start, stop, text) if numbers_given(key) else []
    new_stop = start + len(text)
    moved.append(Number(start, new_stop, new_stop + max(end - stop, 0), numbering))
    return NumberedKey(key[:start] + text + key[stop:], moved)


def without_number(key: str, start: int) -> str:
    """Return a key that no longer records the number that begins at ``start``; its text stays."""
    numbers = numbers_given(key)
    kept = [number for number in numbers if number.start != start]
    return key if len(kept) == len(numbers) else NumberedKey(key, kept)


def carried(function: Rename, key: str) -> Renamed:
    """Return a user's function's answer for a key that has numbers, with these numbers.

    The function is called again with another number, and its answer has to be the same but for the
    number. A ``Row`` may have it as its index, as a stack of layers has. Numbers that the function
    gives by itself are not recorded.

    >>> key = NumberedKey("layers.2.w", [Number(7, 8, 8, Numbering(4, "Renumber"))])
    >>> new = carried(lambda key: "model." + key, key)
    >>> new, [new[number.start : number.stop] for number in numbers_given(new)]
    ('model.layers.2.w', ['2'])

    Args:
        function: Maps a key to its answer.
        key: A key with numbers.

    Raises:
        CannotPlace: It does not keep a number of a list that must be whole.
    """
    new = function(str(key))
    texts = texts_of(new)
    numbers = [list(numbers_given(text)) for text in texts]
    for number in numbers_given(key):
        digits = key[number.start : number.stop]
        places, is_index = _places(function, key, number, new, [_STAND_IN])
        if -1 in places and digits.isdecimal():
            # A function may look the number up in a table, which lacks large ones.
            near = [str(other) for other in (int(digits) + 1, int(digits) - 1) if other >= 0]
            places, is_index = _places(function, key, number, new, near)
        for text, start, own in zip(texts, places, numbers, strict=True):
            stop = start + len(digits)
            if start < 0:
                if _must_stay(key, number) and not is_index:
                    name = getattr(function, "__qualname__", type(function).__name__)
                    raise _lost(key, number, f"{name} makes {str(text)!r} of it")
            elif all(given.start != start for given in own):
                dot = text.find(".", stop)
                end = len(text) if dot < 0 else dot
                own.append(number._replace(start=start, stop=stop, end=end))
    if not any(numbers):
        return new
    pairs = zip(texts, numbers, strict=True)
    return with_texts(new, [NumberedKey(text, own) if own else text for text, own in pairs])


def _places(
    function: Rename, key: str, number: Number, new: Renamed, puts: Sequence[str]
) -> tuple[list[int], bool]:
    """Return where each text of an answer has a number, and whether it is the index of a row.

    Args:
        function: Maps a key to its answer.
        key: A key with the number.
        number: The number.
        new: The answer for the key.
        puts: Other numbers, as text, for which the function is called again. Where an answer has
            the other number, the first answer has the number.
    """
    digits = key[number.start : number.stop]
    texts = texts_of(new)
    # What a function makes of ROW is the name of each row of a tensor.
    places = [text.find(ROW) if digits == ROW else -1 for text in texts]
    is_index = False
    for put in puts:
        try:
            other = function(key[: number.start] + put + key[number.stop :])
        except Exception:  # the user's function may raise any
            continue
        if type(other) is not type(new) or len(texts_of(other)) != len(texts):
            continue
        for position, (text, after) in enumerate(zip(texts, texts_of(other), strict=True)):
            start = _place_of(text, digits, after, put)
            places[position] = places[position] if start < 0 else start
        if isinstance(new, Row) and isinstance(other, Row) and other.fqn == new.fqn:
            is_index = is_index or put in map(str, other.indices)
    return places, is_index


def _place_of(text: str, digits: str, other: str, put: str) -> int:
    """Return where a text has a number if it differs from another text by it alone; else -1.

    >>> _place_of("2.layers.2.w", "2", "2.layers.3.w", "3")
    9
    """
    start = other.find(put)
    while start >= 0:
        if text == other[:start] + digits + other[start + len(put) :]:
            return start
        start = other.find(put, start + 1)
    return -1


def _must_stay(key: str, number: Number) -> bool:
    """Whether a number belongs to a list that must be whole, as the rows of a tensor must."""
    return number.numbering.total is not None or key[number.start : number.stop] == ROW


def _lost(key: str, number: Number, cause: str) -> CannotPlace:
    return CannotPlace(
        f"a later step of the rename takes away number {key[number.start : number.stop]}, which "
        f"{number.numbering.step} gave",
        f"the step:    {cause}",
        "reason:      whether all numbers are there on all ranks together could not be told",
        "way out:     that step before the one that numbers, or one that keeps what stands there; "
        "or total=None of a Renumber, which compares nothing",
    )


def families(keys: Iterable[str], totals: Mapping[str, int] | None = None) -> Numberings:
    """Return the families of the numbers that a rename gave, and how each is numbered.

    Where several steps number one list, the largest total counts.

    Args:
        keys: Keys of one rank, with their numbers.
        totals: The count of the rows of each tensor that is unstacked, by its key with ``{}``.
    """
    numberings: dict[Family, Numbering] = {}
    for key in keys:
        for number in numbers_given(key):
            if key[number.start : number.stop] == ROW:
                continue
            # The family of all rows is that of the first.
            head = key[: number.start].replace(ROW, "0")
            family = Family(head, key[number.stop : number.end].replace(ROW, "0"))
            longest = numberings.setdefault(family, number.numbering)
            if (longest.total or 0) < (number.numbering.total or 0):
                numberings[family] = number.numbering
    for key, total in (totals or {}).items():
        for number in numbers_given(key):
            if key[number.start : number.stop] == ROW:
                family = Family(key[: number.start], key[number.stop : number.end])
                numberings[family] = Numbering(total, number.numbering.step)
    return numberings


def numbers_of(fqns: Iterable[str], wanted: Collection[Family]) -> dict[Family, set[int]]:
    """Return the numbers that keys of the checkpoint have in each of some families.

    >>> numbers_of(["layers.0.w", "layers.3.w", "mtp.layers.1.w"], [Family("layers.", "")])
    {Family(head='layers.', tail=''): {0, 3}}
    """
    numbers: dict[Family, set[int]] = {family: set() for family in wanted}
    by_head: dict[str, list[Family]] = {}
    for family in wanted:
        by_head.setdefault(family.head, []).append(family)
    for fqn in fqns:
        for digits in _ANY_NUMBER.finditer(fqn):
            for family in by_head.get(fqn[: digits.start()], ()):
                end = digits.end() + len(family.tail)
                if fqn.startswith(family.tail, digits.end()) and fqn[end : end + 1] in ("", "."):
                    numbers[family].add(int(digits[0]))
    return numbers
