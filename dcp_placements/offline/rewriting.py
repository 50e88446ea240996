"""A ``.metadata`` that torch reads, in place of an index alone or of a later torch's form."""

from __future__ import annotations

import os
from functools import partial

from torch.distributed.checkpoint import Metadata

from dcp_placements.errors import CannotLook
from dcp_placements.items import quiet_gc
from dcp_placements.offline.checkpoint import check_count
from dcp_placements.offline.directory import (
    check_versions,
    existing_directory,
    versions_of,
)
from dcp_placements.offline.output import replaced_file
from dcp_placements.offline.sources.dcp_source import is_torch_dist, read_dcp
from dcp_placements.storage.index import INDEX_VERSION, OtherVersion
from dcp_placements.storage.metadata_file import UnusedIndex, write_metadata
from dcp_placements.storage.store import StorageOptions
from dcp_placements.storage.wrong_path import no_checkpoint


@quiet_gc()
def stock_metadata(
    path: str | os.PathLike[str],
    *,
    storage_options: StorageOptions = None,
) -> Metadata:
    """Write the ``.metadata`` of a checkpoint anew, with all that torch's reader needs.

    ``PlacementFileSystemWriter(stock_metadata=False)`` writes an index alone, which torch refuses.
    Torch 2.15 and Python 3.13 write fields and paths that older versions do not read. The new file
    has an index, and the form that every torch from 2.10 on reads. It replaces the older file when
    it is complete; data files are left as they are.

    Memory is needed for the index and for some hundred thousand rows at a time.

    Args:
        path: The checkpoint's directory or URL.
        storage_options: Options that fsspec passes to the file system of a URL.

    Returns:
        The metadata written.

    Raises:
        CannotLook: There is no ``.metadata``, or it is Megatron's, a newer version's, cannot be
            read or is refused; or a save has written another one meanwhile, or another process is
            writing it.
    """
    directory = existing_directory(path, storage_options)
    if ".metadata" not in directory.names():
        raise no_checkpoint(directory, CannotLook)
    if is_torch_dist(directory):
        raise CannotLook(
            f"{directory.path}: .metadata is Megatron's, of a class of its own: not written anew"
        )
    versions = versions_of(directory, ())
    unused: list[UnusedIndex] = []
    metadata = read_dcp(directory, ".metadata", unused=unused)
    for index in unused:
        if isinstance(index, OtherVersion) and index.version > INDEX_VERSION:
            raise CannotLook(
                f"{directory.path}: the index of .metadata is of version {index.version}, and this "
                f"release writes {INDEX_VERSION}: not written anew\n"
                "    way out:     a newer dcp-placements"
            )
    check_count(directory.path, len(metadata.storage_data or ()))
    unchanged = partial(check_versions, directory, versions)
    with replaced_file(directory, ".metadata", check=unchanged) as stream:
        write_metadata(metadata, stream)
    return metadata
