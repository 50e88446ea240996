"""The rows of a checkpoint as what determines them: who wrote which chunks, and in which order.

Thousands of ranks write their files alike, but for the names of the files, the offsets of the
chunks, and the keys that one rank alone has. So three things are kept, each once:

- a *template*: the rows of a writer in its own order. Writers that wrote alike share one.
- *locations*: for each chunk of a key its writer, and its slot among the offsets of that writer.
  Keys that are cut and assigned alike are a *class*, and have the same locations. A chunk has
  several locations where ranks wrote copies; a reader takes the one in its own rank's file, and
  otherwise the first, as torch does.
- for each writer its template, and the names of its files.

Keys that have only one chunk are the rows of an additional writer, which has the files of all
others. Two ranks of ``ep``, each with half of ``experts`` and a key of its own, ``rng.0`` or
``rng.1``::

    template 0:  experts, slot 0, file 0, from byte 0, 64 bytes
    template 1:  rng.0, slot 0, file 0, from byte 64, 900 bytes; rng.1, slot 0, file 1, ...
    writers:     0 and 1 by template 0, with a file each; 2 by template 1, with both
    locations:   experts: chunk (0, 0): writer 0, slot 0; chunk (2, 0): writer 1, slot 0
                 rng.0 and rng.1: the object: writer 2, slot 0

In a file the index is an archive as ``numpy.savez_compressed`` writes it: an array for each table,
a row for each of its columns, as differences. It is read whole, compared with one digest, and
checked before anything is looked up.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from operator import itemgetter
from typing import IO, Any, NamedTuple, cast
from zipfile import ZipFile

import numpy as np
import xxhash
from torch.distributed.checkpoint import Metadata, ReadItem, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import StorageInfo
from dcp_placements.errors import Fault, raise_faults
from dcp_placements.layout.boxes import Ints, expanded, unique
from dcp_placements.short_text import format_names
from dcp_placements.storage.columns import (
    LARGEST_VALUE,
    IndexDamage,
    check_below,
    components,
    differences,
    joined,
    split,
    summed,
)
from dcp_placements.storage.save_ids import writer_of
from dcp_placements.storage.torch_metadata import (
    MOST_DIMS_OF_TORCH,
    ChunkList,
    Entries,
    Offset,
    StoredLocation,
    Transforms,
    build_entries,
    check_count,
    check_files,
)
from dcp_placements.storage.write_results import Template, TemplateRows, WriteResults

NOWHERE = -2
"""The class number of a key without rows."""

INDEX_VERSION = 7
"""The version of the index that is written, and the only one that is read."""

_MAGIC = b"dcp_placements/%d" % INDEX_VERSION
_MAGIC_OF_ANY = re.compile(rb"dcp_placements/(\d{1,4})\Z")
_TRAILER = struct.Struct(f"<Q16s{len(_MAGIC)}s")
"""The comment of the archive, at the end of a file: its bytes, its digest, and ``_MAGIC``."""

_INFLATED_RATIO, _SPARE_NBYTES = 1 << 10, 1 << 26
"""An archive inflates to at most this many times its size, plus the second number of bytes."""

_NAMES_RATIO, _SPARE_NAMES_NBYTES = 1 << 8, 1 << 25
"""The same limits for its names, which become objects: 140,000 keys are 12 MB in 36 KB."""

MOST_NUMBERS = 1 << 27
"""The most integers that an archive may have."""

_TABLES = {
    **{"keys": 2, "writers": 2, "rows": 7, "classes": 2, "places": 3, "forms": 1},
    **{"lists": 2, "boxes": 1},
}
"""The number of columns of each member of the archive that is a table."""

_NONE = np.zeros(0, np.int64)

_BATCH_ROWS = 1 << 16


class Writers(NamedTuple):
    """One row per writer.

    Attributes:
        files: Number of its files.
        template: Number of its template.
    """

    files: Ints
    template: Ints


class Classes(NamedTuple):
    """One row per class of keys.

    Attributes:
        listed: Number of the list that has its offsets, in order; -1 for objects.
        locations: Number of its locations.
    """

    listed: Ints
    locations: Ints


class Locations(NamedTuple):
    """One row per location, class by class.

    Attributes:
        chunk: Number of the chunk, ascending from 0 within a class.
        writer: Number of the writer, ascending within a chunk.
        slot: Number of the slot among the offsets of the writer.
    """

    chunk: Ints
    writer: Ints
    slot: Ints


class FileRows(NamedTuple):
    """Where the bytes of records are: integers, or columns of any one shape.

    Attributes:
        file: Number among the files of all writers; -1 where there is no record.
        transforms: Number of the list of transforms.
        start: First byte in the file.
        length: Size in bytes.
    """

    file: Ints
    transforms: Ints
    start: Ints
    length: Ints


@dataclass(eq=False, repr=False)
class RowIndex(Mapping[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data``: a read-only mapping as torch's dict, and pickled as a dict.

    Attributes:
        entries: Entries of the state dict; classes refer to their lists of chunks.
        fqns: All keys, those of the state dict first.
        transforms: Different lists of transforms; None for no transforms.
        files: Names of the files of all writers, one writer after another.
        writers: Number of files and template of each writer.
        template_of: Number of the template of each row.
        rows: Rows of all templates, one template after another; keys and transforms are numbers
            in ``fqns`` and ``transforms``.
        class_of: Class number of each key; ``NOWHERE`` for a key without rows.
        lists: Lists of chunks: those of ``entries``, then others, of which only the offsets count.
        classes: What the keys of each class have in common.
        locations: Locations of the chunks of all classes.

    A chunk is looked up by its class and writer. In the example above, ``experts`` at (2, 0)::

        class_of[0] = 0                     classes.listed[0]: a list with offsets (0, 0), (2, 0)
        location 1 of class 0               chunk 1, writer 1, slot 0
        writers.template[1] = 0             the row of template 0, key 0, slot 0: byte 0, 64 bytes
        files before those of writer 1: 1   and file 0 among its own: files[1]
    """

    entries: Entries
    fqns: Sequence[str]
    transforms: Sequence[Transforms]
    files: Sequence[str]
    writers: Writers
    template_of: Ints
    rows: TemplateRows
    class_of: Ints
    lists: Sequence[ChunkList]
    classes: Classes
    locations: Locations

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each key."""
        return dict(zip(self.fqns, range(len(self.fqns)), strict=True))

    @cached_property
    def has_copies(self) -> bool:
        """Whether any chunk has several locations."""
        return bool((self._chunk_counts < self.classes.locations).any())

    @cached_property
    def _chunk_counts(self) -> Ints:
        return np.asarray(self.locations.chunk[np.cumsum(self.classes.locations) - 1] + 1)

    @cached_property
    def _first_files(self) -> Ints:
        return np.cumsum(self.writers.files) - self.writers.files

    @cached_property
    def _first_positions(self) -> Ints:
        return np.cumsum(self.classes.locations) - self.classes.locations

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        """The sorted codes of ``rows``, and the rows in this order."""
        codes = self._codes(self.template_of, self.rows.key, self.rows.slot)
        order = np.argsort(codes, kind="stable")
        return codes[order], order

    @cached_property
    def _slots(self) -> int:
        return int(self.rows.slot.max(initial=0)) + 1

    def _codes(self, template: Ints, key: Ints, slot: Ints) -> Ints:
        """Return one integer for each template, key and slot, so that a binary search finds rows.

        With 3 keys and 2 slots, template 1, key 2 and slot 0 are (1 * 3 + 2) * 2 + 0 = 10.
        """
        return (template * len(self.fqns) + key) * self._slots + slot

    @cached_property
    def _rank_of(self) -> Ints:
        """The rank of each writer, by the name of its first file; -1 where no name says it."""
        has_files = self.writers.files > 0
        ranks = [writer_of(self.files[first]) for first in self._first_files[has_files].tolist()]
        rank_of = np.full(len(has_files), -1)
        rank_of[has_files] = [-1 if rank is None else rank for rank in ranks]
        return rank_of

    @cached_property
    def _chunk_of(self) -> dict[int, dict[Offset, int]]:
        """The chunk number of each offset, for classes that were searched."""
        return {}

    def offsets(self, number: int) -> Sequence[Offset]:
        """Return the offsets of all chunks of a class, in order."""
        listed = int(self.classes.listed[number])
        return [None] if listed < 0 else list(map(tuple, self.lists[listed].offsets.tolist()))

    def offsets_of(self, fqn: str) -> Sequence[Offset]:
        """Return the offsets of all chunks of a key, in order."""
        number = self._class_of(fqn)
        return () if number < 0 else self.offsets(number)

    def rows_of(self, fqn: str, *, copies: bool = False) -> list[StoredLocation]:
        """Return where each chunk of a key is, in order; with ``copies`` all locations of each."""
        number = self._class_of(fqn)
        if number < 0:
            return []
        positions = self._positions(number, copies=copies)
        offsets = self.offsets(number)
        names = [(fqn, offsets[chunk]) for chunk in self.locations.chunk[positions].tolist()]
        stored = self._stored(names, self._rows_at(np.array(self.numbers[fqn]), positions))
        return [location for location in stored if location is not None]

    def find(
        self, indices: Sequence[MetadataIndex], rank: int | None = None
    ) -> list[StoredLocation | None]:
        """Return where chunks are; None where there is no such chunk.

        Args:
            indices: Indices of the chunks; their positions in lists of chunks are tried first.
            rank: The rank whose own copy is preferred where a chunk has several locations;
                otherwise the first one counts.
        """
        keys = np.array([self.numbers.get(index.fqn, -1) for index in indices], np.int64)
        numbers = np.append(self.class_of, NOWHERE)[keys]
        positions = np.full(len(keys), -1)
        for number in np.unique(numbers[numbers >= 0]).tolist():
            of_class = np.flatnonzero(numbers == number)
            wanted = [indices[position] for position in of_class.tolist()]
            positions[of_class] = self._nearest(number, self._chunks(number, wanted), rank)
        rows = FileRows(*np.full((4, len(keys)), -1))
        for column, values in zip(
            rows, self._rows_at(keys[positions >= 0], positions[positions >= 0]), strict=True
        ):
            column[positions >= 0] = values
        return self._stored([(index.fqn, index.offset) for index in indices], rows)

    def _stored(
        self, names: Iterable[tuple[str, Offset]], rows: FileRows
    ) -> list[StoredLocation | None]:
        """Return locations of chunks, made of their keys, offsets and rows; None without a row."""
        files, transforms = self.files, self.transforms
        columns = [column.tolist() for column in rows]
        return [
            None
            if file < 0
            else StoredLocation(fqn, offset, files[file], start, length, transforms[steps])
            for (fqn, offset), file, steps, start, length in zip(names, *columns, strict=True)
        ]

    def _class_of(self, fqn: str) -> int:
        key = self.numbers.get(fqn)
        return NOWHERE if key is None else int(self.class_of[key])

    def _chunks(self, number: int, indices: Sequence[MetadataIndex]) -> Ints:
        """Return the number of the chunk of a class that each index names; -1 for none."""
        listed = int(self.classes.listed[number])
        offsets: Any = self.lists[listed].offsets if listed >= 0 else ()
        wanted = [(index.index or 0, index.offset) for index in indices]
        chunk_of = dict.fromkeys(wanted, -1)
        for chunk, offset in chunk_of:
            if 0 <= chunk < len(offsets) and offset == tuple(offsets[chunk].tolist()):
                chunk_of[chunk, offset] = chunk
                continue
            if number not in self._chunk_of:
                offsets_in_order = enumerate(self.offsets(number))
                self._chunk_of[number] = {begin: position for position, begin in offsets_in_order}
            chunk_of[chunk, offset] = self._chunk_of[number].get(offset, -1)
        return np.array([chunk_of[pair] for pair in wanted], np.int64)

    def _positions(self, number: int, *, copies: bool = False) -> Ints:
        """Return positions in ``locations``: the first of each chunk of a class, or all."""
        positions: Ints = np.arange(self.classes.locations[number]) + self._first_positions[number]
        return (
            positions
            if copies
            else positions[np.diff(self.locations.chunk[positions], prepend=-1) != 0]
        )

    def _nearest(self, number: int, chunks: Ints, rank: int | None) -> Ints:
        """Return the position of each chunk's location in a file of ``rank``, or else the first."""
        nearest = self._positions(number)
        if rank is not None and self.has_copies:
            every = self._positions(number, copies=True)
            own = every[self._rank_of[self.locations.writer[every]] == rank]
            nearest[self.locations.chunk[own]] = own
        return np.where(chunks < 0, -1, nearest[chunks])

    def _rows_at(self, keys: Ints, positions: Ints) -> FileRows:
        """Return where the bytes of keys are, by positions in ``locations``; both broadcast."""
        writers = self.locations.writer[positions]
        codes, order = self._order
        wanted = self._codes(self.writers.template[writers], keys, self.locations.slot[positions])
        row, rows = order[codes.searchsorted(wanted)], self.rows
        file = rows.file[row] + self._first_files[writers]
        return FileRows(file, rows.transforms[row], rows.start[row], rows.length[row])

    def with_prefix(self, prefix: str) -> list[StoredLocation]:
        """Return the locations of all keys that begin with ``prefix``."""
        fqns = [fqn for fqn in self.fqns if fqn.startswith(prefix)]
        return [location for fqn in fqns for location in self.rows_of(fqn)]

    def all_rows(self) -> Iterator[StoredLocation]:
        """Yield the location of every row, those of copies included."""
        for fqn in self.fqns:
            yield from self.rows_of(fqn, copies=True)

    def row_batches(self, number: int, keys: Ints) -> Iterator[tuple[Ints, FileRows]]:
        """Yield the rows of keys of a class without copies, for a bounded number of keys at a time.

        Yields:
            The numbers of the next keys, and their rows: columns of shape ``(keys, chunks)``.
        """
        positions = self._positions(number)
        step = max(_BATCH_ROWS // len(positions), 1)
        for start in range(0, len(keys), step):
            batch = keys[start : start + step]
            yield batch, self._rows_at(batch[:, None], positions)

    def check(self) -> None:
        """Check that every number is in range, before anything is looked up.

        Raises:
            IndexDamage: A number is out of range, or tables contradict each other.
        """
        keys, writers, classes = (
            len(self.fqns),
            len(self.writers.files),
            len(self.classes.locations),
        )
        check_below(self.writers.files, LARGEST_VALUE)
        if sum(self.writers.files.tolist()) != len(self.files):
            raise IndexDamage("other files than its writers have")
        for column, most in (
            (self.writers.template, writers),
            (self.template_of, writers),
            (self.rows.key, keys),
            (self.rows.slot, LARGEST_VALUE),
            (self.rows.file, LARGEST_VALUE),
            (self.rows.transforms, len(self.transforms)),
            (self.rows.start, LARGEST_VALUE),
            (self.rows.length, LARGEST_VALUE),
        ):
            check_below(column, most)
        if writers * keys * self._slots >= LARGEST_VALUE:
            raise IndexDamage("more writers, keys and slots than there can be")
        fewest = np.full(writers, LARGEST_VALUE)
        np.minimum.at(fewest, self.writers.template, self.writers.files)
        if (self.rows.file >= fewest[self.template_of]).any():
            raise IndexDamage("a file that its writer does not have")
        check_below(self.class_of, classes, NOWHERE)
        if (self.class_of == -1).any() or len(self.class_of) != keys:
            raise IndexDamage("a key of no class")
        self._check_locations(writers, classes)

    def _check_locations(self, writers: int, classes: int) -> None:
        counts, (chunk, writer, slot) = self.classes.locations, self.locations
        check_below(counts, LARGEST_VALUE, 1)
        check_below(self.classes.listed, len(self.lists), -1)
        if sum(counts.tolist()) != len(chunk):
            raise IndexDamage("other places than its classes have")
        check_below(chunk, LARGEST_VALUE)
        check_below(writer, writers)
        check_below(slot, self._slots)
        of_class = np.repeat(np.arange(classes), counts)
        is_first = np.diff(of_class, prepend=-1) != 0
        step = np.where(is_first, chunk + 1, np.diff(chunk, prepend=0))
        is_copy = (step == 0) & (np.diff(writer, prepend=0) > 0)
        if not ((step == 1) | is_copy).all():
            raise IndexDamage("places in another order than that of their chunks")
        chunks = np.array([*map(len, self.lists), 1])[self.classes.listed]  # the last of an object
        if not np.array_equal(self._chunk_counts, chunks):
            raise IndexDamage("places of other chunks than there are")
        # Each key of a class has a row for each template and slot of the class's locations.
        kinds = np.stack([of_class, self.writers.template[writer], slot], axis=1)
        kind_class, template, slot = kinds[unique(kinds)[0]].T
        order = np.argsort(self.class_of, kind="stable")
        first, last = [self.class_of[order].searchsorted(kind_class, s) for s in ("left", "right")]
        if sum((last - first).tolist()) > len(self.rows.key):
            raise IndexDamage("more chunks than its writers wrote")
        kind, position = expanded(first, last - first)
        wanted = self._codes(template[kind], order[position], slot[kind])
        codes, _ = self._order
        if (np.append(codes, -1)[codes.searchsorted(wanted)] != wanted).any():
            raise IndexDamage("a chunk is not among what its writer wrote")

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        (location,) = self.find([index])
        if location is None:
            raise KeyError(index)
        return location.info()

    def __len__(self) -> int:
        counts = np.bincount(self.class_of[self.class_of >= 0], minlength=len(self._chunk_counts))
        return int((counts * self._chunk_counts).sum())

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn in self.fqns:
            for position, offset in enumerate(self.offsets_of(fqn)):
                yield MetadataIndex(fqn, offset, position)

    def __repr__(self) -> str:
        return f"RowIndex({len(self)} rows)"

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def index_of(metadata: Metadata) -> RowIndex:
    """Return the index of metadata of any origin."""
    entries, data = build_entries(metadata.state_dict_metadata), metadata.storage_data or {}
    if not isinstance(data, RowIndex):
        return index_of_locations([StoredLocation.of(*item) for item in data.items()], entries)
    if data.entries == entries:
        return data
    return index_of_locations(data.all_rows(), entries, copies=data.has_copies)


def index_of_locations(
    locations: Iterable[StoredLocation], entries: Entries, *, copies: bool = False
) -> RowIndex:
    """Return the index of locations of any origin, as if each file had a writer of its own.

    Args:
        locations: Locations of all chunks.
        entries: Entries of the state dict.
        copies: As in ``build_index``.
    """
    every = list(locations)
    counts = Counter(map(itemgetter(0), every))
    if len(counts) < len(every):
        # If two rows are for the same chunk, the later one counts.
        chunk = itemgetter(0, 1, 2) if copies else itemgetter(0, 1)
        every = list(dict(zip(map(chunk, every), every, strict=True)).values())
        counts = Counter(map(itemgetter(0), every))
    path_of = itemgetter(2)
    shared: dict[str, list[StoredLocation]] = {path: [] for path in map(path_of, every)}
    apart = every
    if len(counts) < len(every):
        apart = [location for location in every if counts[location.fqn] == 1]
        for location in every:
            if counts[location.fqn] > 1:
                shared[location.path].append(location)
    results = [
        WriteResults(*Template.of(held, (path,)), (path,), ()) for path, held in shared.items()
    ]
    if apart:
        order = dict(zip(shared, range(len(shared)), strict=True))
        apart.sort(key=lambda location: order[location.path])
        paths = tuple(dict.fromkeys(map(path_of, apart)))
        results.append(WriteResults(*Template.of(apart, paths), paths, ()))
    return build_index(results, entries, copies=copies)


def build_index(
    results: Sequence[WriteResults], entries: Entries, *, copies: bool = False
) -> RowIndex:
    """Return the index of what writers wrote.

    Args:
        results: What each writer wrote, in the order of writers.
        entries: Entries of the state dict: their keys come first in the index, and locations are
            in the order of their chunks.
        copies: Whether rows of several writers for one chunk are copies, which all count; otherwise
            the last one counts.
    """
    written = list(results)
    if apart := list(chain.from_iterable(result.apart for result in results)):
        written.append(WriteResults.of(apart))
    writers_of: dict[Any, list[int]] = {}  # by what equal templates have in common
    for writer, result in enumerate(written):
        content = result.template if isinstance(result.template, bytes) else result.template.content
        writers_of.setdefault(content, []).append(writer)
    template_of = np.zeros(len(written), np.int64)
    numbers = dict(zip(entries.fqns, range(len(entries.fqns)), strict=True))
    transforms: dict[Transforms, int] = {}
    templates = [TemplateRows(*np.zeros((len(TemplateRows._fields), 0), np.int64))]
    slots: list[list[Sequence[tuple[int, Offset]]]] = []
    for number, writers in enumerate(writers_of.values()):
        template_of[writers] = number
        template = Template.unpacked(written[writers[0]].template)
        keys = [numbers.setdefault(fqn, len(numbers)) for fqn in template.fqns]
        steps = [
            transforms.setdefault(descriptors, len(transforms))
            for descriptors in template.transforms
        ]
        templates.append(
            template.rows._replace(
                key=np.array(keys, np.int64)[template.rows.key],
                transforms=np.array(steps, np.int64)[template.rows.transforms],
            )
        )
        slots.append(
            _slots(template.dims, writers, [written[writer].offsets for writer in writers])
        )
    rows = TemplateRows(*map(np.concatenate, zip(*templates, strict=True)))
    of_rows = np.repeat(np.arange(len(writers_of)), [len(table.key) for table in templates[1:]])
    class_of, kinds = _classes(of_rows, rows, entries, len(numbers))
    lists = list(entries.lists)
    classes = [_locations(kind, slots, lists, copies=copies) for kind in kinds]
    locations = [
        np.zeros((len(Locations._fields), 0), np.int64),
        *[locations for _, locations in classes],
    ]
    return RowIndex(
        entries,
        tuple(numbers),
        tuple(transforms),
        list(chain.from_iterable(result.paths for result in written)),
        Writers(np.array([len(result.paths) for result in written], np.int64), template_of),
        of_rows,
        rows,
        class_of,
        lists,
        Classes(
            np.array([listed for listed, _ in classes], np.int64),
            np.array([locations.shape[1] for _, locations in classes], np.int64),
        ),
        Locations(*np.concatenate(locations, axis=1)),
    )


def _slots(
    dims: Sequence[int], writers: Sequence[int], offsets: Sequence[Ints]
) -> list[Sequence[tuple[int, Offset]]]:
    """Return for each slot of a template its writers, each with its offset.

    Dims (2, -1) of writers 0 and 1 with offsets [0, 0] and [2, 0] give
    ``[[(0, (0, 0)), (1, (2, 0))], [(0, None), (1, None)]]``.

    Args:
        dims: Number of dims of each slot's offset; -1 for objects.
        writers: Numbers of the writers that have the template.
        offsets: Offsets of all slots of each writer, one after another.
    """
    columns = np.stack(offsets)
    slots: list[Sequence[tuple[int, Offset]]] = []
    column = 0
    for ndim in dims:
        offsets_of_slot = columns[:, column : column + max(ndim, 0)].tolist()
        slots.append(
            [
                (w, None if ndim < 0 else tuple(o))
                for w, o in zip(writers, offsets_of_slot, strict=True)
            ]
        )
        column += max(ndim, 0)
    return slots


def _classes(
    template_of: Ints, rows: TemplateRows, entries: Entries, keys: int
) -> tuple[Ints, list[Ints]]:
    """Return the class number of each key; and of each class what its keys have in common.

    A class is an array ``(slots, 3)``: in each row the number of the list of chunks (-1 for none),
    a template, and a slot of the template.

    Args:
        template_of: Number of the template of each row.
        rows: Rows of all templates.
        entries: Entries of the state dict.
        keys: Number of all keys.
    """
    lists = np.full(keys, -1)
    lists[: len(entries.fqns)] = np.array([*entries.list_of, -1])[entries.form_of]
    order = np.lexsort((rows.slot, template_of, rows.key))
    template, key, slot = template_of[order], rows.key[order], rows.slot[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    table = np.stack([lists[key], template, slot], axis=1)
    content, nbytes = table.tobytes(), table.itemsize * 3
    bounds = pairwise([*(nbytes * starts).tolist(), len(content)])
    kinds: dict[bytes, int] = {}
    class_of = np.full(keys, NOWHERE)
    class_of[key[starts]] = [
        kinds.setdefault(content[start:stop], len(kinds)) for start, stop in bounds
    ]
    return class_of, [np.frombuffer(kind, np.int64).reshape(-1, 3) for kind in kinds]


def _locations(
    kind: Ints,
    slots: Sequence[Sequence[Sequence[tuple[int, Offset]]]],
    lists: list[ChunkList],
    *,
    copies: bool,
) -> tuple[int, Ints]:
    """Return the number of the list of chunks of a class (-1 for none), and its locations.

    Args:
        kind: The class, as ``_classes`` returns it.
        slots: Slots of each template, as ``_slots`` returns them.
        lists: Lists of chunks; one with the offsets of the class is appended where the list of its
            keys has others.
        copies: As in ``build_index``.
    """
    held = [
        (offset, writer, slot)
        for _, template, slot in kind.tolist()
        for writer, offset in slots[template][slot]
    ]
    listed = int(kind[0, 0])
    offsets: list[Any] = list(dict.fromkeys([offset for offset, _, _ in held]))
    in_order = list(map(tuple, lists[listed].offsets.tolist())) if listed >= 0 else []
    # Empty chunks may have the offset of another chunk.
    if len(in_order) == len(offsets) and set(in_order) == set(offsets):
        offsets = in_order
    elif offsets == [None]:
        listed = -1
    else:
        listed, begin = len(lists), np.array(offsets, np.int64)
        lists.append(ChunkList(np.stack([begin, np.zeros_like(begin)], axis=1)))
    chunk_of = {offset: chunk for chunk, offset in enumerate(offsets)}
    locations = np.array([(chunk_of[offset], *rest) for offset, *rest in held], np.int64).T
    locations = locations[:, np.lexsort(locations[1::-1])]
    if not copies:
        # If two rows are for the same chunk, the later one counts.
        locations = locations[:, np.diff(locations[0], append=-1) != 0]
    return listed, locations


def packed_index(index: RowIndex, values: bytes) -> tuple[bytes, bytes]:
    """Return the archive of an index, and the digest of the archive.

    Args:
        index: The index, with its entries.
        values: The pickle of all metadata that are neither rows nor lists of chunks.
    """
    entries, lists = index.entries, [chunks.array for chunks in index.lists]
    names = {
        "keys": components(index.fqns),
        "files": index.files,
        "transforms": index.transforms,
    }
    # Keys that are not in the state dict have no form.
    form_of = np.full(len(index.fqns), -1)
    form_of[: len(entries.form_of)] = entries.form_of
    arrays: dict[str, Any] = {
        "names": np.frombuffer(json.dumps(names, separators=(",", ":")).encode(), np.uint8),
        "values": np.frombuffer(values, np.uint8),
        "keys": differences([form_of, index.class_of]),
        "writers": differences(index.writers),
        "rows": index.rows.packed(index.template_of),
        "classes": differences(index.classes),
        "places": differences(index.locations),
        "forms": differences([entries.list_of]),
        "lists": differences(
            [[len(boxes) for boxes in lists], [boxes.shape[2] for boxes in lists]]
        ),
        "boxes": differences([np.concatenate([_NONE, *[boxes.T.ravel() for boxes in lists]])]),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    data = stream.getvalue()[:-2] + struct.pack("<H", _TRAILER.size)
    digest = xxhash.xxh3_128_digest(data)
    return data + _TRAILER.pack(len(data) + _TRAILER.size, digest, _MAGIC), digest


class OtherVersion(ValueError):
    """An index of another version, which another release wrote.

    Args:
        version: Version of the index, as ``INDEX_VERSION``.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"it is of version {version}, and this release reads {INDEX_VERSION}")
        self.version = version


def archive_in(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    """Return the archive of the index at the end of a file, and its digest; None without one.

    Raises:
        OtherVersion: The index is of another version.
        IndexDamage: The digest differs.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(size - _TRAILER.size, 0))
    trailer = stream.read()
    magic = _MAGIC_OF_ANY.search(trailer)
    if magic is not None and int(magic[1]) != INDEX_VERSION:
        raise OtherVersion(int(magic[1]))
    if magic is None or size < _TRAILER.size:
        return None
    nbytes, digest, _ = _TRAILER.unpack(trailer)
    stream.seek(max(size - nbytes, 0))
    data = stream.read()
    if xxhash.xxh3_128_digest(memoryview(data)[: -_TRAILER.size]) != digest:
        raise IndexDamage("it is not what was written")
    return data, digest


def unpacked_archive(data: bytes) -> dict[str, Any]:
    """Return the members that ``packed_index`` put into an archive, by name.

    Raises:
        IndexDamage: The bytes are not such an archive, or inflate to far more than their size.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            _check_members(held.zip, len(data))
            members: dict[str, Any] = {name: summed(held[name]) for name in _TABLES}
            members["values"] = held["values"].tobytes()
            members["names"] = json.loads(held["names"].tobytes())
    except IndexDamage:
        raise
    except Exception as error:
        # The contents of a member are arbitrary; the header of an array is a Python expression.
        raise IndexDamage(f"a member is not of its kind: {error}") from error
    return members


def files_in_archive(data: bytes) -> list[str]:
    """Return the names of data files in an archive of ``packed_index``; nothing else is unpacked.

    Raises:
        IndexDamage: As those of ``unpacked_archive``.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            _check_members(held.zip, len(data))
            files = [str(name) for name in json.loads(held["names"].tobytes())["files"]]
    except IndexDamage:
        raise
    except Exception as error:
        raise IndexDamage(f"a member is not of its kind: {error}") from error
    check_files(files)
    return files


def _check_members(archive: ZipFile, nbytes: int) -> None:
    """Refuse an archive with other members or too large ones, by their headers alone.

    Args:
        archive: The archive.
        nbytes: Size of the archive.
    """
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    if {*names} != {*_TABLES, "names", "values"}:
        raise IndexDamage(f"members {format_names(sorted(names))}, where an index has others")
    inflated = sum(info.file_size for info in archive.infolist())
    texts = archive.getinfo("names.npy")
    if (
        inflated > _INFLATED_RATIO * nbytes + _SPARE_NBYTES
        or texts.file_size > _NAMES_RATIO * texts.compress_size + _SPARE_NAMES_NBYTES
    ):
        raise IndexDamage("it inflates to far more than its file")
    total = 0
    for name in names:
        with archive.open(f"{name}.npy") as stream:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise IndexDamage(f"{name} is an array of another format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        kind = np.int64 if name in _TABLES else np.uint8
        if not np.can_cast(dtype, kind, "safe"):
            raise IndexDamage(f"a member is not of its kind: {name} of {dtype}")
        if name not in _TABLES:
            if prod(shape) * dtype.itemsize > archive.getinfo(f"{name}.npy").file_size:
                raise IndexDamage(f"{name} of another size than its header says")
            continue
        if len(shape) != 2 or shape[0] != _TABLES[name]:
            raise IndexDamage(f"{shape} {name}, where an index has {_TABLES[name]} columns")
        total += prod(shape)
    if total > MOST_NUMBERS:
        raise IndexDamage(f"it has {total:,} numbers, and at most {MOST_NUMBERS:,} are read")


def unpacked_index(members: Mapping[str, Any], forms: Sequence[Any]) -> RowIndex:
    """Return the index in an archive, checked.

    Args:
        members: Members of the archive, as ``unpacked_archive`` returns them.
        forms: Forms of entries, tensors without their chunks.

    Raises:
        IndexDamage: The members are not those of an index, or contradict each other.
    """
    try:
        index = _unpacked(members, forms)
        index.check()
    except IndexDamage:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise IndexDamage(f"something is not of its kind: {error}") from error
    return index


def _unpacked(members: Mapping[str, Any], forms: Sequence[Any]) -> RowIndex:
    form_of, class_of = members["keys"]
    (list_of,), (boxes,), (counts, dims) = members["forms"], members["boxes"], members["lists"]
    template_of, *rows = members["rows"]
    names = members["names"]
    fqns, files = joined(names["keys"]), list(map(str, names["files"]))
    check_files(files)
    with_form = int((form_of >= 0).sum())
    if len(fqns) != len(form_of) or (form_of[:with_form] < 0).any():
        raise IndexDamage("other keys than there are")
    if len({*fqns}) != len(fqns):
        raise IndexDamage("a key that it has twice")
    # Each of these becomes an object, and a few bytes of a file may claim any number of them.
    classes, locations = len(members["classes"][0]), len(members["places"][0])
    if max(classes, len(list_of)) > len(fqns) or len(counts) > len(list_of) + classes:
        raise IndexDamage("more forms, classes or lists of chunks than its keys have")
    lists = _lists(counts, dims, boxes)
    check_count(sum(counts[dims == 0].tolist()), locations)  # the others have numbers for each
    check_below(form_of, len(forms), -1)
    check_below(list_of, len(lists), -1)
    own, numbers = lists[: int(list_of.max(initial=-1)) + 1], list_of.tolist()
    whole = [with_chunks(form, number, lists) for form, number in zip(forms, numbers, strict=True)]
    return RowIndex(
        Entries(fqns[:with_form], form_of[:with_form].tolist(), whole, own, numbers),
        fqns,
        [None if steps is None else tuple(map(str, steps)) for steps in names["transforms"]],
        files,
        Writers(*members["writers"]),
        template_of,
        TemplateRows.unpacked(rows),
        class_of,
        lists,
        Classes(*members["classes"]),
        Locations(*members["places"]),
    )


def _lists(counts: Ints, dims: Ints, numbers: Ints) -> list[ChunkList]:
    check_below(dims, MOST_DIMS_OF_TORCH + 1)
    check_below(counts, LARGEST_VALUE)
    check_below(numbers, LARGEST_VALUE)
    shapes = list(zip(dims.tolist(), counts.tolist(), strict=True))
    columns = split(numbers, [2 * prod(shape) for shape in shapes])
    return [
        ChunkList(np.ascontiguousarray(column.reshape(ndim, 2, count).T))
        for column, (ndim, count) in zip(columns, shapes, strict=True)
    ]


def with_chunks(form: Any, listed: int, lists: Sequence[ChunkList]) -> Any:
    """Return a form with its list of chunks, by the number of the list; -1 for no list."""
    if (type(form) is TensorStorageMetadata) != (listed >= 0):
        raise IndexDamage("a list of chunks of what is no tensor, or none of one")
    if listed < 0:
        return form
    if len(form.size) != lists[listed].array.shape[2]:
        raise IndexDamage("a tensor with chunks of other dims")
    return replace(form, chunks=lists[listed])


def paths_of(data: Mapping[MetadataIndex, StorageInfo]) -> set[str]:
    """Return the names of all files in ``storage_data``."""
    if isinstance(data, RowIndex):
        return set(data.files)
    return {info.relative_path for info in data.values()}


DAMAGED_METADATA = (
    "likely:      .metadata was damaged, or another tool wrote it",
    "way out:     copy .metadata again, or load another checkpoint",
)


def with_copies(
    fault: Fault, storage_data: Mapping[MetadataIndex, StorageInfo], item: ReadItem, file: str
) -> Fault:
    """Return a fault of an item's chunk in a file, extended by where other copies of it are."""
    if not isinstance(storage_data, RowIndex) or not storage_data.has_copies:
        return fault
    fqn, offset = item.storage_index.fqn, item.storage_index.offset
    rows = storage_data.rows_of(fqn, copies=True)
    others = [row for row in rows if row.offset == offset and row.path != file]
    if not others:
        return fault
    text = format_names([f"byte {row.start} of {row.path}" for row in others], 2)
    return replace(fault, where=(*fault.where, f"a copy:      {text}"))


def locations_of(
    items: Iterable[ReadItem],
    storage_data: Mapping[MetadataIndex, StorageInfo],
    rank: int | None = None,
) -> list[StoredLocation]:
    """Return the locations of the chunks and objects that items are read from.

    Args:
        items: The items.
        storage_data: Locations of all chunks of the checkpoint.
        rank: The rank whose own copies are preferred, as in ``RowIndex.find``.

    Raises:
        PlacementError: Chunks have no location; the error names all of them.
    """
    indices = [item.storage_index for item in items]
    if isinstance(storage_data, RowIndex):
        locations = storage_data.find(indices, rank)
    else:
        rows = [(index, storage_data.get(index)) for index in indices]
        locations = [
            None if info is None else StoredLocation.of(index, info) for index, info in rows
        ]
    if None in locations:
        faults = [
            Fault(
                index.fqn,
                "the metadata name no file for "
                + ("it" if index.offset is None else f"the chunk at {tuple(index.offset)}"),
                DAMAGED_METADATA,
            )
            for index, location in zip(indices, locations, strict=True)
            if location is None
        ]
        raise_faults("the checkpoint is not whole", faults)
    return cast(list[StoredLocation], locations)
