"""Interfaces between storage and planners, beyond those of torch."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from dcp_placements.report import LoadReport


@runtime_checkable
class WantsReader(Protocol):
    """The data sent with a load plan that depends on whether the reader calls ``AfterReads``."""

    def with_reader(self) -> Any:
        """Return the data to send from a rank whose reader does."""
        ...


@runtime_checkable
class AfterReads(Protocol):
    """A load planner with work to do after a rank has read its items.

    Attributes:
        report: Where the reader counts what it moved.
    """

    report: LoadReport

    def finish_reads(self, error: BaseException | None) -> None:
        """Finish, or raise.

        Args:
            error: The error of this rank's reads; None if they succeeded.
        """
        ...
