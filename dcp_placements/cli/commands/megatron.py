"""``megatron``: what a Megatron-LM checkpoint directory is."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import number
from dcp_placements.cli.printing import Shown, progress

Path = Annotated[
    str, typer.Argument(metavar="PATH", help="The directory of an iteration, or of all of them.")
]


def megatron_command(
    path: Path,
    expert_parallel_size: Annotated[
        int | None, number("Of the run that will load the files. It decides.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, number("Of the same run.")] = None,
    pipeline_parallel_size: Annotated[int | None, number("Of the same run.")] = None,
) -> Shown:
    """Report which ranks wrote mp_rank_* files, and what is missing or does not fit."""
    with progress("megatron", "files") as step:
        layout = offline.megatron_layout(
            path,
            expert_parallel_size=expert_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            progress=step,
        )
    return Shown(layout, 0 if layout.fits else 1)
