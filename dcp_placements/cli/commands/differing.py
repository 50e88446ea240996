"""``diff``: what differs between two checkpoints, by content."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import MEMORY, Fqn, Json, Memory, RenameSpec
from dcp_placements.cli.printing import counted, print_json, progress, say, size
from dcp_placements.offline.declared import resolve
from dcp_placements.offline.differences.difference import Diff


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any layout and format.")],
    fqn: Fqn = None,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Absolute tolerance.")] = 0.0,
    rename: RenameSpec = None,
    memory: Memory = MEMORY,
    json: Json = False,
) -> int:
    """Compare two checkpoints element by element; --rename maps A's keys to B's."""
    renamed = None if rename is None else resolve(rename)
    with progress("diff") as step:
        found = offline.diff(
            a, b, fqn=fqn, rtol=rtol, atol=atol, rename=renamed, memory=memory, progress=step
        )
    if json:
        print_json(found)
    else:
        _print(found)
    return 0 if found.same else 1


def _print(found: Diff) -> None:
    for difference in found.differences:
        say(f"{difference.kind}: {difference.fqn}", f"    {difference.message}")
    for note in found.notes:
        say(f"note: {note}")
    what = "same" if found.same else counted(len(found.differences), "difference")
    say(f"{what} ({counted(found.tensors, 'tensor')}, {size(found.nbytes)} compared)")
