"""The file part of an index: compressed blocks, a directory of them, and a trailer at the end.

Everything is checked before it is used: each block by a checksum in the directory, the directory by
one in the trailer. The beginning of the pickle repeats the trailer's, so that an index behind the
pickle of another save is noticed.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import IO

import xxhash

from dcp_placements.storage.index.columns import ColumnReader, ColumnWriter, IndexDamage
from dcp_placements.storage.records.fast_zlib import compress

Opener = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens the file, again and again."""

MAGIC = b"dcp_placements/3"
_TRAILER = struct.Struct("<QQQ16s16s")
_TAIL_NBYTES = 1 << 16
"""Read at first, from the end."""

_WHOLE_NBYTES = 1 << 20
"""An index up to this size is read at once; of a larger one the blocks that are needed."""

_RATIO = 1100
"""A compressed block is at most so many times smaller than it was; that is zlib's own bound."""

_TOTAL_RATIO, _SPARE_NBYTES = 256, 1 << 26
"""All blocks inflate to at most so many times the file, and some more."""

_DIRECTORY_NBYTES = 1 << 28


class BlockWriter:
    """Collects the blocks of an index."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._sizes: list[int] = []

    def add(self, data: bytes) -> None:
        """Add a block."""
        self._blocks.append(compress(data))
        self._sizes.append(len(data))

    def finish(self, directory: bytes) -> tuple[list[bytes], Callable[[int], bytes], bytes]:
        """Return the blocks, what makes their end of the pickle's length, and a digest.

        Args:
            directory: What tells which blocks have which parts.
        """
        columns = ColumnWriter()
        columns.ints([len(block) for block in self._blocks])
        columns.ints(self._sizes)
        columns.data(b"".join(xxhash.xxh3_64_digest(block) for block in self._blocks))
        columns.data(directory)
        packed = columns.packed()
        stored = compress(packed)
        digest = xxhash.xxh3_128_digest(stored)

        def end(pickle_nbytes: int) -> bytes:
            return stored + _TRAILER.pack(pickle_nbytes, len(stored), len(packed), digest, MAGIC)

        return self._blocks, end, digest


class Blocks:
    """The parts of an index in a file.

    Args:
        opener: Opens the file.

    Attributes:
        pickle_nbytes: Bytes of the pickle that stands before the blocks.
        digest: Of the directory, which has the checksums of all blocks.
        directory: As it was given to ``BlockWriter.finish``.
    """

    def __init__(
        self, opener: Opener, trailer: tuple[int, int, int, bytes], size: int, tail: bytes
    ) -> None:
        self._opener = opener
        self.pickle_nbytes, stored_nbytes, nbytes, self.digest = trailer
        self._tail, self._tail_start = tail, size - len(tail)
        end = size - _TRAILER.size
        if stored_nbytes > end or self.pickle_nbytes > end - stored_nbytes:
            raise IndexDamage("its directory is beyond its end")
        stored = self._read(end - stored_nbytes, stored_nbytes)
        if xxhash.xxh3_128_digest(stored) != self.digest:
            raise IndexDamage("its directory is not what was written")
        columns = ColumnReader(_inflated(stored, min(nbytes, _DIRECTORY_NBYTES)))
        self._lengths = columns.ints(most=size, below=size).tolist()
        self._sizes = columns.ints(len(self._lengths), below=1 << 40).tolist()
        self._checksums = columns.data()
        if len(self._checksums) != 8 * len(self._lengths):
            raise IndexDamage("it has other blocks than checksums")
        *self._starts, reached = accumulate(self._lengths, initial=self.pickle_nbytes)
        if reached != end - stored_nbytes:
            raise IndexDamage("its blocks do not fill the file")
        if sum(self._sizes) > _TOTAL_RATIO * size + _SPARE_NBYTES:
            raise IndexDamage("it inflates to far more than its file")
        self.directory = ColumnReader(columns.data())
        self._inflated: dict[int, bytes] = {}
        if self._tail_start <= self.pickle_nbytes:
            self.check()

    def check(self) -> None:
        """Check all blocks, without inflating them.

        Raises:
            IndexDamage: One is not what was written.
        """
        for number in range(len(self._starts)):
            self._stored(number)

    def columns(self, number: int) -> ColumnReader:
        """Return a reader of a block.

        Raises:
            IndexDamage: The block is not what was written; the file may be another one by now.
        """
        return ColumnReader(self.block(number))

    def block(self, number: int) -> bytes:
        """Return a block, as ``columns`` does."""
        data = self._inflated.get(number)
        if data is None:
            if not 0 <= number < len(self._starts):
                raise IndexDamage("a block that is not there")
            data = self._inflated[number] = _inflated(self._stored(number), self._sizes[number])
        return data

    def _stored(self, number: int) -> bytes:
        stored = self._read(self._starts[number], self._lengths[number])
        if xxhash.xxh3_64_digest(stored) != self._checksums[8 * number : 8 * number + 8]:
            raise IndexDamage(f"block {number} is not what was written")
        return stored

    def _read(self, start: int, nbytes: int) -> bytes:
        if start >= self._tail_start:
            start -= self._tail_start
            return self._tail[start : start + nbytes]
        with self._opener() as stream:
            stream.seek(start)
            return _exactly(stream, nbytes)


def blocks_of(opener: Opener, stream: IO[bytes]) -> Blocks | None:
    """Return the index of a file; None where the file does not end with one.

    Args:
        opener: Opens the file.
        stream: The file, open.

    Raises:
        IndexDamage: It ends with one that is damaged.
    """
    if not stream.seekable():
        return None
    size = stream.seek(0, io.SEEK_END)
    tail = _last(stream, size, min(_TAIL_NBYTES, size))
    if len(tail) < _TRAILER.size:
        return None
    *trailer, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
    if magic != MAGIC:
        return None
    nbytes = size - trailer[0]
    if len(tail) < nbytes <= _WHOLE_NBYTES:
        tail = _last(stream, size, nbytes)
    return Blocks(opener, tuple(trailer), size, tail)


def _last(stream: IO[bytes], size: int, nbytes: int) -> bytes:
    stream.seek(size - nbytes)
    return _exactly(stream, nbytes)


def _exactly(stream: IO[bytes], nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) != nbytes:
        raise IndexDamage("the file is cut off")
    return data


def _inflated(stored: bytes, nbytes: int) -> bytes:
    if nbytes > _RATIO * len(stored) + _RATIO:
        raise IndexDamage(f"{len(stored):,} bytes that are to inflate to {nbytes:,}")
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(stored, nbytes + 1)
    except zlib.error as error:
        raise IndexDamage(str(error)) from error
    if len(data) != nbytes or not inflating.eof:
        raise IndexDamage("a block inflates to another size than it had")
    return data
