"""``diff``: what differs between two checkpoints, by content."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import Fqn, Memory, function_option
from dcp_placements.cli.printing import BYTES, Shown, progress
from dcp_placements.offline.declared import Rename


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of any layout and format.")],
    fqn: Fqn = None,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Absolute tolerance.")] = 0.0,
    rename: Annotated[
        Rename | None, function_option("--rename", "A function from A's keys to B's.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of A's keys, where B is an export, as export has it."),
    ] = None,
    all_families: Annotated[bool, typer.Option("--all", help="Print every difference.")] = False,
    memory: Memory = "2GiB",
) -> Shown:
    """Compare two checkpoints element by element; --rename maps A's keys to B's."""
    with progress("diff", BYTES) as step:
        diff = offline.diff(
            a,
            b,
            fqn=fqn,
            rtol=rtol,
            atol=atol,
            rename=rename,
            prefix=prefix,
            memory=memory,
            progress=step,
        )
    text = partial(diff.text, sys.maxsize) if all_families else None
    return Shown(diff, 0 if diff.same else 1, text)
