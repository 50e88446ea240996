"""One request to a remote file system: repeated where that may help; its errors name the URL.

fsspec and the libraries below it retry some of what a service answers. A connection that is reset
or times out is not among it everywhere. Only requests that can be repeated come through here: a
range of bytes, a whole object, a question about one.
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_placements.storage.file_reads import SeekableRaw

TRIES = 4
PAUSE_S = 0.1
"""Before the second try; twice as long before each further one."""

PATIENCE_S = 60.0
"""No further try begins after so long: libraries with retries of their own wait in each try."""

REQUEST_NBYTES = 64 << 20
"""The largest range of one request: it is in memory beside the tensor."""

T = TypeVar("T")

_ANSWERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
"""Errors that another try would only repeat."""


def request(url: str, call: Callable[[], T], *, tries: int = TRIES) -> T:
    """Return the result of a call that can be repeated.

    Args:
        url: What the call is about, for messages.
        call: The request.
        tries: The most calls.

    Raises:
        OSError: With the URL, whatever was raised; missing credentials, too.
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
            # Of the service's own library, which has its own retries: no credentials, no route.
            raise OSError(f"{url}: {type(error).__name__}: {_reason(error)}") from error
    raise AssertionError("unreachable")


def download(fs: Any, url: str, **span: int) -> bytes:
    """Return a file's contents, or those from ``start`` to ``end``; a caller repeats it."""
    try:
        return bytes(fs.cat_file(url, **span))
    except OSError:
        raise
    except Exception as error:
        # The service has answered before, so it is not the credentials: a checksum that differs.
        raise OSError(f"{type(error).__name__}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split()) or type(error).__name__


class RangeReader(SeekableRaw):
    """A remote file that is read by ranges, one request each.

    fsspec's own files read ahead by up to 50 MB, whatever is asked for, and give up at the first
    error that their library does not retry.

    Args:
        fs: Of fsspec.
        url: The file.
        nbytes: Its length.

    Raises:
        OSError: On a read, that the service does not return what was requested.
    """

    def __init__(self, fs: Any, url: str, nbytes: int) -> None:
        super().__init__(nbytes)
        self._fs = fs
        self._url = url

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self._position
        end = min(start + min(view.nbytes, REQUEST_NBYTES), self._nbytes)
        if end <= start:
            return 0
        data = request(self._url, lambda: self._range(start, end))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _range(self, start: int, end: int) -> bytes:
        """Return these bytes; what is longer or shorter may be of something else."""
        data = download(self._fs, self._url, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"the service returned {len(data)} bytes for the range {start}-{end}")
        return data


class Upload(io.RawIOBase):
    """A file that is being uploaded: the errors of its requests name the URL.

    Args:
        stream: Of fsspec.
        url: The file.
    """

    def __init__(self, stream: Any, url: str) -> None:
        super().__init__()
        self._stream = stream
        self._url = url

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._stream.tell())

    def write(self, data: Any) -> int:
        # Not repeated: a part of it may be in the stream already.
        return int(request(self._url, lambda: self._stream.write(data), tries=1))
