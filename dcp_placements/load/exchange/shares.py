"""Which rank of a replica set reads what: integers only, with the same result on every rank.

Ranks that need the same boxes of the same tensors are a replica set: a grid, with one *line* of
ranks along each axis that replicates these tensors. Each rank claims its sets; the coordinator
grants those whose members all make the same claim; each member then computes the shares of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from dcp_placements.errors import Fault, format_ranks

SHARE_NBYTES = 256 << 10
"""A set with fewer bytes per member is read by fewer members: more would cost latency alone."""

SPLIT_NBYTES = 64 << 10
"""No box is split to balance fewer bytes."""

SLACK = 0.02
"""How far a member may exceed the mean before the next one reads; keeps any two within 5 %."""


class Claim(NamedTuple):
    """What one rank could share with the ranks of one replica set.

    Attributes:
        content: Hash of the names, boxes and dtypes that it needs.
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
    """A rank's claims, as it sends them to the coordinator.

    Attributes:
        group: Hash of the ranks of the process group that the load runs on.
        size: Number of ranks in it.
        position: This rank's position in it.
        claims: One per replica set.
        hooked: Whether the storage reader calls the exchange after the reads.
    """

    group: int
    size: int
    position: int
    claims: tuple[Claim, ...]
    hooked: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The coordinator's answer to a rank's claims.

    Attributes:
        active: Whether anything is exchanged on any rank; all ranks then agree after the reads.
        numbers: Per claim the number of its set, which orders the sets on all ranks; -1 where
            every rank reads for itself.
        why: Why nothing is exchanged, where the user can change it.
        way_out: What the user can do.
    """

    active: bool
    numbers: tuple[int, ...] = ()
    why: str = ""
    way_out: str = ""

    @property
    def notes(self) -> list[Fault]:
        """What the user reads where nothing is exchanged and could be."""
        if not self.why:
            return []
        about = (f"because:     {self.why}", f"way out:     {self.way_out}")
        return [Fault("exchange=True", "every rank reads all that it needs by itself", about)]


def verdicts(sent: Sequence[Any]) -> list[Verdict]:
    """Return the coordinator's answer to each rank, from the claims of all.

    A set is granted when its members are a whole grid, every line of it complete, and all of them
    claim the same content, so that no member waits for one that does not come.

    Args:
        sent: Each rank's ``Claims``, in the order of the process group; None for a rank whose
            planner exchanges nothing.
    """
    refusal = _refusal(sent)
    if refusal is not None:
        return [refusal] * len(sent)
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
        for rank, at in members:  # grows during the iteration
            for line in sent[rank].claims[at].lines:
                for other in lines[line]:
                    if other not in seen:
                        seen.add(other)
                        members.append(other)
        if _is_grid([sent[rank].claims[at] for rank, at in members], lines):
            for rank, at in members:
                numbers[rank][at] = count
            count += 1
    return [Verdict(count > 0, tuple(of_rank)) for of_rank in numbers]


def _refusal(sent: Sequence[Any]) -> Verdict | None:
    """Return why these ranks cannot exchange at all; None where they can."""
    if len(sent) == 1:
        return Verdict(False)  # A single process has nothing to exchange.
    without = [rank for rank, claims in enumerate(sent) if not isinstance(claims, Claims)]
    if without:
        why = f"the planner of {format_ranks(without)} was not given exchange=True"
        return Verdict(False, why=why, way_out="exchange=True on all ranks")
    if not all(claims.hooked for claims in sent):
        why = "the storage reader does not call the exchange after the reads"
        way_out = "storage_reader=PlacementFileSystemReader(path)"
        return Verdict(False, why=why, way_out=way_out)
    groups = {(claims.group, claims.size) for claims in sent}
    positions = [claims.position for claims in sent]
    if len(groups) > 1 or sent[0].size != len(sent) or positions != list(range(len(sent))):
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


class Destination(NamedTuple):
    """A destination box that all members of a set need.

    Attributes:
        nbytes: Bytes to read for it.
        rows: Its size along its first dim longer than 1; 1 where there is none.
        writer: The member that wrote it, in whose file it is; None where no member did, or the
            checkpoint does not tell.
    """

    nbytes: int
    rows: int
    writer: int | None = None


class Share(NamedTuple):
    """Rows of a destination box that one member reads for all members."""

    member: int
    start: int
    stop: int


def shares(boxes: Sequence[Destination], members: int) -> list[list[Share]]:
    """Return per box which member reads which rows: every row once.

    A member reads what it wrote itself, up to slightly more than the mean; the rest goes to the
    members in order, as runs of boxes, so that each opens few files. A box that does not fit is
    split by rows. The result depends on the arguments alone, so all members compute the same.

    Four boxes of 3 MiB over two members::

        box    member 0     member 1
        0      rows 0-3
        1      rows 0-3
        2                   rows 0-3
        3                   rows 0-3
    """
    readers = _readers(boxes, members)
    left = sum(box.nbytes for box in boxes)
    load = dict.fromkeys(readers, 0)
    most = left / len(readers) * (1 + SLACK)
    split: list[list[Share]] = [[] for _ in boxes]
    for at, box in enumerate(boxes):
        if box.writer in load and load[box.writer] + box.nbytes <= most:
            split[at].append(Share(box.writer, 0, box.rows))
            load[box.writer] += box.nbytes
            left -= box.nbytes
    # The members with the least to read come last, and get what rounding leaves.
    waiting = sorted(readers, key=lambda member: -load[member])
    for at, box in enumerate(boxes):
        start = 0 if not split[at] else box.rows
        while start < box.rows:
            reader = waiting[0]
            mean = (left + sum(load[member] for member in waiting)) / len(waiting)
            nbytes = box.nbytes * (box.rows - start) // box.rows
            room = mean - load[reader]
            stop = box.rows
            if len(waiting) > 1 and nbytes > room + SLACK * mean:
                fit = int(room * box.rows // box.nbytes) if room > 0 else 0
                stop = start + fit
                if not fit or min(room, nbytes - room) < SPLIT_NBYTES:
                    stop = box.rows if room >= nbytes / 2 else start
            if stop > start:
                taken = box.nbytes * (stop - start) // box.rows
                split[at].append(Share(reader, start, stop))
                load[reader] += taken
                left -= taken
            if stop < box.rows:
                waiting.pop(0)
            start = stop
    return split


def _readers(boxes: Sequence[Destination], members: int) -> list[int]:
    """Return the members that read, ascending: those that wrote the most, then evenly spaced."""
    count = sum(box.nbytes for box in boxes) // SHARE_NBYTES
    count = max(1, min(members, count))
    if count == members:
        return list(range(members))
    written: dict[int, int] = {}
    for box in boxes:
        if box.writer is not None:
            written[box.writer] = written.get(box.writer, 0) + box.nbytes
    writers = sorted(written, key=lambda member: (-written[member], member))[:count]
    spaced = [member for i in range(count) if (member := i * members // count) not in writers]
    return sorted([*writers, *spaced][:count])
