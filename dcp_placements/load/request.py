"""What a rank reads of a checkpoint: its read items, and the faults that refuse them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
    chunk_list,
    has_hooks,
    is_dtensor_like,
)
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.errors import Fault, format_names
from dcp_placements.layout.alike import BySequence
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import format_box
from dcp_placements.lazy_items import LazyItems
from dcp_placements.load.casting import cast_kind
from dcp_placements.load.reads import Read, Reads, read_items
from dcp_placements.names.optimizer_state import OptimizerStates, possible_parameters
from dcp_placements.names.prefixes import other_names
from dcp_placements.report import LoadReport


@dataclass(frozen=True, slots=True)
class Policy:
    """What a load accepts.

    Attributes:
        partial: Any key may be missing, as long as one is there; but no part of the optimizer
            state of a parameter while another part is there.
        optional: Patterns of keys that may be missing.
        cast: ``"error"``, ``"warn"`` or ``"allow"``, for what loses precision.
    """

    partial: bool
    optional: tuple[re.Pattern[str], ...]
    cast: str

    def names(self, fqn: str) -> bool:
        """Whether a pattern names this key as one that may be missing."""
        return any(pattern.search(f".{fqn}") for pattern in self.optional)


@dataclass(frozen=True, slots=True)
class _Filling:
    """What fills a tensor; the same for all that lie alike, here and in the checkpoint.

    Attributes:
        size: Of the whole tensor; None for an object.
        reads: None for an object.
        wanted_nbytes: Of the destinations.
        read_nbytes: Of what is read into them.
        cast: How the dtype changes.
        padded: Elements of padding, which keep what they have.
    """

    size: torch.Size | None = None
    reads: Sequence[Read] | None = None
    wanted_nbytes: int = 0
    read_nbytes: int = 0
    cast: str | None = None
    padded: int = 0


class Request:
    """One rank's read plan, while it is worked out.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        placing: Its tensors' places.
        metadata: The checkpoint's.
        policy: What is accepted.
        rank: This process's rank, for messages.
        names: This rank's own keys, where others are asked for.

    Attributes:
        report: What the load comes to.
        faults: What cannot be filled, or would be filled wrongly.
        notes: What is accepted with a warning.
        stateless: The optimizer state keys that the checkpoint lacks, for parameters of which it
            has no state at all.
        collapsed: Scalars that the checkpoint has one per row of, and how many rows.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        placing: Placing,
        metadata: Metadata,
        policy: Policy,
        rank: int,
        names: Iterable[str] = (),
    ) -> None:
        self.state_dict = state_dict
        self.stored = metadata.state_dict_metadata
        self.placing = placing
        self.policy = policy
        self.rank = rank
        self.report = LoadReport()
        self.stateless: list[str] = []
        self.collapsed: dict[str, torch.Size] = {}
        self.faults: list[Fault] = []
        self.notes: list[Fault] = []
        self._states = OptimizerStates(self.state_dict, self.stored, names=names)
        self._reads = Reads()
        # By all that it is worked out from; most tensors lie like another one.
        self._alike: dict[Any, tuple[Sequence[ChunkStorageMetadata], _Filling]] = {}
        self._placed_alike: BySequence[int] = BySequence()
        self._casts: dict[str, str] = {}
        self._numbered = 0

    def items(self) -> LazyItems[ReadItem]:
        """Work it all out, and return what is read."""
        report = self.report
        reads: list[tuple[str, Sequence[Read] | None]] = []
        missing = []
        padded: dict[str, int] = {}
        for fqn, value in self.state_dict.items():
            stored = self.stored.get(fqn)
            if stored is None:
                if fqn not in self.placing.absent:
                    missing.append(fqn)
                continue
            placed = self.placing.placed.get(fqn)
            key = filling = chunks = None
            if placed is not None and type(stored) is TensorStorageMetadata:
                lies, chunks = self._lies(placed), stored.chunks
                key = (lies, stored.size, placed.tensor.dtype, stored.properties.dtype)
                last = self._alike.get(key)
                # A list of its own is looked into.
                filling = last[1] if last is not None and last[0] is chunks else None
            if filling is None:
                if fqn in self.placing.absent:
                    continue
                faults = len(self.faults)
                filling = self._filling(fqn, value, placed, stored)
                if filling is None:
                    continue
                refused = len(self.faults) > faults or fqn in self.collapsed
                if chunks is not None and not refused:
                    self._alike[key] = chunks, filling
            reads.append((fqn, filling.reads))
            report.items += 1 if filling.reads is None else len(filling.reads)
            report.wanted_nbytes += filling.wanted_nbytes
            report.read_nbytes += filling.read_nbytes
            if filling.cast is not None:
                self._casts[fqn] = filling.cast
            if filling.padded:
                padded[fqn] = filling.padded
        report.casts = self._casts
        report.padded = padded
        if missing:
            self._settle_missing(missing, matched=len(reads))
        self._settle_casts()
        report.unread = tuple([fqn for fqn in self.stored if fqn not in self.state_dict])
        return LazyItems(lambda: read_items(reads))

    def _filling(self, fqn: str, value: Any, placed: Placed | None, stored: Any) -> _Filling | None:
        """Return what fills a value; None where nothing does, which is a fault."""
        if isinstance(stored, BytesStorageMetadata):
            if placed is not None or _is_tensor(value):
                shape = placed.global_shape if placed is not None else tuple(value.size())
                self._fault(
                    fqn,
                    f"the checkpoint holds an object, but rank {self.rank} a tensor"
                    + (f" of shape {shape}" if shape else ", a scalar"),
                    "reason:      nothing would be read into the tensor; the object would take its "
                    "place in the state dict",
                    "way out:     put an object (a number, None) under this key to load it, or "
                    "give the tensor another name",
                )
                return None
            return _Filling()
        assert isinstance(stored, TensorStorageMetadata)
        if placed is None and not isinstance(value, torch.Tensor) and not has_hooks(value):
            if is_dtensor_like(value):
                return None  # its fault is noted already
            self._fault(
                fqn,
                f"the checkpoint holds a {tuple(stored.size)} tensor, but rank {self.rank} a "
                f"{type(value).__name__}",
                "way out:     put a tensor of that shape into the state dict",
            )
            return None
        wanted = placed.global_shape if placed is not None else tuple(value.size())
        if wanted == () and len(stored.size) == 1 and self._states.of(fqn) is not None:
            # One step for a stacked parameter, of which the checkpoint's rows had one each.
            self.collapsed[fqn] = stored.size
            placed, wanted = None, tuple(stored.size)
        if tuple(stored.size) != wanted:
            self._shape_fault(fqn, tuple(stored.size), wanted, placed)
            return None
        dtype = placed.tensor.dtype if placed is not None else value.dtype
        padded = 0
        like: Any = None
        if placed is not None:
            destinations = [chunk.box for chunk in placed.chunks]
            like = self._lies(placed)
            if placed.binding.sharding.padded_shape is not None:
                held = sum(tensor.numel() for tensor in placed.tensors)
                padded = held - sum(box.numel for box in destinations)
        elif fqn in self.collapsed:
            destinations = [Box((0,), wanted)]
        else:
            destinations = [Box(tuple(c.offsets), tuple(c.sizes)) for c in chunk_list(value)]
        reads, holes = self._reads.of(stored, destinations, like=like)
        if holes:
            self._hole_fault(fqn, wanted, holes, len(stored.chunks))
        stored_dtype = stored.properties.dtype
        return _Filling(
            stored.size,
            reads,
            sum(box.numel for box in destinations) * dtype.itemsize,
            sum(read.lengths.numel() for read in reads) * stored_dtype.itemsize,
            self._cast(fqn, stored_dtype, dtype),
            padded,
        )

    def _lies(self, placed: Placed) -> int:
        """Return a number that is the same for tensors that lie alike, and for no others."""
        found = self._placed_alike.get(placed.chunks, placed.binding)
        if found is None:
            self._numbered += 1
            found = self._placed_alike.put(placed.chunks, self._numbered, placed.binding)
        return found

    def _shape_fault(
        self, fqn: str, stored: tuple[int, ...], wanted: tuple[int, ...], placed: Placed | None
    ) -> None:
        rule = None if placed is None else placed.rule
        headline, details = shape_mismatch(stored, wanted, f"rank {self.rank} needs {wanted}", rule)
        self._fault(fqn, headline, *details)

    def _hole_fault(self, fqn: str, shape: tuple[int, ...], holes: list[Box], stored: int) -> None:
        text = ", ".join(format_box(hole, shape) for hole in holes[:4])
        more = f" and {len(holes) - 4} more" if len(holes) > 4 else ""
        self._fault(
            fqn,
            f"nobody stored {text}{more} of {shape}, which rank {self.rank} needs",
            "likely:      the checkpoint was saved by some of the ranks only, or without "
            "collectives so that each rank's metadata tells of its own part",
            f"way out:     load a complete checkpoint; this one holds {stored} chunks of the key",
        )

    def _cast(self, fqn: str, stored: torch.dtype, wanted: torch.dtype) -> str | None:
        """Return what becomes of the dtype, where it changes."""
        kind = cast_kind(stored, wanted)
        if kind == "same":
            return None
        change = f"{stored} -> {wanted}".replace("torch.", "")
        if kind == "wrong" or (kind == "narrowing" and self.policy.cast == "error"):
            what = "changes what the numbers mean" if kind == "wrong" else "loses precision"
            self._fault(
                fqn,
                f"loading {change} {what}",
                f"way out:     give rank {self.rank} a {str(stored).removeprefix('torch.')} tensor"
                + ("" if kind == "wrong" else ', or say cast="allow"'),
            )
        return change

    def _settle_casts(self) -> None:
        if self.policy.cast != "warn":
            return
        narrowing = [
            fqn
            for fqn, change in self.report.casts.items()
            if cast_kind(*(getattr(torch, name) for name in change.split(" -> "))) == "narrowing"
        ]
        if narrowing:
            self.notes.append(
                Fault(
                    format_names(narrowing, 3),
                    f"loaded with less precision than stored ({self.report.casts[narrowing[0]]})",
                    ('way out:     cast="allow" where that is meant, cast="error" to refuse it',),
                )
            )

    def _settle_missing(self, missing: list[str], *, matched: int) -> None:
        groups: dict[str, list[str]] = {}
        for fqn in self.state_dict:
            state = self._states.of(fqn)
            if state is not None:
                groups.setdefault(state.group, []).append(fqn)
        absent = _wholly_absent(groups, missing)
        kept, stateless = [], {}
        lacking: list[str] = []
        for fqn in missing:
            state = self._states.of(fqn)
            keys = [] if state is None else groups[state.group]
            partly = any(key in self.stored for key in keys)
            # Under a partial load, too, a step count must not outlive the moments that it
            # belongs to.
            if state is not None and state.group in absent:
                stateless[fqn] = state.parameter
            if self.policy.names(fqn) or (self.policy.partial and not partly):
                kept.append(fqn)
            elif partly:
                self._partly_absent_fault(fqn, keys)
            elif fqn not in stateless:
                lacking.append(fqn)
        if lacking:
            self._missing_faults(lacking)
        self.stateless = list(stateless)
        self.report.missing = tuple(kept)
        self.report.stateless = tuple(dict.fromkeys(stateless.values()))
        if kept and not matched and not self.faults:
            self._fault(
                "state dict",
                f"none of the {len(self.state_dict)} keys of rank {self.rank} is in the "
                "checkpoint: nothing would be loaded",
                f"it asks for: {format_names(kept, 3)}",
                f"there are:   {format_names(list(self.stored), 3)}",
                "likely:      a prefix that one side has and the other has not",
                "way out:     make the names equal, with rename= if need be",
            )
        elif kept:
            self._note_no_tensor(kept)

    def _note_no_tensor(self, kept: Sequence[str]) -> None:
        """Note that of the tensors of the model, optimizer state left out, none is read."""
        asked = [
            fqn
            for fqn, value in self.state_dict.items()
            if _is_tensor(value)
            and len(value.shape)
            and fqn not in self.placing.absent
            and self._states.of(fqn) is None
        ]
        unread = {fqn for fqn in kept if not self.policy.names(fqn)}
        if not unread.intersection(asked) or any(fqn in self.stored for fqn in asked):
            return
        there = [
            fqn
            for fqn, held in self.stored.items()
            if isinstance(held, TensorStorageMetadata)
            and held.size
            and self._states.of(fqn) is None
        ]
        self.notes.append(
            Fault(
                "state dict",
                f"rank {self.rank} asks for {len(asked)} tensors of the model, and none of them is "
                "in the checkpoint: they keep what they have",
                (
                    f"it asks for: {format_names(asked, 3)}",
                    f"there are:   {format_names(there, 3) or 'none of one dim or more'}",
                    "likely:      a prefix that one side has and the other has not; what is found "
                    "are scalars, objects or optimizer state",
                    "way out:     make the names equal, with rename= if need be; "
                    "optional=[pattern] for what may be missing",
                ),
            )
        )

    def _partly_absent_fault(self, fqn: str, keys: Sequence[str]) -> None:
        names = [key.rpartition(".")[2] for key in keys]
        there = [name for key, name in zip(keys, names, strict=True) if key in self.stored]
        self._fault(
            fqn,
            "the checkpoint lacks this state of a parameter whose other state it has",
            f"there are:   {', '.join(there)}",
            f"missing:     {', '.join(name for name in names if name not in there)}",
            "way out:     load with the optimizer that was saved; optional=[pattern] where this "
            "one may be missing",
        )

    def _missing_faults(self, missing: Sequence[str]) -> None:
        """Add a fault for each key that the checkpoint lacks, with what it goes by there."""
        if not self.stored:
            self._fault(
                "checkpoint",
                f"has no tensor and no object, but rank {self.rank} asks for "
                f"{format_names(missing, 1)}",
                "likely:      another path, or the storage reader of another format "
                "(HuggingFaceStorageReader reads *.safetensors alone)",
                "way out:     the directory that dcp.save wrote, with the reader that fits; "
                "dcp-placements inspect shows what is in it",
            )
            return
        unread = [key for key in self.stored if key not in self.state_dict]
        known = other_names(missing, unread)
        for at, fqn in enumerate(missing):
            if fqn in known:
                details = list(known[fqn])
            else:
                # Each comparison is slow, and a few examples show what is wrong.
                compared = at < 10 and len(unread) < 5000
                alike = get_close_matches(fqn, unread, 2, 0.6) if compared else []
                details = [f"it has:      {', '.join(alike)}"] if alike else []
            self._missing_fault(fqn, details)

    def _missing_fault(self, fqn: str, details: list[str]) -> None:
        if self._states.of(fqn) is not None:
            details.append(
                "note:        it has no state of any parameter that this rank asks for; the state "
                "of some may be missing, of all it may not"
            )
        elif possible_parameters(fqn):
            details.append(
                "note:        it is not taken for optimizer state, of which some may be missing: "
                "neither its parameter nor param_groups that name it are there"
            )
        way_out = (
            "way out:     rename= where it goes by another name; optional=[pattern] where it may "
            "be missing",
        )
        self._fault(
            fqn,
            f"the checkpoint lacks this key, which rank {self.rank} has "
            "(torch: Missing key in checkpoint)",
            *details,
            *(way_out if not any(line.startswith("way out:") for line in details) else ()),
        )

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))


def shape_mismatch(
    stored: tuple[int, ...], wanted: tuple[int, ...], needs: str, rule: str | None
) -> tuple[str, tuple[str, ...]]:
    """Return headline and details of the fault that a tensor has another shape than is stored.

    Args:
        stored: The checkpoint's shape.
        wanted: The shape of the whole tensor that a local one and its rule make.
        needs: Who needs it, and the shape.
        rule: What to call the rule that spoke; None where none did.
    """
    details = []
    differing = [d for d, (a, b) in enumerate(zip(stored, wanted, strict=False)) if a != b]
    if len(stored) == len(wanted) and len(differing) == 1:
        dim = differing[0]
        small, large = sorted((stored[dim], wanted[dim]))
        if small and large % small == 0:
            details.append(_factor_text(dim, large // small, stored[dim] < wanted[dim]))
    if rule is not None:
        details.append(f"by rule:     {rule}")
    details.append("way out:     build the model as it was saved, or correct the rule of this key")
    return (
        f"the checkpoint holds a {stored} tensor, but {needs} (torch: Size mismatch)",
        tuple(details),
    )


def _factor_text(dim: int, factor: int, stored_is_smaller: bool) -> str:
    side = "stored" if stored_is_smaller else "needed"
    other = "needed" if stored_is_smaller else "stored"
    cause = (
        "saved without its placement" if stored_is_smaller else "does this load lack a rule for it,"
    )
    return (
        f"likely:      on dim {dim} what is {other} is {factor} times what is {side}: {cause} "
        f"on an axis of size {factor}?"
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or has_hooks(value) or is_dtensor_like(value)


def _wholly_absent(groups: Mapping[str, Sequence[str]], missing: Sequence[str]) -> set[str]:
    """Return the groups of which the checkpoint has no optimizer state, if it has any of others."""
    lacking = set(missing)
    absent = {group for group, keys in groups.items() if all(key in lacking for key in keys)}
    return absent if len(absent) < len(groups) else set()
