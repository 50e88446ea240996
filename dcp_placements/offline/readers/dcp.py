"""DCP metadata of unknown origin: read, checked, or refused in one message."""

from __future__ import annotations

import json
from typing import Any

from dcp_placements._torch import Metadata
from dcp_placements.errors import CannotLook, format_name
from dcp_placements.offline.directory import Directory
from dcp_placements.storage.metadata.checks import check_metadata, checked_rows
from dcp_placements.storage.metadata.file import read_metadata
from dcp_placements.storage.metadata.rank_files import rank_file_rank
from dcp_placements.storage.metadata.table import Rows
from dcp_placements.storage.restricted_pickle import RefusedGlobal

TORCH_DIST = "torch_dist"


def is_torch_dist(directory: Directory) -> bool:
    """Whether Megatron's ``metadata.json`` beside ``.metadata`` names the backend torch_dist."""
    try:
        with directory.open("metadata.json") as stream:
            content = json.loads(stream.read(1 << 20))
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == TORCH_DIST


def read_rank_parts(
    directory: Directory, newer: set[str] | None = None
) -> list[tuple[int, Metadata]]:
    """Return the metadata of every rank of a save without collectives, by rank.

    Args:
        directory: Of the checkpoint.
        newer: As of ``read_metadata``.

    Raises:
        CannotLook: As ``read_pickle``.
    """
    ranks = sorted((r, n) for n in directory.names() if (r := rank_file_rank(n)) is not None)
    parts = [(rank, read_pickle(directory, name, newer)) for rank, name in ranks]
    for (_, name), (_, part) in zip(ranks, parts, strict=True):
        rows_of_metadata(f"{directory.path}/{name}", part)
    return parts


def read_pickle(directory: Directory, name: str, newer: set[str] | None = None) -> Metadata:
    """Return the content of a metadata file; nothing that it names is executed.

    Args:
        directory: Of the checkpoint.
        name: Of the file.
        newer: As of ``read_metadata``.

    Raises:
        CannotLook: It is refused, or cannot be read.
    """
    where = f"{directory.path}/{name}"
    try:
        return read_metadata(directory.opener(name), restricted=True, whole=True, newer=newer)
    except RefusedGlobal as error:
        raise CannotLook(
            f"{where}: refused, {error}\n"
            "    why:         a pickle calls what it names; nothing of it was executed\n"
            "    way out:     a file of unknown origin should not be loaded by anything else either"
        ) from error
    except OSError as error:
        raise CannotLook(f"{where}: cannot be read: {format_name(error)}") from error
    except Exception as error:
        # A broken or hostile pickle can raise anything.
        raise unreadable(where, error) from error


def rows_of_metadata(path: str, metadata: Any) -> Rows:
    """Return the rows of ``storage_data``, after a check of the types and numbers of everything.

    Args:
        path: Of the metadata, for messages.
        metadata: What a pickle contained.

    Raises:
        CannotLook: Something is not what DCP's own readers expect.
    """
    try:
        return checked_rows(metadata)
    except Exception as error:
        # Objects in a pickle can have attributes of any type, or none.
        raise unreadable(path, error) from error


def check_index(path: str, metadata: Metadata) -> None:
    """Check metadata with an index, without its rows.

    Args:
        path: Of the metadata, for messages.
        metadata: What was read.

    Raises:
        CannotLook: Something is not what DCP's own readers expect.
    """
    try:
        check_metadata(metadata)
    except Exception as error:
        raise unreadable(path, error) from error


def unreadable(where: str, error: object) -> CannotLook:
    """Return the error of metadata that are none, or are damaged."""
    return CannotLook(
        f"{where}: this is no metadata of DCP's that can be read\n"
        f"    found:       {format_name(error)}\n"
        "    likely:      the file was damaged or cut short"
    )
