"""``export``: a checkpoint as a model's own files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    CheckpointPath,
    Json,
    Memory,
    RenameSpec,
    Size,
    parse_dtype,
    parse_nbytes,
)
from dcp_placements.cli.printing import print_json, progress, say_text
from dcp_placements.errors import PlacementError
from dcp_placements.formats.huggingface.export import MEMORY_NBYTES, SHARD_NBYTES
from dcp_placements.offline.declared import resolve

SHARD_SIZE = Size(SHARD_NBYTES)
MEMORY = Size(MEMORY_NBYTES)


class Format(StrEnum):
    """What can be written."""

    hf = "hf"
    torch = "torch"


def export_command(
    checkpoint: CheckpointPath,
    out: Annotated[str, typer.Argument(help="What to write; must not be there.")],
    to: Annotated[Format, typer.Option(help="A directory of safetensors, or one torch file.")],
    max_shard_size: Annotated[
        int, typer.Option(parser=parse_nbytes, metavar="SIZE", help="Of one safetensors file.")
    ] = SHARD_SIZE,
    dtype: Annotated[
        Any, typer.Option(parser=parse_dtype, metavar="DTYPE", help="Such as bfloat16.")
    ] = None,
    rename: RenameSpec = None,
    prefix: Annotated[
        str | None, typer.Option(help="Before the model's names; else what the checkpoint says.")
    ] = None,
    tied: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NAME", help="Left out: equal to the second.")
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Its state too.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Keys to leave out.")
    ] = None,
    memory: Memory = MEMORY,
    json: Json = False,
) -> int:
    """Write a checkpoint as the files that from_pretrained reads, or as one torch file."""
    asked: dict[str, Any] = {
        "dtype": dtype,
        "rename": None if rename is None else resolve(rename),
        "prefix": prefix,
        "tied": dict([_pair(text) for text in tied or ()]),
        "optimizer": optimizer,
        "exclude": exclude or (),
    }
    if to is Format.torch:
        told = offline.export_torch(checkpoint, out, **asked)
    else:
        with progress("export") as step:
            told = offline.export_safetensors(
                checkpoint,
                out,
                max_shard_size=max_shard_size,
                memory=memory,
                progress=step,
                **asked,
            )
    if json:
        print_json(told)
    else:
        say_text(str(told))
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, _, whose = text.partition("=")
    if not name or not whose:
        raise PlacementError(f"{text!r}: write NAME=NAME, as in lm_head.weight=embed.weight")
    return name, whose
