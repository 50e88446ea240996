"""Who sends what to whom, in bytes per pair of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dcp_placements.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True)
class PairSummary:
    """What one rank sends to another; a rank paired with itself copies.

    Attributes:
        source: The global rank that sends.
        target: The global rank that receives.
        nbytes: Bytes, by the dtype of the source.
        messages: How many boxes of single tensors.
    """

    source: int
    target: int
    nbytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """A transfer in numbers.

    Attributes:
        source: The mesh that sends: ranks by axis name.
        target: The mesh that receives.
        pairs: The pairs of ranks, sorted.
        unused: Keys of the source that no target tensor needs.
        casts: Keys of the target that have another dtype than what is sent.
    """

    JSON: ClassVar[str] = "source target sent_nbytes copied_nbytes unused casts pairs"

    source: Mapping[str, int]
    target: Mapping[str, int]
    pairs: tuple[PairSummary, ...]
    unused: tuple[str, ...]
    casts: tuple[str, ...]

    @property
    def sent_nbytes(self) -> int:
        """Bytes that go from one rank to another."""
        return sum(pair.nbytes for pair in self.pairs if pair.source != pair.target)

    @property
    def copied_nbytes(self) -> int:
        """Bytes that stay on their rank."""
        return sum(pair.nbytes for pair in self.pairs if pair.source == pair.target)


def summarize(plan: TransferPlan) -> TransferSummary:
    """Return the bytes of each pair of ranks of a plan."""
    rows = zip(*[column.tolist() for column in plan.pairs()], strict=True)
    pairs = tuple(PairSummary(*row) for row in rows)
    unused, casts = tuple(plan.unused), tuple(plan.casts)
    return TransferSummary(plan.source.axes, plan.target.axes, pairs, unused, casts)
