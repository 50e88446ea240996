"""The root of all errors of this package, and the format of their messages.

Somebody whose job has stopped reads them. A message therefore begins with the FQN, then compares
what was found with what was declared, one fact per line, and ends with the way out. One error
carries all faults of one pass, sorted by FQN.
"""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from traceback import extract_tb
from typing import Any, NamedTuple

from dcp_placements.short_text import (
    MAX_LINE,
    folded_names,
    format_count,
    format_name,
    format_names,
    format_ranks,
    shortened,
)

MAX_FAULTS = 40
"""Different faults that one message describes; it lists the FQNs of the rest."""

MAX_SENT = 1000
"""Faults that a rank sends to the coordinator."""

MAX_NAMES = 8
"""Keys that a message lists for one fault."""

MAX_LINES = 40
"""Lines below the headline of one fault."""

MAX_TEXT = 60_000
"""Characters of a whole message; what is longer lacks its middle."""


class PlacementError(ValueError):
    """The root of all errors of this package.

    ``dcp.save`` and ``dcp.load`` wrap it in torch's ``CheckpointException`` (a ``BaseException``);
    it is then ``e.failures[rank][0]``. The coordinator raises the faults of all plans as one error;
    higher ranks get its first line.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*[_bounded(arg) if isinstance(arg, str) else arg for arg in args])

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
    if distributed is None or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def _received(kind: type[PlacementError], text: str, sender: int) -> PlacementError:
    """Return the error that a rank sent: all of its text, or on higher ranks its first line."""
    first, *more = text.split("\n")
    if more and _rank() > sender:
        text = f"{first}; rank {sender} has the whole message"
    return kind(text)


class CannotLook(PlacementError):
    """A checkpoint cannot be examined: no such path, no checkpoint in it, or refused metadata.

    The request is at fault; a ``Fault`` is about the checkpoint.
    """


class NoCheckpoint(PlacementError, FileNotFoundError):
    """A load names a directory that has no ``.metadata``: no checkpoint, or not a complete one."""


class Uneven(NamedTuple):
    """A shard of another size than the plain cut that is declared makes.

    Five of eight rows on the second of two ep ranks::

        Uneven("ep", dim=0, position=1, size=5, plain=(4, 4))

    Attributes:
        axis: The axis of the cut.
        dim: The dim that it cuts; None where it divides the flattened tensor.
        position: The position of this rank along the axis.
        size: The size of its shard.
        plain: The sizes of all shards as they are declared.
        is_declared: Whether ``RaggedShard`` declares them, so that their sum may be wrong, too.
        outer: The cuts of the dim that come before: axis, placement, size and this rank's position
            along it.
    """

    axis: str
    dim: int | None
    position: int
    size: int
    plain: tuple[int, ...]
    is_declared: bool = False
    outer: tuple[tuple[str, str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan or a checkpoint.

    Attributes:
        fqn: The checkpoint key that is wrong; faults are sorted by it.
        headline: What is wrong, in one line, without the key.
        details: Causes and the way out, one per line. Faults with equal headlines and details
            become one entry of a message, with all their keys.
        where: Facts about this key, on this rank, alone. An entry with several keys or ranks shows
            those of the first.
        ranks: The ranks that have it; empty if it concerns no ranks, or its headline names them.
        uneven: The shard that this rank has instead, if that may be all that is wrong; from those
            of all ranks follows the line to write.
        is_of_declaration: Whether ``fqn`` is what a user wrote, such as a rename, and no key. Such
            a fault comes first: others may follow from it.
    """

    fqn: str
    headline: str
    details: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    uneven: Uneven | None = field(default=None, repr=False)
    is_of_declaration: bool = False

    @property
    def facts(self) -> tuple[str, ...]:
        """All lines below the headline."""
        on = (f"on:          {format_ranks(self.ranks)}",) if self.ranks else ()
        return (*on, *self.where, *self.details)

    def __str__(self) -> str:
        return _format_entry([self])


class CannotPlace(PlacementError):
    """Why one tensor has no place in the checkpoint; becomes a ``Fault`` with its key.

    Args:
        headline: What does not fit.
        details: Causes and the way out.
        where: Facts about this rank alone.
        uneven: The shard that this rank has instead, if that may be all that is wrong.
    """

    def __init__(
        self,
        headline: str,
        *details: str,
        where: tuple[str, ...] = (),
        uneven: Uneven | None = None,
    ) -> None:
        super().__init__(headline, *details)
        self.headline = headline
        self.details = details
        self.where = where
        self.uneven = uneven

    def __str__(self) -> str:
        return "\n    ".join(self.args)

    def fault(self, fqn: str, rule: str | None = None) -> Fault:
        """Return it as the fault of a key, which a rule matches."""
        by_rule = () if rule is None else (f"by rule:     {rule}",)
        details = *self.details, *by_rule
        return Fault(fqn, self.headline, details, self.where, uneven=self.uneven)


def format_faults(
    opening: str, faults: Iterable[Fault], noun: str = "fault", *, ranks: tuple[int, ...] = ()
) -> str:
    """Return the text of one error: an opening line, then an entry per fault, sorted by FQN.

    Args:
        opening: The first line.
        faults: The faults.
        noun: What the first line counts.
        ranks: The ranks that the first line names: a fault on all of them does not repeat them.
    """
    by_text: dict[tuple[str, tuple[str, ...]], dict[Fault, None]] = {}
    for fault in sorted(faults, key=_order):
        by_text.setdefault((fault.headline, fault.details), {})[fault] = None
    entries = [list(entry) for entry in by_text.values()]
    of_key = [entry for entry in entries if not entry[0].is_of_declaration]
    keys = sum(len({fault.fqn for fault in entry}) for entry in of_key)
    of_keys = f" of {format_count(keys, 'key')}" if keys > len(of_key) else ""
    lines = [f"{opening} ({format_count(len(entries), noun)}{of_keys})"]
    lines += [_format_entry(entry, ranks) for entry in entries[:MAX_FAULTS]]
    if rest := dict.fromkeys(fault.fqn for entry in entries[MAX_FAULTS:] for fault in entry):
        lines.append(f"... and {len(rest)} more, at: {format_names(folded_names(rest))}")
    return shortened("\n".join(lines), MAX_TEXT)


def _order(fault: Fault) -> tuple[bool, str, str, tuple[str, ...]]:
    return not fault.is_of_declaration, fault.fqn, fault.headline, fault.details


def _format_entry(entry: Sequence[Fault], ranks: tuple[int, ...] = ()) -> str:
    """Return the text of faults with one headline and equal details."""
    first = entry[0]
    ranks_of: dict[str, list[tuple[int, ...]]] = {}
    for fault in entry:
        ranks_of.setdefault(fault.fqn, []).append(fault.ranks)
    everywhere = set(chain.from_iterable({fault.ranks for fault in entry}))
    where, on = list(first.where), []
    if where and len(everywhere) > 1:
        where[0] += f" on {format_ranks(first.ranks[:1])}"
    if where and len(ranks_of) > 1:
        where[0] += f" (of {first.fqn})"
    fewer = any(len(set(chain(*of_key))) < len(everywhere) for of_key in ranks_of.values())
    if everywhere and (fewer or everywhere != set(ranks)):
        some = ", some of the keys on fewer" if fewer else ""
        on = [f"on:          {format_ranks(everywhere)}{some}"]
    lines = [first.headline, *on, *where, *first.details]
    if len(lines) > MAX_LINES:  # the last ones are the way out
        left = f"... {len(lines) - MAX_LINES} more lines"
        lines = [*lines[: MAX_LINES // 2], left, *lines[-MAX_LINES // 2 :]]
    # Any line may contain names of files or keys, so all of them are escaped.
    headline, *details = [format_name(line, MAX_LINE) for line in lines]
    names = format_names(folded_names(ranks_of), MAX_NAMES)
    return "\n    ".join([f"{names}: {headline}", *details])


def raise_faults(opening: str, faults: Iterable[Fault], ending: str = "") -> None:
    """Raise one ``PlacementError`` for all ``faults``; do nothing when there are none.

    Args:
        opening: The first line.
        faults: The faults.
        ending: What stands below all of them, such as a declaration; empty for nothing.
    """
    faults = list(faults)
    if faults:
        text = format_faults(opening, faults)
        raise PlacementError(f"{text}\n\n{ending}" if ending else text)


def fault_error(opening: str, fqn: str, headline: str, *details: str) -> PlacementError:
    """Return the error of one fault."""
    return PlacementError(format_faults(opening, [Fault(fqn, headline, details)]))


def raised_line(error: BaseException) -> str:
    """Return the line of a message that says where a function of the user's raised an error."""
    frame = extract_tb(error.__traceback__)[-1]
    return f"raised:      {frame.filename}:{frame.lineno}, in {frame.name}"


def packed_faults(faults: Sequence[Fault]) -> bytes:
    """Return the first ``MAX_SENT`` faults packed: most of them repeat one text."""
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
        sent: The packed faults of each rank.
        mistakes: Possible causes that no rank sees by itself.
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
        faults = _with_sizes(faults)
        raise PlacementError(format_faults(opening, [*faults, *mistakes], ranks=refusing))


def _with_sizes(faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults of all ranks; those of uneven shards with the sizes of all shards.

    A rank without a fault has the shard that was declared. Where the shards are not those of the
    whole, other ranks or shapes are wrong, and the faults stay as they are.
    """
    sizes: dict[tuple[str, str, int | None], dict[int, set[int]]] = {}
    parts: dict[tuple[str, str, int | None], set[tuple[int, ...]]] = {}
    for fault in faults:
        if (shard := fault.uneven) is not None:
            key = fault.fqn, shard.axis, shard.dim
            sizes.setdefault(key, {}).setdefault(shard.position, set()).add(shard.size)
            parts.setdefault(key, set()).add(tuple([position for *_, position in shard.outer]))
    result = []
    for fault in faults:
        if (shard := fault.uneven) is not None:
            key = fault.fqn, shard.axis, shard.dim
            held = [sizes[key].get(position, {n}) for position, n in enumerate(shard.plain)]
            shards = tuple([min(of_position) for of_position in held])
            # One line serves all parts that the outer cuts leave.
            is_clear = len(parts[key]) == prod([size for *_, size, _ in shard.outer])
            is_clear &= all(len(of_position) == 1 for of_position in held)
            if is_clear and (shard.is_declared or sum(shards) == sum(shard.plain)):
                outer = {axis: placement for axis, placement, *_ in shard.outer}
                line = uneven_line(shard.axis, shard.dim, shards, outer)
                fault = replace(fault, details=(line, *fault.details))
        result.append(fault)
    return result


def uneven_line(
    axis: str, dim: int | None, sizes: tuple[int, ...], outer: Mapping[str, str] | None = None
) -> str:
    """Return the line of a message that says how uneven shards or ranges are declared.

    >>> print(uneven_line("fsdp", 0, (5, 3), {"tp": "Shard(0)"}))  # doctest: +NORMALIZE_WHITESPACE
    if uneven:   {"tp": Shard(0), "fsdp": RaggedShard(0, (5, 3))} in the rule of every rank, on a
    mesh with 'tp' before 'fsdp'

    Args:
        axis: The axis that cuts them.
        dim: The dim; None for ranges.
        sizes: Their sizes, by position along the axis.
        outer: The axes that cut the dim before, with their placements.
    """
    placement = f"FlatShard({sizes})" if dim is None else f"RaggedShard({dim}, {sizes})"
    placements = {**(outer or {}), axis: placement}
    entries = ", ".join([f'"{name}": {text}' for name, text in placements.items()])
    order = f", on a mesh with {' before '.join(map(repr, placements))}" if outer else ""
    return f"if uneven:   {{{entries}}} in the rule of every rank{order}"
