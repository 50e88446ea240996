"""``rehearse`` and ``reshard``: would a checkpoint load into a world; one rewritten for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import (
    MESH,
    RULES,
    CheckpointPath,
    DryRun,
    Fqn,
    Fsdp,
    Out,
    fsdp_of,
)
from dcp_placements.cli.printing import BYTES, Shown, progress, terminal_width
from dcp_placements.errors import CannotLook
from dcp_placements.transfer.world import MeshAxes


def rehearse_command(
    ckpt: CheckpointPath,
    rules: Annotated[Any, RULES],
    mesh: Annotated[MeshAxes, MESH],
    fsdp: Fsdp = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's keys: a JSON list, or one per line."),
    ] = None,
    fqn: Fqn = None,
) -> Shown:
    """Plan a load on every rank of a mesh that need not exist. No data is read."""
    keys = None if expect is None else _keys(expect)
    with progress("rehearse", "ranks") as step:
        rehearsal = offline.rehearse(
            ckpt,
            rules,
            mesh,
            fsdp=fsdp_of(fsdp),
            expect=keys,
            fqn=fqn,
            progress=step,
        )
    code = 0 if rehearsal.loads and not rehearsal.unmatched else 1
    return Shown(rehearsal, code, lambda: rehearsal.text(width=terminal_width()))


def reshard_command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to rewrite.")],
    out: Out,
    rules: Annotated[Any, RULES],
    mesh: Annotated[MeshAxes, MESH],
    fsdp: Fsdp = None,
    dry_run: DryRun = False,
) -> Shown:
    """Rewrite a checkpoint for the mesh that will load it: each rank's bytes in one file.

    After an interruption the same command continues. Other files in the checkpoint's directory
    are not copied.
    """
    with progress("reshard", BYTES) as step:
        result = offline.reshard(
            src, out, rules, mesh, fsdp=fsdp_of(fsdp), dry_run=dry_run, progress=step
        )
    return Shown(result)


def _keys(path: Path) -> list[str]:
    try:
        text = path.read_text()
        if not text.lstrip().startswith("["):
            return [line.strip() for line in text.splitlines() if line.strip()]
        keys = json.loads(text)
    except (OSError, ValueError) as error:
        raise CannotLook(f"{path}: no list of keys: {error}") from error
    if not all(isinstance(key, str) for key in keys):
        raise CannotLook(f"{path}: a list of keys must be of text")
    return list(keys)
