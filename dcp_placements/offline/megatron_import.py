"""Megatron-LM's legacy files as one DCP checkpoint of whole tensors.

Each file is one rank's part. Its coordinate comes from its name and the run's arguments, its layers
and experts get the numbers that they have in the whole, and the rules say where each tensor lies.
Of chunks that several files hold, one is written, after all have been found equal bit for bit.
Every byte of the source is written, found equal to one that is, or listed with the reason why not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_nbytes,
    raise_faults,
)
from dcp_placements.layout import Box
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint
from dcp_placements.offline.chunk_writer import Piece, Target, check_absent, write_chunks
from dcp_placements.offline.megatron_dist import plan_dist
from dcp_placements.offline.megatron_files import (
    DISTRIBUTED,
    WEIGHTS,
    Coordinate,
    RankFiles,
    model_chunks,
)
from dcp_placements.offline.megatron_layout import MegatronLayout, megatron_layout
from dcp_placements.offline.megatron_model import MegatronModel, learn_model
from dcp_placements.offline.megatron_optimizer import (
    FLAT,
    MASTER,
    NotRecoverable,
    StateEntry,
    optimizer_entries,
    parameters,
)
from dcp_placements.offline.torch_files import same_bits, tensors_in
from dcp_placements.placing import place
from dcp_placements.renaming import Renames
from dcp_placements.rules import PlacementRules
from dcp_placements.tiling import format_box, tiles, uncovered

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

_OF_THE_RUN = "of the run, not of the model"
_BLOB = "_extra_state"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something in the source that is not in the checkpoint.

    Attributes:
        what: Its name in the file, numbers as ``*`` where alike ones are told together.
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
    """What an import came to.

    Attributes:
        source: The directory of the iteration.
        out: The checkpoint.
        layout: What the source is.
        keys: Of the checkpoint, sorted.
        nbytes: Written: the bytes of the whole tensors.
        copies: Bytes found equal to written ones: replicated weights, doubles.
        tied: Bytes of output layers found equal to the word embedding.
        padding: Bytes of vocabulary rows beyond the true ones.
        left_out: The rest.
        notes: What to look at.
    """

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
        out = sum(part.nbytes for part in self.left_out)
        return self.nbytes + self.copies + self.tied + self.padding + out

    def as_json(self) -> dict[str, Any]:
        """Return what the command prints with ``--json``."""
        return {
            "source": self.source,
            "out": self.out,
            "keys": len(self.keys),
            "bytes": self.nbytes,
            "source_bytes": self.source_nbytes,
            "copies": self.copies,
            "tied": self.tied,
            "padding": self.padding,
            "left_out": [
                {"what": p.what, "why": p.why, "entries": p.entries, "bytes": p.nbytes}
                for p in self.left_out
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [
            f"import of {len(self.keys)} tensors from {self.source}",
            f"    layout:    {self.layout.reason}",
            f"    source:    {format_nbytes(self.source_nbytes)} in {len(self.layout.files)} files",
            f"    written:   {format_nbytes(self.nbytes)} to {self.out}",
            f"    copies:    {format_nbytes(self.copies)}, found equal",
        ]
        if self.tied:
            lines.append(f"    tied:      {format_nbytes(self.tied)}, equal to the word embedding")
        if self.padding:
            lines.append(f"    padding:   {format_nbytes(self.padding)} of the vocabulary, dropped")
        alike: dict[str, list[LeftOut]] = {}
        for part in self.left_out:
            alike.setdefault(part.why, []).append(part)
        for why, parts in alike.items():
            nbytes = format_nbytes(sum(part.nbytes for part in parts))
            names = ", ".join(part.what for part in parts)
            lines += [f"    left out:  {names} ({nbytes})", f"               {why}"]
        return "\n".join([*lines, *(f"    note:      {note}" for note in self.notes)])


def import_megatron(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    preset: str = "megatron_core",
    vocab_size: int | None = None,
    optimizer: bool | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImportReport:
    """Turn Megatron's files into an ordinary DCP checkpoint of the model's keys, chunk by chunk.

    From ``mp_rank_*`` files, or from ``torch_dist`` with its axes of layers and experts.

    Keys are Megatron's own, layers and experts numbered over all ranks; gate stands before up, and
    the padding rows of the vocabulary are left out. Optimizer state is
    ``optimizer.state.<parameter>.<name>``. Layers are counted over the stages in the order of their
    chunks; a tied output layer is the word embedding, once.

    Args:
        source: The directory of one iteration, or of all with the tracker file.
        out: The checkpoint's directory, which must not be there. It appears when all is written.
        preset: Whose names the weights have; ``"megatron_core"``.
        vocab_size: Rows of the vocabulary without padding; by default what the run's arguments say,
            and all rows where they say nothing.
        optimizer: True: an error where its state cannot be imported. False: leave it out. None:
            import it where it can be, and list it with the reason where not.
        expert_parallel_size: As in ``megatron_layout``; needed where the directory is ambiguous.
        expert_tensor_parallel_size: Of the experts, where the files hold no arguments.
        progress: Told the bytes written, and to be written.

    Returns:
        What was written, what was found equal, and what was left out.

    Raises:
        CannotLook: No Megatron checkpoint, or a file that cannot be read or is refused.
        PlacementError: Files that are missing or contradict each other, weights that no rule names,
            chunks that do not make whole tensors; all of them at once, and nothing is written.
    """
    target = check_absent(out)
    if preset != "megatron_core":
        raise PlacementError(f"there is no preset {preset!r} for this: use 'megatron_core'")
    layout = megatron_layout(source, expert_parallel_size=expert_parallel_size)
    _check_layout(layout)
    if layout.format != "torch":
        return _import_dist(layout, target, vocab_size, optimizer, progress)
    files = RankFiles(layout.path)
    args = files.open(next(iter(layout.coordinates))).get("args")
    if not isinstance(args, argparse.Namespace):
        args = argparse.Namespace()
    layout = _with_expert_cut(layout, expert_tensor_parallel_size)
    model = learn_model(files, layout.coordinates, layout.sizes, args, vocab_size)
    refused = "not asked for"
    if optimizer is not False:
        refused = _refusal(layout, files)
        if optimizer and refused:
            raise PlacementError(f"{layout.path}: the optimizer cannot be imported: {refused}")
    run = _Import(layout, files, model, refused)
    run.place()
    raise_faults(f"{layout.path} cannot be put together", run.faults)
    run.compare()
    raise_faults(f"{layout.path}: files contradict each other", run.faults)
    total = sum(held.nbytes for held in run.owners.values())
    write_chunks(target, run.targets, run.pieces(), _counted(progress, total))
    return run.report(target)


def _check_layout(layout: MegatronLayout) -> None:
    if layout.layout == "ambiguous":
        raise PlacementError(f"{layout.path}: {layout.reason}")
    raise_faults(
        f"{layout.path} cannot be imported as it is",
        [Fault("checkpoint", line) for line in layout.mismatches],
    )


def _counted(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return step


def _import_dist(
    layout: MegatronLayout,
    target: Path,
    vocab_size: int | None,
    optimizer: bool | None,
    progress: Callable[[int, int], None],
) -> ImportReport:
    """Import a DCP checkpoint of Megatron's: one key per layer and expert."""
    checkpoint = Checkpoint(layout.path)
    left_out = [
        LeftOut(key, "an object, which is not executed", 1, 0) for key in checkpoint.objects
    ]
    left_out += [
        LeftOut(name, _OF_THE_RUN, 1, nbytes)
        for name, nbytes in checkpoint.other_files.items()
        if name not in (".metadata", "metadata.json")
    ]
    for key in list(checkpoint.tensors):
        why = None
        if key.startswith("optimizer.") and optimizer is False:
            why = "not asked for"
        elif key.startswith("optimizer.distributed."):
            why = FLAT
            if optimizer:
                raise PlacementError(f"{layout.path}: the optimizer cannot be imported: {why}")
        if why is not None:
            tensor = checkpoint.tensors.pop(key)
            nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
            left_out.append(LeftOut(key, why, 1, nbytes))
    with BoxReader(checkpoint) as reader:
        plan = plan_dist(checkpoint, reader, vocab_size)
        write_chunks(target, plan.targets, plan.files, _counted(progress, plan.nbytes))
    return ImportReport(
        source=str(layout.path),
        out=str(target),
        layout=layout,
        keys=tuple(sorted(plan.targets)),
        nbytes=plan.nbytes,
        copies=0,
        tied=0,
        padding=plan.padding,
        left_out=tuple(left_out),
    )


def _with_expert_cut(layout: MegatronLayout, etp: int | None) -> MegatronLayout:
    """Return the layout with the experts' tensor-parallel size that is given."""
    known, tp = layout.sizes.etp, layout.sizes.tp or 1
    if etp is None or etp == known:
        return layout
    if known is not None or tp % etp:
        raise PlacementError(
            f"expert_tensor_parallel_size={etp} does not fit: "
            + (f"the files say {known}" if known is not None else f"it must divide TP {tp}")
        )
    # ETP is innermost and divides TP, so it counts the same ranks anew.
    coordinates = {n: replace(at, etp=at.tp % etp) for n, at in layout.coordinates.items()}
    return replace(layout, sizes=replace(layout.sizes, etp=etp), coordinates=coordinates)


def _refusal(layout: MegatronLayout, files: RankFiles) -> str:
    """Return why the optimizer cannot be imported; empty where it can."""
    for name in layout.coordinates:
        try:
            _state_entries(layout, name, files.open(name))
        except NotRecoverable as error:
            return str(error)
    return ""


def _state_entries(layout: MegatronLayout, name: str, held: Mapping[str, Any]) -> list[StateEntry]:
    flat = (layout.path / name / DISTRIBUTED).is_file()
    return optimizer_entries(held, parameters(model_chunks(held)), flat_files=flat)


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
class _Import:
    """An import on its way: which part of which file each chunk is read from."""

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
        chunks = {id(chunk): number for number, chunk in model_chunks(held)}
        for top, value in held.items():
            if id(value) in chunks:
                self._place_chunk(name, top, value, rules, renames[chunks[id(value)]])
            elif top == "optimizer":
                self._place_optimizer(name, held, rules, renames)
            else:
                self._leave_out(str(top), _OF_THE_RUN, value)
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
            for entry in _state_entries(self.layout, name, held):
                value = _at(held, entry.path)
                taken.add(id(value))
                parameter = renames[entry.parameter.chunk].name(entry.parameter.name)
                self._place(name, entry.path, parameter, entry.name, value, rules)
        for where, tensor in tensors_in(held["optimizer"]):
            if id(tensor) not in taken:
                what = "optimizer" if self.refused else f"optimizer: {where.rpartition('.')[2]}"
                why = self.refused or _OF_THE_RUN
                self.left_out.setdefault((what, why), []).append(_nbytes(tensor))
        if not self.refused:
            groups = "optimizer: hyperparameters", _OF_THE_RUN
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
