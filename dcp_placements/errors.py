"""The root of all errors of this package, and the format of their messages.

Somebody whose job has stopped reads them. A message therefore begins with the FQN, then compares
what was found with what was declared, one fact per line, and ends with the way out. One error
carries all faults of one pass, sorted by FQN.
"""

from __future__ import annotations

import pickle
import re
import sys
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, product
from typing import Any, ClassVar, NamedTuple

MAX_FAULTS = 40
"""Different faults that one message describes; of the rest it lists the FQNs."""

MAX_SENT = 1000
"""Faults that a rank sends to the coordinator."""

MAX_NAMES = 8
"""Keys that a message lists for one fault."""

MAX_LINES = 40
"""Lines below the headline of one fault."""

MAX_NAME, MAX_LINE, MAX_TEXT = 500, 2_000, 60_000
"""Characters of a name, of a line and of a whole message; what is longer lacks its middle."""


class PlacementError(ValueError):
    """The root of all errors of this package.

    ``dcp.save`` and ``dcp.load`` wrap it in torch's ``CheckpointException`` (a ``BaseException``);
    it is then ``e.failures[rank][0]``. The faults of all ranks' plans are one error, that of the
    coordinator, which says them: what it sends to higher ranks is one line.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*[_bounded(one) if isinstance(one, str) else one for one in args])

    def __reduce__(self) -> tuple[Any, ...]:
        kind = PlacementError if "__init__" in vars(type(self)) else type(self)
        return _received, (kind, str(self), _rank())


def _bounded(text: str) -> str:
    """Return a message with lines, and a length, that a person can read."""
    if len(text) > MAX_LINE:
        text = "\n".join([shortened(line, MAX_LINE) for line in text.split("\n")])
    return shortened(text, MAX_TEXT)


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    is_one = distributed is not None and distributed.is_initialized()
    return int(distributed.get_rank()) if distributed is not None and is_one else 0


def _received(kind: type[PlacementError], text: str, sender: int) -> PlacementError:
    """Return the error that a rank sent: all of its text, or on higher ranks its first line."""
    first, *more = text.split("\n")
    if more and _rank() > sender:
        text = f"{first}; rank {sender} has the whole message"
    return kind(text)


class CannotLook(PlacementError):
    """A checkpoint cannot be examined: no such path, no checkpoint in it, or refused metadata.

    It is about the request; a ``Fault`` is about the checkpoint.
    """


class NoCheckpoint(PlacementError, FileNotFoundError):
    """A load names a directory that has no ``.metadata``: no checkpoint, or not a complete one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan or a checkpoint.

    Attributes:
        fqn: The checkpoint key that is wrong; faults are sorted by it.
        headline: What is wrong, in one line, without the key.
        details: Causes and the way out, one per line. Faults with equal headlines and details
            become one entry of a message, with all their keys.
        place: Facts about this key, on this rank, alone. An entry with several keys or ranks shows
            those of the first.
        ranks: The ranks that have it; empty where it is about no ranks or names them itself.
    """

    JSON: ClassVar[str] = "fqn headline details=facts"

    fqn: str
    headline: str
    details: tuple[str, ...] = ()
    place: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def facts(self) -> tuple[str, ...]:
        """All lines below the headline."""
        on = (f"on:          {format_ranks(self.ranks)}",) if self.ranks else ()
        return (*on, *self.place, *self.details)

    def __str__(self) -> str:
        return _format_entry([self])


class CannotPlace(PlacementError):
    """Why one tensor has no place in the checkpoint; becomes a ``Fault`` with its key.

    Args:
        headline: What does not fit.
        details: Causes and the way out.
        place: Facts about this rank alone.
    """

    def __init__(self, headline: str, *details: str, place: tuple[str, ...] = ()) -> None:
        super().__init__(headline, *details)
        self.headline = headline
        self.details = details
        self.place = place

    def __str__(self) -> str:
        return "\n    ".join(self.args)

    def fault(self, fqn: str, rule: str | None = None) -> Fault:
        """Return it as the fault of a key, which a rule matches."""
        by_rule = () if rule is None else (f"by rule:     {rule}",)
        return Fault(fqn, self.headline, (*self.details, *by_rule), self.place)


def format_faults(
    opening: str, faults: Iterable[Fault], noun: str = "fault", *, ranks: tuple[int, ...] = ()
) -> str:
    """Return the text of one error for all ``faults``: an opening line, then each, by FQN.

    Args:
        opening: The first line.
        faults: What it describes.
        noun: What the first line counts.
        ranks: The ranks that the first line names: a fault on all of them does not repeat them.
    """
    alike: dict[tuple[str, tuple[str, ...]], dict[Fault, None]] = {}
    for fault in sorted(faults, key=lambda fault: (fault.fqn, fault.headline, fault.details)):
        alike.setdefault((fault.headline, fault.details), {})[fault] = None
    groups = [list(group) for group in alike.values()]
    keys = sum(len({fault.fqn for fault in group}) for group in groups)
    of_keys = f" of {format_count(keys, 'key')}" if keys > len(groups) else ""
    lines = [f"{opening} ({format_count(len(groups), noun)}{of_keys})"]
    lines += [_format_entry(group, ranks) for group in groups[:MAX_FAULTS]]
    if rest := dict.fromkeys(fault.fqn for group in groups[MAX_FAULTS:] for fault in group):
        lines.append(f"... and {len(rest)} more, at: {format_names(folded(rest))}")
    return shortened("\n".join(lines), MAX_TEXT)


def _format_entry(alike: Sequence[Fault], ranks: tuple[int, ...] = ()) -> str:
    """Return the entry of faults that differ in keys, places and ranks alone."""
    first = alike[0]
    of_key: dict[str, list[tuple[int, ...]]] = {}
    for fault in alike:
        of_key.setdefault(fault.fqn, []).append(fault.ranks)
    everywhere = set(chain.from_iterable({fault.ranks for fault in alike}))
    place, on = list(first.place), []
    if place and len(everywhere) > 1:
        place[0] += f" on {format_ranks(first.ranks[:1])}"
    if place and len(of_key) > 1:
        place[0] += f" (of {first.fqn})"
    fewer = any(len(set(chain(*held))) < len(everywhere) for held in of_key.values())
    if everywhere and (fewer or everywhere != set(ranks)):
        some = ", some of the keys on fewer" if fewer else ""
        on = [f"on:          {format_ranks(everywhere)}{some}"]
    lines = [first.headline, *on, *place, *first.details]
    if len(lines) > MAX_LINES:  # the last ones are the way out
        left = f"... {len(lines) - MAX_LINES} more lines"
        lines = [*lines[: MAX_LINES // 2], left, *lines[-MAX_LINES // 2 :]]
    # Any line may contain names of files or keys, so all of them are escaped.
    headline, *details = [format_name(line, MAX_LINE) for line in lines]
    names = format_names(folded(of_key), MAX_NAMES)
    return "\n    ".join([f"{names}: {headline}", *details])


def raise_faults(opening: str, faults: Iterable[Fault]) -> None:
    """Raise one ``PlacementError`` for all ``faults``; do nothing when there are none."""
    faults = list(faults)
    if faults:
        raise PlacementError(format_faults(opening, faults))


def fault_error(opening: str, fqn: str, headline: str, *details: str) -> PlacementError:
    """Return the error of one fault."""
    return PlacementError(format_faults(opening, [Fault(fqn, headline, details)]))


def packed_faults(faults: Sequence[Fault]) -> bytes:
    """Return faults as they travel: the first ``MAX_SENT``. Those of most keys have one text."""
    sent = sorted(faults, key=lambda fault: fault.fqn)[:MAX_SENT]
    return zlib.compress(pickle.dumps(sent), 1) if sent else b""


def unpacked_faults(packed: bytes) -> Sequence[Fault]:
    """Return the faults that were packed."""
    faults: Sequence[Fault] = pickle.loads(zlib.decompress(packed)) if packed else ()
    return faults


def raise_faults_of_ranks(
    refused: str, sent: Mapping[int, bytes], mistakes: Sequence[Fault] = ()
) -> None:
    """Raise one ``PlacementError`` for the faults of all ranks; do nothing when there are none.

    A fault that several ranks have is described once, with its ranks.

    Args:
        refused: The opening line after the ranks, such as ``"cannot be loaded"``.
        sent: By rank, its faults packed.
        mistakes: Possible causes that no single rank knows of.
    """
    by_content: dict[bytes, list[int]] = {}
    for rank, packed in sorted(sent.items()):
        if packed:
            by_content.setdefault(packed, []).append(rank)
    faults: list[Fault] = []
    are_more = False
    for packed, members in by_content.items():
        of_rank = unpacked_faults(packed)
        are_more |= len(of_rank) == MAX_SENT
        faults += [replace(fault, ranks=tuple(members)) for fault in of_rank]
    if faults:
        refusing = tuple(sorted(rank for members in by_content.values() for rank in members))
        more = f"; the first {MAX_SENT:,} faults of each rank" if are_more else ""
        opening = f"{format_ranks(refusing)} {refused}{more}"
        raise PlacementError(format_faults(opening, [*faults, *mistakes], ranks=refusing))


class KeyFamily(NamedTuple):
    """Keys that differ in numbers alone: ``KeyFamily("h.0-1.w", ("h.0.w", "h.1.w"))``.

    Attributes:
        name: The keys as one name, with ranges of numbers; every combination of them is a key.
        keys: In natural order.
    """

    name: str
    keys: tuple[str, ...]


def natural_key(name: str) -> tuple[tuple[int, str, int], ...]:
    """Return what sorts names by the numbers in them.

    >>> sorted(["layers.10.w", "layers.2.w", "embed"], key=natural_key)
    ['embed', 'layers.2.w', 'layers.10.w']
    """
    parts = [part for part in _DIGITS.split(name[:MAX_NAME]) if part]
    return tuple([(0, "", int(part)) if part.isdecimal() else (1, part, 0) for part in parts])


def families(keys: Iterable[str] | Mapping[str, Hashable]) -> list[KeyFamily]:
    """Return the families of keys, in natural order of their first keys.

    Args:
        keys: The keys. Of a mapping, only keys with equal values form one family.

    >>> [family.name for family in families(["h.0.w", "h.1.w", "h.1.b", "head"])]
    ['h.0-1.w', 'h.1.b', 'head']
    """
    values: Mapping[str, Hashable] = keys if isinstance(keys, Mapping) else dict.fromkeys(keys)
    by_text: dict[tuple[tuple[str, ...], Hashable], dict[_Numbers, str]] = {}
    for key, value in values.items():
        parts = _FOLDED.split(key) if len(key) <= MAX_NAME else [key]  # texts, numbers between
        numbers = tuple(map(int, parts[1::2]))
        by_text.setdefault((tuple(parts[::2]), value), {})[numbers] = key
    result = []
    for (texts, _), members in by_text.items():
        for ranges in _products(frozenset(members)):
            parts = [format_numbers(numbers) for numbers in ranges]
            between = zip([part.replace(", ", ",") for part in parts], texts[1:], strict=True)
            name = texts[0] + "".join([numbers + text for numbers, text in between])
            result.append(KeyFamily(name, tuple([members[each] for each in product(*ranges)])))
    return sorted(result, key=lambda family: natural_key(family.keys[0]))


def numbers_in(key: str) -> Iterator[tuple[str, int, str]]:
    """Yield each number of a key that tells the members of its family apart.

    >>> [*numbers_in("layers.0.experts.12.w1")]
    [('layers.', 0, '.experts.12.w1'), ('layers.0.experts.', 12, '.w1')]

    Yields:
        What is before it, the number, and what is behind it.
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


_Numbers = tuple[int, ...]

_DIGITS = re.compile(r"(\d+)")
# A whole component, or the expert in Megatron's weight3; the digit of w1 belongs to the name.
# That it begins with a digit is tested first: the search is twice as fast. Python reads no number
# of thousands of digits.
_FOLDED = re.compile(r"(?=[0-9])(?:^|(?<=\.)|(?<=\.weight)|(?<=\.bias))(0|[1-9]\d{0,17})(?=\.|$)")


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as short text.

    >>> format_numbers([5, 0, 1, 2])
    '0-2, 5'
    """
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs[:12]]
    if len(runs) > 12:
        texts.append(f"... ({len(ordered)} in all)")
    return ", ".join(texts)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as short text.

    >>> format_ranks([3, 0, 1, 2, 7]), format_ranks([5])
    ('ranks 0-3, 7', 'rank 5')
    """
    ranks = set(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {format_numbers(ranks)}"


def folded(names: Iterable[str]) -> list[str]:
    """Return names with those that differ in numbers alone as one."""
    return [family.name for family in families(list(names))]


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """Return up to ``limit`` names, and how many more there are.

    >>> format_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    text = ", ".join([format_name(name) for name in names[:limit]])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def shortened(text: str, limit: int) -> str:
    """Return a text of at most about ``limit`` characters: a longer one lacks its middle.

    >>> shortened("layers.0.w", 10), shortened("a" * 50 + "b" * 50, 10)
    ('layers.0.w', 'aaaaa... (90 more characters) ...bbbbb')
    """
    if len(text) <= limit:
        return text
    left = f"... ({len(text) - limit // 2 * 2:,} more characters) ..."
    return f"{text[: limit // 2]}{left}{text[-(limit // 2) :]}"


def near_names(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Return up to ``count`` names that are spelled nearly as one; none where that takes long.

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
    """Return what an error says, as one line that is safe to print; what it is if it says nothing.

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
