"""The records of a checkpoint by file, in columns.

There may be hundreds of thousands, and most are sound. A ``Record`` is created for those that are
handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
import torch

from dcp_placements.layout.boxes import Ints, format_box
from dcp_placements.layout.sharding import Box
from dcp_placements.offline.checkpoint import SAFETENSORS, Checkpoint, StoredChunk, StoredTensor
from dcp_placements.offline.readers.dcp import check_count
from dcp_placements.storage.written import Transforms


class Record(NamedTuple):
    """One stretch of a file, as the metadata describe it."""

    fqn: str  # the key that it belongs to
    chunk: StoredChunk  # its chunk; of an object a chunk without dims
    tensor: StoredTensor | None  # its tensor; None for an object

    @property
    def start(self) -> int:
        """Where it begins in the file, in bytes."""
        return self.chunk.start

    @property
    def end(self) -> int:
        """Where it ends in the file, in bytes."""
        return self.chunk.start + self.chunk.nbytes

    @property
    def name(self) -> str:
        """The key, with the box where it is a part of the tensor."""
        if self.tensor is None or len(self.tensor.boxes) == 1:
            return self.fqn
        return f"{self.fqn} {format_box(self.chunk.box, self.tensor.shape)}"


Kind = tuple[tuple[int, ...], torch.dtype]
"""Sizes and dtype of a chunk."""


@dataclass(slots=True)
class _Shared:
    """What the columns of all files refer to."""

    owners: list[StoredTensor | Record]  # tensors, then the records of objects
    transforms: Sequence[Transforms]
    kinds: dict[Kind, int] = field(default_factory=dict)


class FileRecords(Sequence[Record]):
    """The records of one file, in file order; each is created when it is used.

    Args:
        shared: What the columns refer to.
        file: Name of the file.
        columns: ``(6, records)``: start, length, owner, number of the chunk, kind, transforms.

    Attributes:
        starts: Where each begins in the file, in bytes.
        ends: Where each ends.
        kinds: By record, the position of its kind in ``all_kinds``; -1 for records that are not a
            tensor as ``torch.save`` writes it.
        all_kinds: Of all files.
    """

    def __init__(self, shared: _Shared, file: str, columns: Ints) -> None:
        self._shared, self._file, self._columns = shared, file, columns
        # A file can claim any two numbers. Unsigned, their sum does not overflow.
        self.starts = columns[0].astype(np.uint64)
        self.ends = self.starts + columns[1].astype(np.uint64)
        self.kinds, self.all_kinds = columns[4], list(shared.kinds)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        start, nbytes, number, chunk, _, transforms = self._columns[:, index].tolist()
        owner = self._shared.owners[number]
        if isinstance(owner, Record):
            return owner
        steps = self._shared.transforms[transforms] or ()
        stored = StoredChunk(owner.boxes[chunk], self._file, start, nbytes, steps)
        return Record(owner.fqn, stored, owner)


def records_by_file(checkpoint: Checkpoint) -> dict[str, FileRecords]:
    """Return the records of every file, in file order; files sorted by name.

    Raises:
        CannotLook: There are too many.
    """
    check_count(checkpoint.path, len(checkpoint.rows))
    objects = list(_object_records(checkpoint))
    shared = _Shared([*checkpoint.tensors.values(), *objects], checkpoint.rows.transforms)
    paths = list(checkpoint.rows.files)
    files = sorted({*paths, *[str(record.chunk.file) for record in objects]})
    numbers = {file: number for number, file in enumerate(files)}
    of_path = np.array([numbers[path] for path in paths], np.int64)
    parts = [
        [numbers[str(record.chunk.file)], record.start, record.chunk.nbytes, owner, 0, -1, 0]
        for owner, record in enumerate(objects, len(checkpoint.tensors))
    ]
    tables = [np.array(parts, np.int64).reshape(-1, 7).T]
    for table in _tensor_rows(checkpoint, shared):
        table[0] = of_path[table[0]]
        tables.append(table)
    columns = np.concatenate(tables, axis=1)
    # Where records begin and end alike, those of the first tensor come first.
    columns = columns[:, np.lexsort(columns[[4, 3, 2, 1, 0]])]
    held, starts = np.unique(columns[0], return_index=True)
    stops = [*starts.tolist(), columns.shape[1]][1:]
    return {
        files[number]: FileRecords(shared, files[number], columns[1:, start:stop])
        for number, start, stop in zip(held.tolist(), starts.tolist(), stops, strict=True)
    }


def _tensor_rows(checkpoint: Checkpoint, shared: _Shared) -> Iterator[Ints]:
    """Yield ``(7, records)``: position among all files, then as the columns of ``FileRecords``."""
    index, kinds = checkpoint.rows, shared.kinds
    is_plain = np.array([not steps for steps in index.transforms], bool)
    is_plain &= checkpoint.format != SAFETENSORS
    positions = {fqn: position for position, fqn in enumerate(checkpoint.tensors)}
    for alike in checkpoint.alike:
        fqns = [tensor.fqn for tensor in alike.tensors]
        first = alike.tensors[0]
        owners = np.array([positions[fqn] for fqn in fqns], np.int64)
        of_box = [(box.sizes, first.dtype) for box in first.boxes]
        kind_of = np.array([kinds.setdefault(kind, len(kinds)) for kind in of_box], np.int64)
        if not alike.placed:
            continue
        chunks, at = alike.placed, alike.positions
        keys = np.array([index.numbers[fqn] for fqn in fqns], np.int64)
        done = 0
        for some, rows in index.pieces(alike.places, keys):
            table = np.empty((7, len(some), len(chunks)), np.int64)
            files, transforms, starts, lengths = np.moveaxis(rows[:, at], 2, 0)
            table[0], table[1], table[2] = files, starts, lengths
            table[3] = owners[done : done + len(some), None]
            table[4] = chunks
            table[5] = np.where(is_plain[transforms], kind_of[chunks], -1)
            table[6] = transforms
            done += len(some)
            yield table.reshape(7, -1)


def _object_records(checkpoint: Checkpoint) -> Iterator[Record]:
    """Yield the records of objects."""
    for fqn, stored in checkpoint.objects.items():
        if stored.file is not None:
            place = stored.file, stored.start, stored.nbytes, stored.transforms
            yield Record(fqn, StoredChunk(Box((), ()), *place), None)


def fqns_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the keys of what records hold, sorted."""
    return tuple(sorted({record.fqn for record in records}))
