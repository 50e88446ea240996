"""One load, seen from one rank: all that belongs to it and to no other load."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from dcp_placements._torch import (
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    global_rank,
    is_dtensor_like,
    local_tensor,
    world_size,
)
from dcp_placements.bind.placed import Placing
from dcp_placements.bind.placing import optimizer_faults
from dcp_placements.bind.reshaping import equal_values, place_renamed
from dcp_placements.errors import (
    Fault,
    PlacementError,
    RankFaults,
    format_faults,
    packed_faults,
    raise_faults,
    raise_faults_of_ranks,
)
from dcp_placements.load.compare import LoadChecks, asked_faults, check_load, unstacked_faults
from dcp_placements.load.exchange.exchange import Exchange
from dcp_placements.load.exchange.shares import Verdict
from dcp_placements.load.message import (
    LoadMessage,
    all_notes,
    mixed_checkpoints,
    unmatched_of,
)
from dcp_placements.load.missing import lacking_rows
from dcp_placements.load.overlaps import Overlaps, overlaps_of, self_overlap_faults
from dcp_placements.load.policy import Policy
from dcp_placements.load.request import Request, fleeting_faults
from dcp_placements.load.resets import Resets
from dcp_placements.names.flat import Path, Reshaped, put_at, rename_keys
from dcp_placements.names.target import Rename
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.report import LoadReport
from dcp_placements.rules.matches import (
    Matches,
    names_of,
    rule_matches,
    unmatched_faults,
)
from dcp_placements.rules.options import items_of_run, of_run
from dcp_placements.rules.patterns import Rules
from dcp_placements.storage.index.storage_table import places_of
from dcp_placements.storage.metadata.provenance import saved_by, stored
from dcp_placements.storage.metadata.save_ids import IdRecord, id_records, speaking_for

REFUSED = "cannot be loaded from this checkpoint"


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
    checks: LoadChecks = field(default_factory=LoadChecks)
    overlaps: Overlaps = field(default_factory=lambda: Overlaps({}))
    ids: Mapping[MetadataIndex, IdRecord] = field(default_factory=dict)
    exchange: Exchange | None = None
    report: LoadReport = field(default_factory=lambda: LoadReport(planned=False))
    declared: Matches | None = None
    _reshaped: Reshaped = field(default_factory=Reshaped)
    _rename_matches: Matches = field(default_factory=dict)
    # By scalar or object, the first key whose value was read, and the value.
    _first_values: dict[str, tuple[str, Any]] = field(default_factory=dict)

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
        renamed = rename_keys(self.state_dict, self.mappings, rename)
        self.state_dict, self.mappings, self._reshaped, self._rename_matches = renamed

    def place(self, rules: Rules | None) -> None:
        """Work out the places of the tensors."""
        stored_keys = self.metadata.state_dict_metadata
        unfolded = place_renamed(self.state_dict, self.mappings, self._reshaped, rules, stored_keys)
        self.placing = unfolded.placing
        self.state_dict, self.mappings = unfolded.state_dict, unfolded.mappings
        self.copies, self.shared = unfolded.copies, unfolded.shared
        self.totals = unfolded.totals

    def declare(self, rules: Rules | None) -> None:
        """Note which patterns of the user's match a key. The tensors have their places."""
        self.declared = {**rule_matches(rules, self.placing.matched), **self._rename_matches}

    def plan(
        self,
        policy: Policy,
        *,
        rules: Rules | None,
        rename: Rename | None,
        rank: int,
    ) -> None:
        """Plan the reads, and compare the load with the save.

        Args:
            policy: What is accepted.
            rules: The user's rules.
            rename: The user's renaming.
            rank: The global rank, for messages.

        Raises:
            RankFaults: What cannot be filled, or would be filled wrongly; all in one error.
        """
        state_dict, placing, metadata = self.state_dict, self.placing, self.metadata
        request = Request(state_dict, placing, metadata, policy, self.local_keys)
        self.items = request.items()
        self.report = report = request.report
        self.collapsed = request.collapsed
        self.resets = Resets(request.reset, state_dict, placing, request.groups)
        alone = {*self.shared, *self.collapsed}
        self.overlaps = overlaps_of(request.groups, placing, alone)
        faults = [*lacking_rows(request.stateless, self.shared), *placing.faults]
        # A tensor without its place has another shape, which is no fault of its own.
        placeless = {fault.fqn for fault in placing.faults}
        faults += [fault for fault in request.faults if fault.fqn not in placeless]
        self.checks = checks = check_load(request, metadata, rename)
        report.compared = checks.compared
        faults += unstacked_faults(self.totals, metadata.state_dict_metadata, policy)
        faults += [*checks.faults, *fleeting_faults(state_dict, placing)]
        faults += optimizer_faults(state_dict, placing, rename)
        faults += self_overlap_faults(request.groups, placing)
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

    def message(self, exchange: bool | dist.ProcessGroup, rank: int) -> LoadMessage | None:
        """Return what is sent to the coordinator; None where there is nothing to send."""
        claims = None
        if exchange is not False and world_size() > 1:
            self.exchange = Exchange(None if exchange is True else exchange)
            own = {*self.shared, *self.shared.values(), *self.collapsed, *self.overlaps.groups}
            with quiet_gc():
                claims = self.exchange.claims(
                    self.state_dict, self.placing, self.metadata, own.__contains__
                )
        message = LoadMessage(
            rank=rank,
            claims=claims,
            declared=self.declared,
            asked=self.checks.asked,
            notes=packed_faults(self.checks.notes),
            save=saved_by(self.metadata) if world_size() > 1 else "",
        )
        return None if message.is_empty else message

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
        self.report.unmatched = names_of(unmatched)
        # Listed with the faults, too: a mistake in a pattern may be their cause.
        mistakes = unmatched_faults(unmatched, list(self.state_dict))
        sent = {message.rank: message.faults for message in messages}
        raise_faults_of_ranks(REFUSED, sent, mistakes)
        if notes := all_notes(messages):
            warnings.warn(format_faults("look at this load", notes, "note"), stacklevel=3)
        if complete:
            raise_faults("nothing can be loaded", mixed_checkpoints(messages))
        elif self.checks.record is not None:
            self.report.compared += ", but not with what other ranks ask for"
        asked = {message.rank: message.asked for message in messages}
        faults = asked_faults(asked, self.checks.record, self.metadata, policy, complete=complete)
        if faults:
            raise_faults("the ranks do not ask for what was saved", [*faults, *mistakes])
        self.warn(mistakes)

    def take_verdict(self, verdict: Any) -> None:
        """Take the coordinator's answer on what is exchanged."""
        if self.exchange is not None:
            self.exchange.verdict = verdict if isinstance(verdict, Verdict) else Verdict(False)

    @property
    def active_exchange(self) -> Exchange | None:
        """The exchange, where the coordinator granted one."""
        return self.exchange if self.exchange is not None and self.exchange.verdict.active else None

    def finished(self, plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, its part of an exchange alone.

        Args:
            plan: As the coordinator sent it.
        """
        items: Sequence[ReadItem] = self.items
        if self.active_exchange is not None:
            with quiet_gc():
                items = self.active_exchange.share(items, self.metadata)
        if self.exchange is not None:
            self.warn(self.exchange.verdict.notes)
        self.overlaps.expect(items)
        ids = self._id_reads(items)
        final = [*ids, *items, *ids] if ids else items
        # Only the reader of this package has other mappings, and it tells when it has compared the
        # files: that is later than the last item.
        if self.resets and type(self.metadata.storage_data) is dict:
            self.resets.expect(len(final))
            if not final and self.active_exchange is None:
                self.end_reads()
        return cast(LoadPlan, of_run(replace(plan, items=items_of_run(final, self)), self))

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
        return [record.read_item() for record in speaking_for(names, records)]

    def data(self, index: MetadataIndex) -> torch.Tensor | None:
        """Return the memory to read into at ``index``; None for tensors without a place."""
        if index.fqn in self.collapsed:
            return self._scalar(index.fqn).new_empty(self.collapsed[index.fqn])
        if (placed := self.placing.placed.get(index.fqn)) is None:
            return None
        assert index.index is not None
        return placed.view(placed.chunks[index.index])

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
        value = self.state_dict[fqn]
        return (local_tensor(value) if is_dtensor_like(value) else value).detach()

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
