"""What is converted: a checkpoint, or a torch file per rank, as tensors whose boxes can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from dcp_placements.layout.boxes import common
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.box_reads import BoxReader, Run
from dcp_placements.offline.checkpoint import Checkpoint, SourceTensor, StoredObject
from dcp_placements.offline.directory import Directory


class Piece(NamedTuple):
    """A box of a tensor, as a rank's file has it."""

    box: Box
    file: str  # its name
    local: Box  # of the file's tensor
    data: torch.Tensor  # the elements: mapped, not read


@dataclass(eq=False, slots=True)
class RankTensor(SourceTensor):
    """A tensor of which ranks' files have boxes. Of an expert of (4, 3) on two ep ranks::

    RankTensor("experts.w", (4, 3), torch.float32,
               [Piece(Box((0, 0), (2, 3)), "model_rank_0.pt", Box((0, 0), (2, 3)), ...),
                Piece(Box((2, 0), (2, 3)), "model_rank_1.pt", Box((0, 0), (2, 3)), ...)])
    """

    fqn: str  # its key
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype  # of the elements
    pieces: list[Piece] = field(default_factory=list)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold any of it, sorted."""
        return tuple(sorted({piece.file for piece in self.pieces}))


class RankReader(AbstractContextManager["RankReader"]):
    """Reads boxes of ranks' files."""

    def __exit__(self, *raised: object) -> None:
        """Do nothing: files are mapped."""

    def read(self, tensor: RankTensor, box: Box) -> torch.Tensor:
        """Return the elements of a box, which the tensor's pieces cover."""
        into = torch.empty(box.sizes, dtype=tensor.dtype, device="cpu")
        for piece in tensor.pieces:
            shared = common(piece.box, box)
            if shared is not None:
                held = piece.data[_within(shared, piece.box)]
                into[_within(shared, box)] = held
        return into

    def runs(self, tensor: RankTensor, box: Box) -> None:
        """Return none: what is mapped is copied through memory."""

    def blocks(self, run: Run) -> Iterator[memoryview]:
        """Yield nothing: there are no runs."""
        return iter(())


def _within(shared: Box, outer: Box) -> tuple[slice, ...]:
    spans = zip(shared.offsets, outer.offsets, shared.sizes, strict=True)
    return tuple([slice(a - b, a - b + n) for a, b, n in spans])


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
        objects: By key; of a checkpoint.
        files: Names of the files with the tensors.
        checkpoint: None of ranks' files.
        left_out: Of ranks' files what is none of the model's tensors.
        accounted: Bytes of ranks' files by what became of them, beside what is written.
        notes: Lines for the report.
    """

    directory: Directory
    tensors: Mapping[str, SourceTensor]
    files: Sequence[str]
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    left_out: Sequence[LeftOut] = ()
    accounted: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Source:
        """Return a checkpoint as a source."""
        return cls(
            checkpoint.directory,
            checkpoint.tensors,
            sorted(checkpoint.files),
            checkpoint.objects,
            checkpoint,
        )

    @property
    def path(self) -> str:
        """Its directory or URL."""
        return self.directory.path

    @cached_property
    def versions(self) -> dict[str, str]:
        """What is different after its files were written again; asked for before any is read."""
        return self.directory.versions(self.files)

    def check_unchanged(self) -> None:
        """Refuse what was read, if a file was written again since.

        Raises:
            CannotLook: One was.
        """
        self.directory.check_versions(self.versions)

    def reader(self) -> BoxReader | RankReader:
        """Return a reader of its tensors, which compares what it reads whole with its CRC-32."""
        if self.checkpoint is None:
            return RankReader()
        return BoxReader(self.checkpoint, check_crc=True)
