"""A command in a process of its own, which the system ends where a file asks for too much.

No code of Python runs while the unpickler in C hashes a key or nests values, so a limit has to end
the process. The first process waits, and says what happened.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from dcp_placements.short_text import format_name
from dcp_placements.storage.process_limits import OPENED

_PARENT_DEATH = 1
"""``PR_SET_PDEATHSIG`` of Linux: the signal to a process whose parent has ended."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def in_own_process(run: Callable[[], int]) -> tuple[int, int | None]:
    """Return the result of a function that runs in a process of its own, where the system has them.

    Args:
        run: Returns an exit code.

    Returns:
        The exit code; and the signal that ended the process, None where it ended by itself.
    """
    if sys.platform != "linux":
        return run(), None
    # Before torch is imported, a process has no threads and is small.
    waited = (*_FORWARDED, signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    OPENED.share()
    parent, child = os.getpid(), os.fork()
    if not child:
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(2)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run(), None
    while True:
        info = signal.sigwaitinfo(waited)
        # A terminal sends its signals to both processes; others send them to the first.
        if info.si_signo != signal.SIGCHLD and info.si_pid:
            os.kill(child, info.si_signo)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (128 - code, -code)


def why_ended(number: int) -> str | None:
    """Return a message about a process that a signal ended; None where somebody sent the signal."""
    if number == signal.SIGPROF:
        what = "a pickle took far more time than one of its size"
        likely = "a file of unknown origin that is made to take hours"
    elif number in _CRASHES:
        what = f"it crashed ({signal.Signals(number).name})"
        likely = "a file of unknown origin that nests its values without end"
    elif number == signal.SIGKILL:
        what = "it was killed"
        likely = "the system has too little memory: --most-memory before the command sets a limit"
    else:
        return None
    text = f"the command did not end: {what}\n    likely:      {likely}"
    return f"{text}\n    last opened: {format_name(path)}" if (path := OPENED.path()) else text
