"""What every conversion ends with: files written block by block, an output, a report.

The files of an output follow from its identity: a digest of the source's files, by their versions,
and of all that is written. So an interrupted conversion of the same source by the same arguments
continues with the files that it has finished, and its bytes are those of one that was not.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, ClassVar, Protocol

import torch

from dcp_placements.convert.sources import LeftOut, Source
from dcp_placements.errors import (
    CannotLook,
    format_count,
    format_name,
    format_names,
    format_nbytes,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.assembly import AssembledTensor
from dcp_placements.offline.box_reads import pieces
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.output import AnyOutput

LEAST_NBYTES = 1 << 20
"""The least size of a slab, whatever the memory."""

_BESIDES_NBYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written; or what would be, of a conversion that only plans."""

    JSON: ClassVar[str] = (
        "source out is_written files tensors objects nbytes prefix unchanged left_out tied kept "
        "beside accounted notes"
    )

    source: str  # the directory or URL
    out: str  # likewise
    is_written: bool
    files: Mapping[str, int]  # bytes by file: of a checkpoint those of the file, else of tensors
    keys: tuple[str, ...]  # of the tensors, in order
    nbytes: int  # bytes of the tensors' elements
    kept: tuple[str, ...]  # files of an earlier attempt
    beside: tuple[LeftOut, ...]  # what ranks' files have besides, with the reasons
    # Bytes of ranks' files by what became of them, beside what is written
    accounted: Mapping[str, int]
    notes: tuple[str, ...]  # what to know besides
    objects: int = 0  # number of keys that are no tensors
    prefix: str = ""  # the prefix that was removed from the names
    left_out: tuple[str, ...] = ()  # what the source has besides
    # Names that ``rename`` left as they are; empty without a rename
    unchanged: tuple[str, ...] = ()
    # Names of tensors that are equal to another one and were not written
    tied: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """How many there are."""
        return len(self.keys)

    def __str__(self) -> str:
        count, files = format_count(self.tensors, "tensor"), format_count(len(self.files), "file")
        verb = "" if self.is_written else "would be written: "
        lines = [f"{verb}{count}, {format_nbytes(self.nbytes)}, in {files}: {self.out}"]
        if self.prefix:
            lines.append(f"    without the prefix {self.prefix}.")
        lines += [f"    {what}: {format_nbytes(n)}" for what, n in self.accounted.items()]
        listed = {
            "not renamed": self.unchanged,
            "tied, written once": self.tied,
            "kept of an earlier attempt": self.kept,
            "left out": self.left_out,
        }
        lines += [
            f"    {what}: {format_names(names, 3)}" for what, names in listed.items() if names
        ]
        for why in dict.fromkeys(part.why for part in self.beside):
            parts = [part for part in self.beside if part.why == why]
            nbytes = format_nbytes(sum(part.nbytes for part in parts))
            names = format_names([part.what for part in parts], 4)
            lines.append(f"    left out: {names} ({nbytes}): {why}")
        lines += [f"    note: {note}" for note in self.notes]
        return "\n".join(map(format_name, lines))


class Writer(Protocol):
    """Writes a format.

    Attributes:
        tensors: That are written, by key.
        identity: Of the output: as ``identity_of`` returns it.
        files: Bytes by file, in the order of writing.
        last: The file that completes the output; its index if it is none of these.
    """

    tensors: dict[str, AssembledTensor]
    identity: str
    files: dict[str, int]
    last: str

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one of the files, or the last one."""


class Elements(AbstractContextManager["Elements"]):
    """Gives the elements of boxes of tensors, in blocks; the next is read while one is written.

    Records that are read whole are compared with their CRC-32 on the way.

    Args:
        reader: Of the source.
        memory: Bytes that data may take.
        progress: Called with the bytes written, and those to write.
        total: Bytes to write.
    """

    def __init__(self, reader: Any, memory: int, progress: Progress, total: int) -> None:
        self._reader = reader
        # A slab takes four times its bytes: what is read, joined, cast, and written.
        self._limit = max((memory - _BESIDES_NBYTES) // 4, LEAST_NBYTES)
        self._progress = progress
        self._total = total
        self._done = 0
        self._pool = ThreadPoolExecutor(1)

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown()

    def advance(self, nbytes: int) -> None:
        """Report progress."""
        self._done += nbytes
        self._progress(self._done, self._total)

    def of(self, tensor: AssembledTensor, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of a box in C order."""
        blocks = self._blocks(tensor, box)
        block = next(blocks, None)
        while block is not None:
            following = self._pool.submit(next, blocks, None)
            yield block
            self.advance(block.nbytes)
            block = following.result()

    def _blocks(self, tensor: AssembledTensor, box: Box) -> Iterator[memoryview]:
        if not box.numel:
            return
        runs = tensor.runs(self._reader, box)
        if runs is None:
            sources = [block.source.dtype.itemsize for block in tensor.blocks]
            for piece in pieces(box, self._limit // max([*sources, tensor.dtype.itemsize])):
                slab = tensor.read(self._reader, piece)
                yield slab.reshape(-1).view(torch.uint8).numpy().data
            return
        for run in runs:
            yield from self._reader.blocks(run)


def identity_of(
    source: Source, tensors: Mapping[str, AssembledTensor], described: Iterable[object]
) -> str:
    """Return a digest of the source's files, by their versions, and of all that is written.

    Args:
        source: Of the tensors.
        tensors: That are written.
        described: What decides the bytes of the files beside the tensors.
    """
    digest = hashlib.sha256(json.dumps(sorted(source.versions.items())).encode())
    blocks = (
        (t.fqn, t.shape, t.dtype, [(b.box, b.source.fqn, b.at, b.dims) for b in t.blocks])
        for t in tensors.values()
    )
    of_all = (source.path, torch.__version__)
    for line in chain(of_all, source.described(), blocks, described):
        digest.update(f"{line}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def write_output(
    output: AnyOutput,
    source: Source,
    writer: Writer,
    memory: int,
    dry_run: bool,
    progress: Progress,
) -> Converted:
    """Write tensors of a source, whose versions were asked for before anything of it was read.

    Args:
        output: Where.
        source: Of the tensors.
        writer: Has the tensors.
        memory: Bytes that data may take.
        dry_run: Whether to plan only.
        progress: Called as files are written.
    """
    kept = []
    total = sum(writer.files.values())
    # The last one comes last, whether it is among the others or not.
    names = [*[name for name in writer.files if name != writer.last], writer.last]
    with output, _room_for(output, total):
        if not dry_run:
            with (
                output.directory(names, writer.identity),
                source.reader() as reader,
                Elements(reader, memory, progress, total) as elements,
            ):
                for name in names:
                    if name in writer.files and output.has(name):
                        kept.append(name)
                        elements.advance(writer.files[name])
                        continue
                    with output.file(name) as stream:
                        writer.write(name, stream, elements)
                        if name == writer.last:
                            source.directory.check_versions(source.versions)
    return Converted(
        source=source.path,
        out=str(output.path),
        is_written=not dry_run,
        files=dict(writer.files),
        keys=tuple(writer.tensors),
        nbytes=sum(tensor.nbytes for tensor in writer.tensors.values()),
        kept=tuple(kept),
        beside=tuple(source.left_out),
        accounted=source.accounted,
        notes=tuple(source.notes),
    )


@contextmanager
def _room_for(output: AnyOutput, nbytes: int) -> Iterator[None]:
    """Say what is needed, where a disk, a quota, or a limit on files ends the block."""
    output.check_room(nbytes)
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise CannotLook(
            f"{output.path}: {error}\n"
            f"    needed:      {format_nbytes(nbytes)} in all, and room for metadata\n"
            "    way out:     make room, and give the same command again, which goes on from here"
        ) from error
