"""What a rank reads of a checkpoint: its read items, and the faults that refuse them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    DTensor,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
    chunk_list,
    has_hooks,
    is_dtensor_like,
    local_tensor,
)
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.errors import Fault
from dcp_placements.layout.boxes import format_boxes
from dcp_placements.layout.sharding import Box
from dcp_placements.load.casting import cast_fault, cast_kind, format_cast, narrowing_note
from dcp_placements.load.cuts import shape_mismatch
from dcp_placements.load.missing import MissingKeys, is_tensor
from dcp_placements.load.policy import Policy
from dcp_placements.load.reads import Read, Reads, read_items
from dcp_placements.names.optimizer_state import OptimizerStates
from dcp_placements.report import LoadReport
from dcp_placements.storage.index.stored_entries import entries_at
from dcp_placements.storage.metadata.provenance import stored
from dcp_placements.storage.metadata.record import Cuts, SaveRecord, cuts_of, record_of

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

    def items(self) -> list[ReadItem]:
        """Plan all reads, and return them."""
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
        return read_items((fqn, filling.reads) for fqn, filling in self._by_key(groups))

    def _by_key(self, groups: Iterable[Group]) -> list[tuple[str, Filling]]:
        """Return what fills each key of groups, in the order of the state dict."""
        filling_of = {fqn: group.filling for group in groups for fqn in group.fqns}
        fqns = self.state_dict if filling_of else ()
        return [(fqn, filling_of[fqn]) for fqn in fqns if fqn in filling_of]

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
                key = placed.place, tensor.dtype, placed.rule, placed.is_stack
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
        names = [axis.name for axis in placed.place.axes]
        return self._record.cuts(fqn), cuts_of(placed.place.sharding, names)

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
        and _address(local_tensor(value)) != _address(placed.tensor)
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
