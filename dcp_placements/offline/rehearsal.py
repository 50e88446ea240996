"""Would a checkpoint load into a topology, and at what cost: planning only, for every rank.

There is no model here, so what a rank wants is worked out from the checkpoint: each of its tensors,
cut over the mesh as the rules say. Tensors of one shape that are stored alike and cut alike are one
class, and ranks that want the same part of a class are one case: the work is per case, not per
tensor and rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch

from dcp_placements._torch import TensorStorageMetadata
from dcp_placements.bind.binding import BindError, Own, bind
from dcp_placements.bind.lint import lint
from dcp_placements.bind.placed import Placed
from dcp_placements.errors import Fault, PlacementError, format_names, format_ranks
from dcp_placements.layout.byte_ranges import segments
from dcp_placements.layout.sharding import Box, Intervals, Layout, LayoutError, Sharding
from dcp_placements.layout.tiling import format_box, tiles, uncovered
from dcp_placements.load.reads import StoredChunks
from dcp_placements.load.request import shape_mismatch
from dcp_placements.names.rename_record import holder
from dcp_placements.offline.checkpoint import Checkpoint, StoredTensor
from dcp_placements.offline.declared import MeshAxes, rules_at
from dcp_placements.offline.rehearsed_record import RehearsedRecord
from dcp_placements.offline.views.cutting import fsdp_axes, known_axes, layout_at, whole_sharding
from dcp_placements.rules.mesh import MeshCoordinate
from dcp_placements.rules.patterns import PlacementRules, Rules, rule_name
from dcp_placements.rules.placement import (
    CheckpointPlacement,
)
from dcp_placements.storage.chunk_reads import SMALL_NBYTES, cheap_gap
from dcp_placements.storage.metadata.table import Array
from dcp_placements.storage.tensor_record import HEADS_NBYTES


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What a load costs one rank. Bytes are of data files.

    Attributes:
        rank: Its number, the last axis fastest.
        coordinate: Its position along each axis.
        wanted_nbytes: Bytes of the elements that it needs.
        memory_nbytes: Bytes of its tensors, padding included.
        slices_nbytes: What ``PlacementFileSystemReader`` reads for that, up to the few hundred
            bytes before the elements of each chunk.
        chunks_nbytes: What torch's ``FileSystemReader`` reads for that: every chunk that it needs
            a part of.
        exchange_nbytes: What it reads with ``exchange=True``: an even share of what other ranks
            want alike, and the rest as ever.
        reads: Read items: one per stored chunk and part of a tensor that it meets.
        files: Files opened.
    """

    rank: int
    coordinate: tuple[int, ...]
    wanted_nbytes: int
    memory_nbytes: int
    slices_nbytes: int
    chunks_nbytes: int
    exchange_nbytes: int
    reads: int
    files: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Whether a checkpoint loads into a topology.

    Attributes:
        axes: Sizes by axis name.
        ranks: What it costs each rank, by rank.
        faults: What cannot be loaded.
        notes: What a load would warn of.
        missing: Keys that are expected and not in the checkpoint, sorted.
        unread: Keys of the checkpoint that are not expected, sorted; nothing of them is counted.
        replicated: How many tensors no rule cuts: every rank wants all of them.
        unmatched: Patterns of the rules that match no key.
        unique_nbytes: Bytes of the whole tensors that are wanted, each once.
    """

    JSON: ClassVar[str] = (
        "loads axes faults notes missing unread unmatched replicated unique_nbytes ranks"
    )

    axes: Mapping[str, int]
    ranks: tuple[RankRehearsal, ...]
    faults: tuple[Fault, ...]
    notes: tuple[Fault, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]
    replicated: int
    unmatched: tuple[str, ...]
    unique_nbytes: int

    @property
    def loads(self) -> bool:
        """Whether nothing stands against it."""
        return not self.faults and not self.missing


def rehearse(
    path: str | os.PathLike[str] | Checkpoint,
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Sequence[str] = (),
    expect: Iterable[str] | None = None,
) -> Rehearsal:
    """Plan a load on every rank of a world that need not be there.

    Args:
        path: The checkpoint that is to be loaded.
        rules: Called with each rank's place in the mesh. Returns ``Placements``, or what
            ``Placements`` takes as rules. The rules have to say all that cuts a tensor, since
            there is no DTensor to say it; tensors without a rule are wanted whole by every rank.
            A ``Renumber`` (``Renames``) says which experts and layers this rank has; after
            any other rename, ranks are taken to have all keys.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Axes over which FSDP cuts dim 0 of every tensor (of one dim or more), inside whatever
            the rules say, as one flattened axis; those that a tensor's rule cuts over are left out.
        expect: The keys that the model has; None for those of the checkpoint.

    Returns:
        The costs and the faults.

    Raises:
        CannotLook: There is no checkpoint, an axis in ``fsdp`` is unknown, or ``rules`` fails.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    return _Stage(checkpoint, rules, axes, fsdp, expect).rehearsed()


@dataclass(slots=True, eq=False)
class _Class:
    """Tensors of one shape and dtype that are stored alike.

    Attributes:
        shape: Of the whole tensors.
        dtype: Of their elements.
        stored: Their chunks.
        fqns: The tensors.
        files: By tensor and chunk, the file's number; -1 where the metadata says no place.
        nbytes: By tensor and chunk, the length of the record.
        example: A tensor of that shape and dtype, without elements in memory.
        cases: What a rank needs, by what it holds and of which tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: StoredChunks
    fqns: list[str]
    files: Array
    nbytes: Array
    example: torch.Tensor
    cases: dict[tuple[tuple[Intervals, ...], bytes], _Case] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors of one class under one rule, by their positions in the class."""

    known: _Class
    members: Array

    @property
    def fqn(self) -> str:
        """The first of them, which stands for all."""
        return self.known.fqns[int(self.members[0])]

    @property
    def fqns(self) -> list[str]:
        return [self.known.fqns[member] for member in self.members.tolist()]


@dataclass(frozen=True, slots=True)
class _Case:
    """What one rank, and all that hold the same, needs of a part; the fields of RankRehearsal."""

    wanted: int
    memory: int
    slices: int
    chunks: int
    reads: int
    files: Array
    holes: tuple[Box, ...]
    placeless: tuple[str, ...]


class _Stage:
    def __init__(
        self,
        checkpoint: Checkpoint,
        function: Callable[[MeshCoordinate], Any],
        axes: MeshAxes,
        fsdp: Sequence[str],
        expect: Iterable[str] | None,
    ) -> None:
        stored = {*checkpoint.tensors, *checkpoint.objects}
        expected = stored if expect is None else set(expect)
        self._checkpoint = checkpoint
        self._function = function
        self._axes = dict(axes)
        self._fsdp = known_axes(axes, fsdp)
        self._missing = tuple(sorted(expected - stored))
        self._unread = tuple(sorted(stored - expected))
        self._numbers = {name: number for number, name in enumerate(checkpoint.files)}
        self._classes = _classes(checkpoint, expected, self._numbers)
        self._objects = [o for fqn, o in checkpoint.objects.items() if fqn in expected]
        self._parts: dict[tuple[tuple[str, ...], str], list[_Part]] = {}
        self._matched: dict[str, bool] = {}
        self._shardings: dict[Any, Sharding] = {}
        self._cut: set[str] = set()
        self._faults = _Told()
        self._notes: dict[Fault, None] = {}
        self._record = RehearsedRecord(checkpoint.metadata)
        self._otherwise: dict[Any, list[Fault]] = {}
        # By all that decides it, why a rank's part of a tensor would be refused.
        self._unfit: dict[Any, tuple[str, tuple[str, ...]] | None] = {}
        self._absent = {name for name, size in checkpoint.files.items() if size is None}

    def rehearsed(self) -> Rehearsal:
        ranks = []
        for rank, coordinate in enumerate(product(*map(range, self._axes.values()))):
            rules, rename, waive = rules_at(self._function, self._axes, rank)
            parts = self._parts_of(rules, rename)
            ranks.append(self._costs(rank, coordinate, rules, parts, rename is not None))
            self._compare(rank, coordinate, parts, rules, rename, waive)
        tensors = sum(len(known.fqns) for known in self._classes)
        return Rehearsal(
            axes=self._axes,
            ranks=tuple(ranks),
            faults=tuple(
                sorted(
                    [*self._faults.sorted(), *self._record.asking_faults()],
                    key=lambda fault: (fault.fqn, fault.headline),
                )
            ),
            notes=tuple(sorted(self._notes, key=lambda note: (note.fqn, note.headline))),
            missing=self._missing,
            unread=self._unread,
            replicated=tensors - len(self._cut),
            unmatched=tuple(pattern for pattern, found in self._matched.items() if not found),
            unique_nbytes=sum(
                len(known.fqns) * prod(known.shape) * known.dtype.itemsize
                for known in self._classes
            ),
        )

    def _costs(
        self,
        rank: int,
        coordinate: tuple[int, ...],
        rules: Rules,
        parts: Sequence[_Part],
        renamed: bool,
    ) -> RankRehearsal:
        opened = np.zeros(len(self._numbers), bool)
        wanted = memory = slices = chunks = exchanged = reads = 0
        for part in parts:
            found = self._layout(part, rules, rank, coordinate)
            if found is None:
                continue
            layout, replicas = found
            self._check_local(part, rules, rank, coordinate, renamed)
            key = (layout.intervals, part.members.tobytes())
            case = part.known.cases.get(key)
            if case is None:
                case = part.known.cases[key] = _case(part, layout)
                if layout.local_shape != part.known.shape:
                    self._cut.update(part.fqns)
            wanted += case.wanted
            memory += case.memory
            slices += case.slices
            chunks += case.chunks
            exchanged += -(-case.slices // replicas)
            reads += case.reads
            opened[case.files] = True
            self._note(part, case, rank)
        for held in self._objects:
            if held.file is not None:
                opened[self._numbers[held.file]] = True
                reads += 1
                slices += held.nbytes
                chunks += held.nbytes
                exchanged += held.nbytes
        if self._absent:
            for name, number in self._numbers.items():
                if opened[number] and name in self._absent:
                    self._faults.add(rank, name, "the checkpoint lacks this file")
        files = int(opened.sum())
        return RankRehearsal(
            rank, coordinate, wanted, memory, slices, chunks, exchanged, reads, files
        )

    def _parts_of(self, rules: Rules, rename: Any) -> list[_Part]:
        holds = holder(rename)
        if not isinstance(rules, PlacementRules):
            return _split(
                self._classes, lambda fqn, known: _signature(rules(fqn, known.example)), holds
            )
        # The same patterns and numbers mean the same tensors on every rank.
        key = (rules.patterns, "" if holds is None else repr(rename))
        if key not in self._parts:
            found = _split(self._classes, lambda fqn, known: rules.pattern_of(fqn), holds)
            told = {rules.pattern_of(part.fqn) for part in found if part.known.shape}
            for pattern in rules.patterns:
                self._matched[pattern] = pattern in told or self._matched.get(pattern, False)
            self._parts[key] = found
        return self._parts[key]

    def _layout(
        self, part: _Part, rules: Rules, rank: int, coordinate: tuple[int, ...]
    ) -> tuple[Layout, int] | None:
        """Return what a rank holds of a part's tensors, and how many ranks hold the same.

        None where it cannot be told.
        """
        known = part.known
        placement = rules(part.fqn, known.example) if known.shape else None
        own = fsdp_axes(known.shape, placement, self._fsdp)
        key = (known, _signature(placement))
        try:
            if key not in self._shardings:
                self._shardings[key] = whole_sharding(known.shape, placement, self._axes, own)
            layout = layout_at(self._shardings[key], placement, self._axes, own, coordinate)
            return layout, _replicas(self._shardings[key], prod(self._axes.values()))
        except (PlacementError, LayoutError) as error:
            rule = f"by rule:     {rule_name(rules, part.fqn)}"
            for fqn in part.fqns:
                self._faults.add(rank, fqn, str(error), rule)
            return None

    def _note(self, part: _Part, case: _Case, rank: int) -> None:
        if case.holes:
            told = format_names([format_box(hole, part.known.shape) for hole in case.holes], 4)
            for fqn in part.fqns:
                self._faults.add(
                    rank,
                    fqn,
                    f"nobody stored {told} of {part.known.shape}, which is needed",
                    "way out:     load a complete checkpoint",
                )
        for fqn in case.placeless:
            self._faults.add(rank, fqn, "the metadata names no file for a chunk that is needed")

    def _compare(
        self,
        rank: int,
        coordinate: Sequence[int],
        parts: Sequence[_Part],
        rules: Rules,
        rename: Any,
        waive: Mapping[str, str],
    ) -> None:
        """Note what is declared otherwise than the checkpoint was saved."""
        # What a rename is called says all of it where its numbers say what keys a rank has.
        same = rank if holder(rename) is None and rename else (repr(rename), tuple(waive))
        fqns = (fqn for part in parts for fqn in part.fqns)
        for fault in self._record.rename_faults(rank, fqns, rename, waive, same):
            self._faults.add(rank, fault.fqn, fault.headline, *fault.details)
        for part in parts:
            shape = part.known.shape
            placement = rules(part.fqn, part.known.example) if shape else None
            sharding = self._shardings.get((part.known, _signature(placement)))
            rule = rule_name(rules, part.fqn) if placement is not None else None
            key = (part.known, _signature(placement), part.members.tobytes(), rule, tuple(waive))
            if sharding is None:  # a rule that does not fit, which is a fault of its own
                continue
            own = fsdp_axes(shape, placement, self._fsdp)
            try:
                layout = layout_at(sharding, placement, self._axes, own, coordinate)
            except LayoutError:  # as above
                continue
            self._record.list_rows(rank, part.fqns, sharding, layout, rule, waive)
            if key not in self._otherwise:
                self._otherwise[key] = self._record.cut_faults(
                    part.fqns, sharding, placement, own, rule, waive
                )
            for fault in self._otherwise[key]:
                self._faults.add(rank, fault.fqn, fault.headline, *fault.details)

    def _check_local(
        self, part: _Part, rules: Rules, rank: int, coordinate: Sequence[int], renamed: bool
    ) -> None:
        """Bind what a rank holds as a load does, which knows the whole shape by the rule alone."""
        shape = part.known.shape
        placement = rules(part.fqn, part.known.example) if shape else None
        if placement is None:
            return
        sharding = whole_sharding(shape, placement, self._axes, [])
        place = tuple(placement.mesh.get_coordinate() or ())
        rule = rule_name(rules, part.fqn) or ""
        along = tuple(place[cut.axis] for cut in sharding.cuts)
        key = (shape, _signature(placement), along, rule, part.members.tobytes())
        if key not in self._unfit:
            self._unfit[key] = None
            local = layout_at(sharding, placement, self._axes, [], coordinate).local_shape
            try:
                binding = bind(Own(local), local, placement)
            except BindError as error:
                self._unfit[key] = error.headline, (*error.details, f"by rule:     {rule}")
            else:
                assert binding is not None
                whole = binding.global_shape
                if whole != shape:
                    needs = f"{local} on a rank makes {whole}"
                    headline, details = shape_mismatch(shape, whole, needs, rule)
                    way = f"             global_shape={shape} in the rule, where parts are uneven"
                    self._unfit[key] = headline, (*details, way)
                placed = [Placed(f, part.known.example, binding, (), rule) for f in part.fqns]
                self._notes.update(dict.fromkeys(lint(placed, renamed=renamed)))
        unfit = self._unfit[key]
        if unfit is not None:
            for fqn in part.fqns:
                self._faults.add(rank, fqn, unfit[0], *unfit[1])


def _replicas(sharding: Sharding, ranks: int) -> int:
    """Return how many ranks exchange what they hold alike; what is picked they do not."""
    if not sharding.is_uniform:
        return 1
    cut = {cut.axis for cut in sharding.cuts}
    return ranks // prod(sharding.axis_sizes[axis] for axis in cut)


class _Told:
    """Faults, and the ranks that each is about."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}

    def add(self, rank: int, fqn: str, headline: str, *details: str) -> None:
        ranks = self._ranks.setdefault((fqn, headline, details), [])
        if not ranks or ranks[-1] != rank:
            ranks.append(rank)

    def sorted(self) -> tuple[Fault, ...]:
        return tuple(
            Fault(fqn, headline, (f"on:          {format_ranks(ranks)}", *details))
            for (fqn, headline, details), ranks in sorted(self._ranks.items())
        )


def _classes(
    checkpoint: Checkpoint, expected: set[str], numbers: Mapping[str, int]
) -> list[_Class]:
    alike: dict[Any, list[StoredTensor]] = {}
    for fqn, tensor in checkpoint.tensors.items():
        if fqn in expected:
            key = (tensor.shape, tensor.dtype, tensor.cut)
            alike.setdefault(key, []).append(tensor)
    found = []
    for tensors in alike.values():
        first = tensors[0]
        places = [tensor.chunks for tensor in tensors]
        none = (len(tensors), len(first.boxes))
        files = [[-1 if c.file is None else numbers[c.file] for c in p] for p in places]
        nbytes = [[chunk.nbytes for chunk in p] for p in places]
        stored = checkpoint.metadata.state_dict_metadata[first.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        found.append(
            _Class(
                first.shape,
                first.dtype,
                StoredChunks(stored),
                [tensor.fqn for tensor in tensors],
                np.array(files, np.int64).reshape(none),
                np.array(nbytes, np.int64).reshape(none),
                torch.empty(first.shape, dtype=first.dtype, device="meta"),
            )
        )
    return found


def _split(
    classes: Sequence[_Class],
    spoken: Callable[[str, _Class], Any],
    holds: Callable[[str], bool] | None,
) -> list[_Part]:
    parts = []
    for known in classes:
        by: dict[Any, list[int]] = {}
        for member, fqn in enumerate(known.fqns):
            if holds is None or holds(fqn):
                # Scalars are never asked about.
                by.setdefault(spoken(fqn, known) if known.shape else None, []).append(member)
        parts += [_Part(known, np.array(members, np.int64)) for members in by.values()]
    return parts


def _signature(placement: CheckpointPlacement | None) -> Any:
    """Return what says how a placement cuts, whatever rank it is of."""
    if placement is None:
        return None
    mesh = placement.mesh
    return (
        tuple(mesh.shape),
        mesh.mesh_dim_names,
        placement.placements,
        placement.global_shape,
        placement.padded_shape,
    )


def _case(part: _Part, layout: Layout) -> _Case:
    known, itemsize = part.known, part.known.dtype.itemsize
    members = len(part.members)
    met: dict[int, tuple[Box, list[Box]]] = {}
    holes: list[Box] = []
    destinations = [chunk.box for chunk in layout.chunks()]
    for box in destinations:
        found = known.stored.meeting(box)
        for index, chunk, piece in found:
            met.setdefault(index, (chunk, []))[1].append(piece)
        pieces = [piece for _, _, piece in found]
        if pieces != [box] and not tiles(box, pieces):
            holes += uncovered(box, pieces)
    indices = np.array(list(met), np.int64)
    files = known.files[part.members][:, indices]
    nbytes = known.nbytes[part.members][:, indices]
    items = np.array([len(pieces) for _, pieces in met.values()], np.int64)
    slices = 0
    for column, (chunk, pieces) in enumerate(met.values()):
        sliced = _slices_nbytes(chunk, pieces, itemsize)
        exact = sum(piece.numel for piece in pieces) * itemsize
        lengths = nbytes[:, column]
        # As the reader does: what is small, and mostly wanted, comes whole.
        whole = (lengths <= SMALL_NBYTES) & (2 * (exact + HEADS_NBYTES[0]) >= lengths)
        slices += int(np.where(whole, lengths, sliced).sum())
    placeless = np.flatnonzero((files < 0).any(axis=1)).tolist()
    return _Case(
        wanted=sum(box.numel for box in destinations) * itemsize * members,
        memory=prod(layout.local_shape) * itemsize * members,
        slices=slices,
        chunks=int((nbytes * items).sum()),
        reads=int(items.sum()) * members,
        files=np.unique(files[files >= 0]),
        holes=tuple(holes),
        placeless=tuple(known.fqns[int(part.members[row])] for row in placeless),
    )


def _slices_nbytes(stored: Box, pieces: Sequence[Box], itemsize: int) -> int:
    """Return the bytes that are read for pieces of a stored chunk, one after another."""
    return sum(
        segments(
            stored.sizes,
            offsets=[a - b for a, b in zip(piece.offsets, stored.offsets, strict=True)],
            lengths=piece.sizes,
            itemsize=itemsize,
            gap=cheap_gap,
        ).total_nbytes
        for piece in pieces
    )
