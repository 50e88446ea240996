"""Outputs at a URL. An object store renames nothing, so files are put where they stay.

What completes an output is written last: ``.metadata``, or the index of safetensors files. Until
then markers among the files say that the output is unfinished. The first marker lists the files
that the output consists of; it is written before any of them, and nothing else is ever removed.
The last marker names the process that writes; no other process writes there. A process that was
killed leaves its marker, and the next attempt numbers its own marker higher. The service creates
each name once, so that of several attempts one proceeds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO

from dcp_placements.errors import CannotLook, format_name, format_names
from dcp_placements.offline.atomic_output import Folder, Output, is_there
from dcp_placements.offline.directory import MARKER
from dcp_placements.offline.holder import Holder, busy
from dcp_placements.storage.remote import RemoteFileSystem, is_url, local_or_url

logger = logging.getLogger(__name__)

_FIRST = f"{MARKER}1"


@dataclass(frozen=True, slots=True)
class _Contents:
    """What an output consists of, as its first marker has it; the last file completes it."""

    files: tuple[str, ...]
    identity: str | None

    @classmethod
    def parse(cls, data: bytes) -> _Contents | None:
        """Return what a first marker contains; None where it is not as ``format`` writes it."""
        try:
            stored = json.loads(data)
            contents = cls(tuple(stored["files"]), stored["identity"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts = [*contents.files, contents.identity or ""]
        return contents if contents.files and all(type(t) is str for t in texts) else None

    def format(self) -> bytes:
        """Return what ``parse`` reads."""
        return json.dumps(asdict(self)).encode()


class RemoteFolder:
    """A directory at a URL, which is completed by the last file.

    Attributes:
        is_completing: Whether the last file may have been written.
    """

    def __init__(
        self, fs: RemoteFileSystem, path: str, last: str, held: frozenset[str] = frozenset()
    ) -> None:
        self.path = path
        self.is_completing = False
        self._fs = fs
        self._last = last
        self._held = held

    @contextmanager
    def file(self, name: str, *, buffering: int = -1) -> Iterator[IO[bytes]]:
        """Yield a new file; it appears when the block ends."""
        if name == self._last:
            self.begin_last()
        with self._fs.create_stream(self._fs.concat_path(self.path, name), "wb") as stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        """Write a file in one request."""
        if name == self._last:
            self.begin_last()
        self._fs.put(self._fs.concat_path(self.path, name), data)

    def has(self, name: str) -> bool:
        """Whether an earlier attempt has finished a file."""
        return name in self._held

    def begin_last(self) -> None:
        """Note that the file is being written that completes the output.

        Raises:
            CannotLook: Somebody else has written it.
        """
        if self._fs.exists(self._fs.concat_path(self.path, self._last)):
            raise is_there(self.path)
        self.is_completing = True


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
        entry = None if replace else self._fs.entry(self.path)
        if entry is not None and entry.nbytes is not None:
            raise is_there(self.path)
        if entry is not None:
            self._last_marker()

    def __enter__(self) -> RemoteOutput:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def check_room(self, nbytes: int, identity: str | None = None) -> None:
        """Check nothing: the room at a URL is not known."""

    @contextmanager
    def directory(
        self, files: Sequence[str], identity: str | None = None
    ) -> Iterator[RemoteFolder]:
        """Yield a directory to write into; the file that is written last completes it.

        Args:
            files: The names of all files that may be written, the last one at the end. No other
                file is ever removed.
            identity: As in ``Output.directory``, on an object store. Elsewhere a file may be there
                in part, so that nothing is left of a block that raises.
        """
        if not self._fs.is_object_store:
            identity = None
            self._fs.mkdir(self.path)
        marker, held = self._begin(_Contents(tuple(files), identity))
        folder = RemoteFolder(self._fs, self.path, files[-1], held)
        try:
            yield folder
        except BaseException:
            with _left_over(self.path):
                names = self._files() if identity is None else frozenset()
                is_whole = folder.is_completing and files[-1] in names
                if identity is None and not is_whole:
                    self._remove([*sorted(names.intersection(files[:-1])), *self._markers()])
                else:
                    self._remove([marker])
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

    def _begin(self, contents: _Contents) -> tuple[str, frozenset[str]]:
        """Create this attempt's marker; return its name and the names of files to keep."""
        while True:
            last = self._last_marker()
            if not last:
                created = self._fs.create(self._url(_FIRST), contents.format())
                names = self._fs.entries(self.path)
                if created and len(names) > 1 and list(filter(_number, names)) == [_FIRST]:
                    # Another process has begun and finished since nothing was there.
                    self._remove([_FIRST])
                continue
            marker = f"{MARKER}{last + 1}"
            if not self._fs.create(self._url(marker), Holder.of_this_process().format()):
                continue  # another process began at the same time
            try:
                # Without the older marker, another process has begun and finished meanwhile.
                if f"{MARKER}{last}" in self._markers():
                    return marker, self._kept(contents)
            except FileNotFoundError:
                pass  # the first marker: likewise
            except BaseException:
                self._remove([marker])
                raise
            self._remove([marker])

    def _kept(self, contents: _Contents) -> frozenset[str]:
        """Remove what earlier attempts at other outputs left; return the names of other files."""
        first = self._url(_FIRST)
        earlier = _Contents.parse(self._fs.read(first))
        if earlier is None:
            raise _no_marker(first)
        names = self._files()
        foreign = sorted(names.difference(earlier.files))
        if foreign:
            raise CannotLook(
                f"{format_name(self.path)}: an output was interrupted here, and other files are "
                "beside it\n"
                f"    found:       {format_names(foreign, 4)}\n"
                "    way out:     give another name, or move the other files away; "
                f"{format_name(_FIRST)} lists those of the interrupted output"
            )
        if earlier.files[-1] in names:
            # It was stopped while it removed its markers.
            self._remove(self._markers())
            raise is_there(self.path)
        if contents.identity is None or contents != earlier:
            self._remove(sorted(names))
            names = frozenset()
        if contents != earlier:
            self._fs.put(first, contents.format())
        return names

    def _last_marker(self) -> int:
        """Return the number of the last marker; 0 where nothing is there."""
        while True:
            names = self._fs.entries(self.path)
            markers = sorted(filter(_number, names), key=_number)
            if not markers:
                if names:
                    raise is_there(self.path)
                return 0
            last = self._url(markers[-1])
            if markers != [_FIRST]:
                try:
                    holder = Holder.parse(self._fs.read(last))
                except FileNotFoundError:
                    continue  # its process has finished meanwhile
                if holder is not None and not holder.has_ended:
                    raise busy(self.path, last, holder)
                if holder is None or markers[0] != _FIRST:
                    raise _no_marker(last)
            return _number(markers[-1])

    def _url(self, name: str) -> str:
        return self._fs.concat_path(self.path, name)

    def _markers(self) -> list[str]:
        """Return the names of the markers, the first one at the end: it is removed last."""
        return sorted(filter(_number, self._fs.entries(self.path)), key=_number, reverse=True)

    def _files(self) -> frozenset[str]:
        """Return the names of all files but the markers, those in directories too."""
        names = self._fs.entries(self.path, below=True)
        return frozenset([name for name in names if not _number(name)])

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files, in this order, as far as possible."""
        for name in names:
            url = self._url(name)
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


def _no_marker(url: str) -> CannotLook:
    return CannotLook(
        f"{format_name(url)}: this is no marker of an unfinished output as this program writes it\n"
        "    way out:     if no process is writing there, remove it; or give another name"
    )


def _number(name: str) -> int:
    """Return the number of a marker; 0 for another file."""
    number = name.removeprefix(MARKER)
    is_marker = name != number and number.isdecimal() and number == str(int(number))
    return int(number) if is_marker else 0


AnyOutput = Output | RemoteOutput
AnyFolder = Folder | RemoteFolder


def output_at(
    path: str | os.PathLike[str],
    *,
    replace: bool = False,
    source: str | os.PathLike[str] | None = None,
) -> AnyOutput:
    """Return the output at a path of this machine, or at a URL.

    Args:
        path: The path or URL.
        replace: As of ``Output``.
        source: The path or URL that the output is written from, if there is one.
    """
    path = local_or_url(path)
    if is_url(path):
        return RemoteOutput(path, replace=replace)
    local = None if source is None else local_or_url(source)
    return Output(path, replace=replace, source=None if local is None or is_url(local) else local)
