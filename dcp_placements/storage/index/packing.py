"""The index in a file: its parts packed, and read back one by one when they are used.

Every number is checked against what it refers to before anything is allocated by it, so that an
index of unknown origin can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np

from dcp_placements.storage.index.blocks import Blocks, BlockWriter
from dcp_placements.storage.index.columns import (
    ColumnReader,
    ColumnWriter,
    IndexDamage,
    Ints,
    tables,
)
from dcp_placements.storage.index.entries import OTHER, Entries, Form
from dcp_placements.storage.index.parts import Parts
from dcp_placements.storage.index.row_index import TEMPLATE, Naming, Places, RowIndex, Writers
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.table import Starts, Transforms

MOST_NUMBERS = 1 << 26
"""Integers that all parts of an index may have, in a file of unknown origin."""

MOST_DIMS = 64

LARGEST = 1 << 62

_AT_ONCE = 1 << 20
"""Integers of lists of chunks that are read at once; of long lists, one by one."""

Finished = tuple[list[bytes], Callable[[int], bytes], bytes]


def packed_index(values: bytes, entries: Entries, index: RowIndex, *, head_nbytes: int) -> Finished:
    """Return an index as ``BlockWriter.finish`` does.

    Args:
        values: The pickle of what is neither key nor row.
        entries: The entries of the keys; the first keys of the index are theirs.
        index: The rows.
        head_nbytes: Of the pickle before the index, its beginning; 0 where that has no rows.
    """
    blocks, directory = BlockWriter(), ColumnWriter()
    templates = [blocks.add(_packed_template(template)) for template in index.templates]
    blocks.close_block()
    places = [blocks.add(_packed_places(one)) for one in index.places]
    blocks.close_block()
    lists = [blocks.add(_packed_list(chunks)) for chunks in entries.lists]
    blocks.close_block()
    keys = ColumnWriter()
    keys.texts(index.fqns)
    keys.ints(entries.form_of)
    keys.ints(index.pairs)
    _pack_shared(keys, entries, index)
    for part in (keys.packed(), values):
        directory.ints(blocks.add(part))
        blocks.close_block()
    for parts, sizes in (
        (templates, [len(template) for template in index.templates]),
        (places, [_sizes(one.offsets, one.writers) for one in index.places]),
        (lists, [chunks.offsets.shape for chunks in entries.lists]),
    ):
        directory.ints([block for block, _ in parts])
        directory.ints([start for _, start in parts])
        directory.ints(np.array(sizes, np.int64).T)
    directory.ints([one.listed for one in index.places])
    counts = len(entries.fqns), index.pairs.shape[1], len(index.writers.templates)
    directory.ints([*counts, head_nbytes])
    return blocks.finish(directory.packed())


def _sizes(offsets: Ints | None, writers: Ints) -> tuple[int, int]:
    return len(writers), -1 if offsets is None else offsets.shape[1]


def _packed_template(template: np.ndarray) -> bytes:
    columns = ColumnWriter()
    for name in TEMPLATE.names or ():
        columns.ints(template[name])
    return columns.packed()


def _packed_places(places: Places) -> bytes:
    columns = ColumnWriter()
    columns.ints(places.writers)
    columns.ints(places.ordinals)
    if places.offsets is not None and places.listed < 0:
        for column in places.offsets.T:
            columns.ints(column)
    return columns.packed()


def _packed_list(chunks: ChunkList) -> bytes:
    columns = ColumnWriter()
    for column in (*chunks.offsets.T, *chunks.sizes.T):
        columns.ints(column)
    return columns.packed()


def _pack_shared(columns: ColumnWriter, entries: Entries, index: RowIndex) -> None:
    """Pack what is small, and needed to make sense of the rest."""
    columns.ints(np.array(entries.forms, np.int64).reshape(-1, 3).T)
    columns.ints([len(shape) for shape in entries.shapes])
    columns.ints([size for shape in entries.shapes for size in shape])
    writers = index.writers
    columns.ints(writers.templates)
    columns.ints(writers.naming_of)
    columns.ints(writers.numbers)
    columns.ints([len(naming) for naming in writers.namings])
    parts = [part for naming in writers.namings for part in naming]
    columns.ints([behind is not None for _, behind in parts])
    columns.texts(before for before, _ in parts)
    columns.texts(behind or "" for _, behind in parts)
    columns.ints([-1 if steps is None else len(steps) for steps in index.transforms])
    columns.texts(step for steps in index.transforms for step in steps or ())
    starts = list((index.starts or {}).items())
    columns.ints([index.starts is not None])
    columns.texts(dtype for (dtype, _, _), _ in starts)
    columns.ints([len(sizes) for (_, sizes, _), _ in starts])
    columns.ints([size for (_, sizes, _), _ in starts for size in sizes])
    columns.ints([length for (_, _, length), _ in starts])
    columns.ints([-1 if start is None else start for _, start in starts])


class PackedIndex:
    """An index in a file.

    Args:
        blocks: Of the file.
        most: Integers that all of its parts may have.

    Attributes:
        values: The pickle of what is neither key nor row.
        writers: Of the rows.
        head_nbytes: As of ``packed_index``.

    Raises:
        IndexDamage: It is none.
    """

    def __init__(self, blocks: Blocks, most: int | None = None) -> None:
        self._blocks = blocks
        directory = blocks.directory
        keys_at, self._values_at = directory.ints(2).tolist(), directory.ints(2).tolist()
        self._templates = _Directory(directory, 1)
        self._places = _Directory(directory, 2)
        self._lists = _Directory(directory, 2)
        self._listed = directory.ints(len(self._places)).tolist()
        state_keys, pairs, writers, self.head_nbytes = directory.ints(4, below=1 << 40).tolist()
        self._check_sizes(most, state_keys + 2 * pairs + 3 * writers)
        columns = blocks.part(*keys_at)
        self.fqns = columns.texts()
        self.entries_keys = self.fqns[:state_keys]
        if len(self.entries_keys) != state_keys:
            raise IndexDamage("more keys than there are")
        form_of = columns.ints(state_keys)
        self.pairs = columns.ints(2 * pairs).reshape(2, -1)
        keys, places = self.pairs
        if pairs and not (np.diff(keys) >= 0).all():
            raise IndexDamage("keys out of order")
        for column, below in ((keys, len(self.fqns)), (places, len(self._places))):
            _check_below(column, below)
        self._unpack_shared(columns, writers)
        _check_below(form_of, len(self.forms))
        self.form_of = form_of.tolist()

    def _check_sizes(self, most: int | None, numbers: int) -> None:
        sizes = np.concatenate([self._places.sizes[1], self._lists.sizes[1], [-1]])
        if int(sizes.min()) < -1 or int(sizes.max()) > MOST_DIMS:
            raise IndexDamage("chunks of a number of dims that no tensor has")
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
        self.starts = _starts(columns)

    @property
    def values(self) -> bytes:
        """The pickle of what is neither key nor row."""
        return self._blocks.part(*self._values_at).rest()

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
            self.entries_keys,
            self.form_of,
            self.forms,
            properties,
            self.shapes,
            Parts(self._read_lists, len(self._lists)),
            others,
            self._lists.sizes[0].tolist(),
        )

    def rows(self, entries: Entries) -> RowIndex:
        """Return the rows.

        Args:
            entries: Of the same index.
        """

        def read_places(number: int) -> Places:
            count, ndim = self._places.sizes[:, number].tolist()
            columns = self._part(self._places, number)
            writers = columns.ints(count, below=len(self.writers.templates))
            ordinals = columns.ints(count, below=LARGEST)
            listed = self._listed[number]
            if ndim < 0:
                return Places(None, writers, ordinals)
            if listed >= 0:
                return Places(entries.lists[listed].offsets, writers, ordinals, listed)
            offsets = tables([columns], (ndim, count), below=LARGEST)[0].T
            return Places(np.ascontiguousarray(offsets), writers, ordinals)

        return RowIndex(
            self.fqns,
            self.transforms,
            self.starts,
            self.writers,
            Parts(partial(map, self._read_template), len(self._templates)),
            Parts(partial(map, read_places), len(self._places)),
            self._places.sizes[0],
            self.pairs,
            entries,
        )

    def _part(self, directory: _Directory, number: int) -> ColumnReader:
        return self._blocks.part(*directory.at[number])

    def _read_template(self, number: int) -> np.ndarray:
        count = int(self._templates.sizes[0, number])
        columns = self._part(self._templates, number)
        template = np.zeros(count, TEMPLATE)
        below = {"key": len(self.fqns), "transforms": len(self.transforms)}
        for name in TEMPLATE.names or ():
            template[name] = columns.ints(count, below=below.get(name, LARGEST))
        return template

    def _read_lists(self, numbers: Sequence[int]) -> list[ChunkList]:
        """Return lists of chunks; those of one size are read at once."""
        by_size: dict[tuple[int, int], list[int]] = {}
        sizes = self._lists.sizes.T[numbers].tolist()
        for number, (count, ndim) in zip(numbers, sizes, strict=True):
            by_size.setdefault((count, ndim), []).append(number)
        lists: dict[int, ChunkList] = {}
        for (count, ndim), alike in by_size.items():
            step = max(_AT_ONCE // max(2 * ndim * count, 1), 1)
            for few in (alike[start : start + step] for start in range(0, len(alike), step)):
                parts = [self._part(self._lists, number) for number in few]
                table = tables(parts, (2 * ndim, count), below=LARGEST)
                halves = table.reshape(len(few), 2, ndim, count).swapaxes(2, 3)
                lists |= zip(few, starmap(ChunkList, np.ascontiguousarray(halves)), strict=True)
        return [lists[number] for number in numbers]


class _Directory:
    """Where parts of one kind are.

    Attributes:
        at: By number, block and position in it.
        sizes: ``(columns, parts)``: what each part declares of its size.
    """

    def __init__(self, columns: ColumnReader, sizes: int) -> None:
        blocks = columns.ints()
        starts = columns.ints(len(blocks), below=LARGEST)
        self.at: list[tuple[int, int]] = list(zip(blocks.tolist(), starts.tolist(), strict=True))
        self.sizes = columns.ints(sizes * len(blocks)).reshape(sizes, -1)
        if self.sizes.size and int(self.sizes[0].min()) < 0:
            raise IndexDamage("a part of a negative size")

    def __len__(self) -> int:
        return len(self.at)


def _starts(columns: ColumnReader) -> Starts | None:
    is_there = columns.ints(1).tolist()[0]
    dtypes, counts = columns.texts(), columns.ints(below=MOST_DIMS).tolist()
    sizes = _divided(columns.ints(below=LARGEST).tolist(), counts)
    lengths, starts = columns.ints(len(dtypes)).tolist(), columns.ints(len(dtypes)).tolist()
    if len(sizes) != len(dtypes):
        raise IndexDamage("starts of records in parts")
    if not is_there:
        return None
    kinds = zip(dtypes, sizes, lengths, strict=True)
    return {kind: None if at < 0 else at for kind, at in zip(kinds, starts, strict=True)}


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
