"""A torch file per rank, as a checkpoint.

Ranks' files are put together as whole tensors: copies compared bit for bit, holes found. Each file
is one rank's state dict. A DTensor in it says how its mesh cuts it; what it does not say (the ep
rank whose experts these are) a ``Placements`` per rank does, as for a save of that rank.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements.bind.place import place
from dcp_placements.bind.rule_and_dtensor import is_tensor
from dcp_placements.declaration import DeclaredWorld, Placements
from dcp_placements.errors import (
    CannotLook,
    CannotPlace,
    Fault,
    PlacementError,
    raise_faults,
)
from dcp_placements.layout.boxes import Array, as_boxes
from dcp_placements.names.flat import rename_keys
from dcp_placements.names.rename_results import Rename
from dcp_placements.offline.checkpoint import LeftOut, WholeTensors
from dcp_placements.offline.directory import local_path, versions_of
from dcp_placements.offline.element_bits import same_bits
from dcp_placements.offline.sources.mapped_files import (
    REBUILT,
    SavedDTensor,
    check_contents,
    load_torch_file,
    nbytes_in,
)
from dcp_placements.offline.sources.rank_names import names_by_rank, why_left_out
from dcp_placements.rules.mesh_axes import MeshAxes, format_mesh_axes
from dcp_placements.rules.patterns import Rules
from dcp_placements.short_text import format_names
from dcp_placements.storage.index import index_of_locations
from dcp_placements.storage.metadata_file import with_columns
from dcp_placements.storage.record_head import RecordHead
from dcp_placements.storage.safe_pickle import Stub
from dcp_placements.storage.saved_dtensor import rank_shard
from dcp_placements.storage.state_dict_file import Records
from dcp_placements.storage.store import Store
from dcp_placements.storage.torch_metadata import ChunkList, StoredLocation, build_entries
from dcp_placements.table.digests import Digests
from dcp_placements.table.proof_faults import Holders, proof_faults
from dcp_placements.table.prove import Compared, prove
from dcp_placements.table.table import Holding, held_chunks, holding_of
from dcp_placements.table.world import Piece, World

_POSITIONS_OUT = (
    "optimizer state by the position of its parameters, whose names are in no file: save it by "
    "name (get_optimizer_state_dict)"
)


class RankTensors:
    """Tensors of ranks' files, put together. Every byte is placed, or left out for a reason.

    Args:
        directory: Directory of the files.
        files: Names of the files with tensors.

    Attributes:
        faults: Faults of the tensors that were added.
        notes: Lines for the report.
    """

    def __init__(self, directory: Store, files: Iterable[str]) -> None:
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self._directory = directory
        self._of_ranks = tuple(files)
        self._versions = versions_of(directory, self._of_ranks)
        # One entry per call of ``add``.
        self._files: list[str] = []
        self._holdings: list[Holding] = []
        # Boxes that a file has twice: the key, the file and both.
        self._repeats: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []
        self._left_out: dict[tuple[str, str], LeftOut] = {}
        self._padding = 0

    def leave_out(self, what: str, why: str, nbytes: int) -> None:
        """Note something that is no tensor of the model."""
        entry = self._left_out.setdefault((what, why), LeftOut(what, why))
        entry.entries += 1
        entry.nbytes += nbytes

    def refuse(self, file: str, faults: Iterable[Fault]) -> None:
        """Add faults of what is in a file."""
        where = (f"file:        {file}",)
        self.faults += [replace(fault, where=(*where, *fault.where)) for fault in faults]

    def add(
        self,
        file: str,
        state_dict: Mapping[str, Any],
        rules: Rules | None,
        rename: Rename | None = None,
    ) -> None:
        """Place the tensors of one rank, as a save of that rank does.

        Args:
            file: Name of the rank's file.
            state_dict: Tensors and ``RankShard``s, by the rank's own keys.
            rules: Rules of the rank.
            rename: Rename of the rank.
        """
        renamed = rename_keys(dict(state_dict), {}, rename)
        if renamed.faults:
            self.refuse(file, renamed.faults)
            return
        flat, mappings = renamed.state_dict, renamed.mappings
        placing = place(flat, rules, mappings, renamed.reshaped, rename)
        if placing.faults:
            self.refuse(file, placing.faults)
            return
        groups = {fqn for fqn, value in placing.state_dict.items() if not is_tensor(value)}
        without = groups | set(placing.absent)
        holding = holding_of(placing.state_dict, placing.placed, {}, without)
        self._files.append(file)
        self._holdings.append(holding)
        for fqn, placed in placing.placed.items():
            kept = {chunk.offsets: chunk for chunk in held_chunks(placed)}
            views = [placed.view(chunk) for chunk in placed.place.chunks]
            self._padding += sum([tensor.nbytes for tensor in placed.tensors])
            self._padding -= sum([view.nbytes for view in views])
            for chunk, view in zip(placed.place.chunks, views, strict=True):
                first = kept.get(chunk.offsets, chunk)
                if first is not chunk:
                    self._repeats.append((fqn, file, placed.view(first), view))

    @property
    def nbytes(self) -> int:
        """Bytes of all that was collected or left out."""
        held = [tensor for holding in self._holdings for tensor in _held_tensors(holding)]
        held += [view for *_, view in self._repeats]
        left_out = sum([tensor.nbytes for tensor in self._left_out.values()])
        return sum([tensor.nbytes for tensor in held]) + self._padding + left_out

    def whole(self) -> WholeTensors:
        """Return the whole tensors, after checks that they are whole and copies equal.

        Raises:
            PlacementError: The files do not make whole tensors, or contradict each other.
        """
        path = self._directory.path
        raise_faults(f"{path} cannot be put together", self.faults)  # refused tensors leave holes
        world = World([holding.packed() for holding in self._holdings])
        if not world.pieces:
            raise PlacementError(f"{path}: its files hold no tensor of a model")
        files = Holders(
            name=lambda holders: format_names(sorted({self._files[index] for index in holders}), 4),
            noun="file",
            inside="in",
            count=len(self._files),
            missing="way out:     the files of all ranks, of one save",
        )
        for finding in prove(world):
            if not isinstance(finding, Compared):
                self.faults += proof_faults(finding, world, files)
        raise_faults(f"{path} cannot be put together", self.faults)
        held = self._by_cell(world)
        differing = [
            _difference(fqn, file, file, first, other)
            for fqn, file, first, other in self._repeats
            if not same_bits(first, other)
        ]
        for finding in prove(world, lambda piece: _contents(piece, held)):
            if isinstance(finding, Compared):
                differing += self._differences(finding, held)
        if differing:
            for file in self._of_ranks:
                check_contents(self._directory, file)  # of damage that is the likely cause
        raise_faults(f"{path}: files contradict each other", differing)
        metadata, records = self._described(world, held)
        stored = sum([record.nbytes for record in records.values()])
        left_out = sum([entry.nbytes for entry in self._left_out.values()])
        accounted = {
            "source": self.nbytes,
            "copies, found equal": self.nbytes - left_out - self._padding - stored,
            "padding, dropped": self._padding,
        }
        return WholeTensors(
            self._directory,
            self._of_ranks,
            metadata,
            records,
            self.notes,
            sorted(self._left_out.values(), key=attrgetter("what", "why")),
            {what: nbytes for what, nbytes in accounted.items() if nbytes},
            self._versions,
        )

    def _by_cell(self, world: World) -> Array:
        """Return the local tensor of each cell of the world: mapped, not read."""
        held = np.empty(world.count, object)
        of_files = world.by_rank(np.arange(world.count))
        for cells, holding in zip(of_files, self._holdings, strict=True):
            for cell, tensor in zip(cells.tolist(), _held_tensors(holding), strict=True):
                held[cell] = tensor
        return held

    def _differences(self, compared: Compared, held: Array) -> Iterator[Fault]:
        """Yield faults of files that hold different contents of one box."""
        piece, tensors = compared.piece, compared.piece.take(held)
        for position, contents in zip(compared.positions, compared.contents.T, strict=True):
            for first, row in zip(_first_rows(piece), range(len(tensors)), strict=True):
                if contents[row] != contents[first]:
                    kept, copy = (self._files[piece.ranks[holder]] for holder in (first, row))
                    both = tensors[first, position], tensors[row, position]
                    yield _difference(piece.fqns[position], kept, copy, *both)

    def _described(self, world: World, held: Array) -> tuple[Metadata, Records]:
        """Return metadata of the whole tensors, and where their chunks are in the files."""
        stored: dict[str, Any] = {}
        locations: list[StoredLocation] = []
        records: Records = {}
        columns = {
            fqn: (piece, tensors)
            for piece in world.pieces
            for fqn, tensors in zip(piece.fqns, piece.take(held).T, strict=True)
        }
        for fqn in dict.fromkeys(fqn for holding in self._holdings for fqn in holding.fqns):
            piece, tensors = columns[fqn]
            shape, dtype, cover = piece.group.shape, piece.group.dtype, piece.cover
            assert dtype is not None, "it is a tensor"
            # An empty box may begin where another box does.
            kept = np.flatnonzero((cover.numel > 0) | (0 in shape))
            chunks: Any = ChunkList(cover.boxes[kept])
            stored[fqn] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
            rows = cover.order[cover.starts[kept]]
            for row, (offsets, sizes) in zip(
                rows.tolist(), as_boxes(cover.boxes[kept]), strict=True
            ):
                file, data = self._files[piece.ranks[row]], tensors[row]
                record = RecordHead(dtype, sizes, data.stride())
                nbytes = record.span_nbytes if record.nbytes else 0
                start = int(data.storage_offset()) * dtype.itemsize  # in the file, which is mapped
                locations.append(StoredLocation(fqn, torch.Size(offsets), file, start, nbytes))
                records[fqn, file, offsets] = record
        index = index_of_locations(locations, build_entries(stored))
        return with_columns(Metadata(stored), index), records


def _held_tensors(holding: Holding) -> list[torch.Tensor]:
    """Return the local tensors that a file has, by key and box."""
    tensors = [tensor for held in holding.groups for tensor in held.data() if tensor is not None]
    return [tensor.detach() for tensor in tensors]


def _first_rows(piece: Piece) -> list[int]:
    """Map each row of a piece to the first row with the same box, which is the first file's."""
    cover = piece.cover
    first: list[int] = cover.order[cover.starts[:-1]][cover.box_of].tolist()
    return first


def _contents(piece: Piece, held: Array) -> Digests:
    """Return a number by row and key: 1 where bits equal those of the box's first row."""
    tensors = piece.take(held)
    contents = np.ones(tensors.shape, np.int64)
    for row, first in enumerate(_first_rows(piece)):
        for position in range(len(piece.fqns) if row != first else 0):
            if not same_bits(tensors[first, position], tensors[row, position]):
                contents[row, position] = row + 2
    return contents


def _difference(fqn: str, kept: str, copy: str, tensor: torch.Tensor, other: torch.Tensor) -> Fault:
    """Return a fault saying that two files hold different contents of one box."""
    return Fault(
        fqn,
        f"{copy} and {kept} hold it, and differ in {int((tensor != other).sum())} of "
        f"{tensor.numel()} elements",
        (
            "likely:      an axis that cuts it (ep) is in no rule and no DTensor; or the files "
            "are of different steps, or a replica diverged",
            "way out:     rules that name the axis (--rules and --mesh, or --source-rules and "
            "--source-mesh); else other files",
        ),
    )


def rank_files(
    directory: Store,
    *,
    files: str | None = None,
    rules: Callable[..., Any] | None = None,
    axes: MeshAxes | None = None,
) -> WholeTensors:
    """Return the whole tensors of a torch file per rank.

    Args:
        directory: The files, on this machine.
        files: Argument of ``open_source``.
        rules: Argument of ``open_source``.
        axes: Argument of ``open_source``.

    Raises:
        CannotLook: There are no such files, or names of several kinds; or a file cannot be read,
            or needs more than tensors, plain values and classes of a training run.
        PlacementError: Ranks are missing; files contradict each other, or do not make whole
            tensors.
    """
    folder = local_directory(directory)
    names = names_by_rank(directory.path, os.listdir(folder), files)
    tensors = RankTensors(directory, names)
    tensors.notes.append(f"files of {len(names)} ranks")
    axes = axes or {"rank": len(names)}
    world = None if rules is None else DeclaredWorld(axes, rules)
    if prod(axes.values()) != len(names):
        of = f"a mesh of {prod(axes.values())}: {format_mesh_axes(axes)}"
        raise PlacementError(f"{folder}: files of {len(names)} ranks, and {of}")
    for rank, name in enumerate(names):
        contents = load_torch_file(directory, name)
        if not isinstance(contents, Mapping):
            raise CannotLook(f"{folder / name}: holds a {type(contents).__name__}, and no dict")
        declared = Placements(None) if world is None else world.placements(rank)
        faults: list[Fault] = []
        try:
            named = list(_tensors(contents, "", rank, tensors.leave_out, faults))
        except RecursionError as error:
            raise CannotLook(f"{folder / name}: dicts are nested too deeply in it") from error
        state_dict = dict(named)
        if len(state_dict) < len(named):
            keys = [key for key, count in Counter(key for key, _ in named).items() if count > 1]
            raise CannotLook(f"{folder / name}: several tensors have one key: {format_names(keys)}")
        tensors.refuse(name, faults)
        tensors.add(name, state_dict, declared.rules, declared.rename)
    for other in sorted(set(os.listdir(folder)) - set(names)):
        why = why_left_out(other)
        if why and (nbytes := directory.size(other)) is not None:
            tensors.leave_out(re.sub(r"_rank_\d+", "", other), why, nbytes)
    return tensors.whole()


def _tensors(
    value: Mapping[Any, Any],
    prefix: str,
    rank: int,
    leave_out: Callable[[str, str, int], None],
    faults: list[Fault],
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts by their dotted keys, and note what else there is."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nbytes = nbytes_in(inner)
        if not isinstance(key, str):
            leave_out(prefix.rstrip("."), _POSITIONS_OUT, nbytes)
        elif isinstance(inner, Mapping):
            yield from _tensors(inner, f"{name}.", rank, leave_out, faults)
        elif isinstance(inner, SavedDTensor):
            try:
                shard = rank_shard(inner.local, inner.stub, rank)
            except CannotPlace as error:
                faults.append(error.fault(name))
                continue
            if shard is not None:
                yield name, shard
        elif isinstance(inner, torch.Tensor):
            yield name, inner
        elif isinstance(inner, Stub) and inner.by.startswith(REBUILT):
            headline = f"is a tensor with more than elements: {inner.by}"
            way_out = "way out:     save it again as a plain tensor"
            faults.append(Fault(name, headline, (way_out,)))
        else:
            leave_out(name, "no tensor", nbytes)
            yield from _named_parameters(name, inner)


def _named_parameters(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what parameter groups say of names, flat: which state belongs to which parameter.

    >>> [*_named_parameters("optim.param_groups", [{"params": ["w"], "lr": 0.1}])]
    [('optim.param_groups.0.params', ['w'])]
    >>> [*_named_parameters("optim.param_groups.w.lr", 0.1)]
    [('optim.param_groups.w.lr', 0.1)]
    """
    head, _, last = name.rpartition(".")
    if last == "param_groups" and isinstance(value, list | tuple):
        for number, group in enumerate(value):
            if isinstance(group, Mapping):
                yield from _named_parameters(f"{name}.{number}.params", group.get("params"))
    elif "param_groups" not in head.split("."):
        return
    elif last != "params":
        yield name, value
    elif isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        yield name, list(value)  # a list of positions names nothing


def local_directory(directory: Store) -> Path:
    """Return a directory of this machine, whose files can be mapped.

    Raises:
        CannotLook: It is elsewhere.
    """
    path = local_path(directory)
    if path is None:
        raise CannotLook(
            f"{directory.path}: ranks' files are mapped into memory\n"
            "    way out:     copy them to a disk of this machine"
        )
    return path
