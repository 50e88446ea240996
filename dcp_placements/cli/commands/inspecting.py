"""``inspect``: what is in a checkpoint; where the chunks of one tensor are."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Fqn
from dcp_placements.cli.printing import Shown, progress, terminal_width


def inspect_command(
    ckpt: CheckpointPath,
    tensor: Annotated[
        str | None,
        typer.Argument(
            metavar="[FQN]", help="A tensor's key: list its chunks, and where they are."
        ),
    ] = None,
    fqn: Fqn = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and every file.")] = False,
) -> Shown:
    """Sum up tensors, small objects with their values, and the record of the save."""
    with progress("inspect"):
        chunks = None if tensor is None else offline.inspect_tensor(ckpt, tensor)
        inspection = offline.inspect(ckpt, fqn=fqn) if chunks is None else None
    if chunks is not None:
        return Shown(chunks, text=lambda: chunks.text(width=terminal_width()))
    assert inspection is not None
    return Shown(inspection, text=lambda: inspection.text(keys=keys, width=terminal_width()))
