"""Output of the command line: text and tables for a terminal or a pipe, and JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from typing import Any

from dcp_placements.errors import format_name, format_names, format_ranks


def show(result: Any, print_result: Callable[[], None], *, json: bool, code: int = 0) -> int:
    """Print a command's result and return its exit code.

    The code is that of the finding, also if the reader of a pipe stops early (``| head -1``).

    Args:
        result: What ``to_json`` takes.
        print_result: Prints it as text.
        json: Whether to print one JSON document instead.
        code: The exit code.
    """
    with readers_may_stop():
        if json:
            from dcp_placements.offline.as_json import to_json

            print(dumps(to_json(result), indent=2, default=str))
        else:
            print_result()
    return code


@contextmanager
def readers_may_stop() -> Iterator[None]:
    """Within the block, the reader of a pipe may stop early: what it does not read is dropped."""
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
    """Print an error as one JSON document to stdout.

    Args:
        kind: The name of its class.
        message: Its text.
    """
    with readers_may_stop():
        print(dumps({"error": {"type": kind, "message": message}}, indent=2))


def print_lines(*lines: str) -> None:
    """Print lines. Line breaks and control characters in names are escaped."""
    for line in lines:
        print(format_name(line))


def print_text(text: str) -> None:
    """Print a text of several lines, in which names are escaped already."""
    print(_escaped(text))


def _escaped(text: str) -> str:
    return "\n".join(map(format_name, text.split("\n")))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """Print rows under headings: folded to the width of a terminal, and unfolded into a pipe.

    Args:
        columns: Headings.
        rows: Texts, one for each column.
        right: Headings of the columns of numbers, separated by spaces.
    """
    cells = [list(columns), *[[format_name(cell) for cell in row] for row in rows]]
    justified = ["right" if heading in right.split() else "left" for heading in columns]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            texts = [
                cell.rjust(width) if side == "right" else cell.ljust(width)
                for cell, width, side in zip(row, widths, justified, strict=True)
            ]
            print("  ".join(texts).rstrip())
        return
    # Imported where it is used: help and pipes need none of it.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, side in zip(columns, justified, strict=True):
        justify: Any = side
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=side == "right")
    for row in cells[1:]:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def short(names: Sequence[str], limit: int = 3) -> str:
    """Return some names; ``-`` for none."""
    return format_names(names, limit) if names else "-"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges; ``-`` for none.

    >>> ranges([3, 0, 1, 2]), ranges([])
    ('0-3', '-')
    """
    listed = list(numbers)
    return format_ranks(listed).partition(" ")[2] if listed else "-"
