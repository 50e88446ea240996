"""What a rank sends to the coordinator with its load plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dcp_placements.errors import Fault, format_ranks, unpacked_faults
from dcp_placements.load.compare import Asked
from dcp_placements.load.exchange.shares import Claims
from dcp_placements.rules.matches import Declared, Matches, matched_nowhere


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """What one rank sends.

    Attributes:
        rank: Its global rank.
        claims: What it could exchange; None where nothing.
        declared: What is declared by pattern, and whether a key of the rank matches; None where
            it is refused before that is known.
        asked: What it asks for of wholes that ranks divide.
        notes: Declarations that are probably wrong, packed.
        save: Which save wrote the checkpoint that this rank reads; empty where nothing tells.
        faults: Why it cannot load, packed; it has no plan then.
    """

    rank: int
    claims: Claims | None = None
    declared: Matches | None = field(default_factory=dict)
    asked: Asked = field(default_factory=Asked)
    notes: bytes = b""
    save: str = ""
    faults: bytes = b""

    def with_reader(self) -> LoadMessage:
        """Return it with its claims marked: the rank's reader calls the exchange."""
        if self.claims is None:
            return self
        return replace(self, claims=replace(self.claims, hooked=True))

    @property
    def is_empty(self) -> bool:
        """Whether the coordinator has no use for it."""
        others = self.asked.tables or self.declared or self.notes or self.save or self.faults
        return self.claims is None and not others


def all_notes(messages: Iterable[LoadMessage]) -> list[Fault]:
    """Return the notes of all ranks, each once."""
    notes: dict[Fault, None] = {}
    for packed in dict.fromkeys(message.notes for message in messages if message.notes):
        notes.update(dict.fromkeys(unpacked_faults(packed)))
    return list(notes)


def mixed_checkpoints(messages: Iterable[LoadMessage]) -> list[Fault]:
    """Return that ranks read the metadata of different checkpoints, if they do."""
    ranks: dict[str, list[int]] = {}
    for message in messages:
        ranks.setdefault(message.save, []).append(message.rank)
    if len(ranks) < 2:
        return []
    return [
        Fault(
            "this load",
            "the ranks read different checkpoints",
            (
                *(
                    f"read:        {save or 'one without a save id'} by {format_ranks(members)}"
                    for save, members in ranks.items()
                ),
                "likely:      each rank looked for the latest checkpoint by itself, or the "
                "checkpoint was replaced meanwhile",
                "way out:     choose the directory on one rank, and broadcast it to the others",
            ),
        )
    ]


def unmatched_of(messages: Sequence[LoadMessage]) -> tuple[Declared, ...]:
    """Return what is declared by pattern and matches no key on any rank, where all ranks know."""
    declared = [message.declared for message in messages]
    known = [matches for matches in declared if matches is not None]
    return matched_nowhere(known) if len(known) == len(declared) else ()
