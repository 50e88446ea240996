"""The SavePlanner: torch's hooks, in the order in which a save calls them."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_placements._torch import (
    DefaultSavePlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    ShardedTensor,
    StorageMeta,
    WriteItem,
    WriteItemType,
    find_state_dict_object,
    global_rank,
    is_of_hugging_face_writer,
    without_class,
    world_size,
)
from dcp_placements.bind.lint import lint
from dcp_placements.errors import PlacementError, RankFaults, raise_faults, raise_faults_of_ranks
from dcp_placements.names.flat import Path, flattened
from dcp_placements.names.optimizer_state import stateless_parameters
from dcp_placements.names.renames import numbering
from dcp_placements.names.target import Rename
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.report import SaveReport
from dcp_placements.rules.options import (
    NOT_FINISHED,
    ItemsToCome,
    RunAttribute,
    Runs,
    check_choice,
    check_declaration,
    items_of_run,
    of_run,
)
from dcp_placements.rules.patterns import Rules, compile_pattern
from dcp_placements.save.coordinator.global_plan import Coordinator
from dcp_placements.save.coordinator.making import (
    cuts_and_renames,
    making,
    paths_of_keys,
)
from dcp_placements.save.coordinator.owners import left_to_others, rank_in_group
from dcp_placements.save.coordinator.summary import judged, summarise_rank
from dcp_placements.save.held_digests import digests_by_chunk, repeat_faults, with_digests
from dcp_placements.save.items import Assignment, assigned_items
from dcp_placements.save.local_plan import (
    LocalPlan,
    Statement,
    foreign_plans,
    named_axes_of,
    unlike_worlds,
)
from dcp_placements.save.rank_save import REFUSED, RankSave
from dcp_placements.storage.metadata.provenance import (
    DIGESTS_OF_RANK,
    REPLACED,
    RESERVED_KEY,
    identity,
)
from dcp_placements.storage.metadata.rank_files import saves_before
from dcp_placements.storage.metadata.save_ids import id_data, id_items, is_named
from dcp_placements.table.table import packed_boxes

DIGESTS = ("sampled", "full", "off")
ON_CONFLICT = ("error", "warn")


class PlacementSavePlanner(DefaultSavePlanner):
    """Saves every shard at its true place in the whole tensor.

    ``dcp.save(state_dict, checkpoint_id=path, planner=PlacementSavePlanner(rules))`` writes an
    ordinary DCP checkpoint of the whole tensors: any reader loads it, into any topology.

    Args:
        rules: ``PlacementRules``, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None:
            every tensor keeps its own mesh and placements.
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's. ``Renumber``
            and the like, or any function of a key; what is a row, or has rows or parts, is a
            ``Row``, ``Rows`` or ``Parts``.
        digests: What the coordinator compares before it drops a replica: ``"sampled"`` (up to
            4 KiB of each item), ``"full"`` (all bytes) or ``"off"``.
        on_conflict: ``"error"`` refuses a save whose replicas differ; ``"warn"`` saves one.
        waive: ``{pattern: reason}`` of keys whose lint warnings are known to be wrong, or whose
            numbers are on purpose not all of ``Renumber(total=)``.
        step: The training step, kept with the checkpoint; an attribute, to be set before each
            save.
        flatten_state_dict: As in ``DefaultSavePlanner``.
        flatten_sharded_tensors: As in ``DefaultSavePlanner``.
        dedup_replicated_tensors: As in ``DefaultSavePlanner`` (deprecated there, no effect).
        dedup_save_to_lowest_rank: As in ``DefaultSavePlanner``.
        enable_plan_caching: Accepted as in ``DefaultSavePlanner``, and changes nothing: every save
            is planned by what is there.

    Attributes:
        report: After planning, a ``SaveReport``; of all ranks on the coordinator, of what this
            rank holds on the others.
        state_dict: Flat, with the checkpoint's keys; this and the following are of the save that
            this thread plans, of a thread that plans none the latest.
        mappings: Where each key stands in the nested dict.
        plan: What this rank writes; None before all ranks have agreed.
        global_plan: The plans of all ranks, on the coordinator.
        metadata: What will be in ``.metadata``, on the coordinator.
        is_coordinator: Whether this rank is the coordinator.

    Raises:
        PlacementError: An option with an unknown value.
    """

    state_dict: Any = RunAttribute()
    mappings: Any = RunAttribute()
    plan: Any = RunAttribute()
    global_plan: Any = RunAttribute()
    metadata: Any = RunAttribute()
    is_coordinator: Any = RunAttribute()

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
        self._runs = Runs(RankSave)
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self.waive = check_declaration(rules, rename, waive)
        check_choice("digests", digests, DIGESTS)
        check_choice("on_conflict", on_conflict, ON_CONFLICT)
        self.rules = rules
        self.rename = rename
        self.digests = digests
        self.on_conflict = on_conflict
        if step is not None and not isinstance(step, int):
            raise PlacementError(f"step={step!r}: give a number")
        self.step = step
        self._exact = False

    @property
    def report(self) -> SaveReport:
        """What the latest save comes to."""
        save = self._runs.latest
        if not save.is_planned:
            return SaveReport(planned=False)
        if save.report is None:
            save.report = summarise_rank(save.holding, save.placing, self.waive)
        return save.report

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | bool | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, flat and under the checkpoint's keys. Called on every rank.

        Args:
            state_dict: As for ``dcp.save``.
            storage_meta: Names the directory. Where a subclass does not name this parameter,
                torch gives ``is_coordinator`` in its place.
            is_coordinator: Whether this rank is the coordinator.
        """
        if isinstance(storage_meta, bool):
            is_coordinator = storage_meta
            storage_meta = None
        if isinstance(storage_meta, Metadata):
            raise PlacementError(
                "a PlacementSavePlanner cannot load: dcp.load wants a load planner"
            )
        save = self._runs.begin()
        save.is_coordinator = is_coordinator
        if self.flatten_state_dict:
            save.state_dict, save.mappings = flattened(state_dict, self._flattened_by_torch)
        else:
            save.state_dict, save.mappings = self._flattened_by_torch(state_dict)
            # Torch gives the keys of nested dicts as texts, also where they are numbers.
            for key, value in state_dict.items():
                if str(key) in save.state_dict and not isinstance(value, ShardedTensor):
                    save.state_dict[str(key)] = value
        target = None if storage_meta is None else storage_meta.checkpoint_id
        name = b"" if target is None else str(target).encode(errors="backslashreplace")
        save.target = zlib.crc32(name)
        save.directory = "" if target is None else os.fspath(target)
        try:
            save.rename(self.rename)
        except RankFaults as refusal:
            save.refusal = refusal

    def _flattened_by_torch(self, part: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
        stock = DefaultSavePlanner(
            flatten_state_dict=self.flatten_state_dict,
            flatten_sharded_tensors=self.flatten_sharded_tensors,
        )
        stock.set_up_planner(part)
        return stock.state_dict, stock.mappings

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write, replicas included. Called on every rank.

        The plan has tables and boxes in place of items, which ``finish_plan`` makes. If tensors
        and rules do not fit, it is the reasons alone, and the coordinator raises one error for all
        ranks.
        """
        save = self._runs.planned
        try:
            if save.refusal is not None:
                raise save.refusal
            with quiet_gc():
                save.place(self.rules, self.rename, flat=self.flatten_state_dict)
                local_plan = self._local_plan()
        except RankFaults as refusal:
            save.refusal = refusal
            local_plan = LocalPlan(global_rank(), (), b"", faults=refusal.packed())
        return SavePlan(ItemsToCome(), planner_data=local_plan)  # type: ignore[arg-type]

    def _local_plan(self) -> LocalPlan:
        """Return what is sent to the coordinator."""
        save, rank = self._runs.planned, global_rank()
        placed = save.placing.placed.values()
        repeats = repeat_faults(placed, self.digests)
        if repeats and self.on_conflict == "error":
            raise RankFaults(f"rank {rank} {REFUSED}", repeats)
        waived = [compile_pattern(pattern) for pattern in self.waive]
        findings = lint(placed, renamed=self.rename is not None, waived=waived)
        axes = named_axes_of(save.placing, self.rules)
        statement = Statement(
            matched=save.placing.matched,
            declared=save.declared(self.rules),
            stateless=tuple(stateless_parameters(save.state_dict)),
            notes=(*repeats, *findings, *save.notes),
            numbered=numbering(self.rename),
            renames=save.renames,
            axis_sizes={name: size for name, (_, size) in axes.items()},
            target=save.target,
            step=self.step,
        )
        coordinate = tuple([position for position, _ in axes.values()])
        packed = statement.packed()
        plan = LocalPlan(rank, (), b"", coordinate, statement=packed, world=world_size())
        return self._with_holding(plan)

    def _with_holding(self, plan: LocalPlan) -> LocalPlan:
        """Return a plan with the keys, boxes and digests of what this rank holds."""
        save = self._runs.planned
        tables = tuple([table.packed() for table in save.holding.tables])
        save.packed_tables = dict(zip(tables, save.holding.tables, strict=True))
        plan = plan._replace(
            tables=tables,
            boxes=packed_boxes(save.holding.boxes),
        )
        return with_digests(
            plan,
            save.holding,
            self.digests,
            world=world_size(),
            lookup=self.lookup_object,
            exact=self._exact,
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with each element once, and the metadata. Called on the coordinator.

        Raises:
            PlacementError: Tensors and rules that do not fit, with the ranks; or ranks that
                contradict each other, elements that nobody holds, replicas that differ. All in
                one error.
        """
        save = self._runs.planned
        with quiet_gc():
            # One plan where there are more ranks: a save without collectives, nobody sees the rest.
            world = world_size()
            alone = len(all_plans) == 1 and world > 1
            raise_faults("the ranks do not save together", foreign_plans(all_plans))
            sent: list[LocalPlan] = [plan.planner_data for plan in all_plans]
            raise_faults_of_ranks(REFUSED, {plan.rank: plan.faults for plan in sent})
            raise_faults("the ranks do not save together", unlike_worlds(sent, world))
            in_group = rank_in_group(all_plans[0].storage_data) if alone else None
            others_missing = in_group not in (None, global_rank())
            if alone and not save.is_coordinator and not others_missing:
                # With a coordinator of its own (no_dist=True) a rank saves all that it has.
                left = left_to_others(save.placing.placed.values())
                if left:
                    save.hold(left)
                    sent = [self._with_holding(sent[0])]
            # Other ranks mostly have the tables of this one, and send the same bytes.
            own, first = save.packed_tables, save.holding.fqns
            coordinator = Coordinator(
                sent,
                size=world,
                complete=not alone,
                own=own,
                first=first,
                waived=[compile_pattern(pattern) for pattern in self.waive],
            )
            assignments = coordinator.plan(
                lowest_rank=self.dedup_save_to_lowest_rank, save_id=uuid.uuid4().bytes
            )
            merged, strict = all_plans[0].storage_data is not None, self.on_conflict == "error"
            save.report = judged(
                coordinator,
                self.waive,
                strict=strict,
                merged_later=merged,
                in_group=in_group if others_missing else None,
            )
            # What a writer put into a local plan stays in it: without collectives, its file names.
            save.global_plan = [
                dataclasses.replace(plan, planner_data=assignment)
                for plan, assignment in zip(all_plans, assignments, strict=True)
            ]
            data = self._planner_data(coordinator, assignments, alone)
            save.metadata = Metadata(coordinator.metadata, planner_data=data)
        return save.global_plan, save.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes. Called on every rank.

        Raises:
            PlacementError: The storage writer is torch's ``HuggingFaceStorageWriter``; or the
                coordinator has another planner; or a subclass gave the plan items.
        """
        save = self._runs.planned
        if save.refusal is not None:  # and the coordinator's planner is another one
            raise save.refusal
        assignment = new_plan.planner_data
        if not (isinstance(assignment, Assignment) and isinstance(new_plan.items, ItemsToCome)):
            raise PlacementError(NOT_FINISHED)
        if is_of_hugging_face_writer(new_plan.storage_data):
            raise PlacementError(
                "HuggingFaceStorageWriter knows a tensor by its name alone, and cannot hold a "
                "tensor in several chunks, or an object\n"
                "    way out:     save with FileSystemWriter or PlacementFileSystemWriter, and "
                "dcp-placements export --to hf"
            )
        with quiet_gc():
            items = assigned_items(save.holding, assignment)
            # A rank that writes nothing makes no file for its id alone.
            if items and not is_named(new_plan.storage_data):
                items = [*id_items(assignment.save_id, global_rank()), *items]
            items = items_of_run(items, save)
        save.plan = dataclasses.replace(new_plan, items=items, planner_data=None)
        return save.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a write item: a view, or an object's bytes. Called in any thread."""
        save = self._runs.of(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            record = id_data(write_item.index)
            if record is not None:
                return record
        value = self.lookup_object(of_run(write_item.index, save))
        return without_class(self.transform_object(write_item, value))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what stands at ``index``; of a placed tensor a view. Called on every rank."""
        save = self._runs.of(index)
        data = save.data(index)
        return find_state_dict_object(save.state_dict, index) if data is None else data

    def _planner_data(
        self, coordinator: Coordinator, assignments: Sequence[Assignment], alone: bool
    ) -> dict[str, Any]:
        save, world, statements = self._runs.planned, coordinator.world, coordinator.statements
        data: dict[str, Any] = {}
        if self.flatten_state_dict:
            data.update(paths_of_keys(world, save.holding.tables, save.paths))
        provenance = identity(assignments[0].save_id, world_size=len(assignments), step=self.step)
        provenance |= cuts_and_renames(world, statements, coordinator.metadata)
        options = {
            "digests": self.digests,
            "on_conflict": self.on_conflict,
            "waive": self.waive,
            "flatten_state_dict": self.flatten_state_dict,
            "dedup_save_to_lowest_rank": self.dedup_save_to_lowest_rank,
        }
        if alone:
            # Replicas are compared when the metadata of the ranks are merged.
            provenance["options"] = options
            directory = save.directory
            older = os.path.join(directory, f"__{global_rank()}.metadata")
            if directory and os.path.isfile(older):
                # A rank that is stopped before it saves again has saved here less often.
                provenance[REPLACED] = saves_before(lambda: io.BufferedReader(io.FileIO(older)))
            if self.digests != "off":
                held = save.holding
                provenance[DIGESTS_OF_RANK] = digests_by_chunk(
                    held, self.digests, self.lookup_object
                )
        if self.digests == "full":
            provenance |= making(world, coordinator.plans, statements, options)
        data[RESERVED_KEY] = provenance
        return data
