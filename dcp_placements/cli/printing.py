"""How results look: for a terminal, for a pipe, as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dcp_placements.errors import format_name, format_names, format_nbytes
from dcp_placements.offline.as_json import to_json

DELAY_S = 1.0
"""What takes less has no progress bar."""


def complain(text: str) -> None:
    """Print an error to stderr, of as many lines as it has."""
    print(f"dcp-placements: {_shown(text)}", file=sys.stderr)


def print_json(told: Any) -> None:
    """Print a JSON document: results and plain values."""
    print(json.dumps(to_json(told), indent=2, default=str))


def say(*lines: str) -> None:
    """Print lines, each as one: what is in a name breaks none and moves no cursor."""
    for line in lines:
        print(format_name(line))


def say_text(text: str) -> None:
    """Print a text of several lines, in which names are escaped already."""
    print(_shown(text))


def _shown(text: str) -> str:
    return "\n".join(map(format_name, text.split("\n")))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print rows under headings: folded to the width of a terminal, and unfolded into a pipe.

    Args:
        columns: Headings.
        rows: Texts, one for each column.
        right: Headings of the columns of numbers, separated by spaces.
    """
    rows = [[format_name(cell) for cell in cells] for cells in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        for cells in (columns, *rows):
            told = [
                cell.rjust(width) if heading in right.split() else cell.ljust(width)
                for heading, cell, width in zip(columns, cells, widths, strict=True)
            ]
            print("  ".join(told).rstrip())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in columns:
        numbers = heading in right.split()
        table.add_column(
            heading,
            justify="right" if numbers else "left",
            overflow="fold",
            no_wrap=numbers,
        )
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def short(names: Sequence[str], limit: int = 3) -> str:
    """Return some names; ``-`` for none."""
    return format_names(names, limit) if names else "-"


def number(value: int) -> str:
    """Return a number with separators."""
    return f"{value:,}"


def counted(value: int, noun: str) -> str:
    """Return a number and what it counts.

    >>> counted(1, "chunk"), counted(2000, "chunk")
    ('1 chunk', '2,000 chunks')
    """
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def size(value: int | None) -> str:
    """Return a byte count as text."""
    return "-" if value is None else format_nbytes(value)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function ``(done, total)``, in bytes, that draws a bar on stderr.

    Not before a second has passed, and not where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = Progress(
        *(TextColumn(what), BarColumn(), DownloadColumn(True), TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what)
    started = time.monotonic()
    shown = False

    def step(done: int, total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > DELAY_S:
            shown = True
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield step
    finally:
        if shown:
            bar.stop()
