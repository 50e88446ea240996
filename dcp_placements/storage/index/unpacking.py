"""The index in a file, unpacked.

Every number is checked against what it refers to before anything is allocated by it, so that an
index of unknown origin can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from math import prod
from typing import Any, TypeVar

import numpy as np

from dcp_placements.storage.index.blocks import Blocks
from dcp_placements.storage.index.columns import ColumnReader, IndexDamage, Ints
from dcp_placements.storage.index.entries import OTHER, Entries, Form
from dcp_placements.storage.index.row_index import TEMPLATE, Naming, Places, RowIndex, Writers
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.table import Transforms

T = TypeVar("T")

MOST_NUMBERS = 1 << 26
"""Integers that all parts of an index may have, in a file of unknown origin."""

MOST_DIMS = 64

LARGEST = 1 << 62


class PackedIndex:
    """An index in a file, unpacked.

    Args:
        blocks: Of the file.
        most: Integers that all of its parts may have.

    Attributes:
        writers: Of the rows.
        values: The pickle of what is neither key nor row.

    Raises:
        IndexDamage: It is none.
    """

    def __init__(self, blocks: Blocks, most: int | None = None) -> None:
        self._blocks = blocks
        directory = blocks.directory
        self._templates = _Directory(directory, 1, 0)
        self._places = _Directory(directory, 2, self._templates.stop)
        self._lists = _Directory(directory, 2, self._places.stop)
        self._listed = directory.ints(len(self._places)).tolist()
        *counts, _ = directory.ints(4, below=1 << 40).tolist()
        state_keys, pairs, writers = counts
        self._check_sizes(most, state_keys + 2 * pairs + 3 * writers)
        self._unpack_shared(blocks.columns(self._lists.stop), writers)
        self._unpack_keys(blocks.columns(self._lists.stop + 1), state_keys, pairs)
        self.values = blocks.block(self._lists.stop + 2)

    def _unpack_keys(self, columns: ColumnReader, state_keys: int, pairs: int) -> None:
        """Unpack all keys, the forms of the first ones, and pairs of keys and places."""
        self._fqns = columns.texts()
        if len(self._fqns) < state_keys:
            raise IndexDamage("more keys than there are")
        form_of = columns.ints(state_keys)
        self._pairs = columns.ints(2 * pairs).reshape(2, -1)
        keys, places = self._pairs
        if len(keys) and not (keys[1:] >= keys[:-1]).all():
            raise IndexDamage("keys out of order")
        for column, below in ((keys, len(self._fqns)), (places, len(self._places))):
            _check_below(column, below)
        _check_below(form_of, len(self.forms))
        self._form_of = form_of.tolist()

    def _check_sizes(self, most: int | None, numbers: int) -> None:
        sizes = np.concatenate([self._places.sizes[1], self._lists.sizes[1], [-1]])
        if int(sizes.min()) < -1 or int(sizes.max()) > MOST_DIMS:
            raise IndexDamage("chunks of a number of dims that no tensor has")
        if int(self._lists.sizes[1].min(initial=0)) < 0:
            raise IndexDamage("chunks of a tensor without dims")
        for number, listed in enumerate(self._listed):
            if listed >= 0 and (
                listed >= len(self._lists)
                or (self._lists.sizes[:, listed] != self._places.sizes[:, number]).any()
            ):
                raise IndexDamage("places with the offsets of other chunks")
        if most is None:
            return
        numbers += sum(6 * count for count in self._templates.sizes[0].tolist())
        for directory in (self._places, self._lists):
            numbers += sum(n * (2 + 2 * max(d, 0)) for n, d in directory.sizes.T.tolist())
        if numbers > most:
            raise IndexDamage(f"it has {numbers:,} numbers, and at most {most:,} are read")

    def _unpack_shared(self, columns: ColumnReader, writers: int) -> None:
        forms = columns.ints().reshape(3, -1)
        dims = columns.ints(below=MOST_DIMS)
        self.shapes = _divided(columns.ints(below=LARGEST).tolist(), dims.tolist())
        tensors = forms[0] >= 0
        if int(forms[0].min(initial=0)) < OTHER:
            raise IndexDamage("a form of no kind")
        _check_below(forms[1][tensors], len(self.shapes))
        _check_below(forms[2][tensors], len(self._lists))
        if (dims[forms[1][tensors]] != self._lists.sizes[1][forms[2][tensors]]).any():
            raise IndexDamage("a tensor with chunks of other dims")
        self.forms = [Form(*values) for values in forms.T.tolist()]
        templates = columns.ints(writers, below=len(self._templates))
        naming_of = columns.ints(writers)
        numbers = columns.ints(writers, below=LARGEST)
        counts = columns.ints(below=LARGEST).tolist()
        _check_below(naming_of, len(counts))
        has_number = columns.ints(below=2).tolist()
        before, behind = columns.texts(), columns.texts()
        if not len(before) == len(behind) == len(has_number):
            raise IndexDamage("names of files in parts")
        ends = [name if has else None for name, has in zip(behind, has_number, strict=True)]
        parts = list(zip(before, ends, strict=True))
        namings: list[Naming] = _divided(parts, counts)
        for naming in namings:
            for part in naming:
                _check_file(part)
        self.writers = Writers(templates, namings, naming_of, numbers)
        steps = columns.ints().tolist()
        lists = _divided(columns.texts(), [max(count, 0) for count in steps])
        self.transforms: list[Transforms] = [
            None if count < 0 else names for count, names in zip(steps, lists, strict=True)
        ]

    def entries(self, properties: Sequence[Any], others: Sequence[Any]) -> Entries:
        """Return the entries of all keys.

        Args:
            properties: Of tensors, by number.
            others: Entries of other classes.
        """
        for form in self.forms:
            if form.properties >= len(properties):
                raise IndexDamage("a tensor of properties that are not there")
            if form.properties == OTHER and not 0 <= form.shape < len(others):
                raise IndexDamage("an entry that is not there")
        return Entries(
            self._fqns[: len(self._form_of)],
            self._form_of,
            self.forms,
            properties,
            self.shapes,
            _in_order(self._read_lists, self._lists),
            others,
        )

    def rows(self, entries: Entries) -> RowIndex:
        """Return the rows, checked.

        Args:
            entries: Of the same index.
        """
        rows = RowIndex(
            self._fqns,
            self.transforms,
            self.writers,
            _in_order(self._read_templates, self._templates),
            _in_order(partial(self._read_places, entries), self._places),
            self._pairs,
            entries,
        )
        rows.check()
        return rows

    def _read_templates(self, block: int) -> list[np.ndarray]:
        counts = self._templates.sizes_in(block)[0].tolist()
        columns = self._blocks.columns(self._templates.start + block)
        joined = np.zeros(sum(counts), TEMPLATE)
        below = {"key": len(self._fqns), "transforms": len(self.transforms)}
        for name in TEMPLATE.names or ():
            joined[name] = columns.ints(len(joined), below=below.get(name, LARGEST))
        return _split(joined, counts)

    def _read_places(self, entries: Entries, block: int) -> list[Places]:
        counts, dims = self._places.sizes_in(block).tolist()
        columns = self._blocks.columns(self._places.start + block)
        writers = columns.ints(sum(counts), below=len(self.writers.templates))
        ordinals = columns.ints(sum(counts), below=1 + int(self._templates.sizes[0].max(initial=0)))
        first = self._places.begins[block]
        listed = self._listed[first : first + len(counts)]
        shapes = zip(counts, dims, listed, strict=True)
        own = iter(_tables(columns, [(n, ndim) for n, ndim, at in shapes if at < 0 <= ndim]))
        offsets = [
            None if ndim < 0 else entries.lists[at].offsets if at >= 0 else next(own)
            for ndim, at in zip(dims, listed, strict=True)
        ]
        parts = offsets, _split(writers, counts), _split(ordinals, counts), listed
        return [
            Places(table, by, numbers, -1 if table is None else at)
            for table, by, numbers, at in zip(*parts, strict=True)
        ]

    def _read_lists(self, block: int) -> list[ChunkList]:
        shapes = list(map(tuple, self._lists.sizes_in(block).T.tolist()))
        columns = self._blocks.columns(self._lists.start + block)
        pairs = zip(_tables(columns, shapes), _tables(columns, shapes), strict=True)
        return [ChunkList(np.stack(pair, axis=1)) for pair in pairs]


def _in_order(read: Callable[[int], list[T]], directory: _Directory) -> list[T]:
    """Return the parts of all blocks of one kind."""
    blocks = range(directory.stop - directory.start)
    return list(chain.from_iterable(map(read, blocks)))


class _Directory:
    """Where parts of one kind are.

    Args:
        columns: Of the index.
        sizes: What each part declares of its size, so many integers.
        start: The number of the first block that has such parts.

    Attributes:
        sizes: ``(columns, parts)``.
        begins: The number of the first part of each block, and the number of parts.
        start: As above.
        stop: The number of the block behind the last one.
    """

    def __init__(self, columns: ColumnReader, sizes: int, start: int) -> None:
        numbers = columns.ints()
        if len(numbers) % sizes:
            raise IndexDamage("parts of no size")
        self.sizes = numbers.reshape(sizes, -1)
        if self.sizes.size and int(self.sizes[0].min()) < 0:
            raise IndexDamage("a part of a negative size")
        counts = columns.ints(most=len(self)).tolist()
        if min(counts, default=1) < 1 or sum(counts) != len(self):
            raise IndexDamage("blocks of other parts than there are")
        self.begins = list(accumulate(counts, initial=0))
        self.start, self.stop = start, start + len(counts)

    def __len__(self) -> int:
        return int(self.sizes.shape[1])

    def sizes_in(self, block: int) -> Ints:
        """Return the sizes of the parts in a block, by its number among those of this kind."""
        return self.sizes[:, self.begins[block] : self.begins[block + 1]]


def _check_below(column: Ints, below: int) -> None:
    if len(column) and (int(column.min()) < 0 or int(column.max()) >= below):
        raise IndexDamage(f"a number out of {below:,}")


def _check_file(part: tuple[str, str | None]) -> None:
    name = part[0] if part[1] is None else f"{part[0]}0{part[1]}"
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise IndexDamage(f"a file outside of the checkpoint: {name!r}")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise IndexDamage("a file's name that no file can have") from error


def _divided(values: Sequence[Any], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return values as tuples of these lengths."""
    if sum(counts) != len(values):
        raise IndexDamage(f"{len(values):,} values for {sum(counts):,} places")
    rest: Iterator[Any] = iter(values)
    return [tuple([next(rest) for _ in range(count)]) for count in counts]


def _split(column: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Return parts of these lengths."""
    stops = accumulate(counts)
    return [column[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def _tables(columns: ColumnReader, shapes: Sequence[tuple[int, ...]]) -> list[Ints]:
    """Return the tables of which ``_joined`` made one column."""
    counts = [prod(shape) for shape in shapes]
    parts = _split(columns.ints(sum(counts), below=LARGEST), counts)
    return [
        np.ascontiguousarray(part.reshape(ndim, count).T)
        for part, (count, ndim) in zip(parts, shapes, strict=True)
    ]
