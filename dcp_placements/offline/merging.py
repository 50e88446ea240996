"""A ``.metadata`` for every torch: of the ranks' own, of an index alone, or of a later torch's."""

from __future__ import annotations

import os
from contextlib import suppress

from torch.distributed.checkpoint import Metadata

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.offline.checkpoint import (
    check_count,
    is_torch_dist,
    read_dcp,
    read_rank_parts,
)
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.output import replaced_file
from dcp_placements.planning import quiet_gc
from dcp_placements.storage.index import paths_of
from dcp_placements.storage.metadata_file import write_metadata
from dcp_placements.storage.provenance import stored
from dcp_placements.storage.rank_files import merge_rank_metadata
from dcp_placements.storage.save_ids import absent_ranks
from dcp_placements.storage.stock_pickle import is_refusing

_HEAD_NBYTES = 1 << 10


@quiet_gc()
def merge_metadata(path: str | os.PathLike[str], *, rewrite: bool = False) -> Metadata:
    """Write the ``.metadata`` that plain DCP needs to load a checkpoint.

    ``dcp.save(..., use_collectives=False)`` leaves every rank's own ``__<rank>.metadata``, from
    which torch loads that rank's part only. ``PlacementFileSystemWriter(stock_metadata=False)``
    leaves a ``.metadata`` with an index alone, which torch refuses. With one ``.metadata`` of all
    ranks any reader loads the checkpoint into any topology. It replaces the older one when it is
    complete. Data files and the ranks' own files are left as they are.

    It has the form that every torch from 2.10 on reads. Torch 2.15 and Python 3.13 write one that
    older ones do not; with ``rewrite`` such a ``.metadata`` is read, and written anew.

    Of an index, memory is needed for the index and for some hundred thousand rows at a time.

    Args:
        path: The checkpoint's directory or URL.
        rewrite: Write the existing ``.metadata`` anew, in place of merging those of ranks.

    Returns:
        The metadata written.

    Raises:
        CannotLook: There is no rank's metadata (to rewrite: no ``.metadata``, or Megatron's), or it
            cannot be read or is refused; or there is a ``.metadata`` of another save, or a save
            has written one meanwhile; or another process is writing ``.metadata``.
        PlacementError: Chunks overlap, or no rank stored some elements. Nothing is written then.
    """
    directory = Directory(path)
    has_metadata = ".metadata" in directory.names()
    versions = directory.versions(())
    if rewrite or (has_metadata and _is_index_alone(directory)):
        if not has_metadata:
            raise CannotLook(f"{directory.path}: no .metadata, so there is nothing to rewrite")
        if is_torch_dist(directory):
            raise CannotLook(
                f"{directory.path}: .metadata is Megatron's, of a class of its own: not rewritten"
            )
        metadata = read_dcp(directory, ".metadata")
        check_count(directory.path, len(metadata.storage_data or ()))
    else:
        parts = read_rank_parts(directory)
        if not parts:
            there = ""
            way = (
                "give the directory of a save with use_collectives=False, or with "
                "PlacementFileSystemWriter(stock_metadata=False)"
            )
            if has_metadata:
                there = "there is a .metadata of all ranks, and "
                way = "load it as it is; verify checks it"
            raise CannotLook(
                f"{directory.path}: {there}no __<rank>.metadata files: there is nothing to "
                f"merge\n    way out:     {way}"
            )
        absent = absent_ranks(directory.names())
        metadata = merge_rank_metadata(parts, whole=True, absent=absent)
        if has_metadata:
            _check_same_save(directory, metadata)
    is_local = directory.local(".metadata") is not None
    if not is_local:
        # At a URL the output may be there as soon as it is opened.
        directory.check_versions(versions)
    with replaced_file(os.path.join(directory.path, ".metadata")) as stream:
        write_metadata(metadata, stream)
        stream.flush()
        if is_local:
            os.fsync(stream.fileno())
            directory.check_versions(versions)  # the last step before the rename
    return metadata


def _is_index_alone(directory: Directory) -> bool:
    """Whether there is a ``.metadata`` without what plain DCP reads."""
    # One that may not be opened, such as a link that leads elsewhere, is replaced.
    with suppress(OSError), directory.open(".metadata") as stream:
        return is_refusing(stream.read(_HEAD_NBYTES))
    return False


def _check_same_save(directory: Directory, merged: Metadata) -> None:
    """Refuse to replace the ``.metadata`` of another save."""
    try:
        existing = read_dcp(directory, ".metadata")
    except (CannotLook, OSError):
        return  # It is of no use to any reader.
    both = (existing, merged)
    ids = [str((stored(metadata) or {}).get("save_id", "no save id")) for metadata in both]
    files, rank_files = (paths_of(metadata.storage_data or {}) for metadata in both)
    if (
        ids[0] != ids[1]
        or files != rank_files
        # Two saves may have files of the same names, and none an id.
        or dict(existing.storage_data or {}) != dict(merged.storage_data or {})
    ):
        raise CannotLook(
            f"{directory.path}: .metadata and the ranks' metadata are of different saves\n"
            f"    .metadata:   {ids[0]}; {format_names(sorted(files))}\n"
            f"    the ranks':  {ids[1]}; {format_names(sorted(rank_files))}\n"
            "    likely:      a save with collectives and one without wrote into one directory; "
            "their order is not recorded\n"
            "    way out:     remove .metadata, or the __<rank>.metadata files, whichever belong "
            "to the save that you do not want"
        )
