"""The SavePlanner: what each rank offers, what the coordinator lets be written."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dcp_placements.agreement import Agreement, examine
from dcp_placements.digests import full_digest, object_digest, sampled_digests
from dcp_placements.errors import Fault, PlacementError, format_faults, raise_faults
from dcp_placements.evidence import Evidence
from dcp_placements.interop import (
    DefaultSavePlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    StorageMeta,
    WriteItemType,
    create_default_global_save_plan,
    default_write_items,
    global_rank,
    named_axes,
    world_size,
)
from dcp_placements.items import WriteItems, written_chunks, written_data
from dcp_placements.naming import Rename, checkpoint_path, rename_keys
from dcp_placements.ownership import drop_replicas
from dcp_placements.placing import Placing, place
from dcp_placements.report import KeyReport, SaveReport
from dcp_placements.rules import PlacementRules, Rules

logger = logging.getLogger(__name__)

DIGESTS = ("sampled", "full", "off")
ON_CONFLICT = ("error", "warn")


class PlacementSavePlanner(DefaultSavePlanner):
    """Saves every shard at its true place in the whole tensor.

    ``dcp.save(state_dict, checkpoint_id=path, planner=PlacementSavePlanner(rules))`` writes an
    ordinary DCP checkpoint of the whole tensors: any reader loads it, into any topology.

    Args:
        rules: ``PlacementRules``, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None:
            every tensor keeps its own mesh and placements.
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's.
        digests: What the coordinator compares before it drops a replica: ``"sampled"`` (a few KiB
            of each item), ``"full"`` (all bytes) or ``"off"``.
        on_conflict: ``"error"`` refuses a save whose replicas differ; ``"warn"`` saves one.
        flatten_state_dict: As in ``DefaultSavePlanner``.
        flatten_sharded_tensors: As in ``DefaultSavePlanner``.
        dedup_replicated_tensors: As in ``DefaultSavePlanner`` (deprecated there, no effect).
        dedup_save_to_lowest_rank: As in ``DefaultSavePlanner``.
        enable_plan_caching: As in ``DefaultSavePlanner``.

    Attributes:
        report: After planning, a ``SaveReport``; of all ranks on the coordinator.

    Raises:
        PlacementError: An option that there is not.
    """

    report: SaveReport

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rename: Rename | None = None,
        digests: str = "sampled",
        on_conflict: str = "error",
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )
        check_rules(rules)
        check_choice("digests", digests, DIGESTS)
        check_choice("on_conflict", on_conflict, ON_CONFLICT)
        self.rules = rules
        self.rename = rename
        self.digests = digests
        self.on_conflict = on_conflict
        self.report = SaveReport()
        self._placing = Placing()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, flat and under the checkpoint's keys. Called on every rank."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self.mappings = rename_keys(self.state_dict, self.mappings, self.rename)

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write, replicas included. Called on every rank.

        Raises:
            PlacementError: Tensors and rules that do not fit, all of them in one error.
        """
        rank = global_rank()
        self._placing = place(self.state_dict, self.rules, rank)
        raise_faults(f"rank {rank} cannot be placed in the checkpoint", self._placing.faults)
        made = WriteItems()
        items = []
        for fqn, value in self.state_dict.items():
            placed = self._placing.placed.get(fqn)
            if placed is not None:
                items += made.of(placed)
            elif fqn not in self._placing.absent:
                items += default_write_items(fqn, value)
        self.plan = SavePlan(items)
        self.plan = SavePlan(items, planner_data=self._evidence(rank))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with each element once, and the metadata. Called on the coordinator.

        Raises:
            PlacementError: Ranks that contradict each other, elements that nobody holds, replicas
                that differ; all of them in one error.
        """
        evidence: list[Evidence] = [plan.planner_data for plan in all_plans]
        # One plan of several ranks: a save without collectives, where nobody sees the others.
        alone = len(all_plans) == 1 and world_size() > 1
        agreement = examine(all_plans, evidence, complete=not alone)
        self.report = self._judge(agreement, evidence)
        bare = [dataclasses.replace(plan, planner_data=None) for plan in all_plans]
        owned = drop_replicas(bare, lowest_rank=self.dedup_save_to_lowest_rank)
        self.global_plan, metadata = create_default_global_save_plan(owned)
        self.metadata = dataclasses.replace(metadata, planner_data=self._planner_data(evidence))
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes. Called on every rank."""
        self.plan = new_plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the data of a write item: a view of the local tensor. Called on every rank."""
        placed = self._placing.placed.get(index.fqn)
        if placed is None:
            return super().lookup_object(index)
        for chunk in written_chunks(placed):
            if chunk.offsets == index.offset:
                return written_data(placed, chunk)
        raise ValueError(f"{index.fqn}: this rank has no chunk at offset {index.offset}")

    def _evidence(self, rank: int) -> Evidence:
        patterns = self.rules.patterns if isinstance(self.rules, PlacementRules) else ()
        return Evidence(
            rank=rank,
            mappings={key: checkpoint_path(key, path) for key, path in self.mappings.items()}
            if self.flatten_state_dict
            else None,
            digests=self._digests(self.plan),
            axes=self._axes(),
            matched=self._placing.matched,
            patterns=patterns,
            rules_of={
                fqn: placed.rule
                for fqn, placed in self._placing.placed.items()
                if placed.rule is not None
            },
        )

    def _axes(self) -> dict[str, tuple[int, int]]:
        meshes = {
            id(value.device_mesh): value.device_mesh
            for fqn, value in self.state_dict.items()
            if fqn in self._placing.placed and hasattr(value, "device_mesh")
        }
        axes = {}
        for mesh in meshes.values():
            axes.update(named_axes(mesh))
        for binding in {id(p.binding): p.binding for p in self._placing.placed.values()}.values():
            axes.update({a.name: (a.position, a.size) for a in binding.axes if a.name is not None})
        return axes

    def _digests(self, plan: SavePlan) -> list[bytes | None]:
        if self.digests == "off":
            return []
        found: list[bytes | None] = []
        tensors: list[torch.Tensor] = []
        places: list[int] = []
        for item in plan.items:
            found.append(None)
            data = self.lookup_object(item.index)
            if item.type == WriteItemType.BYTE_IO:
                found[-1] = object_digest(data)
            elif isinstance(data, torch.Tensor):
                tensors.append(data)
                places.append(len(found) - 1)
        made = (
            [full_digest(tensor) for tensor in tensors]
            if self.digests == "full"
            else sampled_digests(tensors)
        )
        for position, digest in zip(places, made, strict=True):
            found[position] = digest
        return found

    def _judge(self, agreement: Agreement, evidence: Sequence[Evidence]) -> SaveReport:
        faults = list(agreement.faults)
        notes = list(agreement.notes)
        (faults if self.on_conflict == "error" else notes).extend(agreement.conflicts)
        raise_faults("the ranks' plans do not make a checkpoint", faults)
        report = summarise(agreement, evidence)
        if report.unmatched:
            notes.append(
                Fault(
                    ", ".join(map(repr, report.unmatched)),
                    "no key on any rank matches this pattern",
                    ("way out:     compare it with the keys in the report, or drop it",),
                )
            )
        told = [str(note) for note in notes]
        if told:
            warnings.warn(format_faults("saved, but look at this", notes), stacklevel=2)
        report.warnings = tuple(told)
        return report

    def _planner_data(self, evidence: Sequence[Evidence]) -> Any:
        if not self.flatten_state_dict:
            return None
        merged: dict[str, Any] = {}
        for told in reversed(evidence):
            merged.update(told.mappings or {})
        return merged


def summarise(agreement: Agreement, evidence: Sequence[Evidence]) -> SaveReport:
    """Return the report on plans that were found to agree."""
    report = SaveReport(ranks=len(evidence))
    objects = []
    partial = {}
    for fqn, claims in agreement.claims.items():
        if len(claims.plans) < len(evidence):
            partial[fqn] = claims.plans
        if "object" in claims.kinds:
            objects.append(fqn)
            continue
        shape = tuple(next(iter(claims.sizes)))
        dtype = next(iter(claims.dtypes))
        whole = int(torch.Size(shape).numel()) * dtype.itemsize
        unique = sum(box.numel for box in claims.boxes) * dtype.itemsize
        held = sum(box.numel * len(told) for box, told in claims.boxes.items()) * dtype.itemsize
        report.keys[fqn] = KeyReport(
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            chunks=len(claims.boxes),
            unique_nbytes=unique,
            whole_nbytes=whole,
            copies=held / whole if whole else 1.0,
        )
    report.objects = tuple(objects)
    report.partial_keys = {
        fqn: ", ".join(str(evidence[plan].rank) for plan in plans) for fqn, plans in partial.items()
    }
    rules: dict[str, int] = {}
    for told in evidence:
        for rule, count in told.matched.items():
            rules[rule] = max(rules.get(rule, 0), count)
    report.rules = rules
    patterns = dict.fromkeys(pattern for told in evidence for pattern in told.patterns)
    report.unmatched = tuple(pattern for pattern in patterns if repr(pattern) not in rules)
    return report


def check_rules(rules: Any) -> None:
    """Refuse what cannot be asked for a placement."""
    if rules is not None and not callable(rules):
        raise PlacementError(
            f"rules must be PlacementRules, a callable (fqn, tensor) -> CheckpointPlacement or "
            f"None, or None, not {type(rules).__name__}"
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse an option that there is not."""
    if value not in choices:
        raise PlacementError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
