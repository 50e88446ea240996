"""Layouts as torch's plan items, made where they are needed.

Items of tensors that lie alike share their chunk objects. A plan carries its items lazily: in the
process that made it they are there as soon as anybody looks; sent to another process they stay
behind, because that process can make its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch

from dcp_placements.interop import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dcp_placements.layout import Box, Chunk
from dcp_placements.picked import RowLists
from dcp_placements.placing import Placed
from dcp_placements.table import OBJECT, Look, Table, boxes

T = TypeVar("T")


class LazyItems(Sequence[T]):
    """A plan's items, made when they are first looked at; pickled without them.

    Args:
        make: Makes the items; None where they were left behind in another process.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], list[T]] | None = None) -> None:
        self._make = make
        self._made: list[T] | None = None

    @property
    def all(self) -> list[T]:
        """The items."""
        if self._made is None:
            if self._make is None:
                raise RuntimeError("these plan items were not sent; finish_plan() makes them anew")
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return len(self.all)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self.all[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self.all)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self.all, *other]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.all == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        state = "not sent" if self._make is None else "not made yet"
        return f"LazyItems({state if self._made is None else self._made})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyItems, ()


class TableItems:
    """Makes the write items of one coordinate of a table."""

    def __init__(self, table: Table, coordinates: Sequence[int]) -> None:
        self.table = table
        self._boxes = []
        start = 0
        for known in table.classes:
            stop = start + len(known.sharding.axis_sizes)
            self._boxes.append(boxes(known, coordinates[start:stop]))
            start = stop
        self._data: dict[tuple[int, int], list[tuple[torch.Size, TensorWriteData]]] = {}

    def count(self, class_index: int) -> int:
        """Return how many items each tensor of a class has here."""
        return 1 if class_index == OBJECT else len(self._boxes[class_index])

    def of(self, entry: int) -> list[WriteItem]:
        """Return the items of one key; none where this coordinate holds no element."""
        table = self.table
        fqn, index = table.fqns[entry], table.class_of[entry]
        if index == OBJECT:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        look = table.look_of[entry]
        data = self._data.get((index, look))
        if data is None:
            data = self._data[index, look] = self._write_data(index, table.looks[look])
        kind = WriteItemType.TENSOR if table.classes[index].plain else WriteItemType.SHARD
        return [
            WriteItem(MetadataIndex(fqn, offsets), kind, tensor_data=part) for offsets, part in data
        ]

    def _write_data(self, index: int, look: Look) -> list[tuple[torch.Size, TensorWriteData]]:
        shape = self.table.classes[index].sharding.global_shape
        return _write_data(self._boxes[index], look, shape)


class PickedItems:
    """Makes the write items of one coordinate of a table of picked rows."""

    def __init__(self, table: Table, coordinates: Sequence[int], rows: RowLists) -> None:
        self.table = table
        self.rows = rows
        self._coordinates = []
        start = 0
        for known in table.classes:
            stop = start + len(known.sharding.axis_sizes)
            self._coordinates.append(tuple(coordinates[start:stop]))
            start = stop
        self._boxes: dict[tuple[int, int], tuple[Box, ...]] = {}
        self._data: dict[tuple[int, int, int], list[tuple[torch.Size, TensorWriteData]]] = {}

    def boxes(self, entry: int) -> tuple[Box, ...]:
        """Return the boxes of one key."""
        key = index, number = self.table.class_of[entry], self.rows.list_of[entry]
        found = self._boxes.get(key)
        if found is None:
            known, rows = self.table.classes[index], self.rows.lists[number]
            found = self._boxes[key] = boxes(known, self._coordinates[index], rows)
        return found

    def of(self, entry: int) -> list[WriteItem]:
        """Return the items of one key, in the order of ``boxes``."""
        table = self.table
        fqn, index, look = table.fqns[entry], table.class_of[entry], table.look_of[entry]
        key = index, look, self.rows.list_of[entry]
        data = self._data.get(key)
        if data is None:
            shape = table.classes[index].sharding.global_shape
            data = self._data[key] = _write_data(self.boxes(entry), table.looks[look], shape)
        kind = WriteItemType.SHARD
        return [
            WriteItem(MetadataIndex(fqn, offsets), kind, tensor_data=part) for offsets, part in data
        ]


def _write_data(
    held: Sequence[Box], look: Look, shape: tuple[int, ...]
) -> list[tuple[torch.Size, TensorWriteData]]:
    properties, size = tensor_properties(look), torch.Size(shape)
    return [
        (
            torch.Size(box.offsets),
            TensorWriteData(chunk_metadata(box.offsets, box.sizes), properties, size),
        )
        for box in held
    ]


def placed_items(placed: Placed) -> list[WriteItem]:
    """Return the write items of a tensor that no table holds."""
    properties = tensor_properties(look_of(placed.tensor))
    size = torch.Size(placed.global_shape)
    return [
        WriteItem(
            MetadataIndex(placed.fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk_metadata(chunk.offsets, chunk.sizes), properties, size
            ),
        )
        for chunk in written_chunks(placed)
    ]


def written_chunks(placed: Placed) -> tuple[Chunk, ...]:
    """Return the chunks that a placed tensor is written as.

    A tensor without elements keeps its key by one empty chunk; a row that a rank holds twice
    (IndexShard) is written once.
    """
    if 0 in placed.global_shape:
        origin = (0,) * len(placed.global_shape)
        return (Chunk(origin, origin, placed.global_shape),)
    by_offsets = {chunk.offsets: chunk for chunk in reversed(placed.chunks)}
    if len(by_offsets) < len(placed.chunks):
        return tuple(reversed(by_offsets.values()))
    return placed.chunks


def written_data(placed: Placed, chunk: Chunk) -> torch.Tensor:
    """Return the data of a written chunk: a view of the local tensor."""
    if 0 in placed.global_shape:
        return placed.tensor.detach().new_empty(placed.global_shape)
    return placed.view(chunk)


def look_of(tensor: torch.Tensor) -> Look:
    """Return the properties of a tensor that metadata keeps."""
    return Look(tensor.dtype, tensor.layout, tensor.requires_grad)


def tensor_properties(look: Look) -> TensorProperties:
    """Return torch's form of a look."""
    return TensorProperties(look.dtype, look.layout, look.requires_grad)


def chunk_metadata(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    """Return torch's form of a box."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
