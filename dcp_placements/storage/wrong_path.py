"""The errors of loads from a path that is no checkpoint, or whose metadata cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dcp_placements.errors import NoCheckpoint, PlacementError
from dcp_placements.pages import KILLED_PAGE
from dcp_placements.short_text import (
    format_count,
    format_error,
    format_names,
)
from dcp_placements.storage.rank_metadata import only_of_ranks
from dcp_placements.storage.store import Store

MAX_LISTED = 200
"""The most neighbouring directories that are searched for a message."""

ENGINE_METADATA = "metadata.pkl"
"""The file that describes a checkpoint of ``torch_checkpointing``."""

_WAY_OUT = "the directory of a checkpoint, in which .metadata is"
_IMPORT = "dcp-placements import PATH OUT"


def no_checkpoint(store: Store, kind: type[PlacementError] = NoCheckpoint) -> PlacementError:
    """Return the error of a directory that holds no complete checkpoint.

    Args:
        store: The files of the directory.
        kind: Class of the error: ``NoCheckpoint`` of a load, ``CannotLook`` of a tool.
    """
    entry = store.entry()
    is_directory = entry is not None and entry.nbytes is None
    names = store.names() if is_directory else []
    if text_of_ranks := only_of_ranks(store.path, names):
        return kind(text_of_ranks)
    contents = format_names(names, 4) or "an empty directory"
    if not is_directory:
        contents = "no such directory" if entry is None else "a file, and no directory"
    lines = [
        f"{store.path}: no complete checkpoint, as there is no .metadata",
        f"found:       {contents}",
    ]
    page = []
    if any(name.startswith(".metadata.") or name.endswith(".distcp") for name in names):
        lines.append("likely:      a save that was cut off, as .metadata comes last")
        page = [KILLED_PAGE]
    return kind("\n    ".join([*lines, *_ways_out(store, names), *page]))


def _ways_out(store: Store, names: Sequence[str]) -> list[str]:
    """Return what to do about a directory without ``.metadata``, by the names in it."""
    if ENGINE_METADATA in names:
        return [
            "likely:      torch_checkpointing saved it: Placements.resharder() loads it",
            f"or:          {_IMPORT}",
        ]
    if any(name.endswith(".safetensors") or name.startswith("mp_rank_") for name in names):
        return [f"way out:     {_IMPORT}, as it has the files of another tool"]
    if any(name.endswith((".pt", ".pth", ".bin")) for name in names):
        return [f"way out:     {_IMPORT} --files 'NAME_{{rank}}.pt', if it has a file per rank"]
    return [_way_out(Path(store.path)) if store.is_local else f"way out:     {_WAY_OUT}"]


def unreadable_metadata(store: Store, name: str, error: Exception) -> PlacementError:
    """Return the error of a load from metadata that cannot be read.

    Args:
        store: The files of the checkpoint.
        name: Name of the metadata file.
        error: The error of reading it.
    """
    nbytes = ""
    if store.is_local and (size := store.size(name)) is not None:
        nbytes = f", in {format_count(size, 'byte')}"
    return PlacementError(
        f"{store.path}/{name}: this is no metadata of DCP's that can be read\n"
        f"    found:       {type(error).__name__}: {format_error(error)}{nbytes}\n"
        "    likely:      the file was damaged or cut short (a copy in part, a full disk), or is "
        "not from where it seems\n"
        f"    {_way_out(Path(store.path))}"
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
