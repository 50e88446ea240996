"""Whether a checkpoint is whole."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

from dcp_placements.errors import format_names
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint
from dcp_placements.offline.checks.record_checks import RecordChecker
from dcp_placements.offline.checks.records import FileRecords, records_by_file
from dcp_placements.offline.checks.structure import (
    CheckpointFault,
    files_without_id,
    structural_faults,
)
from dcp_placements.offline.declared import Progress
from dcp_placements.offline.directory import Directory
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.storage.metadata.provenance import stored_digest

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
    digests: int  # chunks and objects that were compared with a stored digest

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
            "digests": self.digests,
        }


def verify(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    contents: bool = False,
    digests: bool = False,
    memory: int = MEMORY_NBYTES,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Return what is wrong with a checkpoint.

    Without ``contents`` and ``digests`` only the head of every record is read. Checked are then:
    chunks tile their tensors, files exist and are long enough, records match the metadata.

    Args:
        path: The checkpoint.
        contents: Read everything, and compare it with the checksums that ``torch.save`` writes.
        digests: Read everything, and compare it with those checksums and the stored digests; a
            checkpoint or a tensor without digests is a fault then.
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
    if digests:
        faults += _digest_gaps(checkpoint.provenance or {}, records)
    total = int(sum([float((one.ends - one.starts).sum(dtype=float)) for one in records.values()]))
    checker = RecordChecker(
        checkpoint,
        contents=contents,
        digests=digests,
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
        nbytes=checker.nbytes if contents or digests else 0,
        digests=checker.digests,
    )


def _version(directory: Directory) -> str | None:
    """Return what is different after ``.metadata`` was written again; None without one."""
    try:
        return directory.version(".metadata")
    except OSError:
        return None


def _digest_gaps(
    provenance: Mapping[str, Any], records: Mapping[str, FileRecords]
) -> list[CheckpointFault]:
    """Return the tensors and objects that have no stored digest."""
    if not provenance.get("digests"):
        message = (
            "the checkpoint stores no digests, so that its contents cannot be proved; "
            "save with PlacementSavePlanner(digests='full')"
        )
        return [CheckpointFault("no_digest", (), (), message)]
    without: dict[str, set[str]] = defaultdict(set)
    for file, in_file in records.items():
        for record in in_file:
            if stored_digest(provenance, *record.place) is None:
                without[record.fqn].add(file)
    return [
        CheckpointFault("no_digest", (fqn,), tuple(sorted(files)), "no digest of it is stored")
        for fqn, files in without.items()
    ]


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
            "and not the rank's other files, only verify --digests can tell"
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
                "a later save that was cut off; verify --digests tells them apart"
            )
    return notes
