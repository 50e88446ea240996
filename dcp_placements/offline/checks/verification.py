"""Whether a checkpoint is whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar

from dcp_placements.errors import format_count, format_names
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint
from dcp_placements.offline.checks.record_checks import RecordChecker
from dcp_placements.offline.checks.records import records_by_file
from dcp_placements.offline.checks.structure import (
    CheckpointFault,
    files_without_id,
    stock_faults,
    structural_faults,
)
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.directory import Directory
from dcp_placements.quiet_gc import quiet_gc

MEMORY_NBYTES = 2 << 30

AFTER_S = 1.0
"""A data file that is younger than ``.metadata`` by more than this is noted."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a checkpoint is whole."""

    JSON: ClassVar[str] = "path sound faults notes checked"

    path: str  # where it is
    faults: tuple[CheckpointFault, ...]  # what is wrong, sorted by kind, file and key
    notes: tuple[str, ...]  # observations that prove no fault
    tensors: int  # tensors that were checked
    chunks: int  # their chunks
    nbytes: int  # bytes of records whose contents were read and compared
    unread: int  # records that were not read; the notes name them

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @property
    def checked(self) -> dict[str, int]:
        """How much was checked."""
        return {
            "tensors": self.tensors,
            "chunks": self.chunks,
            "bytes": self.nbytes,
        }


def verify(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    contents: bool = False,
    memory: int = MEMORY_NBYTES,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Return what is wrong with a checkpoint.

    Without ``contents`` only the head of every record is read. Checked are then:
    chunks tile their tensors, files exist and are long enough, records match the metadata.

    Args:
        path: The checkpoint.
        contents: Read everything, and compare it with the checksums that ``torch.save`` writes.
            The places in the pickle of ``.metadata`` are compared with those of its index, too.
        memory: Bytes that data may take.
        progress: Called as files are read.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read; or there are faults, and a save
            has replaced its ``.metadata`` meanwhile.
    """
    directory = path.directory if isinstance(path, Checkpoint) else Directory(path)
    before = _version(directory)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(directory)
    with quiet_gc():
        records = records_by_file(checkpoint)
        faults = structural_faults(checkpoint, records)
        if contents:
            faults += stock_faults(checkpoint)
    total = int(sum([float((one.ends - one.starts).sum(dtype=float)) for one in records.values()]))
    checker = RecordChecker(
        checkpoint,
        contents=contents,
        limit_nbytes=memory // 3,
        progress=lambda done: progress(min(done, total), total),
    )
    for file, in_file in records.items():
        faults += checker.check_file(file, in_file)
    if faults and _version(directory) != before:
        raise directory.overwritten([".metadata"])
    notes = _notes(checkpoint)
    if contents and checkpoint.format == SAFETENSORS:
        notes.append("safetensors files have no checksums: nothing proves their contents")
    if checker.unchecked:
        notes.append(
            f"{format_count(checker.unchecked, 'record')} have no checksums "
            "(torch.serialization.set_crc32_options(False)): nothing proves their contents"
        )
    if checker.transformed:
        notes.append(
            f"{format_count(checker.transformed, 'record')} went through transforms such as "
            "compression: only --contents checks them"
        )
    if checker.skipped:
        names = format_names(checker.skipped, 4)
        notes.append(f"not plain, and larger than a third of --memory, so not read: {names}")
    if checker.other_types:
        names = format_names(checker.other_types, 4)
        notes.append(f"of types that torch.load was not told to allow, so not read: {names}")
    return Verification(
        path=checkpoint.path,
        faults=tuple(sorted(faults, key=lambda fault: (fault.kind, fault.files, fault.tensors))),
        notes=tuple(notes),
        tensors=len(checkpoint.tensors),
        chunks=sum([len(one.tensors) * one.tensors[0].count for one in checkpoint.alike]),
        nbytes=checker.nbytes if contents else 0,
        unread=len(checker.skipped) + len(checker.other_types),
    )


def _version(directory: Directory) -> str | None:
    """Return what is different after ``.metadata`` was written again; None without one."""
    try:
        return directory.version(".metadata")
    except OSError:
        return None


def _notes(checkpoint: Checkpoint) -> list[str]:
    """Return signs of damage that prove none: a copy of a checkpoint has them as well."""
    notes = []
    if checkpoint.newer:
        merge = f"dcp-placements merge-metadata {checkpoint.path}"
        has_file = checkpoint.directory.size(".metadata") is not None
        notes.append(
            f"plain torch {version('torch')} cannot read .metadata here: it has "
            f"{' and '.join(sorted(checkpoint.newer))}. PlacementFileSystemReader reads it; "
            f"{merge}{' --rewrite' if has_file else ''} writes it as every torch reads it"
        )
    without = files_without_id(checkpoint)
    if 0 < len(without) < len(checkpoint.files):
        notes.append(
            f"no id of a save in {format_names(without, 4)}: where another save wrote one of them "
            "and not the rank's other files, nothing can tell"
        )
    directory = checkpoint.directory
    for name in checkpoint.other_files:
        if name.endswith((".tmp", ".partial")):
            notes.append(f"{name} was left over by a process that was cut off")
    written = directory.modified(".metadata") if directory.size(".metadata") is not None else None
    if written is not None:
        younger = [
            file
            for file in without
            if checkpoint.files[file] is not None
            and (directory.modified(file) or 0) > written + AFTER_S
        ]
        if younger:
            notes.append(
                f"written after .metadata, which is written last: {', '.join(younger[:4])}"
                f"{' and more' if len(younger) > 4 else ''}. A copy looks like that, and so does "
                "a later save that was cut off"
            )
    return notes
