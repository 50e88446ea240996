"""Where each tensor of Megatron-LM's legacy files lies in the whole, and which is read for it.

Of chunks that several files hold, one is kept, after all have been found equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dcp_placements.bind.placing import place
from dcp_placements.errors import Fault, PlacementError
from dcp_placements.formats.megatron.files import (
    DISTRIBUTED,
    EMBEDDING,
    WEIGHTS,
    Coordinate,
    RankFiles,
    chunk_number,
    model_chunks,
)
from dcp_placements.formats.megatron.layout import MegatronLayout
from dcp_placements.formats.megatron.model import MegatronModel
from dcp_placements.formats.megatron.optimizer import (
    FLAT,
    MASTER,
    StateEntry,
    optimizer_entries,
    parameters,
)
from dcp_placements.formats.megatron.report import OF_THE_RUN, ImportReport, LeftOut
from dcp_placements.formats.megatron.torch_files import same_bits, tensors_in
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import format_box, tiles, uncovered
from dcp_placements.names.renames import Renames
from dcp_placements.offline.chunk_writer import Piece, Target
from dcp_placements.rules.patterns import PlacementRules

OUTPUT = "output_layer.weight"

_BLOB = "_extra_state"


@dataclass(frozen=True, slots=True)
class _Held:
    """A part of a tensor of one file.

    Attributes:
        file: The rank's directory.
        path: Keys from the top of the file's dict down to the tensor, or number.
        local: The part.
        nbytes: Of the part; 0 for a number.
    """

    file: str
    path: tuple[str | int, ...]
    local: Box
    nbytes: int


@dataclass(slots=True)
class Parts:
    """Which part of which file each chunk of the checkpoint is read from.

    Attributes:
        layout: What the source is.
        files: Its files.
        model: What they say together.
        refused: Why the optimizer is left out; empty where it is not.
        targets: The checkpoint's tensors.
        owners: What each chunk is read from.
        copies: What else holds a chunk.
        left_out: Bytes by ``(what, why)``.
        faults: What does not fit.
        tied: Bytes of output layers among the copies.
        padding: Bytes of vocabulary rows that are in no chunk.
        source_nbytes: Bytes of all tensors.
    """

    layout: MegatronLayout
    files: RankFiles
    model: MegatronModel
    refused: str
    targets: dict[str, Target] = field(default_factory=dict)
    owners: dict[tuple[str, Box], _Held] = field(default_factory=dict)
    copies: list[tuple[str, Box, _Held]] = field(default_factory=list)
    left_out: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    tied: int = 0
    padding: int = 0
    source_nbytes: int = 0

    def place(self) -> None:
        """Find the place of every tensor of every file, and who is read for each chunk."""
        for name, at in self.layout.coordinates.items():
            self._place_file(name, at)
        boxes: dict[str, list[Box]] = {}
        for fqn, box in self.owners:
            boxes.setdefault(fqn, []).append(box)
        for fqn, target in self.targets.items():
            whole = Box((0,) * len(target.shape), target.shape)
            if not tiles(whole, boxes.get(fqn, [])):
                holes = uncovered(whole, boxes.get(fqn, []), limit=4)
                told = ", ".join(format_box(hole, target.shape) for hole in holes)
                self._fault(
                    fqn, f"no file has {told}" if holes else "files hold parts that overlap"
                )

    def compare(self) -> None:
        """Read every chunk that several files hold: all are to be equal to the one that is kept."""
        for fqn, box, held in self.copies:
            kept = self.owners[fqn, box]
            one, other = self._read(kept), self._read(held)
            if not same_bits(one, other):
                self._fault(
                    fqn,
                    f"{held.file} and {kept.file} hold it, and differ in "
                    f"{int((one != other).sum())} of {one.numel()} elements",
                    "likely:      files of two moments or two runs; a rank that went its own way",
                    "way out:     another iteration; or load it in Megatron, which takes one",
                )

    def pieces(self) -> list[list[Piece]]:
        """Return what is written, by the file that it is read from."""
        by_file: dict[str, list[Piece]] = {}
        for (fqn, box), held in self.owners.items():
            piece = Piece(fqn, box, partial(self._read, held))
            by_file.setdefault(held.file, []).append(piece)
        return list(by_file.values())

    def report(self, out: Path) -> ImportReport:
        """Return what it came to.

        Raises:
            PlacementError: Bytes of the source that are neither written nor told of.
        """
        report = ImportReport(
            source=str(self.layout.path),
            out=str(out),
            layout=self.layout,
            keys=tuple(sorted(self.targets)),
            nbytes=sum(held.nbytes for held in self.owners.values()),
            copies=sum(held.nbytes for _, _, held in self.copies) - self.tied,
            tied=self.tied,
            padding=self.padding,
            left_out=tuple(
                LeftOut(what, why, len(nbytes), sum(nbytes))
                for (what, why), nbytes in sorted(self.left_out.items())
            ),
            notes=self._notes(),
        )
        if report.source_nbytes != self.source_nbytes:
            raise PlacementError(
                f"{self.layout.path}: {self.source_nbytes} bytes, of which "
                f"{report.source_nbytes} are accounted for"
            )
        return report

    def _notes(self) -> tuple[str, ...]:
        states = [fqn for fqn in self.targets if fqn.startswith("optimizer.state.")]
        if not states or any(fqn.endswith(f".{MASTER}") for fqn in states):
            return self.model.notes
        return (
            *self.model.notes,
            "the order of the optimizer's tensors is held against counts and shapes alone: there "
            "are no float32 copies of weights in the files",
        )

    def _fault(self, where: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(where, headline, details))

    def _place_file(self, name: str, at: Coordinate) -> None:
        held = self.files.open(name)
        self.source_nbytes += sum(_nbytes(tensor) for _, tensor in tensors_in(held))
        rules = self.model.rules(at)
        renames = {number: self.model.rename(at, number) for number, _ in model_chunks(held)}
        for top, value in held.items():
            number = chunk_number(top, value)
            if number is not None:
                self._place_chunk(name, top, value, rules, renames[number])
            elif top == "optimizer":
                self._place_optimizer(name, held, rules, renames)
            else:
                self._leave_out(str(top), OF_THE_RUN, value)
        for file in sorted((self.layout.path / name).iterdir()):
            if file.name != WEIGHTS:
                why = FLAT if file.name == DISTRIBUTED else "another file, not looked into"
                self.source_nbytes += file.stat().st_size
                self.left_out.setdefault((file.name, why), []).append(file.stat().st_size)

    def _place_chunk(
        self,
        name: str,
        top: str,
        chunk: Mapping[str, Any],
        rules: PlacementRules,
        rename: Renames,
    ) -> None:
        for key, value in chunk.items():
            if key.endswith(_BLOB) or value is None:
                self._leave_out(_BLOB, "Transformer Engine's own, of each rank", value)
            elif isinstance(value, torch.Tensor):
                self._place(name, (top, key), rename.name(key), "", value, rules)
            else:
                self._fault(
                    key,
                    f"{name} has a {type(value).__name__} there, no plain tensor",
                    "way out:     save it in Megatron with plain weights (no fp8 parameters)",
                )

    def _place_optimizer(
        self,
        name: str,
        held: Mapping[str, Any],
        rules: PlacementRules,
        renames: Mapping[int, Renames],
    ) -> None:
        taken = set()
        if not self.refused:
            for entry in state_entries(self.layout, name, held):
                value = _at(held, entry.path)
                taken.add(".".join(map(str, entry.path)))
                parameter = renames[entry.parameter.chunk].name(entry.parameter.name)
                self._place(name, entry.path, parameter, entry.name, value, rules)
        for where, tensor in tensors_in(held["optimizer"], ("optimizer",)):
            if where not in taken:
                what = "optimizer" if self.refused else f"optimizer: {where.rpartition('.')[2]}"
                why = self.refused or OF_THE_RUN
                self.left_out.setdefault((what, why), []).append(_nbytes(tensor))
        if not self.refused:
            groups = "optimizer: hyperparameters", OF_THE_RUN
            self.left_out.setdefault(groups, []).append(0)
        elif not taken:
            self.left_out.setdefault(("optimizer", self.refused), []).append(0)

    def _place(
        self,
        name: str,
        path: tuple[str | int, ...],
        parameter: str,
        state: str,
        value: Any,
        rules: PlacementRules,
    ) -> None:
        """Note where a tensor lies, and whether it is read or compared.

        Args:
            name: Its rank's directory.
            path: Where it is in the file.
            parameter: Its name in the whole, or that of the parameter whose state it is.
            state: Which state of it; empty for the parameter itself.
            value: The tensor, or a number.
            rules: Of this file.
        """
        is_tied = self.model.tied and parameter == OUTPUT
        parameter = EMBEDDING if is_tied else parameter
        fqn = f"optimizer.state.{parameter}.{state}" if state else parameter
        tensor = _tensor(value)
        if tensor.dim() and rules.find(parameter) is None and self._needs_rule(parameter):
            self._fault(
                parameter,
                "no rule of the preset says whether parallelism cuts it",
                f"found:       a tensor of {tuple(tensor.shape)} in {name}",
            )
            return
        placing = place({fqn: tensor}, rules, 0)
        if placing.faults:
            self.faults += placing.faults
            return
        placed = placing.placed.get(fqn)
        if placed is None:
            whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
            target = Target(whole.sizes, tensor.dtype)
            parts = [(whole, whole)]
        else:
            target = Target(placed.global_shape, tensor.dtype)
            parts = [(Box(chunk.local_offsets, chunk.sizes), chunk.box) for chunk in placed.chunks]
        wanted = self.targets.setdefault(fqn, target)
        if wanted != target:
            self._fault(
                fqn,
                f"{name} makes it {target.dtype} of {target.shape}, another file {wanted.dtype} of "
                f"{wanted.shape}",
            )
            return
        itemsize = tensor.itemsize if isinstance(value, torch.Tensor) else 0
        for local, box in parts:
            held = _Held(name, path, local, box.numel * itemsize)
            self.padding -= held.nbytes
            if self.owners.setdefault((fqn, box), held) is not held:
                self.copies.append((fqn, box, held))
                self.tied += held.nbytes if is_tied else 0
        # What of the tensor is in no part.
        self.padding += tensor.numel() * itemsize

    def _needs_rule(self, parameter: str) -> bool:
        sizes = self.model.sizes
        return (sizes.tp or 1) > 1 or ((sizes.ep or 1) > 1 and ".experts." in parameter)

    def _leave_out(self, what: str, why: str, value: Any) -> None:
        nbytes = sum(_nbytes(tensor) for _, tensor in tensors_in(value))
        self.left_out.setdefault((what, why), []).append(nbytes)

    def _read(self, held: _Held) -> torch.Tensor:
        """Return a part of a tensor; mapped, not copied."""
        tensor = _tensor(_at(self.files.open(held.file, held.nbytes), held.path))
        for dim, (offset, size) in enumerate(zip(*held.local, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def _at(held: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        held = held[key]
    return held


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def state_entries(layout: MegatronLayout, name: str, held: Mapping[str, Any]) -> list[StateEntry]:
    """Return what a file's optimizer holds, each with its parameter.

    Raises:
        NotRecoverable: They cannot be told apart.
    """
    flat = (layout.path / name / DISTRIBUTED).is_file()
    return optimizer_entries(held, parameters(model_chunks(held)), flat_files=flat)
