"""DCP metadata of unknown origin: read, checked, or refused in one message."""

from __future__ import annotations

import json

from dcp_placements.errors import CannotLook, format_name
from dcp_placements.offline.directory import Directory
from dcp_placements.storage.metadata.description import Description, read_description
from dcp_placements.storage.metadata.save_ids import rank_file_rank
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
) -> list[tuple[int, Description]]:
    """Return what the metadata of every rank of a save without collectives say, by rank.

    Args:
        directory: Of the checkpoint.
        newer: As of ``read_description``.

    Raises:
        CannotLook: As ``read_dcp``.
    """
    ranks = sorted((r, n) for n in directory.names() if (r := rank_file_rank(n)) is not None)
    return [(rank, read_dcp(directory, name, newer)) for rank, name in ranks]


def read_dcp(directory: Directory, name: str, newer: set[str] | None = None) -> Description:
    """Return what a metadata file says; nothing that it names is executed.

    Args:
        directory: Of the checkpoint.
        name: Of the file.
        newer: As of ``read_description``.

    Raises:
        CannotLook: It is refused, or cannot be read.
    """
    where = f"{directory.path}/{name}"
    try:
        return read_description(directory.opener(name), whole=True, newer=newer)
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


def rows_of(path: str, description: Description) -> Rows:
    """Return the places of all chunks.

    Args:
        path: Of the metadata, for messages.
        description: What they say.

    Raises:
        CannotLook: Something is not what DCP's own readers expect.
    """
    try:
        return description.rows()
    except Exception as error:
        # What an index refers to is read now, and may be of another file.
        raise unreadable(path, error) from error


def unreadable(where: str, error: object) -> CannotLook:
    """Return the error of metadata that are none, or are damaged."""
    return CannotLook(
        f"{where}: this is no metadata of DCP's that can be read\n"
        f"    found:       {format_name(error)}\n"
        "    likely:      the file was damaged or cut short"
    )
