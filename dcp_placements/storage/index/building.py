"""The index of the rows that writers report, from what they have in common."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from dcp_placements.storage.index.columns import Ints
from dcp_placements.storage.index.coordinates import (
    matching_order,
    places_in_runs,
    row_codes,
    run_starts,
)
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import TEMPLATE, Naming, Places, RowIndex, Writers
from dcp_placements.storage.metadata.table import Offset, Rows, Transforms

_NUMBERED = re.compile(r"(\D*)(0|[1-9]\d{0,15})(.*)", re.DOTALL | re.ASCII)


def by_file(rows: Rows) -> Iterator[Rows]:
    """Yield the rows of each file as if it had a writer of its own.

    Of two rows for the same chunk the later one counts, whatever their files.
    """
    codes = rows.rows["fqn"].astype(np.int64) * len(rows.offsets) + rows.rows["offset"]
    _, last = np.unique(codes[::-1], return_index=True)
    kept = rows.rows[np.sort(len(codes) - 1 - last)]
    in_order = kept[np.argsort(kept["path"], kind="stable")]
    starts = run_starts(in_order["path"])
    for start, stop in pairwise([*starts.tolist(), len(in_order)]):
        some = in_order[start:stop].copy()
        path = rows.paths[int(some["path"][0])]
        some["path"] = 0
        names = []
        for column, held in (("fqn", rows.fqns), ("offset", rows.offsets)):
            # In the order in which they occur, so that files written alike have equal rows.
            _, first, numbers = np.unique(some[column], return_index=True, return_inverse=True)
            by_first = np.argsort(first)
            rank = np.empty_like(by_first)
            rank[by_first] = np.arange(len(first))
            names.append(tuple([held[at] for at in some[column][first[by_first]].tolist()]))
            some[column] = rank[numbers.reshape(-1)]
        yield Rows(names[0], names[1], (path,), rows.transforms, some)


@dataclass(slots=True)
class _Group:
    """Writers of one template.

    Attributes:
        first: The rows of one of them.
        dims: By slot, of its offset; -1 of objects.
        writers: Their numbers.
        listed: By writer, its offsets by slot.
        template: Its number.
    """

    first: Rows
    dims: tuple[int, ...]
    writers: list[int] = field(default_factory=list)
    listed: list[Sequence[Offset]] = field(default_factory=list)
    template: int = 0

    def offsets(self) -> list[Ints | None]:
        """Return the offsets by slot, ``(writers, ndim)``; None of objects."""
        flat = [list(chain.from_iterable([o or () for o in listed])) for listed in self.listed]
        columns = np.array(flat, np.int64).reshape(len(self.writers), -1)
        stops = list(accumulate([max(ndim, 0) for ndim in self.dims]))
        return [
            None if ndim < 0 else columns[:, stop - ndim : stop]
            for ndim, stop in zip(self.dims, stops, strict=True)
        ]


@dataclass(slots=True)
class _GroupRows:
    """The rows of all groups, one group after another.

    Attributes:
        groups: Their numbers.
        slots: As in the groups.
        templates: Of dtype ``TEMPLATE``.
    """

    groups: Ints
    slots: Ints
    templates: np.ndarray


class _Builder:
    def __init__(self, keys: Iterable[str]) -> None:
        self.numbers = {fqn: number for number, fqn in enumerate(keys)}
        self.transforms: dict[Transforms, int] = {}
        self.groups: dict[tuple[tuple[int, ...], Hashable], _Group] = {}
        self.templates: dict[bytes, tuple[int, np.ndarray]] = {}
        self.namings: dict[Naming, int] = {}
        self.of_writer: list[tuple[int, int]] = []

    def add(self, rows: Rows) -> None:
        dims = tuple([-1 if offset is None else len(offset) for offset in rows.offsets])
        key = dims, (rows.fqns, rows.transforms, rows.rows.tobytes())
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(rows, dims)
        group.writers.append(len(self.of_writer))
        group.listed.append(rows.offsets)
        naming, number = _naming(rows.paths)
        self.of_writer.append((self.namings.setdefault(naming, len(self.namings)), number))

    def rows_of_group(self, group: _Group) -> tuple[np.ndarray, Ints]:
        """Return the template of a group, without ordinals, and the slots of its rows."""
        rows = group.first
        numbers = list(map(self.numbers.get, rows.fqns))
        if None in numbers:
            numbers = [self.numbers.setdefault(fqn, len(self.numbers)) for fqn in rows.fqns]
        transforms = [
            self.transforms.setdefault(steps, len(self.transforms)) for steps in rows.transforms
        ]
        held = rows.rows
        of_key = np.array(numbers, np.int64)[held["fqn"]]
        slots = held["offset"].astype(np.int64)
        # Of two rows for the same chunk the later one counts.
        codes = of_key * len(group.dims) + slots
        if not (codes[1:] > codes[:-1]).all():
            _, last = np.unique(codes[::-1], return_index=True)
            kept = np.sort(len(held) - 1 - last)
            kept = kept[np.argsort(of_key[kept], kind="stable")]
            held, of_key, slots = held[kept], of_key[kept], slots[kept]
        template = np.zeros(len(held), TEMPLATE)
        template["key"] = of_key
        template["file"] = held["path"]
        if any(transforms):
            template["transforms"] = np.array(transforms, np.int64)[held["transforms"]]
        template["start"], template["length"] = held["start"], held["length"]
        return template, slots

    def rows_of_groups(self) -> _GroupRows:
        """Return the rows of all groups; note their templates."""
        groups = list(self.groups.values())
        parts = [self.rows_of_group(group) for group in groups]
        counts = [len(slots) for _, slots in parts]
        numbers = np.repeat(np.arange(len(groups)), counts)
        slots = np.concatenate([np.zeros(0, np.int64), *[slots for _, slots in parts]])
        templates = np.concatenate([np.zeros(0, TEMPLATE), *[template for template, _ in parts]])
        starts = run_starts(numbers * len(self.numbers) + templates["key"])
        templates["ordinal"] = places_in_runs(starts, len(templates))
        for group, stop, count in zip(groups, accumulate(counts), counts, strict=True):
            template = templates[stop - count : stop]
            number = len(self.templates)
            group.template = self.templates.setdefault(template.tobytes(), (number, template))[0]
        return _GroupRows(numbers, slots, templates)

    def finish(self, entries: Entries | None) -> RowIndex:
        """Return the index."""
        rows = self.rows_of_groups()
        groups = list(self.groups.values())
        fqns = tuple(self.numbers)
        lists = [] if entries is None else entries.list_numbers()
        lists += [-1] * (len(fqns) - len(lists))
        # Keys whose lists of chunks differ have places of their own, in the order of each.
        keys, parts = _parts_by_key(groups, rows, np.array(lists, np.int64))
        numbers: dict[bytes, int] = {}
        places: dict[Hashable, tuple[int, Places]] = {}
        offsets = [group.offsets() for group in groups]
        writers = [np.array(group.writers, np.int64) for group in groups]
        listed: dict[int, _Listed | None] = {-1: None}
        for part in dict.fromkeys(parts):
            table = np.frombuffer(part, np.int64).reshape(-1, 5)
            number = int(table[0, 4])
            if entries is not None and number not in listed:
                of_list = entries.lists[number].offsets
                listed[number] = _Listed(number, of_list, _are_sorted(row_codes(of_list)))
            held = _places(offsets, writers, table[:, 1:4].tolist(), listed[number])
            numbers[part] = places.setdefault(held.content, (len(places), held))[0]
        of_keys = list(map(numbers.__getitem__, parts))
        of_writer = np.array(self.of_writer, np.int64).reshape(-1, 2)
        templates = np.zeros(len(of_writer), np.int64)
        for group in groups:
            templates[group.writers] = group.template
        return RowIndex(
            fqns,
            tuple(self.transforms),
            Writers(templates, tuple(self.namings), of_writer[:, 0], of_writer[:, 1]),
            [template for _, template in self.templates.values()],
            [held for _, held in places.values()],
            np.array([keys, of_keys], np.int64),
            entries,
        )


def build_index(written: Iterable[Rows], entries: Entries | None = None) -> RowIndex:
    """Return the index of what writers wrote; of two rows for one chunk the later one counts.

    Args:
        written: By writer, in order, its rows.
        entries: Of the state dict: their keys come first in the index, and places are in the order
            of their chunks.
    """
    builder = _Builder(() if entries is None else entries.fqns)
    for one in written:
        builder.add(one)
    return builder.finish(entries)


def _parts_by_key(
    groups: Sequence[_Group], rows: _GroupRows, lists: Ints
) -> tuple[list[int], list[bytes]]:
    """Return keys, in order, and the rows of each as bytes.

    A row has dims, the number of its group, ordinal, slot, and the number of the list of chunks of
    its key. Rows of other dims of one key are as of another one.

    Args:
        groups: Of writers.
        rows: Of these.
        lists: By key, the number of its list of chunks.
    """
    all_dims = np.array([ndim for group in groups for ndim in group.dims], np.int64)
    firsts = np.array(list(accumulate([len(group.dims) for group in groups], initial=0)))
    dims = all_dims[firsts[rows.groups] + rows.slots]
    key, ordinal = rows.templates["key"], rows.templates["ordinal"]
    order = np.lexsort((rows.slots, ordinal, rows.groups, dims, key))
    table = np.stack([dims, rows.groups, ordinal, rows.slots, lists[key]], axis=1)[order]
    in_order = key[order]
    starts = run_starts(in_order * (all_dims.max(initial=0) + 2) + table[:, 0])
    content, nbytes = table.tobytes(), table.itemsize * table.shape[1]
    begins = (starts * nbytes).tolist()
    parts = map(content.__getitem__, map(slice, begins, [*begins[1:], len(content)]))
    return in_order[starts].tolist(), list(parts)


class _Listed(NamedTuple):
    """A list of chunks: its number, its offsets, and whether these are sorted and distinct."""

    number: int
    offsets: Ints
    is_sorted: bool


def _places(
    offsets_of: Sequence[Sequence[Ints | None]],
    writers_of: Sequence[Ints],
    rows: Sequence[Sequence[int]],
    listed: _Listed | None,
) -> Places:
    """Return the places of keys with these rows, in the order of the chunks that are listed.

    Args:
        offsets_of: By group and slot, ``(writers, ndim)``; None of objects.
        writers_of: By group, its writers.
        rows: The number of the group, ordinal and slot of each.
        listed: The list of chunks; None for none.
    """
    parts, ordinals = [], []
    is_object = False
    for number, ordinal, slot in rows:
        held = offsets_of[number][slot]
        is_object = held is None
        parts.append(np.zeros((len(writers_of[number]), 0), np.int64) if held is None else held)
        ordinals += [ordinal] * len(writers_of[number])
    offsets = parts[0] if len(parts) == 1 else np.concatenate(parts)
    by = np.concatenate([writers_of[number] for number, _, _ in rows])
    numbers = np.array(ordinals, np.int64)
    if listed is not None and listed.is_sorted and np.array_equal(offsets, listed.offsets):
        return Places(listed.offsets, by, numbers, listed.number)
    codes = row_codes(offsets)
    order = np.arange(len(codes))
    if not _are_sorted(codes):
        # Of two rows for the same chunk the later one counts.
        order = np.lexsort((numbers, by, codes))
        kept = order[np.append(np.diff(codes[order]) != 0, True)[: len(order)]]
        if len(kept) < len(order):
            kept.sort()
            offsets, by, numbers = offsets[kept], by[kept], numbers[kept]
            order = np.arange(len(offsets))
    if is_object:
        return Places(None, by, numbers)
    if listed is not None:
        in_order = matching_order(offsets, listed.offsets)
        if in_order is not None:
            return Places(listed.offsets, by[in_order], numbers[in_order], listed.number)
    return Places(np.ascontiguousarray(offsets[order]), by[order], numbers[order])


def _are_sorted(codes: Ints) -> bool:
    """Whether each number is larger than the one before."""
    return bool((codes[1:] > codes[:-1]).all())


def _naming(paths: Sequence[str]) -> tuple[Naming, int]:
    """Return how a writer names its files, and the number that stands in all of them."""
    parts = [_NUMBERED.fullmatch(path) for path in paths]
    numbers = {match[2] if match else "" for match in parts}
    if len(numbers) != 1 or "" in numbers:
        return tuple([(path, None) for path in paths]), 0
    return tuple([(match[1], match[3]) for match in parts if match]), int(numbers.pop())
