"""The root of all errors of this package, and the format of their messages.

Somebody whose job has stopped reads them. A message therefore begins with the FQN, then compares
what was found with what was declared, one fact per line, and ends with the way out. One error
carries all faults of one pass, sorted by FQN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

MAX_FAULTS = 40
"""Different faults that one message describes; of the rest it lists the FQNs."""

MAX_NAMES = 20
"""Keys that a message lists for one fault."""


class PlacementError(ValueError):
    """The root of all errors of this package.

    ``dcp.save`` and ``dcp.load`` wrap it in torch's ``CheckpointException`` (a ``BaseException``);
    it is then ``e.failures[rank][0]``.
    """


class CannotLook(PlacementError):
    """A checkpoint cannot be examined: no such path, no checkpoint in it, or refused metadata.

    It is about the request; a ``Fault`` is about the checkpoint.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan or a checkpoint.

    Attributes:
        fqn: The checkpoint key that is wrong; faults are sorted by it.
        headline: What is wrong, in one line, without the key.
        details: Causes and the way out, one per line. Faults with equal headlines and details
            become one entry of a message, with all their keys.
        place: Facts about this key alone. An entry with several keys shows those of the first.
    """

    JSON: ClassVar[str] = "fqn headline details=facts"

    fqn: str
    headline: str
    details: tuple[str, ...] = ()
    place: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[str, ...]:
        """All lines below the headline."""
        return (*self.place, *self.details)

    def __str__(self) -> str:
        return _format_fault([self.fqn], self)


def format_faults(opening: str, faults: Iterable[Fault], noun: str = "fault") -> str:
    """Return the text of one error for all ``faults``: an opening line, then each, by FQN."""
    ordered = sorted(set(faults), key=lambda fault: (fault.fqn, fault.headline, fault.details))
    alike: dict[tuple[str, tuple[str, ...]], list[Fault]] = {}
    for fault in ordered:
        alike.setdefault((fault.headline, fault.details), []).append(fault)
    groups = list(alike.values())
    lines = [f"{opening} ({len(ordered)} {noun}{'s' if len(ordered) != 1 else ''})"]
    lines += [_format_fault([f.fqn for f in group], group[0]) for group in groups[:MAX_FAULTS]]
    rest = [fault.fqn for group in groups[MAX_FAULTS:] for fault in group]
    if rest:
        lines.append(f"... and {len(rest)} more, at: {format_names(list(dict.fromkeys(rest)))}")
    return "\n".join(lines)


def _format_fault(fqns: Sequence[str], fault: Fault) -> str:
    place = list(fault.place)
    if place and len(fqns) > 1:
        place[0] += f" (of {fqns[0]})"
    # Any line may contain names of files or keys, so all of them are escaped.
    headline, *details = map(format_name, [fault.headline, *place, *fault.details])
    return "\n    ".join([f"{format_names(fqns, MAX_NAMES)}: {headline}", *details])


def raise_faults(opening: str, faults: Iterable[Fault]) -> None:
    """Raise one ``PlacementError`` for all ``faults``; do nothing when there are none."""
    faults = list(faults)
    if faults:
        raise PlacementError(format_faults(opening, faults))


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as short text.

    >>> format_ranks([3, 0, 1, 2, 7])
    'ranks 0-3, 7'
    >>> format_ranks([5])
    'rank 5'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:12]]
    if len(runs) > 12:
        texts.append(f"... ({len(ordered)} in all)")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts)


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """Return up to ``limit`` names, and how many more there are.

    >>> format_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    text = ", ".join([format_name(name) for name in names[:limit]])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def format_name(name: object) -> str:
    """Return a name, or any text from a file, as one line that is safe to print.

    Line breaks, terminal control sequences and other unprintable characters are escaped.

    >>> print(format_name("layers.0.w"), format_name("w\\nall sound\\x1b[2K"))
    layers.0.w w\\nall sound\\x1b[2K
    """
    text = str(name)
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def format_nbytes(nbytes: int) -> str:
    """Return a byte count as short text, in binary units.

    >>> format_nbytes(512), format_nbytes(8 * 2**20)
    ('512 B', '8.0 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 1024 or unit == "PiB":
            break
    return f"{size:.1f} {unit}"
