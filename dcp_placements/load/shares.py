"""Which rank of a replica set reads what: integers only, with the same result on every rank.

Ranks that want the same boxes of the same tensors are a replica set: a grid, with one *line* of
ranks along each axis that cuts none of these tensors. Each rank claims its sets; the coordinator
grants those that all members claim alike; each member then works out everybody's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from dcp_placements.errors import format_ranks

SHARE_NBYTES = 256 << 10
"""A set with less than this per member is read by fewer members: it costs latency alone."""

SPLIT_NBYTES = 64 << 10
"""No box is split to balance less than this."""

SLACK = 0.02
"""How far above the mean a member may be before the next one reads: two are within 5 %."""


class Claim(NamedTuple):
    """What one rank would share with the ranks of one replica set.

    Attributes:
        content: Hash of the names, boxes and dtypes that it wants.
        lines: Hash of the ranks along each axis.
        sizes: Ranks along each axis.
        coordinate: This rank's position along each axis.
    """

    content: int
    lines: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Claims:
    """What travels with a load plan to the coordinator.

    Attributes:
        group: Hash of the ranks of the process group that would agree on the reads.
        size: Ranks in it.
        position: This rank's, among them.
        claims: One per replica set.
        hooked: Whether the storage reader hands over to the exchange after the reads.
    """

    group: int
    size: int
    position: int
    claims: tuple[Claim, ...]
    hooked: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the coordinator answers.

    Attributes:
        active: Whether anything is exchanged on any rank: all ranks agree after the reads then.
        numbers: Per claim the number of its set, by which all ranks go in the same order; -1 where
            every rank reads for itself.
        why: Why nothing is exchanged, where the user can do something about it.
        way_out: What the user can do.
    """

    active: bool
    numbers: tuple[int, ...] = ()
    why: str = ""
    way_out: str = ""


def verdicts(sent: Sequence[Any]) -> list[Verdict]:
    """Return the coordinator's answer to each rank, from the claims of all.

    A set is granted when its members are a whole grid, every line of it complete, and all of them
    claim the same content: then no member can wait for one that does not come.

    Args:
        sent: Each rank's ``Claims``, in the order of the process group; anything else for a rank
            whose planner exchanges nothing.
    """
    objection = _objection(sent)
    if objection is not None:
        return [objection] * len(sent)
    nodes = [(rank, at) for rank, claims in enumerate(sent) for at in range(len(claims.claims))]
    lines: dict[int, list[tuple[int, int]]] = {}
    for rank, at in nodes:
        for line in sent[rank].claims[at].lines:
            lines.setdefault(line, []).append((rank, at))
    numbers = [[-1] * len(claims.claims) for claims in sent]
    seen: set[tuple[int, int]] = set()
    count = 0
    for node in nodes:
        if node in seen:
            continue
        seen.add(node)
        members = [node]
        for rank, at in members:  # grows as it goes
            for line in sent[rank].claims[at].lines:
                for other in lines[line]:
                    if other not in seen:
                        seen.add(other)
                        members.append(other)
        if _is_grid([sent[rank].claims[at] for rank, at in members], lines):
            for rank, at in members:
                numbers[rank][at] = count
            count += 1
    return [Verdict(count > 0, tuple(found)) for found in numbers]


def _objection(sent: Sequence[Any]) -> Verdict | None:
    """Return why these ranks cannot exchange at all; None where they can."""
    if len(sent) == 1:
        return Verdict(False)  # One process alone has nothing to exchange.
    without = [rank for rank, claims in enumerate(sent) if not isinstance(claims, Claims)]
    if without:
        why = f"the planner of {format_ranks(without)} was not given exchange=True"
        return Verdict(False, why=why, way_out="exchange=True on all ranks")
    if not all(claims.hooked for claims in sent):
        why = "the storage reader does not call the exchange after the reads"
        way_out = "storage_reader=PlacementFileSystemReader(path)"
        return Verdict(False, why=why, way_out=way_out)
    alike = {(claims.group, claims.size) for claims in sent}
    places = [claims.position for claims in sent]
    if len(alike) > 1 or sent[0].size != len(sent) or places != list(range(len(sent))):
        why = f"the load runs on another process group, of {len(sent)} ranks"
        return Verdict(False, why=why, way_out="exchange=group, the one that the load runs on")
    return None


def _is_grid(claims: Sequence[Claim], lines: dict[int, list[tuple[int, int]]]) -> bool:
    first = claims[0]
    sizes = first.sizes
    if any(claim.content != first.content or claim.sizes != sizes for claim in claims):
        return False
    if len(claims) != prod(sizes) or len({claim.coordinate for claim in claims}) != len(claims):
        return False
    others: dict[int, tuple[int, tuple[int, ...]]] = {}
    for claim in claims:
        at = claim.coordinate
        for axis, line in enumerate(claim.lines):
            place = (axis, at[:axis] + at[axis + 1 :])
            if len(lines[line]) != sizes[axis] or others.setdefault(line, place) != place:
                return False
    return True


class Wanted(NamedTuple):
    """A destination box that all members of a set want.

    Attributes:
        nbytes: To be read for it.
        rows: Along its first dim that is longer than 1; 1 where there is none.
        near: The member that wrote it, in whose file it is; None where nobody is known to have.
    """

    nbytes: int
    rows: int
    near: int | None = None


class Share(NamedTuple):
    """Rows of a destination box that one member reads for all."""

    member: int
    start: int
    stop: int


def shares(wanted: Sequence[Wanted], members: int) -> list[list[Share]]:
    """Return per box who reads which of its rows: every row once.

    What a member wrote it reads, up to the mean and a little; the rest goes to the members in
    order, as runs of boxes, so that each opens few files. A box that does not fit is split by
    rows. All that hangs on the arguments alone, so that all members find the same.

    Four boxes of 3 MiB over two members::

        box    member 0     member 1
        0      rows 0-3
        1      rows 0-3
        2                   rows 0-3
        3                   rows 0-3
    """
    readers = _readers(wanted, members)
    left = sum(box.nbytes for box in wanted)
    load = dict.fromkeys(readers, 0)
    most = left / len(readers) * (1 + SLACK)
    found: list[list[Share]] = [[] for _ in wanted]
    for at, box in enumerate(wanted):
        if box.near in load and load[box.near] + box.nbytes <= most:
            found[at].append(Share(box.near, 0, box.rows))
            load[box.near] += box.nbytes
            left -= box.nbytes
    # Those with the least to read yet come last: what rounding leaves is theirs.
    todo = sorted(readers, key=lambda member: -load[member])
    for at, box in enumerate(wanted):
        start = 0 if not found[at] else box.rows
        while start < box.rows:
            reader = todo[0]
            mean = (left + sum(load[member] for member in todo)) / len(todo)
            nbytes = box.nbytes * (box.rows - start) // box.rows
            room = mean - load[reader]
            stop = box.rows
            if len(todo) > 1 and nbytes > room + SLACK * mean:
                fit = int(room * box.rows // box.nbytes) if room > 0 else 0
                stop = start + fit
                if not fit or min(room, nbytes - room) < SPLIT_NBYTES:
                    stop = box.rows if room >= nbytes / 2 else start
            if stop > start:
                taken = box.nbytes * (stop - start) // box.rows
                found[at].append(Share(reader, start, stop))
                load[reader] += taken
                left -= taken
            if stop < box.rows:
                todo.pop(0)
            start = stop
    return found


def _readers(wanted: Sequence[Wanted], members: int) -> list[int]:
    """Return the members that read, ascending: those that wrote the most, else spread evenly."""
    count = sum(box.nbytes for box in wanted) // SHARE_NBYTES
    count = max(1, min(members, count))
    if count == members:
        return list(range(members))
    written: dict[int, int] = {}
    for box in wanted:
        if box.near is not None:
            written[box.near] = written.get(box.near, 0) + box.nbytes
    near = sorted(written, key=lambda member: (-written[member], member))[:count]
    spread = [member for i in range(count) if (member := i * members // count) not in near]
    return sorted([*near, *spread][:count])
