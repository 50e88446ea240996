"""What is converted: a checkpoint, or ranks' files, as tensors whose boxes can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint, SourceTensor, StoredRecord
from dcp_placements.offline.directory import Directory


@dataclass(slots=True)
class LeftOut:
    """Something in ranks' files that is not in the checkpoint."""

    what: str  # its name in the files
    why: str  # the reason
    entries: int = 0  # how many
    nbytes: int = 0  # bytes of tensors in them


@dataclass
class Source:
    """Tensors that can be read, and the files that they are in.

    Attributes:
        directory: Of the files.
        tensors: By key.
        versions: What is different after its files were written again, from before any was read.
        objects: By key; of a checkpoint.
        checkpoint: None of ranks' files.
        left_out: Of ranks' files what is none of the model's tensors.
        accounted: Bytes of ranks' files by what became of them, beside what is written.
        notes: Lines for the report.
    """

    directory: Directory
    tensors: Mapping[str, SourceTensor]
    versions: dict[str, str]
    objects: Mapping[str, StoredRecord] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    left_out: Sequence[LeftOut] = ()
    accounted: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Source:
        """Return a checkpoint as a source."""
        directory = checkpoint.directory
        versions = directory.versions(checkpoint.files)
        held = checkpoint.tensors, versions, checkpoint.objects, checkpoint
        return cls(directory, *held, notes=checkpoint.notes)

    @property
    def path(self) -> str:
        """Its directory or URL."""
        return self.directory.path

    def described(self) -> Iterator[object]:
        """Yield what decides its elements beside the versions of its files."""
        return iter(())

    def reader(self) -> Any:
        """Return a reader of its tensors, which compares what it reads whole with its CRC-32."""
        assert self.checkpoint is not None
        return BoxReader(self.checkpoint, check_crc=True)
