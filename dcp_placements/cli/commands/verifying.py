"""``verify``: is the checkpoint whole?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import MEMORY, CheckpointPath, Json, Memory
from dcp_placements.cli.printing import print_lines, short, show
from dcp_placements.cli.progress import progress
from dcp_placements.errors import format_count, format_nbytes
from dcp_placements.offline.views.families import families, natural_key

if TYPE_CHECKING:
    from dcp_placements.offline.checks.structure import CheckpointFault
    from dcp_placements.offline.checks.verification import Verification

MAX_GROUPS = 10
"""Files and kinds of faults that are printed without ``--all``: three lines each."""


def verify_command(
    ckpt: CheckpointPath,
    contents: Annotated[
        bool,
        typer.Option("--contents", help="Read all contents; compare the checksums of torch.save."),
    ] = False,
    all_faults: Annotated[bool, typer.Option("--all", help="Print every fault.")] = False,
    memory: Memory = MEMORY,
    json: Json = False,
) -> int:
    """Find holes, overlaps, missing and damaged files, mixed saves."""
    with progress("verify") as step:
        result = offline.verify(ckpt, contents=contents, memory=memory, progress=step)

    def print_result() -> None:
        _print(result, all_faults=all_faults, contents_read=contents)

    return show(result, print_result, json=json, code=0 if result.sound else 1)


def _print(result: Verification, *, all_faults: bool, contents_read: bool) -> None:
    groups = _groups(result.faults)
    shown = groups if all_faults else groups[:MAX_GROUPS]
    place = None
    for (where, kind), faults in shown:
        if where != place:
            print_lines(where)
            place = where
        number = f"{format_count(len(faults), 'fault')}, " if len(faults) > 1 else ""
        tensors = families({fqn for fault in faults for fqn in fault.tensors})
        names = short([family.name for family in tensors])
        print_lines(f"    {kind}: {number}{names if tensors else 'no key'}")
        first = " (the first)" if len(faults) > 1 else ""
        print_lines(f"        found:       {faults[0].message}{first}")
    rest = groups[len(shown) :]
    if rest:
        number = format_count(sum(len(faults) for _, faults in rest), "more fault")
        print_lines(
            f"... and {number} in {format_count(len({w for (w, _), _ in rest}), 'place')}; --all"
        )
    for note in result.notes:
        print_lines(f"note: {note}")
    checked = f"{format_count(result.tensors, 'tensor')} in {format_count(result.chunks, 'chunk')}"
    if result.nbytes:
        checked += f", {format_nbytes(result.nbytes)} read"
    if not result.sound:
        verdict = f"not sound, {format_count(len(result.faults), 'fault')}"
    elif contents_read and result.unread:
        verdict = f"sound but for {format_count(result.unread, 'record')} not read"
    elif contents_read:
        verdict = "sound"
    else:
        verdict = "sizes and structure sound; contents not read (--contents)"
    print_lines(f"{result.path}: {verdict} ({checked})")


def _groups(
    faults: Iterable[CheckpointFault],
) -> list[tuple[tuple[str, str], list[CheckpointFault]]]:
    """Return faults by file and kind, sorted."""
    groups: dict[tuple[str, str], list[CheckpointFault]] = {}
    for fault in faults:
        where = short(fault.files) if fault.files else "in the metadata"
        groups.setdefault((where, fault.kind), []).append(fault)
    return sorted(groups.items(), key=lambda item: (natural_key(item[0][0]), item[0][1]))
