"""What a rank sends to the coordinator with its plan of a load.

Ep rank 1 of two, whose rename numbers its experts 2 and 3 of four::

    LoadMessage(rank=1, statement=b"... renames, numberings ...", sent=Sent((b"...",), ...))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcp_placements.table.table import Sent


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """What a rank sends to the coordinator with its plan.

    Attributes:
        rank: Its global rank.
        statement: Its ``Statement``, packed; empty where it is refused before that is known.
        sent: The tables and boxes of what it asks for; None of a rank that is refused or alone.
        wish: What it could have from other ranks; None where it does not exchange.
        group: Hash of the ranks of the process group that it exchanges on.
        has_reader: Whether the rank's storage reader calls the exchange after the reads.
        faults: Why it cannot load, packed; it has no plan then.
    """

    rank: int
    statement: bytes = b""
    sent: Sent | None = None
    wish: Sent | None = None
    group: int = 0
    has_reader: bool = False
    faults: bytes = b""

    def with_reader(self) -> LoadMessage:
        """Return it marked: the rank's reader calls the exchange."""
        return replace(self, has_reader=True)
