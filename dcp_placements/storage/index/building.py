"""The index of the rows that writers report, from what they have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np

from dcp_placements.storage.index.columns import Ints
from dcp_placements.storage.index.coordinates import matching_order, row_codes
from dcp_placements.storage.index.entries import Entries
from dcp_placements.storage.index.row_index import TEMPLATE, Naming, Places, RowIndex, Writers
from dcp_placements.storage.metadata.table import Kind, Offset, Rows, Transforms, agreed_starts

_NUMBERED = re.compile(r"(\D*)(0|[1-9]\d{0,15})(.*)", re.DOTALL | re.ASCII)


@dataclass(frozen=True, slots=True)
class Written:
    """What one writer wrote.

    Attributes:
        like: Equal for writers with equal ``rows()``.
        rows: Returns rows whose ``offset`` is a position in ``offsets``, and whose ``path`` is one
            in ``paths``; their own lists of these are not used.
        offsets: By number.
        paths: The names of its files.
    """

    like: Hashable
    rows: Callable[[], Rows]
    offsets: Sequence[Offset]
    paths: Sequence[str]


def written_rows(rows: Rows) -> Written:
    """Return what a writer wrote that reports all its rows."""
    starts = None if rows.starts is None else frozenset(rows.starts.items())
    like = rows.fqns, rows.transforms, rows.rows.tobytes(), starts
    return Written(like, lambda: rows, rows.offsets, rows.paths)


def by_file(rows: Rows) -> Iterator[Written]:
    """Yield the rows of each file as if it had a writer of its own.

    Of two rows for the same chunk the later one counts, whatever their files.
    """
    codes = rows.rows["fqn"].astype(np.int64) * len(rows.offsets) + rows.rows["offset"]
    _, last = np.unique(codes[::-1], return_index=True)
    kept = rows.rows[np.sort(len(codes) - 1 - last)]
    in_order = kept[np.argsort(kept["path"], kind="stable")]
    starts = np.flatnonzero(np.diff(in_order["path"].astype(np.int64), prepend=-1))
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
        yield written_rows(Rows(names[0], names[1], (path,), rows.transforms, some, rows.starts))


@dataclass(slots=True)
class _Group:
    """Writers of one template.

    Attributes:
        writers: Their numbers.
        offsets: By slot, ``(writers, ndim)``; None of objects.
        rows: ``(rows, 3)``: key, ordinal, slot.
    """

    first: Written
    writers: list[int] = field(default_factory=list)
    listed: list[Sequence[Offset]] = field(default_factory=list)
    offsets: list[Ints | None] = field(default_factory=list)
    rows: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    template: int = 0


class _Builder:
    def __init__(self, keys: Iterable[str]) -> None:
        self.numbers = {fqn: number for number, fqn in enumerate(keys)}
        self.transforms: dict[Transforms, int] = {}
        self.starts: dict[Kind, int | None] | None = {}
        self.groups: dict[tuple[tuple[int, ...], Hashable], _Group] = {}
        self.templates: dict[bytes, tuple[int, np.ndarray]] = {}
        self.namings: dict[Naming, int] = {}
        self.of_writer: list[tuple[int, int]] = []

    def add(self, written: Written) -> None:
        dims = tuple([-1 if offset is None else len(offset) for offset in written.offsets])
        key = dims, written.like
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(written)
        group.writers.append(len(self.of_writer))
        group.listed.append(written.offsets)
        naming, number = _naming(written.paths)
        self.of_writer.append((self.namings.setdefault(naming, len(self.namings)), number))

    def finish_group(self, group: _Group, dims: tuple[int, ...]) -> None:
        """Make the template of a group, and the arrays of its offsets."""
        rows = group.first.rows()
        if self.starts is not None and len(rows.rows):
            self.starts = None if rows.starts is None else agreed_starts(self.starts, rows.starts)
        numbers = list(map(self.numbers.get, rows.fqns))
        if None in numbers:
            numbers = [self.numbers.setdefault(fqn, len(self.numbers)) for fqn in rows.fqns]
        keys = np.array(numbers, np.int64)
        transforms = np.array(
            [self.transforms.setdefault(steps, len(self.transforms)) for steps in rows.transforms],
            np.int64,
        )
        held = rows.rows
        of_key, slots = keys[held["fqn"]], held["offset"].astype(np.int64)
        # Of two rows for the same chunk the later one counts.
        codes = of_key * len(dims) + slots
        if not (codes[1:] > codes[:-1]).all():
            _, last = np.unique(codes[::-1], return_index=True)
            kept = np.sort(len(held) - 1 - last)
            kept = kept[np.argsort(of_key[kept], kind="stable")]
            held, of_key, slots = held[kept], of_key[kept], slots[kept]
        firsts = np.flatnonzero(np.diff(of_key, prepend=-1))
        counts = np.diff(firsts, append=len(of_key))
        template = np.zeros(len(held), TEMPLATE)
        template["key"] = of_key
        template["ordinal"] = np.arange(len(held)) - np.repeat(firsts, counts)
        template["file"] = held["path"]
        template["transforms"] = transforms[held["transforms"]]
        template["start"], template["length"] = held["start"], held["length"]
        number = len(self.templates)
        group.template = self.templates.setdefault(template.tobytes(), (number, template))[0]
        group.rows = np.stack([of_key, template["ordinal"], slots], axis=1)
        flat = [list(chain.from_iterable([o or () for o in listed])) for listed in group.listed]
        columns = np.array(flat, np.int64).reshape(len(group.writers), -1)
        at = 0
        for ndim in dims:
            group.offsets.append(None if ndim < 0 else columns[:, at : at + ndim])
            at += max(ndim, 0)
        group.listed = []

    def finish(self, entries: Entries | None) -> RowIndex:
        """Return the index."""
        groups = list(self.groups.values())
        for (dims, _), group in self.groups.items():
            self.finish_group(group, dims)
        fqns = tuple(self.numbers)
        places: dict[Hashable, tuple[int, Places]] = {}
        lists = [] if entries is None else entries.list_numbers()
        lists += [-1] * (len(fqns) - len(lists))
        keys, starts, rows = _rows_by_key(groups)
        # Keys whose lists of chunks differ have places of their own, in the order of each.
        list_of = list(map(lists.__getitem__, keys))
        content, nbytes = rows.tobytes(), rows.itemsize * rows.shape[1]
        begins = [start * nbytes for start in starts]
        parts = map(content.__getitem__, map(slice, begins, [*begins[1:], len(content)]))
        signatures = list(zip(parts, list_of, strict=True))
        numbers = dict.fromkeys(signatures, 0)
        first = dict(zip(reversed(signatures), reversed(starts), strict=True))
        for signature in numbers:
            part, number = signature
            start = first[signature]
            listed = entries.lists[number].offsets if entries and number >= 0 else None
            held = _places(groups, rows[start : start + len(part) // nbytes], number, listed)
            numbers[signature] = places.setdefault(held.content, (len(places), held))[0]
        of_keys = list(map(numbers.__getitem__, signatures))
        of_writer = np.array(self.of_writer, np.int64).reshape(-1, 2)
        templates = np.zeros(len(of_writer), np.int64)
        for group in groups:
            templates[group.writers] = group.template
        return RowIndex(
            fqns,
            tuple(self.transforms),
            self.starts,
            Writers(templates, tuple(self.namings), of_writer[:, 0], of_writer[:, 1]),
            [template for _, template in self.templates.values()],
            [held for _, held in places.values()],
            np.array([len(held.writers) for _, held in places.values()], np.int64),
            np.array([keys, of_keys], np.int64),
            entries,
        )


def build_index(written: Iterable[Written], entries: Entries | None = None) -> RowIndex:
    """Return the index of what writers wrote; of two rows for one chunk the later one counts.

    Args:
        written: By writer, in order.
        entries: Of the state dict: their keys come first in the index, and places are in the order
            of their chunks.
    """
    builder = _Builder(() if entries is None else entries.fqns)
    for one in written:
        builder.add(one)
    return builder.finish(entries)


def _rows_by_key(groups: Sequence[_Group]) -> tuple[list[int], list[int], Ints]:
    """Return keys, in order; where the rows of each begin; and the rows of all.

    A row has the number of its group, ordinal, slot and dims. Rows of other dims of one key are as
    of another one.
    """
    columns = [np.zeros((0, 5), np.int64)]
    for number, group in enumerate(groups):
        dims = np.array([-1 if o is None else o.shape[1] for o in group.offsets], np.int64)
        key, ordinal, slot = group.rows.T
        columns.append(
            np.stack([key, dims[slot], np.full(len(key), number), ordinal, slot], axis=1)
        )
    rows = np.concatenate(columns)
    rows = rows[np.lexsort(rows.T[::-1])]
    changes = np.diff(rows[:, :2], axis=0, prepend=-2).any(axis=1)
    starts = np.flatnonzero(changes).tolist()
    return rows[starts, 0].tolist(), starts, np.ascontiguousarray(rows[:, [2, 3, 4, 1]])


def _places(groups: Sequence[_Group], rows: Ints, chunks: int, listed: Ints | None) -> Places:
    """Return the places of keys with these rows, in the order of the chunks that are listed.

    Args:
        groups: Of writers.
        rows: Of ``_rows_by_key``.
        chunks: The number of the list of chunks.
        listed: The offsets of these; None for no list.
    """
    parts, writers, ordinals = [], [], []
    for number, ordinal, slot, _ in rows.tolist():
        group = groups[number]
        offsets = group.offsets[slot]
        parts.append(np.zeros((len(group.writers), 0), np.int64) if offsets is None else offsets)
        writers.append(np.array(group.writers, np.int64))
        ordinals.append(np.full(len(group.writers), ordinal))
    offsets, by, numbers = [np.concatenate(p) for p in (parts, writers, ordinals)]
    codes = row_codes(offsets)
    # Of two rows for the same chunk the later one counts.
    order = np.lexsort((numbers, by, codes))
    kept = order[np.append(np.diff(codes[order]) != 0, True)[: len(order)]]
    if len(kept) < len(order):
        kept.sort()
        offsets, by, numbers = offsets[kept], by[kept], numbers[kept]
    if int(rows[0, 3]) < 0:
        return Places(None, by, numbers)
    if listed is not None:
        in_order = matching_order(offsets, listed)
        if in_order is not None:
            return Places(listed, by[in_order], numbers[in_order], chunks)
    order = order if len(kept) == len(order) else np.arange(len(offsets))
    return Places(np.ascontiguousarray(offsets[order]), by[order], numbers[order])


def _naming(paths: Sequence[str]) -> tuple[Naming, int]:
    """Return how a writer names its files, and the number that stands in all of them."""
    parts = [_NUMBERED.fullmatch(path) for path in paths]
    numbers = {match[2] if match else "" for match in parts}
    if len(numbers) != 1 or "" in numbers:
        return tuple([(path, None) for path in paths]), 0
    return tuple([(match[1], match[3]) for match in parts if match]), int(numbers.pop())
