"""What travels with a rank's plan beside its items, and back with what it is let write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcp_placements.errors import Fault
from dcp_placements.naming import Path


@dataclass(slots=True)
class Evidence:
    """One rank's side of the story, for the coordinator to check and to tell.

    Attributes:
        rank: Its global rank.
        mappings: Where each key stands in the nested state dict; None when it was not flattened.
        digests: One per plan item, in plan order; None where there is no evidence. Empty when
            digests are off.
        stored_digests: One per plan item, of the bytes that a file will hold; only for full
            digests. An object's differs from the one that is compared.
        axes: Position and size along every named mesh axis that this rank knows of.
        matched: Rules that spoke here, with the number of keys.
        patterns: All rules there are, where they are known.
        rules_of: The rule that spoke, by key.
        row_maps: The rows that an ``IndexShard`` names here, by key.
        stateless: Parameters without optimizer state where others have it.
        notes: What is let pass here but ought to be known.
        generation: The global plan that this rank's plan is unchanged since, if it is.
    """

    rank: int
    mappings: Mapping[str, Path] | None = None
    digests: Sequence[bytes | None] = ()
    stored_digests: Sequence[bytes | None] = ()
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    matched: dict[str, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    rules_of: dict[str, str] = field(default_factory=dict)
    row_maps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    generation: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the coordinator tells each rank beside its plan.

    Attributes:
        generation: Names the global plan.
        writers: Ranks that write anything.
        in_pieces: Some keys of which one rank writes several chunks: files that know a tensor by
            its name alone cannot hold those.
    """

    generation: str
    writers: int
    in_pieces: tuple[str, ...] = ()
