"""Quiet for the garbage collector while many small objects are made.

Planning makes millions of small objects that all stay. The collector looks at all of them again
and again, and finds nothing: measured, nine tenths of the time of unpickling a large plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keep the cyclic garbage collector off inside; whatever happens it is put back as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
