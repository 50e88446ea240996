"""What is converted: a checkpoint, or a torch file per rank, as tensors whose boxes can be read.

Ranks' files are put together as whole tensors: copies compared bit for bit, holes found. Each file
is one rank's state dict. A DTensor in it says how its mesh cuts it; what it does not say (the ep
rank whose experts these are) a ``Placements`` per rank does, as for a save of that rank.

verl's FSDP trainers leave, of a world of 8 ranks, in ``global_step_N/actor``::

    model_world_size_8_rank_0.pt .. _rank_7.pt        the model: DTensors of FSDP2
    optim_world_size_8_rank_0.pt ..                   the optimizer's state, by position
    extra_state_world_size_8_rank_0.pt ..             schedule and random states
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from dcp_placements.bind.state_dict import place
from dcp_placements.convert.torch_files import (
    REBUILT,
    SavedDTensor,
    check_contents,
    load_torch_file,
    nbytes_in,
)
from dcp_placements.errors import (
    CannotLook,
    CannotPlace,
    Fault,
    PlacementError,
    RankFaults,
    format_names,
    raise_faults,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import rename_keys
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.offline.assembly import AssembledTensor, Block
from dcp_placements.offline.box_reads import BoxReader
from dcp_placements.offline.checkpoint import Checkpoint, SourceTensor, StoredRecord
from dcp_placements.offline.difference import same_bits
from dcp_placements.offline.directory import Directory
from dcp_placements.offline.verification import box_faults
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.safe_pickle import Made
from dcp_placements.storage.saved_dtensor import rank_shard
from dcp_placements.transfer.world import MeshAxes, format_mesh_axes, rules_at

_BY_POSITION = (
    "optimizer state by the position of its parameters, whose names are in no file: save it by "
    "name (get_optimizer_state_dict)"
)
_VERLS_MODEL = re.compile(r"model_world_size_(\d+)_rank_\{rank\}\.pt")
_VERLS_OTHERS = {
    "optim_world_size_": "optimizer state by position: no file has the names of its parameters",
    "extra_state_world_size_": "schedule and random states: of the run, not of the model",
}


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


@dataclass(eq=False, slots=True)
class FilePiece(SourceTensor):
    """What a rank's file has of a tensor, such as the rows of the second of two ep ranks::

    FilePiece("model_rank_1.pt", (2, 3), torch.float32, (0, 0), tensor of (2, 3))
    """

    fqn: str  # the name of the file
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: tuple[int, ...]  # where it begins in the file's tensor
    data: torch.Tensor  # the elements: mapped, not read


class RankSource(Source):
    """Tensors of ranks' files, put together. Every byte is placed, or left out for a reason.

    Args:
        directory: Of the files.
        versions: Of those with tensors, from before they were read.
    """

    def __init__(self, directory: Directory, versions: dict[str, str]) -> None:
        super().__init__(directory, {}, versions)
        self.faults: list[Fault] = []
        self._whole: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # by key
        self._pieces: dict[tuple[str, Box], FilePiece] = {}
        self._copies: list[tuple[str, FilePiece, FilePiece]] = []
        self._left_out: dict[tuple[str, str], LeftOut] = {}
        self._padding = 0

    def reader(self) -> Any:
        """Return what reads its tensors: itself, because files are mapped."""
        return nullcontext(self)

    def read(self, tensor: Any, box: Box) -> torch.Tensor:
        """Return the elements of a box."""
        if not isinstance(tensor, FilePiece):
            return tensor.read(self, box)  # type: ignore[no-any-return]
        return tensor.data[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))]

    def runs(self, tensor: Any, box: Box) -> None:
        """Return no runs of bytes to copy: elements come through memory."""

    def leave_out(self, what: str, why: str, nbytes: int) -> None:
        """Note something that is no tensor of the model."""
        part = self._left_out.setdefault((what, why), LeftOut(what, why))
        part.entries += 1
        part.nbytes += nbytes

    def add(
        self,
        file: str,
        state_dict: Mapping[str, Any],
        rules: Rules | None,
        rename: Rename | None = None,
    ) -> None:
        """Place the tensors of one rank, as a save of that rank does.

        Args:
            file: The name of its file.
            state_dict: Tensors and ``RankShard``s, by the rank's own keys.
            rules: Its own.
            rename: Its own.
        """
        try:
            flat, mappings, reshaped, _ = rename_keys(dict(state_dict), {}, rename)
        except RankFaults as error:
            self.faults += error.faults
            return
        placing = place(flat, rules, mappings, reshaped, None, rename)
        self.faults += placing.faults
        for fqn, value in placing.state_dict.items():
            placed = placing.placed.get(fqn)
            if placed is not None:
                boxes = [(one.box, one.local_offsets, placed.view(one)) for one in placed.chunks]
                self._padding += sum([tensor.nbytes for tensor in placed.tensors])
                self._padding -= sum([view.nbytes for *_, view in boxes])
                self._add(file, fqn, placed.global_shape, placed.tensor.dtype, boxes)
            elif fqn not in placing.absent:
                whole = Box.whole(tuple(value.shape))
                self._add(file, fqn, whole.sizes, value.dtype, [(whole, whole.offsets, value)])

    def _add(
        self,
        file: str,
        fqn: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        boxes: Iterable[tuple[Box, tuple[int, ...], torch.Tensor]],
    ) -> None:
        whole = self._whole.setdefault(fqn, (shape, dtype))
        if whole != (shape, dtype):
            other = f"another one {whole[1]} of {whole[0]}"
            self.faults.append(Fault(fqn, f"{file} makes it {dtype} of {shape}, {other}"))
            return
        for box, at, view in boxes:
            piece = FilePiece(file, box.sizes, dtype, at, view.detach())
            first = self._pieces.setdefault((fqn, box), piece)
            if first is not piece:
                self._copies.append((fqn, first, piece))

    def described(self) -> Iterator[object]:
        """Yield which boxes of which files its tensors are."""
        for (fqn, box), piece in self._pieces.items():
            yield fqn, box, piece.fqn, piece.at

    @property
    def nbytes(self) -> int:
        """Bytes of all that was collected or left out."""
        held = [*self._pieces.values(), *[copy for _, _, copy in self._copies]]
        left_out = sum([part.nbytes for part in self._left_out.values()])
        return sum([piece.data.nbytes for piece in held]) + self._padding + left_out

    def check(self) -> RankSource:
        """Return it when it is whole and was compared.

        Raises:
            PlacementError: The files do not make whole tensors, or contradict each other.
        """
        blocks: dict[str, list[Block]] = {fqn: [] for fqn in self._whole}
        for (fqn, box), piece in self._pieces.items():
            dims = tuple(range(len(box.sizes)))
            blocks[fqn].append(Block(box, piece, piece.whole, dims))
        way_out = ("way out:     the files of all ranks, of one save",)
        for fqn, (shape, _) in self._whole.items():
            found = box_faults(Box.whole(shape), [block.box for block in blocks[fqn]])
            self.faults += [Fault(fqn, message, way_out) for _, message in found]
        raise_faults(f"{self.path} cannot be put together", self.faults)
        self.tensors = {
            fqn: AssembledTensor(fqn, *whole, tuple(blocks[fqn]))
            for fqn, whole in self._whole.items()
        }
        if not self.tensors:
            raise PlacementError(f"{self.path}: its files hold no tensor of a model")
        differing = [fault for copy in self._copies for fault in _differences(*copy)]
        raise_faults(f"{self.path}: files contradict each other", differing)
        self.left_out = sorted(self._left_out.values(), key=lambda part: (part.what, part.why))
        accounted = {
            "source": self.nbytes,
            "copies, found equal": sum([copy.data.nbytes for _, _, copy in self._copies]),
            "padding, dropped": self._padding,
        }
        self.accounted = {what: nbytes for what, nbytes in accounted.items() if nbytes}
        return self


def _differences(fqn: str, kept: FilePiece, copy: FilePiece) -> list[Fault]:
    """Return that two files hold different contents of one box."""
    one, other = kept.data, copy.data
    if same_bits(one, other):
        return []
    return [
        Fault(
            fqn,
            f"{copy.fqn} and {kept.fqn} hold it, and differ in {int((one != other).sum())} of "
            f"{one.numel()} elements",
            (
                "likely:      an axis that cuts it (ep) is in no rule and no DTensor; or the files "
                "are of different steps, or a replica diverged",
                "way out:     rules that name the axis (--rules, --mesh); else other files",
            ),
        )
    ]


def rank_files_source(
    path: str | os.PathLike[str],
    *,
    files: str | None = None,
    rules: Callable[..., Any] | None = None,
    axes: MeshAxes | None = None,
) -> RankSource:
    """Return a torch file per rank as a source of whole tensors.

    Args:
        path: The directory, of this machine.
        files: The files' name with ``{rank}`` for the rank's number, such as
            ``"shard_{rank}.pt"``; by default verl's, or the only names that end in ``rank_N``.
        rules: ``mesh -> Placements``, as for ``rehearse``: what each rank would declare to a save.
            None where DTensors say all.
        axes: The mesh of all ranks, for the rules: sizes by axis name, the last axis fastest in
            rank order.

    Raises:
        CannotLook: There are no such files, names of several kinds, or a file that cannot be read,
            or that asks for more than tensors, plain values and classes of a training run.
        PlacementError: Ranks are missing; files contradict each other, or do not make whole
            tensors.
    """
    folder = local_directory(path)
    names = _by_rank(folder, files)
    directory = Directory(folder)
    source = RankSource(directory, directory.versions(names))
    source.notes = (f"files of {len(names)} ranks",)
    axes = axes or {"rank": len(names)}
    if prod(axes.values()) != len(names):
        of = f"a mesh of {prod(axes.values())}: {format_mesh_axes(axes)}"
        raise PlacementError(f"{folder}: files of {len(names)} ranks, and {of}")
    for rank, name in enumerate(names):
        contents = load_torch_file(folder / name)
        check_contents(folder / name)
        if not isinstance(contents, Mapping):
            raise CannotLook(f"{folder / name}: holds a {type(contents).__name__}, and no dict")
        declared, rename, _ = (None, None, None) if rules is None else rules_at(rules, axes, rank)
        try:
            named = list(_tensors(contents, "", rank, source))
        except RecursionError as error:
            raise CannotLook(f"{folder / name}: dicts are nested too deeply in it") from error
        state_dict = dict(named)
        if len(state_dict) < len(named):
            keys = [key for key, count in Counter(key for key, _ in named).items() if count > 1]
            raise CannotLook(f"{folder / name}: several tensors have one key: {format_names(keys)}")
        source.add(name, state_dict, declared, rename)
    for other in sorted(set(directory.names()) - set(names)):
        why = _why_left_out(other)
        if why and (folder / other).is_file():
            kind = re.sub(r"_rank_\d+", "", other)
            source.leave_out(kind, why, (folder / other).stat().st_size)
    return source.check()


def _tensors(
    value: Mapping[Any, Any], prefix: str, rank: int, source: RankSource
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts by their dotted keys, and note what else there is."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nbytes = nbytes_in(inner)
        if not isinstance(key, str):
            source.leave_out(prefix.rstrip("."), _BY_POSITION, nbytes)
        elif isinstance(inner, Mapping):
            yield from _tensors(inner, f"{name}.", rank, source)
        elif isinstance(inner, SavedDTensor):
            try:
                shard = rank_shard(inner.local, inner.made, rank)
            except CannotPlace as error:
                source.faults.append(error.fault(name))
                continue
            if shard is not None:
                yield name, shard
        elif isinstance(inner, torch.Tensor):
            yield name, inner
        elif isinstance(inner, Made) and inner.by.startswith(REBUILT):
            headline = f"is a tensor with more than elements: {inner.by}"
            way_out = "way out:     save it again as a plain tensor"
            source.faults.append(Fault(name, headline, (way_out,)))
        else:
            source.leave_out(name, "no tensor", nbytes)


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Return a directory of this machine, whose files can be mapped.

    Raises:
        CannotLook: It is elsewhere, or not there.
    """
    folder = Directory(path).local("")
    if folder is None:
        raise CannotLook(
            f"{os.fspath(path)}: ranks' files are mapped into memory\n"
            "    way out:     copy them to a disk of this machine"
        )
    return folder


def rank_file_names(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return names that end in a rank's number, by rank, by what they have in common.

    >>> rank_file_names(["m_rank_0.pt", "m_rank_1.pt", "notes.txt"])
    {'m_rank_{rank}.pt': {0: 'm_rank_0.pt', 1: 'm_rank_1.pt'}}
    """
    kinds: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        match = re.fullmatch(r"(.*rank[_-]?)(\d+)(\.(?:pt|pth|bin))", name)
        if match is not None:
            kind = f"{match[1]}{{rank}}{match[3]}"
            kinds.setdefault(kind, {})[int(match[2])] = name
    return kinds


def _why_left_out(name: str) -> str | None:
    """Return why a file of verl's is no part of the model; None of other files."""
    return next((why for head, why in _VERLS_OTHERS.items() if name.startswith(head)), None)


def _by_rank(folder: Path, files: str | None) -> Sequence[str]:
    """Return the name of each rank's file, in rank order."""
    names = os.listdir(folder)
    kinds = rank_file_names(names)
    if files is not None:
        head, _, tail = files.partition("{rank}")
        pattern = re.compile(f"{re.escape(head)}(\\d+){re.escape(tail)}")
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        kinds = {files: {int(match[1]): match[0] for match in matches}} if matches else {}
    else:
        models = [kind for kind in kinds if _VERLS_MODEL.fullmatch(kind)]
        kinds = {kind: kinds[kind] for kind in models or kinds if not _why_left_out(kind)}
    if len(kinds) != 1:
        raise CannotLook(
            f"{folder}: {'files of several kinds' if kinds else 'no file per rank'}\n"
            f"    found:       {format_names(list(kinds) or sorted(names), 6) or 'nothing'}\n"
            "    way out:     files= (--files NAME_{rank}.pt) says which"
        )
    ((kind, by_rank),) = kinds.items()
    verls = _VERLS_MODEL.fullmatch(kind)
    size = int(verls[1]) if verls else max(by_rank) + 1
    missing = [str(rank) for rank in range(size) if rank not in by_rank]
    if missing or len(by_rank) > size:
        headline = f"of {size} ranks these have no file: {format_names(missing, 8)}"
        raise_faults(f"{folder} is not complete", [Fault(kind, headline)])
    return [by_rank[rank] for rank in range(size)]
