"""What a rank asks of a checkpoint: the parts of stored chunks that fill it, and the faults.

The reads must cover every destination chunk. Stock planners do not check this: where the checkpoint
lacks a chunk, they leave old values. The reads are planned once for all keys of one group that the
checkpoint stores in one way.

Ep rank 1 of two reads the half of an expert that four ranks saved by rows::

    Request(asked, holding, [ReadGroup(entry, placed, reads, fqns=["experts.w1"])], ...)
    reads    ReadItem(TENSOR, ("", (2, 0)), (0, 0), ("", (2, 0)), (0, 0), lengths=(1, 3))
             ReadItem(TENSOR, ("", (2, 0)), (1, 0), ("", (3, 0)), (0, 0), lengths=(1, 3))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter, sub
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata, ReadItem, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from dcp_placements._torch import (
    PLAIN_TYPES,
    chunk_list,
    has_hooks,
    is_dtensor_like,
    world_size,
)
from dcp_placements.bind.rule_and_dtensor import Placed, Placing, is_tensor
from dcp_placements.bind.tensor_memory import memory_key, tied_keys
from dcp_placements.errors import Fault
from dcp_placements.items import ReadItemOfLoad, object_read, with_fields
from dcp_placements.layout.boxes import Index, as_array, format_boxes, uncovered
from dcp_placements.layout.sharding import Box, format_cuts
from dcp_placements.load.casting import (
    cast_fault,
    cast_kind,
    format_cast,
    may_have_scales,
    quantized_fault,
    unscaled_note,
)
from dcp_placements.load.missing import Asked, Missing, Policy, is_read_as_tensor, settle_missing
from dcp_placements.names.known_names import EXTRA_STATE
from dcp_placements.names.rename_results import OfWhole
from dcp_placements.names.scales import scale_of
from dcp_placements.report import LoadReport
from dcp_placements.short_text import format_names
from dcp_placements.storage.provenance import provenance_of, record_of
from dcp_placements.storage.torch_metadata import chunk_boxes
from dcp_placements.table.table import OBJECT, Held, Holding, holding_of


def reads_of(
    stored: TensorStorageMetadata, destinations: Sequence[Box]
) -> tuple[list[ReadItem], list[Box]]:
    """Return what fills ``destinations``, and the boxes that no stored chunk holds.

    A hole here is one of a rank's own boxes; whether the chunks of all ranks make the whole, the
    save has proved (``table.prove``). The items serve all tensors of one layout: they have no key.

    Args:
        stored: The metadata of the checkpoint's tensor.
        destinations: Boxes of that tensor.
    """
    reads: list[ReadItem] = []
    holes: list[Box] = []
    chunks = Index(chunk_boxes(stored.chunks, len(stored.size)))
    for position, box in enumerate(destinations):
        overlaps = chunks.overlaps(box)
        filled = [shared for _, _, shared in overlaps]
        if filled != [box]:
            holes += uncovered(box, as_array(filled, len(box.sizes)))
        for index, chunk, shared in overlaps:
            reads.append(
                ReadItemOfLoad(
                    LoadItemType.TENSOR,
                    MetadataIndex("", torch.Size(box.offsets), position),
                    torch.Size(map(sub, shared.offsets, box.offsets)),
                    MetadataIndex("", torch.Size(chunk.offsets), index),
                    torch.Size(map(sub, shared.offsets, chunk.offsets)),
                    torch.Size(shared.sizes),
                )
            )
    return reads, holes


_OBJECT = object_read(MetadataIndex(""))

_stored_index = attrgetter("storage_index.index")


@dataclass(slots=True)
class ReadGroup:
    """Keys that are filled by the same reads: of one place here, and one layout in the checkpoint.

    Attributes:
        entry: The metadata of the first; None for objects.
        placed: The place of the first; None where they have none.
        reads: What is read of each; None for objects.
        needed_nbytes: Bytes of the destinations.
        read_nbytes: Bytes that are read into them.
        cast: How the dtype changes, as text; None where it does not.
        narrows: Whether the change loses precision.
        has_codes: Whether the change is of elements that may have scales of their own: of each key.
        padded: Elements of padding, which keep their values.
        faults: Why the first cannot be filled; the group has no other key then.
        fqns: The keys.
    """

    entry: Any
    placed: Placed | None = None
    reads: Sequence[ReadItem] | None = None
    needed_nbytes: int = 0
    read_nbytes: int = 0
    cast: str | None = None
    narrows: bool = False
    has_codes: bool = False
    padded: int = 0
    faults: Sequence[Fault] = ()
    fqns: list[str] = field(default_factory=list)

    def fills(self, entry: Any) -> bool:
        """Whether the same reads fill a tensor of other metadata, of one shape and chunk count.

        The chunks that are read were proved to fill the destinations, whatever the others are.
        """
        own, other = self.entry.chunks, entry.chunks
        properties, others = self.entry.properties, entry.properties
        return self.entry is entry or (
            (properties.dtype, properties.layout) == (others.dtype, others.layout)
            and (
                own is other
                or all(own[index] == other[index] for index in map(_stored_index, self.reads or ()))
            )
        )


def is_scalar(value: Any) -> bool:
    """Whether a value is a tensor without dims."""
    return is_read_as_tensor(value) and not has_hooks(value) and not value.shape


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What a load reads on one rank, and what becomes of the keys that it does not read.

    Attributes:
        asked: What the rank asks for, and what the checkpoint has.
        holding: The tensors that are read, as other ranks compare and exchange them.
        groups: The keys that the checkpoint has, by what fills them.
        numbers: The numbers of this rank that are read as tensors, by key.
        casts: How dtypes change, as text, by key.
        missing: What becomes of the keys that the checkpoint lacks, and that are not tied to one of
            its keys.
        destinations: The tensors that are read into or reset, by key; some keys have several.
        tied: The keys that are read into overlapping memory, each with all that it overlaps.
        faults: What cannot be filled, or would be filled wrongly.
        notes: What is accepted with a warning.
    """

    asked: Asked
    holding: Holding
    groups: Sequence[ReadGroup]
    numbers: Mapping[str, int | float]
    casts: Mapping[str, str]
    missing: Missing
    destinations: Sequence[tuple[str, torch.Tensor]]
    tied: Mapping[str, tuple[str, ...]]
    faults: Sequence[Fault]
    notes: Sequence[Fault]

    def memory(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a destination: a view of the local tensor."""
        placed = self.asked.placing.placed.get(index.fqn)
        if placed is None:
            memory: torch.Tensor = find_state_dict_object(self.asked.state_dict, index)
            return memory
        assert index.index is not None
        return placed.view(placed.place.chunks[index.index])

    def items(self, load: Any, *, know_memory: bool) -> list[ReadItem]:
        """Return the read items, in the order of the state dict.

        Args:
            load: What the items know as their load.
            know_memory: Whether they know the memory that they fill, too.
        """
        reads = {fqn: group.reads for group in self.groups for fqn in group.fqns}
        placed_of = self.asked.placing.placed if know_memory else {}
        items: list[ReadItem] = []
        for fqn, value in self.asked.state_dict.items():
            if fqn not in reads:
                continue
            placed, of_key = placed_of.get(fqn), reads[fqn]
            plain = value if know_memory and type(value) in PLAIN_TYPES else None
            for read in (_OBJECT,) if of_key is None else of_key:
                dest = with_fields(read.dest_index, fqn=fqn)
                source = with_fields(read.storage_index, fqn=fqn)
                tensor = placed.view(placed.place.chunks[dest.index or 0]) if placed else plain
                items.append(
                    with_fields(
                        read, dest_index=dest, storage_index=source, load=load, tensor=tensor
                    )
                )
        return items

    def report(self) -> LoadReport:
        """Return the report on what is planned."""
        placing = self.asked.placing
        report = LoadReport(
            missing=self.missing.kept,
            tied={**placing.tied, **self.asked.tied},
            several={
                fqn: keys for fqn, keys in placing.several.items() if fqn in self.asked.stored
            },
            stateless=self.missing.stateless,
            unread=self.asked.unread,
            casts=self.casts,
            padded={
                fqn: group.padded for group in self.groups if group.padded for fqn in group.fqns
            },
        )
        for group in self.groups:
            count = len(group.fqns)
            report.items += count * (1 if group.reads is None else len(group.reads))
            report.wanted_nbytes += count * group.needed_nbytes
            report.read_nbytes += count * group.read_nbytes
        return report


def request_of(
    placing: Placing,
    metadata: Metadata,
    policy: Policy,
    nested: Mapping[str, Any] = MappingProxyType({}),
) -> Request:
    """Return what a rank asks of a checkpoint.

    Args:
        placing: The rank's state dict, bound.
        metadata: The checkpoint's.
        policy: What is accepted.
        nested: The user's state dict, before it was made flat.
    """
    stored = metadata.state_dict_metadata
    keys = _keys_by_kind(placing, stored, policy)
    stand_ins = {fqn: keys.tensors[fqn] for fqn in keys.numbers}
    state_dict = {**placing.state_dict, **stand_ins} if stand_ins else placing.state_dict
    unread = tuple([fqn for fqn in stored if fqn not in state_dict])
    record = record_of(provenance_of(metadata), stored)
    tied_to = _tied_to_read(placing, keys) if keys.missing else {}
    asked = Asked(state_dict, placing, metadata, stored, record, unread, policy, nested, tied_to)
    faults = [*_object_faults(asked, keys.objects)] if keys.objects else []
    groups = [ReadGroup(None, fqns=keys.objects)] if keys.objects else []
    holding = holding_of(keys.tensors, placing.placed)
    for held in holding.groups:
        for group in _read_groups(asked, held):
            faults += group.faults
            groups += [group] if group.fqns else []
    missing = Missing()
    if lacking := [fqn for fqn in keys.missing if fqn not in tied_to]:
        reads_some = bool(keys.tensors or keys.objects)
        missing = settle_missing(asked, lacking, reads_some=reads_some)
    faults += missing.faults
    notes, casts = [*missing.notes], keys.casts
    casts |= {fqn: group.cast for group in groups if group.cast is not None for fqn in group.fqns}
    narrowed = [fqn for group in groups if group.narrows for fqn in group.fqns]
    if narrowed and policy.cast == "warn":
        headline = f"loaded with less precision than stored ({casts[narrowed[0]]})"
        way_out = 'way out:     cast="allow" where this is intended, cast="error" to refuse it'
        notes.append(Fault(format_names(narrowed, 3), headline, (way_out,)))
    if coded := [group for group in groups if group.has_codes]:
        of_scales, unscaled = _without_scales(asked, coded)
        faults += of_scales
        if unscaled and policy.cast != "allow":
            notes.append(unscaled_note(unscaled, casts[unscaled[0]]))
    into = _destinations(asked, groups, missing.resets)
    tied = tied_keys(into)
    if tied_to:  # other ranks, and the whole model, see what is filled
        tensors = keys.tensors | {fqn: placing.state_dict[fqn] for fqn in tied_to}
        holding = holding_of(tensors, placing.placed)
    return Request(asked, holding, groups, keys.numbers, casts, missing, into, tied, faults, notes)


class _Keys(NamedTuple):
    """The keys of a state dict by what the checkpoint has under them.

    Attributes:
        tensors: What is read as a tensor, and into what.
        numbers: Numbers of this rank among them, as an optimizer's ``lr``, by key.
        objects: The keys of objects.
        missing: The keys that it lacks.
        casts: The change as text, by key, where one side has a number and the other a tensor.
    """

    tensors: dict[str, Any]
    numbers: dict[str, int | float]
    objects: list[str]
    missing: list[str]
    casts: dict[str, str]


def _keys_by_kind(placing: Placing, stored: Mapping[str, Any], policy: Policy) -> _Keys:
    """Return the keys of a state dict by what the checkpoint has under them.

    Opaque bytes that are others in the checkpoint are missing there, where they may be missing.
    """
    keys = _Keys({}, {}, [], [], {})
    for fqn, value in placing.state_dict.items():
        entry, kind = stored.get(fqn), type(value)
        if fqn in placing.absent and fqn not in placing.placed:
            continue
        if entry is None or (
            policy.optional
            and _is_opaque(fqn)
            and policy.is_optional(fqn)
            and _are_other_bytes(entry, value, placing.placed.get(fqn))
        ):
            keys.missing.append(fqn)
        elif not isinstance(entry, TensorStorageMetadata):
            keys.objects.append(fqn)
            if is_scalar(value):
                keys.casts[fqn] = f"number -> {value.dtype} tensor".replace("torch.", "")
        elif kind in (int, float) and not entry.size:
            dtype = entry.properties.dtype
            keys.numbers[fqn], keys.tensors[fqn] = value, torch.empty((), dtype=dtype)
            keys.casts[fqn] = f"{dtype} tensor -> {kind.__name__}".removeprefix("torch.")
        else:
            keys.tensors[fqn] = value
    return keys


def _are_other_bytes(entry: Any, value: Any, placed: Placed | None) -> bool:
    """Whether the checkpoint has a value of another kind or shape than this rank."""
    is_tensor_here = placed is not None or is_read_as_tensor(value)
    if is_tensor_here and isinstance(entry, TensorStorageMetadata):
        return tuple(entry.size) != _shape_of(value, placed)
    return is_tensor_here or isinstance(entry, TensorStorageMetadata)


def _is_opaque(fqn: str) -> bool:
    """Whether a key is that of what a module keeps beside its tensors."""
    return fqn.rpartition(".")[2] == EXTRA_STATE


def _shape_of(value: Any, placed: Placed | None) -> tuple[int, ...]:
    """Return the shape in the checkpoint of a tensor of this rank."""
    return tuple(value.size()) if placed is None else placed.place.sharding.global_shape


def _tied_to_read(placing: Placing, keys: _Keys) -> dict[str, str]:
    """Return the missing keys of tensors that are read under another key: tied weights.

    A key of several tensors, as a stack, is missing: what is read into one of them fills one alone.

    Args:
        placing: The rank's state dict, bound.
        keys: The keys by what the checkpoint has under them.

    Returns:
        The key under which each is read.
    """
    state_dict, placed = placing.state_dict, placing.placed
    alone = [fqn for fqn in keys.missing if not (fqn in placed and placed[fqn].rows)]
    missing = {fqn: state_dict[fqn] for fqn in alone if is_tensor(state_dict[fqn])}
    shapes = {tuple(value.shape) for value in missing.values()}
    more = {  # a whole that a key is a part of is not filled by it
        fqn: [of.value for of in sources if not isinstance(of.name, OfWhole)]
        for fqn, sources in placing.sources.items()
    }
    read = {
        memory_key(value): fqn
        for fqn, first in reversed(keys.tensors.items())
        for value in (first, *more.get(fqn, ()))
        if fqn not in keys.numbers and is_tensor(value) and tuple(value.shape) in shapes
    }
    memories = {fqn: memory_key(value) for fqn, value in missing.items()}
    return {
        fqn: read[memory]
        for fqn, memory in memories.items()
        if memory is not None and memory in read
    }


def _destinations(
    asked: Asked, groups: Sequence[ReadGroup], resets: Iterable[str]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that are read into or reset, by key; some keys have several."""
    read = [fqn for group in groups if group.reads is not None for fqn in group.fqns]
    destinations: list[tuple[str, torch.Tensor]] = []
    for fqn in (*read, *resets):
        placed = asked.placing.placed.get(fqn)
        if placed is None and has_hooks(asked.state_dict[fqn]):
            continue
        if placed is not None and not placed.rows:
            destinations.append((fqn, placed.tensor))
            continue
        tensors = asked.tensors(fqn) if placed is None else placed.rows
        destinations += [(fqn, tensor) for tensor in tensors]
    return destinations


_OTHER_KIND = "way out:     a value of that kind under this key; or give this one another name"
_OTHER_BYTES = (
    "likely:      opaque bytes of a module (get_extra_state), as those of Transformer Engine, "
    "whose number changes with its version and with the fp8 recipe",
    f'way out:     optional=["{EXTRA_STATE}"] leaves them as this model has them; or load with the '
    "version and recipe of the save",
)


def _object_faults(asked: Asked, fqns: Iterable[str]) -> Iterator[Fault]:
    """Yield the keys whose value is a tensor, where the checkpoint has an object."""
    for fqn in fqns:
        value, placed = asked.state_dict[fqn], asked.placing.placed.get(fqn)
        if (placed is not None or is_read_as_tensor(value)) and not is_scalar(value):
            shape = _shape_of(value, placed)
            headline = "the checkpoint holds an object, but the state dict a tensor of shape "
            yield Fault(
                fqn, f"{headline}{shape}", _OTHER_BYTES if _is_opaque(fqn) else (_OTHER_KIND,)
            )


def _read_groups(asked: Asked, held: Held) -> list[ReadGroup]:
    """Return what is read of the keys of one group of a table.

    The same reads fill keys that the checkpoint stores with the same chunks, and whose places are
    equal, copies of a row included.
    """
    groups: list[ReadGroup] = []
    # Mostly the reads of the previous key of the same place fill the next one.
    latest: dict[Any, ReadGroup] = {}
    for fqn, value in zip(held.fqns, held.values, strict=True):
        entry = asked.stored[fqn]
        placed = value if type(value) is Placed else None
        key: Any = None
        if placed is not None:
            key = placed.place, placed.rule, entry.size, len(entry.chunks)
        elif type(value) in PLAIN_TYPES:
            key = entry.size, len(entry.chunks)
        elif is_dtensor_like(value) and not has_hooks(value):
            assert asked.placing.faults  # which say why it has no place
            continue
        group = latest.get(key)
        if group is None or not group.fills(entry):
            group = _read_group(asked, fqn, value, placed, held)
            groups.append(group)
            if group.reads is None:
                continue
            if key is not None and not group.faults:
                latest[key] = group
        group.fqns.append(fqn)
    return groups


def _read_group(asked: Asked, fqn: str, value: Any, placed: Placed | None, held: Held) -> ReadGroup:
    """Return what is read of one tensor; a group without reads where it does not fit."""
    entry: TensorStorageMetadata = asked.stored[fqn]
    stored_shape = tuple(entry.size)
    if held.group.kind == OBJECT and not has_hooks(value):
        headline = f"the checkpoint holds a {stored_shape} tensor, but the state dict a "
        details = _OTHER_BYTES if _is_opaque(fqn) else (_OTHER_KIND,)
        fault = Fault(fqn, f"{headline}{type(value).__name__}", details)
        return ReadGroup(entry, faults=[fault])
    tensor: Any = value if placed is None else placed.tensor
    layout = getattr(tensor, "layout", torch.strided)
    if {layout, entry.properties.layout} != {torch.strided}:
        headline = f"is a {layout} tensor here, which cannot be filled in place"
        if layout is torch.strided:
            headline = f"the checkpoint holds a {entry.properties.layout} tensor"
        return ReadGroup(entry, faults=[Fault(fqn, headline, (_DENSE,))])
    shape = _shape_of(value, placed)
    if stored_shape != shape:
        return ReadGroup(entry, faults=[_other_shape(asked, fqn, shape, placed)])
    chunks = chunk_list(value) if placed is None else placed.place.chunks
    destinations = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    needed = sum([prod(box.sizes) for box in destinations])
    padded = 0
    if placed is not None and placed.place.sharding.padded_shape is not None:
        padded = sum([tensor.numel() for tensor in placed.tensors]) - needed
    reads, holes = reads_of(entry, destinations)
    faults = [_hole_fault(fqn, holes, entry)] if holes else []
    dtype, stored_dtype = tensor.dtype, entry.properties.dtype
    kind = "same" if stored_dtype == dtype else cast_kind(stored_dtype, dtype)
    if kind == "wrong" or (kind == "narrowing" and asked.policy.cast == "error"):
        faults.append(cast_fault(fqn, stored_dtype, dtype))
    return ReadGroup(
        entry,
        placed,
        reads,
        needed * dtype.itemsize,
        sum(read.lengths.numel() for read in reads) * stored_dtype.itemsize,
        None if kind == "same" else format_cast(stored_dtype, dtype),
        kind == "narrowing",
        kind != "same" and may_have_scales(stored_dtype, dtype),
        padded,
        faults,
    )


def _hole_fault(fqn: str, holes: Sequence[Box], entry: TensorStorageMetadata) -> Fault:
    """Return the fault of a tensor of which the checkpoint lacks boxes."""
    return Fault(
        fqn,
        f"nobody stored {format_boxes(holes, entry.size)}, which is needed",
        (
            "likely:      the checkpoint was saved by some of the ranks only, or without "
            "collectives, so that each rank's metadata describes its own part alone",
            f"way out:     load a complete checkpoint; of this key it holds "
            f"{len(entry.chunks)} chunk(s)",
        ),
    )


def _without_scales(asked: Asked, groups: Iterable[ReadGroup]) -> tuple[list[Fault], list[str]]:
    """Return what is wrong with elements that are read without their scales, and which have none.

    Keys of one layout may be quantized and not, so each is looked up by its name.

    Args:
        asked: What the rank asks for.
        groups: The groups whose elements may have scales.

    Returns:
        A fault for each key whose scales the checkpoint has, and the keys of which it has none.
    """
    faults: list[Fault] = []
    unscaled: list[str] = []
    for group in groups:
        for fqn in group.fqns:
            if asked.policy.waives(fqn):
                continue
            tensor = asked.state_dict[fqn] if group.placed is None else group.placed.tensor
            stored = group.entry.properties.dtype
            scale = scale_of(fqn, stored, asked.stored)
            if scale is None and not group.narrows:
                unscaled.append(fqn)
            # A state dict that asks for the scales, too, may multiply by them.
            elif scale is not None and scale not in asked.state_dict:
                faults.append(quantized_fault(fqn, stored, tensor.dtype, scale))
    return faults, unscaled


_DENSE = (
    "way out:     save to_dense() of it, and load that into a dense tensor; or leave this key out, "
    "and make the tensor anew"
)


def _other_shape(asked: Asked, fqn: str, needed: tuple[int, ...], placed: Placed | None) -> Fault:
    """Return the fault that a tensor is stored in another shape than is needed."""
    stored, record = tuple(asked.stored[fqn].size), asked.record
    details, has_equal_cuts = [], False
    headline = (
        f"the checkpoint holds a {stored} tensor, but {needed} is needed (torch: Size mismatch)"
    )
    if _is_opaque(fqn):
        return Fault(fqn, headline, _OTHER_BYTES)
    if placed is not None and record is not None:
        saved, loaded = record.cuts(fqn), placed.place.sharding.cuts
        has_equal_cuts = bool(saved) and saved == loaded
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
            times = large // small
            larger, cause = "stored", "does this load lack a rule for it"
            # Of uneven shards that size is no axis of this job.
            cause += f", on an axis of size {times}?" if world_size() % times == 0 else "?"
            if stored[dim] == small:
                larger, cause = "needed", f"saved without its placement on an axis of size {times}?"
            if has_equal_cuts:
                cause = "another number of experts or rows, since both sides cut it alike?"
            details.append(
                f"likely:      on dim {dim} the {larger} size is {times} times the other: {cause}"
            )
    if placed is not None and placed.rule is not None:
        details.append(f"by rule:     {placed.rule}")
        if record is None:
            details.append(
                "saved:       by other planners, which take parts that no DTensor describes "
                "for replicas: dcp-placements doctor says what is left"
            )
    is_bare = placed is None or placed.rule is None
    if is_bare and record is not None and not has_equal_cuts:
        details.append(
            "way out:     the declaration of the save on every rank, as planner= or as run "
            "--placements; or build the model as it was saved"
        )
    else:
        details.append(
            "way out:     build the model as it was saved, or correct the rule of this key: its "
            "axes, or global_shape= and padded_shape= of parts that are uneven or padded"
        )
    return Fault(fqn, headline, tuple(details))


NOTHING = request_of(Placing(), Metadata({}), Policy())
"""The request of a load that is not planned."""
