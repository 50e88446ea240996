"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import Json, RenameFunction, parse_nbytes
from dcp_placements.cli.printing import print_text, show
from dcp_placements.cli.progress import progress


class Source(StrEnum):
    """What can be imported."""

    megatron = "megatron"
    hf = "hf"


def import_command(
    src: Annotated[str, typer.Argument(help="The directory to import.")],
    out: Annotated[str, typer.Argument(help="The checkpoint to write; must not be there.")],
    from_: Annotated[Source, typer.Option("--from", help="Whose files they are.")],
    preset: Annotated[str, typer.Option(help="Whose names the weights have.")] = "megatron_core",
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Words without padding; else what the files say."),
    ] = None,
    optimizer: Annotated[
        bool | None,
        typer.Option(help="Insist on its state, or leave it out; else import it if possible."),
    ] = None,
    expert_parallel_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Where names and contents do not tell.")
    ] = None,
    expert_tensor_parallel_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Where the files hold no arguments.")
    ] = None,
    rename: RenameFunction = None,
    memory: Annotated[
        int | None, typer.Option(parser=parse_nbytes, metavar="SIZE", help="For safetensors.")
    ] = None,
    json: Json = False,
) -> int:
    """Turn Megatron's mp_rank_* files, or safetensors, into a DCP checkpoint that loads anywhere.

    --rename and --memory are for safetensors, the other options for Megatron's files. --rename
    leads from the files' names to the checkpoint's: the opposite of export.
    """
    options: dict[Source, dict[str, Any]] = {
        Source.megatron: {
            "vocab_size": vocab_size,
            "optimizer": optimizer,
            "expert_parallel_size": expert_parallel_size,
            "expert_tensor_parallel_size": expert_tensor_parallel_size,
        },
        Source.hf: {"rename": rename, "memory": memory},
    }
    given = {
        source: {name: value for name, value in values.items() if value is not None}
        for source, values in options.items()
    }
    for source, values in given.items():
        if source is not from_ and values:
            name = next(iter(values)).replace("_", "-")
            raise typer.BadParameter(f"--{name} is for --from {source}")
    with progress("import") as step:
        result: Any
        if from_ is Source.hf:
            result = offline.import_safetensors(src, out, progress=step, **given[from_])
        else:
            result = offline.import_megatron(src, out, preset=preset, progress=step, **given[from_])
    return show(result, lambda: print_text(str(result)), json=json)
