"""The one conversion, by its names: ``export_safetensors``, ``import_checkpoint``, ``reshard``.

A source has tensors; a rename assembles those to write of them; a layout says which file has which
boxes; a writer knows a format; an output appears when all is there. Every fault that can be found
without reading data is reported before anything is written, and an interrupted conversion of the
same source by the same arguments continues with the files that it has finished.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import IO, Any, ClassVar, Protocol

import torch

from dcp_placements.convert.dcp_out import DcpOut
from dcp_placements.convert.elements import Elements
from dcp_placements.convert.layout import REFUSED, WholeFiles, WorldFiles
from dcp_placements.convert.megatron import megatron_source
from dcp_placements.convert.rank_files import rank_file_names, rank_files_source
from dcp_placements.convert.safetensors_out import SafetensorsOut
from dcp_placements.convert.selection import select
from dcp_placements.convert.sources import LeftOut, Source
from dcp_placements.errors import (
    CannotLook,
    Fault,
    PlacementError,
    format_count,
    format_name,
    format_names,
    format_nbytes,
    raise_faults,
)
from dcp_placements.names.renames import Unstack, number_in, steps
from dcp_placements.offline.assembly import AssembledTensor, assemble, assembled
from dcp_placements.offline.box_reads import pieces
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, SourceTensor
from dcp_placements.offline.comparing import same_bits
from dcp_placements.offline.declared import Progress, Rename
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.output import AnyOutput, output_at
from dcp_placements.offline.readers.dcp import TORCH_DIST
from dcp_placements.offline.rehearsals.world import RehearsedWorld
from dcp_placements.offline.structure import structural_faults
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import unmatched_faults
from dcp_placements.transfer.world import Fsdp, MeshAxes

SHARD_NBYTES = 5 << 30
MEMORY_NBYTES = 1 << 30
MAX_FAULTS = 20


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
    objects: int  # number of keys that are no tensors
    nbytes: int  # bytes of the tensors' elements
    kept: tuple[str, ...] = ()  # files of an earlier attempt
    prefix: str = ""  # the prefix that was removed from the names
    left_out: tuple[str, ...] = ()  # what the source has besides
    # Names that ``rename`` left as they are; empty without a rename
    unchanged: tuple[str, ...] = ()
    # Names of tensors that are equal to another one and were not written
    tied: tuple[str, ...] = ()
    beside: tuple[LeftOut, ...] = ()  # what ranks' files have besides, with the reasons
    # Bytes of ranks' files by what became of them, beside what is written
    accounted: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what to know besides

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
        if self.unchanged:
            lines.append(f"    not renamed: {format_names(self.unchanged, 3)}")
        if self.tied:
            lines.append(f"    tied, written once: {', '.join(self.tied)}")
        if self.kept:
            lines.append(f"    kept of an earlier attempt: {format_names(self.kept, 3)}")
        if self.left_out:
            lines.append(f"    left out: {format_names(self.left_out, 3)}")
        for why in dict.fromkeys(part.why for part in self.beside):
            parts = [part for part in self.beside if part.why == why]
            nbytes = format_nbytes(sum(part.nbytes for part in parts))
            names = format_names([part.what for part in parts], 4)
            lines.append(f"    left out: {names} ({nbytes}): {why}")
        lines += [f"    note: {note}" for note in self.notes]
        return "\n".join(map(format_name, lines))


class Writer(Protocol):
    """Writes a format."""

    files: dict[str, int]
    last: str

    def text(self) -> Iterator[str]:
        """Yield what decides the bytes of the files, beside the tensors."""

    def begin(self, identity: str) -> None:
        """Name the files."""

    def write(self, name: str, stream: IO[bytes], elements: Elements) -> None:
        """Write one of the files."""

    def finish(self, stream: IO[bytes]) -> None:
        """Write the last file, if it is none of these."""


def _convert(
    output: AnyOutput,
    source: Source,
    tensors: Sequence[AssembledTensor],
    writer: Writer,
    *,
    memory: int = MEMORY_NBYTES,
    dry_run: bool = False,
    progress: Progress,
) -> Converted:
    """Write tensors of a source, whose versions were asked for before anything of it was read."""
    identity = _identity(source, tensors, writer)
    writer.begin(identity)
    kept = []
    total = sum(writer.files.values())
    output.check_room(total)
    if not dry_run:
        names = [name for name in writer.files if name != writer.last]
        with (
            _room_for(output, total),
            output.directory([*names, writer.last], identity) as folder,
            source.reader() as reader,
            Elements(reader, memory, progress, total) as elements,
        ):
            for name, nbytes in writer.files.items():
                if folder.has(name):
                    kept.append(name)
                    elements.advance(nbytes)
                    continue
                with folder.file(name, buffering=0) as stream:
                    writer.write(name, stream, elements)
                    if name == writer.last:
                        source.check_unchanged()
            if writer.last not in writer.files:
                source.check_unchanged()
                with folder.file(writer.last) as stream:
                    writer.finish(stream)
    return Converted(
        source=source.path,
        out=str(output.path),
        is_written=not dry_run,
        files=dict(writer.files),
        keys=tuple([tensor.fqn for tensor in tensors]),
        objects=0,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        kept=tuple(kept),
        beside=tuple(source.left_out),
        accounted=source.accounted,
        notes=tuple(source.notes),
    )


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _room_for(output: AnyOutput, nbytes: int) -> Iterator[None]:
    """Say what is needed, where a disk, a quota, or a limit on files ends the block."""
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


def _identity(source: Source, tensors: Iterable[AssembledTensor], writer: Writer) -> str:
    """Return a digest of the source's files, by their versions, and of all that is written."""
    digest = hashlib.sha256(json.dumps(sorted(source.versions.items())).encode())

    def add(*values: object) -> None:
        digest.update(f"{values}\n".encode("utf-8", "surrogatepass"))

    add(source.path, torch.__version__)
    for tensor in tensors:
        blocks = [(b.box, b.source.fqn, b.at, b.dims) for b in tensor.blocks]
        add(tensor.fqn, tensor.shape, tensor.dtype, blocks)
    for line in chain(source.text(), writer.text()):
        add(line)
    return digest.hexdigest()


def open_source(
    path: str | os.PathLike[str],
    *,
    files: str | None = None,
    rules: Callable[..., Any] | None = None,
    axes: MeshAxes | None = None,
    vocab_size: int | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
) -> Source:
    """Return what is at a path, whatever its format: what its files' names are decides.

    Args:
        path: Of a DCP checkpoint, of safetensors files, of Megatron's ``mp_rank_*`` directories, or
            of a torch file per rank.
        files: As of ``rank_files_source``.
        rules: Likewise.
        axes: Likewise.
        vocab_size: As of ``megatron_source``.
        expert_parallel_size: Likewise.
        expert_tensor_parallel_size: Likewise.

    Raises:
        CannotLook: There is nothing of the kind, or of several kinds; or an option of another.
    """
    names = Directory(path).names()
    is_dcp = ".metadata" in names  # trainers leave other files per rank beside it
    has_ranks = files is not None or (not is_dcp and bool(rank_file_names(names)))
    has_megatron = any(re.match(r"mp_rank_\d|iter_\d{7}$|release$", name) for name in names)
    found = {
        "a torch file per rank (files=, --files NAME_{rank}.pt)": has_ranks,
        "Megatron's mp_rank_* files": has_megatron and not is_dcp,
        "safetensors": any(name.endswith(".safetensors") for name in names) and not is_dcp,
    }
    kinds = [kind for kind, there in found.items() if there]
    if len(kinds) > 1 and files is None:
        raise CannotLook(
            f"{os.fspath(path)}: files of several formats: {', '.join(kinds)}\n"
            "    way out:     a directory with one of them"
        )
    of_ranks = {"files": files, "rules": rules, "axes": axes}
    of_megatron = {
        "vocab_size": vocab_size,
        "expert_parallel_size": expert_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
    }
    if has_ranks:
        return rank_files_source(path, **_fitting(of_ranks, of_megatron, kinds[0]))
    if has_megatron and not is_dcp:
        return megatron_source(path, **_fitting(of_megatron, of_ranks, kinds[0]))
    _fitting({}, of_ranks | of_megatron, "a checkpoint")
    return _opened(Checkpoint(path))


def _fitting(options: Mapping[str, Any], others: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return options, of which others are of another format and must not be given."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise CannotLook(f"{given[0]}= is not for {kind}\n    way out:     leave it out")
    return dict(options)


def _opened(source: str | os.PathLike[str] | Checkpoint | Source) -> Source:
    """Return a source, with its versions from before anything of it is read."""
    if isinstance(source, Checkpoint):
        source = Source.of(source)
    if not isinstance(source, Source):
        return open_source(source)
    assert source.versions is not None
    return source


def _path_of(source: str | os.PathLike[str] | Checkpoint | Source) -> str | os.PathLike[str]:
    return source.path if isinstance(source, Checkpoint | Source) else source


def export_safetensors(
    checkpoint: str | os.PathLike[str] | Checkpoint | Source,
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
    dry_run: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a checkpoint's tensors as a directory of safetensors files, as on the Hugging Face hub.

    Args:
        checkpoint: The checkpoint, or ranks' files; data is read piece by piece.
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
        dry_run: Whether to plan only.
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` exists, or another process
            is writing it.
        PlacementError: The checkpoint is not whole; a name is missing or given twice; safetensors
            has no such dtype, or elements are not cast to ``dtype``; tied tensors differ. All of
            it before anything is written. A record is not what was written.
    """
    _check_dtype(dtype)
    with output_at(out, source=_path_of(checkpoint)) as output:
        source = _opened(checkpoint)
        selection = select(source, prefix=prefix, optimizer=optimizer, exclude=exclude)
        made, faults = assemble(selection.tensors, rename)
        unchanged: tuple[str, ...] = ()
        if rename is not None:
            unchanged = _unchanged(selection.tensors, made)
            if len(unchanged) == len(selection.tensors):
                faults.append(_unmatched_rename(unchanged))
        raise_faults("the checkpoint cannot be exported", faults)
        tensors = {tensor.fqn: _cast(tensor, dtype) for tensor in made}
        _check_tied(source, tensors, tied or {}, memory)
        written = [tensor for fqn, tensor in tensors.items() if fqn not in (tied or {})]
        writer = SafetensorsOut(written, max_shard_size)
        converted = _convert(
            output, source, written, writer, memory=memory, dry_run=dry_run, progress=progress
        )
        return replace(
            converted,
            prefix=selection.prefix,
            left_out=selection.left_out,
            unchanged=unchanged,
            tied=tuple(tied or ()),
        )


def import_checkpoint(
    source: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    memory: int = MEMORY_NBYTES,
    dry_run: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write safetensors or ranks' files as a DCP checkpoint, without a model or a process group.

    Without a rename the tensors keep the files' names. A model in which they are stacked or fused
    loads such a checkpoint like the files, with ``rename=`` of its planner: that of its export.

    Args:
        source: A directory or URL of ``*.safetensors``, with or without an index; or ranks' files.
        out: The checkpoint's directory or URL, which must not exist.
        rename: From the files' names to the checkpoint's, such as a ``Stack``. That of an export
            leads the other way, and is refused.
        memory: Bytes that data may take.
        dry_run: Whether to plan only.
        progress: Called with ``(done, total)`` bytes as files are written.

    Raises:
        CannotLook: There are no such files, or they cannot be read; ``out`` exists, or another
            process is writing it. The files were overwritten meanwhile; nothing is written then.
        PlacementError: The files are not whole; a name is missing or given twice; ``rename``
            changes no name, or unstacks names that have a number already. All of it before
            anything is written.
    """
    with output_at(out, source=_path_of(source)) as output:
        opened = _opened(source)
        if opened.checkpoint is not None and opened.checkpoint.format != SAFETENSORS:
            raise PlacementError(
                f"{opened.path}: this is a DCP checkpoint already\n"
                "    way out:     load it as it is; with rename=Stack(...) where layers are one "
                "tensor"
            )
        selection = select(opened, prefix="", optimizer=True)
        tensors = {tensor.fqn: tensor for tensor in _renamed(rename, selection.tensors)}
        writer = DcpOut(opened, tensors, WholeFiles(tensors))
        return _convert(
            output,
            opened,
            list(tensors.values()),
            writer,
            memory=memory,
            dry_run=dry_run,
            progress=progress,
        )


def reshard(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Fsdp = (),
    dry_run: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Rewrite a checkpoint for the world that is to load it.

    Each box of a tensor goes into the file of the lowest rank that holds it, objects into that of
    rank 0. So a rank whose boxes no other holds reads one file, from its beginning to its end. An
    interrupted attempt is continued, if it has the same arguments and source.

    Args:
        checkpoint: The source; its data is read piece by piece.
        out: A directory or URL where nothing is yet.
        rules: As for ``rehearse``: what each rank of the world declares.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: As for ``rehearse``: axes over which FSDP cuts dim 0.
        dry_run: Whether to plan only.
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` exists, another process
            is writing it, or there is no room; an axis in ``fsdp`` is unknown, or ``rules`` fails.
            The checkpoint was overwritten while it was read; nothing is written then.
        PlacementError: The checkpoint is not whole; a load in that world would be refused; its
            ranks do not hold all of a tensor; a pattern of the rules, or a step of the rename,
            matches no key. All of it before anything is written.
    """
    with output_at(out, source=_path_of(checkpoint)) as output:
        source = _opened(checkpoint)
        held = source.checkpoint
        assert held is not None
        _check_whole(held)
        world = RehearsedWorld(held, rules, axes, fsdp)
        layout = WorldFiles(world)
        raise_faults(REFUSED, unmatched_faults(world.unmatched(), list(held.tensors)))
        tensors = assembled(held.path, source.tensors, None)
        converted = _convert(
            output,
            source,
            list(tensors.values()),
            DcpOut(source, tensors, layout),
            dry_run=dry_run,
            progress=progress,
        )
    others = tuple([name for name in held.other_files if not name.startswith(".")])
    few = world.size - len(layout.ranks)
    notes = (f"without a file of their own: {few} ranks, replicas of lower ones",) if few else ()
    return replace(converted, objects=len(held.objects), left_out=others, notes=notes)


def _check_whole(checkpoint: Checkpoint) -> None:
    """Refuse a source with state beside its tensors, or that metadata or sizes show as damaged."""
    if checkpoint.format == TORCH_DIST:
        raise CannotLook(
            f"{checkpoint.path}: Megatron's torch_dist has state beside its tensors\n"
            "    way out:     load it as it is; Stack makes one tensor of all layers of its layers"
        )
    faults = structural_faults(checkpoint)
    if faults:
        lines = [
            f"{fault.kind}: {format_names(fault.tensors or fault.files, 4)}: {fault.message}"
            for fault in faults[:MAX_FAULTS]
        ]
        more = len(faults) - len(lines)
        if more:
            lines.append(f"and {more} more: dcp-placements verify lists them")
        raise PlacementError("\n    ".join([f"{checkpoint.path}: it is not whole", *lines]))


def _unchanged(
    tensors: Mapping[str, SourceTensor], made: Sequence[AssembledTensor]
) -> tuple[str, ...]:
    """Return the names of the tensors that a rename left as they are."""
    return tuple(
        tensor.fqn
        for tensor in made
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


def _renamed(rename: Rename | None, stored: Mapping[str, SourceTensor]) -> list[AssembledTensor]:
    """Return the tensors that a rename makes of files' tensors.

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


_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that are cast, and cast to; those of 8 bits have scales in other tensors."""


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _CAST:
        raise PlacementError(
            f"dtype {dtype}: floating-point tensors are cast to {', '.join(map(str, _CAST))} only\n"
            "    why:         integers cut off fractions, and 8 bits need scales beside them\n"
            "    way out:     one of these; or quantize the exported model"
        )


def _cast(tensor: AssembledTensor, dtype: torch.dtype | None) -> AssembledTensor:
    return tensor if dtype is None or tensor.dtype not in _CAST else replace(tensor, dtype=dtype)


def _check_tied(
    source: Source, tensors: Mapping[str, AssembledTensor], tied: Mapping[str, str], memory: int
) -> None:
    """Refuse tied tensors that are not there, or differ."""
    faults = []
    with source.reader() as reader:
        for name, whose in tied.items():
            missing = [fqn for fqn in (name, whose) if fqn not in tensors]
            if missing or whose in tied:
                why = f"there is no {missing[0]}" if missing else f"{whose} is tied itself"
                faults.append(Fault(name, f"cannot be tied to {whose}: {why}"))
                continue
            one, other = tensors[name], tensors[whose]
            boxes = pieces(one.whole, max(memory // 8 // one.dtype.itemsize, 1))
            if (one.shape, one.dtype) != (other.shape, other.dtype) or not all(
                same_bits(one.read(reader, box), other.read(reader, box)) for box in boxes
            ):
                way_out = "way out:     export both, the model did not tie them"
                faults.append(Fault(name, f"is not {whose}: they differ", (way_out,)))
    raise_faults("tied tensors cannot be written once", faults)
