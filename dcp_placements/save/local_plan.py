"""What a rank sends to the coordinator: its tables and boxes, and what it says beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_placements.errors import Fault
from dcp_placements.names.renames import Step
from dcp_placements.rules.unmatched import Matches
from dcp_placements.save.digests import SentDigests
from dcp_placements.table.table import Sent


class LocalPlan(NamedTuple):
    """All that one rank sends to the coordinator.

    Ep rank 1 of two, of a rule that shards ``experts.w1`` of shape ``(4, 3)``::

        LocalPlan(1, Sent((b"... table ...",), b"... 1 ...", b"... 2, 0, 2, 3 ..."), (1,))

    Attributes:
        rank: Its global rank.
        sent: Its tables and its boxes.
        coordinate: Its position along each of ``Statement.axis_sizes``, in that order.
        digests: Of what it holds.
        statement: A ``Statement``, pickled and compressed.
        faults: Why the rank cannot save, packed; it has nothing else then.
    """

    rank: int
    sent: Sent = Sent()
    coordinate: tuple[int, ...] = ()
    digests: SentDigests = SentDigests()
    statement: bytes = b""
    faults: bytes = b""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank sends beside its keys; the same on most ranks of a pipeline stage.

    Attributes:
        matched: Rules that matched here, with the number of keys.
        declared: What is declared by pattern, and whether a key here matches.
        stateless: Parameters without optimizer state where others have it.
        notes: Warnings of this rank.
        renames: What the checkpoint is to keep of its rename.
        axis_sizes: Sizes of the named mesh axes that it knows of.
        digest_kind: ``"sampled"``, ``"full"`` or ``"off"``.
        world: Number of ranks, which decides of which groups there are digests.
        directory: That it writes into; empty for none.
        step: The training step that its planner was given; None for none.
    """

    matched: Mapping[str, int] = field(default_factory=dict)
    declared: Matches = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    notes: tuple[Fault, ...] = ()
    renames: tuple[Step, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    digest_kind: str = "off"
    world: int = 1
    directory: str = ""
    step: int | None = None
