"""Checkpoints at URLs: torch's interface of a file system, over fsspec.

On an object store a file appears whole when its upload completes, so nothing is renamed or synced:
the file that completes a checkpoint is uploaded last, in one request.

fsspec and the libraries below it retry some requests, but not all of them retry after a connection
was reset or timed out. So this module repeats all requests that can be repeated: for a range of
bytes, a whole object, or information about an object. Other processes write to the same URLs, so
fsspec's cache of directories is not used.
"""

from __future__ import annotations

import errno
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from dcp_placements.errors import CannotLook
from dcp_placements.short_text import format_name
from dcp_placements.storage.file_reads import ByteRangeIO

OBJECT_STORES = frozenset(
    ["abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a", "tos"]
)
"""Protocols without directories, on which an upload appears whole, and replaces an older file."""

READ_AHEAD_NBYTES = 1 << 20
"""The least bytes of one request: at 20 ms a request and 100 MB/s fewer take about as long."""

REQUEST_NBYTES = 64 << 20
"""The most bytes of one request, which are in memory in addition to the tensor."""

WHOLE_NBYTES = 16 << 20
"""A file that is opened several times is downloaded as a whole up to this size."""

URL_THREADS = 8
"""The default number of threads that read from a URL."""

TRIES = 4
PAUSE_S = 0.1
"""The pause before the second try; each further pause is twice as long."""

PATIENCE_S = 60.0
"""No try begins later than this, since libraries with their own retries wait in each try."""

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_LOCAL = ("file://", "local://")

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")

_ANSWERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
"""Errors that are answers, which another try would only repeat."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL that is read through fsspec.

    >>> is_url("s3://bucket/checkpoint"), is_url("/tmp/a://b"), is_url("file:///tmp")
    (True, False, False)
    """
    text = os.fspath(path)
    return _URL.match(text) is not None and not text.startswith(_LOCAL)


def local_or_url(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path unchanged, and the local path of a ``file://`` URL.

    Raises:
        CannotLook: A relative path begins like a URL, as ``pathlib.Path`` makes it of one.
    """
    text = os.fspath(path)
    if text.startswith(_LOCAL):
        return text.partition("://")[2] or "/"
    if is_url(path) or not _ONE_SLASH.match(text):
        return path
    scheme, _, rest = text.partition(":/")
    raise CannotLook(
        f"{format_name(text)}: this is neither a URL nor an absolute path\n"
        "    likely:      pathlib.Path made it of a URL, of which it joins the slashes\n"
        f"    way out:     give the URL as a str: {format_name(f'{scheme}://{rest}')}; for a "
        "local directory an absolute path"
    )


def request(url: str, call: Callable[[], T], *, tries: int = TRIES) -> T:
    """Return the result of a call that can be repeated.

    Args:
        url: URL of the request, for messages.
        call: Makes the request.
        tries: The most calls.

    Raises:
        OSError: The request failed, for any reason, missing credentials included; the message has
            the URL.
    """
    deadline = time.monotonic() + PATIENCE_S
    for attempt in range(1, tries + 1):
        try:
            return call()
        except OSError as error:
            number = next((n for kind, n in _ANSWERS.items() if isinstance(error, kind)), None)
            if number is not None:
                raise OSError(number, _reason(error), url) from error
            if attempt == tries or time.monotonic() > deadline:
                raise OSError(f"{url}: {_reason(error)}") from error
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        except Exception as error:
            # The service's library, with its own retries, raises this: no credentials, no route.
            raise OSError(f"{url}: {type(error).__name__}: {_reason(error)}") from error
    raise AssertionError("unreachable")


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split()) or type(error).__name__


def _download(fs: Any, url: str, nbytes: int | None = None, **span: int) -> bytes:
    """Return a file's contents, or those from ``start`` to ``end``, by a single try."""
    try:
        data = bytes(fs.cat_file(url, **span))
    except OSError:
        raise
    except Exception as error:
        # The service has answered before, so it is not the credentials: a checksum that differs.
        raise OSError(f"{type(error).__name__}: {_reason(error)}") from error
    if nbytes not in (None, len(data)):
        # Data of another length may be those of another version of the file.
        expected = " for the range {start}-{end}".format(**span) if span else f" of {nbytes}"
        raise OSError(f"the service returned {len(data)} bytes{expected}")
    return data


class _Upload(io.RawIOBase):
    """A stream of a file that is being uploaded; errors of its requests name the URL."""

    def __init__(self, stream: Any, url: str) -> None:
        super().__init__()
        self._stream = stream
        self._url = url

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._stream.tell())

    def write(self, data: Any) -> int:
        # This is not repeated, since some of the data may be in the stream already.
        return int(request(self._url, lambda: self._stream.write(data), tries=1))


class Entry(NamedTuple):
    """What a service reports of a file or directory.

    Attributes:
        nbytes: Size of a file; None for a directory.
        written: Time of the last write, in seconds since 1970; 0 if the service does not report it.
    """

    nbytes: int | None
    written: float


class RemoteFileSystem:
    """The file system of a URL, as torch's writers and readers use it.

    Args:
        options: Options that fsspec passes to the file system, such as ``endpoint_url``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.is_object_store = False
        self._options = dict(options or {})
        self._url = ""
        self._connected: tuple[int, Any] = (0, None)

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens its own connection.
        return {**vars(self), "_connected": (0, None)}

    @property
    def fs(self) -> Any:
        """The file system of fsspec, connected in this process: no connection survives a fork."""
        if self._connected[0] != os.getpid():
            try:
                from fsspec.core import url_to_fs

                self._connected = os.getpid(), url_to_fs(self._url, **self._options)[0]
            except Exception as error:
                # The protocol's library raises other errors, depending on its options.
                reason = str(error)
                if isinstance(error, ModuleNotFoundError) and error.name == "fsspec":
                    reason = "a URL needs fsspec\n    way out:     pip install fsspec"
                elif not isinstance(error, ImportError | ValueError):
                    reason = f"{type(error).__name__}: {error}"
                raise CannotLook(f"{format_name(self._url)}: {reason}") from error
        return self._connected[1]

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Connect to the file system of a URL; return the URL without a slash at its end.

        Raises:
            CannotLook: fsspec, or its library for this protocol, is not installed; or fsspec does
                not support the protocol.
        """
        head, scheme, rest = os.fspath(path).partition("://")
        self._url = f"{head}{scheme}{rest.rstrip('/') or '/'}"
        self._connected = 0, None
        _ = self.fs  # which refuses a URL now
        self.is_object_store = head in OBJECT_STORES
        return self._url

    def _ask(self, method: str, path: str | os.PathLike[str], **options: Any) -> Any:
        """Call a method of fsspec's file system, without its cache of directories."""
        url = os.fspath(path)

        def ask() -> Any:
            self.fs.invalidate_cache()
            return getattr(self.fs, method)(url, **options)

        return request(url, ask)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file. A file that is written appears when the block ends, unless it raises."""
        url = os.fspath(path)
        if mode == "rb":
            with self.open(url) as stream:
                yield stream
            return
        from fsspec.spec import AbstractBufferedFile

        stream = request(url, lambda: self.fs.open(url, mode))
        try:
            yield _Upload(stream, url)
            # This is not repeated: a second close would do nothing, and the file would be missing.
            request(url, stream.close, tries=1)
        except BaseException:
            with suppress(Exception):
                if isinstance(stream, AbstractBufferedFile):
                    # close() would complete the upload of an incomplete file.
                    stream.closed = True
                    stream.discard()
                else:
                    stream.close()
                    self.fs.rm_file(url)
            raise

    def open(self, url: str) -> io.BufferedReader:
        """Return a file, open for reading by ranges, one request each.

        fsspec's own files read ahead by up to 50 MB, whatever is requested, and give up at the
        first error that their library does not retry.

        Raises:
            OSError: The file does not exist, or cannot be reached.
        """
        nbytes = _entry(self._ask("info", url)).nbytes
        if nbytes is None:
            raise IsADirectoryError(errno.EISDIR, "this is a directory", url)
        fs = self.fs

        def read_into(view: memoryview, start: int) -> None:
            end = start + view.nbytes
            view[:] = request(url, lambda: _download(fs, url, end - start, start=start, end=end))

        return io.BufferedReader(ByteRangeIO(nbytes, read_into, REQUEST_NBYTES), READ_AHEAD_NBYTES)

    def opener(self, url: str) -> Callable[[], IO[bytes]]:
        """Return a function that opens a file, any number of times.

        A file of up to 16 MiB is downloaded now, in one request: all reads are then of the same
        version, even if another process replaces the file.
        """

        def whole() -> bytes | None:
            self.fs.invalidate_cache()
            nbytes = int(self.fs.info(url)["size"])
            return None if nbytes > WHOLE_NBYTES else _download(self.fs, url, nbytes)

        data = request(url, whole)
        return partial(self.open, url) if data is None else partial(io.BytesIO, data)

    def read(self, url: str) -> bytes:
        """Return a file, read in one request."""
        return request(url, lambda: _download(self.fs, url))

    def put(self, url: str, data: bytes) -> None:
        """Write a file in one request, or replace it."""
        request(url, lambda: self.fs.pipe_file(url, data))

    def create(self, url: str, data: bytes) -> bool:
        """Write a file in one request unless it exists; return whether it was written.

        S3, GCS and Azure let only one of several processes succeed; other services may not.
        """
        if self.exists(url):
            return False
        try:
            request(url, lambda: self.fs.pipe_file(url, data, mode="create"))
        except FileExistsError:
            # Another process created it, or a request of this one whose answer was lost.
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
        # This is not repeated: the file may have moved although the answer was lost.
        request(source, lambda: self.fs.mv(source, target), tries=1)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a directory; do nothing on an object store, where s3fs would create a bucket."""
        if not self.is_object_store:
            request(os.fspath(path), lambda: self.fs.makedirs(os.fspath(path), exist_ok=True))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        request(os.fspath(path), lambda: self.fs.rm_file(os.fspath(path)))

    def rm_files(self, path: str | os.PathLike[str], names: Iterable[str]) -> None:
        """Remove files of a directory, if they exist, in as few requests as possible."""
        if wanted := set(names):
            held = wanted.intersection(self.entries(path))
            urls = [self.concat_path(path, name) for name in sorted(held)]
            request(os.fspath(path), lambda: self.fs.rm(urls) if urls else None)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file or directory exists."""
        return self.entry(path) is not None

    def entry(self, path: str | os.PathLike[str]) -> Entry | None:
        """Return the entry of a file or directory; None if it does not exist.

        On an object store a directory exists if files below it do.
        """
        # fsspec's own exists() returns False for any error.
        with suppress(FileNotFoundError):
            return _entry(self._ask("info", path))
        return None

    def entries(self, path: str | os.PathLike[str], *, below: bool = False) -> dict[str, Entry]:
        """Return the entries of a directory by name.

        Args:
            path: The directory.
            below: Whether to return all files below the directory instead.
        """
        root = str(self.fs._strip_protocol(os.fspath(path))).rstrip("/")
        try:
            listing = self._ask("find" if below else "ls", path, detail=True)
        except FileNotFoundError:
            return {}
        infos = listing.values() if below else listing
        entries = {str(info["name"]).rstrip("/"): _entry(info) for info in infos}
        entries.pop(root, None)  # consoles create such an object for a folder
        return {name.removeprefix(f"{root}/"): entry for name, entry in entries.items()}

    def version(self, url: str) -> str:
        """Return fsspec's key of a file's contents, which most services change with them."""
        return str(self._ask("ukey", url))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the URLs of the entries of a directory."""
        return [self.concat_path(path, name) for name in self.entries(path)]


def _entry(info: Mapping[str, Any]) -> Entry:
    # Each library has its own name and form of the time.
    written = next((info[key] for key in _TIMES if info.get(key) is not None), 0.0)
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    nbytes = int(info["size"]) if info["type"] == "file" else None
    return Entry(nbytes, written.timestamp() if isinstance(written, datetime) else written)


class UrlPath:
    """A torch reader or writer of files, whose path may also be a URL."""

    fs: Any
    path: Any
    _storage_options: Mapping[str, Any]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at this path if one is given. Called on every rank."""
        if checkpoint_id:
            checkpoint_id = self._absolute(checkpoint_id)
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
        from torch.distributed.checkpoint.filesystem import FileSystem

        self.fs = RemoteFileSystem(self._storage_options) if is_url(path) else FileSystem()
        self.path = self.fs.init_path(path)
