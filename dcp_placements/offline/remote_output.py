"""Outputs at a URL. An object store renames nothing, so files are put where they stay.

What completes an output is written last: ``.metadata``, or the index of safetensors files. Until
then no reader takes the files for a checkpoint. There is no lock: of two processes that write to
one URL the second is refused only if it begins when the first has written a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from dcp_placements.offline.atomic_output import Folder, Output, is_there
from dcp_placements.storage.remote.filesystem import RemoteFileSystem, is_url

logger = logging.getLogger(__name__)


class RemoteFolder:
    """A directory at a URL, which is completed by the last file.

    Args:
        fs: Its file system.
        path: Its URL.
    """

    def __init__(self, fs: RemoteFileSystem, path: str) -> None:
        self.path = path
        self._fs = fs
        self._written: list[str] = []

    @contextmanager
    def file(self, name: str, *, buffering: int = -1) -> Iterator[IO[bytes]]:
        """Yield a new file; it appears when the block ends."""
        self._written.append(name)
        with self._fs.create_stream(self._fs.concat_path(self.path, name), "wb") as stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        """Write a file in one request."""
        self._written.append(name)
        self._fs.put(self._fs.concat_path(self.path, name), data)

    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file: its files are never taken over."""
        return False

    def wrote(self, names: Iterable[str]) -> None:
        """Take note of files that were not written by ``file``."""
        self._written += names

    def discard(self) -> None:
        """Remove what was written, as far as possible."""
        for name in reversed(self._written):
            url = self._fs.concat_path(self.path, name)
            try:
                self._fs.rm_file(url)
            except FileNotFoundError:
                pass  # its upload was not completed
            except OSError as error:
                logger.warning("%s is left over from an output that failed: %s", url, error)


class RemoteOutput:
    """One file or directory to be created at a URL, in the manner of ``Output``.

    Args:
        path: The URL.
        replace: Whether to replace an existing file. Otherwise nothing may be there.

    Attributes:
        path: The URL.

    Raises:
        CannotLook: Something is there, or fsspec does not know the protocol.
        OSError: The service cannot be reached or refuses.
    """

    def __init__(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        self._fs = RemoteFileSystem()
        self.path = self._fs.init_path(path)
        self._replace = replace
        if not replace and self._fs.exists(self.path):
            raise is_there(self.path)

    def __enter__(self) -> RemoteOutput:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    @contextmanager
    def directory(self, identity: str | None = None) -> Iterator[RemoteFolder]:
        """Yield a directory to write into; if the block raises, its files are removed again.

        Args:
            identity: Not used: no attempt goes on with the files of another.
        """
        self._fs.mkdir(self.path)
        folder = RemoteFolder(self._fs, self.path)
        try:
            yield folder
        except BaseException:
            folder.discard()
            raise

    @contextmanager
    def file(self) -> Iterator[IO[bytes]]:
        """Yield a file to write into; it becomes the output when the block ends."""
        with self._fs.create_stream(self.path, "wb") as stream:
            yield stream


AnyOutput = Output | RemoteOutput
AnyFolder = Folder | RemoteFolder


def output_at(path: str | os.PathLike[str], *, replace: bool = False) -> AnyOutput:
    """Return the output at a path of this machine, or at a URL."""
    kind = RemoteOutput if is_url(path) else Output
    return kind(path, replace=replace)
