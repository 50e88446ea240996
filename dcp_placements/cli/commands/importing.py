"""``import``: files of another format as a DCP checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    RULES,
    DryRun,
    Files,
    Memory,
    Mesh,
    Out,
    function_option,
    number,
)
from dcp_placements.cli.printing import BYTES, Shown, progress
from dcp_placements.offline.declared import Rename


def import_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The directory to import.")],
    out: Out,
    rename: Annotated[
        Rename | None, function_option("--rename", "From the files' names to the checkpoint's.")
    ] = None,
    files: Files = None,
    rules: Annotated[Any, RULES] = None,
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
    memory: Memory = "1GiB",
    dry_run: DryRun = False,
) -> Shown:
    """Turn safetensors, Megatron's mp_rank_* or a torch file per rank into a DCP checkpoint.

    Such as: dcp-placements import Mixtral-8x7B step-0
    """
    with progress("import", BYTES) as step:
        source = offline.open_source(
            src,
            files=files,
            rules=rules,
            axes=mesh,
            vocab_size=vocab_size,
            expert_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
        )
        result = offline.import_checkpoint(
            source, out, rename=rename, memory=memory, dry_run=dry_run, progress=step
        )
    return Shown(result)
