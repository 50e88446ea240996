"""``verify``: is the checkpoint whole?"""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import MEMORY, CheckpointPath, Json, Memory
from dcp_placements.cli.printing import counted, print_lines, progress, short, show
from dcp_placements.errors import format_nbytes
from dcp_placements.offline.checks.verification import Verification


def verify_command(
    ckpt: CheckpointPath,
    contents: Annotated[
        bool, typer.Option("--contents", help="Read everything; compare torch.save's checksums.")
    ] = False,
    digests: Annotated[
        bool, typer.Option("--digests", help="The same, and compare the stored digests.")
    ] = False,
    memory: Memory = MEMORY,
    json: Json = False,
) -> int:
    """Find holes, overlaps, missing and damaged files, mixed saves."""
    with progress("verify") as step:
        result = offline.verify(
            ckpt, contents=contents, digests=digests, memory=memory, progress=step
        )
    return show(result, lambda: _print(result), json=json, code=0 if result.sound else 1)


def _print(result: Verification) -> None:
    for fault in result.faults:
        print_lines(f"{fault.kind}: {short(fault.tensors or fault.files or (result.path,))}")
        if fault.files and fault.tensors:
            print_lines(f"    in file:     {short(fault.files)}")
        print_lines(f"    found:       {fault.message}")
    for note in result.notes:
        print_lines(f"note: {note}")
    checked = f"{counted(result.tensors, 'tensor')} in {counted(result.chunks, 'chunk')}"
    if result.nbytes:
        checked += f", {format_nbytes(result.nbytes)} read"
    if result.digests:
        checked += f", {counted(result.digests, 'digest')} compared"
    verdict = "sound" if result.sound else f"not sound, {counted(len(result.faults), 'fault')}"
    print_lines(f"{result.path}: {verdict} ({checked})")
