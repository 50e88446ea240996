"""``draw``: a picture of a tensor, or of a whole checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath
from dcp_placements.cli.printing import Shown, progress
from dcp_placements.errors import format_name


def draw_command(
    ckpt: CheckpointPath,
    fqn: Annotated[
        str | None,
        typer.Argument(
            metavar="[FQN]", help="The tensor's key; without it, draw the bytes of each rank."
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="The .png or .svg file to write.")
    ] = "checkpoint.png",
) -> Shown:
    """Draw a tensor's chunks by writer rank, or the bytes that each rank wrote."""
    with progress("draw"):
        offline.check_picture_name(output)
        offline.save_figure(offline.draw(ckpt, fqn), output)
    document = {"path": ckpt, "fqn": fqn, "written": str(output)}
    return Shown(document, text=lambda: format_name(f"{output}: written"))
