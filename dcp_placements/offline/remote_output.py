"""Outputs at a URL. An object store renames nothing, so files are put where they stay.

What completes an output is written last: ``.metadata``, or the index of safetensors files. Until
then a marker among the files says that the output is unfinished, and which process is writing it:
no reader takes the files for a checkpoint, and no other process writes there. A process that was
killed leaves its marker. The next attempt numbers its own marker higher; the service creates each
name once, so that of several attempts one proceeds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from dcp_placements.offline.atomic_output import Folder, Output, is_there
from dcp_placements.offline.directory import MARKER
from dcp_placements.offline.holder import Holder, busy
from dcp_placements.storage.remote.filesystem import RemoteFileSystem
from dcp_placements.storage.remote.urls import is_url, local_or_url

logger = logging.getLogger(__name__)

_COMPLETING = (".metadata", "model.safetensors.index.json")


class RemoteFolder:
    """A directory at a URL, which is completed by the last file.

    Args:
        fs: Its file system.
        path: Its URL.
        held: The names of files that an earlier attempt at the same output has finished.
    """

    def __init__(self, fs: RemoteFileSystem, path: str, held: frozenset[str]) -> None:
        self.path = path
        self._fs = fs
        self._held = held

    @contextmanager
    def file(self, name: str, *, buffering: int = -1) -> Iterator[IO[bytes]]:
        """Yield a new file; it appears when the block ends."""
        with self._fs.create_stream(self._fs.concat_path(self.path, name), "wb") as stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        """Write a file in one request."""
        self._fs.put(self._fs.concat_path(self.path, name), data)

    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file."""
        return name in self._held


class RemoteOutput:
    """One file or directory to be created at a URL, in the manner of ``Output``.

    Args:
        path: The URL.
        replace: Whether to replace an existing file. Otherwise nothing may be there, except what
            an earlier attempt left unfinished.

    Attributes:
        path: The URL.

    Raises:
        CannotLook: Something is there, another process is writing it, or fsspec does not know the
            protocol.
        OSError: The service cannot be reached or refuses.
    """

    def __init__(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        self._fs = RemoteFileSystem()
        self.path = self._fs.init_path(path)
        self._replace = replace
        kind = None if replace else self._fs.kind(self.path)
        if kind == "file":
            raise is_there(self.path)
        if kind is not None:
            self._last_attempt()

    def __enter__(self) -> RemoteOutput:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def room_nbytes(self, identity: str | None) -> int | None:
        """Return how many bytes the output may have; None where that is not known."""
        return None

    @contextmanager
    def directory(self, identity: str | None = None) -> Iterator[RemoteFolder]:
        """Yield a directory to write into; the file that is written last completes it.

        Args:
            identity: As in ``Output.directory``, on an object store. Elsewhere a file may be there
                in part, so that nothing is left of a block that raises.
        """
        if not self._fs.is_object_store:
            identity = None
            self._fs.mkdir(self.path)
        marker, held = self._begin(identity)
        try:
            yield RemoteFolder(self._fs, self.path, held)
        except BaseException:
            if identity is None:
                self._remove([*self._files(), *self._markers()])
            else:
                with _left_over(marker):
                    self._fs.put(marker, _note(None, identity))
            raise
        self._remove(self._markers())

    @contextmanager
    def file(self) -> Iterator[IO[bytes]]:
        """Yield a file to write into; it becomes the output when the block ends."""
        if not self._replace and self._fs.exists(self.path):
            raise is_there(self.path)
        try:
            with self._fs.create_stream(self.path, "wb" if self._replace else "xb") as stream:
                yield stream
        except FileExistsError:
            raise is_there(self.path) from None

    def _begin(self, identity: str | None) -> tuple[str, frozenset[str]]:
        """Create this attempt's marker; return its URL and the names of files to keep.

        Raises:
            CannotLook: An output is there, or another process is writing it.
        """
        while True:
            last, earlier = self._last_attempt()
            marker = self._url(f"{MARKER}{last + 1}")
            # The first marker names no process, and stays when somebody removes that of a process.
            holder = Holder.of_this_process() if last else None
            if not self._fs.create(marker, _note(holder, identity)):
                continue  # another process began at the same time
            names = frozenset(self._fs.sizes(self.path)) - {f"{MARKER}{last + 1}"}
            if last and f"{MARKER}{last}" in names:
                break
            if names:
                # Another process has begun and finished since the last attempt was read.
                self._remove([marker])
        if identity is not None and earlier == identity:
            return marker, names
        if names.intersection(_COMPLETING):
            # It was stopped while it removed its markers.
            self._remove(self._markers())
            raise is_there(self.path)
        self._remove(self._files())
        return marker, frozenset()

    def _last_attempt(self) -> tuple[int, str | None]:
        """Return the number and the identity of the last attempt; (0, None) if there is none.

        Raises:
            CannotLook: An output is there, or another process is writing it.
        """
        while True:
            markers = self._markers()
            if not markers:
                if self._fs.sizes(self.path):
                    raise is_there(self.path)
                return 0, None
            try:
                note = self._fs.read(markers[-1])
            except FileNotFoundError:
                continue  # its process has finished meanwhile
            holder = Holder.parse(note)
            if holder is not None and not holder.has_ended:
                raise busy(self.path, markers[-1], holder)
            return _number(markers[-1]), _identity(note)

    def _url(self, name: str) -> str:
        return self._fs.concat_path(self.path, name)

    def _markers(self) -> list[str]:
        """Return the URLs of the markers, that of the last attempt at the end."""
        return sorted((url for url in self._fs.ls(self.path) if _number(url)), key=_number)

    def _files(self) -> list[str]:
        """Return the URLs of all files but the markers."""
        return [url for url in self._fs.find(self.path) if not _number(url)]

    def _remove(self, urls: list[str]) -> None:
        """Remove files, in this order, as far as possible."""
        for url in urls:
            with _left_over(url):
                self._fs.rm_file(url)


@contextmanager
def _left_over(url: str) -> Iterator[None]:
    """Log an error about a file that stays."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s is left over from an output that failed: %s", url, error)


def _note(holder: Holder | None, identity: str | None) -> bytes:
    """Return the contents of a marker; without a holder nobody is writing."""
    held = {} if holder is None else json.loads(holder.format())
    return json.dumps({**held, "identity": identity}).encode()


def _identity(note: bytes) -> str | None:
    try:
        return str(json.loads(note)["identity"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _number(url: str) -> int:
    """Return the number of the attempt that a marker is of; 0 for another file."""
    name = url.rpartition("/")[2]
    number = name.removeprefix(MARKER)
    return int(number) if name != number and number.isdecimal() else 0


AnyOutput = Output | RemoteOutput
AnyFolder = Folder | RemoteFolder


def output_at(path: str | os.PathLike[str], *, replace: bool = False) -> AnyOutput:
    """Return the output at a path of this machine, or at a URL."""
    path = local_or_url(path)
    kind = RemoteOutput if is_url(path) else Output
    return kind(path, replace=replace)
