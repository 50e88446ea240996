"""A reader or writer of torch's, whose path may also be a URL: its files are a ``Store``.

Torch's own methods reach files through an attribute ``fs``, by paths. For a directory that is
torch's ``FileSystem``, for a URL ``UrlFiles``; this package's methods use the store alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from dcp_placements.errors import PlacementError
from dcp_placements.storage.remote import is_url, local_or_url
from dcp_placements.storage.store import Store, UrlStore, open_store


class UrlFiles:
    """Torch's interface of a file system, for the files of a store at a URL.

    Args:
        store: The store; paths are URLs of its files.
    """

    def __init__(self, store: UrlStore) -> None:
        self._store = store

    def _name(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path).removeprefix(self._store.path).lstrip("/")

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file. A file that is written appears when the block ends, unless it raises."""
        name, store = self._name(path), self._store
        if mode == "rb":
            with store.open(name) as stream:
                yield stream
            return
        with store.create(name, is_new=store.entry(name) is None) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the URL of a file."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return the store's URL."""
        return self._store.path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make the store's directory."""
        self._store.make()

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file or directory exists."""
        return self._store.entry(self._name(path)) is not None

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        self._store.rename(self._name(path), self._name(new_path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        self._store.remove([self._name(path)])

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the URLs of the entries of the directory."""
        return [self._store.url(name) for name in self._store.names()]


class StorePath:
    """What a reader and a writer share: a path or a URL, and its files.

    Attributes:
        store: The files of the current checkpoint.
        path: Its path, or its URL.
        restricted: Whether the checkpoint is untrusted, as in ``open_store``.
    """

    store: Store
    path: Any
    restricted = False
    _files: Any
    _storage_options: Mapping[str, Any]

    @property
    def fs(self) -> Any:
        """The files by torch's interface."""
        return self._files

    @fs.setter
    def fs(self, files: Any) -> None:
        if type(files) not in (FileSystem, UrlFiles):
            raise PlacementError(
                f"{type(self).__name__}: fs of class {type(files).__name__} would not be asked, as "
                "files are written and read otherwise here\n"
                "    way out:     register a file system with fsspec and give a URL of its "
                "protocol; or torch's FileSystemWriter and FileSystemReader, with these planners"
            )
        self._files = files

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at this path if one is given. Called on every rank."""
        if checkpoint_id:
            checkpoint_id = self._absolute(checkpoint_id)
            self._use(checkpoint_id)
        super().reset(checkpoint_id)  # type: ignore[misc]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL, or a path that torch's own class accepts."""
        checkpoint_id = local_or_url(checkpoint_id)
        if is_url(checkpoint_id):
            return True
        return bool(super().validate_checkpoint_id(checkpoint_id))  # type: ignore[misc]

    def _absolute(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return a URL unchanged, and a local path as an absolute one.

        A relative path keeps the absolute path that it had first: torch passes it again in the
        thread of an ``async_save``, while the process may have changed its working directory.
        """
        path = local_or_url(path)
        if is_url(path):
            return path
        absolute: dict[str, Path] = vars(self).setdefault("_absolute_paths", {})
        return absolute.setdefault(os.fspath(path), Path(path).absolute())

    def _use(self, path: str | os.PathLike[str]) -> None:
        self.store = open_store(path, self._storage_options, restricted=self.restricted)
        self.fs = UrlFiles(self.store) if isinstance(self.store, UrlStore) else FileSystem()
        self.path = self.fs.init_path(path)
