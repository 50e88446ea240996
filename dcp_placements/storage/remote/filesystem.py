"""Torch's interface of a file system over fsspec, for checkpoints at a URL.

On an object store a file appears whole when its upload completes, so nothing is renamed and
nothing is synced: what completes a checkpoint is put last, in one request.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from dcp_placements.errors import CannotLook, format_name
from dcp_placements.storage.remote.requests import RangeReader, Upload, download, request
from dcp_placements.storage.remote.urls import is_url, local_or_url

OBJECT_STORES = frozenset(
    ["abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a", "tos"]
)
"""Protocols without directories, on which an upload appears whole, and replaces what was there."""

BUFFER_NBYTES = 1 << 20
"""Read in one request where less is wanted: at 20 ms a request and 100 MB/s it costs as much."""

WHOLE_NBYTES = 16 << 20
"""A file that is opened again and again is downloaded as a whole up to this size."""

URL_THREADS = 8
"""Files that are read at once from a URL, where nobody says otherwise."""


class RemoteFileSystem(FileSystemBase):
    """The file system of a URL, as torch's writers and readers use it.

    Args:
        options: What fsspec passes to the file system: ``key``, ``endpoint_url`` and such.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.is_object_store = False
        self._options = dict(options or {})
        self._url = ""
        self._fs: Any = None
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        # Another process connects by itself.
        return {**vars(self), "_fs": None, "_process": 0}

    @property
    def fs(self) -> Any:
        """The file system of fsspec, connected in this process: none survives a fork."""
        if self._process != os.getpid():
            self._fs = self._connected()
            self._process = os.getpid()
        return self._fs

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Connect to the file system of a URL; return the URL without a slash at its end.

        Raises:
            CannotLook: fsspec, or its library for this protocol, is not installed; or it knows no
                such protocol.
        """
        head, scheme, rest = os.fspath(path).partition("://")
        self._url = f"{head}{scheme}{rest.rstrip('/') or '/'}"
        self._fs = self._connected()
        self._process = os.getpid()
        self.is_object_store = head in OBJECT_STORES
        return self._url

    def _connected(self) -> Any:
        url = self._url
        try:
            from fsspec.core import url_to_fs

            return url_to_fs(url, **self._options)[0]
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

    def _ask(self, method: str, path: str | os.PathLike[str], **options: Any) -> Any:
        """Ask the service, not fsspec's memory of it: other processes write there too."""
        url = os.fspath(path)

        def ask() -> Any:
            self.fs.invalidate_cache()
            return getattr(self.fs, method)(url, **options)

        return request(url, ask)

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
            yield Upload(stream, url)
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
        info = self._ask("info", url)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "this is a directory", url)
        return io.BufferedReader(RangeReader(self.fs, url, int(info["size"])), BUFFER_NBYTES)

    def opener(self, url: str) -> Callable[[], IO[bytes]]:
        """Return a function that opens a file, any number of times.

        Up to 16 MiB the file is downloaded now, in one request: all that is read of it is of one
        save, even if another process replaces it.
        """

        def whole() -> bytes | None:
            self.fs.invalidate_cache()
            nbytes = int(self.fs.info(url)["size"])
            if nbytes > WHOLE_NBYTES:
                return None
            data = download(self.fs, url)
            if len(data) != nbytes:
                raise OSError(f"the service returned {len(data)} bytes of {nbytes}")
            return data

        data = request(url, whole)
        return partial(self.open, url) if data is None else partial(io.BytesIO, data)

    def read(self, url: str) -> bytes:
        """Return a file, read in one request."""
        return request(url, lambda: download(self.fs, url))

    def put(self, url: str, data: bytes) -> None:
        """Write a file in one request, or replace it."""
        request(url, lambda: self.fs.pipe_file(url, data))

    def create(self, url: str, data: bytes) -> bool:
        """Write a file in one request, unless there is one; return whether it was written.

        S3, GCS and Azure decide it. Where a service cannot, two processes may both succeed.
        """
        if self.exists(url):
            return False
        try:
            request(url, lambda: self.fs.pipe_file(url, data, mode="create"))
        except FileExistsError:
            # By another process; or by a request of this one whose answer was lost.
            try:
                return self.read(url) == data
            except FileNotFoundError:
                return False  # removed meanwhile
        return True

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
        return self.kind(path) is not None

    def kind(self, path: str | os.PathLike[str]) -> str | None:
        """Return ``"file"`` or ``"directory"`` (on an object store: files below); None for none."""
        try:
            # fsspec's own exists() takes any error for the answer no.
            return str(self._ask("info", path)["type"])
        except FileNotFoundError:
            return None

    def size(self, url: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        try:
            info = self._ask("info", url)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def version(self, url: str) -> str:
        """Return fsspec's key of a file's contents, which most services change with them."""
        return str(self._ask("ukey", url))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        request(os.fspath(path), lambda: self.fs.rm_file(os.fspath(path)))

    def sizes(self, path: str | os.PathLike[str]) -> dict[str, int | None]:
        """Return the names in a directory, with the bytes of each file; None for what is none."""
        root = str(self.fs._strip_protocol(os.fspath(path))).rstrip("/")
        try:
            entries = self._ask("ls", path, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/")
            if name != root:  # the object that a console creates for a folder
                size = int(entry["size"]) if entry["type"] == "file" else None
                sizes[name.rpartition("/")[2]] = size
        return sizes

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the URLs of what is in a directory."""
        return [self.concat_path(path, name) for name in self.sizes(path)]

    def find(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the URLs of all files below a directory."""
        root = str(self.fs._strip_protocol(os.fspath(path))).rstrip("/")
        paths = [str(name) for name in self._ask("find", path)]
        return [
            self.concat_path(path, name.removeprefix(f"{root}/"))
            for name in paths
            if name.rstrip("/") != root  # the object that a console creates for a folder
        ]

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


class UrlPath:
    """A torch reader or writer of files, whose path may also be a URL."""

    fs: Any
    path: Any
    _storage_options: Mapping[str, Any]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at this path if one is given. Called on every rank."""
        if checkpoint_id:
            checkpoint_id = local_or_url(checkpoint_id)
            if is_url(checkpoint_id) != isinstance(self.fs, RemoteFileSystem):
                self._use(checkpoint_id)
        super().reset(checkpoint_id)  # type: ignore[misc]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL, or a path that torch's own class accepts."""
        checkpoint_id = local_or_url(checkpoint_id)
        if is_url(checkpoint_id):
            return True
        return bool(super().validate_checkpoint_id(checkpoint_id))  # type: ignore[misc]

    def _use(self, path: str | os.PathLike[str]) -> None:
        self.fs = file_system(path, self._storage_options)
        self.path = self.fs.init_path(path)
