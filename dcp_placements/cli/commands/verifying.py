"""``verify``: is the checkpoint whole?"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Memory
from dcp_placements.cli.printing import BYTES, Shown, progress


def verify_command(
    ckpt: CheckpointPath,
    contents: Annotated[
        bool,
        typer.Option("--contents", help="Read all contents; compare the checksums of torch.save."),
    ] = False,
    all_faults: Annotated[bool, typer.Option("--all", help="Print every fault.")] = False,
    memory: Memory = "2GiB",
) -> Shown:
    """Find holes, overlaps, missing and damaged files, mixed saves."""
    with progress("verify", BYTES) as step:
        result = offline.verify(ckpt, contents=contents, memory=memory, progress=step)
    text = partial(result.text, sys.maxsize) if all_faults else None
    return Shown(result, 0 if result.sound else 1, text)
