"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import Json, Out, number, parse_nbytes, rename_option
from dcp_placements.cli.printing import print_text, show
from dcp_placements.cli.progress import progress
from dcp_placements.offline.declared import Rename


class Source(StrEnum):
    """What can be imported."""

    megatron = "megatron"
    hf = "hf"


def import_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The directory to import.")],
    out: Out,
    from_: Annotated[
        Source, typer.Option("--from", help="Megatron's files, or Hugging Face's safetensors.")
    ],
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Megatron: the preset for the names of weights.")
    ] = "megatron_core",
    vocab_size: Annotated[
        int | None, number("Megatron: rows without padding, if the files lack the number.")
    ] = None,
    optimizer: Annotated[
        bool | None,
        typer.Option(
            help="Megatron: require optimizer state, or leave it out. By default it is imported "
            "if possible."
        ),
    ] = None,
    expert_parallel_size: Annotated[
        int | None, number("Megatron: if the files leave it open.")
    ] = None,
    expert_tensor_parallel_size: Annotated[
        int | None, number("Megatron: if the files hold no arguments.")
    ] = None,
    rename: Annotated[
        Rename | None,
        rename_option(
            "Safetensors: a function from the files' names to the checkpoint's; or that of an "
            "export, which is read backwards."
        ),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_nbytes, metavar="SIZE", help="Safetensors: the most memory for data."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Turn Megatron's mp_rank_* files, or safetensors, into a DCP checkpoint that loads anywhere.

    Such as: dcp-placements import Mixtral-8x7B step-0 --from hf
    --rename dcp_placements.presets.hub:mixtral
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
