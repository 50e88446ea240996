"""The files of a checkpoint: a local directory, or whatever fsspec opens (``s3://...``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from dcp_placements.errors import CannotLook, format_names
from dcp_placements.storage.file_reads import open_inside, why_barred


class Directory:
    """Names, sizes and contents of the files of a checkpoint.

    Args:
        path: A directory, or a URL that fsspec knows.

    Raises:
        CannotLook: There is no such directory, or fsspec is needed and not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fs: Any = None
        root = self.path
        if "://" in self.path:
            try:
                from fsspec.core import url_to_fs
            except ModuleNotFoundError as error:
                raise CannotLook(
                    f"{self.path}: a URL needs fsspec\n    way out:     pip install fsspec"
                ) from error
            self._fs, root = url_to_fs(self.path)
        self._root = root.rstrip("/") or "/"
        self._sizes: dict[str, int | None] = {}
        exists = self._fs.exists(root) if self._fs else os.path.exists(root)
        if not exists:
            raise CannotLook(f"{self.path}: there is no such path")
        if not (self._fs.isdir(root) if self._fs else os.path.isdir(root)):
            raise CannotLook(
                f"{self.path}: this is a file\n    way out:     give the checkpoint's directory"
            )

    def names(self) -> list[str]:
        """Return the names of what is in the directory itself, sorted."""
        if self._fs is None:
            return sorted(os.listdir(self._root))
        return sorted(os.path.basename(str(p).rstrip("/")) for p in self._fs.ls(self._root, False))

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None where no file of that name may be opened."""
        if name not in self._sizes:
            path = self._path(name)
            if self._fs is None:
                plain = os.path.isfile(path) and self.why_barred(name) is None
                self._sizes[name] = os.path.getsize(path) if plain else None
            else:
                is_file = self._fs.isfile(path)
                self._sizes[name] = int(self._fs.size(path)) if is_file else None
        return self._sizes[name]

    def why_barred(self, name: str) -> str | None:
        """Return why a file is not opened: a link that leads elsewhere, or no plain file."""
        return None if self._fs is not None else why_barred(self._root, name)

    def modified(self, name: str) -> float | None:
        """Return when a file was last written, in seconds since 1970; None for a URL."""
        return os.path.getmtime(self._path(name)) if self._fs is None else None

    def open(self, name: str) -> IO[bytes]:
        """Return a file, open for reading by position.

        Raises:
            OSError: It cannot be opened.
        """
        path = self._path(name)
        return open_inside(self._root, name) if self._fs is None else self._fs.open(path, "rb")

    def local(self, name: str) -> Path | None:
        """Return where a file is on this machine's disk; None where it is elsewhere."""
        return Path(self._path(name)) if self._fs is None else None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def no_checkpoint(directory: Directory) -> CannotLook:
    """Return the error of a directory that holds no checkpoint."""
    names = directory.names()
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
