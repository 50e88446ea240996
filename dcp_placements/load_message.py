"""What travels with a load plan to the coordinator, and what it makes of all ranks' together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcp_placements.errors import Fault
from dcp_placements.families import asked_faults
from dcp_placements.interop import Metadata, TensorStorageMetadata
from dcp_placements.record import SaveRecord
from dcp_placements.shares import Claims


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """One rank's.

    Attributes:
        rank: Its global rank.
        claims: What it would exchange; None where nothing.
        matched: Names of the rules that spoke here.
        patterns: The patterns that ought to match something on some rank.
        asked: The numbers that it asks for of families that the save renamed, packed.
        renames: The renames that are in force here, in words.
    """

    rank: int
    claims: Claims | None = None
    matched: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    asked: bytes = b""
    renames: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the coordinator has no use for it."""
        return self.claims is None and not (self.patterns or self.asked)


def hooked(message: Any) -> Any:
    """Return a plan's message with its claims marked as with a reader that calls the exchange."""
    if not isinstance(message, LoadMessage) or message.claims is None:
        return message
    return replace(message, claims=replace(message.claims, hooked=True))


def unmatched_patterns(messages: Sequence[LoadMessage]) -> tuple[str, ...]:
    """Return the patterns that matched no key on any rank."""
    matched = {name for message in messages for name in message.matched}
    patterns = dict.fromkeys(pattern for message in messages for pattern in message.patterns)
    return tuple(pattern for pattern in patterns if repr(pattern) not in matched)


def family_faults(
    messages: Sequence[LoadMessage], record: SaveRecord | None, metadata: Metadata
) -> list[Fault]:
    """Return the renamed numbers that several ranks ask for while for others nobody does."""
    asked = {message.rank: message.asked for message in messages if message.asked}
    if record is None or len(asked) < 2:
        return []
    renames = {message.rank: message.renames for message in messages}
    return asked_faults(asked, record, tensor_keys(metadata), renames)


def tensor_keys(metadata: Metadata) -> set[str]:
    """Return the checkpoint's keys that are tensors."""
    stored = metadata.state_dict_metadata.items()
    return {fqn for fqn, known in stored if isinstance(known, TensorStorageMetadata)}
