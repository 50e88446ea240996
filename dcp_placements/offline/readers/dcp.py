"""DCP metadata of unknown origin: read, checked, or refused in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_placements.errors import CannotLook, format_name
from dcp_placements.offline.directory import Directory
from dcp_placements.storage.metadata.description import (
    MOST_ROWS,
    Description,
    read_description,
    read_stock_pickle,
)
from dcp_placements.storage.metadata.save_ids import rank_file_rank
from dcp_placements.storage.metadata.table import Offset
from dcp_placements.storage.restricted_pickle import RefusedGlobal

T = TypeVar("T")

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
    opener = directory.opener(name)
    return _read(directory, name, lambda: read_description(opener, whole=True, newer=newer))


def misplaced_in_stock(directory: Directory, description: Description) -> list[str]:
    """Return the keys that torch's readers, which read the pickle alone, look for elsewhere.

    Args:
        directory: Of the checkpoint.
        description: What the index of its ``.metadata`` says.

    Raises:
        CannotLook: The pickle before the index is refused, or cannot be read.
    """
    if ".metadata" not in directory.names():
        return []
    opener = directory.opener(".metadata")
    stock = _read(directory, ".metadata", lambda: read_stock_pickle(opener))
    if stock is None:
        return []
    fqns = {*description.rows.fqns, *stock.rows.fqns}
    return sorted(fqn for fqn in fqns if _places(description, fqn) != _places(stock, fqn))


def _places(description: Description, fqn: str) -> dict[Offset, tuple[Any, ...]]:
    steps = description.rows.transforms
    return {
        offset: (file, steps[transforms], start, length)
        for offset, (file, transforms, start, length) in description.rows.rows_of(fqn)
    }


def _read(directory: Directory, name: str, read: Callable[[], T]) -> T:
    where = f"{directory.path}/{name}"
    try:
        return read()
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


def files_of(path: str, description: Description) -> list[tuple[str, ...]]:
    """Return by key of the rows the files that hold any of its chunks, sorted.

    Every part of an index is read for this, so that none turns out to be damaged later.

    Raises:
        CannotLook: Something is not what DCP's own readers expect.
    """
    try:
        # What an index refers to is read now, and may be of another file.
        for _ in description.entries.lists:
            pass
        return description.rows.files()
    except Exception as error:
        raise unreadable(path, error) from error


def check_count(path: str, description: Description) -> None:
    """Refuse more chunks than can be handled one by one; an index may claim any number.

    Args:
        path: Of the checkpoint, for the message.
        description: What its metadata say.

    Raises:
        CannotLook: There are more.
    """
    count = len(description.rows)
    if count > MOST_ROWS:
        raise CannotLook(
            f"{path}: {count:,} chunks, and at most {MOST_ROWS:,} are handled one by one\n"
            "    why:         each takes memory, or space on the disk, and a small index can claim "
            "any number\n"
            "    way out:     PlacementFileSystemReader loads a checkpoint of any size"
        )


def unreadable(where: str, error: object) -> CannotLook:
    """Return the error of metadata that are none, or are damaged."""
    return CannotLook(
        f"{where}: this is no metadata of DCP's that can be read\n"
        f"    found:       {format_name(error)}\n"
        "    likely:      the file was damaged or cut short"
    )
