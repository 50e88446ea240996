"""Atomic outputs: each appears whole or not at all, and has one writer.

A file or directory is written under a temporary name beside its own, and renamed when all of it is
on disk. Meanwhile a lock beside it keeps other processes out. The lock is the system's (``flock``),
which ends with its process. A new file never replaces one that appeared meanwhile, and links are
not followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from dcp_placements.errors import CannotLook, format_name, format_nbytes
from dcp_placements.storage.data_file import errors_of

IDENTITY = "identity"
"""The file in an unfinished directory that identifies the output."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors of ``flock`` on file systems without locks."""

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


class Output:
    """The right to create one file or directory, from the first check to the rename.

    Args:
        path: Of the output.
        replace: Whether to replace an existing file. Otherwise the path must not exist, or be an
            empty directory.
        source: The path that the output is written from, if there is one.

    Attributes:
        path: Of the output.

    Raises:
        CannotLook: The path exists, is no name, or another process is writing it; or the source is
            the output's own unfinished directory.
        OSError: Nothing can be written there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        source: str | os.PathLike[str] | None = None,
    ) -> None:
        if not Path(path).name or "\0" in os.fspath(path):
            raise CannotLook(
                f"{format_name(repr(os.fspath(path)))}: this names no output\n"
                "    way out:     give the name of a file or directory that is to be created"
            )
        self.path = absent(path) if not replace else Path(path)
        self._replace = replace
        hidden = f".{self.path.name.lstrip('.')}"
        self._partial = self.path.with_name(f"{hidden}.partial")
        if source is not None and Path(source).resolve().is_relative_to(self._partial.resolve()):
            raise CannotLook(
                f"{format_name(source)}: this is what an interrupted attempt at "
                f"{format_name(self.path)} left, and the next one removes it\n"
                "    way out:     give the output another name, or rename the source"
            )
        self._lock = _Lock(self.path, self.path.with_name(f"{hidden}.lock"))

    def __enter__(self) -> Output:
        self._parents = [p for p in self.path.parents if not p.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.take()
            if not self._replace:
                # Another process may have finished between the first check and the lock.
                absent(self.path)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        for parent in self._parents:
            with suppress(OSError):
                parent.rmdir()  # still empty, as after an error

    @contextmanager
    def directory(self, files: Sequence[str], identity: str | None = None) -> Iterator[Folder]:
        """Yield a directory to write into; it becomes the output when the block ends.

        Args:
            files: As in ``RemoteOutput.directory``, whose files have no directory to themselves.
            identity: Different for different outputs. With it the directory outlasts a block that
                raises, and the next block of the same identity gets it with its files.
        """
        folder = self._unfinished(identity)
        if folder is None:
            folder = Folder(self._partial)
            _remove(self._partial)
            self._partial.mkdir()
            if identity is not None:
                folder.write(IDENTITY, identity.encode())
        try:
            yield folder
            if identity is not None:
                (self._partial / IDENTITY).unlink()
            _sync_directory(self._partial)
            self._rename()
        except BaseException:
            if identity is None:
                _remove(self._partial)
            raise

    @contextmanager
    def file(self) -> Iterator[IO[bytes]]:
        """Yield a file to write into; it becomes the output when the block ends."""
        _remove(self._partial)
        try:
            with new_file(self._partial) as stream:
                yield stream
            if self._replace:
                os.replace(self._partial, self.path)
                _sync_directory(self.path.parent)
                return
            if self.path.is_dir():
                self.path.rmdir()  # empty, as ``absent`` checked
            self._link()
        finally:
            _remove(self._partial)

    def check_room(self, nbytes: int, identity: str | None = None) -> None:
        """Check that there is room for an output of so many bytes.

        Room is what is free, and what an unfinished directory of that identity has.

        Raises:
            CannotLook: There is not.
        """
        folder = self._unfinished(identity)
        held = 0 if folder is None else sum(file.stat().st_size for file in folder.path.iterdir())
        room = shutil.disk_usage(self.path.parent).free + held
        if room < nbytes:
            raise CannotLook(
                f"{format_name(self.path)}: it takes {format_nbytes(nbytes)}, and there is room "
                f"for {format_nbytes(room)}\n"
                "    way out:     give a path on another disk, or make room"
            )

    def _unfinished(self, identity: str | None) -> Folder | None:
        """Return the unfinished directory of that identity, if this user left one."""
        if identity is None:
            return None
        try:
            held = os.lstat(self._partial)
            if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.geteuid():
                return None
            plan = self._partial / IDENTITY
            same = is_own_file(plan) and plan.read_text() == identity
        except (OSError, ValueError):
            return None
        return Folder(self._partial) if same else None

    def _rename(self) -> None:
        try:
            # An empty directory of that name gives way to it.
            os.rename(self._partial, self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise is_there(self.path) from None
            raise
        _sync_directory(self.path.parent)

    def _link(self) -> None:
        try:
            os.link(self._partial, self.path)
        except FileExistsError:
            raise is_there(self.path) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            absent(self.path)
            os.rename(self._partial, self.path)
        _sync_directory(self.path.parent)


class Folder:
    """An unfinished directory on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def file(self, name: str, *, buffering: int = -1) -> Iterator[IO[bytes]]:
        """Yield a new file; it gets its name when it is whole."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        _remove(partial)
        with new_file(partial, buffering=buffering) as stream:
            yield stream
        os.replace(partial, path)

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        with self.file(name) as stream:
            stream.write(data)

    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file."""
        return is_own_file(self.path / name)

    def begin_last(self) -> None:
        """Do nothing: no other process writes here."""


def absent(path: str | os.PathLike[str]) -> Path:
    """Return the path of an output, which does not exist yet or is an empty directory.

    Raises:
        CannotLook: It exists.
    """
    out = Path(path)
    is_empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    if os.path.lexists(out) and not is_empty:
        raise is_there(out)
    return out


def is_there(out: str | os.PathLike[str]) -> CannotLook:
    """Return the error for an output that exists."""
    return CannotLook(
        f"{format_name(out)}: is there already, and is left as it is\n"
        "    way out:     give another name"
    )


@contextmanager
def new_file(path: Path, *, buffering: int = -1) -> Iterator[IO[bytes]]:
    """Yield a new file to write into; it is on disk when the block ends.

    Raises:
        OSError: The file cannot be written; the error has its name.
        FileExistsError: Anything of that name is there, a link too.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    with errors_of(path), open(descriptor, "wb", buffering=buffering) as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def is_own_file(path: Path) -> bool:
    """Whether this is a plain file of this user's, and no link to one."""
    try:
        held = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(held.st_mode) and held.st_uid == os.geteuid()


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


class _Lock:
    """A lock file, held by at most one process.

    The system drops the lock of a process that died, on whatever host it was. On file systems
    without such locks the file itself is the lock, until its process or somebody removes it.
    """

    def __init__(self, target: Path, path: Path) -> None:
        self._target = target
        self._path = path
        self._lock: BaseFileLock = FileLock(path, timeout=0)

    def take(self) -> None:
        """Take the lock.

        Raises:
            CannotLook: Another process has it.
        """
        try:
            try:
                self._lock.acquire()
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._path.unlink(missing_ok=True)  # it is no lock of anybody
                self._path = self._path.with_name(f"{self._path.name}.soft")
                self._lock = SoftFileLock(self._path, timeout=0)
                self._lock.acquire()
        except Timeout:
            way_out = "wait for it, or give another name"
            if isinstance(self._lock, SoftFileLock):
                way_out += f"; if that process has ended, remove {self._path.name}"
            raise CannotLook(
                f"{format_name(self._target)}: is being written by another process\n"
                f"    way out:     {format_name(way_out)}"
            ) from None

    def release(self) -> None:
        """Give the lock back."""
        if self._lock.is_locked:
            if not isinstance(self._lock, SoftFileLock):
                # Removed before it is unlocked: whoever opens it next creates a new file.
                self._path.unlink(missing_ok=True)
            self._lock.release()
