"""The SavePlanner: what each rank offers, what the coordinator lets be written."""

from __future__ import annotations

import dataclasses
import io
import logging
import uuid
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_placements.agreement import Agreement, examine
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
    format_names,
    raise_faults,
)
from dcp_placements.evidence import Evidence, Verdict
from dcp_placements.interop import (
    DefaultSavePlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    StorageMeta,
    WriteItem,
    WriteItemType,
    create_default_global_save_plan,
    files_by_name,
    global_rank,
    world_size,
)
from dcp_placements.items import written_chunks, written_data
from dcp_placements.naming import Rename, checkpoint_path, rename_keys
from dcp_placements.offer import Objects, gather_evidence, item_digests, offered_items
from dcp_placements.options import check_choice, check_rules, check_waivers
from dcp_placements.ownership import drop_replicas
from dcp_placements.placing import Placing, place
from dcp_placements.plan_cache import PlanCache
from dcp_placements.provenance import RESERVED_KEY, provenance, written_digests
from dcp_placements.report import SaveReport
from dcp_placements.rules import Rules
from dcp_placements.summary import summarise

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
        digests: What the coordinator compares before it drops a replica: ``"sampled"`` (up to
            4 KiB of each item), ``"full"`` (all bytes; the digests are stored, too, for
            ``PlacementLoadPlanner(verify="digests")``) or ``"off"``.
        on_conflict: ``"error"`` refuses a save whose replicas differ; ``"warn"`` saves one.
        waive: ``{pattern: reason}`` of keys whose lint warnings are known to be wrong.
        step: The training step, kept with full digests; an attribute, to be set before each save.
        flatten_state_dict: As in ``DefaultSavePlanner``.
        flatten_sharded_tensors: As in ``DefaultSavePlanner``.
        dedup_replicated_tensors: As in ``DefaultSavePlanner`` (deprecated there, no effect).
        dedup_save_to_lowest_rank: As in ``DefaultSavePlanner``.
        enable_plan_caching: Reuse the plan of the last save where the tensors are the same; held
            by this planner.

    Attributes:
        report: After planning, a ``SaveReport``; of all ranks on the coordinator.

    Raises:
        PlacementError: An option that there is not.
    """

    report: SaveReport
    _objects: Objects

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rename: Rename | None = None,
        digests: str = "sampled",
        on_conflict: str = "error",
        waive: Mapping[str, str] | None = None,
        step: int | None = None,
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
        )
        check_rules(rules)
        check_choice("digests", digests, DIGESTS)
        check_choice("on_conflict", on_conflict, ON_CONFLICT)
        self.rules = rules
        self.rename = rename
        self.digests = digests
        self.on_conflict = on_conflict
        self.waive = check_waivers(waive)
        self.step = step
        self.report = SaveReport()
        self._cache = PlanCache() if enable_plan_caching else None
        self._start_over()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, flat and under the checkpoint's keys. Called on every rank."""
        self._start_over()
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
        items = offered_items(self.state_dict, self._placing)
        plan = SavePlan(items)
        compared, stored, self._objects = item_digests(plan, self._data_of, self.digests)
        if self._cache is not None and self._is_unchanged(self._cache, items):
            told = Evidence(rank, digests=compared, stored_digests=stored)
            told.generation = self._cache.generation
            self.plan = SavePlan([], planner_data=told, usable=False)
            return self.plan
        told = gather_evidence(
            plan,
            rank=rank,
            state_dict=self.state_dict,
            mappings=self._paths(),
            placing=self._placing,
            rules=self.rules,
            waived=self.waive,
        )
        told.digests, told.stored_digests = compared, stored
        self.plan = SavePlan(items, planner_data=told)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with each element once, and the metadata. Called on the coordinator.

        Raises:
            PlacementError: Ranks that contradict each other, elements that nobody holds, replicas
                that differ; all of them in one error.
        """
        cache = self._cache
        unchanged = not any(plan.usable for plan in all_plans)
        offered = all_plans if cache is None else _unpacked(all_plans, cache)
        evidence: list[Evidence] = [plan.planner_data for plan in offered]
        # One plan where there are more ranks: a save without collectives; nobody sees the others.
        alone = len(offered) == 1 and world_size() > 1
        self.report = self._judge(examine(offered, evidence, complete=not alone), evidence)
        if unchanged and cache is not None and cache.global_plan is not None:
            assert cache.metadata is not None
            self.report.plan_cache = "reused"
            owned, metadata, generation = cache.global_plan, cache.metadata, cache.generation
        else:
            bare = [dataclasses.replace(plan, planner_data=None) for plan in offered]
            owned, metadata = create_default_global_save_plan(
                drop_replicas(bare, lowest_rank=self.dedup_save_to_lowest_rank)
            )
            generation = uuid.uuid4().hex
        if cache is not None:
            cache.all_plans, cache.global_plan, cache.metadata = offered, owned, metadata
        verdict = _verdict(owned, generation or "")
        self.global_plan = [
            SavePlan([], planner_data=verdict, usable=False)
            if unchanged and cache is not None
            else dataclasses.replace(plan, planner_data=verdict)
            for plan in owned
        ]
        self.metadata = Metadata(
            dict(metadata.state_dict_metadata),
            planner_data=self._planner_data(offered, owned, evidence),
        )
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes. Called on every rank.

        Raises:
            PlacementError: A storage writer whose files cannot hold the plan.
        """
        verdict = new_plan.planner_data
        if isinstance(verdict, Verdict):
            raise_faults("the storage writer cannot hold this", _writer_faults(new_plan, verdict))
        cache = self._cache
        if cache is not None and isinstance(verdict, Verdict):
            if not new_plan.usable:
                assert cache.final_items is not None
                new_plan = dataclasses.replace(new_plan, items=cache.final_items, usable=True)
            cache.local_items, cache.mappings = self._offered, self._paths()
            cache.final_items = new_plan.items
            cache.generation = verdict.generation
            cache.resolved.clear()
            cache.finished = True
        self.plan = new_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a write item: a view, or an object's bytes. Called on every rank."""
        if self._cache is not None:
            self._cache.resolved.append(None)
        if write_item.type == WriteItemType.BYTE_IO:
            made = self._objects.get(write_item.index.fqn)
            if made is not None:
                return io.BytesIO(made.getbuffer())
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what stands at ``index``; of a placed tensor a view. Called on every rank."""
        placed = self._placing.placed.get(index.fqn)
        if placed is None:
            return super().lookup_object(index)
        for chunk in written_chunks(placed):
            if chunk.offsets == index.offset:
                return written_data(placed, chunk)
        raise PlacementError(f"{index.fqn}: this rank has no chunk at offset {index.offset}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone: what a save left behind is not sent to another process."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_ONE_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.mappings = {}
        self._start_over()

    def _start_over(self) -> None:
        self._placing = Placing()
        self._objects = {}
        self._offered: Sequence[WriteItem] = ()

    def _data_of(self, item: WriteItem) -> Any:
        return self.lookup_object(item.index)

    def _paths(self) -> dict[str, Any]:
        """Return where each key stands in the nested dict; nothing where it was not flattened."""
        return {key: checkpoint_path(key, path) for key, path in self.mappings.items()}

    def _is_unchanged(self, cache: PlanCache, items: Sequence[WriteItem]) -> bool:
        self._offered = items
        why = cache.why_unusable(items, self._paths())
        logger.info("plan cache: %s", "reused" if why is None else f"not used, {why}")
        self.report.plan_cache = "reused" if why is None else f"made anew: {why}"
        if why is not None:
            cache.forget()
        cache.finished = False
        return why is None

    def _judge(self, agreement: Agreement, evidence: Sequence[Evidence]) -> SaveReport:
        faults = list(agreement.faults)
        notes = [*agreement.notes, *_merged_notes(evidence)]
        (faults if self.on_conflict == "error" else notes).extend(agreement.conflicts)
        raise_faults("the ranks' plans do not make a checkpoint", faults)
        report = summarise(agreement, evidence, self.waive)
        report.plan_cache = self.report.plan_cache
        if report.unmatched:
            notes.append(
                Fault(
                    ", ".join(map(repr, report.unmatched)),
                    "no key on any rank matches",
                    (
                        f"the keys are {format_names(list(agreement.claims), 4)}",
                        "way out:     correct the pattern, or drop it",
                    ),
                )
            )
        if len(evidence) < world_size():
            notes.append(_too_few(len(evidence), world_size()))
        report.warnings = tuple(map(str, notes))
        if notes:
            warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
        return report

    def _planner_data(
        self,
        offered: Sequence[SavePlan],
        owned: Sequence[SavePlan],
        evidence: Sequence[Evidence],
    ) -> Any:
        merged: dict[str, Any] = {}
        for told in reversed(evidence):
            merged.update(told.mappings or {})
        if self.digests == "full":
            options = {
                "digests": self.digests,
                "on_conflict": self.on_conflict,
                "waive": self.waive,
                "flatten_state_dict": self.flatten_state_dict,
                "dedup_save_to_lowest_rank": self.dedup_save_to_lowest_rank,
            }
            merged[RESERVED_KEY] = {
                **provenance(evidence, options=options, step=self.step),
                "digests": written_digests(offered, owned, evidence),
            }
        return merged if self.flatten_state_dict or merged else None


_OF_ONE_SAVE = frozenset(
    (
        "state_dict",
        "mappings",
        "plan",
        "global_plan",
        "metadata",
        "_placing",
        "_objects",
        "_offered",
    )
)


def _unpacked(plans: Sequence[SavePlan], cache: PlanCache) -> list[SavePlan]:
    """Return all plans in full, those of unchanged ranks from the cache with today's digests."""
    full = []
    for position, plan in enumerate(plans):
        if plan.usable:
            full.append(plan)
            continue
        told: Evidence = plan.planner_data
        if cache.all_plans is None or told.generation != cache.generation:
            raise PlacementError(
                f"rank {told.rank} says that its plan is unchanged, but the coordinator has no "
                "such plan: with enable_plan_caching=True use one planner for all saves, on every "
                "rank. "
                "Saving again plans anew"
            )
        known = cache.all_plans[position]
        evidence = dataclasses.replace(
            known.planner_data, digests=told.digests, stored_digests=told.stored_digests
        )
        full.append(dataclasses.replace(known, planner_data=evidence))
    return full


def _verdict(owned: Sequence[SavePlan], generation: str) -> Verdict:
    in_pieces: dict[str, None] = {}
    for plan in owned:
        counts = Counter(item.index.fqn for item in plan.items)
        in_pieces.update(dict.fromkeys(fqn for fqn, count in counts.items() if count > 1))
    return Verdict(generation, sum(bool(plan.items) for plan in owned), tuple(in_pieces)[:8])


def _writer_faults(plan: SavePlan, verdict: Verdict) -> list[Fault]:
    """Return why files that know a tensor by its name alone cannot hold what is planned."""
    if not files_by_name(plan.storage_data):
        return []
    faults = [
        Fault(
            fqn,
            "a rank writes it in several chunks, and HuggingFaceStorageWriter would keep only the "
            "last of them in a file",
            ("way out:     save with FileSystemWriter, and export that to safetensors",),
        )
        for fqn in verdict.in_pieces
    ]
    if verdict.writers > 1 and "shard_index" not in plan.storage_data:
        faults.append(
            Fault(
                "HuggingFaceStorageWriter",
                f"{verdict.writers} ranks would write files of the same names, one over the other",
                ("way out:     HuggingFaceStorageWriter(..., save_distributed=True)",),
            )
        )
    return faults


def _merged_notes(evidence: Sequence[Evidence]) -> list[Fault]:
    """Return the ranks' notes, those with one text once."""
    return list(dict.fromkeys(note for told in evidence for note in told.notes))


def _too_few(ranks: int, world: int) -> Fault:
    return Fault(
        "this save",
        f"{ranks} of {world} ranks take part",
        (
            "reason:      what only the others hold is not saved; and if they save into the same "
            "directory, their files take the place of these",
            "way out:     save with all ranks, or give every group a directory of its own",
        ),
    )
