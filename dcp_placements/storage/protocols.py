"""What the storage and a planner need of each other, beyond torch's own interfaces."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from dcp_placements.report import LoadReport


@runtime_checkable
class NamesSave(Protocol):
    """What travels with a save plan, where a planner names the save.

    Attributes:
        save_id: 16 bytes, the same on all ranks.
    """

    save_id: bytes


@runtime_checkable
class WantsReader(Protocol):
    """What travels with a load plan, where it matters whether the reader calls ``AfterReads``."""

    def with_reader(self) -> Any:
        """Return it as it is sent by a rank whose reader does."""
        ...


@runtime_checkable
class AfterReads(Protocol):
    """A load planner that has something to do once a rank has read its items.

    Attributes:
        report: Where the reader counts what it moved.
    """

    report: LoadReport

    def finish_reads(self, error: BaseException | None) -> None:
        """Finish, or raise.

        Args:
            error: What went wrong while this rank read; None where nothing did.
        """
        ...
