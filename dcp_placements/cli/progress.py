"""A progress bar for whatever takes over a second on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any

DELAY_S = 1.0
"""Shorter work has no progress bar."""


@contextmanager
def progress(label: str, items: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function ``(done, total)`` that moves a progress bar on stderr.

    Before it is called the bar shows the time alone. Nothing is drawn in the first second, and if
    stderr is no terminal.

    Args:
        label: What the bar is of.
        items: What ``done`` and ``total`` count; bytes, with their rate, by default.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = _Bar(label, items)
    try:
        yield bar.step
    finally:
        bar.stop()


class _Bar:
    def __init__(self, label: str, items: str) -> None:
        self._label = label
        self._items = items
        self._at: tuple[int, int] | None = None
        self._drawn: Any = None
        self._is_stopped = False
        self._lock = Lock()
        self._timer = Timer(DELAY_S, self._start)
        self._timer.daemon = True
        self._timer.start()

    def step(self, done: int, total: int) -> None:
        with self._lock:
            is_first, self._at = self._at is None, (done, total)
            if self._drawn is not None:
                if is_first:
                    self._drawn.columns = self._columns()
                self._drawn.update(self._drawn.task_ids[0], completed=done, total=total)

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_stopped = True
            if self._drawn is not None:
                self._drawn.stop()

    def _start(self) -> None:
        # Imported where it is used: most commands end before.
        from rich.console import Console
        from rich.progress import Progress

        with self._lock:
            if self._is_stopped:
                return
            self._drawn = Progress(
                *self._columns(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
            )
            done, total = self._at or (0, None)
            self._drawn.add_task(self._label, completed=done, total=total)
            self._drawn.start()

    def _columns(self) -> tuple[Any, ...]:
        from rich import progress as rich

        label = rich.TextColumn(self._label)
        if self._at is None:
            return label, rich.BarColumn(), rich.TimeElapsedColumn()
        if self._items:
            amount: tuple[Any, ...] = (rich.MofNCompleteColumn(), rich.TextColumn(self._items))
        else:
            amount = rich.DownloadColumn(True), rich.TransferSpeedColumn()
        return label, rich.BarColumn(), *amount, rich.TimeRemainingColumn()
