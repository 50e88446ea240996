"""A checkpoint rewritten for the world that loads it: each rank's bytes in its own file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from dcp_placements._torch import CURRENT_DCP_VERSION
from dcp_placements.errors import (
    CannotLook,
    PlacementError,
    format_count,
    format_name,
    format_names,
    format_nbytes,
    raise_faults,
)
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.declared import Progress, format_mesh_axes
from dcp_placements.offline.readers.dcp import TORCH_DIST
from dcp_placements.offline.rehearsals.world import RehearsedWorld
from dcp_placements.offline.remote_output import AnyFolder, output_at
from dcp_placements.offline.resharding.records import RecordWriter
from dcp_placements.offline.resharding.target import REFUSED, Target
from dcp_placements.offline.structure import structural_faults
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import unmatched_faults
from dcp_placements.storage.entries import StoredEntries, entries_of
from dcp_placements.storage.index import index_of_rows
from dcp_placements.storage.metadata.file import write_metadata
from dcp_placements.storage.storage_table import StorageTable
from dcp_placements.storage.written import Rows, StoredPlace
from dcp_placements.transfer.world import MeshAxes

MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was written."""

    JSON: ClassVar[str] = "source out axes files tensors objects kept left_out"

    source: str  # the checkpoint
    out: str  # the new checkpoint
    axes: Mapping[str, int]  # the mesh that it is for: sizes by axis name
    # Bytes by file, one for each rank that has a box that no lower rank has
    files: Mapping[str, int]
    tensors: int  # number of tensors
    objects: int  # number of keys that are no tensors
    kept: tuple[str, ...]  # files of an earlier attempt
    copied: int  # bytes of records copied from file to file, as they were
    left_out: tuple[str, ...]  # files of the source that hold no tensor or object

    def __str__(self) -> str:
        ranks = prod(self.axes.values())
        mesh = format_mesh_axes(self.axes)
        count = format_count(len(self.files), "file")
        total = format_nbytes(sum(self.files.values()))
        lines = [f"{self.tensors} tensors, {total}, in {count} for {mesh}: {self.out}"]
        if len(self.files) < ranks:
            few = ranks - len(self.files)
            lines.append(f"    without a file of their own: {few} ranks, replicas of lower ones")
        if self.kept:
            lines.append(f"    kept of an earlier attempt: {format_names(self.kept, 3)}")
        if self.left_out:
            lines.append(f"    left out: {format_names(self.left_out, 3)}")
        return "\n".join(map(format_name, lines))


def reshard(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Resharded:
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
        progress: Called as files are written.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; ``out`` exists, another process
            is writing it, or there is no room; an axis in ``fsdp`` is unknown, or ``rules`` fails.
            The checkpoint was overwritten while it was read; nothing is written then.
        PlacementError: The checkpoint is not whole; a load in that world would be refused; its
            ranks do not hold all of a tensor; a pattern of the rules, or a step of the rename,
            matches no key. All of it before anything is written.
    """
    source = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
    with output_at(out, source=source) as output:
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        _check_whole(checkpoint)
        versions = checkpoint.directory.versions(checkpoint.files)
        target = Target(world := RehearsedWorld(checkpoint, rules, axes, fsdp))
        raise_faults(REFUSED, unmatched_faults(world.unmatched(), list(checkpoint.tensors)))
        identity = target.identity(versions)
        save_id = bytes.fromhex(identity)[:16]
        names = {rank: target.file_name(rank, save_id) for rank in target.ranks}
        files = {names[rank]: target.nbytes(rank) for rank in target.ranks}
        output.check_room(sum(files.values()), identity)
        with output.directory([*files, ".metadata"], identity) as folder:
            kept = tuple(name for name in files if folder.has(name))
            copied, places = _write_data(checkpoint, target, folder, names, progress)
            checkpoint.directory.check_versions(versions)
            _write_metadata(target, folder, places, save_id)
    return Resharded(
        source=checkpoint.path,
        out=str(output.path),
        axes=dict(axes),
        files=files,
        tensors=len(checkpoint.tensors),
        objects=len(checkpoint.objects),
        kept=kept,
        copied=copied,
        left_out=tuple(name for name in checkpoint.other_files if not name.startswith(".")),
    )


def _check_whole(checkpoint: Checkpoint) -> None:
    """Refuse a source with state beside its tensors, or that metadata or sizes show as damaged."""
    if checkpoint.format == TORCH_DIST:
        raise CannotLook(
            f"{checkpoint.path}: Megatron's torch_dist has state beside its tensors\n"
            "    way out:     dcp-placements import makes a DCP checkpoint of it"
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


def _write_data(
    checkpoint: Checkpoint,
    target: Target,
    folder: AnyFolder,
    names: Mapping[int, str],
    progress: Progress,
) -> tuple[int, list[StoredPlace]]:
    """Write the data files; return the bytes of records copied as they were, and all places."""
    total = sum(target.nbytes(rank) for rank in names)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    places: list[StoredPlace] = []
    with RecordWriter(checkpoint, advance) as writer:
        for rank, name in names.items():
            places += _places(target, rank, name)
            if folder.has(name):
                advance(target.nbytes(rank))
                continue
            with folder.file(name, buffering=0) as stream:
                for entry in target.entries(rank):
                    writer.write(entry, stream)
    return writer.copied_nbytes, places


def _write_metadata(
    target: Target, folder: AnyFolder, places: Sequence[StoredPlace], save_id: bytes
) -> None:
    """Write ``.metadata``, which completes the checkpoint."""
    with quiet_gc():
        metadata = target.metadata(save_id)
        metadata.version = CURRENT_DCP_VERSION
        entries = entries_of(metadata.state_dict_metadata)
        stored: Any = StoredEntries(entries)
        metadata.state_dict_metadata = stored
        metadata.storage_data = StorageTable(index_of_rows(Rows.of(places), entries))
        with folder.file(".metadata") as stream:
            write_metadata(metadata, stream)


def _places(target: Target, rank: int, name: str) -> Iterator[StoredPlace]:
    """Yield the place of every record of a file."""
    start = 0
    for entry in target.entries(rank):
        index, steps = entry.index, entry.transforms
        yield StoredPlace(index.fqn, index.offset, name, start, entry.length, steps)
        start += entry.length
