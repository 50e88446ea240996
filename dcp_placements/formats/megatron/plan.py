"""An import before anything is written, and its report: where each chunk is read from.

Every byte of the source is written, found equal to a byte that is, or left out with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dcp_placements.errors import Fault, format_name, format_nbytes
from dcp_placements.formats.megatron.layout import MegatronLayout
from dcp_placements.layout.boxes import as_array, format_boxes, tile, uncovered
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.chunk_writer import Piece, Target
from dcp_placements.offline.comparing import same_bits

OF_THE_RUN = "of the run, not of the model"
"""Why arguments, schedules and random states are left out."""


OPTIMIZER = "only weights are imported: load optimizer state in Megatron, and save it as torch_dist"
"""Why the state of optimizers is left out."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something in the source that is not in the checkpoint."""

    what: str  # its name in the file
    why: str  # the reason
    entries: int  # how many
    nbytes: int  # bytes of tensors in them


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The report of an import."""

    JSON: ClassVar[str] = (
        "source out keys=tensors nbytes source_nbytes copies tied padding left_out notes"
    )

    source: str  # the directory of the iteration
    out: str  # the checkpoint
    layout: MegatronLayout  # the layout of the source
    keys: tuple[str, ...]  # of the checkpoint, sorted
    nbytes: int  # bytes written
    copies: int  # bytes found equal to written ones: replicated weights
    tied: int  # bytes of output layers found equal to the word embedding
    padding: int  # bytes of vocabulary rows that are padding
    left_out: tuple[LeftOut, ...]  # the rest
    notes: tuple[str, ...] = ()  # what to check by hand

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


@dataclass(slots=True)
class ImportPlan:
    """The tensors of the checkpoint, and the source of each of their chunks."""

    targets: dict[str, Target] = field(default_factory=dict)  # the checkpoint's tensors
    # What each chunk, ``(fqn, box)``, is read from
    pieces: dict[tuple[str, Box], Piece] = field(default_factory=dict)
    copies: list[Piece] = field(default_factory=list)  # the same chunks in other files
    # Bytes of each entry that is not imported, by ``(what, why)``
    left_out: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)  # why nothing can be written
    tied: int = 0  # bytes of output layers among the copies
    padding: int = 0  # bytes of vocabulary rows that are in no chunk

    def fault(self, where: str, headline: str, *details: str) -> None:
        """Note why nothing can be written."""
        self.faults.append(Fault(where, headline, details))

    def leave_out(self, what: str, why: str, nbytes: int) -> None:
        """Note an entry of the source that is not imported."""
        self.left_out.setdefault((what, why), []).append(nbytes)

    def declare(self, fqn: str, target: Target, origin: str) -> bool:
        """Note a tensor; return False if another file or key declares it differently."""
        declared = self.targets.setdefault(fqn, target)
        if declared != target:
            self.fault(
                fqn,
                f"{origin} makes it {target.dtype} of {target.shape}, another one "
                f"{declared.dtype} of {declared.shape}",
            )
        return declared == target

    def add(self, piece: Piece) -> bool:
        """Note the source of a chunk; return False if there is another one, which is kept."""
        kept = self.pieces.setdefault((piece.fqn, piece.box), piece)
        if kept is not piece:
            self.copies.append(piece)
        return kept is piece

    def check_whole(self) -> None:
        """Note the tensors that the chunks do not tile."""
        boxes: dict[str, list[Box]] = {fqn: [] for fqn in self.targets}
        for fqn, box in self.pieces:
            boxes[fqn].append(box)
        for fqn, target in self.targets.items():
            whole = Box.whole(target.shape)
            array = as_array(boxes[fqn], len(target.shape))
            if not tile(whole, array):
                holes = uncovered(whole, array)
                missing = f"no file has {format_boxes(holes, target.shape)}"
                self.fault(
                    fqn,
                    missing if holes else "files hold parts that overlap",
                    "way out:     run dcp-placements verify, or megatron, on the source",
                )

    def compare_copies(self) -> None:
        """Read every chunk that several files hold, and note copies that differ."""
        for copy in self.copies:
            kept = self.pieces[copy.fqn, copy.box]
            one, other = kept.read(), copy.read()
            if not same_bits(one, other):
                self.fault(
                    copy.fqn,
                    f"{copy.file} and {kept.file} hold it, and differ in "
                    f"{int((one != other).sum())} of {one.numel()} elements",
                    "likely:      files of different steps or runs; a rank whose replica diverged",
                    "way out:     another iteration; or load it in Megatron, which takes one",
                )

    def report(
        self, layout: MegatronLayout, out: str | Path, notes: tuple[str, ...]
    ) -> ImportReport:
        """Return the report of the import."""
        return ImportReport(
            source=str(layout.path),
            out=str(out),
            layout=layout,
            keys=tuple(sorted(self.targets)),
            nbytes=sum(piece.nbytes for piece in self.pieces.values()),
            copies=sum(copy.nbytes for copy in self.copies) - self.tied,
            tied=self.tied,
            padding=self.padding,
            left_out=tuple(
                LeftOut(what, why, len(nbytes), sum(nbytes))
                for (what, why), nbytes in self.left_out.items()
            ),
            notes=notes,
        )
