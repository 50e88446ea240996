"""The locations of the chunks that one rank wrote, as it sends them, and as torch's results.

The files of many ranks differ only in the offsets of the chunks, the names of the files, and the
keys that one rank writes alone: random states, positions in the data. So a rank sends a *template*,
which many ranks have in common, and separately what is its own.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.columns import components, differences, joined, summed
from dcp_placements.storage.torch_metadata import StoredLocation, Transforms

T = TypeVar("T")


class TemplateRows(NamedTuple):
    """Columns of the rows of a template, in the order in which a writer wrote them.

    Attributes:
        key: Number of the key.
        slot: Number of the slot that has the offset.
        file: Number of the file among those of the writer.
        transforms: Number of the list of transforms.
        start: First byte in the file.
        length: Size in bytes.
    """

    key: Ints
    slot: Ints
    file: Ints
    transforms: Ints
    start: Ints
    length: Ints

    def packed(self, *before: Ints) -> Any:
        """Return the differences of all columns in one array, after other columns of equal length.

        Most records follow one another. So a start is counted from the end of the record before:
        starts 0, 64, 128 of records of 64 bytes become 0, 0, 0.
        """
        ends = np.concatenate([[0], (self.start + self.length)[:-1]])[: len(self.start)]
        return differences([*before, *self._replace(start=self.start - ends)])

    @staticmethod
    def unpacked(columns: Ints) -> TemplateRows:
        """Return the columns of an array as ``packed`` returns it, after ``summed``."""
        rows = TemplateRows(*columns)
        return rows._replace(start=np.cumsum(rows.start) + np.cumsum(rows.length) - rows.length)


class Template(NamedTuple):
    """What ranks with equal files have in common.

    Attributes:
        fqns: Different keys.
        dims: Number of dims of each slot's offset; -1 for objects.
        transforms: Different lists of the transforms that wrote the bytes; None for no transforms.
        rows: Rows, which refer to these by number.
    """

    fqns: Sequence[str]
    dims: Sequence[int]
    transforms: Sequence[Transforms]
    rows: TemplateRows

    @staticmethod
    def of(locations: Iterable[StoredLocation], paths: Iterable[str]) -> tuple[Template, Ints]:
        """Return the template of locations in these files, and the offsets of its slots."""
        columns = list(zip(*locations, strict=True)) or [()] * len(StoredLocation._fields)
        fqns, offsets, files, starts, lengths, steps = columns
        keys, key = _numbered(fqns)
        different, slot = _numbered(offsets)
        every, step = _numbered(steps)
        number = {path: file for file, path in enumerate(paths)}
        file = [number[path] for path in files]
        dims = tuple([-1 if offset is None else len(offset) for offset in different])
        held = np.array(list(chain.from_iterable(filter(None, different))), np.int64)
        rows = np.array([key, slot, file, step, starts, lengths], np.int64)
        return Template(keys, dims, every, TemplateRows(*rows)), held

    @property
    def content(self) -> tuple[Any, ...]:
        """A value that is equal for equal templates, and for no others."""
        return self.fqns, self.dims, self.transforms, np.stack(self.rows).tobytes()

    def packed(self) -> bytes:
        """Return the template as bytes to send; equal templates give equal bytes."""
        rows = self.rows.packed()
        texts = json.dumps([components(self.fqns), self.dims, self.transforms])
        return zlib.compress(pickle.dumps((texts, rows.dtype.char, rows.tobytes())), 6)

    @staticmethod
    def unpacked(packed: Template | bytes) -> Template:
        """Return a template, unpacked if it was sent."""
        if isinstance(packed, Template):
            return packed
        texts, kind, data = pickle.loads(zlib.decompress(packed))
        fqns, dims, transforms = json.loads(texts)
        columns = np.frombuffer(data, kind).reshape(len(TemplateRows._fields), -1)
        steps = [None if descriptors is None else tuple(descriptors) for descriptors in transforms]
        return Template(joined(fqns), dims, steps, TemplateRows.unpacked(summed(columns)))


def _numbered(column: Sequence[T]) -> tuple[tuple[T, ...], Sequence[int]]:
    """Return the different values, in order, and the number of each value among these."""
    numbers = dict(zip(dict.fromkeys(column), count(), strict=False))
    if len(numbers) == len(column):
        return tuple(numbers), range(len(column))
    return tuple(numbers), list(map(numbers.__getitem__, column))


class WriteResults(Sequence[WriteResult]):
    """What one rank wrote: a sequence of torch's ``WriteResult`` that is small to send.

    A rank that wrote 64 bytes of ``experts`` at (2, 0), followed by an object ``rng.1``::

        template:  experts, slot 0 of offsets of 2 dims, file 0, no transforms, 64 bytes
        offsets:   [2, 0], of slot 0
        paths:     __1_0.distcp
        apart:     rng.1 is at byte 64 of __1_0.distcp

    Keys that have only one chunk are apart from the template. The writer puts them at the end of a
    file, so that their sizes move no record of a template.

    Args:
        template: What ranks have in common; packed if it was sent.
        offsets: Offsets of all slots, one after another.
        paths: Paths of the files, relative to the checkpoint.
        apart: Locations of keys that have only one chunk.
    """

    def __init__(
        self,
        template: Template | bytes,
        offsets: Ints,
        paths: Sequence[str],
        apart: Sequence[StoredLocation],
    ) -> None:
        self.template, self.offsets, self.paths, self.apart = template, offsets, paths, apart

    @staticmethod
    def of(locations: Iterable[StoredLocation], whole: Collection[str] = ()) -> WriteResults:
        """Return what a rank sends.

        Args:
            locations: Locations in the order of writing; the last one of a chunk counts.
            whole: Keys that have only one chunk.
        """
        latest = list(locations)
        if len(set(map(itemgetter(0), latest))) < len(latest):
            latest = list(dict(zip(map(itemgetter(0, 1), latest), latest, strict=True)).values())
        apart = [location for location in latest if location.fqn in whole]
        paths = tuple(dict.fromkeys([location.path for location in latest]))
        template, offsets = Template.of(
            [location for location in latest if location.fqn not in whole], paths
        )
        return WriteResults(template, offsets, paths, apart)

    @staticmethod
    def of_records(
        records: Iterable[tuple[str, Iterable[tuple[Sequence[WriteItem], int]]]],
    ) -> WriteResults:
        """Return what a rank sends for adjacent records in its files.

        Args:
            records: Path of each file, and batches of items with the size of each item's record.
        """
        locations, whole = [], set()
        for path, batches in records:
            start = 0
            for items, length in batches:
                for item in items:
                    if is_whole(item):
                        whole.add(item.index.fqn)
                    location = item.index.fqn, item.index.offset, path, start, length
                    locations.append(StoredLocation(*location))
                    start += length
        return WriteResults.of(locations, whole)

    @cached_property
    def locations(self) -> list[StoredLocation]:
        """Locations of the template, then those apart."""
        template, numbers = Template.unpacked(self.template), iter(self.offsets.tolist())
        slots = [None if n < 0 else tuple(islice(numbers, n)) for n in template.dims]
        locations = []
        for key, slot, file, steps, start, length in np.stack(template.rows, axis=1).tolist():
            names = template.fqns[key], slots[slot], self.paths[file]
            locations.append(StoredLocation(*names, start, length, template.transforms[steps]))
        return [*locations, *self.apart]

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.offsets.tolist(), self.paths, [tuple(location) for location in self.apart]
        packed = self.template if isinstance(self.template, bytes) else self.template.packed()
        return _arrived, (packed, zlib.compress(pickle.dumps(own), 1))

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, index: Any) -> Any:
        locations = self.locations[index]
        return list(map(_result, locations)) if isinstance(index, slice) else _result(locations)


def _arrived(template: bytes, packed: bytes) -> WriteResults:
    offsets, paths, apart = pickle.loads(zlib.decompress(packed))
    return WriteResults(
        template,
        np.array(offsets, np.int64),
        paths,
        [StoredLocation(*columns) for columns in apart],
    )


def _result(location: StoredLocation) -> WriteResult:
    offset = None if location.offset is None else torch.Size(location.offset)
    return WriteResult(MetadataIndex(location.fqn, offset), location.length, location.info())


def is_whole(item: WriteItem) -> bool:
    """Whether an item writes all of a key, and no other rank writes a copy."""
    data = item.tensor_data
    if getattr(item, "copied", False):
        return False
    return data is None or data.chunk.sizes == data.size
