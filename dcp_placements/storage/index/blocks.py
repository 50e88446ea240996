"""The file part of an index: compressed blocks, a directory of them, and a trailer at the end.

Everything is read at once, and checked before it is used: each block by a checksum in the
directory, the directory by one in the trailer. The beginning of the pickle repeats the trailer's,
so that an index behind the pickle of another save is noticed.
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

from dcp_placements.storage.fast_zlib import compress
from dcp_placements.storage.index.columns import ColumnReader, ColumnWriter, IndexDamage

Opener = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens the file, again and again."""

MAGIC = b"dcp_placements/3"
_TRAILER = struct.Struct("<QQQ16s16s")
_TAIL_NBYTES = 1 << 16
"""Read at first, from the end; most indexes are no larger."""

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
        data: The end of the file, from the first block on.
        pickle_nbytes: Bytes of the pickle that stands before the blocks.

    Attributes:
        digest: Of the directory, which has the checksums of all blocks.
        directory: As it was given to ``BlockWriter.finish``.

    Raises:
        IndexDamage: Something is not what was written.
    """

    def __init__(self, data: bytes, pickle_nbytes: int) -> None:
        _, stored_nbytes, nbytes, self.digest, _ = _TRAILER.unpack(data[-_TRAILER.size :])
        end = len(data) - _TRAILER.size
        if stored_nbytes > end:
            raise IndexDamage("its directory is beyond its end")
        stored = data[end - stored_nbytes : end]
        if xxhash.xxh3_128_digest(stored) != self.digest:
            raise IndexDamage("its directory is not what was written")
        columns = ColumnReader(_inflated(stored, min(nbytes, _DIRECTORY_NBYTES)))
        size = pickle_nbytes + len(data)
        lengths = columns.ints(most=size, below=size).tolist()
        self._sizes = columns.ints(len(lengths), below=1 << 40).tolist()
        checksums = columns.data()
        if len(checksums) != 8 * len(lengths):
            raise IndexDamage("it has other blocks than checksums")
        *starts, reached = accumulate(lengths, initial=0)
        if reached != end - stored_nbytes:
            raise IndexDamage("its blocks do not fill the file")
        if sum(self._sizes) > _TOTAL_RATIO * size + _SPARE_NBYTES:
            raise IndexDamage("it inflates to far more than its file")
        self._stored = [data[at : at + n] for at, n in zip(starts, lengths, strict=True)]
        for number, block in enumerate(self._stored):
            if xxhash.xxh3_64_digest(block) != checksums[8 * number : 8 * number + 8]:
                raise IndexDamage(f"block {number} is not what was written")
        self.directory = ColumnReader(columns.data())

    def columns(self, number: int) -> ColumnReader:
        """Return a reader of a block."""
        return ColumnReader(self.block(number))

    def block(self, number: int) -> bytes:
        """Return a block."""
        if number >= len(self._stored):
            raise IndexDamage("a block that is not there")
        return _inflated(self._stored[number], self._sizes[number])


def blocks_of(stream: IO[bytes]) -> Blocks | None:
    """Return the index of a file; None where the file does not end with one.

    Raises:
        IndexDamage: It ends with one that is damaged.
    """
    size = stream.seek(0, io.SEEK_END)
    tail = _last(stream, size, min(_TAIL_NBYTES, size))
    if len(tail) < _TRAILER.size:
        return None
    pickle_nbytes, *_, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
    if magic != MAGIC:
        return None
    nbytes = size - pickle_nbytes
    if nbytes < _TRAILER.size:
        raise IndexDamage("its directory is beyond its end")
    return Blocks(
        tail[-nbytes:] if nbytes <= len(tail) else _last(stream, size, nbytes), pickle_nbytes
    )


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
