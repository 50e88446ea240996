"""Pauses the garbage collector while many small objects are created.

Planning creates millions of small objects, and none of them is garbage. The collector nevertheless
traverses all of them again and again: nine tenths of the time of unpickling a large plan.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector inside; enable it again if it was enabled.

    Threads may be inside at a time: the last one that leaves enables it.
    """
    global _inside, _was_on
    with _LOCK:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside = max(_inside - 1, 0)
            if not _inside and _was_on:
                gc.enable()


def _after_fork() -> None:
    """Enable it in a child process, which has none of the other threads that would."""
    global _LOCK, _inside
    _LOCK = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
