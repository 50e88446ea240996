"""What a rank reads of a checkpoint: its read items, the proof that they fill it, and the faults.

The reads must tile every destination chunk. Stock planners do not check this: where the checkpoint
lacks a chunk, they leave old values. Tensors that lie alike, here and in the checkpoint, are filled
alike. Ep rank 1 of two reads the half of an expert that four ranks saved by rows::

    Group(entry, Filling(reads, needed_nbytes=24, read_nbytes=24), placed, ["experts.w1"])
    reads    Read(0, (2, 0), (0, 0), at=2, Box((2, 0), (1, 3)), (0, 0), (1, 3))
             Read(0, (2, 0), (1, 0), at=3, Box((3, 0), (1, 3)), (0, 0), (1, 3))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor

from dcp_placements._torch import chunk_list, facts_of, has_hooks, is_dtensor_like
from dcp_placements.bind.binding import Placed, Placing
from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import (
    Index,
    as_array,
    as_boxes,
    format_boxes,
    intersect,
    uncovered,
)
from dcp_placements.layout.sharding import Box, Cuts
from dcp_placements.load.casting import cast_fault, cast_kind, format_cast, narrowing_note
from dcp_placements.load.cuts import shape_mismatch
from dcp_placements.load.missing import MissingKeys, Policy, is_tensor
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.report import LoadReport
from dcp_placements.runs import ReadItemOfLoad, made
from dcp_placements.storage.index.stored_entries import entries_at
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import SaveRecord, record_of


class Read(NamedTuple):
    """A part of a stored chunk and where it goes; the same for all tensors of one layout.

    Attributes:
        position: The number of the destination.
        dest: Where the destination begins in the checkpoint's tensor.
        dest_offsets: Where in the destination the part begins.
        at: The index of the stored chunk.
        stored: The stored chunk.
        stored_offsets: Where in the stored chunk the part begins.
        lengths: Sizes of the part.
    """

    position: int
    dest: torch.Size
    dest_offsets: torch.Size
    at: int
    stored: Box
    stored_offsets: torch.Size
    lengths: torch.Size


def pieces_of(box: Box, stored: Index) -> list[tuple[int, Box, Box]]:
    """Return ``(chunk index, chunk, shared box)`` of the stored chunks that fill a box.

    A chunk that equals the box is returned alone.
    """
    wanted = as_array([box], len(box.sizes))
    _, met = stored.meeting(wanted)
    chunks = stored.boxes[met]
    equal = met[(chunks == wanted).all(axis=(1, 2))]
    if len(equal):
        return [(int(equal[0]), box, box)]
    shared = as_boxes(intersect(chunks, wanted))
    return list(zip(met.tolist(), as_boxes(chunks), shared, strict=True))


def holes_of(box: Box, pieces: Iterable[tuple[int, Box, Box]]) -> list[Box]:
    """Return the parts of a box that are in no piece, as of ``pieces_of``."""
    shared = [one for _, _, one in pieces]
    return [] if shared == [box] else uncovered(box, as_array(shared, len(box.sizes)))


class Reads:
    """Plans reads. Tensors with equal destinations share a search.

    In a checkpoint of thousands of tensors on thousands of ranks, a search through all chunks of
    each would dominate the cost of planning a load.
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple[tuple[Box, ...], torch.Size, int], tuple[Read, ...]] = {}

    def of(
        self, stored: TensorStorageMetadata, destinations: Sequence[Box]
    ) -> tuple[tuple[Read, ...], list[Box]]:
        """Return the reads that fill ``destinations``, and the boxes that no stored chunk holds.

        Args:
            stored: The metadata of the checkpoint's tensor.
            destinations: Boxes of that tensor.
        """
        key = (tuple(destinations), stored.size, len(stored.chunks))
        earlier = self._earlier.get(key)
        # These chunks were proved to fill the destinations, whatever the others are.
        if earlier is not None and all(
            _is_at(stored.chunks, read.at, read.stored) for read in earlier
        ):
            return earlier, []
        reads: list[Read] = []
        holes: list[Box] = []
        chunks = Index(ChunkList.of(stored.chunks, len(stored.size)).array)
        for position, box in enumerate(destinations):
            pieces = pieces_of(box, chunks)
            reads += [_read(position, box, *piece) for piece in pieces]
            holes += holes_of(box, pieces)
        if not holes:
            self._earlier[key] = tuple(reads)
        return tuple(reads), holes


def _is_at(chunks: Sequence[ChunkStorageMetadata], at: int, box: Box) -> bool:
    if at >= len(chunks):
        return False
    if isinstance(chunks, ChunkList):
        # Without torch's objects, of which a search would make one for each key.
        held = chunks.offsets[at].tolist(), chunks.sizes[at].tolist()
        return held == (list(box.offsets), list(box.sizes))
    chunk = chunks[at]
    return chunk.offsets == box.offsets and chunk.sizes == box.sizes


def _read(position: int, box: Box, at: int, stored: Box, piece: Box) -> Read:
    if stored == box == piece:
        offsets, sizes = map(torch.Size, box)
        origin = torch.Size((0,) * len(offsets))
        return Read(position, offsets, origin, at, Box(offsets, sizes), origin, sizes)
    return Read(
        position,
        torch.Size(box.offsets),
        _relative(piece.offsets, box.offsets),
        at,
        Box(torch.Size(stored.offsets), torch.Size(stored.sizes)),
        _relative(piece.offsets, stored.offsets),
        torch.Size(piece.sizes),
    )


def _relative(offsets: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size(list(map(sub, offsets, origin)))


Chunk = Callable[[str, int], torch.Tensor | None]
"""Returns the memory of a destination, by its key and number; None where that is looked up."""


def read_items(
    reads: Iterable[tuple[str, Sequence[Read] | None]],
    load: Any = None,
    chunk_of: Chunk = lambda fqn, position: None,
) -> list[ReadItem]:
    """Return torch's read items.

    Args:
        reads: Key by key, its reads; None of an object.
        load: The state of the load, which the items know.
        chunk_of: The memory of each, which the items know.
    """
    nowhere = torch.Size((0,))
    items: list[ReadItem] = []
    for fqn, parts in reads:
        if parts is None:
            index = MetadataIndex(fqn)
            items.append(
                ReadItemOfLoad(
                    LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere, run=load
                )
            )
            continue
        for position, dest, dest_offsets, at, chunk, stored_offsets, lengths in parts:
            to = {"fqn": fqn, "offset": dest, "index": position}
            source = {"fqn": fqn, "offset": chunk.offsets, "index": at}
            values = {
                "type": LoadItemType.TENSOR,
                "dest_index": made(MetadataIndex, to),
                "dest_offsets": dest_offsets,
                "storage_index": made(MetadataIndex, source),
                "storage_offsets": stored_offsets,
                "lengths": lengths,
                "run": load,
                "chunk": chunk_of(fqn, position),
            }
            items.append(made(ReadItemOfLoad, values))
    return items


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Filling:
    """What fills a tensor; the same for all tensors of one layout, here and in the checkpoint.

    Attributes:
        reads: None for an object.
        needed_nbytes: Bytes of the destinations.
        read_nbytes: Bytes that are read into them.
        cast: How the dtype changes, as text; None where it does not.
        narrows: Whether the change loses precision.
        padded: Elements of padding, which keep their values.
    """

    reads: Sequence[Read] | None = None
    needed_nbytes: int = 0
    read_nbytes: int = 0
    cast: str | None = None
    narrows: bool = False
    padded: int = 0


@dataclass(slots=True)
class Group:
    """Keys that are filled alike: of one place here, and of one entry in the checkpoint.

    Attributes:
        entry: The entry.
        filling: What fills each of them.
        placed: The first of them; None where they have no place.
        fqns: The keys.
        tensors: Their local tensors, as of ``Placed.tensor``; none where these are not known.
    """

    entry: Any
    filling: Filling
    placed: Placed | None
    fqns: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


class Request:
    """One rank's read plan.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        metadata: The checkpoint's.
        policy: What is accepted.
        names: This rank's own keys, where they are renamed.

    Attributes:
        report: What the load reads.
        faults: What cannot be filled, or would be filled wrongly.
        notes: What is accepted with a warning.
        stateless: By optimizer state key that the checkpoint lacks, the parameter, which has no
            state there at all.
        reset: Those of them that are reset.
        collapsed: By scalar of which the checkpoint has one per row, the number of rows.
        groups: The keys that the checkpoint has, by what fills them.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        placing: Placing,
        metadata: Metadata,
        policy: Policy,
        names: Iterable[str] = (),
    ) -> None:
        self.state_dict = state_dict
        self.stored = metadata.state_dict_metadata
        self._metadata = metadata
        self.placing = placing
        self.policy = policy
        self.report = LoadReport()
        self.stateless: dict[str, str] = {}
        self.reset: dict[str, str] = {}
        self.collapsed: dict[str, torch.Size] = {}
        self.faults: list[Fault] = []
        self.notes: list[Fault] = []
        self._states = OptimizerStates(self.state_dict, self.stored, names=names)
        self._reads = Reads()
        self.groups: list[Group] = []

    def items(self, load: Any = None, *, is_known: bool = False) -> list[ReadItem]:
        """Plan all reads, and return them.

        Args:
            load: The state of the load, which they know.
            is_known: Whether they know their memory, too, where they have a place.
        """
        missing = self._group()
        report, groups = self.report, self.groups
        for group in groups:
            filling, count = group.filling, len(group.fqns)
            report.items += count * (1 if filling.reads is None else len(filling.reads))
            report.wanted_nbytes += count * filling.needed_nbytes
            report.read_nbytes += count * filling.read_nbytes
        cast = self._by_key(group for group in groups if group.filling.cast is not None)
        report.casts = {fqn: str(filling.cast) for fqn, filling in cast}
        padded = self._by_key(group for group in groups if group.filling.padded)
        report.padded = {fqn: filling.padded for fqn, filling in padded}
        matched = sum([len(group.fqns) for group in groups])
        if missing:
            self._settle_missing(missing, matched=matched)
        narrowed = [fqn for fqn, filling in cast if filling.narrows]
        if narrowed and self.policy.cast == "warn":
            self.notes.append(narrowing_note(narrowed, report.casts[narrowed[0]]))
        if matched < len(self.stored):
            report.unread = tuple([fqn for fqn in self.stored if fqn not in self.state_dict])
        reads = [(fqn, filling.reads) for fqn, filling in self._by_key(groups)]
        return read_items(reads, load, *([self._chunk] if is_known else []))

    def _chunk(self, fqn: str, position: int) -> torch.Tensor | None:
        placed = None if fqn in self.collapsed else self.placing.placed.get(fqn)
        if placed is None:
            return None
        chunk = placed.chunks[position]
        tensor = placed.tensor
        if not placed.parts and not tensor.requires_grad and tensor.shape == chunk.sizes:
            return tensor
        return placed.view(chunk)

    def _by_key(self, groups: Iterable[Group]) -> list[tuple[str, Filling]]:
        """Return what fills each key of groups, in the order of the state dict."""
        filling_of = {fqn: group.filling for group in groups for fqn in group.fqns}
        fqns = self.state_dict if filling_of else ()
        return [(fqn, filling_of[fqn]) for fqn in fqns if fqn in filling_of]

    def destinations(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return the tensors that are read into, and the key of each; a key may have several."""
        fqns: list[str] = []
        tensors: list[torch.Tensor] = []
        for group in self.groups:
            if group.placed is not None and group.placed.parts:
                for fqn in group.fqns:
                    parts = self.placing.placed[fqn].parts
                    fqns += [fqn] * len(parts)
                    tensors += parts
            elif group.tensors:
                fqns += group.fqns
                tensors += group.tensors
        return fqns, tensors

    def _settle_missing(self, missing: list[str], *, matched: int) -> None:
        keys = MissingKeys(
            self.state_dict,
            self.stored,
            self.placing.absent,
            self._states,
            self.policy,
        )
        keys.settle(missing, matched=matched, refused=bool(self.faults))
        self.faults += keys.faults
        self.notes += keys.notes
        self.stateless, self.reset = keys.stateless, keys.reset
        self.report.missing = tuple(keys.kept)
        self.report.stateless = tuple(dict.fromkeys(keys.reset.values()))

    def _group(self) -> list[str]:
        """Put the keys into groups, and return those that the checkpoint lacks."""
        missing = []
        placed_of, absent = self.placing.placed, self.placing.absent
        # Most tensors are filled as the last one of their place and dtype.
        latest: dict[Any, Group] = {}
        entries = entries_at(self.stored, self.state_dict)
        for (fqn, value), entry in zip(self.state_dict.items(), entries, strict=True):
            placed = placed_of.get(fqn)
            key: Any = None
            tensor = value
            if placed is not None:
                tensor = placed.tensor
                key = placed.place, tensor.dtype, placed.rule
            elif fqn in absent:
                continue
            elif type(value) in _PLAIN and not has_hooks(value):
                key = value.shape, value.dtype
            if entry is None:
                missing.append(fqn)
                continue
            group = latest.get(key)
            # An equal list of chunks that is another object is searched again.
            if group is None or (group.entry is not entry and not _are_alike(group, entry)):
                faults = len(self.faults)
                filling = self._filling(fqn, value, entry)
                if filling is None:
                    continue
                group = Group(entry, filling, placed)
                self.groups.append(group)
                is_sound = len(self.faults) == faults and fqn not in self.collapsed
                if key is not None and is_sound:
                    latest[key] = group
            group.fqns.append(fqn)
            if isinstance(tensor, torch.Tensor) and (key is not None or not has_hooks(tensor)):
                group.tensors.append(tensor)
        return missing

    def _filling(self, fqn: str, value: Any, stored: Any) -> Filling | None:
        """Return what fills a value; None where nothing does, or where that is a fault."""
        placed = self.placing.placed.get(fqn)
        if isinstance(stored, BytesStorageMetadata):
            if placed is None and not is_tensor(value):
                return Filling()
            shape = placed.global_shape if placed is not None else tuple(value.size())
            self._fault(
                fqn,
                "the checkpoint holds an object, but the state dict a tensor"
                + (f" of shape {shape}" if shape else ", a scalar"),
                "reason:      nothing would be read into the tensor; the object would take its "
                "place in the state dict",
                "way out:     put an object (a number, None) under this key to load it, or "
                "give the tensor another name",
            )
            return None
        assert isinstance(stored, TensorStorageMetadata)
        if placed is None and not isinstance(value, torch.Tensor) and not has_hooks(value):
            if not is_dtensor_like(value):  # its fault is there already
                self._fault(
                    fqn,
                    f"the checkpoint holds a {tuple(stored.size)} tensor, but the state dict a "
                    f"{type(value).__name__}",
                    "way out:     put a tensor of that shape into the state dict",
                )
            return None
        return self._tensor_filling(fqn, value, placed, stored)

    @cached_property
    def _record(self) -> SaveRecord | None:
        return record_of(stored(self._metadata), self.stored)

    def _declarations(self, fqn: str, placed: Placed | None) -> tuple[Cuts, Cuts] | None:
        """Return the cuts of the save and of this load, where the checkpoint records them."""
        if self._record is None or placed is None:
            return None
        return self._record.cuts(fqn), placed.place.sharding.cuts

    def _tensor_filling(
        self, fqn: str, value: Any, placed: Placed | None, stored: TensorStorageMetadata
    ) -> Filling | None:
        shape = placed.global_shape if placed is not None else tuple(value.size())
        if shape == () and len(stored.size) == 1 and self._states.of(fqn) is not None:
            # One step for a stacked parameter, of which the checkpoint's rows had one each.
            self.collapsed[fqn] = stored.size
            placed, shape = None, tuple(stored.size)
        if tuple(stored.size) != shape:
            rule = None if placed is None else placed.rule
            needs = f"{shape} is needed"
            cuts = self._declarations(fqn, placed)
            headline, details = shape_mismatch(tuple(stored.size), shape, needs, rule, cuts)
            self._fault(fqn, headline, *details)
            return None
        dtype = value.dtype if placed is None else placed.tensor.dtype
        stored_dtype = stored.properties.dtype
        padded = 0
        if placed is not None:
            destinations = [chunk.box for chunk in placed.chunks]
            if placed.place.sharding.padded_shape is not None:
                held = sum(tensor.numel() for tensor in placed.tensors)
                padded = held - sum(box.numel for box in destinations)
        elif fqn in self.collapsed:
            destinations = [Box((0,), shape)]
        else:
            destinations = [Box(tuple(c.offsets), tuple(c.sizes)) for c in chunk_list(value)]
        reads, holes = self._reads.of(stored, destinations)
        if holes:
            self._refuse_holes(fqn, shape, holes, len(stored.chunks))
        kind = cast_kind(stored_dtype, dtype)
        if kind == "wrong" or (kind == "narrowing" and self.policy.cast == "error"):
            self.faults.append(cast_fault(fqn, stored_dtype, dtype))
        return Filling(
            reads,
            sum(box.numel for box in destinations) * dtype.itemsize,
            sum(read.lengths.numel() for read in reads) * stored_dtype.itemsize,
            None if kind == "same" else format_cast(stored_dtype, dtype),
            kind == "narrowing",
            padded,
        )

    def _refuse_holes(
        self, fqn: str, shape: tuple[int, ...], holes: list[Box], chunks: int
    ) -> None:
        self._fault(
            fqn,
            f"nobody stored {format_boxes(holes, shape)}, which is needed",
            "likely:      the checkpoint was saved by some of the ranks only, or without "
            "collectives, so that each rank's metadata describes its own part alone",
            f"way out:     load a complete checkpoint; of this key it holds {chunks} chunk(s)",
        )

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))


def fleeting_faults(state_dict: Mapping[str, Any], placing: Placing) -> list[Fault]:
    """Return the DTensor-likes whose ``to_local()`` makes another tensor each time.

    Bytes that are read into such a tensor are lost when the load ends.
    """
    return [
        Fault(
            fqn,
            f"to_local() of this {type(value).__name__} makes a copy: what is read would be lost",
            (
                "likely:      it casts, gathers or unpacks what it holds",
                "way out:     load into the tensor that it holds, and make the copy afterwards",
            ),
        )
        for fqn, value in state_dict.items()
        if type(value) is not DTensor
        and is_dtensor_like(value)
        and (placed := placing.placed.get(fqn)) is not None
        and placed.tensor.numel()
        and _address(facts_of(value)[0]) != _address(placed.tensor)
    ]


def _address(tensor: torch.Tensor) -> int:
    """Return where the tensor's storage begins in memory; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # wrapper subclasses have no memory of their own
        return 0


def _are_alike(group: Group, other: Any) -> bool:
    """Whether an entry differs in nothing that a filling depends on; chunks by identity alone."""
    one = group.entry
    return (
        type(other) is TensorStorageMetadata
        and one.chunks is other.chunks
        and one.size == other.size
        and one.properties.dtype == other.properties.dtype
    )
