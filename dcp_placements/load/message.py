"""What travels with a load plan to the coordinator, and the checks of all ranks' messages."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dcp_placements._torch import Metadata, TensorStorageMetadata
from dcp_placements.errors import Fault
from dcp_placements.load.families import asked_faults
from dcp_placements.load.row_checks import row_faults
from dcp_placements.load.shares import Claims
from dcp_placements.storage.metadata.record import SaveRecord


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """One rank's.

    Attributes:
        rank: Its global rank.
        claims: What it would exchange; None where nothing.
        matched: Names of the rules that spoke here.
        patterns: The patterns that ought to match something on some rank.
        asked: The numbers that it asks for of families that the save renamed, packed.
        rows: The rows that it lists itself, packed.
        renames: The renames that are in force here, in words.
        notes: What is likely declared wrongly here, packed.
    """

    rank: int
    claims: Claims | None = None
    matched: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    asked: bytes = b""
    rows: bytes = b""
    renames: tuple[str, ...] = ()
    notes: bytes = b""

    def with_reader(self) -> LoadMessage:
        """Return it with its claims marked as with a reader that calls the exchange."""
        if self.claims is None:
            return self
        return replace(self, claims=replace(self.claims, hooked=True))

    @property
    def is_empty(self) -> bool:
        """Whether the coordinator has no use for it."""
        return self.claims is None and not (self.patterns or self.asked or self.rows or self.notes)


def packed_notes(notes: Iterable[Fault]) -> bytes:
    """Return notes as they travel; those of most keys say the same."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for note in notes:
        alike.setdefault((note.headline, note.details), []).append(note.fqn)
    return zlib.compress(pickle.dumps(alike), 1) if alike else b""


def all_notes(messages: Iterable[LoadMessage]) -> list[Fault]:
    """Return the notes of all ranks, each once."""
    notes: dict[Fault, None] = {}
    for packed in dict.fromkeys(message.notes for message in messages if message.notes):
        alike: dict[tuple[str, tuple[str, ...]], list[str]]
        alike = pickle.loads(zlib.decompress(packed))
        for (headline, details), fqns in alike.items():
            notes.update(dict.fromkeys(Fault(fqn, headline, details) for fqn in fqns))
    return list(notes)


def unmatched_patterns(messages: Sequence[LoadMessage]) -> tuple[str, ...]:
    """Return the patterns that matched no key on any rank."""
    matched = {name for message in messages for name in message.matched}
    patterns = dict.fromkeys(pattern for message in messages for pattern in message.patterns)
    return tuple(pattern for pattern in patterns if repr(pattern) not in matched)


def asking_faults(
    messages: Sequence[LoadMessage], record: SaveRecord | None, metadata: Metadata
) -> list[Fault]:
    """Return the numbers and rows that several ranks ask for while for others nobody does."""
    asked = {message.rank: message.asked for message in messages if message.asked}
    rows = {message.rank: message.rows for message in messages if message.rows}
    renames = {message.rank: message.renames for message in messages}
    faults = []
    if record is not None and len(asked) > 1:
        faults += asked_faults(asked, record, tensor_keys(metadata), renames)
    if len(rows) > 1:
        faults += row_faults(rows, record, renames)
    return faults


def tensor_keys(metadata: Metadata) -> set[str]:
    """Return the checkpoint's keys that are tensors."""
    stored = metadata.state_dict_metadata.items()
    return {fqn for fqn, value in stored if isinstance(value, TensorStorageMetadata)}
