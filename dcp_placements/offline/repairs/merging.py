"""One ``.metadata`` out of the ranks' own."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_placements._torch import Metadata
from dcp_placements.errors import CannotLook
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.output import Output
from dcp_placements.offline.readers.dcp import read_rank_parts
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.metadata.file import write_metadata
from dcp_placements.storage.metadata.rank_files import merge_rank_metadata


def merge_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Write one ``.metadata`` for a checkpoint that was saved without collectives.

    ``dcp.save(..., use_collectives=False)`` leaves every rank's own ``__<rank>.metadata``, from
    which torch loads that rank's part only. With one ``.metadata`` of all ranks any reader loads
    the checkpoint into any topology. Data files and the ranks' own files are left as they are.

    Args:
        path: The checkpoint directory.

    Returns:
        The metadata written.

    Raises:
        CannotLook: There is no rank's metadata, or it cannot be read or is refused; or another
            process is writing ``.metadata``.
        PlacementError: Chunks overlap, or no rank stored some elements. Nothing is written then.
    """
    directory = Path(path)
    with quiet_gc():
        parts = read_rank_parts(Directory(path))
    if not parts:
        raise CannotLook(
            f"{directory}: no __<rank>.metadata files, so there is nothing to merge\n"
            "    way out:     give the directory of a save with use_collectives=False"
        )
    with quiet_gc():
        merged = merge_rank_metadata(parts, whole=True)
        with Output(directory / ".metadata", replace=True) as output, output.file() as stream:
            write_metadata(merged, merged.storage_data, stream)
    return merged
