"""A progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BYTES = "bytes"


@contextmanager
def progress(label: str, items: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function ``(done, total)`` that moves a progress bar, where stderr is a terminal.

    The bar goes when the block ends.

    Args:
        label: What the bar is of.
        items: What ``done`` and ``total`` count: bytes, with their rate, or items of this name.
            Without it the bar shows the time alone.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as rich  # imported where it is used: help needs none of it
    from rich.console import Console

    columns: list[rich.ProgressColumn] = [rich.TextColumn(label), rich.BarColumn()]
    if items == BYTES:
        columns += [rich.DownloadColumn(True), rich.TransferSpeedColumn()]
    elif items:
        columns += [rich.MofNCompleteColumn(), rich.TextColumn(items)]
    with rich.Progress(
        *columns,
        rich.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
