"""Output of the command line: text and tables for a terminal or a pipe, and JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from shutil import get_terminal_size
from typing import Any

from dcp_placements.errors import format_name


def show(result: Any, text: Callable[[], str] | None = None, *, json: bool, code: int = 0) -> int:
    """Print a command's result and return its exit code.

    The code is that of the finding, also if the reader of a pipe stops early (``| head -1``).

    Args:
        result: What ``to_json`` takes.
        text: Returns it as text, in which names are escaped; by default it is ``str(result)``.
        json: Whether to print one JSON document instead.
        code: The exit code.
    """
    with readers_may_stop():
        if json:
            from dcp_placements.offline.as_json import to_json

            print(dumps(to_json(result), indent=2, default=str))
        else:
            print(_escaped(str(result) if text is None else text()))
    return code


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout; None where that is a file or a pipe."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


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


def _escaped(text: str) -> str:
    return "\n".join(map(format_name, text.split("\n")))
