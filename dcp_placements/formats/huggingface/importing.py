"""Safetensors files as one DCP checkpoint of whole tensors, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_count,
    format_names,
    format_nbytes,
    raise_faults,
)
from dcp_placements.formats.huggingface.assembly import AssembledTensor, assemble
from dcp_placements.formats.huggingface.selection import select
from dcp_placements.names.renames import Unstack, number_in, steps
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, StoredTensor
from dcp_placements.offline.chunk_writer import Piece, Target, write_chunks
from dcp_placements.offline.declared import Progress, Rename
from dcp_placements.offline.remote_output import output_at

FILE_NBYTES = 4 << 30
MEMORY_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ImportedSafetensors:
    """The report of an import."""

    JSON: ClassVar[str] = "source out keys=tensors nbytes"

    source: str  # the directory of safetensors files
    out: str  # the checkpoint
    keys: tuple[str, ...]  # of the checkpoint, in the order of the files' names
    nbytes: int  # bytes written

    @property
    def tensors(self) -> int:
        """How many were written."""
        return len(self.keys)

    def __str__(self) -> str:
        return (
            f"import of {format_count(self.tensors, 'tensor')} from {self.source}\n"
            f"    written:   {format_nbytes(self.nbytes)} to {self.out}"
        )


def import_safetensors(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    memory: int = MEMORY_NBYTES,
    progress: Progress = lambda done, total: None,
) -> ImportedSafetensors:
    """Write safetensors files as a DCP checkpoint; no model is needed, and no process group.

    Without a rename the tensors keep the files' names. A model in which they are stacked or fused
    loads such a checkpoint like the files, with ``rename=`` of its planner: that of its export.

    Args:
        source: A directory or URL of ``*.safetensors``, with or without an index.
        out: The checkpoint's directory or URL, which must not exist.
        rename: From the files' names to the checkpoint's, such as a ``Stack``. That of an export
            leads the other way, and is refused.
        memory: Bytes that data may take.
        progress: Called with ``(done, total)`` bytes as files are written.

    Raises:
        CannotLook: There are no safetensors files, or they cannot be read; ``out`` exists, or
            another process is writing it. The files were overwritten meanwhile; nothing is
            written then.
        PlacementError: The files are not whole; a name is missing or given twice; ``rename``
            changes no name, or unstacks names that have a number already. All of it before
            anything is written.
    """
    with output_at(out, source=source) as output:
        checkpoint = Checkpoint(source)
        if checkpoint.format != SAFETENSORS:
            raise PlacementError(f"{checkpoint.path}: this is a DCP checkpoint already")
        selection = select(checkpoint, prefix="", optimizer=True)
        directory = checkpoint.directory
        check = partial(directory.check_versions, directory.versions(checkpoint.files))
        tensors = _renamed(rename, selection.tensors)
        with BoxReader(checkpoint) as reader:
            targets = {tensor.fqn: Target(tensor.shape, tensor.dtype) for tensor in tensors}
            # A piece takes more than its bytes: what is read, joined, and written.
            parts = _pieces(tensors, reader, max(memory // 4, 1 << 20))
            write_chunks(output, targets, parts, progress, check)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        out = str(output.path)
        return ImportedSafetensors(checkpoint.path, out, tuple(targets), nbytes)


def _renamed(rename: Rename | None, stored: Mapping[str, StoredTensor]) -> list[AssembledTensor]:
    """Return the tensors that a rename makes of the stored ones.

    Raises:
        PlacementError: It makes none, or has renamed them already.
    """
    tensors, faults = assemble(stored, rename)
    for step in [one.rename for one in steps(rename) if isinstance(one.rename, Unstack)]:
        way_out = "way out:     no rename, if the names are those that are wanted"
        faults += [
            Fault(name, f"has a number already where {step!r} puts one", (way_out,))
            for name in stored
            if number_in(step.pattern, name) and step(name) != name
        ]
    raise_faults("the files cannot be imported", faults)
    if rename is None or {tensor.fqn for tensor in tensors} != stored.keys():
        return tensors
    raise PlacementError(
        f"{format_names(list(stored), 3)}: rename changes none of these names\n"
        "    declared:    from the files' names to the checkpoint's\n"
        "    likely:      the rename of an export, which leads the other way; that of another "
        "model; or a prefix that the names lack\n"
        "    way out:     a function of the files' names; or no rename here, and that of the "
        "export for the planner that loads the checkpoint"
    )


def _pieces(
    tensors: list[AssembledTensor], reader: BoxReader, limit_nbytes: int
) -> Iterator[Piece]:
    """Yield the pieces of all tensors, for files of up to ``FILE_NBYTES``."""
    file = filled = 0
    for tensor in tensors:
        itemsize = tensor.dtype.itemsize
        for box in pieces(tensor.whole, max(limit_nbytes // itemsize, 1)):
            nbytes = box.numel * itemsize
            if filled and filled + nbytes > FILE_NBYTES:
                file, filled = file + 1, 0
            filled += nbytes
            yield Piece(tensor.fqn, box, file, nbytes, partial(tensor.read, reader, box))
