"""Whether a checkpoint is whole."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dcp_placements._torch import MetadataIndex
from dcp_placements.errors import format_names
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint
from dcp_placements.offline.checks.record_checks import Finding, RecordChecker
from dcp_placements.offline.checks.structure import (
    CheckpointFault,
    Record,
    file_faults,
    files_without_id,
    id_faults,
    place_faults,
    records_by_file,
    tiling_faults,
)
from dcp_placements.storage.file_reads import CountedFile
from dcp_placements.storage.metadata.provenance import stored_digest

Progress = Callable[[int, int], None]
"""``(done, total)`` in bytes."""

MEMORY_NBYTES = 2 << 30

AFTER_S = 1.0
"""A data file this much younger than ``.metadata`` is worth a note."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a checkpoint is whole.

    Attributes:
        path: Where it is.
        faults: What is wrong, sorted by kind, file and key.
        notes: What is no fault and ought to be known.
        tensors: Tensors that were looked at.
        chunks: Their chunks.
        nbytes: Bytes of records whose contents were read and compared.
        digests: Chunks and objects that were compared with a stored digest.
    """

    JSON: ClassVar[str] = "path sound faults notes checked"

    path: str
    faults: tuple[CheckpointFault, ...]
    notes: tuple[str, ...]
    tensors: int
    chunks: int
    nbytes: int
    digests: int

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

    Without ``contents`` and ``digests`` only the head of every record is read: whether chunks tile
    their tensors, files are there and long enough, and records are what the metadata say.

    Args:
        path: The checkpoint.
        contents: Read everything, and compare it with the checksums that ``torch.save`` writes.
        digests: Read everything, and compare it with those checksums and the stored digests; a
            checkpoint or a tensor without digests is a fault then.
        memory: Bytes that data may take.
        progress: Called as files are read.

    Raises:
        CannotLook: There is no checkpoint, or it cannot be read.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    records = records_by_file(checkpoint)
    faults = [*tiling_faults(checkpoint), *place_faults(checkpoint)]
    faults += file_faults(checkpoint, records)
    faults += id_faults(checkpoint)
    told = checkpoint.provenance or {}
    if digests:
        faults += _digest_gaps(told, records)
    total = sum(record.chunk.nbytes for held in records.values() for record in held)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(min(done, total), total)

    compared = 0

    def digest_of(index: MetadataIndex) -> bytes | None:
        nonlocal compared
        found = stored_digest(told, index) if digests else None
        compared += found is not None
        return found

    with BoxReader(checkpoint) as reader:

        def load(record: Record) -> torch.Tensor:
            assert record.tensor is not None
            return reader.read(record.tensor, record.chunk.box)

        checker = RecordChecker(
            raw=checkpoint.format == SAFETENSORS,
            load=load,
            digest_of=digest_of,
            contents=contents or digests,
            progress=advance,
            limit_nbytes=memory // 3,
        )
        for file, held in records.items():
            faults += _checked(checkpoint, checker, file, held)
    notes = _notes(checkpoint)
    if contents and checkpoint.format == SAFETENSORS:
        notes.append("safetensors files have no checksums: nothing speaks for their contents")
    if checker.skipped:
        notes.append(
            f"not plain, and larger than a third of --memory, so not looked into: "
            f"{', '.join(checker.skipped[:4])}"
        )
    return Verification(
        path=checkpoint.path,
        faults=tuple(sorted(faults, key=lambda fault: (fault.kind, fault.files, fault.tensors))),
        notes=tuple(notes),
        tensors=len(checkpoint.tensors),
        chunks=sum(len(tensor.boxes) for tensor in checkpoint.tensors.values()),
        nbytes=done if contents or digests else 0,
        digests=compared,
    )


def _checked(
    checkpoint: Checkpoint, checker: RecordChecker, file: str, held: list[Record]
) -> list[CheckpointFault]:
    """Return what is wrong with the records of one file."""
    size = checkpoint.directory.size(file)
    if size is None:
        return []
    found: list[tuple[Record, Finding]] = []
    try:
        with checkpoint.directory.open(file) as stream:
            counted = CountedFile(stream)
            for record in held:
                if record.end <= size:
                    found += [(record, finding) for finding in checker.check(counted, record)]
    except OSError as error:
        names = tuple(sorted({fqn for record in held for fqn in record.copied or (record.fqn,)}))
        return [CheckpointFault("missing_file", names, (file,), f"it cannot be read: {error}")]
    return _diagnosed(file, found)


def _diagnosed(file: str, found: list[tuple[Record, Finding]]) -> list[CheckpointFault]:
    """Return the faults of one file; records of another save are told of as one."""
    faults = [
        CheckpointFault(
            finding.kind,
            tuple(sorted(record.copied)) or (record.fqn,),
            (file,),
            f"{record.name} in {file}: {finding.message}",
        )
        for record, finding in found
        if finding.kind != "digest"
    ]
    # Their own checksums are right: nothing was damaged on the way, something else was saved.
    other = [record for record, finding in found if finding.kind == "digest"]
    if other:
        names = tuple(sorted({fqn for record in other for fqn in record.copied or (record.fqn,)}))
        message = (
            f"{len(other)} records in {file} are whole, and not those that were saved with the "
            "metadata: of another save, which was cut off, or changed with new checksums"
        )
        faults.append(CheckpointFault("mixed_generations", names, (file,), message))
    return faults


def _digest_gaps(
    told: Mapping[str, Any], records: Mapping[str, list[Record]]
) -> list[CheckpointFault]:
    """Return what has no digest."""
    if not told.get("digests"):
        message = (
            "the checkpoint stores no digests, so that its contents cannot be proved; "
            "save with PlacementSavePlanner(digests='full')"
        )
        return [CheckpointFault("no_digest", (), (), message)]
    without: dict[str, set[str]] = defaultdict(set)
    for file, held in records.items():
        for record in held:
            if record.copied:
                continue
            offsets = torch.Size(record.chunk.box.offsets) if record.tensor is not None else None
            if stored_digest(told, MetadataIndex(record.fqn, offsets)) is None:
                without[record.fqn].add(file)
    return [
        CheckpointFault("no_digest", (fqn,), tuple(sorted(files)), "no digest of it is stored")
        for fqn, files in without.items()
    ]


def _notes(checkpoint: Checkpoint) -> list[str]:
    """Return signs that prove nothing: a copy looks the same."""
    notes = []
    without = files_without_id(checkpoint)
    if 0 < len(without) < len(checkpoint.files):
        notes.append(
            f"no id of a save in {format_names(without, 4)}: where another save wrote one of them "
            "and not the rank's other files, only verify --digests can tell"
        )
    directory = checkpoint.directory
    for name in checkpoint.other_files:
        if name.endswith((".tmp", ".partial")):
            notes.append(f"{name} was left over by something that was cut off")
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
