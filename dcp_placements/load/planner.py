"""The LoadPlanner: torch's hooks, in the order in which a load calls them."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from dcp_placements._torch import (
    DefaultLoadPlanner,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    find_state_dict_object,
    global_rank,
    leaves,
    world_size,
)
from dcp_placements.errors import (
    Fault,
    PlacementError,
    RankFaults,
    format_faults,
    raise_faults,
)
from dcp_placements.load.casting import CASTS, check_quantizer
from dcp_placements.load.exchange.shares import Verdict, verdicts
from dcp_placements.load.message import LoadMessage
from dcp_placements.load.policy import Policy, compiled, optional_patterns
from dcp_placements.load.rank_load import RankLoad
from dcp_placements.names.flat import Path, flattened
from dcp_placements.names.target import Rename
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.report import LoadReport, Traffic
from dcp_placements.rules.options import (
    ItemsToCome,
    RunAttribute,
    Runs,
    check_choice,
    check_declaration,
    of_run,
)
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.metadata.checks import check_unpickled
from dcp_placements.storage.metadata.save_ids import MIXED
from dcp_placements.storage.record_contents import DAMAGED

logger = logging.getLogger(__name__)


class PlacementLoadPlanner(DefaultLoadPlanner):
    """Loads every shard from its true place in the whole tensor.

    ``dcp.load(state_dict, checkpoint_id=path, planner=PlacementLoadPlanner(rules))`` fills the
    tensors of ``state_dict`` in place, whatever topology wrote the checkpoint.

    Args:
        rules: ``PlacementRules``, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None:
            every tensor keeps its own mesh and placements.
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's. ``Renumber``
            and the like, or any function of a key, which may return a ``Row``, ``Rows`` or
            ``Parts``.
        optional: Patterns of keys that the checkpoint may lack; they keep their values. All
            optimizer state of a parameter may always be missing (it was never stepped): it is
            reset to 0 once all is read, unless the parameter is missing, too.
        cast: What to do where the checkpoint's dtype is wider than the tensor's: ``"error"``,
            ``"warn"`` or ``"allow"``. Float into int is always an error.
        waive: ``{pattern: reason}`` of keys whose lint warnings, or differences from the save, are
            accepted.
        exchange: Ranks that need the same bytes read each once and send it to each other, along
            the axes of the rules' and the DTensors' meshes; with ``PlacementFileSystemReader``. A
            process group if the load does not run on the default one.
        flatten_state_dict: As in ``DefaultLoadPlanner``.
        flatten_sharded_tensors: As in ``DefaultLoadPlanner``.
        allow_partial_load: As in ``DefaultLoadPlanner``, but a load that matches nothing is an
            error.

    Attributes:
        report: After planning, this rank's ``LoadReport``; complete when the load has ended.
        state_dict: Flat, with the checkpoint's keys; this and the following are of the load that
            this thread plans, of a thread that plans none the latest.
        original_state_dict: As it was given.
        mappings: Where each key stands in that.
        metadata: The checkpoint's.
        is_coordinator: Whether this rank is the coordinator.

    Raises:
        PlacementError: An option with an unknown value.
    """

    state_dict: Any = RunAttribute()
    original_state_dict: Any = RunAttribute()
    mappings: Any = RunAttribute()
    metadata: Any = RunAttribute()
    is_coordinator: Any = RunAttribute()

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rename: Rename | None = None,
        optional: Iterable[str] = (),
        cast: str = "warn",
        waive: Mapping[str, str] | None = None,
        exchange: bool | dist.ProcessGroup = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        self._runs = Runs(RankLoad)
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
        )
        self.waive = check_declaration(rules, rename, waive)
        check_choice("cast", cast, CASTS)
        if not isinstance(exchange, bool | dist.ProcessGroup):
            raise PlacementError(f"exchange={exchange!r}: give True, False or a process group")
        self.rules = rules
        self.rename = rename
        self.optional = optional_patterns(optional)
        self.cast = cast
        self.exchange = exchange

    @property
    def report(self) -> LoadReport:
        """What the latest load reads on this rank."""
        return self._runs.latest.report

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill, under the checkpoint's keys. Called on every rank."""
        if metadata is not None and not isinstance(metadata, Metadata):  # called by dcp.save
            raise PlacementError(
                "a PlacementLoadPlanner cannot save: dcp.save wants a save planner"
            )
        if metadata is not None:
            check_unpickled(metadata)
        load = self._runs.begin()
        load.is_coordinator = is_coordinator
        load.metadata = metadata if metadata is not None else Metadata({})

        def by_torch(part: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
            self._set_up_by_torch(load, part)
            return load.state_dict, load.mappings

        if self.flatten_state_dict:
            load.state_dict, load.mappings = flattened(state_dict, by_torch, fills_meta=True)
            load.original_state_dict = state_dict
        else:
            by_torch(state_dict)
            load.mappings = {key: (key,) for key in load.state_dict}
        try:
            load.rename(self.rename)
        except RankFaults as refusal:
            load.refusal = refusal

    def _set_up_by_torch(self, load: RankLoad, state_dict: dict[str, Any]) -> None:
        """Take a state dict; values of types that torch does not know stay, where it drops them."""
        objects = [
            (path, value)
            for path, value in leaves(_without_tensors(state_dict))
            if value is not None and not isinstance(value, torch.Tensor)
        ]
        stock = DefaultLoadPlanner(
            flatten_state_dict=self.flatten_state_dict,
            flatten_sharded_tensors=self.flatten_sharded_tensors,
        )
        stock.set_up_planner(state_dict)
        load.original_state_dict, load.state_dict = state_dict, stock.state_dict
        load.mappings = stock.mappings
        load.restore(objects)

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads; return a plan with what the ranks compare, and no items.

        Called on every rank. ``finish_plan`` returns the items. What cannot be loaded is in the
        plan, and the coordinator raises one error for all ranks.
        """
        load, rank = self._runs.planned, global_rank()
        try:
            if load.refusal is not None:
                raise load.refusal
            with quiet_gc():
                message = self._planned(rank)
        except RankFaults as refusal:
            load.refusal = refusal
            message = LoadMessage(rank, declared=load.declared, faults=refusal.packed())
        return LoadPlan(ItemsToCome(), planner_data=message)  # type: ignore[arg-type]

    def _policy(self) -> Policy:
        optional, waived = compiled(self.optional), compiled(self.waive)
        return Policy(self.allow_partial_load, self.cast, optional, waived)

    def _planned(self, rank: int) -> LoadMessage | None:
        """Plan this rank's reads; return what is sent to the coordinator."""
        load = self._runs.planned
        policy = self._policy()
        load.place(self.rules)
        load.declare(self.rules)
        load.plan(policy, rules=self.rules, rename=self.rename, rank=rank)
        load.report.waived = dict(self.waive)
        return load.message(self.exchange, rank)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans with the answer on what each rank exchanges.

        Called on the coordinator; on every rank that loads by itself.

        Raises:
            PlacementError: What cannot be filled, or would be filled wrongly, with the ranks; or
                ranks that together ask for something else than was saved. All in one error.
        """
        plans = super().create_global_plan(global_plan)
        sent = [plan.planner_data for plan in plans]
        messages = [message for message in sent if isinstance(message, LoadMessage)]
        # Ranks that load by themselves have no others to compare with.
        complete = len(plans) >= world_size()
        self._runs.planned.judge(messages, self._policy(), complete=complete)
        claims = [one.claims if isinstance(one, LoadMessage) else None for one in sent]
        answers: list[Verdict | None] = [None] * len(plans)
        if any(claims):
            answers = [*verdicts(claims)]
        return [
            plan if plan.planner_data is None else dataclasses.replace(plan, planner_data=answer)
            for plan, answer in zip(plans, answers, strict=True)
        ]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, all ranks having agreed. Called on every rank."""
        load = self._runs.planned
        if load.refusal is not None:  # and the coordinator's planner is another one
            raise load.refusal
        load.take_verdict(new_plan.planner_data)
        try:
            plan = load.finished(new_plan)
        except Exception as error:
            if load.active_exchange is None:
                raise
            # The other ranks will ask this one whether it could read.
            load.active_exchange.failure = error
            return cast(LoadPlan, of_run(LoadPlan([]), load))
        logger.info("load: %s", load.report.line)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the storage to read into: a view of the local tensor. Called on every rank."""
        load = self._runs.of(index)
        data = load.data(index)
        if data is not None:
            return data
        tensor: torch.Tensor = find_state_dict_object(load.state_dict, index)
        # One scalar for several keys: the value of none may overwrite another one before they
        # are compared.
        return torch.empty_like(tensor) if index.fqn in load.shared else tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return where to read an item to. Called on every rank, also by several threads."""
        load = self._runs.of(read_item)
        return load.overlaps.target(read_item, self._memory(load, read_item))

    def _memory(self, load: RankLoad, read_item: ReadItem) -> torch.Tensor:
        tensor = self.lookup_tensor(of_run(read_item.dest_index, load))
        return cast(torch.Tensor, self.transform_tensor(read_item, tensor))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take what was read. Called on every rank.

        Raises:
            PlacementError: Different contents for keys that have one memory.
                Quantized values of another scale than the tensor has.
        """
        load = self._runs.of(read_item)
        if tensor.is_quantized:
            memory = self._memory(load, read_item)
            check_quantizer(read_item.dest_index.fqn, memory, tensor)
        load.take_tensor(read_item.dest_index.fqn, tensor)
        if read_item.dest_index.fqn in load.overlaps.groups:
            load.overlaps.take(read_item, self._memory(load, read_item), tensor)
        load.end_read()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict. Called on every rank.

        Raises:
            PlacementError: It is no object, or a file of another save.
        """
        load = self._runs.of(read_item)
        if (record := load.ids.get(read_item.storage_index)) is not None:
            raise_faults(MIXED, filter(None, [record.fault(value.getvalue())]))
            load.end_read()
            return
        try:
            loaded = torch.load(value, weights_only=False)
        except Exception as error:
            # Of any type, by what is in the pickle.
            text = format_faults("an object cannot be loaded", [_unreadable(read_item, error)])
            raise PlacementError(text) from error
        fqn = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            load.state_dict[fqn] = loaded
        load.take_object(fqn, loaded)
        load.end_read()

    def finish_reads(
        self, plan: LoadPlan, error: BaseException | None, *, traffic: Traffic, unchecked: int
    ) -> None:
        """Exchange what was read, if that was agreed, and end the load of this rank.

        Called by the reader, on every rank, when it has read and compared all files.

        Args:
            plan: What was read: another load of this planner may have been planned meanwhile.
            error: What went wrong while this rank read.
            traffic: What the reader moved.
            unchecked: The number of records without a checksum.

        Raises:
            PlacementError: On all ranks, where one could not read or is gone.
        """
        load = self._runs.of(plan)
        load.report.traffic, load.report.unchecked = traffic, unchecked
        exchange = load.active_exchange
        if exchange is not None:

            def lookup(index: MetadataIndex) -> torch.Tensor:
                return self.lookup_tensor(of_run(index, load))

            exchange.finish(error, lookup, load.report)
        elif error is not None:
            raise error
        load.end_reads()


def _unreadable(item: ReadItem, error: Exception) -> Fault:
    if isinstance(error, ImportError | AttributeError):
        details = (
            "likely:      its class is not there under the name that it had when it was saved",
            "way out:     make the class importable; or leave this key out of the state dict",
        )
    else:
        details = DAMAGED
    return Fault(item.storage_index.fqn, f"{type(error).__name__}: {error}", details)


def _without_tensors(value: Any) -> Any:
    """Return a nested dict without the tensors in its dicts, which are most of its leaves."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _without_tensors(each)
        for key, each in value.items()
        if not isinstance(each, torch.Tensor)
    }
