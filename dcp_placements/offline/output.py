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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO
from uuid import uuid4

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from dcp_placements.errors import CannotLook
from dcp_placements.offline.directory import MARKER
from dcp_placements.short_text import (
    format_name,
    format_names,
    format_nbytes,
)
from dcp_placements.storage.record_writes import errors_of
from dcp_placements.storage.remote import RemoteFileSystem, is_url, local_or_url

logger = logging.getLogger(__name__)

IDENTITY = "identity"
"""The file in an unfinished directory that identifies the output."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors of ``flock`` on file systems without locks."""


def output_at(
    path: str | os.PathLike[str], *, source: str | os.PathLike[str]
) -> Output | RemoteOutput:
    """Return the directory that is to be created at a path of this machine, or at a URL.

    Args:
        path: A path without anything, an empty directory, or an unfinished output.
        source: The path or URL that the output is written from.

    Raises:
        CannotLook: Something is there, or the path is no name; or the source is the output's own
            unfinished directory.
    """
    path, source = local_or_url(path), local_or_url(source)
    if is_url(path):
        return RemoteOutput(path)
    output = Output(path)
    if not is_url(source) and Path(source).resolve().is_relative_to(output.partial.resolve()):
        raise CannotLook(
            f"{format_name(source)}: this is what an interrupted attempt at "
            f"{format_name(output.path)} left, and the next one removes it\n"
            "    way out:     give the output another name, or rename the source"
        )
    return output


class Output(AbstractContextManager["Output"]):
    """The right to create one directory of this machine, from the first check to the rename.

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
        self.path = Path(path)
        self._check_absent()
        self.partial = _hidden_beside(self.path, ".partial")
        self._lock_path = _hidden_beside(self.path, ".lock")
        self._lock: BaseFileLock | None = None

    def __enter__(self) -> Output:
        self._parents = [p for p in self.path.parents if not p.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._take_lock()
            # Another process may have finished between the first check and the lock.
            self._check_absent()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self._lock is not None:
            if not isinstance(self._lock, SoftFileLock):
                # Removed before it is unlocked: whoever opens it next creates a new file.
                self._lock_path.unlink(missing_ok=True)
            self._lock.release()
        for parent in self._parents:
            with suppress(OSError):
                parent.rmdir()  # still empty, as after an error

    @contextmanager
    def directory(self, files: Sequence[str], identity: str) -> Iterator[None]:
        """Let files be written in the block; they become the output when it ends.

        Args:
            files: Argument of ``RemoteOutput.directory``, whose files share the directory.
            identity: Text that differs for different outputs. The directory outlasts a block that
                raises, and the next block of the same identity gets it with its files.
        """
        if not self._is_unfinished(identity):
            _remove(self.partial)
            self.partial.mkdir()
            with self.file(IDENTITY) as stream:
                stream.write(identity.encode())
        yield
        (self.partial / IDENTITY).unlink()
        _sync_directory(self.partial)
        try:
            # An empty directory of that name gives way to it.
            os.rename(self.partial, self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _is_there(self.path) from None
            raise
        _sync_directory(self.path.parent)

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new file; it gets its name when it is whole."""
        partial = _hidden_beside(self.partial / name, ".partial")
        _remove(partial)
        with _new_file(partial) as stream:
            yield stream
        os.replace(partial, self.partial / name)

    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file."""
        return _is_own(self.partial / name, stat.S_ISREG)

    def check_room(self, nbytes: int) -> None:
        """Check that there is room for an output of so many bytes.

        Room is the free space and that of an unfinished directory, which is continued or removed.

        Raises:
            CannotLook: There is not enough room.
        """
        held = 0
        if self.partial.is_dir() and not self.partial.is_symlink():
            held = sum(file.stat().st_size for file in self.partial.iterdir())
        room = shutil.disk_usage(self.path.parent).free + held
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

    def _take_lock(self) -> None:
        """Take the lock, which is the system's; or the file itself, where there are no locks."""
        # Its own fallback, for one of these errors, does not say that it fell back.
        lock: BaseFileLock = FileLock(self._lock_path, timeout=0, fallback_to_soft=False)
        try:
            try:
                lock.acquire()
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._lock_path.unlink(missing_ok=True)  # it is no lock of anybody
                self._lock_path = _hidden_beside(self.path, ".lock.soft")
                lock = SoftFileLock(self._lock_path, timeout=0)
                lock.acquire()
        except Timeout:
            way_out = "wait for it, or give another name"
            if isinstance(lock, SoftFileLock):
                way_out += f"; if that process has ended, remove {self._lock_path.name}"
            raise CannotLook(
                f"{format_name(self.path)}: is being written by another process\n"
                f"    way out:     {format_name(way_out)}"
            ) from None
        self._lock = lock


class RemoteOutput(AbstractContextManager["RemoteOutput"]):
    """One directory to be created at a URL, in the manner of ``Output``.

    Args:
        path: A URL without anything but an unfinished earlier attempt.

    Attributes:
        path: The URL.

    Raises:
        CannotLook: Something is there, or fsspec does not know the protocol.
        OSError: The service cannot be reached or refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fs = RemoteFileSystem()
        self.path = self._fs.init_path(path)
        self._last, self._held = "", frozenset[str]()
        entry = self._fs.entry(self.path)
        names = set() if entry is None or entry.nbytes is not None else self._names()
        if entry is not None and MARKER not in names and (names or entry.nbytes is not None):
            raise _is_there(self.path)

    def __exit__(self, *raised: object) -> None:
        """Do nothing: the next attempt continues with what was begun."""

    @contextmanager
    def directory(self, files: Sequence[str], identity: str) -> Iterator[None]:
        """Let files be written in the block; the file that is written last completes the output.

        Args:
            files: The names of all files that are written, the last one at the end. No other file
                is ever removed.
            identity: Argument of ``Output.directory``, on an object store. Other file systems may
                hold a file in part, so a block that raises there leaves nothing.
        """
        is_resumable = self._fs.is_object_store
        self._fs.mkdir(self.path)
        self._held = self._begin(files, f"{identity} {uuid4().hex}", is_resumable)
        self._last = files[-1]
        try:
            yield
        except BaseException:
            if not is_resumable:
                self._remove([*sorted(self._names().intersection(files[:-1])), MARKER])
            raise
        self._remove([MARKER])

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new file; it appears when the block ends.

        Raises:
            CannotLook: It completes the output, and somebody else has written it.
        """
        url = self._fs.concat_path(self.path, name)
        if name == self._last and self._fs.exists(url):
            raise _is_there(self.path)
        with self._fs.create_stream(url, "wb") as stream:
            yield stream

    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file."""
        return name in self._held

    def check_room(self, nbytes: int) -> None:
        """Check nothing: the room at a URL is not known."""

    def _begin(self, files: Sequence[str], mark: str, is_resumable: bool) -> frozenset[str]:
        """Create the marker, or take one of the same identity; return which files are there."""
        marker = self._fs.concat_path(self.path, MARKER)
        is_new = self._fs.create(marker, mark.encode())
        try:
            stored = self._fs.read(marker).decode(errors="replace").partition(" ")[0]
        except FileNotFoundError:  # another process has finished meanwhile
            raise _is_there(self.path) from None
        names = self._names() - {MARKER}
        is_same = is_new or (is_resumable and stored == mark.partition(" ")[0])
        if (is_new and names) or (is_same and files[-1] in names):
            # Another process has finished since nothing was there; or it was stopped before it
            # removed the marker.
            self._remove([MARKER])
            raise _is_there(self.path)
        foreign = sorted(names.difference(files))
        if foreign or not is_same:
            why = f"{format_names(foreign, 4)}: not of this output" if is_same else f"{MARKER}"
            raise CannotLook(
                f"{format_name(self.path)}: another output was begun here, and is not complete\n"
                f"    found:       {why}\n"
                "    likely:      another process is writing it; or one was interrupted that had "
                "another source or other arguments\n"
                "    way out:     give another name; or, if no process is writing, remove what is "
                f"there, {MARKER} last"
            )
        return frozenset(names)

    def _names(self) -> set[str]:
        return set(self._fs.entries(self.path, below=True))

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files, as far as possible."""
        for name in names:
            url = self._fs.concat_path(self.path, name)
            try:
                self._fs.rm_file(url)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("%s is left over from an output that ended: %s", url, error)


AnyOutput = Output | RemoteOutput


@contextmanager
def replaced_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a file to write into; it replaces the one of that name when the block ends."""
    path = local_or_url(path)
    if is_url(path):
        fs = RemoteFileSystem()
        with fs.create_stream(fs.init_path(path), "wb") as stream:
            yield stream
        return
    target = Path(path)
    partial = _hidden_beside(target, f".{uuid4().hex}.partial")
    try:
        with _new_file(partial) as written:
            yield written
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(target.parent)


def _hidden_beside(path: Path, ending: str) -> Path:
    """Return the path of a hidden file beside another; a name that is too long gets a digest.

    >>> _hidden_beside(Path("a/out"), ".lock")
    PosixPath('a/.out.lock')
    """
    name = f".{path.name.lstrip('.')}{ending}"
    if len(os.fsencode(name)) > _NAME_MAX:
        name = f".{sha256(os.fsencode(path.name)).hexdigest()}{ending}"
    return path.with_name(name)


_NAME_MAX = 255
"""Bytes of a file's name, on all common file systems."""


def _is_there(out: str | os.PathLike[str]) -> CannotLook:
    return CannotLook(
        f"{format_name(out)}: is there already, and is left as it is\n"
        "    way out:     give another name"
    )


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file to write into; it is on disk when the block ends, and links are refused."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    with errors_of(path), open(descriptor, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


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


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot sync directories
    finally:
        os.close(descriptor)
