"""Torch's interface of a file system over fsspec, for checkpoints at a URL.

On an object store a file appears whole when its upload completes, so nothing is renamed and
nothing is synced: what completes a checkpoint is put last, in one request.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from dcp_placements._torch import FileSystem, FileSystemBase
from dcp_placements.errors import CannotLook, format_name
from dcp_placements.storage.remote.requests import RangeReader, request

OBJECT_STORES = frozenset(
    ["abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a", "tos"]
)
"""Protocols without directories, on which an upload appears whole, and replaces what was there."""

BUFFER_NBYTES = 1 << 20
"""Read in one request where less is wanted: at 20 ms a request and 100 MB/s it costs as much."""

URL_THREADS = 8
"""Files that are read at once from a URL, where nobody says otherwise."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, such as ``s3://bucket/checkpoint``."""
    return "://" in os.fspath(path)


class RemoteFileSystem(FileSystemBase):
    """The file system of a URL, as torch's writers and readers use it.

    Args:
        options: What fsspec passes to the file system: ``key``, ``endpoint_url`` and such.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.fs: Any = None
        self.is_object_store = False
        self._options = dict(options or {})

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Connect to the file system of a URL; return the URL without a slash at its end.

        Raises:
            CannotLook: fsspec, or its library for this protocol, is not installed; or it knows no
                such protocol.
        """
        url = os.fspath(path)
        try:
            from fsspec.core import url_to_fs

            self.fs, _ = url_to_fs(url, **self._options)
        except ModuleNotFoundError as error:
            if error.name != "fsspec":
                raise CannotLook(f"{format_name(url)}: {error}") from error
            raise CannotLook(
                f"{format_name(url)}: a URL needs fsspec\n    way out:     pip install fsspec"
            ) from error
        except (ImportError, ValueError) as error:
            raise CannotLook(f"{format_name(url)}: {error}") from error
        except Exception as error:
            # Of the protocol's library, by its options.
            raise CannotLook(f"{format_name(url)}: {type(error).__name__}: {error}") from error
        self.is_object_store = url.partition("://")[0] in OBJECT_STORES
        # Other processes may have written since this one listed it.
        self.fs.invalidate_cache()
        head, scheme, rest = url.partition("://")
        return f"{head}{scheme}{rest.rstrip('/') or '/'}"

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file. What is written appears when the block ends, and not if it raises."""
        url = os.fspath(path)
        if mode == "rb":
            with self.open(url) as stream:
                yield stream
            return
        stream = request(url, lambda: self.fs.open(url, mode))
        try:
            yield stream
            # Not repeated: a second close does nothing, and the file would be missing.
            request(url, stream.close, tries=1)
        except BaseException:
            self._abandon(stream, url)
            raise

    def open(self, url: str) -> io.BufferedReader:
        """Return a file, open for reading by position.

        Raises:
            OSError: There is none, or it cannot be reached.
        """
        return io.BufferedReader(RangeReader(self.fs, url), BUFFER_NBYTES)

    def put(self, url: str, data: bytes) -> None:
        """Write a file in one request, or replace it."""
        request(url, lambda: self.fs.pipe_file(url, data))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the URL of a file."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Move a file."""
        source, target = os.fspath(path), os.fspath(new_path)
        # Not repeated: it may have moved, though the answer was lost.
        request(source, lambda: self.fs.mv(source, target), tries=1)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a directory; on an object store nothing: s3fs would create a missing bucket."""
        if not self.is_object_store:
            request(os.fspath(path), lambda: self.fs.makedirs(os.fspath(path), exist_ok=True))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL."""
        return is_url(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is such a file or directory."""
        url = os.fspath(path)
        try:
            # fsspec's own exists() takes any error for the answer no.
            request(url, lambda: self.fs.info(url))
        except FileNotFoundError:
            return False
        return True

    def isdir(self, url: str) -> bool:
        """Whether this is a directory: on an object store, whether anything is below it."""
        return bool(request(url, lambda: self.fs.isdir(url)))

    def size(self, url: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        try:
            info = request(url, lambda: self.fs.info(url))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info.get("type") == "file" else None

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        request(os.fspath(path), lambda: self.fs.rm_file(os.fspath(path)))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the paths of what is in a directory."""
        listed = request(os.fspath(path), lambda: self.fs.ls(os.fspath(path), detail=False))
        return [str(entry).rstrip("/") for entry in listed]

    def _abandon(self, stream: Any, url: str) -> None:
        """Give up a file that is being written."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):
            if isinstance(stream, AbstractBufferedFile):
                # close() would complete the upload of a part of the file.
                stream.closed = True
                stream.discard()
            else:
                stream.close()
                self.fs.rm_file(url)


def file_system(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """Return the file system of a path: torch's own for local ones, fsspec's for URLs."""
    return RemoteFileSystem(options) if is_url(path) else FileSystem()


@contextmanager
def default_options(urls: list[str], options: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, pass options to the file systems of these URLs.

    Raises:
        CannotLook: fsspec is not installed.
    """
    if not options:
        yield
        return
    try:
        from fsspec.config import conf
    except ModuleNotFoundError as error:
        raise CannotLook("--storage-option needs fsspec: pip install fsspec") from error
    before = {protocol: conf.get(protocol) for protocol in {u.partition("://")[0] for u in urls}}
    conf.update({protocol: {**(held or {}), **options} for protocol, held in before.items()})
    try:
        yield
    finally:
        for protocol, held in before.items():
            del conf[protocol]
            if held is not None:
                conf[protocol] = held


class UrlPath:
    """A torch reader or writer of files, whose path may also be a URL."""

    fs: Any
    path: Any
    _storage_options: Mapping[str, Any]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at this path if one is given. Called on every rank."""
        if checkpoint_id and is_url(checkpoint_id) != isinstance(self.fs, RemoteFileSystem):
            self._use(checkpoint_id)
        super().reset(checkpoint_id)  # type: ignore[misc]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL, or a path that torch's own class accepts."""
        if is_url(checkpoint_id):
            return True
        return bool(super().validate_checkpoint_id(checkpoint_id))  # type: ignore[misc]

    def _use(self, path: str | os.PathLike[str]) -> None:
        self.fs = file_system(path, self._storage_options)
        self.path = self.fs.init_path(path)
