"""The coordinator's work on picked rows: tensors of which all ranks hold the same rows, at once.

Keys are a *group* where every rank that has one has all of them, in one layout class, with the
same rows: the layers of a model, say, and their moments. One look proves that its rows make a
whole, and one decision per row says who writes it. What does not fit is odd, as elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_placements.errors import Fault
from dcp_placements.evidence import DIGEST_NBYTES, Ints, Offer, Tables, unpacked_ints
from dcp_placements.interop import TensorStorageMetadata, WriteItem
from dcp_placements.items import PickedItems, chunk_metadata, tensor_properties
from dcp_placements.layout import Box
from dcp_placements.ownership import FILE_NBYTES, shared_by_holders, write_limit
from dcp_placements.picked import RowLists, Rows, unpacked_rows
from dcp_placements.report import KeyReport, key_report
from dcp_placements.table import LayoutClass, Look, Table, grid

_PIECES = 64
"""Replicated rows are given out in about so many pieces per rank, so that bytes balance."""


@dataclass(slots=True)
class _Holder:
    """A rank that has picked rows.

    Attributes:
        plan: Its plan's position.
        table: Its table of them.
        made: Its items.
        digests: One per item; empty where there are none.
        starts: By entry, the number of its first item.
    """

    plan: int
    table: Table
    made: PickedItems
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    starts: Ints


@dataclass(slots=True)
class _Share:
    """What one holder has of each tensor of a group.

    Attributes:
        holder: The rank.
        entries: The group's keys in its table.
        numbers: Its boxes' positions among the group's.
        parts: By row, the positions of its boxes.
    """

    holder: _Holder
    entries: Ints
    numbers: list[int]
    parts: dict[int, list[int]]


@dataclass(slots=True)
class _Group:
    """Keys that all their ranks hold alike.

    Attributes:
        fqns: The keys.
        known: Their class.
        look: Their properties.
        boxes: Their boxes, each once.
        shares: What each rank has.
        kept: Positions of the keys that are not odd.
        batches: Those in batches, each with the plan that writes a part, by its first box.
    """

    fqns: list[str]
    known: LayoutClass
    look: Look
    boxes: list[Box]
    shares: list[_Share]
    kept: list[int] = field(default_factory=list)
    batches: list[tuple[list[int], dict[int, int]]] = field(default_factory=list)


class PickedPlan:
    """Plans all rows that ranks name themselves.

    Args:
        offers: One per rank.
        tables: All tables that the offers name.
        complete: Whether these ranks are all there are.

    Attributes:
        keys: All keys.
        odd: Keys that are to be taken apart item by item.
        faults: Keys of which there is nothing to take apart.
        written: Bytes that each plan writes, once ``share`` has decided.
    """

    def __init__(self, offers: Sequence[Offer], tables: Tables, *, complete: bool) -> None:
        self.complete = complete
        self.total = len(offers)
        self.ranks = [offer.rank for offer in offers]
        self.odd: dict[str, None] = {}
        self.faults: list[Fault] = []
        self.written = np.zeros(len(offers), np.int64)
        self._groups: list[_Group] = []
        self._holders: dict[int, _Holder] = {}
        by_table: dict[bytes, list[_Holder]] = {}
        for plan, offer in enumerate(offers):
            if offer.picked is not None:
                name = offer.picked.table.table_id
                known = self._holders[plan] = _holder(plan, tables[name], offer)
                by_table.setdefault(name, []).append(known)
        where: dict[str, list[tuple[int, int]]] = {}
        columns = []
        held_by = list(by_table.values())
        for number, holders in enumerate(held_by):
            columns.append(_columns(holders))
            for entry, fqn in enumerate(holders[0].table.fqns):
                where.setdefault(fqn, []).append((number, entry))
        self.keys: Collection[str] = where.keys()
        alike: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for fqn, places in where.items():
            kind = []
            for number, entry in places:
                table = held_by[number][0].table
                column = columns[number][entry]
                kind.append((number, table.class_of[entry], table.look_of[entry], column))
            alike.setdefault(tuple(kind), []).append(fqn)
        for fqns in alike.values():
            found = [
                (held_by[number], [where[fqn][at][1] for fqn in fqns])
                for at, (number, _) in enumerate(where[fqns[0]])
            ]
            self._judge(fqns, found)

    def _judge(self, fqns: list[str], places: list[tuple[list[_Holder], list[int]]]) -> None:
        """Note a group, or that it does not make whole tensors."""
        classes: dict[LayoutClass, None] = {}
        looks: dict[torch.dtype, Look] = {}
        for holders, entries in places:
            table = holders[0].table
            classes.setdefault(table.classes[table.class_of[entries[0]]])
            look = table.looks[table.look_of[entries[0]]]
            looks.setdefault(look.dtype, look)
        known, look = next(iter(classes)), next(iter(looks.values()))
        if len(classes) > 1 or len(looks) > 1:
            self.odd.update(dict.fromkeys(fqns))
            return
        numbers: dict[Box, int] = {}
        shares = []
        for holders, entries in places:
            for holder in holders:
                mine, parts = [], dict[int, list[int]]()
                for box in holder.made.boxes(entries[0]):
                    number = numbers.setdefault(box, len(numbers))
                    mine.append(number)
                    parts.setdefault(box.offsets[known.rows], []).append(number)
                shares.append(_Share(holder, np.array(entries), mine, parts))
        group = _Group(fqns, known, look, list(numbers), shares)
        shape = known.sharding.global_shape
        # Rows are apart, and so are the cells of a grid: boxes that differ do not overlap.
        whole = not self.complete or sum(box.numel for box in numbers) == prod(shape)
        if not numbers and not whole:
            self.faults += [_nothing_fault(fqn, shape) for fqn in fqns]
        elif not whole or grid(known) is None:
            self.odd.update(dict.fromkeys(fqns))
        else:
            self.odd.update((fqns[at], None) for at in _differing(group))
        self._groups.append(group)

    def share(
        self, odd: Collection[str], held: Sequence[int], others: int, *, lowest_rank: bool
    ) -> None:
        """Decide who writes what.

        Args:
            odd: Keys that are left out.
            held: Bytes that each rank writes beside picked rows.
            others: Bytes that are written beside them in all.
            lowest_rank: Leave every replica to its lowest rank.
        """
        load = list(held)
        total = others
        shared: list[tuple[int, list[int]]] = []
        slots: list[tuple[dict[int, int], int]] = []
        for group in self._groups:
            group.kept = [at for at, fqn in enumerate(group.fqns) if fqn not in odd]
            if not group.kept:
                continue
            holders: dict[int, list[int]] = {}
            nbytes: dict[int, int] = {}
            for share in group.shares:
                for part in share.parts.values():
                    holders.setdefault(part[0], []).append(share.holder.plan)
                    nbytes[part[0]] = sum(group.boxes[number].numel for number in part)
            for part_number, plans in holders.items():
                plans.sort()
                nbytes[part_number] *= group.look.dtype.itemsize
            replicated = sum(nbytes[number] for number, plans in holders.items() if len(plans) > 1)
            several = not lowest_rank and replicated * len(group.kept) > FILE_NBYTES
            for positions in _batches(group, several=several):
                owner: dict[int, int] = {}
                group.batches.append((positions, owner))
                for number, plans in holders.items():
                    size = nbytes[number] * len(positions)
                    total += size
                    if len(plans) == 1 or lowest_rank:
                        owner[number] = plans[0]
                        load[plans[0]] += size
                    else:
                        shared.append((size, plans))
                        slots.append((owner, number))
        limit = write_limit(total, load)
        for (owner, number), plan in zip(
            slots, shared_by_holders(shared, load, limit), strict=True
        ):
            owner[number] = plan
        self.written = np.array(load, np.int64) - np.array(held, np.int64)

    def apart(
        self, plan: int, keys: Collection[str]
    ) -> Iterator[tuple[str, str | None, Rows, list[WriteItem], list[bytes | None]]]:
        """Yield of those keys that one rank has: the key, its rule, rows, items and digests."""
        holder = self._holders.get(plan)
        if holder is None:
            return
        table = holder.table
        for entry, fqn in enumerate(table.fqns):
            if fqn not in keys:
                continue
            items = holder.made.of(entry)
            start = int(holder.starts[entry])
            found = holder.digests[start : start + len(items)]
            digests = [digest.tobytes() if digest else None for digest in found]
            rule = table.rule_of[entry]
            yield (
                *(fqn, None if rule < 0 else table.rules[rule], holder.made.rows.of(entry)),
                *(items, digests or [None] * len(items)),
            )

    def described(self) -> Iterator[tuple[list[str], TensorStorageMetadata, KeyReport]]:
        """Yield keys with the metadata and the report that they share."""
        for group in self._groups:
            shape, dtype = group.known.sharding.global_shape, group.look.dtype
            chunks = [chunk_metadata(box.offsets, box.sizes) for box in sorted(group.boxes)]
            sizes = [box.numel for box in group.boxes]
            held = sum(sizes[number] for share in group.shares for number in share.numbers)
            report = key_report(shape, dtype, len(chunks), sum(sizes), held)
            stored = TensorStorageMetadata(tensor_properties(group.look), torch.Size(shape), chunks)
            yield [group.fqns[at] for at in group.kept], stored, report

    def partial(self) -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """Yield keys that not all ranks have, with the ranks."""
        for group in self._groups:
            if len(group.shares) < self.total:
                plans = sorted(share.holder.plan for share in group.shares)
                ranks = tuple(self.ranks[plan] for plan in plans)
                yield [group.fqns[at] for at in group.kept], ranks

    def answers(self) -> dict[int, bytes]:
        """Return, for each plan that writes any, the rows that it writes, packed."""
        found = {
            plan: RowLists([()], [0] * len(holder.table.fqns))
            for plan, holder in self._holders.items()
        }
        known: dict[int, dict[Rows, int]] = {plan: {(): 0} for plan in found}
        for group in self._groups:
            for positions, owner in group.batches:
                for share in group.shares:
                    plan = share.holder.plan
                    rows = tuple(row for row, part in share.parts.items() if owner[part[0]] == plan)
                    if not rows:
                        continue
                    lists = found[plan]
                    number = known[plan].setdefault(rows, len(lists.lists))
                    if number == len(lists.lists):
                        lists.lists.append(rows)
                    for entry in share.entries[positions].tolist():
                        lists.list_of[entry] = number
        return {plan: lists.packed() for plan, lists in found.items() if len(lists.lists) > 1}

    def in_pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield keys of which one rank writes several chunks, with the rank and how many."""
        for group in self._groups:
            for positions, owner in group.batches:
                counts: Counter[int] = Counter()
                parts = {
                    part[0]: len(part) for share in group.shares for part in share.parts.values()
                }
                for number, plan in owner.items():
                    counts[plan] += parts[number]
                plan, count = max(counts.items(), key=lambda known: known[1], default=(0, 0))
                if count > 1:
                    for at in positions:
                        yield group.fqns[at], self.ranks[plan], count


def _holder(plan: int, table: Table, offer: Offer) -> _Holder:
    assert offer.picked is not None
    told = offer.picked.table
    coordinates = unpacked_ints(told.coordinates).tolist()
    made = PickedItems(table, coordinates, unpacked_rows(offer.picked.rows))
    counts = [len(made.boxes(entry)) for entry in range(len(table.fqns))]
    starts = np.array([0, *accumulate(counts)])
    digests = np.frombuffer(told.digests.get(0, b""), f"<u{DIGEST_NBYTES}")
    return _Holder(plan, table, made, digests, starts)


def _columns(holders: Sequence[_Holder]) -> list[int]:
    """Return by entry of a table a number, equal where every rank has the same list for both."""
    lists = np.array([holder.made.rows.list_of for holder in holders])
    columns: list[int] = np.unique(lists, axis=1, return_inverse=True)[1].reshape(-1).tolist()
    return columns


def _batches(group: _Group, *, several: bool) -> Iterator[list[int]]:
    """Yield positions of a group's keys that are given out together."""
    most = max(len(share.parts) for share in group.shares)
    count = min(-(-_PIECES // max(most, 1)), len(group.kept)) if several else 1
    for start in range(count):
        yield group.kept[start::count]


def _differing(group: _Group) -> list[int]:
    """Return the positions of keys of which two ranks hold one box with different contents."""
    if sum(len(share.numbers) for share in group.shares) == len(group.boxes):
        return []
    known = np.zeros((len(group.fqns), len(group.boxes)), np.uint64)
    differ = np.zeros(len(group.fqns), bool)
    for share in group.shares:
        if not len(share.holder.digests) or not share.numbers:
            continue
        first = share.holder.starts[share.entries]
        told = share.holder.digests[first[:, None] + np.arange(len(share.numbers))]
        there = known[:, share.numbers]
        differ |= ((there != told) & (there != 0) & (told != 0)).any(axis=1)
        known[:, share.numbers] = np.where(there == 0, told, there)
    return np.flatnonzero(differ).tolist()


def _nothing_fault(fqn: str, shape: tuple[int, ...]) -> Fault:
    return Fault(
        fqn,
        f"nobody holds any row of the {shape} tensor",
        (
            "likely:      IndexShard with an empty list on every rank that has the key",
            "way out:     every row must be named by one of the ranks",
        ),
    )
