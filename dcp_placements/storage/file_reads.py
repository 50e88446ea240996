"""Reads from one data file, counted."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from dcp_placements.errors import format_name
from dcp_placements.storage.fast_zlib import crc32

ANNOUNCED_NBYTES = 16 << 20
"""Bytes of a file announced at once."""

BLOCK_NBYTES = 512 << 10
"""Bytes that are read before they are summed, while they are in the processor's cache. A load from
memory takes 9 % longer with checksums, 15 % in blocks of 1 MiB and 29 % of 4 MiB."""


def why_barred(root: str | os.PathLike[str], name: str) -> str | None:
    """Return why a file of a directory must not be opened; None where it may be, or is missing.

    A file may be opened if it is plain, and within the directory after all links are resolved. In
    a snapshot of the hub's cache links to its ``blobs`` are allowed, too.
    """
    inside = Path(os.path.realpath(root))
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
        return f"it leads out of the directory, to {format_name(file)}"
    return None if stat.S_ISREG(kind) or stat.S_ISDIR(kind) else "it is no plain file"


def open_inside(root: str | os.PathLike[str], name: str) -> IO[bytes]:
    """Open a plain file of a directory for reading; never one outside, and without blocking.

    Raises:
        OSError: It is missing, barred, or cannot be opened.
    """
    why = why_barred(root, name)
    if why is not None:
        raise PermissionError(errno.EPERM, why, name)
    # Do not block if it has become a FIFO meanwhile.
    descriptor = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is no plain file", name)
    return open(descriptor, "rb")


NEAR_NBYTES = 64 << 10
"""Reads this near to each other are announced, so that the pages between come along: to fetch them
takes less time than a second request."""

LOCAL_GAP_NBYTES = 4 << 10
"""Where runs begin less than a page apart, all pages are fetched anyway, and a call takes longer
than to copy a page."""

REMOTE_GAP_NBYTES = 1 << 20
"""A request to a URL takes as long as some MiB."""


def cheap_gap(run_nbytes: int, most_nbytes: int = LOCAL_GAP_NBYTES) -> int:
    """Return how many bytes between two runs cost less to read than another call.

    >>> cheap_gap(16), cheap_gap(512), cheap_gap(4096)
    (4080, 3584, 512)
    """
    return max(most_nbytes - run_nbytes, most_nbytes // 8)


class Part:
    """Bytes that are read by position: a file, or a record in it.

    Args:
        size: How many they are.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` with the bytes from ``position`` on.

        Raises:
            EOFError: They end before.
        """
        raise NotImplementedError

    def read_summed(self, buffer: memoryview, position: int, checksum: int = 0) -> int:
        """Fill ``buffer`` as ``read_into``; return the CRC-32 with that of the bytes before."""
        self.read_into(buffer, position)
        return crc32(buffer, checksum)

    def read_each(
        self, buffer: memoryview, nbytes: int, positions: Iterable[int], *, near: bool
    ) -> None:
        """Fill ``buffer`` with ``nbytes`` from each position, one after another.

        Args:
            buffer: Where to.
            nbytes: To read from each position.
            positions: Ascending.
            near: Whether most of the pages from the first to the last are needed. Reads that
                leave gaps look random to the system, and it would fetch page by page for them.

        Raises:
            EOFError: They end before.
        """
        start = 0
        for position in positions:
            self.read_into(buffer[start : start + nbytes], position)
            start += nbytes

    def gap(self, run_nbytes: int) -> int:
        """Return how many bytes between two runs are read along with them."""
        return NEAR_NBYTES

    def stream(self) -> io.BufferedIOBase:
        """Return the bytes as a file of their own."""
        return io.BufferedReader(_View(self))


class CountedFile(Part):
    """An open file.

    Args:
        stream: Opened by a checkpoint's file system; seekable.

    Attributes:
        nbytes: Bytes read so far.
        reads: Calls so far.
        size: Of the file.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(int(stream.seek(0, io.SEEK_END)))
        self.nbytes = 0
        self.reads = 0
        self._stream = stream
        # Only for a plain file do descriptor and stream surely have the same bytes.
        plain = isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)
        self._fd = stream.fileno() if plain and hasattr(os, "preadv") else None
        self._gap_nbytes = LOCAL_GAP_NBYTES if plain else REMOTE_GAP_NBYTES

    def gap(self, run_nbytes: int) -> int:
        return cheap_gap(run_nbytes, self._gap_nbytes)

    def read_into(self, buffer: memoryview, position: int) -> None:
        while buffer.nbytes:
            if self._fd is not None:
                count = os.preadv(self._fd, [buffer], position)
            else:
                self._stream.seek(position)
                count = self._stream.readinto(buffer) or 0
            if count == 0:
                raise EOFError(f"the file ends at {position}, {buffer.nbytes} bytes too early")
            self.reads += 1
            self.nbytes += count
            position += count
            buffer = buffer[count:]

    def read_summed(self, buffer: memoryview, position: int, checksum: int = 0) -> int:
        # At a URL a request for each block would take longer.
        if self._fd is None:
            return super().read_summed(buffer, position, checksum)
        for at in range(0, buffer.nbytes, BLOCK_NBYTES):
            block = buffer[at : at + BLOCK_NBYTES]
            self.read_into(block, position + at)
            checksum = crc32(block, checksum)
        return checksum

    def read_each(
        self, buffer: memoryview, nbytes: int, positions: Iterable[int], *, near: bool
    ) -> None:
        fd = self._fd
        if fd is None:
            super().read_each(buffer, nbytes, positions, near=near)
            return
        start = announced = 0
        if not near or not hasattr(os, "posix_fadvise"):
            announced = self.size
        preadv, complete = os.preadv, 0
        for position in positions:
            if position >= announced:
                announced = position + ANNOUNCED_NBYTES
                os.posix_fadvise(fd, position, ANNOUNCED_NBYTES, os.POSIX_FADV_WILLNEED)
            stop = start + nbytes
            # As read_into, without the cost of a call: there may be a million.
            count = preadv(fd, [buffer[start:stop]], position)
            if count == nbytes:
                complete += 1
            else:
                self.nbytes += count
                self.read_into(buffer[start + count : stop], position + count)
            start = stop
        self.reads += complete
        self.nbytes += complete * nbytes

    @property
    def is_local(self) -> bool:
        """Whether it is a plain file of this machine."""
        return self._fd is not None


def write_all(into: IO[bytes], buffer: memoryview) -> None:
    """Write all of a buffer to an unbuffered file, which may accept it in parts."""
    while buffer.nbytes:
        buffer = buffer[into.write(buffer) :]


class FilePart(Part):
    """A part of a file, read on demand.

    Args:
        file: The file.
        start: Where the part begins.
        length: Its length.
    """

    def __init__(self, file: CountedFile, start: int, length: int) -> None:
        super().__init__(length)
        self._file = file
        self._start = start

    def gap(self, run_nbytes: int) -> int:
        return self._file.gap(run_nbytes)

    def read_into(self, buffer: memoryview, position: int) -> None:
        self._file.read_into(buffer, self._start + position)

    def read_summed(self, buffer: memoryview, position: int, checksum: int = 0) -> int:
        return self._file.read_summed(buffer, self._start + position, checksum)

    def read_each(
        self, buffer: memoryview, nbytes: int, positions: Iterable[int], *, near: bool
    ) -> None:
        start = self._start
        self._file.read_each(buffer, nbytes, map(start.__add__, positions), near=near)


class HeldPart(Part):
    """A part of a file that is in memory.

    Args:
        held: Its bytes.
    """

    def __init__(self, held: memoryview) -> None:
        super().__init__(held.nbytes)
        self._held = held

    def read_into(self, buffer: memoryview, position: int) -> None:
        buffer[:] = self._held[position : position + buffer.nbytes]


class SeekableRaw(io.RawIOBase):
    """Bytes of a known length that are read at a position; subclasses read them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position


class _View(SeekableRaw):
    def __init__(self, part: Part) -> None:
        super().__init__(part.size)
        self._part = part

    def readinto(self, buffer: Any) -> int:
        left = max(self._nbytes - self._position, 0)
        view = memoryview(buffer).cast("B")[:left]
        self._part.read_into(view, self._position)
        self._position += view.nbytes
        return view.nbytes
