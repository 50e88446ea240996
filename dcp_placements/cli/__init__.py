"""The command line: reads arguments, calls ``dcp_placements.offline``, prints what it returns."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    0: sound or same; 1: faults or different; 2: could not look.

    Args:
        arguments: The arguments after the program's name; those of this process by default.
    """
    try:
        from dcp_placements.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        need = f"dcp-placements: the command line needs {error.name}"
        print(f"{need}: pip install 'dcp-placements[cli]'", file=sys.stderr)
        return 2
    return run(arguments)
