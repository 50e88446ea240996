"""Reads from one data file, counted."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from dcp_placements.errors import format_name
from dcp_placements.storage.records.fast_zlib import crc32, crc32_combine

ANNOUNCED_NBYTES = 16 << 20
"""Bytes of a file announced at once."""

COPY_NBYTES = 8 << 20
"""The buffer for copying from file to file, where the system cannot do it."""

BLOCK_NBYTES = 1 << 20
"""Bytes that are read before they are summed, while they are in the processor's cache."""

HALVED_NBYTES = 16 << 20
"""From so many bytes on two threads read and sum one half each. Of less, where no core is idle, the
threads cost more than they save."""


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


class CountedFile:
    """An open file that is read by position.

    Args:
        stream: Opened by a checkpoint's file system; seekable.

    Attributes:
        nbytes: Bytes read so far.
        reads: Calls so far.
        size: Of the file.
    """

    def __init__(self, stream: Any) -> None:
        self.nbytes = 0
        self.reads = 0
        self._stream = stream
        # Only for a plain file do descriptor and stream surely have the same bytes.
        plain = isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)
        self._fd = stream.fileno() if plain and hasattr(os, "preadv") else None
        self.size = int(stream.seek(0, io.SEEK_END))
        self._second: ThreadPoolExecutor | None = None
        self._counting = threading.Lock()

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` with the bytes from ``position`` on.

        Raises:
            EOFError: The file ends before.
        """
        while buffer.nbytes:
            if self._fd is not None:
                count = os.preadv(self._fd, [buffer], position)
            else:
                self._stream.seek(position)
                count = self._stream.readinto(buffer) or 0
            if count == 0:
                raise EOFError(f"the file ends at {position}, {buffer.nbytes} bytes too early")
            with self._counting:
                self.reads += 1
                self.nbytes += count
            position += count
            buffer = buffer[count:]

    def read_summed(self, buffer: memoryview, position: int) -> int:
        """Fill ``buffer`` with the bytes from ``position`` on; return their CRC-32.

        Two threads take one half each of a large buffer.

        Raises:
            EOFError: The file ends before.
        """
        if self._fd is None:  # a request for each block would take longer
            self.read_into(buffer, position)
            return crc32(buffer)
        if buffer.nbytes < HALVED_NBYTES or crc32_combine is None:
            return self._read_blocks(buffer, position)
        if self._second is None:
            self._second = ThreadPoolExecutor(1)
        half = buffer.nbytes // 2
        rest = self._second.submit(self._read_blocks, buffer[half:], position + half)
        checksum = self._read_blocks(buffer[:half], position)
        return crc32_combine(checksum, rest.result(), buffer.nbytes - half)

    def _read_blocks(self, buffer: memoryview, position: int) -> int:
        checksum = 0
        for at in range(0, buffer.nbytes, BLOCK_NBYTES):
            block = buffer[at : at + BLOCK_NBYTES]
            self.read_into(block, position + at)
            checksum = crc32(block, checksum)
        return checksum

    def close(self) -> None:
        """End the second thread."""
        if self._second is not None:
            self._second.shutdown()

    def read_each(
        self, buffer: memoryview, nbytes: int, positions: Iterable[int], *, near: bool
    ) -> None:
        """Fill ``buffer`` with ``nbytes`` from each position, one after another.

        Args:
            buffer: Where to.
            nbytes: To read from each position.
            positions: In the file, ascending.
            near: Whether most of the pages from the first to the last are needed. Reads that
                leave gaps look random to the system, and it would fetch page by page for them.

        Raises:
            EOFError: The file ends before.
        """
        fd = self._fd
        start = announced = 0
        if fd is None:
            for position in positions:
                self.read_into(buffer[start : start + nbytes], position)
                start += nbytes
            return
        if not near or not hasattr(os, "posix_fadvise"):
            announced = self.size
        preadv, complete = os.preadv, 0
        for position in positions:
            if position >= announced:
                announced = position + ANNOUNCED_NBYTES
                os.posix_fadvise(fd, position, ANNOUNCED_NBYTES, os.POSIX_FADV_WILLNEED)
            stop = start + nbytes
            # As read_into, without the cost of a call: there may be a million.
            if preadv(fd, [buffer[start:stop]], position) == nbytes:
                complete += 1
            else:
                self.read_into(buffer[start:stop], position)
            start = stop
        self.reads += complete
        self.nbytes += complete * nbytes

    def copy_to(self, into: IO[bytes], position: int, nbytes: int) -> None:
        """Append bytes of this file to another, with ``copy_file_range`` where it works.

        Args:
            into: Open for writing, at its end, without a buffer of its own.
            position: Where the bytes begin.
            nbytes: How many they are.

        Raises:
            EOFError: The file ends before.
        """
        while nbytes and self._fd is not None and hasattr(os, "copy_file_range"):
            try:
                count = os.copy_file_range(self._fd, into.fileno(), nbytes, position)
            except io.UnsupportedOperation:
                break  # no file of this machine
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
                break
            if count == 0:
                break  # the end, or a file system that cannot copy and returns 0
            position += count
            nbytes -= count
        buffer = memoryview(bytearray(min(nbytes, COPY_NBYTES)))
        while nbytes:
            part = buffer[:nbytes]
            self.read_into(part, position)
            write_all(into, part)
            position += part.nbytes
            nbytes -= part.nbytes


_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of ``copy_file_range`` where a file system or a kernel does not support it."""


def write_all(into: IO[bytes], buffer: memoryview) -> None:
    """Write all of a buffer to an unbuffered file, which may accept it in parts."""
    while buffer.nbytes:
        buffer = buffer[into.write(buffer) :]


class FilePart:
    """A part of a file, read on demand.

    Args:
        file: The file.
        start: Where the part begins.
        length: Its length.
    """

    def __init__(self, file: CountedFile, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from a position in the part on."""
        self._file.read_into(buffer, self._start + position)

    def read_summed(self, buffer: memoryview, position: int) -> int:
        """Fill ``buffer`` from a position in the part on; return the CRC-32 of the bytes."""
        return self._file.read_summed(buffer, self._start + position)

    def read_each(
        self, buffer: memoryview, nbytes: int, positions: Iterable[int], *, near: bool
    ) -> None:
        """Fill ``buffer`` with ``nbytes`` from each position in the part."""
        start = self._start
        self._file.read_each(buffer, nbytes, map(start.__add__, positions), near=near)

    def stream(self) -> io.BufferedIOBase:
        """Return the part as a file of its own."""
        return io.BufferedReader(_View(self, self._length))


class HeldPart:
    """A part of a file that is in memory.

    Args:
        held: Its bytes.
    """

    def __init__(self, held: memoryview) -> None:
        self._held = held

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from a position in the part on."""
        buffer[:] = self._held[position : position + buffer.nbytes]

    def read_summed(self, buffer: memoryview, position: int) -> int:
        """Fill ``buffer`` from a position in the part on; return the CRC-32 of the bytes."""
        self.read_into(buffer, position)
        return crc32(buffer)

    def read_each(
        self, buffer: memoryview, nbytes: int, positions: Iterable[int], *, near: bool
    ) -> None:
        """Fill ``buffer`` with ``nbytes`` from each position in the part."""
        start = 0
        for position in positions:
            buffer[start : start + nbytes] = self._held[position : position + nbytes]
            start += nbytes

    def stream(self) -> io.BufferedIOBase:
        """Return the part as a file of its own."""
        return io.BytesIO(self._held)


Part = FilePart | HeldPart
"""The bytes of a record."""


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
    def __init__(self, part: FilePart, length: int) -> None:
        super().__init__(length)
        self._part = part

    def readinto(self, buffer: Any) -> int:
        left = max(self._nbytes - self._position, 0)
        view = memoryview(buffer).cast("B")[:left]
        self._part.read_into(view, self._position)
        self._position += view.nbytes
        return view.nbytes
