"""What a rank states beside its keys, in a save and in a load alike, and what all must agree on.

Most ranks state the same, so each different statement is unpacked once, and stands with its ranks.
Three ranks of a save, of which one was given another training step::

    stated   [Stated(Statement(step=7), [0, 2]), Stated(Statement(step=8), [1])]
    fault    this save: the ranks save different steps: 7 on ranks 0, 2; 8 on rank 1
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcp_placements.errors import Fault
from dcp_placements.names.numbers import Numberings
from dcp_placements.names.renames import Step
from dcp_placements.report import Shapes
from dcp_placements.rules.patterns import Matches
from dcp_placements.short_text import format_ranks

_SHOWN_VALUES = 4


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank states beside its keys; the same on most ranks of a pipeline stage.

    All ranks must agree on the fields that ``MUST_AGREE`` names. A save and a load fill what they
    have; what they do not fill is equal on all ranks.

    Attributes:
        matched: By rule, the number of keys here; 0 of patterns that match none.
        declared: What else is declared by pattern, renames and waivers, and whether a key here
            matches.
        renames: The renames in force.
        numberings: The lists of keys to which they give numbers.
        notes: Warnings of this rank.
        world: Number of ranks, which decides of which groups there are digests.
        has_whole: Whether its planner was given the unsharded model.
        digests: ``"sampled"``, ``"full"`` or ``"off"``, of a save.
        step: The training step of a save; None for none.
        directory: The directory that a save writes into; empty for none.
        shapes: As in ``SaveReport``, of what this rank saves.
        checkpoint: The save whose checkpoint a load reads; empty where nothing tells.
        declares: Whether a load has rules or renames. DTensors alone are complete over their
            meshes.
        reset: The optimizers and names of the parameters whose state a load resets.
        stateless: Parameters without optimizer state where others have it.
        unequal: Keys of which the rank has copies that differ, and are let through.
        lists: The parameters that a parameter group lists, by its key.
        axis_sizes: Sizes of the named mesh axes that it knows.
    """

    matched: Matches = field(default_factory=dict)
    declared: Matches = field(default_factory=dict)
    renames: tuple[Step, ...] = ()
    numberings: Numberings = field(default_factory=dict)
    notes: tuple[Fault, ...] = ()
    world: int = 1
    has_whole: bool = False
    digests: str = "off"
    step: int | None = None
    directory: str = ""
    checkpoint: str = ""
    declares: bool = False
    reset: tuple[tuple[str, str], ...] = ()
    shapes: Mapping[str, tuple[Shapes, ...]] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    axis_sizes: Mapping[str, int] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return it as it travels."""
        return zlib.compress(pickle.dumps(self, protocol=5), 6)


class Stated(NamedTuple):
    """A statement, and the ranks that sent it.

    Attributes:
        statement: The statement.
        ranks: Their numbers, in the order of the plans.
    """

    statement: Statement
    ranks: list[int]


def stated(sent: Iterable[tuple[int, bytes]]) -> dict[bytes, Stated]:
    """Return the different statements by their packed form.

    Args:
        sent: The number of each rank, and its statement, packed.
    """
    different: dict[bytes, Stated] = {}
    for rank, packed in sent:
        if packed not in different:
            different[packed] = Stated(pickle.loads(zlib.decompress(packed)), [])
        different[packed].ranks.append(rank)
    return different


class MustAgree(NamedTuple):
    """A field of a ``Statement`` that all ranks must have equal.

    Attributes:
        field: The name of the field.
        is_fault: Whether a difference is refused; else it is warned of.
        headline: What the ranks do.
        details: The reason, and the way out.
        text: Returns a value as text.
    """

    field: str
    is_fault: bool
    headline: str
    details: tuple[str, ...]
    text: Callable[[Any], str] = repr


MUST_AGREE = (
    MustAgree(
        field="digests",
        is_fault=True,
        headline="the ranks do not agree on digests=",
        details=("way out:     the same options on all ranks",),
    ),
    # By another number of ranks, digests would be compared with those of other tensors.
    MustAgree(
        field="world",
        is_fault=True,
        headline="the ranks do not agree on how many ranks torch.distributed has",
        details=("way out:     one default process group on all ranks, from begin to end",),
    ),
    MustAgree(
        field="step",
        is_fault=True,
        headline="the ranks save different steps",
        details=("way out:     planner.step= the same number on all ranks before each save",),
    ),
    MustAgree(
        field="has_whole",
        is_fault=True,
        headline="the ranks do not agree on whole=",
        details=("way out:     the same declaration on all ranks",),
        text=lambda has_whole: "given" if has_whole else "not given",
    ),
    MustAgree(
        field="checkpoint",
        is_fault=True,
        headline="the ranks read different checkpoints",
        details=("way out:     choose the directory on one rank, and broadcast it to the others",),
        text=lambda save: save or "one without a save id",
    ),
    MustAgree(
        field="directory",
        is_fault=False,
        headline="the ranks write into different directories",
        details=(
            "reason:      a load looks for all files beside .metadata, which is in one of them",
            "way out:     choose the name on one rank, and broadcast it to the others",
        ),
    ),
)
"""What all ranks must agree on, in the order in which it is compared: what stands farther down is
compared on ranks that agree on what stands above."""


def disagreements(different: Collection[Stated], subject: str) -> tuple[list[Fault], list[Fault]]:
    """Return on what the ranks do not agree: a fault at most, and notes.

    Args:
        different: The different statements.
        subject: What a fault is about: ``"this save"``.
    """
    notes: list[Fault] = []
    for rule in MUST_AGREE:
        ranks: dict[Any, list[int]] = {}
        for statement, of_statement in different:
            ranks.setdefault(getattr(statement, rule.field), []).extend(of_statement)
        if len(ranks) > 1:
            texts = [f"{rule.text(value)} on {format_ranks(some)}" for value, some in ranks.items()]
            more = "; ..." if len(texts) > _SHOWN_VALUES else ""
            headline = f"{rule.headline}: {'; '.join(texts[:_SHOWN_VALUES])}{more}"
            fault = Fault(subject, headline, rule.details)
            if rule.is_fault:
                return [fault], notes
            notes.append(fault)
    return [], notes
