"""The process that is writing an output at a URL, as the output's last marker names it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from dcp_placements.errors import CannotLook, format_name


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that is writing an output."""

    pid: int  # its number
    host: str  # the name of its machine
    since: str  # when it began to write
    # When the process began, in the system's ticks: another process may have its number later, or
    # have it in another container
    start: str

    @classmethod
    def of_this_process(cls) -> Holder:
        """Return this process."""
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(os.getpid(), socket.gethostname(), since, _start(os.getpid()))

    @classmethod
    def parse(cls, data: bytes) -> Holder | None:
        """Return the holder that a marker names; None where it is not as ``format`` writes it."""
        try:
            stored = json.loads(data)
            holder = cls(*(stored[field.name] for field in fields(cls)))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts = holder.host, holder.since, holder.start
        is_process = type(holder.pid) is int and holder.pid > 0
        return holder if is_process and all(type(text) is str for text in texts) else None

    def format(self) -> bytes:
        """Return what ``parse`` reads."""
        return json.dumps(asdict(self)).encode()

    @property
    def is_of_this_host(self) -> bool:
        """Whether the process is on this machine."""
        return self.host == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        """Whether the process has surely ended: it was on this machine, and is no more."""
        if not self.is_of_this_host:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
        return self.start != _start(self.pid)


def busy(target: str, marker: str, holder: Holder) -> CannotLook:
    """Return the error for an output that another process is writing.

    Args:
        target: The output.
        marker: Its last marker, which somebody may have to remove.
        holder: The process that the marker names.
    """
    way = "wait for it, or give another name"
    if not holder.is_of_this_host:
        way += f"; if that process has ended, remove {marker}"
    who = f"process {holder.pid} on {holder.host}, since {holder.since}"
    return CannotLook(
        f"{format_name(target)}: is being written by another process\n"
        f"    found:       {format_name(who)}\n"
        f"    way out:     {format_name(way)}"
    )


def _start(pid: int) -> str:
    """Return when a process began, in the system's ticks; nothing where the system has no /proc."""
    try:
        # The name of the program, in parentheses, may contain spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
