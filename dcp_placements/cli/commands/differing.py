"""``diff``: what differs between two checkpoints, by content."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import MEMORY, Fqn, Json, Memory, rename_option
from dcp_placements.cli.printing import print_lines, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_nbytes
from dcp_placements.offline.declared import Rename

if TYPE_CHECKING:
    from dcp_placements.offline.difference import Diff

MAX_FAMILIES = 15
"""Families of keys that are printed without ``--all``: two lines each."""


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of any layout and format.")],
    fqn: Fqn = None,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Absolute tolerance.")] = 0.0,
    rename: Annotated[Rename | None, rename_option("A function from A's keys to B's.")] = None,
    all_families: Annotated[bool, typer.Option("--all", help="Print every difference.")] = False,
    memory: Memory = MEMORY,
    json: Json = False,
) -> int:
    """Compare two checkpoints element by element; --rename maps A's keys to B's."""
    with progress("diff") as step:
        diff = offline.diff(
            a, b, fqn=fqn, rtol=rtol, atol=atol, rename=rename, memory=memory, progress=step
        )
    return show(
        diff, lambda: _print(diff, all_families=all_families), json=json, code=0 if diff.same else 1
    )


def _print(diff: Diff, *, all_families: bool) -> None:
    result = "same" if diff.same else format_count(len(diff.differences), "difference")
    kinds = Counter(difference.kind for difference in diff.differences)
    if len(kinds) > 1:
        result += ": " + ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    compared = f"{format_count(diff.tensors, 'tensor')}, {format_nbytes(diff.nbytes)} compared"
    print_lines(f"{result} ({compared})")
    found = diff.families
    shown = found if all_families else found[:MAX_FAMILIES]
    for family in shown:
        number = f" ({family.keys:,})" if family.keys > 1 else ""
        first = f"{family.first.fqn}: " if family.keys > 1 else ""
        print_lines(f"{family.name}: {family.kind}{number}", f"    {first}{family.first.message}")
    rest = found[len(shown) :]
    if rest:
        number = format_count(sum(family.keys for family in rest), "more difference")
        print_lines(f"... and {number}; --all")
    for note in diff.notes:
        print_lines(f"note: {note}")
