"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
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
    expert_parallel_size: Annotated[
        int | None, number("Megatron: if the files leave it open.")
    ] = None,
    expert_tensor_parallel_size: Annotated[
        int | None, number("Megatron: if the files hold no arguments.")
    ] = None,
    rename: Annotated[
        Rename | None,
        rename_option("Safetensors: a function from the files' names to the checkpoint's."),
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
    """
    of_megatron = {
        "vocab_size": vocab_size,
        "expert_parallel_size": expert_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
    }
    of_hf = {"rename": rename, "memory": memory}
    given = _given({Source.megatron: of_megatron, Source.hf: of_hf}, from_)
    with progress("import") as step:
        result: Any
        if from_ is Source.hf:
            result = offline.import_safetensors(src, out, progress=step, **given)
        else:
            result = offline.import_megatron(src, out, preset=preset, progress=step, **given)
    return show(result, lambda: print_text(str(result)), json=json)


def _given(options: Mapping[Source, Mapping[str, Any]], from_: Source) -> dict[str, Any]:
    """Return the options that are given, which have to be those of the format."""
    for source, values in options.items():
        given = [name for name, value in values.items() if value is not None]
        if given and source is not from_:
            raise typer.BadParameter(f"--{given[0].replace('_', '-')} is for --from {source}")
    return {name: value for name, value in options[from_].items() if value is not None}
