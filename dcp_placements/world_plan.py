"""The coordinator's work, class by class: proof, comparison, ownership, metadata.

All tensors of a layout class on one mesh are judged at once: one look at the coordinates that are
there, one proof that the cuts tile, one chunk list that their metadata share. Whatever does not
fit is *odd*: it is taken apart item by item, which either names what is wrong or finds that the
items make a whole all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product, repeat
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements.agreement import Witness, examine, nbytes_of
from dcp_placements.buckets import Folding
from dcp_placements.comparison import Comparison, digest_slice, folding_of, places_in_class
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.evidence import Answer, Ints, Offer, Tables, packed_ints, unpacked_ints
from dcp_placements.interop import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    SavePlan,
    TensorStorageMetadata,
    WriteItem,
    create_default_global_save_plan,
)
from dcp_placements.items import TableItems, chunk_metadata, tensor_properties
from dcp_placements.layout import Cut, Interval
from dcp_placements.members import Members
from dcp_placements.ownership import (
    Spread,
    drop_replicas,
    in_bitmap,
    owner_slots,
    shared_entries,
    shared_out,
    write_limit,
    writers_needed,
)
from dcp_placements.picked_plan import PickedPlan
from dcp_placements.report import KeyReport, key_report
from dcp_placements.table import OBJECT, LayoutClass, Table, grid


@dataclass(slots=True)
class WorldPlan:
    """What all offers together come to.

    Attributes:
        answers: One per rank.
        metadata: By key.
        keys: The report on each tensor.
        objects: Keys that are no tensors.
        partial: Ranks that have a key, where not all have it.
        faults: What cannot be saved.
        conflicts: Replicas that differ.
        notes: What is saved but ought to be known.
        row_maps: Expert maps, by key and rank.
    """

    answers: list[Answer] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, KeyReport] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    partial: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    conflicts: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)


def plan_world(
    offers: Sequence[Offer],
    tables: Tables,
    *,
    complete: bool,
    lowest_rank: bool = False,
    left: Collection[str] = (),
) -> WorldPlan:
    """Return the plan of a save: who writes what, and the metadata; or what is wrong.

    Args:
        offers: One per rank.
        tables: All tables that the offers name.
        complete: Whether these ranks are all there are, so that together they must hold every
            element.
        lowest_rank: Leave every replica to its lowest rank.
        left: For a rank that plans alone: keys that it leaves to other ranks.
    """
    coordinator = _Coordinator(offers, tables, complete, lowest_rank)
    coordinator.left = left
    return coordinator.plan()


class _Coordinator:
    def __init__(
        self,
        offers: Sequence[Offer],
        tables: Tables,
        complete: bool,
        lowest_rank: bool,
    ) -> None:
        self.offers = offers
        self.tables = tables
        self.complete = complete
        self.lowest_rank = lowest_rank
        self.left: Collection[str] = ()
        self.made = WorldPlan()
        self.members: dict[bytes, Members] = {}
        self.first: dict[str, tuple[bytes, int]] = {}
        self.repeated: dict[str, list[tuple[bytes, int]]] = {}
        self.odd: dict[str, None] = {}
        self.owned_odd: list[SavePlan] = []
        self.known_chunks: dict[tuple[tuple[int, ...], ...], ChunkStorageMetadata] = {}
        self.picked: PickedPlan | None = None

    def plan(self) -> WorldPlan:
        refused = self._unknown_tables() or self._unlike_digests()
        if refused is not None:
            self.made.faults.append(refused)
            return self.made
        self.survey()
        self.settle_odd()
        if self.left:
            self._leave_to_others()
        if not self.made.faults:
            self._describe()
            self._answer()
        return self.made

    def survey(self) -> None:
        """Look at every table and class once, and note what is odd."""
        for plan, offer in enumerate(self.offers):
            for told in offer.tables:
                if told.table_id not in self.members:
                    self.members[told.table_id] = Members(self.tables[told.table_id], [], [])
                self.members[told.table_id].plans.append(plan)
                self.members[told.table_id].offers.append(told)
        for name, members in self.members.items():
            members.stand()
            self._meet(name, members)
        comparison = Comparison(self.offers, self.members)
        for members in self.members.values():
            comparison.within(members)
        for fqn, others in self.repeated.items():
            comparison.across(fqn, self.first[fqn], others)
        self.odd.update(comparison.odd)
        self.made.conflicts += comparison.conflicts
        self.made.notes += comparison.notes
        self._survey_picked()

    def _survey_picked(self) -> None:
        if not any(offer.picked for offer in self.offers):
            return
        picked = self.picked = PickedPlan(self.offers, self.tables, complete=self.complete)
        self.odd.update(picked.odd)
        self.made.faults += picked.faults
        loose = {
            item.index.fqn
            for offer in self.offers
            if offer.loose is not None
            for item in offer.loose.items
        }
        self.odd.update((fqn, None) for fqn in picked.keys if fqn in self.first or fqn in loose)

    def _unknown_tables(self) -> Fault | None:
        lost: dict[bytes, list[int]] = {}
        for offer in self.offers:
            for told in offer.all_tables:
                if told.table_id not in self.tables:
                    lost.setdefault(told.table_id, []).append(offer.rank)
        if not lost:
            return None
        ranks = [rank for holders in lost.values() for rank in holders]
        return Fault(
            "this save",
            f"{format_ranks(ranks)} hold other tensors than the first rank of their mesh",
            (
                "reason:      in a large world the first rank of a mesh speaks for all of it, "
                "because a DTensor is the same on all ranks of its mesh",
                "likely:      a key is in the state dict of some of these ranks only",
                "way out:     dcp_placements.check(state_dict, rules) names the keys",
            ),
        )

    def _unlike_digests(self) -> Fault | None:
        kinds: dict[str, list[int]] = {}
        for offer in self.offers:
            kinds.setdefault(offer.digests, []).append(offer.rank)
        if len(kinds) < 2:
            return None
        told = "; ".join(f"{kind!r} on {format_ranks(ranks)}" for kind, ranks in kinds.items())
        return Fault(
            "this save",
            f"the ranks do not agree on digests=: {told}",
            ("way out:     give every rank's PlacementSavePlanner the same options",),
        )

    def _meet(self, name: bytes, members: Members) -> None:
        """Note keys that another table has too, and classes that do not tile."""
        table = members.table
        untiled = [self._untiled(index, members) for index in range(len(table.classes))]
        if not any(untiled) and self.first.keys().isdisjoint(table.fqns):
            self.first.update(
                zip(table.fqns, zip(repeat(name), range(len(table.fqns))), strict=False)
            )
            return
        for entry, (fqn, index) in enumerate(zip(table.fqns, table.class_of, strict=True)):
            known = self.first.setdefault(fqn, (name, entry))
            if known != (name, entry):
                self.repeated.setdefault(fqn, []).append((name, entry))
                members.drop(entry)
                if not self._means_the_same(known, (name, entry)):
                    self.odd[fqn] = None
            elif index != OBJECT and untiled[index]:
                self.odd[fqn] = None

    def _untiled(self, index: int, members: Members) -> bool:
        known = members.table.classes[index]
        if 0 in known.sharding.global_shape:
            return False
        lacking = self.complete and bool((members.counts[index] == 0).any())
        return lacking or grid(known) is None

    def _means_the_same(self, one: tuple[bytes, int], other: tuple[bytes, int]) -> bool:
        a, b = self.members[one[0]].table, self.members[other[0]].table
        i, j = a.class_of[one[1]], b.class_of[other[1]]
        if OBJECT in (i, j):
            return i == j
        return (
            a.classes[i] == b.classes[j]
            and a.looks[a.look_of[one[1]]].dtype == b.looks[b.look_of[other[1]]].dtype
        )

    def settle_odd(self) -> None:
        """Take what is odd apart item by item."""
        if self.picked is not None:
            beside, others = self._held_beside()
            self.picked.share(self.odd, beside, others, lowest_rank=self.lowest_rank)
        if not self.odd and not any(offer.loose for offer in self.offers):
            return
        entries: dict[bytes, list[int]] = {}
        for name, members in self.members.items():
            found = [e for e, fqn in enumerate(members.table.fqns) if fqn in self.odd]
            entries[name] = found
            for entry in found:
                members.drop(entry)
        plans, witnesses = [], []
        for plan, offer in enumerate(self.offers):
            items, witness = self._taken_apart(plan, offer, entries)
            plans.append(SavePlan(items))
            witnesses.append(witness)
        agreement = examine(plans, witnesses, complete=self.complete)
        self.made.faults += agreement.faults
        self.made.conflicts += agreement.conflicts
        self.made.notes += agreement.notes
        beside, others = self._held_beside()
        self.owned_odd = drop_replicas(
            plans, lowest_rank=self.lowest_rank, held=beside, others=others
        )
        for fqn, claims in agreement.claims.items():
            if "object" in claims.kinds:
                self.made.objects.append(fqn)
                continue
            shape = tuple(next(iter(claims.sizes)))
            dtype = next(iter(claims.dtypes))
            held = sum(box.numel * len(told) for box, told in claims.boxes.items())
            unique = sum(box.numel for box in claims.boxes)
            self.made.keys[fqn] = key_report(shape, dtype, len(claims.boxes), unique, held)

    def _taken_apart(
        self, plan: int, offer: Offer, entries: dict[bytes, list[int]]
    ) -> tuple[list[WriteItem], Witness]:
        items: list[WriteItem] = []
        digests: list[bytes | None] = []
        rules_of: dict[str, str] = {}
        replicated: dict[str, frozenset[str]] = {}
        for told in offer.tables:
            if not entries[told.table_id]:
                continue
            table = self.tables[told.table_id]
            maker = TableItems(table, unpacked_ints(told.coordinates).tolist())
            places = places_in_class(table)
            foldings: dict[tuple[int, int], Folding] = {}
            for entry in entries[told.table_id]:
                index = table.class_of[entry]
                made = maker.of(entry)
                items += made
                blob = told.digests.get(index, b"")
                if offer.bucketed and blob and made and (index, len(made)) not in foldings:
                    foldings[index, len(made)] = folding_of(table, index, len(made))
                folds = foldings.get((index, len(made)))
                for i in range(len(made)):
                    position = places[entry] * len(made) + i
                    digest = digest_slice(blob, position, 1)
                    if folds is not None:
                        alone = folds.is_alone(position)
                        digest = folds.told_of(blob, position) if alone else b""
                    digests.append(digest if any(digest) else None)
                if table.rule_of[entry] >= 0:
                    rules_of[table.fqns[entry]] = table.rules[table.rule_of[entry]]
                if index != OBJECT:
                    replicated[table.fqns[entry]] = _replicated(table.classes[index])
        if offer.loose is not None:
            items += offer.loose.items
            digests += offer.loose.digests or [None] * len(offer.loose.items)
            rules_of.update(offer.loose.rules_of)
        rows = {} if offer.loose is None else dict(offer.loose.row_maps)
        if self.picked is not None:
            for fqn, rule, here, made, told_here in self.picked.apart(plan, self.odd):
                items += made
                digests += told_here
                rows[fqn] = here
                if rule is not None:
                    rules_of[fqn] = rule
        return items, Witness(
            offer.rank, digests, offer.positions, offer.sizes, rules_of, replicated, rows
        )

    def _leave_to_others(self) -> None:
        for members in self.members.values():
            for entry, fqn in enumerate(members.table.fqns):
                if fqn in self.left:
                    members.drop(entry)

    def _describe(self) -> None:
        """Make the metadata and the report of all keys."""
        for members in self.members.values():
            self._describe_table(members)
        if self.picked is not None:
            for fqns, stored, report in self.picked.described():
                self.made.metadata.update(dict.fromkeys(fqns, stored))
                self.made.keys.update(dict.fromkeys(fqns, report))
            for fqns, ranks in self.picked.partial():
                self.made.partial.update(dict.fromkeys(fqns, ranks))
        if self.owned_odd:
            bare = [SavePlan(plan.items) for plan in self.owned_odd]
            _, metadata = create_default_global_save_plan(bare)
            self.made.metadata.update(metadata.state_dict_metadata)
        total = len(self.offers)
        having: dict[str, set[int]] = {}
        for fqn, others in self.repeated.items():
            having[fqn] = set(self.members[self.first[fqn][0]].plans)
            for name, _ in others:
                having[fqn].update(self.members[name].plans)
        for members in self.members.values():
            if len(members.plans) == total:
                continue
            ranks = tuple(self.offers[plan].rank for plan in members.plans)
            for fqn in members.table.fqns:
                if fqn not in having:
                    self.made.partial[fqn] = ranks
                elif len(having[fqn]) < total:
                    self.made.partial[fqn] = tuple(
                        self.offers[plan].rank for plan in sorted(having[fqn])
                    )

    def _describe_table(self, members: Members) -> None:
        table, elsewhere = members.table, members.elsewhere
        metadata, keys, repeated = self.made.metadata, self.made.keys, self.repeated
        chunks: dict[int, list[ChunkStorageMetadata]] = {}
        # Tensors that lie alike share all that is said of them.
        alike: dict[tuple[int, int], tuple[TensorStorageMetadata, KeyReport]] = {}
        columns = zip(table.fqns, table.class_of, table.look_of, strict=True)
        for entry, (fqn, index, look) in enumerate(columns):
            if elsewhere and in_bitmap(elsewhere, entry):
                continue
            if index == OBJECT:
                metadata[fqn] = BytesStorageMetadata()
                self.made.objects.append(fqn)
                continue
            described = alike.get((index, look))
            if described is None:
                if index not in chunks:
                    chunks[index] = self._chunks(table.classes[index], members, index)
                held_by = len(members.plans)
                described = self._described(table, index, look, chunks[index], held_by)
                alike[index, look] = described
            if fqn in repeated:
                held_by = len(members.plans)
                held_by += sum(len(self.members[name].plans) for name, _ in repeated[fqn])
                described = self._described(table, index, look, chunks[index], held_by)
            metadata[fqn], keys[fqn] = described

    def _described(
        self,
        table: Table,
        index: int,
        look: int,
        chunks: list[ChunkStorageMetadata],
        held_by: int,
    ) -> tuple[TensorStorageMetadata, KeyReport]:
        known, told = table.classes[index], table.looks[look]
        shape = known.sharding.global_shape
        whole = prod(shape)
        unique = whole if self.complete else sum(prod(chunk.sizes) for chunk in chunks)
        held = whole * held_by // known.cells
        stored = TensorStorageMetadata(tensor_properties(told), torch.Size(shape), chunks)
        return stored, key_report(shape, told.dtype, len(chunks), unique, held)

    def _chunks(
        self, known: LayoutClass, members: Members, index: int
    ) -> list[ChunkStorageMetadata]:
        """Return the chunks that a tensor of the class is stored as, each once."""
        dims = grid(known)
        if self.complete and dims is not None and 0 not in known.sharding.global_shape:
            return self._grid_chunks(dims)
        # Not all coordinates are there (a save without collectives), or there is no element.
        everywhere = range(len(members.plans))
        found = {box: None for at in everywhere for box in members.boxes(index, at)}
        return [chunk_metadata(box.offsets, box.sizes) for box in found]

    def _grid_chunks(self, dims: Sequence[Sequence[Interval]]) -> list[ChunkStorageMetadata]:
        """Return the cells of a grid; equal ones of all classes are one object."""
        known, made = self.known_chunks, []
        offsets = product(*([start for start, _ in dim] for dim in dims))
        sizes = product(*([stop - start for start, stop in dim] for dim in dims))
        for cell in zip(offsets, sizes, strict=True):
            chunk = known.get(cell)
            if chunk is None:
                chunk = known[cell] = chunk_metadata(*cell)
            made.append(chunk)
        return made

    def _answer(self) -> None:
        """Tell every rank what is its own."""
        slots: list[list[bytes]] = [[] for _ in self.offers]
        elsewhere: list[list[bytes]] = [[] for _ in self.offers]
        spreads: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in self.offers]
        writes = [False] * len(self.offers)
        chosen = self._spreads()
        for name, members in self.members.items():
            spread = chosen.get(name, {})
            bitmap = bytes(members.elsewhere)
            rows = np.empty((len(members.plans), 2, len(members.slots)), np.uint32)
            rows[:, 0] = members.replicas
            rows[:, 1] = np.stack(members.slots, axis=1)
            writing = np.zeros(len(members.plans), bool)
            for column, used in zip(members.slots, self._used_slots(members, spread), strict=True):
                writing |= column == min(used) if len(used) == 1 else np.isin(column, list(used))
            for plan, row, written in zip(members.plans, rows, writing.tolist(), strict=True):
                slots[plan].append(packed_ints(row))
                elsewhere[plan].append(bitmap)
                spreads[plan].append(tuple(spread.items()))
                writes[plan] = writes[plan] or written
        # A rank's tables come in its own order, the members in that of the tables' first ranks.
        order = {name: at for at, name in enumerate(self.members)}
        extra, loose = self._odd_answers()
        picked = {} if self.picked is None else self.picked.answers()
        for plan, offer in enumerate(self.offers):
            ranked = sorted(range(len(offer.tables)), key=lambda i: order[offer.tables[i].table_id])
            back = [ranked.index(i) for i in range(len(ranked))]
            slots[plan] = [slots[plan][i] for i in back]
            elsewhere[plan] = [elsewhere[plan][i] for i in back]
            spreads[plan] = [spreads[plan][i] for i in back]
            writes[plan] = writes[plan] or bool(extra[plan]) or bool(loose[plan])
            writes[plan] = writes[plan] or plan in picked
        writers = sum(writes)
        in_pieces = tuple(islice(self._in_pieces(), 8))
        objects = tuple(self.made.objects[:8])
        self.made.answers = [
            Answer(
                slots=tuple(slots[plan]),
                elsewhere=tuple(elsewhere[plan]) if any(elsewhere[plan]) else (),
                picked=picked.get(plan, b""),
                loose=tuple(loose[plan]),
                extra=tuple(extra[plan]),
                spreads=tuple(spreads[plan]) if any(spreads[plan]) else (),
                writers=writers,
                in_pieces=in_pieces,
                objects=objects,
            )
            for plan in range(len(self.offers))
        ]

    def _spreads(self) -> dict[bytes, Spread]:
        """Return how many replicas share what is replicated, by table."""
        if self.lowest_rank:
            return {}
        held, total, shared = self._held()
        if not shared:
            return {}
        for plan, owned in enumerate(self.owned_odd):
            nbytes = sum(map(nbytes_of, owned.items))
            held[plan] += nbytes
            total += nbytes
        limit = write_limit(total, held.tolist())
        chosen: dict[bytes, dict[int, int]] = {}
        # The most first: what is little then finds a rank that can take it alone.
        for (name, count), (index, pieces) in sorted(
            shared.items(), key=lambda known: -sum(known[1][1])
        ):
            members = self.members[name]
            plans, slots = np.array(members.plans), members.slots[index]
            in_slot = np.zeros(count, np.int64)
            np.maximum.at(in_slot, slots[slots < count], held[plans[slots < count]])
            writers = writers_needed(pieces, in_slot.tolist(), limit)
            taken = np.array(shared_out(pieces, writers)[1])
            here = slots < writers
            held[plans[here]] += taken[slots[here]]
            if writers > 1:
                chosen.setdefault(name, {})[count] = writers
        return dict(chosen)

    def _held_beside(self) -> tuple[list[int], int]:
        """Return about what each rank writes by way of tables and rows, and what all do."""
        held, total, shared = self._held()
        for (name, count), (index, pieces) in shared.items():
            members = self.members[name]
            plans, slots = np.array(members.plans), members.slots[index]
            # It is shared evenly where it is much; where it is little that does not matter.
            writers = 1 if self.lowest_rank else count
            held[plans[slots < writers]] += sum(pieces) // writers
        return held.tolist(), total

    def _held(self) -> tuple[Ints, int, dict[tuple[bytes, int], tuple[int, list[int]]]]:
        """Return what is written by way of tables and rows.

        Returns:
            Bytes by rank, what is shared left out; bytes in all; and by table and number of
            replicas what is shared: a class that has so many, and the bytes of each piece.
        """
        held = np.zeros(len(self.offers), np.int64)
        total = 0
        shared: dict[tuple[bytes, int], tuple[int, list[int]]] = {}
        for name, members in self.members.items():
            table, plans = members.table, np.array(members.plans)
            kinds = Counter(
                zip(table.class_of, table.look_of, strict=True)
                if not members.elsewhere
                else (
                    (table.class_of[entry], table.look_of[entry])
                    for entry in range(len(table.fqns))
                    if not in_bitmap(members.elsewhere, entry)
                )
            )
            several: dict[int, int] = {}
            for (index, look), number in kinds.items():
                if index == OBJECT:
                    continue
                known, count = table.classes[index], members.replicas[index]
                whole = prod(known.sharding.global_shape) * table.looks[look].dtype.itemsize
                total += whole * number
                if count > 1 and whole:
                    several.setdefault(count, index)
                else:
                    held[plans[members.slots[index] == 0]] += whole // known.cells * number
            if several:
                pieces = shared_entries(table, members.replicas, members.elsewhere)
                for count, index in several.items():
                    shared[name, count] = index, pieces[count][1]
        if self.picked is not None:
            held += self.picked.written
            total += int(self.picked.written.sum())
        return held, total, shared

    def _used_slots(self, members: Members, spread: Spread) -> list[set[int]]:
        """Return the slots that write anything, by class, objects last."""
        owners = owner_slots(members.table, members.replicas, members.elsewhere, spread)
        used: list[set[int]] = [set() for _ in members.replicas]
        if not members.elsewhere:
            # No key by itself: only what different pairs there are.
            for index, owner in set(zip(members.table.class_of, owners, strict=True)):
                used[index].add(owner)
            return used
        for entry, index in enumerate(members.table.class_of):
            if not in_bitmap(members.elsewhere, entry):
                used[index].add(owners[entry])
        return used

    def _odd_answers(
        self,
    ) -> tuple[list[list[tuple[str, tuple[int, ...] | None]]], list[list[int]]]:
        extra: list[list[tuple[str, tuple[int, ...] | None]]] = [[] for _ in self.offers]
        loose: list[list[int]] = [[] for _ in self.offers]
        for plan, owned in enumerate(self.owned_odd):
            told = self.offers[plan].loose
            at = {} if told is None else {item.index: i for i, item in enumerate(told.items)}
            for item in owned.items:
                if item.index in at:
                    loose[plan].append(at[item.index])
                else:
                    offset = item.index.offset
                    extra[plan].append((item.index.fqn, None if offset is None else tuple(offset)))
        return extra, loose

    def _in_pieces(self) -> Iterator[tuple[str, int, int]]:
        for members in self.members.values():
            several = {
                index: found
                for index, known in enumerate(members.table.classes)
                if _may_be_in_pieces(known) and (found := self._pieces(members, index)) is not None
            }
            for entry, index in enumerate(members.table.class_of):
                if index in several and not in_bitmap(members.elsewhere, entry):
                    yield members.table.fqns[entry], *several[index]
        if self.picked is not None:
            yield from self.picked.in_pieces()
        for plan, owned in enumerate(self.owned_odd):
            counts = Counter(item.index.fqn for item in owned.items)
            for fqn, count in counts.items():
                if count > 1:
                    yield fqn, self.offers[plan].rank, count

    def _pieces(self, members: Members, index: int) -> tuple[int, int] | None:
        """Return a rank that writes several chunks of a tensor of the class, and how many."""
        for at, plan in enumerate(members.plans):
            count = len(members.boxes(index, at))
            if count > 1:
                return self.offers[plan].rank, count
        return None


def _replicated(known: LayoutClass) -> frozenset[str]:
    cut = known.cut_axes
    names = (name for axis, name in enumerate(known.axis_names) if axis not in cut)
    return frozenset(name for name in names if name is not None)


def _may_be_in_pieces(known: LayoutClass) -> bool:
    return any(isinstance(cut, Cut) and cut.parts != 1 for cut in known.sharding.cuts)
