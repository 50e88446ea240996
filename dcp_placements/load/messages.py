"""What a rank sends to the coordinator with its plan of a load.

Ep rank 1 of two, whose rename numbers its experts 2 and 3 of four::

    LoadMessage(rank=1, declared={"Renumber('experts.{}')": True}, sent=Sent((b"...",), ...),
                renames=(Step("Renumber", ...),), declares=True, save="5f1c...")
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dcp_placements.names.numbers import Numberings
from dcp_placements.names.renames import Step
from dcp_placements.rules.patterns import Matches
from dcp_placements.table.table import Sent


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """What a rank sends to the coordinator with its plan.

    Attributes:
        rank: Its global rank.
        declared: What is declared by pattern, and whether a key of the rank matches; None where
            it is refused before that is known.
        sent: The tables and boxes of what it asks for; None of a rank that is refused or alone.
        renames: The renames in force on the rank.
        numberings: The lists of keys to which they give numbers.
        declares: Whether the rank has rules, or renames. DTensors alone are complete over their
            meshes.
        wish: What it could have from other ranks; None where it does not exchange.
        group: Hash of the ranks of the process group that it exchanges on.
        has_reader: Whether the rank's storage reader calls the exchange after the reads.
        notes: Declarations that are probably wrong, packed.
        save: Which save wrote the checkpoint that this rank reads; empty where nothing tells.
        has_whole: Whether its planner was given the unsharded model.
        reset: The optimizers and names of the parameters whose state it resets.
        faults: Why it cannot load, packed; it has no plan then.
    """

    rank: int
    declared: Matches | None = None
    sent: Sent | None = None
    renames: tuple[Step, ...] = ()
    numberings: Numberings = field(default_factory=dict)
    declares: bool = False
    wish: Sent | None = None
    group: int = 0
    has_reader: bool = False
    notes: bytes = b""
    save: str = ""
    has_whole: bool = False
    reset: tuple[tuple[str, str], ...] = ()
    faults: bytes = b""

    def with_reader(self) -> LoadMessage:
        """Return it marked: the rank's reader calls the exchange."""
        return replace(self, has_reader=True)
