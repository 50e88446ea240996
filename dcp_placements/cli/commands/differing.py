"""``diff``: what differs between two checkpoints, by content."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import MEMORY, Fqn, Json, Memory, RenameFunction
from dcp_placements.cli.printing import counted, print_lines, progress, show
from dcp_placements.errors import format_nbytes
from dcp_placements.offline.differences.difference import Diff


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any layout and format.")],
    fqn: Fqn = None,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Absolute tolerance.")] = 0.0,
    rename: RenameFunction = None,
    memory: Memory = MEMORY,
    json: Json = False,
) -> int:
    """Compare two checkpoints element by element; --rename maps A's keys to B's."""
    with progress("diff") as step:
        diff = offline.diff(
            a, b, fqn=fqn, rtol=rtol, atol=atol, rename=rename, memory=memory, progress=step
        )
    return show(diff, lambda: _print(diff), json=json, code=0 if diff.same else 1)


def _print(diff: Diff) -> None:
    for difference in diff.differences:
        print_lines(f"{difference.kind}: {difference.fqn}", f"    {difference.message}")
    for note in diff.notes:
        print_lines(f"note: {note}")
    result = "same" if diff.same else counted(len(diff.differences), "difference")
    compared = f"{counted(diff.tensors, 'tensor')}, {format_nbytes(diff.nbytes)} compared"
    print_lines(f"{result} ({compared})")
