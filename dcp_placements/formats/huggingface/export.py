"""A checkpoint as a model's own files: safetensors as Hugging Face has them, or one torch file.

What an attempt that was stopped has written is kept, if it was the same export of the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from dcp_placements.errors import Fault, format_name, format_names, format_nbytes, raise_faults
from dcp_placements.formats.huggingface.assembly import Made, Rename, assemble
from dcp_placements.formats.huggingface.selection import select
from dcp_placements.offline.box_reads import BoxReader, pieces
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.output import Output, is_own_file, whole_file, write_file
from dcp_placements.storage.file_reads import write_all
from dcp_placements.storage.safetensors_files import DTYPES, write_header

SHARD_NBYTES = 5 << 30
MEMORY_NBYTES = 1 << 30
INDEX = "model.safetensors.index.json"

Progress = Callable[[int, int], None]
"""``(done, total)`` in bytes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to.

    Attributes:
        source: The checkpoint.
        out: What was written.
        files: Bytes of tensors by file.
        tensors: How many.
        prefix: What stood before the names.
        left_out: Keys of the checkpoint that are not in it, sorted.
        tied: Names that were found equal to another one's and not written.
        kept: Files of an earlier attempt.
        directly: Bytes that were copied from file to file as they were.
    """

    JSON: ClassVar[str] = "source out files tensors prefix left_out tied kept"

    source: str
    out: str
    files: Mapping[str, int]
    tensors: int
    prefix: str
    left_out: tuple[str, ...]
    tied: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    directly: int = 0

    def __str__(self) -> str:
        total = format_nbytes(sum(self.files.values()))
        files = f"{len(self.files)} file{'' if len(self.files) == 1 else 's'}"
        lines = [f"{self.tensors} tensors, {total}, in {files}: {self.out}"]
        if self.prefix:
            lines.append(f"    without the prefix {self.prefix}.")
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
    """Write a checkpoint's tensors as a directory of safetensors files, as Hugging Face has it.

    Args:
        checkpoint: The checkpoint; its data is read piece by piece.
        out: The directory, which must not be there.
        max_shard_size: Bytes of tensors in a file; a larger tensor has a file to itself.
        dtype: What floating-point tensors of 16 bits or more become; None leaves all as they are.
        rename: The model's name of a tensor to the file's: a name, or a ``Rows`` or ``Parts`` (of
            an ``Unstack`` or a ``Split``), or a ``Row``. ``presets.hub`` has some.
        prefix: What stands before the model's names in the checkpoint; keys without it are left
            out. By default what the checkpoint says: ``model`` of ``{"model": ...}``.
        tied: Names in the file of tensors that are others', by whose they are: ``{"lm_head.weight":
            "model.embed_tokens.weight"}``. They are left out, when they are equal bit for bit.
        optimizer: Whether to write optimizer state too.
        exclude: Patterns of keys to leave out.
        memory: Bytes that data may take.
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` is there, or being
            written.
        PlacementError: The checkpoint is not whole; a name is missing or given
            twice; a dtype that safetensors does not know; tied tensors that differ. All of it is
            told before anything is written.
    """
    with Output(out) as output:
        plan = _Plan(checkpoint, rename, dtype, prefix, optimizer, exclude, memory, tied or {})
        return _export_safetensors(output, plan, max_shard_size, memory, progress)


def _export_safetensors(
    output: Output, plan: _Plan, max_shard_size: int, memory: int, progress: Progress
) -> Exported:
    faults = [
        Fault(made.fqn, f"safetensors files know no {made.dtype}")
        for made in plan.made
        if made.dtype not in DTYPES.values()
    ]
    raise_faults("the checkpoint cannot be exported", faults)
    shards = _shards(plan.made, max_shard_size)
    identity = plan.identity({"shards": {k: len(v) for k, v in shards.items()}})
    total = sum(made.nbytes for made in plan.made)
    done, kept = 0, []
    with output.directory(identity) as half, BoxReader(plan.checkpoint) as reader:
        writer = _Writer(reader, memory)
        for name, tensors in shards.items():
            nbytes = sum(made.nbytes for made in tensors)
            path = half / name
            if is_own_file(path):
                kept.append(name)
            else:
                _write_shard(path, tensors, writer, partial(_step, progress, done, total))
            done += nbytes
            progress(done, total)
        if len(shards) > 1:
            weights = {made.fqn: name for name, tensors in shards.items() for made in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            write_file(half / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    files = {name: sum(made.nbytes for made in tensors) for name, tensors in shards.items()}
    return plan.exported(output.path, files, kept=tuple(kept), directly=writer.directly)


def export_torch(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    prefix: str | None = None,
    tied: Mapping[str, str] | None = None,
    optimizer: bool = False,
    exclude: Sequence[str] = (),
) -> Exported:
    """Write a checkpoint's tensors as one ``torch.save`` file, a flat dict; all are in memory.

    Args:
        checkpoint: The checkpoint.
        out: The file, which must not be there.
        dtype: As in ``export_safetensors``.
        rename: Likewise.
        prefix: Likewise.
        tied: Likewise, but such a name is in the file, and shares the other's elements.
        optimizer: As in ``export_safetensors``.
        exclude: Likewise.

    Raises:
        CannotLook: As ``export_safetensors``.
        PlacementError: Likewise, any dtype being known.
    """
    with Output(out) as output:
        plan = _Plan(
            checkpoint, rename, dtype, prefix, optimizer, exclude, MEMORY_NBYTES, tied or {}
        )
        with BoxReader(plan.checkpoint) as reader:
            state_dict = {made.fqn: made.read(reader, made.whole) for made in plan.made}
        for name, whose in plan.tied.items():
            state_dict[name] = state_dict[whose]
        with output.file() as stream:
            torch.save(state_dict, stream)
    files = {output.path.name: sum(made.nbytes for made in plan.made)}
    return plan.exported(output.path, files)


class _Plan:
    """What is to be written, proved to be possible before anything is."""

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
        self.selection = select(
            self.checkpoint, prefix=prefix, optimizer=optimizer, exclude=exclude
        )
        made, faults = assemble(self.selection.tensors, rename)
        raise_faults("the checkpoint cannot be exported", faults)
        made = [_cast(one, dtype) for one in made]
        self.tied = dict(tied)
        self._check_tied({one.fqn: one for one in made}, memory)
        self.made = [one for one in made if one.fqn not in self.tied]

    def _check_tied(self, made: Mapping[str, Made], memory: int) -> None:
        faults = []
        with BoxReader(self.checkpoint) as reader:
            for name, whose in self.tied.items():
                missing = [one for one in (name, whose) if one not in made]
                if missing or whose in self.tied:
                    told = f"there is no {missing[0]}" if missing else f"{whose} is tied itself"
                    faults.append(Fault(name, f"cannot be tied to {whose}: {told}"))
                elif not _are_equal(made[name], made[whose], reader, memory):
                    faults.append(
                        Fault(
                            name,
                            f"is not {whose}: they differ",
                            ("way out:     export both, the model did not tie them",),
                        )
                    )
        raise_faults("tied tensors cannot be written once", faults)

    def identity(self, more: Mapping[str, Any]) -> str | None:
        """Return what tells this export from others; None where the source's age is not known."""
        digest = hashlib.sha256(json.dumps(more, sort_keys=True).encode())
        directory = self.checkpoint.directory
        sources = {b.source.fqn: b.source for one in self.made for b in one.blocks}
        for name in sorted({file for source in sources.values() for file in source.files}):
            local = directory.local(name)
            if local is None:
                return None
            known = local.stat()
            digest.update(_bytes(f"{name} {known.st_size} {known.st_mtime_ns}\n"))
        digest.update(_bytes(directory.path))
        for one in self.made:
            blocks = [(b.box, b.source.fqn, b.at, b.dims) for b in one.blocks]
            digest.update(_bytes(f"{one.fqn} {one.shape} {one.dtype} {blocks}\n"))
        for fqn, source in sources.items():
            chunks = [(chunk.box, chunk.file, chunk.start) for chunk in source.chunks]
            digest.update(_bytes(f"{fqn} {source.dtype} {chunks}\n"))
        return digest.hexdigest()

    def exported(self, out: Path, files: Mapping[str, int], **more: Any) -> Exported:
        """Return the report."""
        return Exported(
            source=self.checkpoint.path,
            out=str(out),
            files=files,
            tensors=len(self.made),
            prefix=self.selection.prefix,
            left_out=self.selection.left_out,
            tied=tuple(self.tied),
            **more,
        )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Writer:
    """Writes tensors one after another, straight from file to file where their bytes are there."""

    def __init__(self, reader: BoxReader, memory: int) -> None:
        self.directly = 0
        self._reader = reader
        # A slab, what it is read into, and what it becomes by a cast or a join.
        self._limit = max((memory - _BESIDES_NBYTES) // 4, LEAST_NBYTES)

    def write(self, made: Made, stream: IO[bytes], progress: Callable[[int], None]) -> None:
        runs = made.runs(self._reader)
        if runs is None:
            for slab in made.slabs(self._reader, self._limit):
                write_all(stream, slab.reshape(-1).view(torch.uint8).numpy().data)
                progress(slab.nbytes)
            return
        for file, start, nbytes in runs:
            self._reader.copy(file, start, nbytes, stream)
            progress(nbytes)
        self.directly += made.nbytes


_BESIDES_NBYTES = 64 << 20
LEAST_NBYTES = 1 << 20
"""A slab has as many bytes at least, however little memory there is."""


def _shards(made: Sequence[Made], limit: int) -> dict[str, list[Made]]:
    """Return the tensors of each file, those with the largest elements first."""
    shards: list[list[Made]] = [[]]
    filled = 0
    for one in made:
        if shards[-1] and filled + one.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [
            f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
            for number in range(len(shards))
        ]
    return {
        name: sorted(held, key=lambda one: -one.dtype.itemsize)
        for name, held in zip(names, shards, strict=True)
    }


def _step(progress: Progress, done: int, total: int, nbytes: int) -> None:
    progress(done + nbytes, total)


def _write_shard(
    path: Path, tensors: Sequence[Made], writer: _Writer, progress: Callable[[int], None]
) -> None:
    header = write_header([(one.fqn, one.dtype, one.shape) for one in tensors], {"format": "pt"})
    done = 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done)

    with whole_file(path, buffering=0) as stream:
        write_all(stream, memoryview(header))
        for one in tensors:
            writer.write(one, stream, step)


def _cast(made: Made, dtype: torch.dtype | None) -> Made:
    if dtype is None or made.dtype not in _CAST:
        return made
    return Made(made.fqn, made.shape, dtype, made.blocks)


_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What a dtype applies to. Eight bits have scales beside them, which a cast would leave behind."""


def _are_equal(one: Made, other: Made, reader: BoxReader, memory: int) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    limit = max(memory // 8 // one.dtype.itemsize, 1)
    for piece in pieces(one.whole, limit):
        a, b = one.read(reader, piece), other.read(reader, piece)
        if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            return False
    return True
