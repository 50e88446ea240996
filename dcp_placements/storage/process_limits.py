"""Limits of a process that reads files of unknown origin, where the system has them.

A pickle of some hundred bytes can ask for gigabytes, or for hours. No reader in this process can
prevent that at a low price, but the system can: a command of ``dcp-placements`` runs in a process
of its own with a limit of memory, and ends where one pickle takes too long. A trainer has neither:
``limited_time`` does nothing in a process that did not ask for the limits.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OUT_OF_TIME = getattr(signal, "SIGPROF", None)
"""The signal that ends a process in which a pickle took too long."""

LEAST_S = 10.0
"""Seconds of the processor that any pickle may take: thousands of times what a small one needs."""

_NBYTES_PER_S = 1 << 20
"""A pickle may take another second for as many bytes. A sound one has 10 MB a second."""


def default_limit() -> int | None:
    """Return half of the memory of this machine, in bytes; None where that is unknown."""
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return None


@contextmanager
def limited_memory(nbytes: int | None) -> Iterator[None]:
    """Within the block, raise ``MemoryError`` above a limit of memory; only Linux has one.

    Args:
        nbytes: Bytes beyond the current memory of the process; None for no limit.
    """
    held = None
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status") as stream:
        (line,) = [line for line in stream if line.startswith("VmData:")]
        held = int(line.split()[1]) << 10
    if nbytes is None or held is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [other for other in (soft, hard) if other != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(held + nbytes, *finite, held + nbytes), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


_OPENED_NBYTES = 4 << 10
"""Longest path that is kept of the file opened last."""


class _Opened:
    """The path of the file that was opened last, in memory that a process shares with its child."""

    def __init__(self) -> None:
        self._shared: mmap.mmap | None = None

    def share(self) -> None:
        """From now on, keep the path, also of what a child opens that is forked after this."""
        self._shared = mmap.mmap(-1, _OPENED_NBYTES)

    def note(self, path: str) -> None:
        """Keep the path of a file that is opened; do nothing where nobody shares it."""
        if self._shared is not None:
            name = os.fsencode(path)[: _OPENED_NBYTES - 1]
            self._shared[: len(name) + 1] = name + b"\0"

    def path(self) -> str:
        """The path; empty if no file was opened."""
        shared = b"" if self._shared is None else self._shared[:]
        return os.fsdecode(shared.partition(b"\0")[0])


OPENED = _Opened()
"""A process that the system ends cannot say which file it read; its parent can."""


class _Clock:
    """The processor time of the pickles that are being read.

    Attributes:
        is_set: Whether this process ends where a pickle takes too long.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._blocks = 0

    def enter(self, seconds: float) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                signal.setitimer(signal.ITIMER_PROF, seconds)

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                signal.setitimer(signal.ITIMER_PROF, 0)


_CLOCK = _Clock()


def limit_time() -> None:
    """From now on, end this process with ``OUT_OF_TIME`` where a pickle takes too long."""
    _CLOCK.is_set = OUT_OF_TIME is not None


@contextmanager
def limited_time(nbytes: int) -> Iterator[None]:
    """Within the block, which reads a pickle, limit the time of a process that asked for it.

    The system ends the process, since no code of Python runs while a key is hashed.

    Args:
        nbytes: Size of the pickle, or of the file with it.
    """
    if not _CLOCK.is_set:
        yield
        return
    _CLOCK.enter(LEAST_S + nbytes / _NBYTES_PER_S)
    try:
        yield
    finally:
        _CLOCK.leave()
