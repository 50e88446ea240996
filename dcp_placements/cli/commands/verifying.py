"""``verify``: is the checkpoint whole?"""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import MEMORY, CheckpointPath, Json, Memory
from dcp_placements.cli.printing import counted, print_json, progress, say, short, size
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
        found = offline.verify(
            ckpt, contents=contents, digests=digests, memory=memory, progress=step
        )
    if json:
        print_json(found)
    else:
        _print(found)
    return 0 if found.sound else 1


def _print(found: Verification) -> None:
    for fault in found.faults:
        about = short(fault.tensors or fault.files) if fault.tensors or fault.files else found.path
        say(f"{fault.kind}: {about}")
        if fault.files and fault.tensors:
            say(f"    in file:     {short(fault.files)}")
        say(f"    found:       {fault.message}")
    for note in found.notes:
        say(f"note: {note}")
    told = f"{counted(found.tensors, 'tensor')} in {counted(found.chunks, 'chunk')}"
    if found.nbytes:
        told += f", {size(found.nbytes)} read"
    if found.digests:
        told += f", {counted(found.digests, 'digest')} compared"
    what = "sound" if found.sound else f"not sound, {counted(len(found.faults), 'fault')}"
    say(f"{found.path}: {what} ({told})")
