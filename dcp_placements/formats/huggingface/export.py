"""A checkpoint as the files of a model: a Hugging Face directory of safetensors.

An interrupted export continues with the files that it has finished, if both its arguments and the
checkpoint's files are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_count,
    format_name,
    format_names,
    format_nbytes,
    raise_faults,
)
from dcp_placements.formats.huggingface.assembly import AssembledTensor, assemble
from dcp_placements.formats.huggingface.selection import select
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.offline.comparing import same_bits
from dcp_placements.offline.declared import Progress, Rename
from dcp_placements.offline.remote_output import AnyOutput, output_at
from dcp_placements.storage.file_reads import write_all
from dcp_placements.storage.safetensors_files import DTYPES, write_header

SHARD_NBYTES = 5 << 30
MEMORY_NBYTES = 1 << 30
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """The report of an export."""

    JSON: ClassVar[str] = "source out files tensors prefix unchanged left_out tied kept"

    source: str  # the checkpoint
    out: str  # the directory
    files: Mapping[str, int]  # bytes of tensors by file
    tensors: int  # number of tensors
    prefix: str  # the prefix that was removed from the names
    left_out: tuple[str, ...]  # keys of the checkpoint that were not exported, sorted
    # Names that ``rename`` left as they are; empty without a rename
    unchanged: tuple[str, ...] = ()
    # Names of tensors that are equal to another one and were not written
    tied: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # files of an earlier attempt
    directly: int = 0  # bytes copied from file to file without change

    def __str__(self) -> str:
        total = format_nbytes(sum(self.files.values()))
        files = format_count(len(self.files), "file")
        lines = [f"{self.tensors} tensors, {total}, in {files}: {self.out}"]
        if self.prefix:
            lines.append(f"    without the prefix {self.prefix}.")
        if self.unchanged:
            lines.append(f"    not renamed: {format_names(self.unchanged, 3)}")
        if self.tied:
            lines.append(f"    tied, written once: {', '.join(self.tied)}")
        if self.kept:
            lines.append(f"    kept of an earlier attempt: {format_names(self.kept, 3)}")
        if self.left_out:
            lines.append(f"    left out: {format_names(self.left_out, 3)}")
        return "\n".join(map(format_name, lines))


def export_safetensors(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    max_shard_size: int = SHARD_NBYTES,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    prefix: str | None = None,
    tied: Mapping[str, str] | None = None,
    optimizer: bool = False,
    exclude: Sequence[str] = (),
    memory: int = MEMORY_NBYTES,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write a checkpoint's tensors as a directory of safetensors files, as on the Hugging Face hub.

    Args:
        checkpoint: The checkpoint; its data is read piece by piece.
        out: The directory or URL, which must not exist.
        max_shard_size: Bytes of tensors in a file; a larger tensor has a file to itself.
        dtype: The dtype that floating-point tensors of 16 bits or more get, itself such a one; None
            changes none.
        rename: From the model's name of a tensor to the file's: to a name, or to a ``Rows`` or
            ``Parts`` (of an ``Unstack`` or a ``Split``), or a ``Row``. ``presets.hub`` has some.
        prefix: The prefix of the model's names in the checkpoint; keys without it are left out. By
            default that of the saved state dict: ``model`` of ``{"model": ..., "rng": ...}``.
        tied: Names in the file of tensors that share another one's elements, by the other name:
            ``{"lm_head.weight": "model.embed_tokens.weight"}``. They are left out if they are equal
            bit for bit.
        optimizer: Whether to write optimizer state too.
        exclude: Patterns of keys to leave out.
        memory: Bytes that data may take.
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` exists, or another process
            is writing it.
        PlacementError: The checkpoint is not whole; a name is missing or given twice; safetensors
            has no such dtype, or elements are not cast to ``dtype``; tied tensors differ. All of
            it before anything is written.
    """
    _check_dtype(dtype)
    source = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
    with output_at(out, source=source) as output:
        plan = _Plan(checkpoint, rename, dtype, prefix, optimizer, exclude, memory, tied or {})
        return _export_safetensors(output, plan, max_shard_size, memory, progress)


def _export_safetensors(
    output: AnyOutput, plan: _Plan, max_shard_size: int, memory: int, progress: Progress
) -> Exported:
    faults = [
        Fault(tensor.fqn, f"safetensors files have no dtype {tensor.dtype}")
        for tensor in plan.tensors
        if tensor.dtype not in DTYPES.values()
    ]
    raise_faults("the checkpoint cannot be exported", faults)
    shards = _shards(plan.tensors, max_shard_size)
    files = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in shards.items()}
    total = sum(files.values())
    identity = plan.identity({"shards": {k: len(v) for k, v in shards.items()}})
    output.check_room(total, identity)
    kept = []
    names = [*shards, INDEX] if len(shards) > 1 else list(shards)
    with output.directory(names, identity) as folder, BoxReader(plan.checkpoint) as reader:
        writer = _Writer(reader, memory, progress, total)
        for name, tensors in shards.items():
            if folder.has(name):
                kept.append(name)
                writer.advance(files[name])
            else:
                with folder.file(name, buffering=0) as stream:
                    writer.write_file(stream, tensors)
                    if len(shards) == 1:  # nothing is written after it
                        plan.check_unchanged()
        if len(shards) > 1:
            plan.check_unchanged()
            weights = {t.fqn: name for name, tensors in shards.items() for t in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            folder.write(INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return plan.exported(output.path, files, kept=tuple(kept), directly=writer.directly)


def _unchanged(
    tensors: Mapping[str, StoredTensor], assembled: Sequence[AssembledTensor]
) -> tuple[str, ...]:
    """Return the names of the tensors that a rename left as they are."""
    return tuple(
        tensor.fqn
        for tensor in assembled
        if tensor.fqn in tensors
        and all(block.source.fqn == tensors[tensor.fqn].fqn for block in tensor.blocks)
    )


def _unmatched_rename(names: Sequence[str]) -> Fault:
    return Fault(
        "rename=",
        f"matches none of the {len(names)} tensors",
        (
            f"names:       {format_names(names, 4)}",
            "likely:      the map of another model, or names with another prefix",
            "way out:     the map of this model; prefix=; or no rename=",
        ),
    )


class _Plan:
    """The tensors to write, checked before anything is written."""

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        rename: Rename | None,
        dtype: torch.dtype | None,
        prefix: str | None,
        optimizer: bool,
        exclude: Sequence[str],
        memory: int,
        tied: Mapping[str, str],
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        self.checkpoint = checkpoint
        self.selection = select(checkpoint, prefix=prefix, optimizer=optimizer, exclude=exclude)
        assembled, faults = assemble(self.selection.tensors, rename)
        self.unchanged: tuple[str, ...] = ()
        if rename is not None:
            self.unchanged = _unchanged(self.selection.tensors, assembled)
            if len(self.unchanged) == len(self.selection.tensors):
                faults.append(_unmatched_rename(self.unchanged))
        raise_faults("the checkpoint cannot be exported", faults)
        tensors = {tensor.fqn: _cast(tensor, dtype) for tensor in assembled}
        self.tied = dict(tied)
        files = {
            file
            for tensor in tensors.values()
            for block in tensor.blocks
            for file in block.source.files
        }
        self._versions = checkpoint.directory.versions(files)
        self._check_tied(tensors, memory)
        self.tensors = [tensor for fqn, tensor in tensors.items() if fqn not in self.tied]

    def _check_tied(self, tensors: Mapping[str, AssembledTensor], memory: int) -> None:
        faults = []
        with BoxReader(self.checkpoint) as reader:
            for name, whose in self.tied.items():
                missing = [fqn for fqn in (name, whose) if fqn not in tensors]
                if missing or whose in self.tied:
                    why = f"there is no {missing[0]}" if missing else f"{whose} is tied itself"
                    faults.append(Fault(name, f"cannot be tied to {whose}: {why}"))
                elif not _are_equal(tensors[name], tensors[whose], reader, memory):
                    faults.append(
                        Fault(
                            name,
                            f"is not {whose}: they differ",
                            ("way out:     export both, the model did not tie them",),
                        )
                    )
        raise_faults("tied tensors cannot be written once", faults)

    def check_unchanged(self) -> None:
        """Refuse what was read, if the checkpoint was overwritten since."""
        self.checkpoint.directory.check_versions(self._versions)

    def identity(self, more: Mapping[str, Any]) -> str:
        """Return a digest of this export and its source files."""
        digest = hashlib.sha256(json.dumps(more, sort_keys=True).encode())
        sources = {b.source.fqn: b.source for tensor in self.tensors for b in tensor.blocks}
        digest.update(_bytes(f"{sorted(self._versions.items())}\n"))
        digest.update(_bytes(self.checkpoint.path))
        for tensor in self.tensors:
            blocks = [(b.box, b.source.fqn, b.at, b.dims) for b in tensor.blocks]
            digest.update(_bytes(f"{tensor.fqn} {tensor.shape} {tensor.dtype} {blocks}\n"))
        for fqn, source in sources.items():
            chunks = [(chunk.box, chunk.file, chunk.start) for chunk in source.chunks]
            digest.update(_bytes(f"{fqn} {source.dtype} {chunks}\n"))
        return digest.hexdigest()

    def exported(self, out: str | Path, files: Mapping[str, int], **more: Any) -> Exported:
        """Return the report."""
        return Exported(
            source=self.checkpoint.path,
            out=str(out),
            files=files,
            tensors=len(self.tensors),
            prefix=self.selection.prefix,
            left_out=self.selection.left_out,
            unchanged=self.unchanged,
            tied=tuple(self.tied),
            **more,
        )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Writer:
    """Writes files of tensors; bytes that are in one run of a source file are copied directly."""

    def __init__(self, reader: BoxReader, memory: int, progress: Progress, total: int) -> None:
        self.directly = 0
        self._reader = reader
        # A slab takes four times its bytes: what is read, joined, cast, and written.
        self._limit = max((memory - _BESIDES_NBYTES) // 4, LEAST_NBYTES)
        self._progress = progress
        self._done = 0
        self._total = total

    def advance(self, nbytes: int) -> None:
        """Report progress."""
        self._done += nbytes
        self._progress(self._done, self._total)

    def write_file(self, stream: IO[bytes], tensors: Sequence[AssembledTensor]) -> None:
        """Write one safetensors file."""
        entries = [(tensor.fqn, tensor.dtype, tensor.shape) for tensor in tensors]
        write_all(stream, memoryview(write_header(entries, {"format": "pt"})))
        for tensor in tensors:
            self._write(tensor, stream)

    def _write(self, tensor: AssembledTensor, stream: IO[bytes]) -> None:
        runs = tensor.runs(self._reader)
        if runs is None:
            for slab in tensor.slabs(self._reader, self._limit):
                write_all(stream, slab.reshape(-1).view(torch.uint8).numpy().data)
                self.advance(slab.nbytes)
            return
        for file, start, nbytes in runs:
            self._reader.copy(file, start, nbytes, stream)
            self.advance(nbytes)
        self.directly += tensor.nbytes


_BESIDES_NBYTES = 64 << 20
LEAST_NBYTES = 1 << 20
"""The least size of a slab, whatever the memory."""


def _shards(tensors: Sequence[AssembledTensor], limit: int) -> dict[str, list[AssembledTensor]]:
    """Return the tensors of each file, those with the largest elements first."""
    shards: list[list[AssembledTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return {
        name: sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
        for name, shard in zip(names if count > 1 else ["model.safetensors"], shards, strict=True)
    }


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _CAST:
        raise PlacementError(
            f"dtype {dtype}: floating-point tensors are cast to {', '.join(map(str, _CAST))} only\n"
            "    why:         integers cut off fractions, and 8 bits need scales beside them\n"
            "    way out:     one of these; or quantize the exported model"
        )


def _cast(tensor: AssembledTensor, dtype: torch.dtype | None) -> AssembledTensor:
    return tensor if dtype is None or tensor.dtype not in _CAST else replace(tensor, dtype=dtype)


_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that are cast, and cast to; those of 8 bits have scales in other tensors."""


def _are_equal(
    one: AssembledTensor, other: AssembledTensor, reader: BoxReader, memory: int
) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    limit = max(memory // 8 // one.dtype.itemsize, 1)
    for piece in pieces(one.whole, limit):
        if not same_bits(one.read(reader, piece), other.read(reader, piece)):
            return False
    return True
