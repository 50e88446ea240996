"""Safetensors files as one DCP checkpoint of whole tensors, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dcp_placements.errors import PlacementError, format_names, format_nbytes, raise_faults
from dcp_placements.formats.huggingface.assembly import AssembledTensor, Rename, assemble
from dcp_placements.formats.huggingface.export import packed
from dcp_placements.formats.huggingface.selection import select
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint
from dcp_placements.offline.chunk_writer import Piece, Target, write_chunks
from dcp_placements.offline.remote_output import output_at

FILE_NBYTES = 4 << 30
MEMORY_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ImportedSafetensors:
    """The report of an import.

    Attributes:
        source: The directory of safetensors files.
        out: The checkpoint.
        keys: Of the checkpoint, in the order of the files' names.
        nbytes: Bytes written.
    """

    JSON: ClassVar[str] = "source out keys=tensors nbytes"

    source: str
    out: str
    keys: tuple[str, ...]
    nbytes: int

    @property
    def tensors(self) -> int:
        """How many were written."""
        return len(self.keys)

    def __str__(self) -> str:
        return (
            f"import of {self.tensors} tensors from {self.source}\n"
            f"    written:   {format_nbytes(self.nbytes)} to {self.out}"
        )


def import_safetensors(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    memory: int = MEMORY_NBYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImportedSafetensors:
    """Write safetensors files as a DCP checkpoint; no model is needed, and no process group.

    The tensors keep the files' names. A model in which they are stacked or fused loads the
    checkpoint like the files, with ``rename=`` of its planner.

    Args:
        source: A directory or URL of ``*.safetensors``, with or without an index.
        out: The checkpoint's directory or URL, which must not exist.
        rename: From the files' names to the checkpoint's: the opposite of that of
            ``export_safetensors``, with whose maps the planner of a stacked module loads.
        memory: Bytes that data may take.
        progress: Called with ``(done, total)`` bytes as files are written.

    Raises:
        CannotLook: There are no safetensors files, or they cannot be read; ``out`` exists, or
            another process is writing it.
        PlacementError: The files are not whole; a name is missing or given twice; ``rename``
            changes no name. All of it before anything is written.
    """
    with output_at(out) as output:
        checkpoint = Checkpoint(source)
        if checkpoint.format != SAFETENSORS:
            raise PlacementError(f"{checkpoint.path}: this is a DCP checkpoint already")
        selection = select(checkpoint, prefix="", optimizer=True)
        tensors, faults = assemble(selection.tensors, rename)
        raise_faults("the files cannot be imported", faults)
        names = [tensor.fqn for tensor in tensors]
        if rename is not None and set(names) == set(selection.tensors):
            raise PlacementError(_unchanged(names))
        with BoxReader(checkpoint) as reader:
            targets = {tensor.fqn: Target(tensor.shape, tensor.dtype) for tensor in tensors}
            # A piece takes more than its bytes: what is read, joined, and written.
            files = packed(_pieces(tensors, reader, max(memory // 4, 1 << 20)), FILE_NBYTES)
            write_chunks(output, targets, files, progress)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return ImportedSafetensors(checkpoint.path, str(output.path), tuple(targets), nbytes)


def _unchanged(names: list[str]) -> str:
    return (
        f"{format_names(names, 3)}: rename changes none of these names\n"
        "    declared:    from the files' names to the checkpoint's\n"
        "    likely:      a map of an export: those of presets.hub lead from a module's names to "
        "the files'\n"
        "    way out:     import without it, and give it to the planner that loads the "
        "checkpoint: PlacementLoadPlanner(rules, rename=presets.hub.qwen3_moe)\n"
        '                 Stack("mlp.experts.{}.w", 128) joins the files\' experts in the import'
    )


def _pieces(
    tensors: list[AssembledTensor], reader: BoxReader, limit_nbytes: int
) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of all tensors, each with its bytes."""
    for tensor in tensors:
        # An empty tensor has one chunk, without elements.
        boxes = list(pieces(tensor.whole, max(limit_nbytes // tensor.dtype.itemsize, 1))) or [
            tensor.whole
        ]
        for box in boxes:
            piece = Piece(tensor.fqn, box, partial(tensor.read, reader, box))
            yield piece, box.numel * tensor.dtype.itemsize
