"""The errors of loads from a path that is no checkpoint, or whose metadata cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dcp_placements.errors import NoCheckpoint, PlacementError
from dcp_placements.short_text import (
    format_count,
    format_error,
    format_names,
)
from dcp_placements.storage.rank_metadata import only_of_ranks
from dcp_placements.storage.remote import is_url

MAX_LISTED = 200
"""The most neighbouring directories that are searched for a message."""

_WAY_OUT = "the directory of a checkpoint, in which .metadata is"


def no_checkpoint(path: str | os.PathLike[str], names_at_url: Iterable[str] = ()) -> NoCheckpoint:
    """Return the error of a load from a path without ``.metadata``.

    Args:
        path: A path of a local file system, or a URL.
        names_at_url: The names of the files at a URL; those of a local directory are listed here.
    """
    folder = Path(path)
    if is_url(str(path)):
        text = f"{path}: there is no .metadata\n    way out:     {_WAY_OUT}"
        return NoCheckpoint(only_of_ranks(path, names_at_url) or text)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if text_of_ranks := only_of_ranks(path, names):
        return NoCheckpoint(text_of_ranks)
    contents = format_names(names, 4) or "an empty directory"
    if not folder.is_dir():
        contents = "a file, and no directory" if folder.exists() else "no such directory"
    lines = [
        f"{path}: no complete checkpoint, as there is no .metadata",
        f"found:       {contents}",
    ]
    if any(name.startswith(".metadata.") or name.endswith(".distcp") for name in names):
        lines.append("likely:      a save that was cut off, as .metadata comes last")
    if "metadata.pkl" in names:
        lines.append("likely:      torch_checkpointing saved it: Placements.resharder() loads it")
        return NoCheckpoint("\n    ".join([*lines, "or:          dcp-placements import PATH OUT"]))
    return NoCheckpoint("\n    ".join([*lines, _way_out(folder)]))


def unreadable_metadata(path: str | os.PathLike[str], error: Exception) -> PlacementError:
    """Return the error of a load from metadata that cannot be read.

    Args:
        path: Path of the metadata file.
        error: The error of reading it.
    """
    file, nbytes = Path(path), ""
    if file.is_file():
        nbytes = f", in {format_count(file.stat().st_size, 'byte')}"
    return PlacementError(
        f"{path}: this is no metadata of DCP's that can be read\n"
        f"    found:       {type(error).__name__}: {format_error(error)}{nbytes}\n"
        "    likely:      the file was damaged or cut short (a copy in part, a full disk), or is "
        "not from where it seems\n"
        f"    {_way_out(file.parent)}"
    )


def _way_out(folder: Path) -> str:
    """Return a way out: a complete checkpoint inside the folder, or the newest one beside it."""
    if inside := [name for _, name in _completed(folder)]:
        return f"way out:     one of the checkpoints inside: {format_names(sorted(inside), 4)}"
    if beside := [name for _, name in _completed(folder.parent) if name != folder.name]:
        return f"way out:     the newest complete one beside it: {beside[-1]}"
    return f"way out:     {_WAY_OUT}"


def _completed(folder: Path) -> list[tuple[int, str]]:
    """Return when the checkpoints in a directory were completed, and their names, oldest first."""
    with suppress(OSError):
        files = sorted(folder.glob("*/.metadata"))[-MAX_LISTED:]
        complete = [file for file in files if file.stat().st_size]
        return sorted((file.stat().st_mtime_ns, file.parent.name) for file in complete)
    return []
