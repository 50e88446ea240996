"""A torch file per rank as whole tensors: copies compared bit for bit, holes found.

Each file is one rank's state dict. A DTensor in it says how its mesh cuts it; what it does not say
(the ep rank whose experts these are) a ``Placements`` per rank does, as for a save of that rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_placements.bind.one_tensor import Placed
from dcp_placements.bind.state_dict import place
from dcp_placements.convert.sources import LeftOut, Piece, RankTensor, Source
from dcp_placements.convert.torch_files import RankShard, load_torch_file, tensors_in
from dcp_placements.errors import (
    CannotLook,
    CannotPlace,
    Fault,
    PlacementError,
    RankFaults,
    format_faults,
    format_names,
    raise_faults,
)
from dcp_placements.layout.boxes import as_array, format_boxes, tile, uncovered
from dcp_placements.layout.sharding import Box
from dcp_placements.names.flat import rename_keys
from dcp_placements.offline.comparing import same_bits
from dcp_placements.offline.declared import Rename
from dcp_placements.offline.directory import Directory
from dcp_placements.presets import verl
from dcp_placements.rules.patterns import Rules
from dcp_placements.transfer.world import MeshAxes, rules_at

NO_TENSOR = "no tensor"
BY_POSITION = (
    "optimizer state by the position of its parameters, whose names are in no file: save it by "
    "name (get_optimizer_state_dict)"
)


@dataclass(slots=True)
class RankTensors:
    """Collects the tensors that ranks' files make. Every byte is placed, or left out for a reason.

    Attributes:
        tensors: By key.
        faults: Why they do not make a model.
        copied: Bytes of copies of boxes that another file has, too.
        tied: Likewise, of tensors under another name.
        padding: Bytes that are in no box.
    """

    tensors: dict[str, RankTensor] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    copied: int = 0
    tied: int = 0
    padding: int = 0
    _boxes: dict[tuple[str, Box], Piece] = field(default_factory=dict)
    _copies: list[tuple[RankTensor, Piece, Piece]] = field(default_factory=list)
    _left_out: dict[tuple[str, str], LeftOut] = field(default_factory=dict)

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
                self._add_placed(file, placed)
            elif fqn not in placing.absent:
                whole = Box.whole(tuple(value.shape))
                self._add(file, fqn, whole.sizes, value, [(whole, whole, value)])

    def _add_placed(self, file: str, placed: Placed) -> None:
        boxes = [
            (chunk.box, Box(chunk.local_offsets, chunk.sizes), placed.view(chunk))
            for chunk in placed.chunks
        ]
        self._add(file, placed.fqn, placed.global_shape, placed.tensor, boxes)
        held = sum([tensor.nbytes for tensor in placed.tensors])
        self.padding += held - sum([view.nbytes for _, _, view in boxes])

    def _add(
        self,
        file: str,
        fqn: str,
        shape: tuple[int, ...],
        tensor: torch.Tensor,
        boxes: Iterable[tuple[Box, Box, torch.Tensor]],
    ) -> None:
        whole = self.tensors.setdefault(fqn, RankTensor(fqn, shape, tensor.dtype))
        if (whole.shape, whole.dtype) != (shape, tensor.dtype):
            headline = (
                f"{file} makes it {tensor.dtype} of {shape}, another one {whole.dtype} of "
                f"{whole.shape}"
            )
            self.faults.append(Fault(fqn, headline))
            return
        for box, local, view in boxes:
            piece = Piece(box, file, local, view.detach())
            first = self._boxes.setdefault((fqn, box), piece)
            if first is piece:
                whole.pieces.append(piece)
            else:
                self.copied += view.nbytes
                self._copies.append((whole, first, piece))

    def source(
        self, directory: Directory, versions: dict[str, str], notes: Sequence[str] = ()
    ) -> Source:
        """Return what was collected, when it was compared.

        Args:
            directory: Of the files.
            versions: Of those with tensors, from before they were read.
            notes: Lines for a report.

        Raises:
            PlacementError: The files do not make whole tensors, or contradict each other.
        """
        path = directory.path
        for tensor in self.tensors.values():
            self.faults += _holes(tensor)
        raise_faults(f"{path} cannot be put together", self.faults)
        faults = [fault for copy in self._copies for fault in _differences(*copy)]
        raise_faults(f"{path}: files contradict each other", faults)
        left_out = sorted(self._left_out.values(), key=lambda part: (part.what, part.why))
        accounted = {
            "source": self.nbytes,
            "copies, found equal": self.copied,
            "tied, found equal": self.tied,
            "padding, dropped": self.padding,
        }
        source = Source(
            directory,
            self.tensors,
            list(versions),
            left_out=left_out,
            accounted={what: nbytes for what, nbytes in accounted.items() if nbytes},
            notes=notes,
        )
        source.versions = versions
        return source

    @property
    def nbytes(self) -> int:
        """Bytes of all that was collected or left out."""
        pieces = sum([piece.data.nbytes for piece in self._boxes.values()])
        left_out = sum([part.nbytes for part in self._left_out.values()])
        return pieces + self.copied + self.tied + self.padding + left_out


def _holes(tensor: RankTensor) -> list[Fault]:
    """Return that the pieces of a tensor do not tile it."""
    whole = Box.whole(tensor.shape)
    boxes = as_array([piece.box for piece in tensor.pieces], len(tensor.shape))
    if not prod(tensor.shape) or tile(whole, boxes):
        return []
    holes = uncovered(whole, boxes)
    if holes:
        headline = f"no file has {format_boxes(holes, tensor.shape)}"
    else:
        headline = "files hold parts that overlap"
    return [Fault(tensor.fqn, headline, ("way out:     the files of all ranks, of one save",))]


def _differences(tensor: RankTensor, kept: Piece, copy: Piece) -> list[Fault]:
    """Return that two files hold different contents of one box."""
    one, other = kept.data, copy.data
    if same_bits(one, other):
        return []
    return [
        Fault(
            tensor.fqn,
            f"{copy.file} and {kept.file} hold it, and differ in {int((one != other).sum())} of "
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
) -> Source:
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
    versions = directory.versions(names.values())
    if axes is not None and prod(axes.values()) != len(names):
        raise PlacementError(
            f"{folder}: files of {len(names)} ranks, and a mesh of {prod(axes.values())}: "
            f"{', '.join(f'{axis}={size}' for axis, size in axes.items())}"
        )
    found = RankTensors()
    for rank, name in names.items():
        contents = load_torch_file(folder / name)
        if not isinstance(contents, Mapping):
            raise CannotLook(f"{folder / name}: holds a {type(contents).__name__}, and no dict")
        declared, rename = None, None
        if rules is not None:
            declared, rename, _ = rules_at(rules, axes or {"rank": len(names)}, rank)
        state_dict: dict[str, Any] = {}
        try:
            _flatten(contents, "", rank, state_dict, found)
        except RecursionError as error:
            raise CannotLook(f"{folder / name}: dicts are nested too deeply in it") from error
        found.add(name, state_dict, declared, rename)
    for other in sorted(set(os.listdir(folder)) - set(names.values())):
        if (folder / other).is_file() and (why := verl.why_left_out(other)):
            found.leave_out(re.sub(r"_rank_\d+", "", other), why, (folder / other).stat().st_size)
    return found.source(directory, versions, (f"files of {len(names)} ranks",))


def _flatten(
    value: Mapping[Any, Any], prefix: str, rank: int, flat: dict[str, Any], found: RankTensors
) -> None:
    """Note the tensors of nested dicts by their dotted keys, and what else there is."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nbytes = sum(tensor.nbytes for tensor in tensors_in(inner))
        if not isinstance(key, str):
            found.leave_out(prefix.rstrip("."), BY_POSITION, nbytes)
        elif isinstance(inner, Mapping):
            _flatten(inner, f"{name}.", rank, flat, found)
        elif isinstance(inner, DTensor):
            try:
                flat[name] = RankShard.of(inner, rank)
            except CannotPlace as error:
                found.faults.append(error.fault(name))
        elif isinstance(inner, torch.Tensor):
            flat[name] = inner.detach()
        else:
            found.leave_out(name, NO_TENSOR, nbytes)


def local_directory(path: str | os.PathLike[str]) -> Path:
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


def _by_rank(folder: Path, files: str | None) -> dict[int, str]:
    """Return the name of each rank's file, in rank order."""
    names = os.listdir(folder)
    world_size = None
    if files is not None:
        head, _, tail = files.partition("{rank}")
        pattern = re.compile(f"{re.escape(head)}(\\d+){re.escape(tail)}")
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        kinds = {files: {int(match[1]): match[0] for match in matches}} if matches else {}
    else:
        kinds = rank_file_names(names)
        models = [kind for kind in kinds if verl.world_size_of(kind) is not None]
        kinds = {kind: kinds[kind] for kind in models or kinds if not verl.why_left_out(kind)}
    if len(kinds) != 1:
        found = format_names(list(kinds) or sorted(names), 6) or "nothing"
        raise CannotLook(
            f"{folder}: {'files of several kinds' if kinds else 'no file per rank'}\n"
            f"    found:       {found}\n"
            "    way out:     files= (--files NAME_{rank}.pt) says which"
        )
    ((kind, by_rank),) = kinds.items()
    world_size = verl.world_size_of(kind) or max(by_rank) + 1
    missing = [str(rank) for rank in range(world_size) if rank not in by_rank]
    if missing or max(by_rank) >= world_size:
        fault = Fault(kind, f"of {world_size} ranks these have no file: {format_names(missing, 8)}")
        raise PlacementError(format_faults(f"{folder} is not complete", [fault]))
    return dict(sorted(by_rank.items()))
