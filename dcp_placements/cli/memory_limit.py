"""A limit on the memory of this process, where the system has one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
