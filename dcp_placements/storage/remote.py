"""Requests to the service of a URL, through fsspec: connected, repeated, their errors explained.

``store.UrlStore`` makes them. Which paths are URLs is decided here, too.
"""

from __future__ import annotations

import errno
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from dcp_placements.errors import CannotLook
from dcp_placements.short_text import format_name

OBJECT_STORES = frozenset(
    ["abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a", "tos"]
)
"""Protocols without directories, on which an upload appears whole, and replaces an older file."""

ONE_AT_A_TIME = frozenset(["ftp", "sftp", "ssh"])
"""Protocols whose libraries mix up the answers of two threads, which then wait forever."""

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


def download(fs: Any, url: str, nbytes: int | None = None, **span: int) -> bytes:
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


class UploadStream(io.RawIOBase):
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
        count = request(self._url, lambda: self._stream.write(data), tries=1)
        nbytes = memoryview(data).nbytes
        if count not in (None, nbytes):  # paramiko's returns None
            raise OSError(f"{self._url}: the service took {count} of {nbytes} bytes")
        return nbytes


def connect(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the URL's path in it.

    Raises:
        CannotLook: fsspec, or its library for this protocol, is not installed; or fsspec does not
            support the protocol, or the library refuses the options.
    """
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url, **storage_options)
        return fs, str(path)
    except Exception as error:
        # The protocol's library raises other errors, depending on its options.
        reason = str(error)
        if isinstance(error, ModuleNotFoundError) and error.name == "fsspec":
            reason = "a URL needs fsspec\n    way out:     pip install fsspec"
        elif not isinstance(error, ImportError | ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise CannotLook(f"{format_name(url)}: {reason}") from error


def facts_of(info: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Return the bytes of a file and when it was written, as a service reports it.

    Args:
        info: What fsspec returns of a file or directory.

    Returns:
        The bytes, None for a directory; and the time of the last write in seconds since 1970, None
        if the service does not tell it.
    """
    # Each library has its own name and form of the time.
    written = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    nbytes = int(info["size"]) if info["type"] == "file" else None
    if isinstance(written, datetime):
        written = written.timestamp()
    return nbytes, None if written is None else float(written)
