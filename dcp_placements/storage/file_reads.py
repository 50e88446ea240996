"""Reads from one data file, counted and summed.

The elements of a stored chunk are contiguous, in C order. A slice of a chunk is a number of equal
*segments* at regular distances, each as long as possible while it includes few other bytes: columns
1 and 2 of an ``(8, 4)`` chunk of 2 bytes an element are 8 segments of 4 bytes, at 2, 10, 18 ...
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import PLAIN_TYPES

crc32: Callable[..., int] = import_module("isal.isal_zlib" if find_spec("isal") else "zlib").crc32
"""The checksum of zip files, which isal computes in a quarter of zlib's time."""

ANNOUNCED_NBYTES = 16 << 20
"""Bytes of a file that one ``posix_fadvise`` announces."""

BLOCK_NBYTES = 256 << 10
"""Bytes that one call reads, and that are summed while they are in the processor's cache. A load
from memory takes 5 % longer with checksums; in blocks of 1 MiB 15 %, of 4 MiB 29 %."""

NEAR_NBYTES = 64 << 10
"""Reads at most this far apart are announced, so that the system fetches the pages between them,
too, which takes less time than a second request."""

LOCAL_GAP_NBYTES = 4 << 10
"""Where reads begin less than a page apart, the system fetches all pages anyway, and a call takes
longer than to copy a page."""

REMOTE_GAP_NBYTES = 1 << 20
"""A request to a URL takes as long as the transfer of some MiB."""


def is_damage(error: OSError) -> bool:
    """Whether an error of reading is about the file.

    A file that is missing, or on a broken disk, is damage. A file that may not be read, or a
    service that does not answer, is none.
    """
    return isinstance(error, FileNotFoundError) or error.errno == errno.EIO


def cheap_gap(read_nbytes: int, most_nbytes: int = LOCAL_GAP_NBYTES) -> int:
    """Return how many bytes between two reads of this size cost less than a second call.

    >>> cheap_gap(16), cheap_gap(512), cheap_gap(4096)
    (4080, 3584, 512)
    """
    return max(most_nbytes - read_nbytes, most_nbytes // 8)


class Segments(NamedTuple):
    """The reads that a slice takes."""

    start: int  # first byte of the first segment, from the chunk's first byte
    nbytes: int  # size of each segment
    counts: tuple[int, ...]  # number of segments along each leading dim
    steps: tuple[int, ...]  # bytes from one segment to the next, along each leading dim
    strides: tuple[int, ...]  # strides of the slice in concatenated segments, in elements
    exact: bool  # whether segments contain nothing but the slice

    @property
    def total_nbytes(self) -> int:
        """Bytes of all segments."""
        return self.nbytes * prod(self.counts)

    def positions(self, chunk_start: int = 0) -> Iterator[int]:
        """Yield the first byte of each segment, in C order, of a chunk at ``chunk_start``."""
        ranges = [range(0, n * step, step) for n, step in zip(self.counts, self.steps, strict=True)]
        *outer, inner = ranges or [range(1)]
        for steps in product(*outer):
            first = chunk_start + self.start + sum(steps)
            yield from range(first, first + inner.stop, inner.step)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides are in C order, without gaps."""
    sized = zip(shape, strides, c_strides(shape), strict=True)
    return 0 in shape or all(size == 1 or step == plain for size, step, plain in sized)


def segments(
    strides: Sequence[int],
    *,
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    gap: Callable[[int], int] = lambda read_nbytes: 0,
) -> Segments:
    """Return the reads of a non-empty slice of a chunk. For an ``(8, 4)`` chunk in C order::

    >>> rows = segments((4, 1), offsets=(2, 0), lengths=(3, 4), itemsize=2)
    >>> rows.start, rows.nbytes, rows.counts
    (16, 24, ())
    >>> columns = segments((4, 1), offsets=(0, 1), lengths=(3, 2), itemsize=2)
    >>> columns.nbytes, list(columns.positions())
    (4, [2, 10, 18])

    Args:
        strides: Strides of the chunk, in elements; the largest first.
        offsets: Offsets of the slice in the chunk.
        lengths: Sizes of the slice; none of them 0.
        itemsize: Bytes of an element.
        gap: Maps the bytes of a read to the largest gap that is read along with it.
    """
    steps = [step * itemsize for step in strides]
    start = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    level, nbytes = len(steps), itemsize
    while level and (lengths[level - 1] == 1 or steps[level - 1] - nbytes <= gap(nbytes)):
        level -= 1
        nbytes += (lengths[level] - 1) * steps[level]
    counts = tuple(lengths[:level])
    outer = [step * (nbytes // itemsize) for step in c_strides(counts)]
    exact = is_contiguous(lengths[level:], strides[level:])
    laid = *outer, *strides[level:]
    return Segments(start, nbytes, counts, tuple(steps[:level]), laid, exact)


class CountedFile:
    """An open file, or bytes in memory as a stream, read by position.

    Args:
        stream: A seekable stream, opened by a checkpoint's file system.

    Attributes:
        nbytes: Bytes read so far.
        reads: Number of calls so far.
        size: Size of the file in bytes.
    """

    def __init__(self, stream: Any) -> None:
        self.size = int(stream.seek(0, io.SEEK_END))
        self.nbytes = 0
        self.reads = 0
        self._stream = stream
        # Descriptor and stream surely have the same bytes only for a plain file.
        plain = isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)
        self._fd = stream.fileno() if plain and hasattr(os, "preadv") else None
        self._held, self._held_at = memoryview(b""), 0

    @property
    def is_local(self) -> bool:
        """Whether this is a plain file of this machine."""
        return self._fd is not None

    def gap(self, run_nbytes: int) -> int:
        """Return how many bytes between two reads of this size are read along with them."""
        return cheap_gap(run_nbytes, LOCAL_GAP_NBYTES if self.is_local else REMOTE_GAP_NBYTES)

    def hold(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer``, and serve reads of these bytes from it until the next call."""
        self._held = memoryview(b"")
        self.read_into(buffer, position)
        self._held, self._held_at = buffer, position

    def held(self, position: int, nbytes: int) -> memoryview | None:
        """Return bytes of the held buffer; None unless it has all of them."""
        offset = position - self._held_at
        return (
            self._held[offset : offset + nbytes]
            if 0 <= offset < self._held.nbytes + 1 - nbytes
            else None
        )

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` with the bytes from ``position`` on.

        Raises:
            EOFError: The file ends before.
        """
        if self._held and (held := self.held(position, buffer.nbytes)) is not None:
            buffer[:] = held
            return
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
        """Fill ``buffer`` as ``read_into`` does; return the CRC-32, continued from ``checksum``."""
        # At a URL a request for each block would take longer.
        step = BLOCK_NBYTES if self.is_local else max(buffer.nbytes, 1)
        for offset in range(0, buffer.nbytes, step):
            if (
                not offset % ANNOUNCED_NBYTES
                and buffer.nbytes > step
                and hasattr(os, "posix_fadvise")
            ):
                nbytes = min(ANNOUNCED_NBYTES, buffer.nbytes - offset)  # no more than is read
                assert self._fd is not None
                os.posix_fadvise(self._fd, position + offset, nbytes, os.POSIX_FADV_WILLNEED)
            block = buffer[offset : offset + step]
            self.read_into(block, position + offset)
            checksum = crc32(block, checksum)
        return checksum

    def read_segments(self, buffer: memoryview, slices: Segments, chunk: int) -> None:
        """Fill ``buffer`` with the segments of a slice of a chunk, one after another.

        Args:
            buffer: The memory to fill.
            slices: Segments of the slice.
            chunk: First byte of the chunk.

        Raises:
            EOFError: The file ends before.
        """
        fd, nbytes, announced = None if self._held else self._fd, slices.nbytes, self.size
        distance = slices.steps[-1] if slices.steps else 0
        # The system takes reads with gaps for random ones, and would fetch page by page.
        if 0 < distance <= NEAR_NBYTES and hasattr(os, "posix_fadvise"):
            announced = 0
        start = complete = 0
        for position in slices.positions(chunk):
            into = buffer[start : start + nbytes]
            start += nbytes
            if fd is not None and position >= announced:
                announced = position + ANNOUNCED_NBYTES
                os.posix_fadvise(fd, position, ANNOUNCED_NBYTES, os.POSIX_FADV_WILLNEED)
            # This inlines read_into, since there may be a million segments.
            if fd is not None and os.preadv(fd, [into], position) == nbytes:
                complete += 1
            else:
                self.read_into(into, position)
        self.reads += complete
        self.nbytes += complete * nbytes


class ByteRange(NamedTuple):
    """A range of a file's bytes that is read like a file of its own: a record."""

    file: CountedFile
    start: int  # first byte in the file
    size: int  # size in bytes

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` with the bytes from ``position`` in the range on."""
        self.file.read_into(buffer, self.start + position)

    def read(self, position: int, nbytes: int) -> bytes:
        """Return the bytes from ``position`` on, up to the end of the range."""
        data = bytearray(max(min(nbytes, self.size - position), 0))
        self.read_into(memoryview(data), position)
        return bytes(data)

    def begins_with(self, start: bytes) -> bool:
        """Whether the first bytes are these; there must be as many."""
        held = self.file.held(self.start, len(start))
        return (self.read(0, len(start)) if held is None else bytes(held)) == start

    def stream(self) -> io.BufferedIOBase:
        """Return the bytes as a stream."""
        return io.BufferedReader(ByteRangeIO(self.size, self.read_into))


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """Return the memory of a tensor's elements; None where they are not contiguous host memory."""
    if not (
        type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
    ):
        return None
    # A tensor of one element is contiguous with any stride; a row of bytes needs stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


class _Mapping:
    """Gives numpy a mapping as writable memory, because torch warns of read-only memory."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (address, False),
        }


def read_only_mapping(descriptor: int, nbytes: int) -> torch.Tensor:
    """Return bytes of an open file, or zeros, that take no memory. Writing to them crashes.

    Writable memory, as ``UntypedStorage.from_file`` and ``numpy.zeros`` return it, counts towards a
    limit of the process (``RLIMIT_DATA``).

    Args:
        descriptor: Descriptor of the file; -1 for zeros.
        nbytes: Number of bytes, at least one.
    """
    mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
    return torch.from_numpy(np.asarray(_Mapping(mapping)))


def range_in_memory(data: bytes | memoryview) -> ByteRange:
    """Return bytes in memory as a range of a file."""
    return ByteRange(CountedFile(io.BytesIO(data)), 0, len(data))


class ByteRangeIO(io.RawIOBase):
    """A raw stream over a function that reads at a position.

    Args:
        nbytes: Size of the stream.
        read_into: Fills a buffer from a position on.
        most_nbytes: The most bytes that one call reads.
    """

    def __init__(
        self,
        nbytes: int,
        read_into: Callable[[memoryview, int], object],
        most_nbytes: int = sys.maxsize,
    ) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._read_into = read_into
        self._most_nbytes = most_nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # io.BytesIO raises this, too. A file raises OSError, which zipfile takes for a disk error.
        if whence == os.SEEK_SET and offset < 0:
            raise ValueError(f"there is no position {offset}")
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = min(max(self._nbytes - self._position, 0), self._most_nbytes)
        view = memoryview(buffer).cast("B")[:left]
        if view.nbytes:
            self._read_into(view, self._position)
        self._position += view.nbytes
        return view.nbytes
