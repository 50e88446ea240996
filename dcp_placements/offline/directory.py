"""The files of a checkpoint: a local directory, or whatever fsspec opens (``s3://...``)."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from dcp_placements.errors import CannotLook
from dcp_placements.short_text import format_name, format_names
from dcp_placements.storage.file_reads import open_inside, why_barred
from dcp_placements.storage.rank_metadata import only_of_ranks
from dcp_placements.storage.remote import RemoteFileSystem, is_url, local_or_url

MARKER = ".unfinished"
"""The marker of an unfinished output at a URL. Older versions put a number behind it."""

_DESCRIBING = (".metadata", ".index.json", "metadata.json")
"""Endings of the names of files that describe where the tensors are."""


class Directory:
    """Names, sizes and contents of the files of a checkpoint.

    Raises:
        CannotLook: There is no such directory, or fsspec is needed and not installed.
        OSError: The service cannot be reached or refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(local_or_url(path))
        self._remote: RemoteFileSystem | None = None
        self._root = self.path.rstrip("/") or "/"
        self._sizes: dict[str, int | None] = {}
        if is_url(self.path):
            self._remote = RemoteFileSystem()
            self._root = self._remote.init_path(self.path)
            entry = self._remote.entry(self._root)
            is_there, is_file = entry is not None, entry is not None and entry.nbytes is not None
        else:
            is_there, is_file = os.path.exists(self.path), not os.path.isdir(self.path)
        if not is_there:
            raise CannotLook(f"{self.path}: there is no such path")
        if is_file:
            raise CannotLook(
                f"{self.path}: this is a file\n    way out:     give the checkpoint's directory"
            )

    def names(self) -> list[str]:
        """Return the names of what is in the directory itself, sorted."""
        if self._remote is None:
            return sorted(os.listdir(self._root))
        entries = self._remote.entries(self._root)
        self._sizes |= {name: entry.nbytes for name, entry in entries.items()}
        return sorted(entries)

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None where no file of that name may be opened."""
        if name not in self._sizes:
            path = self._path(name)
            if self._remote is None:
                self._sizes[name] = None
                with suppress(FileNotFoundError):  # removed in between
                    if os.path.isfile(path) and self.why_barred(name) is None:
                        self._sizes[name] = os.path.getsize(path)
            else:
                entry = self._remote.entry(path)
                self._sizes[name] = None if entry is None else entry.nbytes
        return self._sizes[name]

    def why_barred(self, name: str) -> str | None:
        """Return why a file is not opened: a link that leads elsewhere, or no plain file."""
        return None if self._remote else why_barred(self._root, name)

    def modified(self, name: str) -> float | None:
        """Return when a file was last written, in seconds since 1970.

        None for a URL, and for a file that is not there.
        """
        with suppress(FileNotFoundError):
            return None if self._remote else os.path.getmtime(self._path(name))
        return None

    def open(self, name: str) -> IO[bytes]:
        """Return a file, open for reading by position.

        Raises:
            OSError: It cannot be opened.
        """
        if self._remote:
            return self._remote.open(self._path(name))
        return open_inside(self._root, name)

    def opener(self, name: str) -> Callable[[], IO[bytes]]:
        """Return a function that opens a file, any number of times."""
        if self._remote:
            return self._remote.opener(self._path(name))
        return partial(self.open, name)

    def check_damage(self, name: str, error: Exception) -> None:
        """Raise an error of reading a file anew unless it is about the file.

        A file that is missing or ends too early, or a broken disk, is damage. A file that may not
        be read, or a service that does not answer, is none.

        Raises:
            CannotLook: The error is no damage of the file.
        """
        is_missing = isinstance(error, FileNotFoundError)
        if isinstance(error, OSError) and not is_missing and error.errno != errno.EIO:
            raise CannotLook(f"{self.path}/{name}: it cannot be read: {error}") from error

    def version(self, name: str) -> str:
        """Return the version of a file, which each write changes: its size and time, or its tag.

        Raises:
            OSError: There is no such file.
        """
        if self._remote:
            return self._remote.version(self._path(name))
        stat = os.stat(self._path(name))
        return f"{stat.st_size} {stat.st_mtime_ns}"

    def versions(self, files: Iterable[str]) -> dict[str, str]:
        """Return the versions of files by name.

        The version of metadata is a digest of the bytes, that of other ``files`` is ``version``.
        """
        described = [name for name in self.names() if name.endswith(_DESCRIBING)]
        versions = {}
        for name in {*files, *described}:
            try:
                if name not in described:
                    versions[name] = self.version(name)
                    continue
                contents: Any = self.open(name)
                with contents as stream:
                    versions[name] = hashlib.file_digest(stream, "sha256").hexdigest()
            except (FileNotFoundError, PermissionError):
                versions[name] = ""  # missing, or barred, as long as nobody reads it
        return versions

    def check_versions(self, versions: Mapping[str, str]) -> None:
        """Refuse what was read if a file was written again since.

        Args:
            versions: Result of ``versions`` before anything was read.

        Raises:
            CannotLook: A file was written again, or is not there any more.
        """
        now = self.versions(versions)
        changed = sorted(n for n in {*now, *versions} if now.get(n) != versions.get(n))
        if changed:
            raise self.overwritten(changed)

    def overwritten(self, changed: Sequence[str]) -> CannotLook:
        """Return the error of files that were written again while they were read."""
        return CannotLook(
            f"{format_name(self.path)}: it was overwritten while it was read, so nothing of it "
            "is kept\n"
            f"    found:       {format_names(changed, 4)}: other contents than at the start\n"
            "    likely:      a save into the same directory\n"
            "    way out:     run it again when the save has ended"
        )

    def local(self, name: str) -> Path | None:
        """Return the path of a file on this machine's disk; None for a URL."""
        return None if self._remote else Path(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def no_checkpoint(directory: Directory) -> CannotLook:
    """Return the error of a directory that holds no checkpoint."""
    names = directory.names()
    if text := only_of_ranks(directory.path, names):
        return CannotLook(text)
    marks = (".metadata", "model.safetensors.index.json", "model.safetensors")
    inside = [
        name
        for name in names
        if any(directory.size(f"{name}/{mark}") is not None for mark in marks)
    ]
    if any(name.endswith(".distcp") for name in names):
        way = "load an older checkpoint: this save was cut off before it wrote .metadata"
    elif any(name.startswith("mp_rank_") for name in names):
        way = "these are Megatron's own files: dcp-placements megatron tells which"
    elif any(name.endswith((".pt", ".pth", ".bin")) for name in names):
        way = "import and export read a file per rank: --files 'NAME_{rank}.pt' says which"
    elif inside:
        way = f"give one of the checkpoints inside: {format_names(inside)}"
    elif not names:
        way = "give another directory, this one is empty"
    else:
        way = "give a directory with .metadata, or with *.safetensors files"
    return CannotLook(
        f"{directory.path}: no checkpoint in it\n"
        f"    found:       {format_names(names, 6) or 'nothing'}\n"
        f"    way out:     {way}"
    )
