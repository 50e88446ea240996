"""The command line: reads arguments, calls ``dcp_placements.offline``, prints what it returns."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    0: sound or same; 1: faults or different; 2: could not look.

    Args:
        arguments: The arguments after the program's name. By default those of this process: the
            command then runs in a process of its own, which ends where a file takes too long.
    """
    try:
        from dcp_placements.cli.app import run, run_limited
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        need = f"dcp-placements: the command line needs {error.name}"
        print(f"{need}: pip install 'dcp-placements[cli]'", file=sys.stderr)
        return 2
    return run_limited() if arguments is None else run(arguments)
