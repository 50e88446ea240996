"""Arguments that several commands take."""

from __future__ import annotations

import re
from typing import Annotated, Any

import torch
import typer

from dcp_placements.errors import format_nbytes

CheckpointPath = Annotated[str, typer.Argument(metavar="CKPT", help="The checkpoint's directory.")]
Fqn = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Only keys that match: dotted names, * and ** as wild."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def parse_nbytes(text: str | int) -> int:
    """Return bytes of ``512MiB``; binary units, whatever the spelling."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size: write for instance 512MiB or 2GiB")
    # Binary units, whatever the spelling: memory is counted so.
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


Memory = Annotated[
    int,
    typer.Option(
        parser=parse_nbytes, metavar="SIZE", help="How much memory data may take, such as 512MiB."
    ),
]


class Size(int):
    """A number of bytes that ``--help`` tells in binary units."""

    def __str__(self) -> str:
        return format_nbytes(self)


MEMORY = Size(2 << 30)


def parse_dtype(text: Any) -> torch.dtype:
    """Return the dtype that torch calls so."""
    found = text if isinstance(text, torch.dtype) else getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"{text!r} is no dtype: write for instance bfloat16")
    return found


RulesSpec = Annotated[
    str | None,
    typer.Option("--rules", metavar="MODULE:FUNC", help="A function: mesh -> Placements."),
]
FsdpAxes = Annotated[
    str, typer.Option("--fsdp", metavar="AXIS,...", help="Axes over which FSDP cuts dim 0.")
]
RenameSpec = Annotated[
    str | None,
    typer.Option("--rename", metavar="MODULE:FUNC", help="A function: key -> key."),
]
MeshSpec = Annotated[
    str | None, typer.Option("--mesh", metavar="AXIS=SIZE,...", help="Such as ep=8,edp=2.")
]
