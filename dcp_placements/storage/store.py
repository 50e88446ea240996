"""The files of one directory, at a path or a URL: listed, opened, written, replaced, removed.

Two ranks save into ``step-1``, which has an older checkpoint, and the coordinator completes it::

    store = open_store("/ckpt/step-1")                     # or "s3://bucket/step-1"
    with store.create("__0_5e0f1a2b_0.distcp") as stream:  # rank 1 writes __1_5e0f1a2b_0.distcp
        stream.write(records)
    with store.replace(".metadata") as stream:             # the older one until the block ends
        stream.write(metadata)
    store.sync()                                           # the names are on the disk
    store.remove(["__0_81c20f3d_0.distcp"])                # what only the older one had

A file system that cannot sync a directory, lock a file or rename a file over another one is no
reason for a failure: it is noticed here, and warned of once.

On an object store a file appears whole when its upload completes, so nothing is renamed or synced.
Other processes write to the same URLs, so fsspec's cache of directories is not used.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shlex
import shutil
import stat
import uuid
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TypeVar

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from dcp_placements.errors import PlacementError
from dcp_placements.short_text import format_name
from dcp_placements.storage.file_reads import ByteRangeIO
from dcp_placements.storage.process_limits import OPENED
from dcp_placements.storage.remote import (
    OBJECT_STORES,
    ONE_AT_A_TIME,
    UploadStream,
    connect,
    download,
    facts_of,
    is_url,
    local_or_url,
    request,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_AHEAD_NBYTES = 1 << 20
"""The least bytes of one request: at 20 ms a request and 100 MB/s fewer take about as long."""

REQUEST_NBYTES = 64 << 20
"""The most bytes of one request, which are in memory in addition to the tensor."""

READING_THREADS = 8
"""The most requests at the same time."""

WHOLE_NBYTES = 16 << 20
"""A file that is opened several times is downloaded as a whole up to this size."""

NAME_NBYTES = 255
"""The most bytes of a file's name, on all common file systems."""

_UNSUPPORTED = frozenset(
    [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOLCK]
)
"""The errors by which a file system says that it has no such operation."""

_NOT_OPENED = frozenset([errno.EACCES, errno.EPERM, errno.EISDIR])
"""The errors of opening a directory that may be written to, but not read."""

_NO_FILE = frozenset([errno.EISDIR, errno.ENXIO])
"""The errors of opening a directory, or a socket, as a file."""

_NOT_PLAIN = "it is no plain file"

_UNFINISHED_LENGTH = len(".81c20f3d.tmp")

_reported: set[tuple[int, str]] = set()
"""What was warned of in this process, by device and operation."""


StorageOptions = Mapping[str, Any] | None
"""Options that fsspec passes to the file system of a URL; paths of this machine need none."""


class Entry(NamedTuple):
    """What a directory lists of a file. One of the fields differs after it was written again.

    Attributes:
        nbytes: Size of a file; None for a directory.
        written: Time of the last write, in seconds since 1970; None if a service does not tell it.
        inode: Inode of a local file; 0 at a URL.
    """

    nbytes: int | None
    written: float | None
    inode: int = 0


class Locked(Exception):
    """Another process or thread holds a lock.

    Args:
        path: The file that has to be removed if its process has ended; None for a lock that the
            system drops with its process.
    """

    def __init__(self, path: str | None) -> None:
        super().__init__(path)
        self.path = path


def _nothing() -> None:
    """Check nothing."""


def any_name(name: str) -> bool:
    """Accept every name."""
    return True


class Store(ABC):
    """The files of one directory. Names are those in the directory, or paths below it.

    Attributes:
        path: Its path or URL, for messages.
        is_local: Whether its files are on this machine's file systems.
        is_object_store: Whether there are no directories, and a file appears whole.
        reading_threads: Number of threads that read fastest.
    """

    path: str
    is_local: ClassVar[bool]
    is_object_store = False
    reading_threads = 1

    def __init__(self) -> None:
        self._sizes: dict[str, int | None] = {}

    @abstractmethod
    def entry(self, name: str = "") -> Entry | None:
        """Return the entry of a file, or of the directory; None where there is none."""

    @abstractmethod
    def entries(self, wanted: Callable[[str], bool] = any_name) -> dict[str, Entry]:
        """Return the entries of the directory whose names are wanted, by name.

        A directory that does not exist has none.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of what is in the directory itself, sorted."""

    @abstractmethod
    def states_of(self, name: str) -> dict[str, Entry]:
        """Return the entries of a file, and of its replacements that were cut off, by name."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None where no file of that name may be opened.

        The first answer is kept.
        """
        if name not in self._sizes:
            self._sizes[name] = self._size(name)
        return self._sizes[name]

    @abstractmethod
    def _size(self, name: str) -> int | None: ...

    @abstractmethod
    def version(self, name: str) -> str:
        """Return the version of a file, which each write changes.

        Raises:
            OSError: There is no such file.
        """

    @abstractmethod
    def why_barred(self, name: str) -> str | None:
        """Return why a file must not be opened; None where it may be, or is missing."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Return a file, open for reading by position.

        Raises:
            OSError: The file is missing, barred, or cannot be opened.
        """

    @abstractmethod
    def opener(self, name: str) -> Callable[[], IO[bytes]]:
        """Return a function that opens a file, any number of times."""

    def ahead(self, call: Callable[[str], T], names: Iterable[str]) -> Generator[T]:
        """Yield the result of a call for each name, in order.

        At a URL the calls for the next ``reading_threads`` names run at the same time, since each
        request takes long; elsewhere each runs when its result is asked for.
        """
        yield from map(call, names)

    @abstractmethod
    def make(self) -> None:
        """Make the directory, and those above it."""

    @abstractmethod
    def create(self, name: str, *, sync: bool = True) -> AbstractContextManager[IO[bytes]]:
        """Yield a file under its own name; a block that raises leaves none.

        Args:
            name: Its name.
            sync: Whether a local file is on the disk when the block ends.
        """

    @abstractmethod
    def replace(
        self,
        name: str,
        *,
        sync: bool = True,
        check: Callable[[], object] = _nothing,
        alone: bool = False,
    ) -> AbstractContextManager[IO[bytes]]:
        """Yield a file that gets its name when the block ends, and then replaces an older one.

        Args:
            name: Its name.
            sync: Whether a local file is on the disk before it gets its name.
            check: Called as the last step before it gets its name; what it raises prevents that.
            alone: Whether a local file is locked meanwhile, so that one process at a time replaces
                it, and uses the temporary file that a killed one has left.

        Raises:
            Locked: Another process replaces it, too, with ``alone``.
        """

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, those that exist."""

    @abstractmethod
    def drop_lock(self, name: str) -> None:
        """Remove the file of a lock that nobody holds, as a process leaves it that was killed."""

    @abstractmethod
    def sync(self) -> bool:
        """Write the names in the directory to the disk, where the file system can.

        Returns:
            Whether the disk has them, as far as the file system tells. False is a failure of the
            disk, of which a warning tells.
        """


def open_store(
    path: str | os.PathLike[str],
    storage_options: StorageOptions = None,
    *,
    restricted: bool = False,
) -> Store:
    """Return the files of a directory of this machine, or at a URL.

    Args:
        path: A path, a ``file://`` URL, or another URL that fsspec knows. Nothing need be there.
        storage_options: Options that fsspec passes to the file system of a URL.
        restricted: Whether only plain files inside the directory may be opened: no links that lead
            out of it, and no names with ``..``.

    Raises:
        CannotLook: The path is a URL whose slashes ``pathlib.Path`` has joined; fsspec, or its
            library for the protocol, is not installed or refuses the options.
    """
    path = local_or_url(path)
    if is_url(path):
        return UrlStore(os.fspath(path), storage_options, restricted=restricted)
    return LocalStore(path, restricted=restricted)


def open_plain(path: str | os.PathLike[str]) -> IO[bytes]:
    """Return a plain file of this machine, open for reading.

    A directory, a device, a socket, or a FIFO, which would be waited for, is refused at once.

    Raises:
        OSError: There is no such file, it cannot be opened, or it is no plain file.
    """
    try:
        with ExitStack() as stack:
            stream = stack.enter_context(open(path, "rb", opener=without_waiting))
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stack.pop_all()
                return stream
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    raise PermissionError(errno.EPERM, _NOT_PLAIN, os.fspath(path))


def without_waiting(path: str, flags: int) -> int:
    """Open a file, as ``opener=`` of ``open``; a FIFO is not waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def unfinished_name(name: str, *, alone: bool = False) -> str:
    """Return a temporary name for a replacement of a file.

    No other process uses it; with ``alone`` all do, one after the other.
    """
    number = "0" * 8 if alone else uuid.uuid4().hex[:8]
    return f"{_shortened(name, _UNFINISHED_LENGTH)}.{number}.tmp"


def is_unfinished(name: str, finished: str) -> bool:
    """Whether this is the temporary name of a replacement, this package's or torch's.

    >>> is_unfinished(".metadata.81c20f3d.tmp", ".metadata"), is_unfinished("a.tmp", "a")
    (True, True)
    """
    head, dot, ending = name.removesuffix(".tmp").rpartition(".")
    if not name.endswith(".tmp"):
        return False
    is_ours = dot == "." and len(ending) == 8 and not set(ending) - set("0123456789abcdef")
    if is_ours and head == _shortened(finished, _UNFINISHED_LENGTH):
        return True
    return name == f"{finished}.tmp"


def hidden_name(name: str, ending: str) -> str:
    """Return the name of a hidden file beside another; a name that is too long gets a digest.

    >>> hidden_name("out", ".lock")
    '.out.lock'
    """
    return f".{_shortened(name.lstrip('.'), 1 + len(ending), digested=name)}{ending}"


def _shortened(name: str, more: int, *, digested: str = "") -> str:
    """Return a name, or its digest where it and ``more`` bytes are no name of a file."""
    if len(os.fsencode(name)) + more <= NAME_NBYTES:
        return name
    return sha256(os.fsencode(digested or name)).hexdigest()


class LocalStore(Store):
    """A directory of this machine.

    Args:
        path: Its path. A relative one is that of the working directory at each call.
        restricted: Argument of ``open_store``.
    """

    is_local = True

    def __init__(self, path: str | os.PathLike[str], *, restricted: bool = False) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self._root = self.path.rstrip("/") or "/"
        self._restricted = restricted

    def file(self, name: str) -> Path:
        """Return the path of a file."""
        return Path(self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def entry(self, name: str = "") -> Entry | None:
        try:
            return _entry_of(os.stat(self._path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def entries(self, wanted: Callable[[str], bool] = any_name) -> dict[str, Entry]:
        held = {}
        with suppress(FileNotFoundError), os.scandir(self._root) as scanned:
            for entry in scanned:
                if wanted(entry.name):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        held[entry.name] = _entry_of(entry.stat(follow_symlinks=False))
        return held

    def names(self) -> list[str]:
        return sorted(os.listdir(self._root))

    def states_of(self, name: str) -> dict[str, Entry]:
        return self.entries(lambda held: held == name or is_unfinished(held, name))

    def _size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):  # removed in between
            if os.path.isfile(self._path(name)) and self.why_barred(name) is None:
                return os.path.getsize(self._path(name))
        return None

    def version(self, name: str) -> str:
        held = os.stat(self._path(name))
        return f"{held.st_size} {held.st_mtime_ns}"

    def why_barred(self, name: str) -> str | None:
        """Return why a file must not be opened; None where it may be, or is missing.

        A file may be opened if it is a plain file within the directory after all links are
        resolved. In a snapshot of the hub's cache, links to its ``blobs`` are allowed as well.
        """
        inside = Path(os.path.realpath(self._root))
        try:
            file = Path(os.path.realpath(inside / name))
            kind = os.stat(file).st_mode
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"it cannot be looked at: {format_name(error)}"
        roots = [inside]
        if inside.parent.name == "snapshots":
            roots.append(inside.parent.parent / "blobs")
        if not any(file.is_relative_to(root) for root in roots):
            return (
                f"it leads out of the directory, to {format_name(file)} (way out: cp -rL copies "
                "the directory with what its links lead to)"
            )
        return None if stat.S_ISREG(kind) or stat.S_ISDIR(kind) else _NOT_PLAIN

    def open(self, name: str) -> IO[bytes]:
        if self._restricted:
            why = self.why_barred(name)
            if why is not None:
                raise PermissionError(errno.EPERM, why, name)
            OPENED.note(self._path(name))
        return open_plain(self._path(name))

    def opener(self, name: str) -> Callable[[], IO[bytes]]:
        return partial(self.open, name)

    def make(self) -> None:
        os.makedirs(self._root, exist_ok=True)

    @contextmanager
    def create(self, name: str, *, sync: bool = True) -> Iterator[IO[bytes]]:
        path = self._path(name)
        with errors_of(path), open(path, "wb") as stream, self._removed_if_raised(path):
            yield stream
            self._flush(stream, sync)
            stream.close()  # the last moment at which the system tells of what it could not write

    @contextmanager
    def replace(
        self,
        name: str,
        *,
        sync: bool = True,
        check: Callable[[], object] = _nothing,
        alone: bool = False,
    ) -> Iterator[IO[bytes]]:
        path, new = self._path(name), self._path(unfinished_name(name, alone=alone))
        # No link is followed that somebody has put in its place.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with ExitStack() as stack:
            if alone:
                os.stat(self._root)  # of a directory that is missing; a lock would make it
                stack.enter_context(self.lock(hidden_name(name, ".lock")))
                with suppress(FileNotFoundError):
                    os.unlink(new)
            descriptor = os.open(new, flags, 0o666)
            stack.enter_context(self._removed_if_raised(new))
            with errors_of(new), open(descriptor, "wb") as stream:
                yield stream
                self._flush(stream, sync)
            check()
            self._rename_over(new, path)

    @contextmanager
    def _removed_if_raised(self, path: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    def _flush(self, stream: IO[bytes], sync: bool) -> None:
        stream.flush()
        if sync:
            try:
                os.fsync(stream.fileno())
            except OSError as error:
                self._report(error, "sync a file", "a power cut may lose what was written last")

    def _rename_over(self, new: str, path: str) -> None:
        """Rename a file over another, in one step where the file system can."""
        try:
            # Atomic: a job that is killed here leaves the older file or the new one.
            os.replace(new, path)
        except OSError as error:
            if error.errno not in {*_UNSUPPORTED, errno.EEXIST} or not os.path.lexists(path):
                raise
            # The older file gets another name first, which fails where nothing can be renamed.
            older = self._path(unfinished_name(os.path.basename(path)))
            os.rename(path, older)
            try:
                os.rename(new, path)
            except BaseException as raised:
                self._rename_back(older, path, raised)
                raise
            with suppress(OSError):
                os.unlink(older)
            what = "rename a file over another one"
            _warn_once(self._root, what, error, "a kill at that moment leaves neither")

    def _rename_back(self, older: str, path: str, raised: BaseException) -> None:
        """Give a file its own name again, or a copy of it.

        Raises:
            OSError: It cannot be done; the text has the command that does it later.
        """
        try:
            try:
                os.rename(older, path)
            except OSError:
                with open_plain(older) as held, self.create(os.path.basename(path)) as copy:
                    shutil.copyfileobj(held, copy)
                with suppress(OSError):
                    os.unlink(older)
        except OSError as error:
            raise OSError(
                f"{raised}\n"
                f"    found:       the older file is whole under another name: {error}\n"
                f"    way out:     mv {shlex.quote(older)} {shlex.quote(path)}"
            ) from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove plain files, those that exist; never through a link."""
        for name in sorted(names):
            path = self._path(name)
            with suppress(FileNotFoundError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    os.unlink(path)

    def sync(self) -> bool:
        if not hasattr(os, "O_DIRECTORY"):
            return True
        try:
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            return self._synced(error)
        return True

    def _synced(self, error: OSError) -> bool:
        """Warn of a directory that was not synced; return whether the disk is sound."""
        try:
            cost = "a power cut may lose the newest names"
            self._report(error, "sync a directory", cost, _NOT_OPENED)
        except OSError:
            warnings.warn(
                f"{self.path}: all is written, but the disk failed when it was told to keep the "
                f"newest names: {error}\n"
                "    way out:     check the disk; until then a power cut may lose them",
                stacklevel=2,
            )
            return False
        return True

    def _report(
        self, error: OSError, what: str, cost: str, also: frozenset[int] = frozenset()
    ) -> None:
        """Warn once of what a file system cannot do; raise any other error again."""
        if error.errno not in _UNSUPPORTED | also:
            raise error
        _warn_once(self._root, what, error, cost)

    def room(self) -> int | None:
        """Return the free bytes of its disk; None where the file system does not tell."""
        try:
            return shutil.disk_usage(self._root).free
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return None

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a lock of the system, which it drops with its process, on a file of this name.

        Where the file system has no locks, a file beside it is the lock.

        Raises:
            Locked: Another process or thread holds it.
        """
        path = self._path(name)
        # Its own fallback, for one of these errors, does not say that it fell back.
        lock: BaseFileLock = FileLock(path, timeout=0, fallback_to_soft=False)
        try:
            try:
                lock.acquire()
            except OSError as error:
                kept = "a file is the lock, and stays if its process is killed"
                self._report(error, "lock a file", kept)
                with suppress(OSError):
                    os.unlink(path)  # nobody holds it
                path += ".soft"
                lock = SoftFileLock(path, timeout=0)
                lock.acquire()
        except Timeout:
            raise Locked(path if isinstance(lock, SoftFileLock) else None) from None
        try:
            yield
        finally:
            try:
                if not isinstance(lock, SoftFileLock):
                    # Removed before it is unlocked: whoever opens it next creates a new file.
                    Path(path).unlink(missing_ok=True)
                lock.release()
            except OSError as error:
                # What was done under the lock is done.
                logger.warning("%s: the lock is left over: %s", path, error)

    def drop_lock(self, name: str) -> None:
        with suppress(OSError):
            held = os.lstat(self._path(name))
            is_ours = stat.S_ISREG(held.st_mode) and held.st_uid == os.geteuid()
            if is_ours and not held.st_size:  # a file with contents is somebody else's
                with suppress(Locked), self.lock(name):
                    pass


def _warn_once(root: str, what: str, error: OSError, cost: str) -> None:
    """Warn, once for each device, of an operation that its file system does not have."""
    device = -1
    with suppress(OSError):
        device = os.stat(root).st_dev
    if (device, what) not in _reported:
        _reported.add((device, what))
        warnings.warn(
            f"{root}: its file system cannot {what} ({error.strerror}): {cost}", stacklevel=3
        )


def _entry_of(held: os.stat_result) -> Entry:
    is_directory = stat.S_ISDIR(held.st_mode)
    return Entry(None if is_directory else held.st_size, held.st_mtime_ns / 1e9, held.st_ino)


@contextmanager
def errors_of(path: Any) -> Iterator[None]:
    """Raise the system's error for a file that is being written, with the file's name.

    If a write fails, ``torch.save`` closes its zip file, which fails as well with an error about
    positions; the reason is the error in its context.
    """
    try:
        yield
    except PlacementError:
        raise  # it is about the data, not the file
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__
        if reason is None or reason.filename is not None or (reason is error and not error.errno):
            raise
        if reason.errno is None:
            raise reason from error
        raise OSError(reason.errno, os.strerror(reason.errno), os.fspath(path)) from error


class UrlStore(Store):
    """A directory at a URL, over fsspec.

    fsspec and the libraries below it retry some requests, but not all of them retry after a
    connection was reset or timed out. So all requests that can be repeated are repeated here: for
    a range of bytes, a whole object, or information about an object.

    Args:
        url: The URL.
        storage_options: Options that fsspec passes to the file system, such as ``endpoint_url``.
        restricted: Argument of ``open_store``.

    Raises:
        CannotLook: fsspec, or its library for this protocol, is not installed; or fsspec does not
            support the protocol.
    """

    is_local = False

    def __init__(
        self,
        url: str,
        storage_options: StorageOptions = None,
        *,
        restricted: bool = False,
    ) -> None:
        super().__init__()
        protocol, scheme, rest = url.partition("://")
        self.path = f"{protocol}{scheme}{rest.rstrip('/') or '/'}"
        self.is_object_store = protocol in OBJECT_STORES
        self.reading_threads = 1 if protocol in ONE_AT_A_TIME else READING_THREADS
        self._restricted = restricted
        self._options = dict(storage_options or {})
        self._connected: tuple[int, Any, str] = (0, None, "")
        _ = self.fs  # which refuses a URL now

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens its own connection.
        return {**vars(self), "_connected": (0, None, "")}

    @property
    def fs(self) -> Any:
        """The file system of fsspec, connected in this process: no connection survives a fork."""
        if self._connected[0] != os.getpid():
            self._connected = os.getpid(), *connect(self.path, self._options)
        return self._connected[1]

    def url(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def _at(self, name: str) -> str:
        """Return the path of a file in fsspec's file system, of which some take no URLs."""
        root = self.fs and self._connected[2]
        return f"{root.rstrip('/')}/{name}" if name else root

    def _ask(self, method: str, name: str, **options: Any) -> Any:
        """Call a method of fsspec's file system, without its cache of directories."""

        def ask() -> Any:
            self.fs.invalidate_cache()
            return getattr(self.fs, method)(self._at(name), **options)

        return request(self.url(name), ask)

    def entry(self, name: str = "") -> Entry | None:
        """Return the entry of a file, or of the directory; None where there is none.

        On an object store a directory exists if files below it do.
        """
        # fsspec's own exists() returns False for any error.
        with suppress(FileNotFoundError):
            return Entry(*facts_of(self._ask("info", name)))
        return None

    def entries(
        self, wanted: Callable[[str], bool] = any_name, *, below: bool = False
    ) -> dict[str, Entry]:
        """Return the entries of the directory whose names are wanted, by name.

        Args:
            wanted: Whether a name is wanted.
            below: Whether to return all files below the directory instead.
        """
        root = self._at("").rstrip("/")
        try:
            listing = self._ask("find" if below else "ls", "", detail=True)
        except FileNotFoundError:
            return {}
        infos = listing.values() if below else listing
        held = {str(info["name"]).rstrip("/"): info for info in infos}
        held.pop(root, None)  # consoles create such an object for a folder
        by_name = {path.removeprefix(f"{root}/"): info for path, info in held.items()}
        return {name: Entry(*facts_of(info)) for name, info in by_name.items() if wanted(name)}

    def names(self) -> list[str]:
        entries = self.entries()
        self._sizes |= {name: entry.nbytes for name, entry in entries.items()}
        return sorted(entries)

    def states_of(self, name: str) -> dict[str, Entry]:
        if not self.is_object_store:
            return self.entries(lambda held: held == name or is_unfinished(held, name))
        entry = self.entry(name)
        return {} if entry is None else {name: entry}

    def _size(self, name: str) -> int | None:
        entry = self.entry(name)
        return None if entry is None else entry.nbytes

    def version(self, name: str) -> str:
        """Return fsspec's key of a file's contents, which most services change with them."""
        return str(self._ask("ukey", name))

    def why_barred(self, name: str) -> str | None:
        if name.startswith("/") or "://" in name or ".." in name.split("/"):
            return f"{format_name(name)} is a name outside of {self.path}"
        return None

    def open(self, name: str) -> IO[bytes]:
        """Return a file, open for reading by ranges, one request each; a small one in memory.

        fsspec's own files read ahead by up to 50 MB, whatever is requested, and give up at the
        first error that their library does not retry.

        Raises:
            OSError: The file does not exist, is barred, or cannot be reached.
        """
        nbytes, data = self._looked_up(name, READ_AHEAD_NBYTES)
        if data is not None:
            return io.BytesIO(data)
        url, fs, path = self.url(name), self.fs, self._at(name)

        def read_into(view: memoryview, start: int) -> None:
            end = start + view.nbytes
            view[:] = request(url, lambda: download(fs, path, end - start, start=start, end=end))

        return io.BufferedReader(ByteRangeIO(nbytes, read_into, REQUEST_NBYTES), READ_AHEAD_NBYTES)

    def opener(self, name: str) -> Callable[[], IO[bytes]]:
        """Return a function that opens a file, any number of times.

        A file of up to 16 MiB is downloaded now, in one request: all reads are then of the same
        version, even if another process replaces the file.
        """
        _, data = self._looked_up(name, WHOLE_NBYTES)
        return partial(self.open, name) if data is None else partial(io.BytesIO, data)

    def _looked_up(self, name: str, most_nbytes: int) -> tuple[int, bytes | None]:
        """Return the size of a file, and its bytes if there are no more than ``most_nbytes``.

        Raises:
            OSError: The file does not exist, is barred, or cannot be reached.
        """
        self._check_inside(name)
        url, path = self.url(name), self._at(name)
        OPENED.note(url)

        def looked_up() -> tuple[int, bytes | None]:
            self.fs.invalidate_cache()
            nbytes, _ = facts_of(self.fs.info(path))
            if nbytes is None:
                raise IsADirectoryError(errno.EISDIR, "this is a directory", url)
            return nbytes, None if nbytes > most_nbytes else download(self.fs, path, nbytes)

        return request(url, looked_up)

    def ahead(self, call: Callable[[str], T], names: Iterable[str]) -> Generator[T]:
        if self.reading_threads == 1:
            yield from super().ahead(call, names)
            return
        left = iter(names)
        with ThreadPoolExecutor(self.reading_threads) as pool:
            begun = deque(pool.submit(call, name) for name in islice(left, self.reading_threads))
            while begun:
                result = begun.popleft().result()
                begun.extend(pool.submit(call, name) for name in islice(left, 1))
                yield result

    def _check_inside(self, name: str) -> None:
        why = self.why_barred(name) if self._restricted else None
        if why is not None:
            raise PermissionError(errno.EPERM, why, name)

    def read(self, name: str) -> bytes:
        """Return a file, read in one request."""
        return request(self.url(name), lambda: download(self.fs, self._at(name)))

    def make(self) -> None:
        """Make the directory; do nothing on an object store, where s3fs would create a bucket."""
        if not self.is_object_store:
            request(self.path, lambda: self.fs.makedirs(self._at(""), exist_ok=True))

    @contextmanager
    def create(self, name: str, *, sync: bool = True, is_new: bool = True) -> Iterator[IO[bytes]]:
        """Yield a file that appears when the block ends; a block that raises leaves none.

        Args:
            name: Its name.
            sync: Ignored.
            is_new: Whether there is no older file of that name, so that one of the new one's size
                is the new one.
        """
        from fsspec.spec import AbstractBufferedFile

        url, path = self.url(name), self._at(name)
        stream = request(url, lambda: self.fs.open(path, "wb"))
        try:
            with errors_of(url):
                yield UploadStream(stream, url)  # type: ignore[misc]  # it is only written to
            nbytes = stream.tell()
            try:
                # Not repeated: a second close would do nothing, and the file would be missing.
                request(url, stream.close, tries=1)
            except OSError:
                is_lost_answer = is_new and self._is_whole(name, nbytes)
                if not is_lost_answer:
                    raise
        except BaseException:
            with suppress(Exception):
                if isinstance(stream, AbstractBufferedFile):
                    # close() would complete the upload of an incomplete file.
                    stream.closed = True
                    stream.discard()
                else:
                    with suppress(Exception):
                        stream.close()
                    self.fs.rm_file(path)
            raise

    @contextmanager
    def replace(
        self,
        name: str,
        *,
        sync: bool = True,
        check: Callable[[], object] = _nothing,
        alone: bool = False,
    ) -> Iterator[IO[bytes]]:
        """Yield a file that gets its name when the block ends, and then replaces an older one.

        On an object store it is in memory until then, and is put in one request.
        """
        if self.is_object_store:
            buffer, url = io.BytesIO(), self.url(name)
            yield buffer
            check()
            try:
                request(url, lambda: self.fs.pipe_file(self._at(name), buffer.getvalue()))
            except OSError:
                if not self._holds(name, buffer.getvalue()):  # it may be the answer that was lost
                    raise
            return
        new = unfinished_name(name)
        with self.create(new) as stream:
            yield stream
        try:
            check()
            self._rename_over(new, name)
        except BaseException:
            with suppress(OSError):
                self.remove([new])
            raise

    def _rename_over(self, new: str, name: str) -> None:
        """Rename a file over another; the older one has a name of its own meanwhile."""
        older = unfinished_name(name) if self.entry(name) is not None else None
        if older is not None:
            self.rename(name, older)
        try:
            self.rename(new, name)
        except BaseException as raised:
            if older is not None:
                self._rename_back(older, name, raised)
            raise
        if older is not None:
            with suppress(OSError):
                request(self.url(older), lambda: self.fs.rm_file(self._at(older)))

    def _rename_back(self, older: str, name: str, raised: BaseException) -> None:
        """Give a file its own name again.

        Raises:
            OSError: It cannot be done; the text says what does it later.
        """
        try:
            self.rename(older, name)
        except OSError as error:
            raise OSError(
                f"{raised}\n"
                f"    found:       the older file is whole under another name: {error}\n"
                f"    way out:     rename {self.url(older)} to {self.url(name)}"
            ) from error

    def rename(self, name: str, new: str) -> None:
        """Give a file another name."""
        try:
            request(self.url(name), lambda: self.fs.mv(self._at(name), self._at(new)), tries=1)
        except OSError:
            # The file may have moved although the answer was lost.
            if self.entry(name) is not None or self.entry(new) is None:
                raise

    def _is_whole(self, name: str, nbytes: int) -> bool:
        """Whether an object store has a file of this size."""
        with suppress(OSError):
            entry = self.entry(name) if self.is_object_store else None
            return entry is not None and entry.nbytes == nbytes
        return False

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether a file has these contents; False where it cannot be read."""
        with suppress(OSError):
            return self.read(name) == data
        return False

    def create_new(self, name: str, data: bytes) -> bool:
        """Write a file in one request unless it exists; return whether it was written.

        S3, GCS and Azure let only one of several processes succeed; other services may not.
        """
        url = self.url(name)
        if self.entry(name) is not None:
            return False
        try:
            request(url, lambda: self.fs.pipe_file(self._at(name), data, mode="create"))
        except FileExistsError:
            # Another process created it, or a request of this one whose answer was lost.
            try:
                return self.read(name) == data
            except FileNotFoundError:
                return False  # removed meanwhile
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, those that exist, in as few requests as possible."""
        wanted = set(names)
        held = self.entries(wanted.__contains__) if wanted else ()
        paths = [self._at(name) for name in sorted(held)]

        def removed() -> None:
            try:
                self.fs.rm(paths)
            except FileNotFoundError:
                # One is gone, by an earlier try or another process; others may still be there.
                for path in paths:
                    with suppress(FileNotFoundError):
                        self.fs.rm_file(path)

        if paths:
            request(self.path, removed)

    def drop_lock(self, name: str) -> None:
        """Do nothing: no file at a URL is locked."""

    def sync(self) -> bool:
        return True
