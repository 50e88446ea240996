"""The LoadPlanner: what each rank reads, and the proof that it is all that the rank needs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from dcp_placements.casting import CASTS, cast_kind
from dcp_placements.errors import Fault, format_names, raise_faults
from dcp_placements.interop import (
    BytesStorageMetadata,
    DefaultLoadPlanner,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
    chunk_list,
    flatten_as_2_3,
    global_rank,
    has_hooks,
    is_dtensor_like,
    leaves,
    set_element,
)
from dcp_placements.layout import Box
from dcp_placements.naming import Rename, rename_keys
from dcp_placements.placing import Placed, Placing, place
from dcp_placements.reads import StoredChunks, read_items, read_object
from dcp_placements.report import LoadReport
from dcp_placements.rules import Rules, compile_pattern
from dcp_placements.save_planner import check_choice, check_rules
from dcp_placements.tiling import format_box

logger = logging.getLogger(__name__)

VERIFY = ("off", "digests")


class PlacementLoadPlanner(DefaultLoadPlanner):
    """Loads every shard from its true place in the whole tensor.

    ``dcp.load(state_dict, checkpoint_id=path, planner=PlacementLoadPlanner(rules))`` fills the
    tensors of ``state_dict`` in place, whatever topology wrote the checkpoint.

    Args:
        rules: ``PlacementRules``, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None:
            every tensor keeps its own mesh and placements.
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's.
        optional: Patterns of keys that the checkpoint may lack; they keep what they have.
        cast: What to do where the checkpoint's dtype is wider than the tensor's: ``"error"``,
            ``"warn"`` or ``"allow"``. Float into int is an error whatever is said here.
        verify: ``"digests"`` compares every chunk that is read whole with its stored digest, and
            refuses a checkpoint without digests; ``"off"`` does not look.
        flatten_state_dict: As in ``DefaultLoadPlanner``.
        flatten_sharded_tensors: As in ``DefaultLoadPlanner``.
        allow_partial_load: As in ``DefaultLoadPlanner``, but a load that matches nothing is an
            error.

    Attributes:
        report: After planning, this rank's ``LoadReport``.

    Raises:
        PlacementError: An option that there is not.
    """

    report: LoadReport

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rename: Rename | None = None,
        optional: Iterable[str] = (),
        cast: str = "warn",
        verify: str = "off",
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
        )
        check_rules(rules)
        check_choice("cast", cast, CASTS)
        check_choice("verify", verify, VERIFY)
        self.rules = rules
        self.rename = rename
        self.optional = (optional,) if isinstance(optional, str) else tuple(optional)
        self.cast = cast
        self.verify = verify
        self.report = LoadReport()
        self._optional = [compile_pattern(pattern) for pattern in self.optional]
        self._placing = Placing()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill, under the checkpoint's keys. Called on every rank."""
        # torch replaces values of types it does not know by None; they are put back, and
        # DTensor-likes among them are loaded into.
        unknown = [
            (path, value)
            for path, value in leaves(state_dict)
            if value is not None and not isinstance(value, torch.Tensor)
        ]
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for path, value in unknown:
            set_element(state_dict, path, value)
            key = ".".join(map(str, path)) if self.flatten_state_dict else None
            if key is not None and key in self.state_dict:
                self.state_dict[key] = value
        self.state_dict, self.mappings = rename_keys(self.state_dict, self.mappings, self.rename)

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads. Called on every rank.

        Raises:
            PlacementError: What cannot be filled, or would be filled wrongly; all in one error.
        """
        assert self.metadata is not None
        self._adopt_old_keys(self.metadata)
        rank = global_rank()
        self._placing = place(self.state_dict, self.rules, rank)
        self.report = LoadReport()
        planning = _Reading(self, self.metadata, rank)
        plan = planning.plan()
        raise_faults(
            f"rank {rank} cannot be loaded from this checkpoint",
            [*self._placing.faults, *planning.faults],
        )
        for note in planning.notes:
            warnings.warn(str(note), stacklevel=2)
        self.report.warnings = tuple(map(str, planning.notes))
        return plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, all ranks having agreed. Called on every rank."""
        logger.info("load: %s", self.report.line)
        return new_plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the storage to read into: a view of the local tensor. Called on every rank."""
        placed = self._placing.placed.get(index.fqn)
        if placed is None:
            return super().lookup_tensor(index)
        assert index.index is not None
        return placed.view(placed.chunks[index.index])

    def is_optional(self, fqn: str) -> bool:
        """Whether the checkpoint may lack this key."""
        return any(pattern.search(f".{fqn}") for pattern in self._optional)

    def _adopt_old_keys(self, metadata: Metadata) -> None:
        """Take the keys that torch 2.3 and older gave, where the checkpoint has those."""
        if not self.flatten_state_dict:
            return
        unasked = set(metadata.state_dict_metadata) - set(self.state_dict)
        if not unasked:
            return
        flat, mappings = flatten_as_2_3(self.original_state_dict)
        flat, mappings = rename_keys(flat, mappings, self.rename)
        if unasked & set(flat):
            self.state_dict, self.mappings = flat, mappings


class _Reading:
    """One rank's read plan in the making."""

    def __init__(self, planner: PlacementLoadPlanner, metadata: Metadata, rank: int) -> None:
        self.planner = planner
        self.stored = metadata.state_dict_metadata
        self.placing = planner._placing
        self.report = planner.report
        self.rank = rank
        self.faults: list[Fault] = []
        self.notes: list[Fault] = []
        self._chunks: dict[int, StoredChunks] = {}

    def plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        missing = []
        for fqn, value in self.planner.state_dict.items():
            if fqn in self.placing.absent:
                continue
            if fqn not in self.stored:
                missing.append(fqn)
            else:
                items += self._reads_of(fqn, value, self.stored[fqn])
        self._settle_missing(missing, matched=len(items))
        self._settle_casts()
        self.report.items = len(items)
        self.report.unread = tuple(fqn for fqn in self.stored if fqn not in self.planner.state_dict)
        return LoadPlan(items)

    def _reads_of(self, fqn: str, value: Any, stored: Any) -> list[ReadItem]:
        placed = self.placing.placed.get(fqn)
        if isinstance(stored, BytesStorageMetadata):
            if placed is not None and len(placed.global_shape):
                self._fault(
                    fqn,
                    f"the checkpoint holds an object, but rank {self.rank} a tensor",
                    "way out:     load it under a key of its own, or give the tensor another name",
                )
                return []
            return [read_object(fqn)]
        assert isinstance(stored, TensorStorageMetadata)
        if placed is None and not isinstance(value, torch.Tensor) and not has_hooks(value):
            if is_dtensor_like(value):
                return []  # its fault is noted already
            self._fault(
                fqn,
                f"the checkpoint holds a {tuple(stored.size)} tensor, but rank {self.rank} a "
                f"{type(value).__name__}",
                "way out:     put a tensor of that shape into the state dict",
            )
            return []
        wanted = placed.global_shape if placed is not None else tuple(value.size())
        if tuple(stored.size) != wanted:
            self._shape_fault(fqn, tuple(stored.size), wanted, placed)
            return []
        dtype = placed.tensor.dtype if placed is not None else value.dtype
        self._note_cast(fqn, stored.properties.dtype, dtype)
        if placed is not None:
            destinations = [chunk.box for chunk in placed.chunks]
            if placed.binding.sharding.padded_shape is not None:
                held = sum(box.numel for box in destinations)
                if held < placed.tensor.numel():
                    self.report.padded += (fqn,)
        else:
            destinations = [Box(tuple(c.offsets), tuple(c.sizes)) for c in chunk_list(value)]
        items, holes = read_items(fqn, self._stored_chunks(stored), destinations)
        if holes:
            self._hole_fault(fqn, wanted, holes, len(stored.chunks))
        self.report.wanted_nbytes += sum(box.numel for box in destinations) * dtype.itemsize
        self.report.read_nbytes += (
            sum(item.lengths.numel() for item in items) * stored.properties.dtype.itemsize
        )
        return items

    def _stored_chunks(self, stored: TensorStorageMetadata) -> StoredChunks:
        # Tensors that lie alike may share one chunk list in the metadata.
        key = id(stored.chunks)
        if key not in self._chunks:
            self._chunks[key] = StoredChunks(stored)
        return self._chunks[key]

    def _shape_fault(
        self, fqn: str, stored: tuple[int, ...], wanted: tuple[int, ...], placed: Placed | None
    ) -> None:
        details = []
        differing = (
            [d for d in range(len(stored)) if stored[d] != wanted[d]]
            if len(stored) == len(wanted)
            else []
        )
        if len(differing) == 1:
            dim = differing[0]
            small, large = sorted((stored[dim], wanted[dim]))
            if small and large % small == 0:
                details.append(self._factor_text(dim, large // small, stored[dim] < wanted[dim]))
        if placed is not None and placed.rule is not None:
            details.append(f"by rule:     {placed.rule}")
        details.append(
            "way out:     build the model as it was saved, or correct the rule of this key"
        )
        self._fault(
            fqn,
            f"the checkpoint holds a {stored} tensor, but rank {self.rank} needs {wanted}",
            *details,
        )

    def _factor_text(self, dim: int, factor: int, stored_is_smaller: bool) -> str:
        side = "stored" if stored_is_smaller else "this rank's"
        other = "needed" if stored_is_smaller else "stored"
        cause = (
            "saved without its placement"
            if stored_is_smaller
            else "does this load lack a rule for it,"
        )
        return (
            f"likely:      on dim {dim} the {other} one is {factor} times the {side} one: {cause} "
            f"on an axis of size {factor}?"
        )

    def _hole_fault(self, fqn: str, shape: tuple[int, ...], holes: list[Box], stored: int) -> None:
        told = ", ".join(format_box(hole, shape) for hole in holes[:4])
        more = f" and {len(holes) - 4} more" if len(holes) > 4 else ""
        self._fault(
            fqn,
            f"nobody stored {told}{more} of {shape}, which rank {self.rank} needs",
            "likely:      the checkpoint was saved by some of the ranks only, or without "
            "collectives so that each rank's metadata tells of its own part",
            f"way out:     load a complete checkpoint; this one holds {stored} chunks of the key",
        )

    def _note_cast(self, fqn: str, stored: torch.dtype, wanted: torch.dtype) -> None:
        kind = cast_kind(stored, wanted)
        if kind == "same":
            return
        told = f"{stored} -> {wanted}".replace("torch.", "")
        self.report.casts = {**self.report.casts, fqn: told}
        if kind == "wrong" or (kind == "narrowing" and self.planner.cast == "error"):
            what = "changes what the numbers mean" if kind == "wrong" else "loses precision"
            self._fault(
                fqn,
                f"loading {told} {what}",
                f"way out:     give rank {self.rank} a {str(stored).removeprefix('torch.')} tensor"
                + ("" if kind == "wrong" else ', or say cast="allow"'),
            )

    def _settle_casts(self) -> None:
        if self.planner.cast != "warn":
            return
        narrowing = [
            fqn
            for fqn, told in self.report.casts.items()
            if cast_kind(*(getattr(torch, name) for name in told.split(" -> "))) == "narrowing"
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
        kept = []
        for fqn in missing:
            if self.planner.allow_partial_load or self.planner.is_optional(fqn):
                kept.append(fqn)
            else:
                self._fault(
                    fqn,
                    f"the checkpoint lacks this key, which rank {self.rank} has",
                    "way out:     optional=[pattern] where it may be missing; compare the names "
                    "with the unread keys of the checkpoint: "
                    + (
                        format_names(
                            [k for k in self.stored if k not in self.planner.state_dict], 3
                        )
                        or "none"
                    ),
                )
        self.report.missing = tuple(kept)
        if kept and not matched and not self.faults:
            self._fault(
                "state dict",
                f"none of the {len(self.planner.state_dict)} keys of rank {self.rank} is in the "
                "checkpoint: nothing would be loaded",
                f"it asks for: {format_names(kept, 3)}",
                f"there are:   {format_names(list(self.stored), 3)}",
                "likely:      a prefix that one side has and the other has not",
                "way out:     make the names equal, with rename= if need be",
            )

    def _fault(self, fqn: str, headline: str, *details: str) -> None:
        self.faults.append(Fault(fqn, headline, details))
