"""The SavePlanner: torch's hooks in the order in which a save calls them, and its state."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product, repeat
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    Metadata,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from dcp_placements._torch import (
    HUGGING_FACE_DATA,
    ShardedTensor,
    StoragePrefix,
    global_rank,
    named_axes,
    set_up_by_torch,
    without_class,
    world_size,
)
from dcp_placements.bind.lint import lint
from dcp_placements.bind.place import numberings, place
from dcp_placements.bind.rule_and_dtensor import Placed, Placing
from dcp_placements.errors import (
    Fault,
    PlacementError,
    packed_faults,
    raise_faults,
    raise_faults_of_ranks,
)
from dcp_placements.items import (
    NOT_FINISHED,
    OVERTAKEN,
    ItemsToCome,
    RankWork,
    WriteItemOfSave,
    held_by,
    quiet_gc,
    with_fields,
)
from dcp_placements.names.flat import Path, Reshaped, check_texts, checkpoint_path, rename_keys
from dcp_placements.names.optimizer_state import ParameterNames, stateless_parameters
from dcp_placements.names.recorded_numbers import NumberedKey
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import Step, recorded
from dcp_placements.report import SaveReport
from dcp_placements.rules.mesh_axes import mesh_state
from dcp_placements.rules.patterns import (
    Matches,
    PlacementRules,
    Rules,
    check_declaration,
    compile_pattern,
    waiver_matches,
)
from dcp_placements.save.coordinator import (
    NOT_PLACED,
    THIS_SAVE,
    Coordinator,
    Copies,
    report_keys,
    tensor_properties,
)
from dcp_placements.save.copied_states import doubtful_states
from dcp_placements.save.local_plan import COPIED, Assignment, LocalPlan
from dcp_placements.save.replica_conflicts import repeat_fault
from dcp_placements.save.unwritten import UNWRITTEN, not_by_name, unwritten
from dcp_placements.storage.provenance import (
    COPIES,
    RESERVED_KEY,
    identity,
)
from dcp_placements.storage.rank_metadata import without_collectives
from dcp_placements.storage.save_ids import id_data, id_items, is_named, reserved_faults
from dcp_placements.table.digests import (
    differing_repeats,
    digests_of,
)
from dcp_placements.table.statement import Statement, messages_of
from dcp_placements.table.table import (
    OBJECT,
    PLAIN,
    Holding,
    held_chunks,
    holding_of,
)
from dcp_placements.table.whole import WholeModel
from dcp_placements.table.world import World

DIGESTS = ("sampled", "full", "off")
ON_CONFLICT = ("error", "warn")

logger = logging.getLogger(__name__)


@dataclass
class RankSave(RankWork):
    """The state of one save on one rank.

    Attributes:
        state_dict: The flat state dict, with the checkpoint's keys.
        mappings: The path of each key in the nested dict.
        plan: What the rank writes, when all ranks have agreed.
        global_plan: Coordinator only: the plans of all ranks.
        metadata: Coordinator only: the contents of ``.metadata``.
        is_coordinator: Whether this rank is the coordinator.
        placing: The placed tensors of the rank.
        holding: What the rank holds, by group.
        report: Coordinator only: the report on all ranks; None before the global plan.
        directory: The directory that it writes into; empty for none.
        refusal: Why the rank cannot save; the coordinator raises it for all ranks.
        reshaped: The keys of which a rename makes other tensors.
        rename_matches: The patterns of the rename, and whether a key of this rank matches.
        renames: The steps of the rename that the checkpoint keeps.
        numbered: The keys in which the rename gave a number.
        meshes: The meshes of the rules and of the tensors.
    """

    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    plan: SavePlan | None = None
    global_plan: list[SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None
    is_coordinator: bool = False
    placing: Placing = field(default_factory=Placing)
    holding: Holding | None = None
    report: SaveReport | None = None
    directory: str = ""
    refusal: Sequence[Fault] = ()
    reshaped: Reshaped | None = None
    rename_matches: Matches = field(default_factory=dict)
    renames: tuple[Step, ...] = ()
    numbered: Sequence[NumberedKey] = ()
    meshes: Sequence[Any] = ()

    def value_at(self, index: MetadataIndex) -> Any:
        """Return the value at ``index``; a view of a placed tensor.

        Raises:
            PlacementError: The rank has no chunk of the tensor there.
        """
        placed = self.placing.placed.get(index.fqn)
        if placed is None:
            return find_state_dict_object(self.state_dict, index)
        for chunk in held_chunks(placed):
            if chunk.offsets == tuple(index.offset or ()):
                return placed.view(chunk)
        raise PlacementError(f"{index.fqn}: this rank has no chunk at offset {index.offset}")

    def own_report(self, waived: Mapping[str, str]) -> SaveReport:
        """Return the report on what this rank holds."""
        rules = {rule: count for rule, count in self.placing.matched.items() if count}
        report = SaveReport(rules=rules, shapes=self.placing.shapes(), waived=dict(waived))
        report.planned = self.holding is not None
        if self.holding is not None:
            report_keys(report, World([self.holding.packed()]).pieces, complete=False)
        return report


class PlacementSavePlanner(DefaultSavePlanner):
    """Saves every shard at its true place in the whole tensor.

    ``dcp.save(state_dict, checkpoint_id=path, planner=PlacementSavePlanner(rules))`` writes an
    ordinary DCP checkpoint of the whole tensors: any reader loads it, into any topology.

    Args:
        rules: ``PlacementRules``, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None:
            every tensor keeps its own mesh and placements.
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's. ``Renumber``
            and the like, or any function of a key, which returns a ``Row``, ``Rows`` or
            ``Parts`` for a tensor that is a row, or has rows or parts.
        digests: What the coordinator compares before it drops a replica: ``"sampled"`` (up to
            4 KiB of each item), ``"full"`` (all bytes) or ``"off"``.
        on_conflict: ``"error"`` refuses a save whose replicas differ; ``"warn"`` saves one.
        waive: ``{pattern: reason}``: keys whose lint warnings are wrong, or that are on purpose a
            part of ``Renumber(total=)``.
        step: The training step, kept with the checkpoint; an attribute, to be set before each
            save.
        whole: The unsharded model, which the keys and shapes of all ranks are compared with, as in
            ``Placements``.
        copies: Which replicated tensors every rank that holds them writes into its own file, too:
            ``"off"``; the bytes that a rank may write more, for the smallest tensors; or patterns
            of keys. It needs ``PlacementFileSystemWriter``; other readers read one of the copies.
        enable_plan_caching: Accepted, without effect: every save is planned from its tensors. This
            option and those that are not listed are torch's, of ``DefaultSavePlanner``.

    Attributes:
        report: After planning, a ``SaveReport``: on all ranks on the coordinator, on the rank's own
            tensors on the others.
        state_dict: The flat state dict with the checkpoint's keys. This and the other attributes of
            torch's planner are those of the save that was set up last.

    Raises:
        PlacementError: An option with an unknown value.
    """

    state_dict: Any = held_by("_save", "state_dict")
    mappings: Any = held_by("_save", "mappings")
    plan: Any = held_by("_save", "plan")
    global_plan: Any = held_by("_save", "global_plan")
    metadata: Any = held_by("_save", "metadata")
    is_coordinator: Any = held_by("_save", "is_coordinator")

    refused: Sequence[Fault] = ()
    """Faults for which each save is refused on all ranks, as those of a declaration that failed."""

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rename: Rename | None = None,
        digests: str = "sampled",
        on_conflict: str = "error",
        waive: Mapping[str, str] | None = None,
        step: int | None = None,
        copies: Copies = "off",
        whole: Any = None,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        self._save = RankSave()
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self.waive = check_declaration(rules, rename, waive)
        if digests not in DIGESTS:
            raise PlacementError(f"digests={digests!r}: choose one of {DIGESTS}")
        if on_conflict not in ON_CONFLICT:
            raise PlacementError(f"on_conflict={on_conflict!r}: choose one of {ON_CONFLICT}")
        if (isinstance(copies, str) and copies != "off") or isinstance(copies, bool):
            raise PlacementError(f'copies={copies!r}: choose "off", bytes, or a list of patterns')
        if copies != "off" and on_conflict == "warn":
            raise PlacementError('copies= needs on_conflict="error": copies have to be equal')
        for pattern in () if isinstance(copies, str | int) else copies:
            compile_pattern(pattern)
        self.copies = copies
        self.rules = rules
        self.rename = rename
        self.digests = digests
        self.on_conflict = on_conflict
        if step is not None and not isinstance(step, int):
            raise PlacementError(f"step={step!r}: give a number")
        self.step = step
        self.whole = None if whole is None else WholeModel.of(whole)

    @property
    def report(self) -> SaveReport:
        """The report on the save that was set up last."""
        save = self._save
        return save.own_report(self.waive) if save.report is None else save.report

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
        elif storage_meta is not None and not hasattr(storage_meta, "checkpoint_id"):
            raise PlacementError(
                "planner= of a load is a save planner\n    way out:     placements.load_planner()"
            )
        if not self.flatten_state_dict:  # else torch refuses them
            check_texts(state_dict)
        self._save = save = RankSave(refusal=self.refused)
        save.is_coordinator = is_coordinator
        stock = set_up_by_torch(DefaultSavePlanner, self, state_dict)
        save.state_dict, save.mappings = stock.state_dict, stock.mappings
        if not self.flatten_state_dict:
            # Torch gives the keys of nested dicts as texts, also where they are numbers.
            for key, value in state_dict.items():
                if str(key) in save.state_dict and not isinstance(value, ShardedTensor):
                    save.state_dict[str(key)] = value
        target = None if storage_meta is None else storage_meta.checkpoint_id
        save.directory = "" if target is None else os.fspath(target)
        if save.directory and "://" not in save.directory:
            # Ranks may have working directories of their own.
            save.directory = os.path.abspath(save.directory)
        if self.rename is None or save.refusal:
            return
        renamed = rename_keys(save.state_dict, save.mappings, self.rename, may_share=True)
        save.refusal = renamed.faults
        if not save.refusal:
            save.state_dict, save.mappings = renamed.state_dict, renamed.mappings
            save.reshaped, save.rename_matches = renamed.reshaped, renamed.matches
            save.renames, save.numbered = recorded(self.rename), renamed.numbered

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write, replicas included. Called on every rank.

        The plan has tables and boxes in place of items, which ``finish_plan`` makes. If tensors
        and rules do not fit, it has only the faults, and the coordinator raises one error for all
        ranks.
        """
        save, local_plan = self._save, LocalPlan(global_rank())
        save.check_thread()
        with quiet_gc():
            if not save.refusal:
                save.placing = placing = place(
                    save.state_dict,
                    self.rules,
                    save.mappings,
                    save.reshaped,
                    rename=self.rename,
                )
                save.state_dict, save.mappings = placing.state_dict, placing.mappings
                save.refusal = placing.faults + reserved_faults(save.state_dict)
            if not save.refusal:
                local_plan = self._local_plan(save)
        if save.refusal:
            local_plan = LocalPlan(local_plan.rank, faults=packed_faults(save.refusal))
        return SavePlan(ItemsToCome(), planner_data=local_plan)  # type: ignore[arg-type]

    def _local_plan(self, save: RankSave) -> LocalPlan:
        """Group what the rank holds, and return the plan that is sent to the coordinator."""
        rank, placing, placed = global_rank(), save.placing, save.placing.placed.values()
        paths: Mapping[str, Path] = save.mappings if self.flatten_state_dict else {}
        if self.rename is not None:
            paths = {key: checkpoint_path(key, path) for key, path in paths.items()}
        save.holding = holding = holding_of(save.state_dict, placing.placed, paths, placing.absent)
        lookup = partial(self._value, save)
        sent_digests = digests_of(holding, self.digests, world=world_size(), lookup=lookup)
        several = [tensor for tensor in placed if len(tensor.place.chunks) > 1]
        differing = differing_repeats(several, self.digests) if several else ()
        repeats = [repeat_fault(tensor, chunks) for tensor, chunks in differing]
        if repeats and self.on_conflict == "error":
            save.refusal = repeats
            return LocalPlan(rank)
        waived = [compile_pattern(pattern) for pattern in self.waive]
        save.meshes = self._meshes(placed)
        axes = named_axes(save.meshes)
        is_renamed, has_whole = self.rename is not None, self.whole is not None
        notes = lint(placed, renamed=is_renamed, waived=waived, checks_padding=not has_whole)
        groups = placing.parameter_groups
        waivers = waiver_matches(self.waive, self._waivable(save)) if self.waive else {}
        statement = Statement(
            matched=placing.matched,
            shapes=placing.shapes(),
            declared={**save.rename_matches, **waivers},
            stateless=tuple(
                stateless_parameters(save.state_dict, placing.states, groups) if groups else ()
            ),
            notes=(*repeats, *notes),
            unequal=tuple([repeat.fqn for repeat in repeats]),
            lists={
                fqn: tuple(value)
                for fqn, value in save.state_dict.items()
                if type(value) is ParameterNames
            },
            renames=save.renames,
            numberings=numberings(placing, save.numbered) if is_renamed else {},
            axis_sizes={name: size for name, (_, size) in axes.items()},
            digests=self.digests,
            world=world_size(),
            has_whole=has_whole,
            directory=save.directory,
            step=self.step,
        )
        coordinate = tuple([position for position, _ in axes.values()])
        has_states = self.digests != "off" and groups
        doubtful = doubtful_states(placing) if has_states else ()
        return LocalPlan(
            rank, holding.packed(), coordinate, *sent_digests, statement.packed(), doubtful
        )

    def _meshes(self, placed: Iterable[Placed]) -> list[Any]:
        """Return the meshes of the rules and of the tensors, equal ones of tensors once."""
        meshes = self.rules.meshes if isinstance(self.rules, PlacementRules) else []
        places = dict.fromkeys(tensor.place for tensor in placed)
        of_places = {
            mesh_state(axis.mesh): axis.mesh for of_tensor in places for axis in of_tensor.axes
        }
        return [*meshes, *of_places.values()]

    def _waivable(self, save: RankSave) -> Iterator[str]:
        """Yield what a waiver may match: keys, patterns of the rename, keys of ``whole=``.

        So may ``THIS_SAVE``, also on ranks that all take part: one declaration serves both.
        """
        yield THIS_SAVE
        yield from save.state_dict
        yield from [step.pattern for step in save.renames]
        if self.whole is not None:
            yield from self.whole.keys_under(save.state_dict)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with each element once, and the metadata. Called on the coordinator.

        Raises:
            PlacementError: Tensors and rules that do not fit, with the ranks; or ranks that
                contradict each other, elements that nobody holds, replicas that differ. All in
                one error. In a thread or a process of its own, as with ``async_save``, it is
                logged as well: nobody may ask for the result.
        """
        try:
            return self._agree(all_plans)
        except PlacementError as refusal:
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main or multiprocessing.parent_process() is not None:
                logger.error("this save is refused: %s", refusal)
            raise

    def _agree(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans and the metadata, as ``create_global_plan``."""
        save = self._save
        save.check_thread()
        if len(all_plans) == 1:
            # Without collectives only, torch's writer names a rank's files before the global plan,
            # and a rank that is not the coordinator gets here: with no_dist=True each rank is one.
            is_named = isinstance(all_plans[0].storage_data, StoragePrefix)
            if is_named or (world_size() > 1 and not save.is_coordinator):
                raise without_collectives()
        with quiet_gc():
            sent = messages_of("save", all_plans, LocalPlan)
            if any(plan.faults for plan in sent):
                raise_faults_of_ranks(NOT_PLACED, {plan.rank: plan.faults for plan in sent})
            coordinator = Coordinator(
                sent,
                size=world_size(),
                waived=self.waive,
                strict=self.on_conflict == "error",
                whole=self.whole,
                meshes=save.meshes,
                has_rename=self.rename is not None,
            )
            if self.copies != "off" and not coordinator.complete:
                raise PlacementError("copies= needs a save by all ranks together")
            coordinator.prove()
            metadata = coordinator.metadata([] if save.holding is None else save.holding.fqns)
            coordinator.finish_report()
            save.report = coordinator.report
            save_id = uuid.uuid4().bytes
            assignments = coordinator.assign(
                lowest_rank=self.dedup_save_to_lowest_rank, save_id=save_id, copies=self.copies
            )
            # What a writer put into a local plan stays in it.
            save.global_plan = [
                dataclasses.replace(plan, planner_data=assignment)
                for plan, assignment in zip(all_plans, assignments, strict=True)
            ]
            provenance = identity(save_id, world_size=len(all_plans), step=self.step)
            provenance |= coordinator.record(metadata)
            if self.copies != "off":
                provenance[COPIES] = True
            data: dict[str, Any] = {}
            for table in coordinator.world.tables if self.flatten_state_dict else ():
                data.update(table.paths())
            data[RESERVED_KEY] = provenance
            save.metadata = Metadata(metadata, planner_data=data)
        return save.global_plan, save.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes. Called on every rank.

        Raises:
            PlacementError: The storage writer cannot write a dtype, or is torch's
                ``HuggingFaceStorageWriter`` and cannot hold a chunk or an object; or the
                coordinator has another planner; or a subclass gave the plan items.
        """
        save = self._save
        save.check_thread()
        if save.refusal:  # and the coordinator's planner is another one
            raise_faults(f"rank {global_rank()} {NOT_PLACED}", save.refusal)
        assignment, holding = new_plan.planner_data, save.holding
        is_assigned = isinstance(assignment, Assignment) and isinstance(new_plan.items, ItemsToCome)
        if not is_assigned or holding is None:
            raise PlacementError(NOT_FINISHED)
        data = new_plan.storage_data
        with quiet_gc():
            save.state_dict = {**save.state_dict, **{k: list(v) for k, v in assignment.lists}}
            items = assigned_items(holding, assignment, save, know_data=self._looks_up_itself)
            is_ours = is_named(data)
            if assignment.copied and not is_ours:
                raise PlacementError("copies= needs PlacementFileSystemWriter as storage_writer=")
            refused = f"rank {global_rank()} {NOT_PLACED}"
            if not UNWRITTEN.isdisjoint([held.group.dtype for held in holding.groups]):
                raise_faults(refused, unwritten(holding.groups, is_ours=is_ours))
            is_by_name = isinstance(data, dict) and data.keys() <= HUGGING_FACE_DATA
            if is_by_name:
                is_alone = len(save.global_plan) == 1  # else it is refused on all ranks
                raise_faults(refused, not_by_name(items, is_alone=is_alone))
            # A rank that writes nothing makes no file for its id alone.
            if items and not is_ours and not is_by_name:
                items = [*id_items(assignment.save_id, global_rank()), *items]
        save.plan = dataclasses.replace(new_plan, items=items, planner_data=None)
        return save.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a write item: a view, or an object's bytes. Called in any thread."""
        save = getattr(write_item, "save", None) or self._save
        if write_item.type == WriteItemType.BYTE_IO and (record := id_data(write_item.index)):
            return record
        value = getattr(write_item, "tensor", None)
        if value is None:
            value = self._value(save, write_item.index)
        if type(value) is ParameterNames:
            value = [*value]  # which weights_only=True reads
        data = self.transform_object(write_item, value)
        return data if type(data) is torch.Tensor else without_class(data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value at ``index``; a view of a placed tensor. Called on every rank.

        Raises:
            PlacementError: The rank has no chunk of the tensor there.
        """
        return self._save.value_at(index)

    def _value(self, save: RankSave, index: MetadataIndex) -> Any:
        """Return a save's value at ``index``, by ``lookup_object`` where that is replaced."""
        if self._looks_up_itself:
            return save.value_at(index)
        if save is not self._save:
            raise PlacementError(OVERTAKEN.format("a save", "lookup_object"))
        return self.lookup_object(index)

    @property
    def _looks_up_itself(self) -> bool:
        """Whether ``lookup_object`` is this class's own, not that of a subclass or a user."""
        own = getattr(self.lookup_object, "__func__", None)
        return own is PlacementSavePlanner.lookup_object


def assigned_items(
    holding: Holding, assignment: Assignment, save: Any, *, know_data: bool = False
) -> list[WriteItem]:
    """Return the write items that a rank was assigned; those of a group share their metadata.

    Args:
        holding: What the rank holds.
        assignment: What the rank writes of it.
        save: The ``RankSave``, which the items know.
        know_data: Whether the items know their tensors, too.
    """
    kinds = np.unpackbits(np.frombuffer(assignment.written, np.uint8))
    if assignment.copied:  # 1 in both where a box is COPIED
        kinds = kinds + np.unpackbits(np.frombuffer(assignment.copied, np.uint8))
    kind_of_cell = iter(kinds.tolist())
    items: list[WriteItem] = []
    for held in holding.groups:
        group = held.group
        # What the items of all keys share, by box.
        of_boxes: list[WriteItemOfSave] = []
        for box in held.boxes:
            if group.kind == OBJECT:
                of_boxes.append(
                    WriteItemOfSave(MetadataIndex(""), WriteItemType.BYTE_IO, save=save)
                )
                continue
            first = torch.Size(box.offsets)
            chunk = ChunkStorageMetadata(first, torch.Size(box.sizes))
            kind = WriteItemType.TENSOR if group.kind == PLAIN else WriteItemType.SHARD
            data = TensorWriteData(chunk, tensor_properties(group), torch.Size(group.shape))
            index = MetadataIndex("", first)
            of_boxes.append(WriteItemOfSave(index, kind, tensor_data=data, save=save))
        tensors = held.data() if know_data else repeat(None)
        cells = product(held.fqns, of_boxes)
        for (fqn, item), tensor in zip(cells, tensors, strict=False):
            if is_written := next(kind_of_cell):
                index = with_fields(item.index, fqn=fqn)
                items.append(
                    with_fields(item, index=index, tensor=tensor, copied=is_written == COPIED)
                )
    return items
