"""``merge-metadata``: the ``.metadata`` that plain DCP reads."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath
from dcp_placements.cli.printing import Shown, progress
from dcp_placements.errors import format_count, format_name


def merge_metadata_command(
    ckpt: CheckpointPath,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Write the existing .metadata anew, for every torch."),
    ] = False,
) -> Shown:
    """Write .metadata for plain DCP, after a save without collectives or without stock metadata."""
    with progress("merge-metadata"):
        metadata = offline.merge_metadata(ckpt, rewrite=rewrite)
    keys, chunks = len(metadata.state_dict_metadata), len(metadata.storage_data)
    document = {"path": ckpt, "written": ".metadata", "keys": keys, "chunks": chunks}
    counts = f"{format_count(keys, 'key')} in {format_count(chunks, 'record')}"
    line = f"{ckpt}/.metadata: written, {counts}"
    return Shown(document, text=lambda: format_name(line))
