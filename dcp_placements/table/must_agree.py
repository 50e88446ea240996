"""What all ranks of a save or a load must agree on: one table, and one comparison.

A new option that ranks must agree on is a field of ``Statement`` and a row here. Three ranks of a
save, of which one was given another training step::

    this save: the ranks save different steps: 7 on ranks 0, 2; 8 on rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dcp_placements.errors import Fault
from dcp_placements.pages import KEEPING_PAGE
from dcp_placements.short_text import format_ranks
from dcp_placements.table.statement import Stated


class MustAgree(NamedTuple):
    """A field of a ``Statement`` that all ranks must have equal.

    Attributes:
        field: The name of the field.
        is_fault: Whether a difference is refused; else it is warned of.
        headline: What the ranks do.
        details: The reason, and the way out.
        text: Returns a value as text.
        by_key: Returns the values of the field by what they are about, where only ranks that state
            something of one thing must agree: ``{"experts.{}": 4}``. None where all ranks state one
            value.
    """

    field: str
    is_fault: bool
    headline: str
    details: tuple[str, ...]
    text: Callable[[Any], str] = repr
    by_key: Callable[[Any], Mapping[str, Any]] | None = None


MUST_AGREE = (
    MustAgree(
        field="digests",
        is_fault=True,
        headline="the ranks do not agree on digests=",
        details=("way out:     the same options on all ranks",),
    ),
    # With another number of ranks, digests would be compared with those of other tensors.
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
        details=(
            "way out:     choose the directory on one rank, and broadcast it to the others",
            KEEPING_PAGE,
        ),
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
    MustAgree(
        field="numberings",
        is_fault=True,
        headline="the ranks do not agree on total=",
        details=("way out:     the number in the whole model, on every rank",),
        by_key=lambda numberings: {
            str(family): numbering.total
            for family, numbering in numberings.items()
            if numbering.total is not None
        },
    ),
)
"""What all ranks must agree on, in the order in which it is compared: a row is compared only on
ranks that agree on the rows above."""


def disagreements(different: Collection[Stated], subject: str) -> tuple[list[Fault], list[Fault]]:
    """Return the faults of the first row that is refused, and the notes of the rows above.

    Args:
        different: The different statements.
        subject: What a fault is about: ``"this save"``.
    """
    notes: list[Fault] = []
    for row in MUST_AGREE:
        ranks_of: dict[str, dict[Any, list[int]]] = {}
        for statement, ranks in different:
            value = getattr(statement, row.field)
            by_key = {subject: value} if row.by_key is None else row.by_key(value)
            for key, of_key in by_key.items():
                ranks_of.setdefault(key, {}).setdefault(of_key, []).extend(ranks)
        faults = [
            _disagreement(row, key, values) for key, values in ranks_of.items() if len(values) > 1
        ]
        if faults and row.is_fault:
            return faults, notes
        notes += faults
    return [], notes


def _disagreement(row: MustAgree, key: str, ranks_of: Mapping[Any, Sequence[int]]) -> Fault:
    """Return the fault of what several ranks state differently.

    Args:
        row: The field.
        key: What the fault is about.
        ranks_of: The ranks by the value that they state.
    """
    texts = [f"{row.text(value)} on {format_ranks(ranks)}" for value, ranks in ranks_of.items()]
    more = "; ..." if len(texts) > _SHOWN_VALUES else ""
    return Fault(key, f"{row.headline}: {'; '.join(texts[:_SHOWN_VALUES])}{more}", row.details)


_SHOWN_VALUES = 4
