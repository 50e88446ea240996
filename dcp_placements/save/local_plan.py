"""What a rank sends to the coordinator of a save, and what the coordinator sends back.

Ep rank 1 of two, where a rule shards ``experts.w1``, sends its table and box, and writes that box::

    LocalPlan(rank=1, sent=Sent(...), coordinate=(1,))    to the coordinator
    Assignment(written=b"\\x80")                          back to the rank
"""

from __future__ import annotations

from typing import NamedTuple

from dcp_placements.table.table import Sent

COPIED = 2
"""The number of a cell that all ranks with the box write; others have 1 where written, else 0."""


class DoubtfulState(NamedTuple):
    """Optimizer state of a name that no known optimizer has, cut for its shape alone.

    Attributes:
        fqn: Its key.
        name: The first component of its name, as ``Q``.
        digest: Of its contents on this rank, sampled.
    """

    fqn: str
    name: str
    digest: bytes


class LocalPlan(NamedTuple):
    """All that one rank sends to the coordinator.

    Ep rank 1 of two, where a rule shards ``experts.w1`` of shape ``(4, 3)``::

        LocalPlan(1, Sent((b"... table ...",), b"... 1 ...", b"... 2, 0, 2, 3 ..."), (1,))

    Attributes:
        rank: The global rank.
        sent: The tables and boxes of the rank.
        coordinate: The rank's position along each axis of its statement's ``axis_sizes``.
        digests: The digests of what it holds, as ``digests_of`` returns them.
        undigested: Keys of tensors without a digest.
        statement: The rank's ``Statement``, packed.
        doubtful: State that may be a copy on each rank and not a part, as ``doubtful_states``
            returns it.
        faults: Why the rank cannot save, packed; the other fields are empty then.
    """

    rank: int
    sent: Sent = Sent()
    coordinate: tuple[int, ...] = ()
    digests: bytes = b""
    undigested: tuple[str, ...] = ()
    statement: bytes = b""
    doubtful: tuple[DoubtfulState, ...] = ()
    faults: bytes = b""


class Assignment(NamedTuple):
    """What the coordinator sends to one rank: what it writes.

    Attributes:
        written: A bit for each box of each key of each group that the rank holds: whether it writes
            the box.
        save_id: The id of the save.
        copied: Such bits for the boxes that every rank writes that holds them; empty if there are
            none.
        lists: The keys of parameter groups whose lists differ by rank, each with the parameters of
            all ranks.
    """

    written: bytes
    save_id: bytes = b""
    copied: bytes = b""
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
