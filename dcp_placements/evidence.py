"""What travels with a rank's plan beside its items, for the coordinator to check and to tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_placements.naming import Path


@dataclass(slots=True)
class Evidence:
    """One rank's side of the story.

    Attributes:
        rank: Its global rank.
        mappings: Where each key stands in the nested state dict; None when it was not flattened.
        digests: One per plan item, in plan order; None where there is no evidence. Empty when
            digests are off.
        axes: Position and size along every named mesh axis that this rank knows of.
        matched: Rules that spoke here, with the number of keys.
        patterns: All rules there are, where they are known.
        faults_waived: Notes that became warnings on this rank.
    """

    rank: int
    mappings: Mapping[str, Path] | None = None
    digests: list[bytes | None] = field(default_factory=list)
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    matched: dict[str, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    rules_of: dict[str, str] = field(default_factory=dict)
