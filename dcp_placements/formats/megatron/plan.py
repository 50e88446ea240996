"""An import before anything is written: which part of which file each chunk is read from.

Every byte of the source is written, found equal to a byte that is, or left out with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dcp_placements.errors import Fault
from dcp_placements.formats.megatron.layout import MegatronLayout
from dcp_placements.formats.megatron.report import ImportReport, LeftOut
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import format_box, tiles, uncovered
from dcp_placements.offline.chunk_writer import Piece, Target, write_chunks
from dcp_placements.offline.differences.comparing import same_bits
from dcp_placements.offline.remote_output import AnyOutput


@dataclass(frozen=True, slots=True)
class Source:
    """The part of a file that holds a chunk.

    Attributes:
        file: The file's name.
        nbytes: Bytes of the part; 0 for a plain number.
        read: Returns the elements.
    """

    file: str
    nbytes: int
    read: Callable[[], torch.Tensor]


@dataclass(slots=True)
class ImportPlan:
    """The tensors of the checkpoint, and the source of each of their chunks.

    Attributes:
        targets: The checkpoint's tensors.
        sources: What each chunk, ``(fqn, box)``, is read from.
        copies: Further sources of a chunk.
        left_out: Bytes of each entry that is not imported, by ``(what, why)``.
        faults: Why nothing can be written.
        tied: Bytes of output layers among the copies.
        padding: Bytes of vocabulary rows that are in no chunk.
    """

    targets: dict[str, Target] = field(default_factory=dict)
    sources: dict[tuple[str, Box], Source] = field(default_factory=dict)
    copies: list[tuple[str, Box, Source]] = field(default_factory=list)
    left_out: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    tied: int = 0
    padding: int = 0

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

    def add(self, fqn: str, box: Box, source: Source) -> bool:
        """Note the source of a chunk; return False if there is another one, which is kept."""
        is_first = (fqn, box) not in self.sources
        if is_first:
            self.sources[fqn, box] = source
        else:
            self.copies.append((fqn, box, source))
        return is_first

    def check_whole(self) -> None:
        """Note the tensors that the chunks do not tile."""
        boxes: dict[str, list[Box]] = {fqn: [] for fqn in self.targets}
        for fqn, box in self.sources:
            boxes[fqn].append(box)
        for fqn, target in self.targets.items():
            whole = Box((0,) * len(target.shape), target.shape)
            if not tiles(whole, boxes[fqn]):
                holes = uncovered(whole, boxes[fqn], limit=4)
                missing = ", ".join(format_box(hole, target.shape) for hole in holes)
                self.fault(
                    fqn,
                    f"no file has {missing}" if holes else "files hold parts that overlap",
                    "way out:     run dcp-placements verify, or megatron, on the source",
                )

    def compare_copies(self) -> None:
        """Read every chunk that several files hold, and note copies that differ."""
        for fqn, box, copy in self.copies:
            kept = self.sources[fqn, box]
            one, other = kept.read(), copy.read()
            if not same_bits(one, other):
                self.fault(
                    fqn,
                    f"{copy.file} and {kept.file} hold it, and differ in "
                    f"{int((one != other).sum())} of {one.numel()} elements",
                    "likely:      files of different steps or runs; a rank whose replica diverged",
                    "way out:     another iteration; or load it in Megatron, which takes one",
                )

    def write(
        self,
        output: AnyOutput,
        progress: Callable[[int, int], None],
        check: Callable[[], None],
    ) -> None:
        """Write the checkpoint, one file per file of the source; arguments as ``write_chunks``."""
        by_file: dict[str, list[Piece]] = {}
        for (fqn, box), source in self.sources.items():
            by_file.setdefault(source.file, []).append(Piece(fqn, box, source.read))
        write_chunks(output, self.targets, list(by_file.values()), progress, check)

    def report(
        self, layout: MegatronLayout, out: str | Path, notes: tuple[str, ...]
    ) -> ImportReport:
        """Return the report of the import."""
        return ImportReport(
            source=str(layout.path),
            out=str(out),
            layout=layout,
            keys=tuple(sorted(self.targets)),
            nbytes=sum(source.nbytes for source in self.sources.values()),
            copies=sum(source.nbytes for _, _, source in self.copies) - self.tied,
            tied=self.tied,
            padding=self.padding,
            left_out=tuple(
                LeftOut(what, why, len(nbytes), sum(nbytes))
                for (what, why), nbytes in self.left_out.items()
            ),
            notes=notes,
        )
