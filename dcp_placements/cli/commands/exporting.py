"""``export``: a checkpoint as a model's own files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    RULES,
    CheckpointPath,
    DryRun,
    Files,
    Memory,
    Mesh,
    function_option,
    parse_dtype,
    parse_pair,
    size,
)
from dcp_placements.cli.printing import BYTES, Shown, progress
from dcp_placements.offline.declared import Rename


class Format(StrEnum):
    """What can be written."""

    hf = "hf"


def export_command(
    checkpoint: CheckpointPath,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The directory to write; must not exist.")
    ],
    to: Annotated[
        Format,
        typer.Option(
            help="A directory of safetensors. torch itself writes one torch.save file: "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save."
        ),
    ] = Format.hf,
    max_shard_size: Annotated[Any, size("The most bytes in one file.")] = "5GiB",
    dtype: Annotated[
        Any, typer.Option(parser=parse_dtype, metavar="DTYPE", help="Cast to it, such as bfloat16.")
    ] = None,
    rename: Annotated[
        Rename | None, function_option("--rename", "From the model's names to the files'.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The prefix of the model's keys, which is removed; by default that of the dict "
            "that was saved.",
        ),
    ] = None,
    tied: Annotated[
        list[Any] | None,
        typer.Option(
            parser=parse_pair,
            metavar="NAME=NAME",
            help="Leave out the first; it equals the second.",
        ),
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also optimizer state.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave out keys that match.")
    ] = None,
    files: Files = None,
    rules: Annotated[Any, RULES] = None,
    mesh: Mesh = None,
    memory: Memory = "1GiB",
    dry_run: DryRun = False,
) -> Shown:
    """Write a checkpoint, or a torch file per rank, as the files that from_pretrained reads."""
    with progress("export", BYTES) as step:
        exported = offline.export_safetensors(
            offline.open_source(checkpoint, files=files, rules=rules, axes=mesh),
            out,
            max_shard_size=max_shard_size,
            dtype=dtype,
            rename=rename,
            prefix=prefix,
            tied=dict(tied or ()),
            optimizer=optimizer,
            exclude=exclude or (),
            memory=memory,
            dry_run=dry_run,
            progress=step,
        )
    return Shown(exported)
