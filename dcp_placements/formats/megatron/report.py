"""The report of an import of Megatron-LM's files, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dcp_placements.errors import format_name, format_nbytes
from dcp_placements.formats.megatron.layout import MegatronLayout

OF_THE_RUN = "of the run, not of the model"
"""Why arguments, schedules and random states are left out."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something in the source that is not in the checkpoint.

    Attributes:
        what: Its name in the file.
        why: The reason.
        entries: How many.
        nbytes: Bytes of tensors in them.
    """

    what: str
    why: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The report of an import.

    Attributes:
        source: The directory of the iteration.
        out: The checkpoint.
        layout: The layout of the source.
        keys: Of the checkpoint, sorted.
        nbytes: Bytes written.
        copies: Bytes found equal to written ones: replicated weights.
        tied: Bytes of output layers found equal to the word embedding.
        padding: Bytes of vocabulary rows that are padding.
        left_out: The rest.
        notes: What to check by hand.
    """

    JSON: ClassVar[str] = (
        "source out keys=tensors nbytes source_nbytes copies tied padding left_out notes"
    )

    source: str
    out: str
    layout: MegatronLayout
    keys: tuple[str, ...]
    nbytes: int
    copies: int
    tied: int
    padding: int
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()

    @property
    def source_nbytes(self) -> int:
        """Bytes of all tensors in the source."""
        left_out = sum(part.nbytes for part in self.left_out)
        return self.nbytes + self.copies + self.tied + self.padding + left_out

    @property
    def tensors(self) -> int:
        """How many were written."""
        return len(self.keys)

    def __str__(self) -> str:
        lines = [
            f"import of {self.tensors} tensors from {self.source}",
            f"    layout:    {self.layout.reason}",
            f"    source:    {format_nbytes(self.source_nbytes)} in {len(self.layout.files)} files",
            f"    written:   {format_nbytes(self.nbytes)} to {self.out}",
            f"    copies:    {format_nbytes(self.copies)}, found equal",
        ]
        if self.tied:
            lines.append(f"    tied:      {format_nbytes(self.tied)}, equal to the word embedding")
        if self.padding:
            lines.append(f"    padding:   {format_nbytes(self.padding)} of the vocabulary, dropped")
        by_reason: dict[str, list[LeftOut]] = {}
        for part in self.left_out:
            by_reason.setdefault(part.why, []).append(part)
        for why, parts in by_reason.items():
            nbytes = format_nbytes(sum(part.nbytes for part in parts))
            names = ", ".join(part.what for part in parts)
            lines += [f"    left out:  {names} ({nbytes})", f"               {why}"]
        lines += [f"    note:      {note}" for note in self.notes]
        return "\n".join(map(format_name, lines))
