"""The LoadPlanner: torch's hooks, in the order in which a load calls them.

A planner may have several loads under way: a ``RankLoad`` has what one load on one rank knows. It
ends with the plan that the reader gets; each item, and the plan, name it::

    RankLoad(state_dict={"experts.w1": ...}, items=[ReadItemOfLoad(...)], report=LoadReport(...))
"""

from __future__ import annotations

import dataclasses
import io
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    LoadPlan,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

from dcp_placements._torch import (
    facts_of,
    global_rank,
    traverse_state_dict,
    world_size,
)
from dcp_placements.bind.binding import Placing
from dcp_placements.bind.checks import equal_values
from dcp_placements.bind.place import optimizer_faults, place
from dcp_placements.errors import (
    Fault,
    PlacementError,
    RankFaults,
    format_faults,
    format_ranks,
    packed_faults,
    raise_faults,
    raise_faults_of_ranks,
    unpacked_faults,
)
from dcp_placements.load.casting import CASTS, check_quantizer
from dcp_placements.load.compare import (
    Asked,
    LoadChecks,
    asked_faults,
    check_load,
    unstacked_faults,
)
from dcp_placements.load.exchange import Answer, Exchange, Wish, answers
from dcp_placements.load.missing import Policy, Resets, compiled, lacking_rows, optional_patterns
from dcp_placements.load.reads import Group, Request, fleeting_faults
from dcp_placements.load.tied import Overlaps, overlaps_of, self_overlap_faults
from dcp_placements.names.flat import Path, Reshaped, put_at, rename_keys
from dcp_placements.names.target import Rename
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.report import LoadReport, Traffic
from dcp_placements.rules.patterns import Rules, check_declaration
from dcp_placements.rules.unmatched import (
    Matches,
    matched_nowhere,
    rule_matches,
    unmatched_faults,
)
from dcp_placements.runs import ItemsToCome, ReadItemOfLoad, RunAttribute, Runs
from dcp_placements.storage.index.storage_table import places_of
from dcp_placements.storage.metadata.checks import check_unpickled
from dcp_placements.storage.metadata.provenance import saved_by, stored
from dcp_placements.storage.metadata.save_ids import MIXED, IdRecord, id_records, speaking_for
from dcp_placements.storage.record_contents import DAMAGED

logger = logging.getLogger(__name__)

REFUSED = "cannot be loaded from this checkpoint"


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """What one rank sends.

    Attributes:
        rank: Its global rank.
        wish: What it could have from other ranks; None where it does not exchange.
        declared: What is declared by pattern, and whether a key of the rank matches; None where
            it is refused before that is known.
        asked: What it asks for of wholes that ranks divide; None where it does not compare.
        notes: Declarations that are probably wrong, packed.
        save: Which save wrote the checkpoint that this rank reads; empty where nothing tells.
        faults: Why it cannot load, packed; it has no plan then.
    """

    rank: int
    wish: Wish | None = None
    declared: Matches | None = field(default_factory=dict)
    asked: Asked | None = None
    notes: bytes = b""
    save: str = ""
    faults: bytes = b""

    def with_reader(self) -> LoadMessage:
        """Return it with its wish marked: the rank's reader calls the exchange."""
        if self.wish is None:
            return self
        return replace(self, wish=self.wish._replace(has_hook=True))


def all_notes(messages: Iterable[LoadMessage]) -> list[Fault]:
    """Return the notes of all ranks, each once."""
    notes: dict[Fault, None] = {}
    for packed in dict.fromkeys(message.notes for message in messages if message.notes):
        notes.update(dict.fromkeys(unpacked_faults(packed)))
    return list(notes)


def mixed_checkpoints(messages: Iterable[LoadMessage]) -> list[Fault]:
    """Return that ranks read the metadata of different checkpoints, if they do."""
    ranks: dict[str, list[int]] = {}
    for message in messages:
        ranks.setdefault(message.save, []).append(message.rank)
    if len(ranks) < 2:
        return []
    return [
        Fault(
            "this load",
            "the ranks read different checkpoints",
            (
                *(
                    f"read:        {save or 'one without a save id'} by {format_ranks(members)}"
                    for save, members in ranks.items()
                ),
                "likely:      each rank looked for the latest checkpoint by itself, or the "
                "checkpoint was replaced meanwhile",
                "way out:     choose the directory on one rank, and broadcast it to the others",
            ),
        )
    ]


def unmatched_of(messages: Sequence[LoadMessage]) -> tuple[str, ...]:
    """Return what is declared by pattern and matches no key on any rank, where all ranks know."""
    declared = [message.declared for message in messages]
    known = [matches for matches in declared if matches is not None]
    return matched_nowhere(known) if len(known) == len(declared) else ()


@dataclass
class RankLoad:
    """The state of one load on one rank.

    Attributes:
        original_state_dict: The user's, nested.
        state_dict: Flat, with the checkpoint's keys.
        mappings: Where each key stands in the nested dict.
        metadata: The checkpoint's.
        is_coordinator: Whether this rank is the coordinator.
        local_keys: The rank's own keys.
        refusal: Why the rank cannot load; the coordinator raises it for all ranks.
        placing: The tensors' places.
        copies: Further places of an object that several local keys have as one.
        shared: By key, the name of the scalar or object that stands for several keys.
        totals: The number of rows of each tensor that is unstacked, by their key with ``{}``.
        collapsed: By scalar of which the checkpoint has one per row, the number of rows.
        resets: The optimizer state of parameters that are read without any.
        items: What the rank reads.
        groups: Its tensors, by what fills them.
        checks: How the load compares with the save.
        overlaps: The keys that overlap in memory.
        ids: The records of save ids that are read.
        exchange: None where nothing can be exchanged.
        report: The report on the load.
        declared: What is declared by pattern, and whether a key of this rank matches; None before
            that is known.
    """

    original_state_dict: dict[str, Any] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    is_coordinator: bool = False
    local_keys: set[str] = field(default_factory=set)
    refusal: RankFaults | None = None
    placing: Placing = field(default_factory=Placing)
    copies: dict[str, list[Path]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    collapsed: Mapping[str, torch.Size] = field(default_factory=dict)
    resets: Resets = field(default_factory=lambda: Resets({}, {}, Placing()))
    items: list[ReadItem] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    checks: LoadChecks = field(default_factory=LoadChecks)
    overlaps: Overlaps = field(default_factory=lambda: Overlaps({}))
    ids: Mapping[MetadataIndex, IdRecord] = field(default_factory=dict)
    exchange: Exchange | None = None
    report: LoadReport = field(default_factory=lambda: LoadReport(planned=False))
    declared: Matches | None = None
    _reshaped: Reshaped | None = None
    _rename_matches: Matches = field(default_factory=dict)
    # By scalar or object, the first key whose value was read, and the value.
    _first_values: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankLoad, ()  # a plan that is sent has no tensors

    def restore(self, values: Iterable[tuple[Path, Any]]) -> None:
        """Put values of types that torch does not know back; torch replaces them by None."""
        for path, value in values:
            put_at(self.original_state_dict, path, value)
            key = ".".join(map(str, path))
            if key in self.state_dict:
                self.state_dict[key] = value

    def rename(self, rename: Rename | None) -> None:
        """Replace this rank's keys by the checkpoint's.

        Raises:
            RankFaults: Keys that cannot be renamed.
        """
        self.local_keys = set(self.state_dict)
        if rename is not None:
            renamed = rename_keys(self.state_dict, self.mappings, rename)
            self.state_dict, self.mappings, self._reshaped, self._rename_matches = renamed

    def place(self, rules: Rules | None) -> None:
        """Work out the places of the tensors, and which patterns of the user's match a key."""
        stored_keys = self.metadata.state_dict_metadata
        placing = place(self.state_dict, rules, self.mappings, self._reshaped, stored_keys)
        self.placing = placing
        self.state_dict, self.mappings = placing.state_dict, placing.mappings
        self.copies, self.shared, self.totals = placing.copies, placing.shared, placing.totals
        self.declared = {**rule_matches(rules, self.placing.matched), **self._rename_matches}

    def plan(
        self,
        policy: Policy,
        *,
        rules: Rules | None,
        rename: Rename | None,
        rank: int,
        is_known: bool = False,
    ) -> None:
        """Plan the reads, and compare the load with the save.

        Args:
            policy: What is accepted.
            rules: The user's rules.
            rename: The user's renaming.
            rank: The global rank, for messages.
            is_known: Whether no hook of the user's tells where each item is read to.

        Raises:
            RankFaults: What cannot be filled, or would be filled wrongly; all in one error.
        """
        state_dict, placing, metadata = self.state_dict, self.placing, self.metadata
        request = Request(state_dict, placing, metadata, policy, self.local_keys)
        self.items = request.items(self, is_known=is_known)
        self.groups = [
            group for group in request.groups if isinstance(group.entry, TensorStorageMetadata)
        ]
        self.report = report = request.report
        self.collapsed = request.collapsed
        self.resets = Resets(
            request.reset, state_dict, placing, [f for group in request.groups for f in group.fqns]
        )
        alone = {*self.shared, *self.collapsed}
        destinations = request.destinations()
        self.overlaps = overlaps_of(destinations, alone)
        faults = [*lacking_rows(request.stateless, self.shared), *placing.faults]
        # A tensor without its place has another shape, which is no fault of its own.
        placeless = {fault.fqn for fault in placing.faults}
        faults += [fault for fault in request.faults if fault.fqn not in placeless]
        self.checks = checks = check_load(request, metadata, rules, rename)
        report.compared = checks.compared
        faults += unstacked_faults(self.totals, metadata.state_dict_metadata, policy)
        faults += [*checks.faults, *fleeting_faults(state_dict, placing)]
        faults += optimizer_faults(state_dict, placing, rename)
        faults += self_overlap_faults(destinations)
        if faults:
            raise RankFaults(f"rank {rank} {REFUSED}", faults)
        self.warn(request.notes)
        # The coordinator warns of these, once for all ranks.
        report.warnings += tuple(map(str, checks.notes))

    def warn(self, notes: Sequence[Fault]) -> None:
        """Warn of what is accepted, and keep it in the report."""
        if notes:
            self.report.warnings += tuple(map(str, notes))
            warnings.warn(format_faults("look at this load", notes, "note"), stacklevel=3)

    def message(self, exchange: bool | dist.ProcessGroup, rank: int) -> LoadMessage:
        """Return what is sent to the coordinator."""
        wish: Wish | None = None
        if exchange is not False and world_size() > 1:
            self.exchange = Exchange(None if exchange is True else exchange)
            own = {*self.shared, *self.shared.values(), *self.collapsed, *self.overlaps.groups}
            fqns = {fqn for group in self.groups for fqn in group.fqns}
            with quiet_gc():
                wish = self.exchange.wish(self.state_dict, self.placing, fqns - own)
        return LoadMessage(
            rank=rank,
            wish=wish,
            declared=self.declared,
            asked=self.checks.asked,
            notes=packed_faults(self.checks.notes),
            save=saved_by(self.metadata) if world_size() > 1 else "",
        )

    def judge(self, messages: Sequence[LoadMessage], policy: Policy, *, complete: bool) -> None:
        """Refuse, or warn of, what all ranks together show. Called on the coordinator.

        Args:
            messages: Of the ranks that sent one.
            policy: What is accepted.
            complete: Whether all ranks take part in this plan.

        Raises:
            PlacementError: What single ranks refuse; or ranks that together ask for something else
                than was saved.
        """
        unmatched = unmatched_of(messages) if complete else ()
        self.report.unmatched = unmatched
        # Listed with the faults, too: a mistake in a pattern may be their cause.
        mistakes = unmatched_faults(unmatched, list(self.state_dict))
        sent = {message.rank: message.faults for message in messages}
        if any(sent.values()):
            raise_faults_of_ranks(REFUSED, sent, mistakes)
        if notes := all_notes(messages):
            warnings.warn(format_faults("look at this load", notes, "note"), stacklevel=3)
        if complete:
            raise_faults("nothing can be loaded", mixed_checkpoints(messages))
        elif self.checks.record is not None:
            self.report.compared += ", but not with what other ranks ask for"
        asked = {one.rank: one.asked for one in messages if one.asked is not None}
        faults = asked_faults(asked, self.checks.record, self.metadata, policy, complete=complete)
        if faults:
            raise_faults("the ranks do not ask for what was saved", [*faults, *mistakes])
        self.warn(mistakes)

    def take_answer(self, answer: Any) -> None:
        """Take the coordinator's answer on what is exchanged."""
        if self.exchange is not None:
            self.exchange.answer = answer if isinstance(answer, Answer) else Answer()

    @property
    def active_exchange(self) -> Exchange | None:
        """The exchange, where the coordinator granted one."""
        return (
            self.exchange if self.exchange is not None and self.exchange.answer.is_active else None
        )

    def finished(self, plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, its part of an exchange alone.

        Args:
            plan: As the coordinator sent it.
        """
        items = self.items
        if self.active_exchange is not None:
            with quiet_gc():
                items = self.active_exchange.share(items, self.metadata, self.report)
        if self.exchange is not None:
            self.warn(self.exchange.answer.notes)
        self.overlaps.expect(items)
        ids = self._id_reads(items)
        final = [*ids, *items, *ids] if ids else items
        # Only the reader of this package has other mappings, and it tells when it has compared the
        # files: that is later than the last item.
        if self.resets and type(self.metadata.storage_data) is dict:
            self.resets.expect(len(final))
            if not final and self.active_exchange is None:
                self.end_reads()
        return replace(plan, items=final, planner_data=self)

    def end_read(self) -> None:
        """Take in that an item was read, by a reader that calls the planner for every item."""
        if self.resets and self.resets.are_due() and self.active_exchange is None:
            self.end_reads()

    def end_reads(self) -> None:
        """Take in that all has been read: what the checkpoint has no state of is reset."""
        self.warn(self.resets.apply(self.original_state_dict, self.mappings))

    def _id_reads(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Return the reads of the save ids in the files that items are read from.

        A file is compared before and after its records are read: a save may begin meanwhile.

        None where ``storage_data`` is no dict: only the reader of this package has other mappings,
        and it compares the ids by itself.
        """
        files = self.metadata.storage_data
        if type(files) is not dict or stored(self.metadata) is None:
            return []
        self.ids = {record.index: record for record in id_records(files).values()}
        if not self.ids:
            return []
        names = {info.relative_path for info in places_of(items, files)}
        records = {record.file: record for record in self.ids.values()}
        items = [record.read_item() for record in speaking_for(names, records)]
        return [ReadItemOfLoad(**vars(item), run=self) for item in items]

    def data(self, index: MetadataIndex) -> torch.Tensor | None:
        """Return the memory to read into at ``index``; None for tensors without a place."""
        if index.fqn in self.collapsed:
            return self._scalar(index.fqn).new_empty(self.collapsed[index.fqn])
        if (placed := self.placing.placed.get(index.fqn)) is None:
            return None
        assert index.index is not None
        return placed.view(placed.chunks[index.index])

    @property
    def takes_reads(self) -> bool:
        """Whether anything is done when a tensor has been read."""
        return bool(self.shared or self.collapsed or self.overlaps.groups or self.resets)

    def take_tensor(self, fqn: str, tensor: torch.Tensor) -> None:
        """Take what was read for a scalar that stands for several rows.

        Raises:
            PlacementError: The rows differ.
        """
        if fqn in self.shared or fqn in self.collapsed:
            for number in tensor.flatten().tolist():
                self._take_value(fqn, number)
                self._scalar(fqn).fill_(number)

    def take_object(self, fqn: str, value: Any) -> None:
        """Put an object that was read into all its places.

        Raises:
            PlacementError: It stands for several rows, and they differ.
        """
        if fqn in self.shared:
            self._take_value(fqn, value)
        for path in (self.mappings[fqn], *self.copies.get(fqn, ())):
            put_at(self.original_state_dict, path, value)

    def _scalar(self, fqn: str) -> torch.Tensor:
        return facts_of(self.state_dict[fqn])[0].detach()

    def _take_value(self, fqn: str, value: Any) -> None:
        """Compare one of several values that become one here with the first of them."""
        name = self.shared.get(fqn, fqn)
        first, first_value = self._first_values.setdefault(name, (fqn, value))
        if equal_values(first_value, value):
            return
        values = f"{first_value!r} and {value!r}"
        if first != fqn:
            values = f"{first_value!r} for {first} and {value!r} for {fqn}"
        fault = Fault(
            name,
            f"rank {global_rank()} has one value for all rows, but the checkpoint has {values}",
            (
                "likely:      each row had an optimizer state of its own, and their steps differed",
                "way out:     load it into one tensor per row; or leave this key out",
            ),
        )
        raise PlacementError(format_faults("rows cannot be loaded as one", [fault]))


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
        if cast not in CASTS:
            raise PlacementError(f"cast={cast!r}: choose one of {CASTS}")
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

        self._set_up_by_torch(load, state_dict)
        try:
            load.rename(self.rename)
        except RankFaults as refusal:
            load.refusal = refusal

    def _set_up_by_torch(self, load: RankLoad, state_dict: dict[str, Any]) -> None:
        """Take a state dict; values of types that torch does not know stay, where it drops them."""
        objects: list[tuple[Path, Any]] = []

        def keep(path: Path, value: Any) -> None:
            if value is not None and not isinstance(value, torch.Tensor):
                objects.append((path, value))

        traverse_state_dict(_without_tensors(state_dict), keep)
        stock = DefaultLoadPlanner(
            flatten_state_dict=self.flatten_state_dict,
            flatten_sharded_tensors=self.flatten_sharded_tensors,
        )
        stock.set_up_planner(state_dict)
        load.original_state_dict, load.state_dict = state_dict, stock.state_dict
        load.mappings = stock.mappings or {key: (key,) for key in stock.state_dict}
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
            message = LoadMessage(
                rank, declared=load.declared, faults=packed_faults(refusal.faults)
            )
        return LoadPlan(ItemsToCome(), planner_data=message)  # type: ignore[arg-type]

    def _policy(self) -> Policy:
        optional, waived = compiled(self.optional), compiled(self.waive)
        return Policy(self.allow_partial_load, self.cast, optional, waived)

    def _planned(self, rank: int) -> LoadMessage:
        """Plan this rank's reads; return what is sent to the coordinator."""
        load = self._runs.planned
        policy = self._policy()
        load.place(self.rules)
        known = self._has_own("lookup_tensor")
        load.plan(policy, rules=self.rules, rename=self.rename, rank=rank, is_known=known)
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
        wishes = [one.wish if isinstance(one, LoadMessage) else None for one in sent]
        given: list[Answer | None] = [None] * len(plans)
        if any(wishes):
            ranks = [getattr(one, "rank", at) for at, one in enumerate(sent)]
            given = [*answers(wishes, ranks)]
        return [
            plan if plan.planner_data is None else dataclasses.replace(plan, planner_data=answer)
            for plan, answer in zip(plans, given, strict=True)
        ]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, all ranks having agreed. Called on every rank."""
        load = self._runs.planned
        if load.refusal is not None:  # and the coordinator's planner is another one
            raise load.refusal
        load.take_answer(new_plan.planner_data)
        try:
            plan = load.finished(new_plan)
        except Exception as error:
            if load.active_exchange is None:
                raise
            # The other ranks will ask this one whether it could read.
            load.active_exchange.failure = error
            return LoadPlan([], planner_data=load)
        logger.info("%s", load.report)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the storage to read into: a view of the local tensor. Called on every rank."""
        load = self._runs.planned
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

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a destination that an item fills. Called on every rank."""
        if read_item.lengths == tensor.shape:
            return tensor
        return cast(torch.Tensor, super().transform_tensor(read_item, tensor))

    def resolve_tensors(self, items: Sequence[ReadItem]) -> list[torch.Tensor]:
        """Return what ``resolve_tensor`` returns of each item; the items are of one load."""
        load = self._runs.of(items[0])
        if load.overlaps.groups or not self._has_own("resolve_tensor", "transform_tensor"):
            return [self.resolve_tensor(item) for item in items]
        chunks = [getattr(item, "chunk", None) for item in items]
        return [
            self.resolve_tensor(item) if chunk is None or item.lengths != chunk.shape else chunk
            for item, chunk in zip(items, chunks, strict=True)
        ]

    def commit_tensors(self, items: Sequence[ReadItem], tensors: Sequence[torch.Tensor]) -> None:
        """Take what was read, as ``commit_tensor`` takes each; the items are of one load."""
        load = self._runs.of(items[0])
        is_taken = load.takes_reads or any([tensor.is_quantized for tensor in tensors])
        if is_taken or not self._has_own("commit_tensor"):
            for item, tensor in zip(items, tensors, strict=True):
                self.commit_tensor(item, tensor)

    def _has_own(self, *hooks: str) -> bool:
        """Whether no subclass, and no user, has put other hooks in the place of these."""
        return all(
            getattr(getattr(self, hook), "__func__", None) is getattr(PlacementLoadPlanner, hook)
            for hook in hooks
        )

    def _memory(self, load: RankLoad, read_item: ReadItem) -> torch.Tensor:
        chunk: torch.Tensor | None = getattr(read_item, "chunk", None)
        if chunk is None:
            chunk = self._runs.inside(load, self.lookup_tensor, read_item.dest_index)
        return self.transform_tensor(read_item, chunk)

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
        planned = plan.planner_data
        load = planned if isinstance(planned, RankLoad) else self._runs.planned
        load.report.traffic, load.report.unchecked = traffic, unchecked
        exchange = load.active_exchange
        if exchange is not None:

            def lookup(index: MetadataIndex) -> torch.Tensor:
                return self._runs.inside(load, self.lookup_tensor, index)

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
