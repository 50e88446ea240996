"""The LoadPlanner: what each rank reads, and the proof that it is all that the rank needs."""

from __future__ import annotations

import dataclasses
import io
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from dcp_placements._torch import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
    flatten_as_2_3,
    get_element,
    global_rank,
    is_dtensor_like,
    leaves,
    local_tensor,
    set_element,
    world_size,
)
from dcp_placements.bind.placed import Placing
from dcp_placements.bind.placing import counted_faults, place
from dcp_placements.bind.stacking import unfold
from dcp_placements.errors import Fault, PlacementError, format_faults, format_names, raise_faults
from dcp_placements.layout.sharding import Box
from dcp_placements.layout.tiling import format_box
from dcp_placements.lazy_items import LazyItems
from dcp_placements.load.casting import CASTS
from dcp_placements.load.checks import LoadChecks, check_load
from dcp_placements.load.exchange import Exchange
from dcp_placements.load.live import fleeting_faults, live_faults
from dcp_placements.load.message import (
    LoadMessage,
    all_notes,
    asking_faults,
    packed_notes,
    unmatched_patterns,
)
from dcp_placements.load.request import Policy, Request
from dcp_placements.load.shares import Claims, Verdict, verdicts
from dcp_placements.names.keys import Path, Rename, rename_keys
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.report import LoadReport
from dcp_placements.rules.options import (
    check_choice,
    check_rename,
    check_rules,
    check_waivers,
    of_instance,
)
from dcp_placements.rules.patterns import Rules, compile_pattern, expected_patterns
from dcp_placements.storage.digests import full_digest
from dcp_placements.storage.metadata.provenance import stored, stored_digest
from dcp_placements.storage.metadata.save_ids import MIXED, IdRecord, id_records, speaking_for

logger = logging.getLogger(__name__)

VERIFY = ("off", "digests")


class PlacementLoadPlanner(DefaultLoadPlanner):
    """Loads every shard from its true place in the whole tensor.

    ``dcp.load(state_dict, checkpoint_id=path, planner=PlacementLoadPlanner(rules))`` fills the
    tensors of ``state_dict`` in place, whatever topology wrote the checkpoint.

    Args:
        rules: ``PlacementRules``, or any ``(fqn, tensor) -> CheckpointPlacement or None``. None:
            every tensor keeps its own mesh and placements.
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's. ``Renumber``
            and the like, or any function of a key; what is a row, or has rows or parts, is a
            ``Row``, ``Rows`` or ``Parts``.
        optional: Patterns of keys that the checkpoint may lack; they keep what they have. The
            optimizer state of a parameter may always be wholly missing (it never was stepped).
        cast: What to do where the checkpoint's dtype is wider than the tensor's: ``"error"``,
            ``"warn"`` or ``"allow"``. Float into int is an error whatever is said here.
        verify: ``"digests"`` compares every chunk that is read whole with its stored digest, and
            refuses a checkpoint without digests; ``"off"`` does not look.
        waive: ``{pattern: reason}`` of keys whose lint warnings, or whose differences from how they
            were saved, are known to be right.
        live: The model (or an iterable of tensors) that the load is for. Tensors of the state
            dict that are no part of its storage are refused, unless they are optimizer state:
            what is read into a copy never reaches the model.
        exchange: Ranks that want the same read each byte once and send it to each other, along
            the axes of the rules' and the DTensors' meshes; with ``PlacementFileSystemReader``. A
            process group where the load runs on another one than the default.
        flatten_state_dict: As in ``DefaultLoadPlanner``.
        flatten_sharded_tensors: As in ``DefaultLoadPlanner``.
        allow_partial_load: As in ``DefaultLoadPlanner``, but a load that matches nothing is an
            error.

    Attributes:
        report: After planning, this rank's ``LoadReport``; complete when the load has ended.

    Raises:
        PlacementError: An option with an unknown value.
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
        waive: Mapping[str, str] | None = None,
        live: torch.nn.Module | Iterable[torch.Tensor] | None = None,
        exchange: bool | dist.ProcessGroup = False,
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
        check_rename(rename)
        check_choice("cast", cast, CASTS)
        check_choice("verify", verify, VERIFY)
        patterns = (optional,) if isinstance(optional, str) else tuple(optional)
        self.rules = rules
        self.rename = rename
        self.optional = tuple(compile_pattern(pattern) for pattern in patterns)
        self.cast = cast
        self.verify = verify
        self.waive = check_waivers(waive)
        self.live = live
        self.exchange = exchange
        self.report = LoadReport(planned=False)
        self._placing = Placing()
        self._checks = LoadChecks()
        self._provenance: Mapping[str, Any] | None = None
        self._stateless: list[str] = []
        self._own_keys: set[str] = set()
        self._copies: dict[str, list[Path]] = {}
        self._shared: dict[str, str] = {}
        self._agreed: dict[str, tuple[str, Any]] = {}
        self._collapsed: Mapping[str, torch.Size] = {}
        self._items: LazyItems[ReadItem] = LazyItems()
        self._exchange: Exchange | None = None
        self._unplanned: Exception | None = None
        self._ids: Mapping[MetadataIndex, IdRecord] = {}

    @of_instance
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill, under the checkpoint's keys. Called on every rank."""
        # dcp.save gives another thing in this place.
        if metadata is not None and not isinstance(metadata, Metadata):
            raise PlacementError(
                "a PlacementLoadPlanner cannot save: dcp.save wants a save planner"
            )
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
            key = ".".join(map(str, path))
            if key in self.state_dict:
                self.state_dict[key] = value
        self.report = LoadReport(planned=False)
        self._own_keys = set(self.state_dict)
        self.state_dict, self.mappings = rename_keys(self.state_dict, self.mappings, self.rename)

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads. Called on every rank.

        Raises:
            PlacementError: What cannot be filled, or would be filled wrongly; all in one error.
        """
        assert self.metadata is not None
        self._adopt_old_keys(self.metadata)
        rank = global_rank()
        policy = Policy(self.allow_partial_load, self.optional, self.cast)
        with quiet_gc():
            self._placing = place(self.state_dict, self.rules, rank)
            if self.rename is not None:
                self._unfold(self.metadata, rank)
            request = Request(
                self.state_dict, self._placing, self.metadata, policy, rank, self._own_keys
            )
            self._items = request.items()
        self.report = request.report
        self._collapsed, self._agreed = request.collapsed, {}
        faults = self._shared_faults(request)
        faults += [*self._placing.faults, *request.faults, *self._verify_faults(self.metadata)]
        faults += self._compare(policy, rank)
        faults += fleeting_faults(self.state_dict, self._placing)
        if self.rename is not None or self.rules is not None:
            faults += counted_faults(self.state_dict, self._placing, self.rename)
        if self.live is not None:
            faults += live_faults(
                self.state_dict, self._placing, self.live, self.report, self.mappings
            )
        raise_faults(f"rank {rank} cannot be loaded from this checkpoint", faults)
        self._stateless = request.stateless
        self.report.warnings = tuple(map(str, [*request.notes, *self._checks.notes]))
        if request.notes:
            warnings.warn(format_faults("look at this load", request.notes, "note"), stacklevel=2)
        return LoadPlan(self._items, planner_data=self._message(rank))  # type: ignore[arg-type]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Answer which ranks exchange what; warn once of all ranks' unlikely declarations.

        Called on the coordinator; on every rank that loads by itself.

        Raises:
            PlacementError: Ranks that together ask for what no rank alone can see to be wrong.
        """
        plans = super().create_global_plan(global_plan)
        sent = [plan.planner_data for plan in plans]
        messages = [message for message in sent if isinstance(message, LoadMessage)]
        notes = all_notes(messages)
        if notes:
            warnings.warn(format_faults("look at this load", notes, "note"), stacklevel=2)
        # Ranks that load by themselves send nothing to compare.
        if messages and len(plans) >= world_size():
            self._judge(messages)
        claims = [m.claims if isinstance(m, LoadMessage) else None for m in sent]
        answers: list[Verdict | None] = [None] * len(plans)
        if any(claims):
            answers = [*verdicts(claims)]
        return [
            plan if plan.planner_data is None else dataclasses.replace(plan, planner_data=answer)
            for plan, answer in zip(plans, answers, strict=True)
        ]

    def _judge(self, messages: Sequence[LoadMessage]) -> None:
        """Refuse or note what all ranks together show."""
        assert self.metadata is not None
        faults = asking_faults(messages, self._checks.record, self.metadata)
        unmatched = self.report.unmatched = unmatched_patterns(messages)
        if unmatched:
            note = Fault(
                ", ".join(map(repr, unmatched)),
                "no key on any rank matches",
                ("way out:     correct the pattern, or drop it",),
            )
            # Listed with the faults, too: a mistake in a pattern may be their cause.
            if faults:
                faults.append(note)
            else:
                self._warn(note)
        raise_faults("the ranks do not ask for what was saved", faults)

    def _warn(self, note: Fault) -> None:
        self.report.warnings = (*self.report.warnings, str(note))
        warnings.warn(format_faults("look at this load", [note], "note"), stacklevel=3)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads, all ranks having agreed. Called on every rank."""
        if self._exchange is not None:
            verdict = new_plan.planner_data
            self._exchange.verdict = verdict if isinstance(verdict, Verdict) else Verdict(False)
        try:
            return self._finished(new_plan)
        except Exception as error:
            if not self._exchanges:
                raise
            # The other ranks will ask this one whether it could read.
            self._unplanned = error
            return LoadPlan([])

    @property
    def _exchanges(self) -> bool:
        return self._exchange is not None and self._exchange.verdict.active

    def _finished(self, new_plan: LoadPlan) -> LoadPlan:
        for fqn in self._stateless:
            self._reset_step(fqn)
        logger.info("load: %s", self.report.line)
        if isinstance(new_plan.items, LazyItems):
            # They stayed here: the coordinator changes nothing of what a rank reads.
            with quiet_gc():
                new_plan = dataclasses.replace(new_plan, items=self._items.all)
        if self._exchange is not None:
            if self._exchanges:
                assert self.metadata is not None
                with quiet_gc():
                    kept = self._exchange.share(new_plan.items, self.metadata)
                new_plan = dataclasses.replace(new_plan, items=kept)
            elif self._exchange.verdict.why:
                self._note_plain(self._exchange.verdict)
        self._note_unverified(new_plan.items)
        reads = self._id_reads(new_plan.items)
        if reads:
            new_plan = dataclasses.replace(new_plan, items=[*reads, *new_plan.items])
        return new_plan

    def _id_reads(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Return the reads of the ids in the files that items are read from.

        None where the places are no dict: only the reader of this package has other mappings, and
        it compares the ids by itself.
        """
        assert self.metadata is not None
        self._ids = {}
        places = self.metadata.storage_data
        if type(places) is not dict or stored(self.metadata) is None:
            return []
        self._ids = {record.index: record for record in id_records(places).values()}
        if not self._ids:
            return []
        files = {places[item.storage_index].relative_path for item in items}
        records = {record.file: record for record in self._ids.values()}
        return [record.read_item() for record in speaking_for(files, records)]

    def finish_reads(self, error: BaseException | None) -> None:
        """Exchange what was read, if that was agreed. Called by the reader, on every rank.

        Args:
            error: What went wrong while this rank read.

        Raises:
            PlacementError: On all ranks, where one could not read or is gone.
        """
        if not self._exchanges:
            if error is not None:
                raise error
            return
        assert self._exchange is not None
        self._exchange.finish(self._unplanned or error, self.lookup_tensor, self.report)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the storage to read into: a view of the local tensor. Called on every rank."""
        if index.fqn in self._collapsed:
            return self._scalar(index.fqn).new_empty(self._collapsed[index.fqn])
        placed = self._placing.placed.get(index.fqn)
        if placed is None:
            tensor = super().lookup_tensor(index)
            # One scalar for several keys: none may take the place of another unseen.
            return torch.empty_like(tensor) if index.fqn in self._shared else tensor
        assert index.index is not None
        return placed.view(placed.chunks[index.index])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Compare what was read with its stored digest. Called on every rank.

        Raises:
            PlacementError: Bytes that are not those that were saved.
        """
        fqn = read_item.dest_index.fqn
        if fqn in self._shared or fqn in self._collapsed:
            for number in tensor.flatten().tolist():
                self._agree(fqn, number)
                self._scalar(fqn).fill_(number)
        if self._provenance is None or self.metadata is None:
            return
        index = read_item.storage_index
        digest = self._digest_of(read_item, tensor.dtype)
        if digest is None:
            self.report.unverified += 1
            return
        if full_digest(tensor) != digest:
            chunk = self._stored_chunk(index)
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            self._corrupt(index, format_box(box))
        self.report.verified += 1

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict. Called on every rank.

        Raises:
            PlacementError: Bytes that are not those that were saved.
        """
        if (record := self._ids.get(read_item.storage_index)) is not None:
            raise_faults(MIXED, filter(None, [record.fault(value.getvalue())]))
            return
        if self._provenance is not None:
            index = read_item.storage_index
            digest = stored_digest(self._provenance, index)
            if digest is None:
                self.report.unverified += 1
            elif xxhash.xxh3_128_digest(value.getbuffer()) != digest:
                self._corrupt(index, "this object")
            else:
                self.report.verified += 1
        super().load_bytes(read_item, value)
        fqn = read_item.dest_index.fqn
        if self.flatten_state_dict and (fqn in self._shared or fqn in self._copies):
            loaded = get_element(self.original_state_dict, self.mappings[fqn])
            if fqn in self._shared:
                self._agree(fqn, loaded)
            for path in self._copies.get(fqn, ()):
                set_element(self.original_state_dict, path, loaded)

    def _claims(self) -> Claims | None:
        """Return what this rank would exchange, for the coordinator; None where nothing."""
        self._exchange = self._unplanned = None
        if self.exchange is False or world_size() == 1:
            return None
        assert self.metadata is not None
        group = None if self.exchange is True else self.exchange
        self._exchange = Exchange(group)
        own = {*self._shared, *self._shared.values(), *self._collapsed}
        with quiet_gc():
            return self._exchange.claims(
                self.state_dict, self._placing, self.metadata, own.__contains__
            )

    def _note_plain(self, verdict: Verdict) -> None:
        note = Fault(
            "exchange=True",
            "every rank reads all that it needs by itself",
            (f"because:     {verdict.why}", f"way out:     {verdict.way_out}"),
        )
        self._warn(note)

    def _compare(self, policy: Policy, rank: int) -> list[Fault]:
        """Return what is declared otherwise than the checkpoint says that it was saved."""
        assert self.metadata is not None
        checks = self._checks = check_load(
            self.state_dict,
            self._placing,
            self.metadata,
            rename=self.rename,
            policy=policy,
            waived=self.waive,
            rank=rank,
        )
        self.report.compared, self.report.waived = checks.compared, dict(self.waive)
        return checks.faults

    def _message(self, rank: int) -> LoadMessage | None:
        """Return what is sent to the coordinator; None where there is nothing to send."""
        message = LoadMessage(
            rank=rank,
            claims=self._claims(),
            matched=tuple(self._placing.matched),
            patterns=expected_patterns(self.rules),
            asked=self._checks.asked,
            rows=self._checks.rows,
            renames=self._checks.renames,
            notes=packed_notes(self._checks.notes),
        )
        return None if message.is_empty else message

    def _unfold(self, metadata: Metadata, rank: int) -> None:
        """Take apart what rename= stacks or unstacks."""
        unfolded = unfold(
            self.state_dict,
            self.mappings,
            self._placing,
            self.rules,
            rank,
            metadata.state_dict_metadata,
        )
        self.state_dict, self.mappings = unfolded.state_dict, unfolded.mappings
        self._copies, self._shared = unfolded.copies, unfolded.shared

    def _shared_faults(self, request: Request) -> list[Fault]:
        """Return the scalars that stand for rows of which the checkpoint has only some."""
        lacking: dict[str, list[str]] = {}
        for fqn in request.stateless:
            if fqn in self._shared:
                lacking.setdefault(self._shared[fqn], []).append(fqn)
        if not lacking:
            return []
        having: dict[str, int] = {}
        for name in self._shared.values():
            having[name] = having.get(name, 0) + 1
        return [
            Fault(
                name,
                f"the checkpoint has optimizer state of {having[name] - len(keys)} rows, and none "
                f"of {len(keys)}, but rank {global_rank()} has one {name.rpartition('.')[2]} for "
                "all of them",
                (
                    f"missing:     {format_names(keys, 4)}",
                    "likely:      these rows were never stepped",
                    "way out:     load it into one tensor per row; or leave this state out",
                ),
            )
            for name, keys in lacking.items()
            if len(keys) < having[name]
        ]

    def _scalar(self, fqn: str) -> torch.Tensor:
        value = self.state_dict[fqn]
        return (local_tensor(value) if is_dtensor_like(value) else value).detach()

    def _agree(self, fqn: str, value: Any) -> None:
        """Take in one of several values that become one here.

        Raises:
            PlacementError: It is another than that of the other keys.
        """
        name = self._shared.get(fqn, fqn)
        first, first_value = self._agreed.setdefault(name, (fqn, value))
        if first_value == value:
            return
        values = f"{first_value!r} and {value!r}"
        if first != fqn:
            values = f"{first_value!r} for {first} and {value!r} for {fqn}"
        fault = Fault(
            name,
            f"rank {global_rank()} has one value for all rows, but the checkpoint has {values}",
            (
                "likely:      each row had an optimizer state of its own, and they were not "
                "stepped alike",
                "way out:     load it into one tensor per row; or leave this key out",
            ),
        )
        raise PlacementError(format_faults("rows cannot be loaded as one", [fault]))

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone: what a load left behind is not sent to another process."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_ONE_LOAD}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.original_state_dict = {}
        self.mappings = {}
        self._placing = Placing()
        self._checks = LoadChecks()
        self._provenance = None
        self._own_keys = set()
        self._copies, self._shared, self._agreed, self._collapsed = {}, {}, {}, {}
        self._items = LazyItems()
        self._exchange = self._unplanned = None
        self._ids = {}

    def _verify_faults(self, metadata: Metadata) -> list[Fault]:
        self._provenance = None
        if self.verify == "off":
            return []
        provenance = stored(metadata)
        if provenance is None or not provenance.get("digests"):
            return [
                Fault(
                    "this checkpoint",
                    "has no digests, but verify='digests' asks for them",
                    (
                        "way out:     save with PlacementSavePlanner(digests='full'); or load "
                        "without verify=, which proves nothing",
                    ),
                )
            ]
        self._provenance = provenance
        return []

    def _stored_chunk(self, index: MetadataIndex) -> ChunkStorageMetadata:
        assert self.metadata is not None
        stored_tensor = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored_tensor, TensorStorageMetadata)
        return stored_tensor.chunks[index.index or 0]

    def _digest_of(self, item: ReadItem, dtype: torch.dtype | None) -> bytes | None:
        """Return the digest that speaks for all that an item reads; None where there is none.

        Args:
            item: The read.
            dtype: Of the tensor that is filled.
        """
        assert self.metadata is not None
        assert self._provenance is not None
        index = item.storage_index
        stored_tensor = self.metadata.state_dict_metadata[index.fqn]
        if isinstance(stored_tensor, TensorStorageMetadata) and (
            dtype != stored_tensor.properties.dtype
            or item.lengths != self._stored_chunk(index).sizes
        ):
            return None
        return stored_digest(self._provenance, index)

    def _note_unverified(self, items: Sequence[ReadItem]) -> None:
        """Warn of chunks that verify="digests" asks for and no digest speaks for."""
        if self._provenance is None:
            return
        without = sum(
            self._digest_of(item, getattr(self.state_dict.get(item.dest_index.fqn), "dtype", None))
            is None
            for item in items
        )
        if without:
            self._warn(
                Fault(
                    "verify='digests'",
                    f"rank {global_rank()} cannot compare {without} of the {len(items)} chunks "
                    "that it reads",
                    (
                        "because:     a digest is that of a whole chunk, and these are read in "
                        "part (saved and loaded in different layouts), or cast",
                        "instead:     the id of the save that wrote each file is compared",
                        "way out:     dcp-placements verify --digests compares all of them",
                    ),
                )
            )

    def _corrupt(self, index: MetadataIndex, what: str) -> None:
        provenance = self._provenance or {}
        kept = self.metadata.storage_data if self.metadata is not None else None
        info = kept.get(index) if isinstance(kept, Mapping) else None
        file = getattr(info, "relative_path", "unknown")
        step = "" if provenance.get("step") is None else f", step {provenance['step']}"
        fault = Fault(
            index.fqn,
            f"rank {global_rank()} read {what}, and it is not what was saved",
            (
                f"in file:     {file}",
                f"saved as:    save {provenance.get('save_id')}{step}",
                "likely:      the file was damaged, or a later save into the same directory was "
                "cut off and left files of two saves",
                "way out:     load an older checkpoint; this one is not sound",
            ),
        )
        raise PlacementError(format_faults("the checkpoint is damaged", [fault]))

    def _reset_step(self, fqn: str) -> None:
        """Set a step count back to 0 whose moments stay as they were made."""
        if fqn.rpartition(".")[2] != "step":
            return
        value = self.state_dict[fqn]
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, int | float):
            set_element(self.original_state_dict, self.mappings.get(fqn, (fqn,)), type(value)(0))

    def _adopt_old_keys(self, metadata: Metadata) -> None:
        """Take the keys that torch 2.3 and older gave, where the checkpoint has those."""
        if not self.flatten_state_dict:
            return
        unasked = set(metadata.state_dict_metadata) - set(self.state_dict)
        if not unasked:
            return
        flat, mappings = flatten_as_2_3(self.original_state_dict)
        # Only a key that today's flattening does not make is a sign of an old checkpoint: under
        # rename=, a local name may well be the checkpoint's name of another rank's tensor.
        if unasked & (set(flat) - self._own_keys):
            self.state_dict, self.mappings = rename_keys(flat, mappings, self.rename)


_OF_ONE_LOAD = frozenset(
    (
        "state_dict",
        "original_state_dict",
        "mappings",
        "metadata",
        "_items",
        "_agreed",
        "_checks",
        "_collapsed",
        "_copies",
        "_exchange",
        "_ids",
        "_own_keys",
        "_placing",
        "_provenance",
        "_shared",
        "_unplanned",
    )
)
