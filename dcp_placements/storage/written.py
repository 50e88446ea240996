"""What one rank wrote: the places of its chunks, as it sends them, and as torch's results.

Ranks write their files alike, but for the offsets of the chunks, the names of the files, and the
keys of which one rank has all: random states, positions in the data. So a rank sends its
*template*, which many ranks have in common, apart from its own.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.packing import (
    packed_columns,
    packed_texts,
    unpacked_columns,
    unpacked_texts,
)
from dcp_placements.storage.torch_metadata import StoredPlace, Transforms

T = TypeVar("T")


class Template(NamedTuple):
    """What ranks that wrote alike have in common.

    Attributes:
        fqns: Keys, each once.
        dims: By slot, the number of dims of its offset; -1 of objects.
        transforms: The transforms that wrote the bytes, each list once; None for none.
        table: ``(6, rows)``: positions of key, slot, file and transforms; start and length.
    """

    fqns: Sequence[str]
    dims: Sequence[int]
    transforms: Sequence[Transforms]
    table: Ints

    @staticmethod
    def of(places: Iterable[StoredPlace], paths: Iterable[str]) -> tuple[Template, Ints]:
        """Return the template of places in files of these names, and the offsets of its slots."""
        columns = list(zip(*places, strict=True)) or [()] * len(StoredPlace._fields)
        fqns, offsets, files, starts, lengths, steps = columns
        keys, key = _numbered(fqns)
        different, slot = _numbered(offsets)
        every, step = _numbered(steps)
        number = {path: file for file, path in enumerate(paths)}
        file = [number[path] for path in files]
        dims = tuple([-1 if offset is None else len(offset) for offset in different])
        held = np.array(list(chain.from_iterable(filter(None, different))), np.int64)
        table = np.array([key, slot, file, step, starts, lengths], np.int64)
        return Template(keys, dims, every, table), held

    @property
    def content(self) -> tuple[Any, ...]:
        """What equal templates have in common, and no others."""
        return self.fqns, self.dims, self.transforms, self.table.tobytes()

    def packed(self) -> bytes:
        """Return it as it is sent."""
        *table, starts, lengths = self.table
        forms, texts = packed_texts(self.fqns)
        columns = packed_columns([self.dims, *texts, *table, from_ends(starts, lengths), lengths])
        return zlib.compress(pickle.dumps((forms, self.transforms, columns.tobytes())), 6)

    @staticmethod
    def unpacked(packed: Template | bytes) -> Template:
        """Return a template that may have been sent."""
        if isinstance(packed, Template):
            return packed
        forms, transforms, columns = pickle.loads(zlib.decompress(packed))
        dims, form_of, numbers, *rows, gaps, lengths = unpacked_columns(
            np.frombuffer(columns, np.int64)
        )
        table = np.stack([*rows, to_starts(gaps, lengths), lengths])
        return Template(unpacked_texts(forms, form_of, numbers), dims.tolist(), transforms, table)


def _numbered(column: Sequence[T]) -> tuple[tuple[T, ...], list[int]]:
    """Return the different values, in order, and of each value its number among these."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(column))}
    return tuple(numbers), [numbers[value] for value in column]


class WriteResults(Sequence[WriteResult]):
    """What one rank wrote: a sequence of torch's ``WriteResult``, small to send.

    A rank that wrote 64 bytes of ``experts`` at (2, 0), and behind them an object ``rng.1``::

        template:  experts, slot 0 of offsets of 2 dims, file 0, no transforms, 64 bytes
        offsets:   [2, 0], of slot 0
        paths:     __1_0.distcp
        apart:     rng.1 is at byte 64 of __1_0.distcp

    Keys of one chunk in all are apart from the template, and the writer puts them at the end of a
    file: so their lengths move no record of a template.

    Args:
        template: What ranks have in common; packed where it was sent.
        offsets: Of all slots, one after another.
        paths: The files, relative to the checkpoint.
        apart: Keys of which all is in one place.
    """

    def __init__(
        self,
        template: Template | bytes,
        offsets: Ints,
        paths: Sequence[str],
        apart: Sequence[StoredPlace],
    ) -> None:
        self.template, self.offsets, self.paths, self.apart = template, offsets, paths, apart

    @staticmethod
    def of(places: Iterable[StoredPlace], whole: Collection[str] = ()) -> WriteResults:
        """Return what a rank sends.

        Args:
            places: In the order in which they were written; the later one of a chunk counts.
            whole: Keys of which all is in one place.
        """
        latest = list({(place.fqn, place.offset): place for place in places}.values())
        apart = [place for place in latest if place.fqn in whole]
        paths = tuple(dict.fromkeys([place.path for place in latest]))
        template, offsets = Template.of([one for one in latest if one.fqn not in whole], paths)
        return WriteResults(template, offsets, paths, apart)

    @staticmethod
    def of_records(
        records: Iterable[tuple[str, Iterable[tuple[Sequence[WriteItem], int]]]],
    ) -> WriteResults:
        """Return what a rank sends of records, which stand one after another in its files.

        Args:
            records: Of each file its name, and the items and the length of records of one length.
        """
        places, whole = [], set()
        for path, alike in records:
            start = 0
            for items, length in alike:
                for item in items:
                    if is_whole(item):
                        whole.add(item.index.fqn)
                    place = item.index.fqn, item.index.offset, path, start, length
                    places.append(StoredPlace(*place))
                    start += length
        return WriteResults.of(places, whole)

    @cached_property
    def places(self) -> list[StoredPlace]:
        """Those of the template, then those apart."""
        template, numbers = Template.unpacked(self.template), iter(self.offsets.tolist())
        slots = [None if n < 0 else tuple(islice(numbers, n)) for n in template.dims]
        found = []
        for key, slot, file, steps, start, length in template.table.T.tolist():
            names = template.fqns[key], slots[slot], self.paths[file]
            found.append(StoredPlace(*names, start, length, template.transforms[steps]))
        return [*found, *self.apart]

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.offsets.tolist(), self.paths, [tuple(place) for place in self.apart]
        packed = self.template if isinstance(self.template, bytes) else self.template.packed()
        return _arrived, (packed, zlib.compress(pickle.dumps(own), 1))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        places = self.places[index]
        return list(map(_result, places)) if isinstance(index, slice) else _result(places)


def _arrived(template: bytes, packed: bytes) -> WriteResults:
    offsets, paths, apart = pickle.loads(zlib.decompress(packed))
    return WriteResults(
        template, np.array(offsets, np.int64), paths, [StoredPlace(*one) for one in apart]
    )


def _result(place: StoredPlace) -> WriteResult:
    offset = None if place.offset is None else torch.Size(place.offset)
    return WriteResult(MetadataIndex(place.fqn, offset), place.length, place.info())


def from_ends(starts: Ints, lengths: Ints) -> Ints:
    """Return starts counted from the ends of the records before: most are 0."""
    found: Ints = np.diff(starts, prepend=0) - np.concatenate([[0], lengths])[: len(lengths)]
    return found


def to_starts(from_ends: Ints, lengths: Ints) -> Ints:
    """Return the starts again."""
    starts: Ints = np.cumsum(from_ends) + np.cumsum(lengths) - lengths
    return starts


def is_whole(item: WriteItem) -> bool:
    """Whether an item alone writes all of a key: no other rank writes a copy."""
    data = item.tensor_data
    if getattr(item, "copied", False):
        return False
    return data is None or data.chunk.sizes == data.size
