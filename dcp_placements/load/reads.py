"""A load of one rank: its read items, the proof that they fill it, the faults, and what ends it.

The reads must tile every destination chunk. Stock planners do not check this: where the checkpoint
lacks a chunk, they leave old values. Tensors that lie alike, here and in the checkpoint, are filled
alike. A planner may have several loads under way, so each item, and the plan, name theirs.

Ep rank 1 of two reads the half of an expert that four ranks saved by rows::

    ReadGroup(entry, placed, reads, needed_nbytes=24, read_nbytes=24, fqns=["experts.w1"])
    reads    ReadItem(TENSOR, ("", (2, 0)), (0, 0), ("", (2, 0)), (0, 0), lengths=(1, 3))
             ReadItem(TENSOR, ("", (2, 0)), (1, 0), ("", (3, 0)), (0, 0), lengths=(1, 3))
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import attrgetter, sub
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import (
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements._torch import (
    PLAIN,
    ShardedTensor,
    chunk_list,
    has_hooks,
    is_dtensor_like,
)
from dcp_placements.bind.one_tensor import Placed, Placing
from dcp_placements.errors import Fault, format_faults, format_names, raise_faults
from dcp_placements.layout.boxes import (
    Index,
    as_array,
    format_boxes,
    uncovered,
)
from dcp_placements.layout.sharding import Box, format_cuts
from dcp_placements.load.birth import STEP, Reset, as_number, copy_of
from dcp_placements.load.casting import cast_fault, cast_kind, format_cast, quantized_fault
from dcp_placements.load.missing import Policy, is_tensor, reset_note, settle_missing
from dcp_placements.names.flat import Path, Reshaped, put_at, value_at
from dcp_placements.names.numbers import NumberedKey
from dcp_placements.names.optimizer_state import OptimizerStates, ParameterNames
from dcp_placements.names.scales import scale_of
from dcp_placements.planning import ReadItemOfLoad
from dcp_placements.report import LoadReport
from dcp_placements.rules.patterns import Matches
from dcp_placements.storage.provenance import SaveRecord, record_of, stored
from dcp_placements.storage.torch_metadata import StoredPlace, chunk_boxes
from dcp_placements.table.digests import full_digest
from dcp_placements.table.table import Held, Holding, as_holding, group_of

if TYPE_CHECKING:
    from dcp_placements.load.exchange import Exchange


def reads_of(
    stored: TensorStorageMetadata, destinations: Sequence[Box]
) -> tuple[list[ReadItem], list[Box]]:
    """Return what fills ``destinations``, and the boxes that no stored chunk holds.

    The items are those of all tensors of one layout, so they have no key.

    Args:
        stored: The metadata of the checkpoint's tensor.
        destinations: Boxes of that tensor.
    """
    reads: list[ReadItem] = []
    holes: list[Box] = []
    chunks = Index(chunk_boxes(stored.chunks, len(stored.size)))
    for position, box in enumerate(destinations):
        pieces = chunks.pieces(box)
        filled = [shared for _, _, shared in pieces]
        if filled != [box]:
            holes += uncovered(box, as_array(filled, len(box.sizes)))
        for at, chunk, shared in pieces:
            reads.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex("", torch.Size(box.offsets), position),
                    torch.Size(map(sub, shared.offsets, box.offsets)),
                    MetadataIndex("", torch.Size(chunk.offsets), at),
                    torch.Size(map(sub, shared.offsets, chunk.offsets)),
                    torch.Size(shared.sizes),
                )
            )
    return reads, holes


_NOWHERE = torch.Size((0,))
_OBJECT = ReadItem(
    LoadItemType.BYTE_IO, MetadataIndex(""), _NOWHERE, MetadataIndex(""), _NOWHERE, _NOWHERE
)


def read_items(
    reads: Iterable[tuple[str, Sequence[ReadItem] | None]],
    load: Any = None,
    held: Mapping[str, Any] = MappingProxyType({}),
) -> list[ReadItem]:
    """Return the read items of keys.

    Args:
        reads: Key by key, its reads, as ``reads_of`` returns them; None of an object.
        load: The state of the load, which the items know.
        held: Of keys whose items know their memory, too: a plain tensor, or one with its place.
    """
    items: list[ReadItem] = []
    for fqn, parts in reads:
        value = held.get(fqn)
        placed = value if isinstance(value, Placed) else None
        plain = value if type(value) in PLAIN else None
        for read in (_OBJECT,) if parts is None else parts:
            dest, source = read.dest_index, read.storage_index
            items.append(
                ReadItemOfLoad(
                    read.type,
                    MetadataIndex(fqn, dest.offset, dest.index),
                    read.dest_offsets,
                    MetadataIndex(fqn, source.offset, source.index),
                    read.storage_offsets,
                    read.lengths,
                    load,
                    plain if placed is None else placed.view(placed.place.chunks[dest.index or 0]),
                )
            )
    return items


_stored_at = attrgetter("storage_index.index")
_DENSE = (
    "way out:     save to_dense() of it, and load that into a dense tensor; or leave this key out, "
    "and make the tensor anew"
)


@dataclass(slots=True)
class ReadGroup:
    """Keys that are filled alike: of one place here, and of one kind of entry in the checkpoint.

    Attributes:
        entry: The entry of the first.
        placed: The place of the first; None where they have none.
        reads: What is read of each; None of an object.
        needed_nbytes: Bytes of the destinations.
        read_nbytes: Bytes that are read into them.
        cast: How the dtype changes, as text; None where it does not.
        narrows: Whether the change loses precision.
        padded: Elements of padding, which keep their values.
        fqns: The keys.
    """

    entry: Any
    placed: Placed | None = None
    reads: Sequence[ReadItem] | None = None
    needed_nbytes: int = 0
    read_nbytes: int = 0
    cast: str | None = None
    narrows: bool = False
    padded: int = 0
    fqns: list[str] = field(default_factory=list)

    def fills(self, entry: Any) -> bool:
        """Whether tensors of another entry, as large and of as many chunks, are filled alike.

        The chunks that are read were proved to fill the destinations, whatever the others are.
        """
        own, other = self.entry.chunks, entry.chunks
        look, other_look = self.entry.properties, entry.properties
        return self.entry is entry or (
            (look.dtype, look.layout) == (other_look.dtype, other_look.layout)
            and (
                own is other
                or all(own[at] == other[at] for at in map(_stored_at, self.reads or ()))
            )
        )


def _is_scalar(value: Any) -> bool:
    """Whether a value is a tensor without dims."""
    return is_tensor(value) and not has_hooks(value) and not value.shape


LOOK = "look at this load"
"""Begins a warning."""


@dataclass
class RankLoad:
    """What one load on one rank knows.

    Attributes:
        original_state_dict: The user's, nested.
        state_dict: Flat, with the checkpoint's keys.
        mappings: Where each key stands in the nested dict.
        metadata: The checkpoint's.
        stored: Of that, what it has of each key.
        is_coordinator: Whether this rank is the coordinator.
        refusal: Why the rank cannot load; the coordinator raises it for all ranks.
        reshaped: What a rename makes other tensors of.
        numbered: The keys in which the rename gave a number.
        declared: What is declared by pattern, and whether a key of this rank matches; None before
            that is known.
        placing: The places of its tensors.
        policy: What is accepted.
        record: How the checkpoint was saved; None where it has no record of that.
        groups: The keys that the checkpoint has, by what fills them.
        to_reset: By key of optimizer state that is reset when all is read, to what.
        numbers: By key of a number that is read as a tensor, the number that it is here.
        faults: What cannot be filled, or would be filled wrongly.
        notes: What is accepted with a warning.
        tied: The keys that overlap in memory, each with all that it overlaps.
        ids: The records of save ids that are read.
        exchange: None where nothing is exchanged.
        buffered: What was read into buffers: key, memory and buffer.
        unread: Items that are still to be read, where something is due after the last one.
        report: The report on the load.
    """

    original_state_dict: dict[str, Any] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    stored: Mapping[str, Any] = field(default_factory=dict)
    is_coordinator: bool = False
    refusal: Sequence[Fault] = ()
    reshaped: Reshaped | None = None
    numbered: Sequence[NumberedKey] = ()
    declared: Matches | None = None
    placing: Placing = field(default_factory=Placing)
    policy: Policy = field(default_factory=Policy)
    record: SaveRecord | None = None
    groups: list[ReadGroup] = field(default_factory=list)
    to_reset: dict[str, Reset] = field(default_factory=dict)
    numbers: dict[str, int | float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ids: dict[MetadataIndex, StoredPlace] = field(default_factory=dict)
    exchange: Exchange | None = None
    buffered: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    unread: int = 0
    report: LoadReport = field(default_factory=lambda: LoadReport(planned=False))
    _lock: Any = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankLoad, ()  # a plan that is sent has no tensors

    @cached_property
    def states(self) -> OptimizerStates:
        """Which keys are optimizer state; asked once all keys have their names."""
        return OptimizerStates(self.state_dict, self.stored)

    def plan(self, placing: Placing, policy: Policy) -> None:
        """Plan what is read of the tensors that have places, and of all other values.

        Args:
            placing: Their places.
            policy: What is accepted.
        """
        self.placing, self.policy, self.report = placing, policy, LoadReport()
        self.stored = self.metadata.state_dict_metadata
        self.record = record_of(stored(self.metadata), self.stored)
        missing, narrowed = self._group()
        if missing:
            settle_missing(self, missing)
        if narrowed and policy.cast == "warn":
            cast = self.report.casts[narrowed[0]]
            headline = f"loaded with less precision than stored ({cast})"
            way_out = 'way out:     cast="allow" where this is intended, cast="error" to refuse it'
            self.notes.append(Fault(format_names(narrowed, 3), headline, (way_out,)))

    def _group(self) -> tuple[list[str], list[str]]:
        """Put the keys into groups; return those that are missing, and those that lose digits."""
        missing: list[str] = []
        narrowed: list[str] = []
        report, casts, padded = self.report, self._number_casts(), {}
        placed_of, absent = self.placing.placed, self.placing.absent
        # Most tensors are filled as the last one of their place and dtype.
        latest: dict[Any, ReadGroup] = {}
        for fqn, value in self.state_dict.items():
            entry = self.stored.get(fqn)
            placed = placed_of.get(fqn)
            if placed is None and fqn in absent:
                continue
            if entry is None:
                missing.append(fqn)
                continue
            key: Any = None
            if isinstance(entry, TensorStorageMetadata):
                if placed is not None:
                    key = placed.place, placed.tensor.dtype, placed.tensor.layout, placed.rule
                elif type(value) in PLAIN and not has_hooks(value):
                    key = value.shape, value.dtype, value.layout
                key = key and (*key, entry.size, len(entry.chunks))
            group = latest.get(key)
            if group is None or not group.fills(entry):
                faults = len(self.faults)
                # What has no place has chunks of its own, or a fault already.
                is_own = has_hooks(value) or (is_tensor(value) and not is_dtensor_like(value))
                if isinstance(entry, TensorStorageMetadata) and (placed is not None or is_own):
                    group = self._tensor_group(fqn, value, placed, entry)
                else:
                    group = self._object_group(fqn, value, placed, entry)
                if group is None:
                    continue
                self.groups.append(group)
                if key is not None and len(self.faults) == faults and group.placed is placed:
                    latest[key] = group
            group.fqns.append(fqn)
            if group.cast is not None:
                casts[fqn] = group.cast
                narrowed += [fqn] if group.narrows else []
            if group.padded:
                padded[fqn] = group.padded
        for group in self.groups:
            count = len(group.fqns)
            report.items += count * (1 if group.reads is None else len(group.reads))
            report.wanted_nbytes += count * group.needed_nbytes
            report.read_nbytes += count * group.read_nbytes
        report.casts, report.padded = casts, padded
        if sum([len(group.fqns) for group in self.groups]) < len(self.stored):
            report.unread = tuple([fqn for fqn in self.stored if fqn not in self.state_dict])
        return missing, narrowed

    def _number_casts(self) -> dict[str, str]:
        """Return how numbers are read that are tensors without dims on one side alone.

        As an optimizer's ``lr`` and ``step`` are, by its options. A number is read as a tensor, and
        put in its place at the end.
        """
        casts = {}
        for fqn, value in self.state_dict.items():
            entry, kind = self.stored.get(fqn), type(value)
            if not isinstance(entry, TensorStorageMetadata):
                if entry is not None and _is_scalar(value):
                    casts[fqn] = f"number -> {value.dtype} tensor".replace("torch.", "")
            elif kind in (int, float) and not entry.size:
                dtype = entry.properties.dtype
                self.numbers[fqn], self.state_dict[fqn] = value, torch.empty((), dtype=dtype)
                casts[fqn] = f"{dtype} tensor -> {kind.__name__}".removeprefix("torch.")
        return casts

    def _object_group(
        self, fqn: str, value: Any, placed: Placed | None, entry: Any
    ) -> ReadGroup | None:
        """Return the group of an object; None where one side has a tensor, which is a fault."""
        has_tensor = placed is not None or is_tensor(value)
        if _is_scalar(value) and not isinstance(entry, TensorStorageMetadata):
            return ReadGroup(entry)
        if not has_tensor and not isinstance(entry, TensorStorageMetadata):
            return ReadGroup(entry)
        if not has_tensor:
            one, other = f"a {tuple(entry.size)} tensor", f"a {type(value).__name__}"
        elif not isinstance(entry, TensorStorageMetadata):
            shape = tuple(value.size()) if placed is None else placed.place.sharding.global_shape
            one, other = "an object", f"a tensor of shape {shape}"
        else:
            assert self.placing.faults  # its own is among them
            return None
        headline = f"the checkpoint holds {one}, but the state dict {other}"
        way_out = "way out:     a value of that kind under this key; or give this one another name"
        self.faults.append(Fault(fqn, headline, (way_out,)))
        return None

    def _tensor_group(
        self, fqn: str, value: Any, placed: Placed | None, entry: TensorStorageMetadata
    ) -> ReadGroup | None:
        held = getattr(value if placed is None else placed.tensor, "layout", torch.strided)
        if {held, entry.properties.layout} != {torch.strided}:
            headline = f"is a {held} tensor here, which cannot be filled in place"
            if held is torch.strided:
                headline = f"the checkpoint holds a {entry.properties.layout} tensor"
            self.faults.append(Fault(fqn, headline, (_DENSE,)))
            return None
        shape = tuple(value.size()) if placed is None else placed.place.sharding.global_shape
        if tuple(entry.size) != shape:
            self.faults.append(self._other_shape(fqn, tuple(entry.size), shape, placed))
            return None
        chunks = chunk_list(value) if placed is None else placed.place.chunks
        destinations = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        needed = sum([prod(box.sizes) for box in destinations])
        padded = 0
        if placed is not None and placed.place.sharding.padded_shape is not None:
            padded = sum([tensor.numel() for tensor in placed.tensors]) - needed
        reads, holes = reads_of(entry, destinations)
        if holes:
            headline = f"nobody stored {format_boxes(holes, shape)}, which is needed"
            details = (
                "likely:      the checkpoint was saved by some of the ranks only, or without "
                "collectives, so that each rank's metadata describes its own part alone",
                f"way out:     load a complete checkpoint; of this key it holds "
                f"{len(entry.chunks)} chunk(s)",
            )
            self.faults.append(Fault(fqn, headline, details))
        dtype = value.dtype if placed is None else placed.tensor.dtype
        stored_dtype = entry.properties.dtype
        kind = "same" if stored_dtype == dtype else cast_kind(stored_dtype, dtype)
        if kind == "wrong" or (kind == "narrowing" and self.policy.cast == "error"):
            self.faults.append(cast_fault(fqn, stored_dtype, dtype))
        is_float = kind != "same" and dtype.is_floating_point and dtype.itemsize > 1
        scale = scale_of(fqn, stored_dtype, self.stored) if is_float else None
        # Whoever asks for the scales, too, may multiply by them.
        if scale and scale not in self.state_dict and not self.policy.waives(fqn):
            self.faults.append(quantized_fault(fqn, stored_dtype, dtype, scale))
        return ReadGroup(
            entry,
            placed,
            reads,
            needed * dtype.itemsize,
            sum(read.lengths.numel() for read in reads) * stored_dtype.itemsize,
            None if kind == "same" else format_cast(stored_dtype, dtype),
            kind == "narrowing",
            padded,
        )

    def _other_shape(
        self, fqn: str, stored: tuple[int, ...], needed: tuple[int, ...], placed: Placed | None
    ) -> Fault:
        """Return the fault that a tensor is stored in another shape than is needed."""
        details, is_alike = [], False
        if placed is not None and self.record is not None:
            saved, loaded = self.record.cuts(fqn), placed.place.sharding.cuts
            is_alike = bool(saved) and saved == loaded
            details = [f"saved:       {format_cuts(saved)}", f"this load:   {format_cuts(loaded)}"]
        if () in (stored, needed):
            details.append(
                "likely:      one side has one number for all experts, the other one for each: of "
                "one tensor for all, and of a tensor for each (Stack, Unstack)"
            )
        differing = [dim for dim, (a, b) in enumerate(zip(stored, needed, strict=False)) if a != b]
        if len(stored) == len(needed) and len(differing) == 1:
            (dim,) = differing
            small, large = sorted((stored[dim], needed[dim]))
            if small and large % small == 0:
                larger, cause = "stored", "does this load lack a rule for it,"
                if stored[dim] == small:
                    larger, cause = "needed", "saved without its placement"
                cause += f" on an axis of size {large // small}?"
                if is_alike:
                    cause = "another number of experts or rows, since both sides cut it alike?"
                details.append(
                    f"likely:      on dim {dim} the {larger} size is {large // small} times the "
                    f"other: {cause}"
                )
        if placed is not None and placed.rule is not None:
            details.append(f"by rule:     {placed.rule}")
            if self.record is None:
                details.append(
                    "saved:       by other planners, which take parts that no DTensor describes "
                    "for replicas: dcp-placements doctor says what is left"
                )
        details.append(
            "way out:     build the model as it was saved, or correct the rule of this key: its "
            "axes, or global_shape= and padded_shape= of parts that are uneven or padded"
        )
        headline = (
            f"the checkpoint holds a {stored} tensor, but {needed} is needed (torch: Size mismatch)"
        )
        return Fault(fqn, headline, tuple(details))

    def holding(self, without: Container[str] = ()) -> Holding:
        """Return the tensors that are read, as other ranks compare and exchange them.

        Args:
            without: Keys that are left out.
        """
        tables: dict[Any, dict[Any, Held]] = {}
        placed_of = self.placing.placed
        for one in self.groups:
            fqns = [fqn for fqn in one.fqns if fqn not in without]
            if one.reads is None or not fqns:
                continue
            value = self.state_dict[fqns[0]] if one.placed is None else one.placed
            group, boxes = group_of(fqns[0], value)
            has_own_key = one.placed is not None and one.placed.has_own_key
            table = tables.setdefault((has_own_key, group.kind, group.axis_names), {})
            held = table.setdefault((group, boxes), Held(group, boxes))
            held.fqns += fqns
            held.values += map(placed_of.get, fqns)
        return as_holding([list(table.values()) for table in tables.values()], {})

    def unexcused_resets(self) -> tuple[tuple[str, str], ...]:
        """Return optimizer and name of the parameters that are read, and whose state is reset."""
        fqns = [
            fqn
            for fqn, reset in self.to_reset.items()
            if not (reset.stays_if_stepped or self.policy.excuses(fqn))
        ]
        states = filter(None, map(self.states.of, fqns))
        return tuple(dict.fromkeys([state.owner for state in states]))

    def destinations(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that are read into or reset, by key; some keys have several."""
        read = [fqn for group in self.groups if group.reads is not None for fqn in group.fqns]
        found: list[tuple[str, torch.Tensor]] = []
        for fqn in (*read, *self.to_reset):
            placed = self.placing.placed.get(fqn)
            if placed is None and has_hooks(self.state_dict[fqn]):
                continue
            if placed is not None and not placed.parts:
                found.append((fqn, placed.tensor))
                continue
            tensors = self.tensors(fqn) if placed is None else placed.parts
            found += [(fqn, tensor) for tensor in tensors]
        return found

    def tensors(self, fqn: str) -> Sequence[torch.Tensor]:
        """Return the tensors of this rank that a value consists of."""
        if (placed := self.placing.placed.get(fqn)) is not None:
            return placed.tensors
        value = self.state_dict[fqn]
        if type(value) not in PLAIN and isinstance(value, ShardedTensor):
            return [shard.tensor for shard in value.local_shards()]
        return [value] if isinstance(value, torch.Tensor) else []

    def warn(self, notes: Sequence[Fault]) -> None:
        """Warn of what is accepted, and keep it in the report."""
        self.report.warnings += tuple(map(str, notes))
        warnings.warn(format_faults(LOOK, notes, "note"), stacklevel=3)

    def take_object(self, fqn: str, value: Any) -> None:
        """Put an object that was read into its place, but for names of parameters."""
        if isinstance(self.state_dict[fqn], ParameterNames):
            return
        if _is_scalar(self.state_dict[fqn]):
            self._fill(fqn, value)
        else:
            put_at(self.original_state_dict, self.mappings[fqn], value)

    def _fill(self, fqn: str, value: Any) -> None:
        """Put a number that was read as an object into a tensor without dims.

        Raises:
            PlacementError: It is no number, or a fraction where the tensor has integers.
        """
        dtype = self.state_dict[fqn].dtype
        is_number = type(value) in (int, float)
        is_whole = is_number and float(value).is_integer()
        if not is_number or not (is_whole or dtype.is_floating_point or dtype.is_complex):
            headline = f"the checkpoint holds {value!r:.80}, but the state dict a {dtype} tensor"
            way_out = (
                "way out:     a value of that kind under this key; or another name for this one"
            )
            raise_faults("a number cannot be loaded", [Fault(fqn, headline, (way_out,))])
        for tensor in self.tensors(fqn):
            tensor.detach().fill_(value)

    def end_read(self) -> None:
        """Take in that an item was read; readers may call from several threads."""
        with self._lock:
            self.unread -= 1
            is_last = not self.unread
        if is_last:
            settle_tied(self.buffered, self.tied)
            self.end()

    def end(self) -> None:
        """Put numbers that were read as tensors in their place, and reset what was not read.

        Memory that was read under another key, as that of tied parameters or of one ``step`` for
        all, keeps what was read.
        """
        numbers, self.numbers = self.numbers, {}
        for fqn, like in numbers.items():
            number = as_number(self.state_dict[fqn].item(), like)
            put_at(self.original_state_dict, self.mappings.get(fqn, (fqn,)), number)
        resets, self.to_reset = self.to_reset, {}
        if not resets:
            return
        stepped = dict.fromkeys(self._stepped(resets))
        resets = {
            fqn: one
            for fqn, one in resets.items()
            if not (one.stays_if_stepped and one.parameter in stepped)
        }
        used = {one.parameter: None for one in resets.values() if one.parameter in stepped}
        tied = [fqn for fqn in resets if fqn in self.tied]
        before = {fqn: [one.clone() for one in self.tensors(fqn)] for fqn in tied}
        for fqn, reset in resets.items():
            self._reset(fqn, reset)
        land(self.buffered)
        for fqn, values in before.items():
            if not all(map(torch.equal, values, self.tensors(fqn))):
                used[resets[fqn].parameter] = None
        if used:
            self.warn([reset_note(list(used))])

    def _stepped(self, resets: Mapping[str, Reset]) -> Iterator[str]:
        """Yield the parameters that were stepped on this rank, so that a reset loses something.

        A fresh optimizer may have counted a step, by which its moments are no longer 0 where
        weights decay; one that counts none has moments of 0.
        """
        fqns_of: dict[str, list[str]] = {}
        for fqn, reset in resets.items():
            if fqn not in self.tied:
                fqns_of.setdefault(reset.parameter, []).append(fqn)
        for parameter, fqns in fqns_of.items():
            counts = [fqn for fqn in fqns if fqn.endswith(f".{STEP}")]
            moments = [fqn for fqn in fqns if resets[fqn].is_zero and not counts]
            held = [self.state_dict[fqn] for fqn in counts]
            steps = [torch.tensor(one) for one in held if isinstance(one, int | float)]
            steps += [one for fqn in counts for one in self.tensors(fqn)]
            values = [one for fqn in moments for one in self.tensors(fqn)]
            if any(bool(((one != 0) & (one != 1)).any()) for one in steps) or any(
                bool(one.any()) for one in values
            ):
                yield parameter

    def _reset(self, fqn: str, reset: Reset) -> None:
        """Set optimizer state to what it is before a first step."""
        value, number = self.state_dict[fqn], reset.value
        if reset.option is not None:
            held = self.state_dict[reset.option]
            if not isinstance(held, torch.Tensor):
                held = value_at(self.original_state_dict, self.mappings[reset.option])
            number = float(held)
        if isinstance(value, int | float):
            path = self.mappings.get(fqn, (fqn,))
            put_at(self.original_state_dict, path, as_number(number, value))
        for at, tensor in enumerate(map(torch.Tensor.detach, self.tensors(fqn))):
            if reset.weight is not None:
                weight = self.tensors(reset.weight)[at].detach()
                tensor.copy_(copy_of(weight, tensor, reset.stride))
            elif reset.option is not None and tensor.is_complex():
                tensor.fill_(complex(number, number))
            else:
                tensor.fill_(number)


MAX_KEYS = 6
"""Keys of one memory that a message lists."""

_FEW = 4
"""Elements of a tensor that a message shows."""

UNLIKE = "what is one here differs in the checkpoint"

Buffered = Sequence[tuple[str, torch.Tensor, torch.Tensor]]
"""What was read into buffers: key, memory, buffer."""


def land(buffered: Buffered) -> None:
    """Put what was read into its memory."""
    for _, memory, buffer in buffered:
        memory.copy_(buffer)


def settle_tied(buffered: Buffered, tied: Mapping[str, tuple[str, ...]]) -> None:
    """Put what was read into its memory; refuse what was overwritten by another key's.

    Each part of tensors that overlap is read into a buffer of its own: of one memory under two keys
    the contents that are read last would stay. A part that is not there at the end was overwritten.

    Raises:
        PlacementError: Some have one memory, but other contents.
    """
    land(buffered)
    lost: dict[tuple[str, ...], dict[str, str]] = {}
    for fqn, memory, buffer in buffered:
        if full_digest(memory) != full_digest(buffer):
            read, left = (one.flatten()[:_FEW].tolist() for one in (buffer, memory))
            lost.setdefault(tied[fqn], {})[fqn] = f"{read} of {fqn}, where {left} is left"
    faults = [unlike_fault(keys, [*fqns], next(iter(fqns.values()))) for keys, fqns in lost.items()]
    raise_faults(UNLIKE, faults)


def unlike_fault(keys: tuple[str, ...], lost: Sequence[str], contents: str) -> Fault:
    """Return that keys have different contents in the checkpoint, and one memory here.

    Args:
        keys: All that have the one memory; a single one is a stack, whose rows have it.
        lost: Those whose contents are not there.
        contents: As text, where they begin.
    """
    what = "them" if len(keys) > 1 else "several rows of it"
    # Those that were overwritten first: a long list is cut.
    return Fault(
        format_names([*dict.fromkeys((*lost, *keys))], MAX_KEYS),
        f"this rank has one memory for {what}, but the checkpoint has different contents",
        (
            f"overwritten: {format_names(lost, MAX_KEYS)}",
            f"contents:    {contents}",
            "way out:     load into a model that does not tie them, for rows with one tensor per "
            "row; or leave all keys but one out of the state dict: its contents are then those of "
            "all",
        ),
    )
