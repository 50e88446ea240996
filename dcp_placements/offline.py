"""Work on checkpoint directories, without a process group."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_placements.errors import PlacementError
from dcp_placements.interop import FileSystem, Metadata
from dcp_placements.metadata_file import read_metadata, write_metadata
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.rank_metadata import merge_rank_metadata, rank_files


def merge_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Write the one ``.metadata`` of a checkpoint that was saved without collectives.

    ``dcp.save(..., use_collectives=False)`` leaves every rank's own ``__<rank>.metadata``, from
    which torch loads each rank's own part only. With the one of all ranks any reader loads the
    checkpoint into any topology. Data files stay as they are, and so do the ranks' own.

    Args:
        path: The checkpoint directory.

    Returns:
        What was written.

    Raises:
        PlacementError: There is no rank's metadata; or together they are no checkpoint, because
            chunks overlap, or some elements nobody stored. Nothing is written then.
    """
    directory = Path(path)
    files = rank_files(FileSystem(), directory)
    if not files:
        raise PlacementError(
            f"{directory}: no __<rank>.metadata files, so there is nothing to merge\n"
            "    way out:     give the directory of a save with use_collectives=False"
        )
    with quiet_gc():
        parts = []
        for rank, file in files:
            with open(file, "rb") as stream:
                parts.append((rank, read_metadata(stream)))
        merged = merge_rank_metadata(parts, whole=True)
        target = directory / ".metadata"
        written = directory / ".metadata.tmp"
        with open(written, "wb") as stream:
            write_metadata(merged, merged.storage_data, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(written, target)
    return merged
