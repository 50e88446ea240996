"""Interfaces between storage and planners, beyond those of torch."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint import LoadPlan

from dcp_placements.report import Traffic


@runtime_checkable
class WantsReader(Protocol):
    """The data sent with a load plan that depends on whether the reader calls ``AfterReads``."""

    def with_reader(self) -> Any:
        """Return the data to send from a rank whose reader does."""
        ...


@runtime_checkable
class AfterReads(Protocol):
    """A load planner with work to do after a rank has read its items and compared the files."""

    def finish_reads(
        self, plan: LoadPlan, error: BaseException | None, *, traffic: Traffic, unchecked: int
    ) -> None:
        """Finish, or raise.

        Args:
            plan: What was read, as the planner finished it.
            error: The error of this rank's reads; None if they succeeded.
            traffic: What the reader moved.
            unchecked: The number of records that it could not compare with a checksum.
        """
        ...
