"""The LoadPlanner: torch's hooks, in the order in which a load calls them.

A rank's state dict becomes a ``Request``, and the items of the plan name the ``Arrival`` that takes
what is read::

    set_up_planner      RankLoad(state_dict, mappings, metadata)
    create_local_plan   RankLoad.request; the coordinator gets a LoadMessage
    finish_plan         RankLoad.arrival, and ReadItemOfLoad(..., load=arrival)
    commit_tensor       arrival.take("experts.w1", memory, tensor)
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    ReadItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import global_rank, is_on_meta, set_up_by_torch, world_size
from dcp_placements.bind.lint import lint
from dcp_placements.bind.place import numberings, place
from dcp_placements.bind.tensor_memory import memory_faults
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
    packed_faults,
    raise_faults,
    raise_faults_of_ranks,
)
from dcp_placements.items import (
    NOT_FINISHED,
    OVERTAKEN,
    ItemsToCome,
    RankWork,
    held_by,
    object_read,
    quiet_gc,
)
from dcp_placements.load.all_asked import AllAsked, unasked_notes
from dcp_placements.load.arrival import WARNING, Arrival, Exchange, warn
from dcp_placements.load.casting import CASTS
from dcp_placements.load.compare import check_load, notes_of_save
from dcp_placements.load.load_message import LoadMessage
from dcp_placements.load.missing import Policy
from dcp_placements.load.rename_differences import unnumbered_rows
from dcp_placements.load.renamed_states import renamed_states
from dcp_placements.load.request import NOTHING, Request, request_of
from dcp_placements.load.tied_states import TiedStates, tied_states
from dcp_placements.names.flat import Path, RenamedKeys, check_texts, put_at, rename_keys
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import recorded
from dcp_placements.report import LoadReport, Traffic
from dcp_placements.rules.patterns import (
    Rules,
    check_declaration,
    compile_pattern,
    matched_nowhere,
    unmatched_faults,
    waiver_matches,
)
from dcp_placements.storage.index import locations_of
from dcp_placements.storage.provenance import provenance_of, saved_by
from dcp_placements.storage.record_reads import DAMAGED, IS_DAMAGED
from dcp_placements.storage.save_ids import (
    MIXED,
    id_fault,
    id_records,
    ids_to_check,
)
from dcp_placements.storage.torch_metadata import check_fields, refusing
from dcp_placements.table.must_agree import disagreements
from dcp_placements.table.statement import Statement, messages_of, stated
from dcp_placements.table.whole import WholeModel, compare_with_whole

logger = logging.getLogger(__name__)

NOT_LOADED = "cannot be loaded from this checkpoint"

_NO_CLASS = (
    "likely:      its class is not there under the name that it had when it was saved",
    "way out:     make the class importable; or leave this key out of the state dict",
)


_NOT_RENAMED = rename_keys({}, {}, None)


@dataclass
class RankLoad(RankWork):
    """One load on one rank, as far as torch's hooks have come with it.

    Attributes:
        original_state_dict: The user's, nested.
        state_dict: Flat, with the checkpoint's keys.
        mappings: Where each key stands in the nested dict.
        metadata: The checkpoint's.
        is_coordinator: Whether this rank is the coordinator.
        rename: The user's rename, and that of the state of tied weights.
        renamed: What the rename made of the keys.
        refusal: Why the rank cannot load; the coordinator raises it for all ranks.
        policy: What it accepts.
        request: What it asks of the checkpoint.
        exchange: None where nothing is exchanged.
        arrival: What takes what is read; None before the plan is finished.
        report: The report on the load.
    """

    original_state_dict: dict[str, Any] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    is_coordinator: bool = False
    rename: Rename | None = None
    renamed: RenamedKeys = _NOT_RENAMED
    refusal: Sequence[Fault] = ()
    policy: Policy = field(default_factory=Policy)
    request: Request = NOTHING
    exchange: Exchange | None = None
    arrival: Arrival | None = None
    report: LoadReport = field(default_factory=lambda: LoadReport(planned=False))


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
            optimizer state of a parameter may always be missing (it was never stepped): once all is
            read, it is reset to what it is before a first step.
        cast: What to do where the checkpoint's dtype is wider than the tensor's: ``"error"``,
            ``"warn"`` or ``"allow"``. Float into int is always an error.
        waive: ``{pattern: reason}`` of keys whose lint warnings, or differences from the save, are
            accepted.
        exchange: Ranks that need the same bytes read each once and send it to each other; with
            ``PlacementFileSystemReader``. A process group if the load does not run on the default
            one.
        allow_partial_load: As in ``DefaultLoadPlanner``, whose the options that are not listed are,
            too; but a load that matches nothing is an error.
        whole: The unsharded model, which the keys and shapes of all ranks are compared with, as in
            ``Placements``.

    Attributes:
        report: After planning, this rank's ``LoadReport``; complete when the load has ended.
        state_dict: Flat, with the checkpoint's keys; this and the other attributes of torch's
            planner are of the load that was set up last.

    Raises:
        PlacementError: An option with an unknown value.
    """

    state_dict: Any = held_by("_load", "state_dict")
    original_state_dict: Any = held_by("_load", "original_state_dict")
    mappings: Any = held_by("_load", "mappings")
    metadata: Any = held_by("_load", "metadata")
    is_coordinator: Any = held_by("_load", "is_coordinator")

    refused: Sequence[Fault] = ()
    """Faults for which each load is refused on all ranks, as those of a declaration that failed."""

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
        whole: Any = None,
    ) -> None:
        self._load = RankLoad()
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
        self.cast = cast
        self.exchange = exchange
        self.whole = None if whole is None else WholeModel.of(whole)
        if not isinstance(optional, Iterable):
            raise PlacementError(f"optional={optional!r}: give patterns of keys")
        patterns = [optional] if isinstance(optional, str) else optional
        self._patterns = [[*map(compile_pattern, some)] for some in (patterns, self.waive)]

    @property
    def report(self) -> LoadReport:
        """What the latest load reads on this rank."""
        return self._load.report

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill, under the checkpoint's keys. Called on every rank."""
        if metadata is not None and not hasattr(metadata, "state_dict_metadata"):
            if hasattr(state_dict, "state_dict_metadata"):  # in place of self: the state dict
                raise PlacementError("planner= is the class of a load planner: give an instance")
            raise PlacementError(
                "planner= of a save is a load planner\n    way out:     placements.save_planner()"
            )
        if metadata is not None:
            with refusing():
                check_fields(metadata)
        if not self.flatten_state_dict:  # else torch refuses them
            check_texts(state_dict)
        # Torch's load planner would drop values of types that it does not know.
        stock = set_up_by_torch(DefaultSavePlanner, self, state_dict)
        flat = stock.state_dict
        mappings = stock.mappings or {key: (key,) for key in flat}
        if meta := {key: value for key, value in flat.items() if is_on_meta(value)}:
            # It gives them memory, where a tensor is put into the dict.
            DefaultLoadPlanner(flatten_sharded_tensors=False).set_up_planner(meta)
            flat |= meta
            for key, value in meta.items():
                put_at(state_dict, mappings[key], value)
        load = self.begin(flat, mappings, Metadata({}) if metadata is None else metadata)
        load.original_state_dict, load.is_coordinator = state_dict, is_coordinator

    def begin(
        self, state_dict: dict[str, Any], mappings: dict[str, Path], metadata: Metadata
    ) -> RankLoad:
        """Return a new load of a flat state dict, of which this rank's keys are renamed.

        Args:
            state_dict: The values to fill, by this rank's key.
            mappings: Where each value stands in the user's state dict, by this rank's key.
            metadata: Those of the checkpoint.
        """
        self._load = load = RankLoad(refusal=self.refused)
        load.metadata, load.state_dict, load.mappings = metadata, state_dict, mappings
        if self.rename is not None and not load.refusal:
            load.renamed = renamed = rename_keys(state_dict, mappings, self.rename, may_share=True)
            load.refusal = renamed.faults
            if not load.refusal:
                load.state_dict, load.mappings = renamed.state_dict, renamed.mappings
        load.rename, stored = self.rename, metadata.state_dict_metadata
        of_tied = None
        if any(fqn not in stored for fqn in load.state_dict if "state." in fqn):
            of_tied = tied_states(load.state_dict, stored, self.rename)
        if of_tied is not None:
            load.rename, new = of_tied, of_tied.renamed
            load.state_dict = {new(fqn): value for fqn, value in load.state_dict.items()}
            load.mappings = {new(fqn): path for fqn, path in load.mappings.items()}
            if load.renamed.reshaped is not None:
                reshaped = of_tied.reshaped(load.renamed.reshaped)
                load.renamed = load.renamed._replace(reshaped=reshaped)
        return load

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads; return a plan with what the ranks compare, and no items.

        Called on every rank. ``finish_plan`` returns the items. What cannot be loaded is in the
        plan, and the coordinator raises one error for all ranks.
        """
        load = self._load
        load.check_thread()
        message = LoadMessage(global_rank())
        if not load.refusal:
            with quiet_gc():
                message = self._planned(load)
        if load.refusal:
            faults = packed_faults(load.refusal)
            message = LoadMessage(message.rank, message.statement, faults=faults)
        return LoadPlan(ItemsToCome(), planner_data=message)  # type: ignore[arg-type]

    def _planned(self, load: RankLoad) -> LoadMessage:
        """Plan the reads, compare the load with the save, and return what the coordinator gets.

        What cannot be filled, or would be filled wrongly, is the refusal of the load.
        """
        rename, renamed = self.rename, load.renamed
        # By the options as they are now: a subclass may have set some.
        load.policy = policy = Policy(self.allow_partial_load, self.cast, *self._patterns)
        placing = place(
            *(load.state_dict, self.rules, load.mappings, renamed.reshaped, load.rename),
            has_contents=False,
        )
        request = request_of(placing, load.metadata, policy, load.original_state_dict)
        load.state_dict, load.mappings = request.asked.state_dict, placing.mappings
        load.request, load.report = request, request.report()
        if isinstance(load.rename, TiedStates):
            load.report.tied = {**load.report.tied, **load.rename.names}
        waivers = waiver_matches(self.waive, self._waivable(load)) if self.waive else {}
        load.report.waived = dict(self.waive)
        given = {} if rename is None else numberings(placing, renamed.numbered)
        statement = Statement(
            matched=placing.matched,
            declared={**renamed.matches, **waivers},
            renames=() if rename is None else recorded(rename),
            numberings=given,
            has_whole=self.whole is not None,
            checkpoint=saved_by(load.metadata) if world_size() > 1 else "",
            declares=self.rules is not None or rename is not None,
            reset=request.missing.unexcused,
        )
        # A tensor without its place has another shape, which is no fault of its own.
        placeless = {fault.fqn for fault in placing.faults}
        faults = placing.faults + [fault for fault in request.faults if fault.fqn not in placeless]
        differing, load.report.compared = check_load(request, rename, given)
        faults += [*differing, *memory_faults(placing, request.destinations)]
        if faults:
            load.refusal = faults
            return LoadMessage(global_rank(), statement.packed())
        waived = policy.waived
        notes = [*request.notes]
        notes += lint(placing.placed.values(), renamed=rename is not None, waived=waived)
        notes += notes_of_save(request, statement.renames)
        load.report.warnings += tuple(map(str, notes))
        statement = replace(statement, notes=tuple(notes))
        message = LoadMessage(global_rank(), statement.packed())
        if world_size() > 1 or self.whole is not None:
            message = replace(message, sent=request.holding.packed())
        if world_size() > 1 and self.exchange is not False:
            from dcp_placements.exchange.sending import ReplicaExchange

            load.exchange = ReplicaExchange(None if self.exchange is True else self.exchange)
            wish, group = load.exchange.wish(request), load.exchange.group
            message = replace(message, wish=wish, group=group)
        return message

    def _waivable(self, load: RankLoad) -> Iterator[str]:
        """Yield what a waiver may name: a key of this rank, the checkpoint or ``whole=``, a step.

        A load of weights alone may have the waivers of a declaration for the optimizer as well.
        """
        yield from load.state_dict
        yield from load.metadata.state_dict_metadata
        steps = () if self.rename is None else recorded(self.rename)
        record = load.request.asked.record
        yield from [step.pattern for step in (*steps, *(record.renames if record else ()))]
        if self.whole is not None:
            yield from self.whole.keys_under(load.state_dict)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans with the answer on what each rank exchanges.

        Called on the coordinator; on every rank that loads by itself.

        Raises:
            PlacementError: What cannot be filled, or would be filled wrongly, with the ranks; or
                ranks that together ask for something else than was saved. All in one error.
        """
        load = self._load
        load.check_thread()
        plans = super().create_global_plan(global_plan)
        messages = messages_of("load", plans, LoadMessage)
        self._judge(load, messages)
        given: Sequence[Any] = [None] * len(plans)
        if any(message.wish is not None for message in messages):
            from dcp_placements.exchange.readers import answers

            given = answers(messages)
        return [
            replace(plan, planner_data=answer) for plan, answer in zip(plans, given, strict=True)
        ]

    def _judge(self, load: RankLoad, messages: Sequence[LoadMessage]) -> None:
        """Refuse, or warn of, what all ranks together show."""
        report, own, policy = load.report, load.request.asked, load.policy
        # Ranks that load by themselves have no others to compare with.
        complete = len(messages) >= world_size()
        different = [*stated((m.rank, m.statement) for m in messages if m.statement).values()]
        statements = [statement for statement, _ in different]
        has_all = complete and all(message.statement for message in messages)
        matches = [*chain(*[(statement.matched, statement.declared) for statement in statements])]
        report.unmatched = unmatched = matched_nowhere(matches) if has_all else ()
        # They are listed with the faults, too: a mistake in a pattern may be the cause.
        mistakes = unmatched_faults(unmatched, list(load.state_dict)) if unmatched else []
        refused = {message.rank: message.faults for message in messages}
        if any(refused.values()):
            raise_faults_of_ranks(NOT_LOADED, refused, mistakes)
        if notes := dict.fromkeys(chain(*[statement.notes for statement in statements])):
            warnings.warn(format_faults(WARNING, notes, "note"), stacklevel=3)
        if len(different) > 1:
            disagreement, _ = disagreements(different, "this load")
            raise_faults("nothing can be loaded", disagreement)
        if not complete and own.record is not None:
            report.compared += ", but not with what other ranks ask for"
        asking = [message.rank for message in messages if message.sent is not None]
        tables = [message.sent for message in messages if message.sent is not None]
        asked = AllAsked(asking, tables, different, own.record, own.stored, policy, complete)
        faults: list[Fault] = []
        if self.whole is not None:
            compared = compare_with_whole(
                self.whole,
                asked.world,
                asked.states,
                [*policy.waived, *policy.optional],
                complete=complete and not policy.partial,
                may_lack_levels=True,
            )
            faults, report.whole = compared.faults, compared.text
            mistakes += compared.notes
        faults += asked.faults()
        if not complete:
            faults += unnumbered_rows(own, self.rename)
        has_resets = any(statement.reset for statement in statements)
        unasked = asked.unasked(own.state_dict) if has_resets or report.unread else []
        if has_resets:
            faults += renamed_states(asked, unasked)
        if faults:
            raise_faults("the ranks do not ask for what was saved", [*faults, *mistakes])
        # A rank that loads alone does not know what others ask for.
        if report.unread and complete:
            report.unasked = tuple(unasked)
            mistakes += unasked_notes(report.unasked, own)
        if mistakes:
            warn(report, mistakes)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, all ranks having agreed; its part of an exchange alone.

        Called on every rank.
        """
        load = self._load
        load.check_thread()
        if load.refusal:  # and the coordinator's planner is another one
            raise_faults(f"rank {global_rank()} {NOT_LOADED}", load.refusal)
        answer, exchange = new_plan.planner_data, load.exchange
        if isinstance(answer, LoadMessage):
            raise PlacementError(
                "the coordinator uses another planner than this rank\n"
                "    way out:     the same planner on every rank; installed() on every rank"
            )
        if exchange is not None:
            if (obstacle := exchange.accept(answer)) is not None:
                warn(load.report, [obstacle])
            exchange = exchange if exchange.is_active else None
        # Items know their memory, unless a subclass or a user has another hook in its place.
        own = getattr(self.lookup_tensor, "__func__", None)
        is_own = own is PlacementLoadPlanner.lookup_tensor
        lookup = load.request.memory if is_own else partial(self._by_hook, load)
        load.arrival = arrival = Arrival(load.request, load.report, lookup, exchange)
        try:
            with quiet_gc():
                items = self._items(arrival, know_memory=is_own)
        except Exception as error:
            if exchange is None:
                raise
            # The other ranks will ask this one whether it could read.
            exchange.failure = error
            return LoadPlan([], planner_data=arrival)
        logger.info("%s", load.report)
        return replace(new_plan, items=items, planner_data=arrival)

    def _items(self, arrival: Arrival, *, know_memory: bool) -> list[ReadItem]:
        """Return what a rank reads."""
        request, exchange = arrival.request, arrival.exchange
        items = request.items(arrival, know_memory=know_memory)
        if exchange is not None:
            items, arrival.report.alone = exchange.share(items)
        metadata = request.asked.metadata
        # Only the reader of this package has other mappings. It compares the ids by itself, and
        # calls finish_reads when it has read and compared all files: later than the last item.
        reader_ends_load = type(metadata.storage_data) is not dict
        if not reader_ends_load and provenance_of(metadata) is not None:
            items = self._with_ids(arrival, items)
        if not reader_ends_load and exchange is None:
            arrival.expect(len(items))
        return items

    def _with_ids(self, arrival: Arrival, items: list[ReadItem]) -> list[ReadItem]:
        """Return items with those that compare their files with the save of the metadata.

        A file is compared before and after its records are read, as a save may begin meanwhile.
        Torch's reader reads file after file, as they come: first those that others speak for.

        Raises:
            PlacementError: By the metadata, two ranks have one file, or an item has none.
        """
        files = arrival.request.asked.metadata.storage_data
        records, faults = id_records(files)
        if faults:
            raise_faults(IS_DAMAGED, faults)
        if not records:
            return items
        places = [files.get(item.storage_index) for item in items]
        if None in places:
            locations_of(items, files)  # refuses them
        names = [place.relative_path for place in places if place is not None]
        ids = []
        for record in ids_to_check(set(names), records):
            index = MetadataIndex(record.fqn, record.offset)
            ids.append(object_read(index, arrival))
            arrival.ids[index] = record
        compared = [name in records for name in names]
        others = [item for item, is_own in zip(items, compared, strict=True) if not is_own]
        return [*others, *ids, *compress(items, compared), *ids]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the storage to read into: a view of the local tensor. Called on every rank."""
        return self._load.request.memory(index)

    def _by_hook(self, load: RankLoad, index: MetadataIndex) -> torch.Tensor:
        """Return what ``lookup_tensor`` gives, which another class or the user has replaced."""
        if load is not self._load:
            raise PlacementError(OVERTAKEN.format("a load", "lookup_tensor"))
        return self.lookup_tensor(index)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return where to read an item to. Called on every rank, also by several threads."""
        arrival = self._arrival(read_item)
        memory = self._memory(arrival, read_item)
        is_tied = read_item.dest_index.fqn in arrival.request.tied
        return torch.empty_like(memory) if is_tied else memory

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a destination that an item fills. Called on every rank."""
        if read_item.lengths == tensor.shape:
            return tensor
        return cast(torch.Tensor, super().transform_tensor(read_item, tensor))

    def _arrival(self, read_item: Any = None) -> Arrival:
        """Return the arrival of an item; without one that knows it, that of the current load."""
        arrival: Arrival | None = getattr(read_item, "load", None) or self._load.arrival
        if arrival is None:
            raise PlacementError(NOT_FINISHED)
        return arrival

    def _memory(self, arrival: Arrival, read_item: ReadItem) -> torch.Tensor:
        """Return the memory that an item fills, also where it is read into a buffer."""
        tensor: torch.Tensor | None = getattr(read_item, "tensor", None)
        if tensor is None:
            tensor = arrival.lookup(read_item.dest_index)
        return self.transform_tensor(read_item, tensor)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take what was read. Called on every rank.

        Raises:
            PlacementError: Quantized values of another scale than the tensor has; or different
                contents of one memory, after the last item.
        """
        arrival, fqn = self._arrival(read_item), read_item.dest_index.fqn
        if tensor.is_quantized or fqn in arrival.request.tied:
            arrival.take(fqn, self._memory(arrival, read_item), tensor)
        arrival.count()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict. Called on every rank.

        Raises:
            PlacementError: It is no object, or a file of another save.
        """
        arrival, fqn = self._arrival(read_item), read_item.dest_index.fqn
        if (record := arrival.ids.get(read_item.storage_index)) is not None:
            if fault := id_fault(record, value.getvalue()):
                raise_faults(MIXED, [fault])
        else:
            try:
                loaded = torch.load(value, weights_only=False)
            except Exception as error:
                # Of any type, by what is in the pickle.
                has_no_class = isinstance(error, ImportError | AttributeError)
                details = _NO_CLASS if has_no_class else DAMAGED
                fault = Fault(fqn, f"{type(error).__name__}: {error}", details)
                raise PlacementError(
                    format_faults("an object cannot be loaded", [fault])
                ) from error
            if not self.flatten_state_dict:  # then torch's planner has it in its attribute, too
                arrival.request.asked.state_dict[fqn] = loaded
            arrival.take_object(fqn, loaded)
        arrival.count()

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
        own = plan.planner_data
        arrival = own if isinstance(own, Arrival) else self._arrival()
        arrival.report.traffic, arrival.report.unchecked = traffic, unchecked
        arrival.end(error)
