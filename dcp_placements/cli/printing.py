"""Output of the command line: text and tables for a terminal or a pipe, JSON, a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from typing import Any, NamedTuple

from dcp_placements.short_text import format_name

BYTES = "bytes"


class Shown(NamedTuple):
    """The output of a command, and its exit code."""

    result: Any  # argument of ``to_json``
    code: int = 0
    # Returns the result as text, whose names are escaped; by default ``str(result)``
    text: Callable[[], str] | None = None

    def show(self, *, json: bool) -> int:
        """Print it and return the exit code, also if the reader of a pipe stops early."""
        with readers_may_stop():
            if json:
                from dcp_placements.offline.texts import to_json

                print(dumps(to_json(self.result), indent=2, default=str))
            else:
                print(_escaped(str(self.result) if self.text is None else self.text()))
        return self.code


@contextmanager
def readers_may_stop() -> Iterator[None]:
    """Within the block, the reader of a pipe may stop early; the rest of the output is dropped."""
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        # Python flushes both once more at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(nowhere, stream.fileno())


def print_error(text: str) -> None:
    """Print an error of one or more lines to stderr."""
    with readers_may_stop():
        print(f"dcp-placements: {_escaped(text)}", file=sys.stderr)


def print_json_error(kind: str, message: str) -> None:
    """Print an error, by the name of its class, as one JSON document to stdout."""
    with readers_may_stop():
        print(dumps({"error": {"type": kind, "message": message}}, indent=2))


def _escaped(text: str) -> str:
    return "\n".join(map(format_name, text.split("\n")))


@contextmanager
def progress(label: str, items: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function ``(done, total)`` that moves a progress bar, where stderr is a terminal.

    The bar goes when the block ends.

    Args:
        label: Label of the bar.
        items: Unit of ``done`` and ``total``: bytes, shown with their rate, or items of this name.
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
    columns.append(rich.TimeElapsedColumn())
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
