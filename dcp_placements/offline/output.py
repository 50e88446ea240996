"""Outputs appear whole or not at all, and an interrupted one is continued.

On a disk a directory is written under a temporary name beside its own, and renamed when all of it
is on the disk; meanwhile a lock beside it, which the system drops with its process, keeps other
processes out. Nothing that appeared meanwhile is replaced, and links are not followed.

An object store renames nothing, so files are put where they stay, and the one that completes them
(``.metadata``, or the index of safetensors files) is put last. Until then a marker among them has
the identity of the output, and a number of the attempt that began it. Only attempts of the same
identity go on there, and whatever several of them write is the same, byte for byte::

    s3://bucket/out/.unfinished                        5f0c... 81d2...
    s3://bucket/out/model-00001-of-00002.safetensors   whole
    s3://bucket/out/model-00002-of-00002.safetensors   being uploaded, so not there
    s3://bucket/out/model.safetensors.index.json       last; the marker goes then
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from dcp_placements.errors import CannotLook
from dcp_placements.offline.directory import MARKER
from dcp_placements.short_text import format_name, format_names, format_nbytes
from dcp_placements.storage.remote import is_url, local_or_url
from dcp_placements.storage.store import (
    LocalStore,
    Locked,
    StorageOptions,
    Store,
    UrlStore,
    hidden_name,
)

logger = logging.getLogger(__name__)

IDENTITY = "identity"
"""The file in an unfinished directory that identifies the output."""


def output_at(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str],
    storage_options: StorageOptions = None,
) -> Output:
    """Return the directory that is to be created at a path of this machine, or at a URL.

    Args:
        path: A path without anything, an empty directory, or an unfinished output.
        source: The path or URL that the output is written from.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: Something is there, or the path is no name; or the source is the output's own
            unfinished directory.
    """
    path, source = local_or_url(path), local_or_url(source)
    if is_url(path):
        return UrlOutput(os.fspath(path), storage_options)
    output = LocalOutput(path)
    if not is_url(source) and Path(source).resolve().is_relative_to(output.partial.resolve()):
        raise CannotLook(
            f"{format_name(source)}: this is what an interrupted attempt at "
            f"{format_name(output.path)} left, and the next one removes it\n"
            "    way out:     give the output another name, or rename the source"
        )
    return output


@contextmanager
def replaced_file(
    store: Store, name: str, *, check: Callable[[], object] | None = None
) -> Iterator[IO[bytes]]:
    """Yield a file that replaces an older one when the block ends; one process at a time.

    Args:
        store: The directory.
        name: Name of the file.
        check: Called before it gets its name; what it raises prevents that.

    Raises:
        CannotLook: Another process is writing it.
    """
    try:
        with store.replace(name, check=check or (lambda: None), alone=True) as stream:
            yield stream
    except Locked as locked:
        raise _is_written(f"{store.path}/{name}", locked) from None
    store.sync()


class Output(AbstractContextManager["Output"], ABC):
    """The right to create one directory, from the first check to its completion.

    Attributes:
        path: Path or URL of the output.
    """

    path: str | Path

    def __exit__(self, *raised: object) -> None:
        """Give the right back."""

    @abstractmethod
    def directory(self, files: Sequence[str], identity: str) -> AbstractContextManager[None]:
        """Let files be written in the block; they become the output when it ends.

        Args:
            files: The names of all files that are written, the last one at the end.
            identity: Text that differs for different outputs. What was written outlasts a block
                that raises, and the next block of the same identity goes on with it.
        """

    @abstractmethod
    def file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Yield a new file; it gets its name when it is whole."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file."""

    def check_room(self, nbytes: int) -> None:
        """Check that there is room for an output of so many bytes, where that is known.

        Raises:
            CannotLook: There is not enough room.
        """


class LocalOutput(Output):
    """One directory of this machine.

    Args:
        path: Path of the output.

    Attributes:
        path: Path of the output.
        partial: Path of the directory while it is unfinished.

    Raises:
        CannotLook: The path exists, is no name, or another process is writing it.
        OSError: Nothing can be written there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not Path(path).name or "\0" in os.fspath(path):
            raise CannotLook(
                f"{format_name(repr(os.fspath(path)))}: this names no output\n"
                "    way out:     give the name of a directory that is to be created"
            )
        self.path: Path = Path(path)
        self._beside = LocalStore(self.path.parent)
        self._lock = hidden_name(self.path.name, ".lock")
        try:
            self._check_absent()
        except CannotLook:
            self._beside.drop_lock(self._lock)  # of a process that completed it and was killed
            raise
        self.partial = self._beside.file(hidden_name(self.path.name, ".partial"))
        self._unfinished = LocalStore(self.partial)
        self._held = ExitStack()

    def __enter__(self) -> LocalOutput:
        parents = [p for p in self.path.parents if not p.exists()]
        with ExitStack() as stack:
            stack.callback(_remove_empty, parents)
            self._beside.make()
            try:
                stack.enter_context(self._beside.lock(self._lock))
            except Locked as locked:
                raise _is_written(self.path, locked) from None
            # Another process may have finished between the first check and the lock.
            self._check_absent()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._held.close()

    @contextmanager
    def directory(self, files: Sequence[str], identity: str) -> Iterator[None]:
        if not self._is_unfinished(identity):
            _remove(self.partial)
            self._unfinished.make()
            with self.file(IDENTITY) as stream:
                stream.write(identity.encode())
        # Files that a killed attempt had not finished.
        self._unfinished.remove({*self._unfinished.names()}.difference(files, [IDENTITY]))
        yield
        self._unfinished.remove([IDENTITY])
        self._unfinished.sync()
        try:
            # An empty directory of that name gives way to it.
            os.rename(self.partial, self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _is_there(self.path) from None
            raise
        self._beside.sync()

    def file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._unfinished.replace(name)

    def has(self, name: str) -> bool:
        return _is_own(self.partial / name, stat.S_ISREG)

    def check_room(self, nbytes: int) -> None:
        """Check that there is room for an output of so many bytes.

        Room is the free space and that of an unfinished directory, which is continued or removed.

        Raises:
            CannotLook: There is not enough room.
        """
        room = self._beside.room()
        if room is None:
            return
        if self.partial.is_dir() and not self.partial.is_symlink():
            room += sum(entry.nbytes or 0 for entry in self._unfinished.entries().values())
        if room < nbytes:
            raise CannotLook(
                f"{format_name(self.path)}: it takes {format_nbytes(nbytes)}, and there is room "
                f"for {format_nbytes(room)}\n"
                "    way out:     give a path on another disk, or make room"
            )

    def _check_absent(self) -> None:
        """Refuse a path where something is, but an empty directory."""
        is_empty = self.path.is_dir() and not self.path.is_symlink() and not os.listdir(self.path)
        if os.path.lexists(self.path) and not is_empty:
            raise _is_there(self.path)

    def _is_unfinished(self, identity: str) -> bool:
        """Whether this user left an unfinished directory of that identity."""
        written = self.partial / IDENTITY
        is_own = _is_own(self.partial, stat.S_ISDIR) and _is_own(written, stat.S_ISREG)
        return is_own and written.read_bytes() == identity.encode()


class UrlOutput(Output):
    """One directory at a URL.

    Args:
        url: A URL without anything but an unfinished earlier attempt.
        storage_options: Options that fsspec passes to its file system.

    Attributes:
        path: The URL.

    Raises:
        CannotLook: Something is there, or fsspec does not know the protocol.
        OSError: The service cannot be reached or refuses.
    """

    def __init__(self, url: str, storage_options: StorageOptions = None) -> None:
        self._store = UrlStore(url, storage_options)
        self.path: str = self._store.path
        self._last, self._mark, self._held = "", "", frozenset[str]()
        entry = self._store.entry()
        names = set() if entry is None or entry.nbytes is not None else self._names()
        if entry is not None and MARKER not in names and (names or entry.nbytes is not None):
            raise _is_there(self.path)

    @contextmanager
    def directory(self, files: Sequence[str], identity: str) -> Iterator[None]:
        """Let files be written in the block; the file that is written last completes the output.

        Args:
            files: The names of all files that are written, the last one at the end. No other file
                is ever removed.
            identity: Text that differs for different outputs. On an object store what was written
                outlasts a block that raises, and the next one of the same identity goes on with it.
                Other file systems may hold a file in part, so nothing is left there.
        """
        is_resumable = self._store.is_object_store
        self._store.make()
        self._mark = f"{identity} {uuid4().hex}"
        self._held = self._begin(files, self._mark, is_resumable)
        self._last = files[-1]
        try:
            yield
        except BaseException:
            if not is_resumable and self._is_mine():
                self._remove(self._names().intersection(files[:-1]))
                self._remove([MARKER])
            raise
        try:
            self._store.remove([MARKER])
        except OSError as error:
            warnings.warn(
                f"{self.path}: all is written, but its marker is left over: {error}\n"
                f"    way out:     remove {MARKER}; until then the output may be taken for an "
                "unfinished one",
                stacklevel=2,
            )

    def file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Yield a new file; it appears when the block ends.

        Raises:
            CannotLook: It completes the output, and somebody else has written it. Another process
                has begun at the same moment, where a service let both.
        """
        if not self._store.is_object_store and not self._is_mine():
            raise self._is_begun(MARKER)
        if name == self._last and self._store.entry(name) is not None:
            raise _is_there(self.path)
        return self._store.create(name)

    def has(self, name: str) -> bool:
        return name in self._held

    def _begin(self, files: Sequence[str], mark: str, is_resumable: bool) -> frozenset[str]:
        """Create the marker, or take one of the same identity; return which files are there."""
        is_new = self._store.create_new(MARKER, mark.encode())
        try:
            stored = self._store.read(MARKER).decode(errors="replace")
        except FileNotFoundError:  # another process has finished meanwhile
            raise _is_there(self.path) from None
        names = self._names() - {MARKER}
        is_new = is_new and stored == mark  # some services let two processes create it
        is_same = is_new or (is_resumable and stored.split(" ")[0] == mark.split(" ")[0])
        if (is_new and names) or (is_same and files[-1] in names):
            # Another process has finished since nothing was there; or it was stopped before it
            # removed the marker.
            self._remove([MARKER])
            raise _is_there(self.path)
        foreign = sorted(names.difference(files))
        if foreign or not is_same:
            raise self._is_begun(
                f"{format_names(foreign, 4)}: not of this output" if is_same else MARKER
            )
        return frozenset(names)

    def _is_begun(self, why: str) -> CannotLook:
        return CannotLook(
            f"{format_name(self.path)}: another output was begun here, and is not complete\n"
            f"    found:       {why}\n"
            "    likely:      another process is writing it; or one was interrupted that had "
            "another source or other arguments\n"
            "    way out:     give another name; or, if no process is writing, remove what is "
            f"there, {MARKER} last"
        )

    def _is_mine(self) -> bool:
        """Whether the marker is that of this attempt."""
        with suppress(OSError):
            return self._store.read(MARKER) == self._mark.encode()
        return False

    def _names(self) -> set[str]:
        return set(self._store.entries(below=True))

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as possible."""
        try:
            self._store.remove(names)
        except OSError as error:
            logger.warning("%s: files of an output that ended are left over: %s", self.path, error)


def _is_there(out: str | os.PathLike[str]) -> CannotLook:
    return CannotLook(
        f"{format_name(out)}: is there already, and is left as it is\n"
        "    way out:     give another name"
    )


def _is_written(path: str | Path, locked: Locked) -> CannotLook:
    way_out = "wait for it, or give another name"
    if locked.path is not None:
        way_out += f"; if that process has ended, remove {os.path.basename(locked.path)}"
    return CannotLook(
        f"{format_name(path)}: is being written by another process\n"
        f"    way out:     {format_name(way_out)}"
    )


def _is_own(path: Path, is_of_kind: Callable[[int], bool]) -> bool:
    """Whether a path is of a kind, is this user's, and is no link."""
    try:
        held = os.lstat(path)
    except OSError:
        return False
    return is_of_kind(held.st_mode) and held.st_uid == os.geteuid()


def _remove(path: Path) -> None:
    """Remove a file, a directory with its content, or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories that are still empty, as after an error."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()
