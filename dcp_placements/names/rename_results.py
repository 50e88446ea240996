"""What a ``rename`` may return for a key: a name, a ``Row``, ``Rows`` or ``Parts``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_placements.errors import Fault, PlacementError


class RenameError(PlacementError):
    """Why a key has no name in the checkpoint; becomes a ``Fault`` with the key."""

    def __init__(self, headline: str, *details: str) -> None:
        super().__init__("\n    ".join((headline, *details)))
        self.headline = headline
        self.details = details

    def fault(self, fqn: str) -> Fault:
        """Return it as the fault of a key."""
        return Fault(fqn, self.headline, self.details)

    def __reduce__(self) -> tuple[Any, ...]:
        return RenameError, (self.headline, *self.details)


@dataclass(frozen=True, slots=True)
class Row:
    """The answer of a rename for a tensor that is one row of a stacked one in the checkpoint.

    For example a parameter of one expert, if the checkpoint has one tensor ``[experts, ...]``.

    Attributes:
        fqn: The checkpoint's key, one for all rows.
        index: Which row it is.
        total: How many rows there are.
        dim: The dim of the stacked tensor that the rows lie along; its other dims are those of
            the row.
        within: The rows that the stack itself is, from the inside out: its layer, for example, if
            the checkpoint has one tensor ``[layers, experts, ...]``. Their ``fqn`` is not used.

    Raises:
        PlacementError: An index that is not among the rows.
    """

    fqn: str
    index: int
    total: int
    dim: int = 0
    within: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.total:
            raise RenameError(f"rename() gave row {self.index} of {self.total} for it")

    @property
    def rows(self) -> tuple[Row, ...]:
        """Itself and what it is within, from the inside out."""
        return (self, *self.within)

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """``(total, dim)`` of each of ``rows``: equal for all rows of one stack."""
        return tuple([(row.total, row.dim) for row in self.rows])

    def whole_text(self) -> str:
        """Return the count of rows and the dim of each of ``rows``, as text."""
        return " within ".join([f"{total} rows on dim {dim}" for total, dim in self.axes])

    @property
    def indices(self) -> tuple[int, ...]:
        """``index`` of each of ``rows``: another one for each row of a stack."""
        return tuple([row.index for row in self.rows])


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer of a rename for a stacked tensor that is one tensor per row in the checkpoint.

    Attributes:
        fqn: The checkpoint's keys, ``{}`` for the number of the row.
        stacked: The name of the whole tensor in rules and messages.
        dim: The dim of the stacked tensor that the rows lie along.
    """

    fqn: str
    stacked: str
    dim: int = 0

    @property
    def fqns(self) -> tuple[str, ...]:
        """The checkpoint's keys of one row."""
        return (self.fqn,)


@dataclass(frozen=True, slots=True)
class Parts:
    """The answer of a rename for a fused tensor that is one tensor per part in the checkpoint.

    Attributes:
        fqns: The checkpoint's keys, in the order of the parts; ``{}`` for the number where the
            rows of a stack are fused.
        whole: The name of the fused tensor in rules and messages.
        dim: The dim of it, or of each row, that the parts lie along.
        sizes: The sizes of the parts relative to each other.
        groups: How many times the sequence of parts repeats.
        rows: The dim that the rows of a stack lie along; None if it is not a stack.
    """

    fqns: tuple[str, ...]
    whole: str
    dim: int
    sizes: tuple[int, ...]
    groups: int = 1
    rows: int | None = None

    @property
    def fqn(self) -> str:
        """All keys of one fused tensor, as one text."""
        return " + ".join(self.fqns)

    @property
    def stacked(self) -> str:
        """The name of the fused tensor in rules and messages."""
        return self.whole

    def spans(self, length: int) -> list[list[tuple[int, int]]]:
        """Return ``(start, stop)`` of every run of each part in a dim of ``length``.

        >>> Parts(("q", "k"), "qk", 0, (2, 1), groups=2).spans(6)
        [[(0, 2), (3, 5)], [(2, 3), (5, 6)]]

        Raises:
            ValueError: The parts do not fit it.
        """
        unit, rest = divmod(length, sum(self.sizes) * self.groups)
        if rest:
            raise ValueError(
                f"{length} on dim {self.dim} cannot be cut into {self.groups} x {self.sizes}"
            )
        spans: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        at = 0
        for _ in range(self.groups):
            for part, size in zip(spans, self.sizes, strict=True):
                part.append((at, at + size * unit))
                at += size * unit
        return spans


Renamed = str | Row | Rows | Parts
Rename = Callable[[str], Renamed]
