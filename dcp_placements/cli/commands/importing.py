"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import Json, RenameSpec, parse_nbytes
from dcp_placements.cli.printing import print_json, progress, say_text
from dcp_placements.formats.huggingface.importing import MEMORY_NBYTES, ImportedSafetensors
from dcp_placements.formats.megatron.report import ImportReport
from dcp_placements.offline.declared import resolve


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
    rename: RenameSpec = None,
    memory: Annotated[
        int | None, typer.Option(parser=parse_nbytes, metavar="SIZE", help="For safetensors.")
    ] = None,
    json: Json = False,
) -> int:
    """Turn Megatron's mp_rank_* files, or safetensors, into a DCP checkpoint that loads anywhere.

    --rename and --memory are for safetensors, the other options for Megatron's files.
    """
    of_megatron: dict[str, Any] = {
        "vocab_size": vocab_size,
        "optimizer": optimizer,
        "expert_parallel_size": expert_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
    }
    if from_ is Source.hf:
        _refuse(of_megatron, "megatron")
        with progress("import") as step:
            found = offline.import_safetensors(
                src,
                out,
                rename=None if rename is None else resolve(rename),
                memory=MEMORY_NBYTES if memory is None else memory,
                progress=step,
            )
        return _tell(found, json=json)
    _refuse({"rename": rename, "memory": memory}, "hf")
    with progress("import") as step:
        report = offline.import_megatron(
            src,
            out,
            preset=preset,
            **of_megatron,
            progress=step,
        )
    return _tell(report, json=json)


def _refuse(options: dict[str, Any], source: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(f"--{given[0].replace('_', '-')} is for --from {source}")


def _tell(report: ImportReport | ImportedSafetensors, *, json: bool) -> int:
    if json:
        print_json(report)
    else:
        say_text(str(report))
    return 0
