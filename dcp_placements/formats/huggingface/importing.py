"""Safetensors files as one DCP checkpoint of whole tensors, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dcp_placements.errors import (
    PlacementError,
    format_count,
    format_names,
    format_nbytes,
    raise_faults,
)
from dcp_placements.formats.huggingface.assembly import (
    AssembledTensor,
    assemble,
    assemble_backwards,
)
from dcp_placements.formats.huggingface.selection import select
from dcp_placements.names.backwards import one_way_step, original_keys
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

    JSON: ClassVar[str] = "source out keys=tensors nbytes backwards"

    source: str  # the directory of safetensors files
    out: str  # the checkpoint
    keys: tuple[str, ...]  # of the checkpoint, in the order of the files' names
    nbytes: int  # bytes written
    backwards: bool = False  # whether the rename was that of an export, and was read backwards

    @property
    def tensors(self) -> int:
        """How many were written."""
        return len(self.keys)

    def __str__(self) -> str:
        text = (
            f"import of {format_count(self.tensors, 'tensor')} from {self.source}\n"
            f"    written:   {format_nbytes(self.nbytes)} to {self.out}"
        )
        return text + (
            "\n    rename:    that of an export, read backwards" if self.backwards else ""
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
    loads such a checkpoint like the files, with ``rename=`` of its planner.

    Args:
        source: A directory or URL of ``*.safetensors``, with or without an index.
        out: The checkpoint's directory or URL, which must not exist.
        rename: From the files' names to the checkpoint's. A rename that cannot be applied to them
            is taken for that of ``export_safetensors`` and read backwards: ``presets.hub.mixtral``
            makes the stacked and fused tensors of the module.
        memory: Bytes that data may take.
        progress: Called with ``(done, total)`` bytes as files are written.

    Raises:
        CannotLook: There are no safetensors files, or they cannot be read; ``out`` exists, or
            another process is writing it. The files were overwritten meanwhile; nothing is
            written then.
        PlacementError: The files are not whole; a name is missing or given twice; ``rename``
            changes no name in either direction. All of it before anything is written.
    """
    with output_at(out, source=source) as output:
        checkpoint = Checkpoint(source)
        if checkpoint.format != SAFETENSORS:
            raise PlacementError(f"{checkpoint.path}: this is a DCP checkpoint already")
        selection = select(checkpoint, prefix="", optimizer=True)
        directory = checkpoint.directory
        check = partial(directory.check_versions, directory.versions(checkpoint.files))
        tensors, backwards = _renamed(rename, selection.tensors)
        with BoxReader(checkpoint) as reader:
            targets = {tensor.fqn: Target(tensor.shape, tensor.dtype) for tensor in tensors}
            # A piece takes more than its bytes: what is read, joined, and written.
            parts = _pieces(tensors, reader, max(memory // 4, 1 << 20))
            write_chunks(output, targets, parts, progress, check)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        out = str(output.path)
        return ImportedSafetensors(checkpoint.path, out, tuple(targets), nbytes, backwards)


def _renamed(
    rename: Rename | None, stored: Mapping[str, StoredTensor]
) -> tuple[list[AssembledTensor], bool]:
    """Return the tensors that a rename makes of the stored ones; whether it was read backwards.

    Raises:
        PlacementError: It makes none, in either direction.
    """
    tensors, faults = assemble(stored, rename)
    if rename is None or (not faults and {tensor.fqn for tensor in tensors} != stored.keys()):
        raise_faults("the files cannot be imported", faults)
        return tensors, False
    step = one_way_step(rename)
    if step is None:
        originals, unnamed = original_keys(rename, stored)
        if not unnamed and originals.keys() != stored.keys():
            tensors, faults = assemble_backwards(stored, originals)
            raise_faults("the files are not those of an export by this rename", faults)
            return tensors, True
        faults = faults or unnamed
    backwards = "" if step is not None else ", nor is this the rename of their export"
    raise_faults(f"the files cannot be imported{backwards}", faults)
    likely = "the rename of another model, or a prefix that the names lack"
    if step is not None:
        likely = f"the rename of an export. {step!r} cannot be applied backwards"
    raise PlacementError(
        f"{format_names(list(stored), 3)}: rename changes none of these names\n"
        "    declared:    from the files' names to the checkpoint's; or that of an export\n"
        f"    likely:      {likely}\n"
        "    way out:     a rename of Unstack, Split and Replace that export takes, as presets.hub "
        "has them; a function of the files' names; or no rename here, and this one for the planner "
        "that loads the checkpoint"
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
