"""The SavePlanner: what each rank offers, what the coordinator lets be written."""

from __future__ import annotations

import dataclasses
import io
import logging
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dcp_placements.alike import BySequence
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
    format_names,
    raise_faults,
)
from dcp_placements.evidence import Answer, Offer, Shadowing, Tables
from dcp_placements.interop import (
    DefaultSavePlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    StorageMeta,
    WriteItem,
    WriteItemType,
    files_by_name,
    filled,
    global_rank,
    known_world_size,
    world_size,
)
from dcp_placements.items import LazyItems, written_chunks, written_data
from dcp_placements.layout import Chunk
from dcp_placements.naming import Rename, checkpoint_path, rename_keys
from dcp_placements.numbering import numbering_faults
from dcp_placements.offer import (
    EXACT_WORLD,
    Objects,
    Offering,
    add_digests,
    make_offer,
    offering_of,
    owned_items,
)
from dcp_placements.options import (
    check_choice,
    check_rename,
    check_rules,
    check_waivers,
    of_instance,
)
from dcp_placements.ownership import left_to_others
from dcp_placements.placing import Placing, counted_faults, place
from dcp_placements.provenance import RESERVED_KEY, identity, provenance, written_digests
from dcp_placements.quiet_gc import quiet_gc
from dcp_placements.record import record_of_tables
from dcp_placements.renaming import Step, renames_in_force
from dcp_placements.repeats import repeat_faults
from dcp_placements.report import SaveReport
from dcp_placements.rules import Rules
from dcp_placements.save_ids import id_data, id_item, is_named
from dcp_placements.shadows import (
    OBJECTS_NBYTES,
    all_packs,
    check_shadows,
    pack_items,
    packed_objects,
    packs_of,
    unlike_objects,
)
from dcp_placements.stacking import unfold
from dcp_placements.summary import summarise, summarise_rank
from dcp_placements.world_plan import WorldPlan, plan_world

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
        rename: This rank's key to the checkpoint's key; rules see the checkpoint's. ``Renumber``
            and the like, or any function of a key; what is a row, or has rows or parts, is a
            ``Row``, ``Rows`` or ``Parts``.
        digests: What the coordinator compares before it drops a replica: ``"sampled"`` (up to
            4 KiB of each item), ``"full"`` (all bytes; the digests are stored, too, for
            ``PlacementLoadPlanner(verify="digests")``) or ``"off"``.
        on_conflict: ``"error"`` refuses a save whose replicas differ; ``"warn"`` saves one.
        waive: ``{pattern: reason}`` of keys whose lint warnings are known to be wrong.
        step: The training step, kept with the checkpoint; an attribute, to be set before each
            save.
        shadows: Copies of what is replicated, in the files of the ranks that would otherwise read
            it elsewhere: ``"off"``, the bytes that a rank may write more (the smallest tensors
            first), or patterns of keys. For ``PlacementFileSystemReader``; others see none of it.
        flatten_state_dict: As in ``DefaultSavePlanner``.
        flatten_sharded_tensors: As in ``DefaultSavePlanner``.
        dedup_replicated_tensors: As in ``DefaultSavePlanner`` (deprecated there, no effect).
        dedup_save_to_lowest_rank: As in ``DefaultSavePlanner``.
        enable_plan_caching: Accepted as in ``DefaultSavePlanner``, and changes nothing: every save
            is planned by what is there.

    Attributes:
        report: After planning, a ``SaveReport``; of all ranks on the coordinator, of what this
            rank holds on the others.

    Raises:
        PlacementError: An option that there is not.
    """

    _objects: Objects
    _names: list[bytes]
    _packs: dict[str, tuple[str, ...]]
    _renames: tuple[Step, ...]

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rename: Rename | None = None,
        digests: str = "sampled",
        on_conflict: str = "error",
        waive: Mapping[str, str] | None = None,
        step: int | None = None,
        shadows: str | int | Iterable[str] = "off",
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
        check_rename(rename)
        check_choice("digests", digests, DIGESTS)
        check_choice("on_conflict", on_conflict, ON_CONFLICT)
        self.rules = rules
        self.rename = rename
        self.digests = digests
        self.on_conflict = on_conflict
        self.waive = check_waivers(waive)
        self.step = step
        self.shadows = check_shadows(shadows)
        if self.shadows is not None and on_conflict == "warn":
            raise PlacementError(
                'shadows= needs on_conflict="error": of replicas that differ the copies would too'
            )
        self._report: SaveReport | None = None
        self._exact = False
        self._start_over()

    @property
    def report(self) -> SaveReport:
        """What the save comes to."""
        if not self._is_planned:
            return SaveReport(planned=False)
        if self._report is None:
            self._report = summarise_rank(self._offering, self._placing, self.waive)
        return self._report

    @of_instance
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, flat and under the checkpoint's keys. Called on every rank."""
        if isinstance(storage_meta, Metadata):
            raise PlacementError(
                "a PlacementSavePlanner cannot load: dcp.load wants a load planner"
            )
        self._start_over()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        local = self.state_dict
        self.state_dict, self.mappings = rename_keys(local, self.mappings, self.rename)
        self._renames = renames_in_force(self.rename, local, self.state_dict)

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write, replicas included. Called on every rank.

        The items of the plan are there for whoever looks; sent to the coordinator the plan is its
        tables, or just their names, and where this rank stands.

        Raises:
            PlacementError: Tensors and rules that do not fit, all of them in one error.
        """
        rank = global_rank()
        with quiet_gc():
            self._place(rank)
            repeats = repeat_faults(self._placing.placed.values(), rank=rank, digests=self.digests)
            if self.on_conflict == "error":
                raise_faults(f"rank {rank} holds copies that differ", repeats)
            offering = self._offering
            exact = self._exact or (known_world_size() or 1) <= EXACT_WORLD
            offer = make_offer(
                offering,
                rank=rank,
                state_dict=self.state_dict,
                placing=self._placing,
                rules=self.rules,
                rename=self.rename,
                renames=self._renames,
                waived=self.waive,
                exact=exact,
                notes=repeats,
            )
            self._objects = add_digests(
                offer,
                offering,
                self.digests,
                state_dict=self.state_dict,
                placing=self._placing,
                lookup=self.lookup_object,
                exact=exact,
            )
        self._names = [told.table_id for told in offer.all_tables]
        self.plan = SavePlan(LazyItems(offering.items), planner_data=offer)  # type: ignore[arg-type]
        self._is_planned = True
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with each element once, and the metadata. Called on the coordinator.

        Raises:
            PlacementError: Ranks that contradict each other, elements that nobody holds, replicas
                that differ; all of them in one error.
        """
        offers: list[Offer] = [plan.planner_data for plan in all_plans]
        with quiet_gc():
            tables = Tables()
            tables.learn(offers)
            # Its own are here, sent or not: a rank that plans alone hears from no other.
            for name, kept in zip(self._names, self._offering.all_tables, strict=True):
                tables.add(name, kept.table)
            made = self._planned(offers, tables)
            answers = self._shadowing(offers, tables, made.answers)
            save_id = uuid.uuid4().bytes
            for answer in answers:
                answer.save_id = save_id
            # What a writer put into a local plan stays in it: without collectives, its file names.
            self.global_plan = [
                _answered(plan, answer, partial(owned_items, tables, offer, answer))
                for plan, offer, answer in zip(all_plans, offers, answers, strict=True)
            ]
            self.metadata = Metadata(
                dict(made.metadata),
                planner_data=self._planner_data(offers, tables, answers, made.metadata, save_id),
            )
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes. Called on every rank.

        Raises:
            PlacementError: A storage writer whose files cannot hold the plan.
        """
        answer = new_plan.planner_data
        if isinstance(answer, Answer):
            raise_faults("the storage writer cannot hold this", _writer_faults(new_plan, answer))
            if isinstance(new_plan.items, LazyItems):
                with quiet_gc():
                    items = self._offering.owned_items(answer) + self._shadow_items(answer)
                new_plan = dataclasses.replace(new_plan, items=items, planner_data=None)
            # A rank that writes nothing makes no file for its id alone.
            if new_plan.items and not (
                files_by_name(new_plan.storage_data) or is_named(new_plan.storage_data)
            ):
                items = [id_item(answer.save_id, global_rank()), *new_plan.items]
                new_plan = dataclasses.replace(new_plan, items=items)
        self.plan = new_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a write item: a view, or an object's bytes. Called on every rank."""
        if write_item.type == WriteItemType.BYTE_IO:
            if (record := id_data(write_item.index)) is not None:
                return record
            made = self._objects.get(write_item.index.fqn)
            if made is not None:
                return io.BytesIO(made.getbuffer())
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what stands at ``index``; of a placed tensor a view. Called on every rank."""
        if index.fqn in self._packs:
            return self._packed(index)
        placed = self._placing.placed.get(index.fqn)
        if placed is None:
            return super().lookup_object(index)
        chunks = placed.chunks
        if len(chunks) > _FEW:
            known = self._written.get(chunks)
            if known is None:
                by_offsets = {chunk.offsets: chunk for chunk in written_chunks(placed)}
                known = self._written.put(chunks, by_offsets)
            found = known.get(tuple(index.offset or ()))
        else:
            there = (chunk for chunk in written_chunks(placed) if chunk.offsets == index.offset)
            found = next(there, None)
        if found is None:
            raise PlacementError(f"{index.fqn}: this rank has no chunk at offset {index.offset}")
        return written_data(placed, found)

    def _shadowing(
        self, offers: Sequence[Offer], tables: Tables, answers: Sequence[Answer]
    ) -> Sequence[Answer]:
        """Return the answers with what they say of shadows."""
        if self.shadows is None:
            return answers
        unlike = unlike_objects(offers, tables)
        return [
            dataclasses.replace(
                answer,
                shadows=Shadowing(
                    place, self.shadows, tuple([unlike[told.table_id] for told in offer.tables])
                ),
            )
            for place, (offer, answer) in enumerate(zip(offers, answers, strict=True))
        ]

    def _shadow_items(self, answer: Answer) -> list[WriteItem]:
        if answer.shadows is None:
            return []
        kept = self._offering.tables
        packs = packs_of([(k.name, k.table) for k in kept], answer)
        self._packs = {pack.key: pack.fqns for pack in packs}
        made = []
        for item in pack_items(packs, [(k.table, k.coordinates) for k in kept], answer):
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                held = packed_objects([self._object_bytes(fqn) for fqn in self._packs[key]])
                if held.getbuffer().nbytes > OBJECTS_NBYTES:
                    continue
                self._objects[key] = held
            made.append(item)
        return made

    def _object_bytes(self, fqn: str) -> memoryview:
        held = self._objects.get(fqn)
        if held is None:
            held = io.BytesIO()
            torch.save(self.state_dict[fqn], held)
        return held.getbuffer()

    def _packed(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensors of a pack, one after another; a view where it is one."""
        assert index.offset is not None
        offset = torch.Size(index.offset[1:])
        pieces = [
            self.lookup_object(MetadataIndex(fqn, offset)).detach()
            for fqn in self._packs[index.fqn]
        ]
        return pieces[0].unsqueeze(0) if len(pieces) == 1 else torch.stack(pieces)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone: what a save left behind is not sent to another process."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_ONE_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.mappings = {}
        self._start_over()

    def _start_over(self) -> None:
        self._placing = Placing()
        self._offering = Offering()
        self._objects = {}
        self._names = []
        self._packs = {}
        self._renames = ()
        self._written: BySequence[dict[tuple[int, ...], Chunk]] = BySequence()
        self._report = None
        self._is_planned = False

    def _place(self, rank: int) -> None:
        """Work out where this rank's tensors lie, and what it offers."""
        self._placing = place(self.state_dict, self.rules, rank)
        if self.rename is not None:
            unfolded = unfold(self.state_dict, self.mappings, self._placing, self.rules, rank)
            self.state_dict, self.mappings = unfolded.state_dict, unfolded.mappings
        faults = self._placing.faults
        if self.rename is not None or self.rules is not None:
            faults += counted_faults(self.state_dict, self._placing, self.rename)
        raise_faults(f"rank {rank} cannot be placed in the checkpoint", faults)
        paths = self._paths() if self.flatten_state_dict else None
        self._offering = offering_of(self.state_dict, self._placing, paths)

    def _paths(self) -> dict[str, Any]:
        """Return where each key stands in the nested dict."""
        if self.rename is None:
            return self.mappings
        return {key: checkpoint_path(key, path) for key, path in self.mappings.items()}

    def _planned(self, offers: Sequence[Offer], tables: Tables) -> WorldPlan:
        """Return the plan of all ranks, and make the report."""
        # One plan where there are more ranks: a save without collectives; nobody sees the rest.
        alone = len(offers) == 1 and world_size() > 1
        made = plan_world(
            offers,
            tables,
            complete=not alone,
            lowest_rank=self.dedup_save_to_lowest_rank,
            # A rank that has no coordinator of its own (no_dist=True) saves for itself alone.
            left=left_to_others(self._placing.placed.values())
            if alone and not self.is_coordinator
            else (),
        )
        if not alone:
            made.faults += numbering_faults(offers, tables)
        self._report = self._judge(made, offers)
        return made

    def _judge(self, made: WorldPlan, offers: Sequence[Offer]) -> SaveReport:
        faults = list(made.faults)
        notes = [*made.notes, *_merged_notes(offers)]
        (faults if self.on_conflict == "error" else notes).extend(made.conflicts)
        report = summarise(made, offers, self.waive)
        # A rank that plans alone does not know what the patterns match on others.
        alone = len(offers) == 1 and world_size() > 1
        if report.unmatched and not alone:
            # Told with the faults, too: a pattern with a slip in it is the likely cause of them.
            (faults or notes).append(_unmatched(report.unmatched, made))
        raise_faults("the ranks' plans do not make a checkpoint", faults)
        if 1 < len(offers) < world_size():
            notes.append(_too_few(len(offers), world_size()))
        report.warnings = tuple(map(str, notes))
        if notes:
            warnings.warn(format_faults("look at this save", notes, "note"), stacklevel=2)
        if alone:
            # Asked for (use_collectives=False, no_dist=True), so it is told of and not warned of.
            logger.info("%s", _alone(world_size()))
            report.warnings += (str(_alone(world_size())),)
        return report

    def _planner_data(
        self,
        offers: Sequence[Offer],
        tables: Tables,
        answers: Sequence[Answer],
        keys: Collection[str],
        save_id: bytes,
    ) -> dict[str, Any]:
        data: dict[str, Any] = {}
        if self.flatten_state_dict:
            names = (told.table_id for offer in offers for told in offer.all_tables)
            for name in dict.fromkeys(names):
                data.update(tables[name].paths_of_keys())
            for offer in offers:
                if offer.loose is not None:
                    data.update(offer.loose.paths)
        told = identity(save_id, world_size=len(offers), step=self.step)
        told |= record_of_tables(offers, tables, keys)
        if self.digests == "full" or self.shadows is not None:
            options = {
                "digests": self.digests,
                "on_conflict": self.on_conflict,
                "waive": self.waive,
                "flatten_state_dict": self.flatten_state_dict,
                "dedup_save_to_lowest_rank": self.dedup_save_to_lowest_rank,
            }
            told |= provenance(offers, tables, options=options)
            if self.digests == "full":
                told["digests"] = written_digests(offers, answers, tables)
            if self.shadows is not None:
                told["shadows"] = all_packs(offers, answers, tables)
        data[RESERVED_KEY] = told
        return data


_FEW = 8
"""Chunks of a tensor that are searched one by one."""

_OF_ONE_SAVE = frozenset(
    (
        "state_dict",
        "mappings",
        "plan",
        "global_plan",
        "metadata",
        "_placing",
        "_offering",
        "_objects",
        "_names",
        "_packs",
        "_renames",
        "_written",
        "_report",
    )
)


def _answered(plan: SavePlan, answer: Answer, make: Callable[[], list[WriteItem]]) -> SavePlan:
    # dataclasses.replace takes several times as long, and there is one plan per rank.
    told = {**vars(plan), "items": LazyItems(make), "planner_data": answer}
    return filled(type(plan), told)


def _writer_faults(plan: SavePlan, answer: Answer) -> list[Fault]:
    """Return why files that know a tensor by its name alone cannot hold what is planned."""
    if not files_by_name(plan.storage_data):
        return []
    faults = [
        Fault(
            fqn,
            f"rank {rank} writes it in several chunks ({count}), and HuggingFaceStorageWriter "
            "would keep only the last of them in a file",
            ("way out:     save with FileSystemWriter, and dcp-placements export --to hf",),
        )
        for fqn, rank, count in answer.in_pieces
    ]
    faults += [
        Fault(
            fqn,
            "is no tensor, and HuggingFaceStorageWriter's files hold tensors only: it would write "
            "one that nobody can read",
            ("way out:     leave it out, or save with FileSystemWriter",),
        )
        for fqn in answer.objects
    ]
    if answer.shadows is not None:
        faults.append(
            Fault(
                "shadows=",
                "HuggingFaceStorageWriter would write the copies as tensors of the model",
                ('way out:     shadows="off", or FileSystemWriter',),
            )
        )
    if answer.writers > 1 and "shard_index" not in plan.storage_data:
        faults.append(
            Fault(
                "HuggingFaceStorageWriter",
                f"{answer.writers} ranks would write files of the same names, one over the other",
                ("way out:     HuggingFaceStorageWriter(..., save_distributed=True)",),
            )
        )
    return faults


def _merged_notes(offers: Sequence[Offer]) -> list[Fault]:
    """Return the ranks' notes, those with one text once."""
    return list(
        dict.fromkeys(
            note for offer in offers if offer.story is not None for note in offer.story.notes
        )
    )


def _unmatched(patterns: Sequence[str], made: WorldPlan) -> Fault:
    keys = [*made.keys, *made.objects]
    told = (f"the keys are {format_names(keys, 4)}",) if keys else ()
    return Fault(
        ", ".join(map(repr, patterns)),
        "no key on any rank matches",
        (*told, "way out:     correct the pattern, or drop it"),
    )


def _alone(world: int) -> Fault:
    return Fault(
        "this save",
        f"planned by 1 of {world} ranks, by itself",
        (
            "reason:      with use_collectives=False, no_dist=True or a group of one nobody sees "
            "what the others hold: replicas are not compared, and what is missing is not found",
        ),
    )


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
