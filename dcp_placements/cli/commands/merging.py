"""``merge-metadata``: one ``.metadata`` out of the ranks' own."""

from __future__ import annotations

from dcp_placements import offline
from dcp_placements.cli.arguments import CheckpointPath, Json
from dcp_placements.cli.printing import counted, print_json, say


def merge_metadata_command(ckpt: CheckpointPath, json: Json = False) -> int:
    """Put the metadata of a save without collectives together, and write .metadata."""
    merged = offline.merge_metadata(ckpt)
    keys, chunks = len(merged.state_dict_metadata), len(merged.storage_data)
    if json:
        print_json({"path": ckpt, "written": ".metadata", "keys": keys, "chunks": chunks})
    else:
        say(f"{ckpt}/.metadata: written, {counted(keys, 'key')} in {counted(chunks, 'record')}")
    return 0
