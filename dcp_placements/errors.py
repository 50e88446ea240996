"""The one error that refuses, and the form of its text.

A refusal is read by somebody whose job has stopped. So it says where first (the FQN), then what was
found against what was declared, each fact on a line of its own, then the way out. Everything found
in one pass is told in one error, sorted by FQN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

MAX_FAULTS_TOLD = 40
"""Different faults told in full; beyond, the error counts the rest by FQN."""

MAX_NAMES_TOLD = 20
"""Keys named that share one fault."""


class PlacementError(ValueError):
    """The root of every refusal of this package.

    Raised inside ``dcp.save`` or ``dcp.load`` it arrives wrapped in torch's
    ``CheckpointException`` (a ``BaseException``); it is then ``e.failures[rank][0]``.
    """


class CannotLook(PlacementError):
    """There is nothing to look at, or it is not to be read: no such path, no checkpoint in it,
    metadata that is refused. Said of the question, where faults are said of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing found wrong.

    Attributes:
        fqn: The checkpoint key that it is about; also what faults are sorted by.
        headline: What is wrong, in one line, without the key.
        details: Causes and the way out, one per line. Keys with one headline and one set of
            details are told together.
        place: Facts that are this key's alone; told of the first of several keys.
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
        return _told([self.fqn], self)


def format_faults(opening: str, faults: Iterable[Fault], noun: str = "fault") -> str:
    """Return the text of one error for all ``faults``: an opening line, then each, by FQN."""
    ordered = sorted(set(faults), key=lambda fault: (fault.fqn, fault.headline, fault.details))
    alike: dict[tuple[str, tuple[str, ...]], list[Fault]] = {}
    for fault in ordered:
        alike.setdefault((fault.headline, fault.details), []).append(fault)
    groups = list(alike.values())
    lines = [f"{opening} ({len(ordered)} {noun}{'s' if len(ordered) != 1 else ''})"]
    lines += [_told([f.fqn for f in group], group[0]) for group in groups[:MAX_FAULTS_TOLD]]
    untold = [fault.fqn for group in groups[MAX_FAULTS_TOLD:] for fault in group]
    if untold:
        lines.append(f"... and {len(untold)} more, at: {format_names(list(dict.fromkeys(untold)))}")
    return "\n".join(lines)


def _told(fqns: Sequence[str], fault: Fault) -> str:
    place = list(fault.place)
    if place and len(fqns) > 1:
        place[0] += f" (of {fqns[0]})"
    lines = [f"{fault.headline}", *place, *fault.details]
    # What names of files and keys are in them, is not known here.
    headline, *details = map(format_name, lines)
    return "\n    ".join([f"{format_names(fqns, MAX_NAMES_TOLD)}: {headline}", *details])


def raise_faults(opening: str, faults: Iterable[Fault]) -> None:
    """Raise one ``PlacementError`` for all ``faults``; return quietly when there are none."""
    found = list(faults)
    if found:
        raise PlacementError(format_faults(opening, found))


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
    told = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:12]]
    if len(runs) > 12:
        told.append(f"... ({len(ordered)} in all)")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(told)


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """Return up to ``limit`` names, and how many more there are.

    >>> format_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    told = ", ".join([format_name(name) for name in names[:limit]])
    return told if len(names) <= limit else f"{told} and {len(names) - limit} more"


def format_name(name: object) -> str:
    """Return a name, or any text from a file, as text of one line that a terminal only shows.

    Line breaks, escape sequences and whatever else is not printable are escaped.

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
