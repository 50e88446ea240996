"""Whether a checkpoint loads into a topology, and at what cost: only planning, for every rank.

There is no model, so a rank's tensors are derived from the checkpoint: each of its tensors, cut
over the mesh by the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from dcp_placements.errors import Fault, format_faults
from dcp_placements.layout.boxes import (
    Ints,
    as_boxes,
    expanded,
    format_box,
    intersect,
    numel,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import AnySource, StoredTensor
from dcp_placements.offline.key_patterns import matching_keys
from dcp_placements.offline.rehearsals.fsdp_axes import Fsdp
from dcp_placements.offline.rehearsals.rehearsed_world import RehearsedWorld
from dcp_placements.offline.sources.opening import open_source
from dcp_placements.offline.texts import Progress, format_table, ranges, short
from dcp_placements.rules.mesh_axes import MeshAxes, MeshCoordinate, format_mesh_axes
from dcp_placements.rules.patterns import unmatched_faults
from dcp_placements.short_text import (
    folded_keys,
    format_count,
    format_name,
    format_nbytes,
    numbers_in,
    without_numbers,
)
from dcp_placements.storage.file_reads import c_strides, cheap_gap, segments
from dcp_placements.storage.record_reads import is_read_whole
from dcp_placements.storage.store import StorageOptions
from dcp_placements.table.table import OBJECT
from dcp_placements.table.world import Cover

HEADINGS = ("ranks", "wants", "reads", "reads/wants", "stock", "stock/wants", "chunks", "files")
MAX_ROWS = 16
MAX_RANKS_WIDTH = 16


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What a load costs one rank. Bytes are of data files."""

    rank: int  # number of the rank, the last axis fastest
    coordinate: tuple[int, ...]  # its position along each axis
    memory_nbytes: int  # bytes of its tensors, padding included
    wanted_nbytes: int  # bytes of the elements that it needs
    # Bytes that ``PlacementFileSystemReader`` reads for them, without the few hundred bytes before
    # the elements of each chunk
    slices_nbytes: int
    # Bytes that torch's ``FileSystemReader`` reads for them: every chunk that shares elements
    chunks_nbytes: int
    # Bytes read with ``exchange=True``: an even share of the boxes that other ranks need as well,
    # and all other boxes
    exchange_nbytes: int
    reads: int  # read items: one per stored chunk and box of a tensor that it overlaps
    files: int  # files opened


@dataclass(frozen=True, slots=True)
class AskedBox:
    """A box of one tensor that ranks ask for."""

    fqn: str  # the key in the checkpoint
    box: Box  # box in the checkpoint's tensor
    ranks: tuple[int, ...]  # ranks that ask for it
    files: tuple[str, ...]  # names of the files with a chunk that overlaps it, sorted
    shape: tuple[int, ...] = field(repr=False)  # shape of the checkpoint's tensor


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Whether a checkpoint loads into a topology."""

    axes: Mapping[str, int]  # sizes by axis name
    ranks: tuple[RankRehearsal, ...]  # cost of each rank, by rank
    faults: tuple[Fault, ...]  # reasons why a load is refused
    notes: tuple[Fault, ...]  # warnings of a load
    missing: tuple[str, ...]  # keys that are expected and not in the checkpoint, sorted
    # Keys of the checkpoint that are not expected, sorted; they are not counted
    unread: tuple[str, ...]
    replicated: int  # number of tensors that every rank needs whole
    # Patterns of rules, and steps of ``rename=``, that match no key
    unmatched: tuple[str, ...]
    unique_nbytes: int  # bytes of the whole tensors that are needed, each once
    requests: tuple[AskedBox, ...] = ()  # boxes of the tensors that match ``fqn``, with their ranks

    @property
    def loads(self) -> bool:
        """Whether every rank can load it."""
        return not self.faults and not self.missing

    def __str__(self) -> str:
        if self.requests:
            requests = [
                (
                    request.fqn,
                    format_box(request.box, request.shape),
                    _ranks(request.ranks),
                    short(request.files),
                )
                for request in self.requests
            ]
            table = format_table(("key", "box", "ranks", "files"), requests)
        else:
            table = format_table(HEADINGS, _rows(self.ranks), right=" ".join(HEADINGS[1:]))
        memory = max(rank.memory_nbytes for rank in self.ranks)
        ours = format_nbytes(sum(rank.slices_nbytes for rank in self.ranks))
        stock = format_nbytes(sum(rank.chunks_nbytes for rank in self.ranks))
        exchanged = format_nbytes(sum(rank.exchange_nbytes for rank in self.ranks))
        lines = [
            "",
            f"mesh:      {format_mesh_axes(self.axes)}: {format_count(len(self.ranks), 'rank')}",
            f"memory:    {format_nbytes(memory)} at most, on a rank",
            f"in all:    {ours} read of {format_nbytes(self.unique_nbytes)}, stock {stock}",
            f"exchange:  {exchanged} read with exchange=True",
            f"uncut:     {format_count(self.replicated, 'tensor')}, whole on every rank",
        ]
        for label, keys in (("unread", self.unread), ("missing", self.missing)):
            if keys:
                lines.append(f"{label + ':':<10} {format_count(len(keys), 'key')}: {short(keys)}")
        lines = [*table, *map(format_name, lines)]
        if self.notes:
            lines.append(format_faults("a load would warn", self.notes, "note"))
        if self.faults:
            lines.append(format_faults("does not load", self.faults))
        elif self.missing:
            lines.append("does not load: the checkpoint lacks keys that are expected")
        else:
            but = ", but with declarations that match no key" if self.unmatched else ""
            lines.append(f"loads{but}")
        return "\n".join(lines)


def rehearse(
    path: AnySource,
    rules: Callable[[MeshCoordinate], Any],
    axes: MeshAxes,
    *,
    fsdp: Fsdp = (),
    expect: Iterable[str] | None = None,
    fqn: str | None = None,
    storage_options: StorageOptions = None,
    progress: Progress = lambda done, total: None,
) -> Rehearsal:
    """Plan a load on every rank of a world that need not exist.

    Args:
        path: The checkpoint that is to be loaded.
        rules: Called with each rank's coordinate in the mesh. Returns ``Placements``, or what
            ``Placements`` takes as rules. There are no DTensors, so the rules have to cover every
            axis that cuts a tensor but ``fsdp``; every rank needs all of a tensor without a rule.
            From its rename follows which of the checkpoint's tensors a rank has; with a function
            of the user's in it, all of them, as they are.
        axes: The mesh: sizes by axis name, the last axis fastest in rank order.
        fsdp: Axes over which FSDP cuts dim 0 of every tensor (of one dim or more), inside what
            the rules cut, as one flattened axis without the axes that a tensor's rule cuts over.
            Or such axes by pattern of the checkpoint's keys, as in ``PlacementRules``:
            ``{"experts": ["edp"], "**": ["edp", "ep"]}``; the first pattern that matches counts.
        expect: The keys that the model has on all ranks together, as the checkpoint names them;
            None for those of the checkpoint. A note says where they are those of one rank.
        fqn: Pattern of the tensors whose ``requests`` are listed.
        storage_options: Options that fsspec passes to the file system of a URL.
        progress: Called with the number of ranks planned, and of all.

    Returns:
        The costs and the faults of all ranks.

    Raises:
        CannotLook: There is no checkpoint, an axis in ``fsdp`` is unknown, ``rules`` fails,
            or no tensor matches ``fqn``.
    """
    checkpoint = open_source(path, storage_options=storage_options)
    stored = {*checkpoint.tensors, *checkpoint.objects}
    expected = stored if expect is None else set(expect)
    shown = set() if fqn is None else matching_keys(fqn, checkpoint.tensors)
    world = RehearsedWorld(checkpoint, rules, axes, fsdp, expected, progress)
    costs = _Costs(world)
    unmatched = world.unmatched()
    columns = [*costs.columns.values(), np.bincount(costs.opened[:, 0], minlength=world.size)]
    coordinates = product(*map(range, world.axes.values()))
    ranks = [
        RankRehearsal(rank, coordinate, *numbers)
        for rank, (coordinate, numbers) in enumerate(
            zip(coordinates, np.stack(columns, axis=1).tolist(), strict=True)
        )
    ]
    tensors = [tensor for fqn, tensor in checkpoint.tensors.items() if fqn in expected]
    notes = (*world.notes(), *unmatched_faults(unmatched, sorted(expected)))
    return Rehearsal(
        axes=world.axes,
        ranks=tuple(ranks),
        faults=world.faults(),
        notes=(*notes, *_keys_of_one_rank(world, expected, stored)),
        missing=tuple(sorted(expected - stored)),
        unread=tuple(sorted(stored - expected)),
        replicated=sum(tensor.fqn not in costs.cut for tensor in tensors),
        unmatched=unmatched,
        unique_nbytes=sum(tensor.nbytes for tensor in tensors),
        requests=tuple(_requests(world, shown)),
    )


def _keys_of_one_rank(
    world: RehearsedWorld, expected: Set[str], stored: Set[str]
) -> Iterator[Fault]:
    """Yield what says that the expected keys are those of one rank, not of all ranks together.

    Args:
        world: The world.
        expected: The keys that the model has, as the user lists them.
        stored: The checkpoint's keys.
    """
    way_out = (
        "way out:     --expect takes the keys of all ranks together, as the checkpoint names them; "
        "without it they are the checkpoint's"
    )
    missing = sorted(expected - stored)
    if own := world.own_names(missing, stored):
        (key, target), *_ = own.items()
        count = format_count(len(own), "expected key")
        yield Fault(
            key,
            f"a rank's own name of {target}, which the checkpoint has",
            (f"in all:      {count} of {len(expected):,}, by the rename of the rules", way_out),
        )
    known = {without_numbers(key) for key in expected & stored}
    unread = [key for key in sorted(stored - expected) if without_numbers(key) in known]
    if numbered := [key for key in unread if any(numbers_in(key))]:
        names = short([folded.name for folded in folded_keys(numbered)])
        yield Fault(
            names,
            "not expected, and other layers or experts of these names are",
            ("likely:      the expected keys are those of one rank, or of one stage", way_out),
        )


class _Costs:
    """Bytes, items and files that ranks read for their boxes; adds faults of missing chunks.

    Costs are computed once for each different box of tensors with equal chunks, and then added
    to the ranks that hold the box.

    Attributes:
        columns: By name, one number per rank: bytes of its tensors; bytes of the elements that it
            needs; bytes read by this package's reader, by torch's, with an exchange; read items.
        opened: The files that ranks open, ``[pairs, 2]``: rank and file number, sorted.
        cut: Keys of tensors that some rank does not need whole.
    """

    def __init__(self, world: RehearsedWorld) -> None:
        names = ("memory", "wanted", "slices", "chunks", "exchange", "reads")
        self.columns = {name: np.zeros(world.size, np.int64) for name in names}
        self.cut: set[str] = set()
        self._world, files = world, world.checkpoint.files
        self._numbers = {name: number for number, name in enumerate(files)}
        self._pairs: list[Ints] = []  # rank and file, as one number
        for lot in world.lots:
            self.columns["memory"][lot.ranks] = lot.memory
            self._add_objects(np.array(lot.ranks, np.int64), lot.objects)
        for piece in world.table.pieces:
            ndims = {len(source.group.shape) for source in piece.sources}
            if piece.group.kind == OBJECT or len(ndims) > 1:
                continue  # it is refused
            cover = piece.cover
            by_cut: dict[Any, list[StoredTensor]] = {}
            for fqn in piece.fqns:
                if (tensor := world.checkpoint.tensors.get(fqn)) is not None:
                    by_cut.setdefault((tensor.cut, tensor.dtype), []).append(tensor)
            for tensors in by_cut.values():
                if len(tensors[0].shape) == cover.boxes.shape[2]:
                    self._add(tensors, cover)
            if cover.boxes[:, 1].tolist() != [list(piece.group.shape)]:
                self.cut.update(piece.fqns)
        pairs = np.unique(np.concatenate([np.zeros(0, np.int64), *self._pairs]))
        self.opened = np.stack(np.divmod(pairs, max(len(files), 1)), axis=1)
        for number, (name, nbytes) in enumerate(files.items()):
            if nbytes is None and len(ranks := self.opened[self.opened[:, 1] == number, 0]):
                fault = Fault(name, "the checkpoint lacks this file")
                world.add_fault(fault, ranks.tolist())

    def _add_objects(self, ranks: Ints, fqns: Sequence[str]) -> None:
        """Add the objects that some ranks read, each of them all."""
        for stored in map(self._world.checkpoint.objects.__getitem__, fqns):
            if stored.file is not None:
                for name in ("slices", "chunks", "exchange"):
                    self.columns[name][ranks] += stored.nbytes
                self.columns["reads"][ranks] += 1
                self._pairs.append(ranks * len(self._numbers) + self._numbers[stored.file])

    def _add(self, tensors: Sequence[StoredTensor], cover: Cover) -> None:
        """Add tensors with equal chunks that the same ranks hold in the same boxes."""
        count, boxes, itemsize = len(tensors), cover.boxes, tensors[0].dtype.itemsize
        stored = tensors[0].cut
        box, chunk = stored.meeting(boxes)
        shared = intersect(boxes[box], stored.boxes[chunk])
        exact = numel(shared) * itemsize
        of_chunks = [tensor.chunks for tensor in tensors]
        # By tensor and chunk: number of its file, -1 for none, and length of its record.
        rows = [[self._numbers.get(c.file or "", -1) for c in chunks] for chunks in of_chunks]
        files = np.array(rows, np.int64)
        nbytes = np.array([[record.nbytes for record in chunks] for chunks in of_chunks], np.int64)
        in_chunks = stored.boxes[chunk, 1], shared[:, 0] - stored.boxes[chunk, 0], shared[:, 1]
        triples = np.stack(in_chunks, axis=1).tolist()
        by_pair = np.array(
            [_slice_nbytes(*map(tuple, triple), itemsize) for triple in triples], np.int64
        )
        slices, chunks, reads = np.zeros((3, len(boxes)), np.int64)
        for lengths, number in zip(*np.unique(nbytes, axis=0, return_counts=True), strict=True):
            whole = is_read_whole(lengths[chunk], exact)
            np.add.at(slices, box, np.where(whole, lengths[chunk], by_pair) * number)
            np.add.at(chunks, box, lengths[chunk] * number)
        np.add.at(reads, box, count)
        of_box = {
            "wanted": cover.numel * itemsize * count,
            "slices": slices,
            "chunks": chunks,
            "exchange": -(-slices // np.maximum(np.diff(cover.starts), 1)),
            "reads": reads,
        }
        for name, values in of_box.items():
            np.add.at(self.columns[name], cover.ranks, values[cover.box_of])
        size = len(self._numbers)
        for of_chunk in np.unique(files, axis=0):
            # Each box with each file once, then each holder of the box with the file.
            pairs = np.unique(box * (size + 1) + of_chunk[chunk] + 1)
            opened, file = np.divmod(pairs, size + 1)
            row, position = expanded(cover.starts[opened], np.diff(cover.starts)[opened])
            ranks, file = cover.ranks[cover.order[position]], file[row] - 1
            self._pairs.append(np.unique(ranks[file >= 0] * size + file[file >= 0]))
            if len(lacking := np.unique(ranks[file < 0])):
                headline = "the metadata names no file for a chunk that is needed"
                for index in np.flatnonzero((files == of_chunk).all(axis=1)).tolist():
                    self._world.add_fault(Fault(tensors[index].fqn, headline), lacking.tolist())


@lru_cache(maxsize=1 << 14)
def _slice_nbytes(
    shape: tuple[int, ...], start: tuple[int, ...], sizes: tuple[int, ...], itemsize: int
) -> int:
    """Return the bytes that are read for a box of a stored chunk."""
    strides = c_strides(shape)
    spans = segments(strides, offsets=start, lengths=sizes, itemsize=itemsize, gap=cheap_gap)
    return spans.total_nbytes


def _requests(world: RehearsedWorld, fqns: set[str]) -> Iterator[AskedBox]:
    """Yield the boxes of some tensors that ranks ask for, with ranks and files."""
    for piece in world.table.pieces:
        for fqn in sorted(fqns.intersection(piece.fqns)):
            stored = world.checkpoint.tensors[fqn]
            cover, chunks = piece.cover, stored.chunks
            of_box: list[set[str]] = [set() for _ in cover.boxes]
            pairs = map(np.ndarray.tolist, stored.cut.meeting(cover.boxes))
            for box, chunk in zip(*pairs, strict=True):
                of_box[box].add(chunks[chunk].file or "")
            for number, box in enumerate(as_boxes(cover.boxes)):
                ranks, files = tuple(cover.holders(number).tolist()), tuple(sorted(of_box[number]))
                yield AskedBox(fqn, box, ranks, files, stored.shape)


def _rows(ranks: Sequence[RankRehearsal]) -> list[tuple[str, ...]]:
    """Return a row per distinct cost; if there are too many, the least, median and most read."""
    equal: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        equal.setdefault(_costs(rank), []).append(rank.rank)
    if len(equal) <= MAX_ROWS:
        return [(_ranks(numbers), *costs) for costs, numbers in equal.items()]
    ordered = sorted(ranks, key=lambda rank: (rank.slices_nbytes, rank.rank))
    extremes = {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}
    return [(f"{label}: {rank.rank}", *_costs(rank)) for label, rank in extremes.items()]


def _ranks(numbers: Sequence[int]) -> str:
    text = ranges(numbers)
    if len(text) <= MAX_RANKS_WIDTH:
        return text
    return f"{text.partition(',')[0]}, ... ({len(numbers):,})"


def _costs(rank: RankRehearsal) -> tuple[str, ...]:
    return (
        format_nbytes(rank.wanted_nbytes),
        format_nbytes(rank.slices_nbytes),
        _times(rank.slices_nbytes, rank.wanted_nbytes),
        format_nbytes(rank.chunks_nbytes),
        _times(rank.chunks_nbytes, rank.wanted_nbytes),
        f"{rank.reads:,}",
        f"{rank.files:,}",
    )


def _times(nbytes: int, wanted: int) -> str:
    return f"{nbytes / wanted:.2f}x" if wanted else "-"
