"""One ``.metadata`` out of the ranks' own, or out of one that only a later torch reads."""

from __future__ import annotations

import os

from dcp_placements._torch import Metadata
from dcp_placements.errors import CannotLook
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.readers.dcp import (
    is_torch_dist,
    read_pickle,
    read_rank_parts,
    rows_of_metadata,
)
from dcp_placements.offline.remote_output import output_at
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.index.storage_table import StorageTable
from dcp_placements.storage.metadata.file import write_metadata
from dcp_placements.storage.metadata.rank_files import merge_rank_metadata


def merge_metadata(path: str | os.PathLike[str], *, rewrite: bool = False) -> Metadata:
    """Write one ``.metadata`` for a checkpoint that was saved without collectives.

    ``dcp.save(..., use_collectives=False)`` leaves every rank's own ``__<rank>.metadata``, from
    which torch loads that rank's part only. With one ``.metadata`` of all ranks any reader loads
    the checkpoint into any topology. Data files and the ranks' own files are left as they are.

    It has the form that every torch from 2.10 on reads. Torch 2.15 and Python 3.13 write one that
    older ones do not; with ``rewrite`` such a ``.metadata`` is read, and written anew.

    Args:
        path: The checkpoint's directory or URL.
        rewrite: Write the existing ``.metadata`` anew, in place of merging those of ranks.

    Returns:
        The metadata written.

    Raises:
        CannotLook: There is no rank's metadata (to rewrite: no ``.metadata``, or Megatron's), or it
            cannot be read or is refused; or another process is writing ``.metadata``.
        PlacementError: Chunks overlap, or no rank stored some elements. Nothing is written then.
    """
    if rewrite:
        return _rewritten(Directory(path))
    with quiet_gc():
        directory = Directory(path)
        parts = read_rank_parts(directory)
    if not parts:
        raise CannotLook(
            f"{directory.path}: no __<rank>.metadata files, so there is nothing to merge\n"
            "    way out:     give the directory of a save with use_collectives=False"
        )
    with quiet_gc():
        merged = merge_rank_metadata(parts, whole=True)
        _write(directory, merged)
    return merged


def _rewritten(directory: Directory) -> Metadata:
    if ".metadata" not in directory.names():
        raise CannotLook(f"{directory.path}: no .metadata, so there is nothing to rewrite")
    if is_torch_dist(directory):
        raise CannotLook(
            f"{directory.path}: .metadata is Megatron's, of a class of its own: not rewritten"
        )
    with quiet_gc():
        metadata = read_pickle(directory, ".metadata")
        metadata.storage_data = StorageTable(rows_of_metadata(directory.path, metadata))
        _write(directory, metadata)
    return metadata


def _write(directory: Directory, metadata: Metadata) -> None:
    target = os.path.join(directory.path, ".metadata")
    with output_at(target, replace=True) as output, output.file() as stream:
        write_metadata(metadata, stream)
