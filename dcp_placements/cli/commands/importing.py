"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    RULES,
    DryRun,
    Files,
    Json,
    Memory,
    Mesh,
    Out,
    Size,
    number,
    rename_option,
)
from dcp_placements.cli.printing import show
from dcp_placements.cli.progress import BYTES, progress
from dcp_placements.offline.declared import Rename, resolve

MEMORY = Size(1 << 30)


def import_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The directory to import.")],
    out: Out,
    rename: Annotated[
        Rename | None, rename_option("A function from the files' names to the checkpoint's.")
    ] = None,
    files: Files = None,
    rules: Annotated[str | None, RULES] = None,
    mesh: Mesh = None,
    vocab_size: Annotated[
        int | None, number("Megatron: rows without padding, if the files lack the number.")
    ] = None,
    expert_parallel_size: Annotated[
        int | None, number("Megatron: if the files leave it open.")
    ] = None,
    expert_tensor_parallel_size: Annotated[
        int | None, number("Megatron: if the files hold no arguments.")
    ] = None,
    memory: Memory = MEMORY,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Turn safetensors, Megatron's mp_rank_* or a torch file per rank into a DCP checkpoint.

    Such as: dcp-placements import Mixtral-8x7B step-0
    """
    with progress("import", BYTES) as step:
        source = offline.open_source(
            src,
            files=files,
            rules=None if rules is None else resolve(rules),
            axes=mesh,
            vocab_size=vocab_size,
            expert_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
        )
        result = offline.import_checkpoint(
            source, out, rename=rename, memory=memory, dry_run=dry_run, progress=step
        )
    return show(result, json=json)
