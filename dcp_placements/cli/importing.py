"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import Json
from dcp_placements.cli.printing import print_json, progress, say


class Source(StrEnum):
    """What can be imported."""

    megatron = "megatron"


def import_command(
    src: Annotated[str, typer.Argument(help="The directory to import.")],
    out: Annotated[str, typer.Argument(help="The checkpoint to write; must not be there.")],
    from_: Annotated[Source, typer.Option("--from", help="Whose files they are.")],
    preset: Annotated[str, typer.Option(help="Whose names the weights have.")] = "megatron_core",
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Words without padding; else what the files say.")
    ] = None,
    optimizer: Annotated[
        bool | None,
        typer.Option(help="Insist on its state, or leave it out; else import it if possible."),
    ] = None,
    expert_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Where names and contents do not tell.")
    ] = None,
    expert_tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Where the files hold no arguments.")
    ] = None,
    json: Json = False,
) -> int:
    """Turn Megatron's mp_rank_* files into a DCP checkpoint that loads anywhere."""
    with progress("import") as step:
        report = offline.import_megatron(
            src,
            out,
            preset=preset,
            vocab_size=vocab_size,
            optimizer=optimizer,
            expert_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            progress=step,
        )
    if json:
        print_json(report.as_json())
    else:
        say(str(report))
    return 0
