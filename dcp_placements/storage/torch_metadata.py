"""What torch's metadata have of each key, without what keys have in common more than once.

Thousands of keys have a few forms. At thousands of ranks a list of torch's objects has thousands of
elements for each way in which tensors are cut, and a rank needs few of them. So each form is kept
once, and each list of chunks once, as an array. All of it is pickled as torch's own objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements.layout.boxes import Boxes, Ints, as_array, as_boxes
from dcp_placements.layout.sharding import Box

PORTABLE_PROPERTIES = 5
"""The fields of ``TensorProperties`` in a pickle that every torch reads."""

PROPERTIES = len(fields(TensorProperties))
"""Those of this torch; 2.15 added ``strides``, which no reader uses."""


class _PickledProperties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[:PROPERTIES])


PICKLED_PROPERTIES = {(TensorProperties.__module__, "TensorProperties"): _PickledProperties}
"""By module and name: what ``pickle`` makes of ``TensorProperties`` of any torch."""


def portable_state(instance: TensorProperties) -> tuple[Any, ...]:
    """Return the state of ``instance`` to pickle, in the form that every torch reads."""
    state: tuple[Any, ...] = instance.__getstate__()
    return state[:PORTABLE_PROPERTIES]


class ChunkList(Sequence[ChunkStorageMetadata]):
    """What ``TensorStorageMetadata.chunks`` lists, as an array of boxes that must not change.

    Torch's object is created for each element that is read. Equal to any sequence of equal chunks.
    Its pickle is that of torch's list, so that every reader of DCP loads it.

    Args:
        array: ``int64[chunks, 2, ndim]``, as ``layout/boxes`` has it.

    Raises:
        ValueError: An array of another shape.
    """

    __slots__ = ("array",)

    def __init__(self, array: npt.ArrayLike) -> None:
        self.array: Boxes = np.asarray(array, np.int64)
        if self.array.ndim != 3 or self.array.shape[1] != 2:
            raise ValueError(f"an array of {self.array.shape}: it has to be (chunks, 2, ndim)")

    @staticmethod
    def of(chunks: Sequence[ChunkStorageMetadata], ndim: int) -> ChunkList:
        """Return ``chunks`` in an array; itself if it is a ``ChunkList``.

        Args:
            chunks: Torch's list, or any sequence.
            ndim: Of the tensor.

        Raises:
            ValueError: Chunks of other dims.
        """
        boxes: list[Box] = []
        if isinstance(chunks, ChunkList):
            dims = {chunks.array.shape[2]}
        else:
            boxes = [Box(chunk.offsets, chunk.sizes) for chunk in chunks]
            dims = {len(row) for box in boxes for row in box}
        if not dims <= {ndim}:
            found = " and ".join(map(str, sorted(dims)))
            raise ValueError(f"chunks of {found} dims, of a tensor of {ndim} dims")
        return chunks if isinstance(chunks, ChunkList) else ChunkList(as_array(boxes, ndim))

    @property
    def offsets(self) -> Ints:
        """Where each chunk begins, ``(chunks, ndim)``."""
        return self.array[:, 0]

    @property
    def sizes(self) -> Ints:
        """The sizes of each chunk, ``(chunks, ndim)``."""
        return self.array[:, 1]

    def boxes(self) -> tuple[Box, ...]:
        """Return all chunks as boxes."""
        return tuple(as_boxes(self.array))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ChunkList(self.array[index])
        offsets, sizes = self.array[index].tolist()
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkList):
            return np.array_equal(self.array, other.array)
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(
            one == another for one, another in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkList({len(self)} chunks)"

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.as_list(),)

    def as_list(self) -> list[ChunkStorageMetadata]:
        """Return torch's list. Equal sizes are one object, which is pickled once."""
        size = cache(torch.Size)
        return [ChunkStorageMetadata(*map(size, box)) for box in as_boxes(self.array)]


class Entries(NamedTuple):
    """``Metadata.state_dict_metadata`` by what keys have in common.

    Attributes:
        fqns: The keys.
        form_of: By key, the number of its form.
        forms: Torch's objects, each once; the chunks of tensors are a ``ChunkList``.
        lists: Of chunks, each once.
        list_of: By form, the number of its list; -1 where it has none.
    """

    fqns: list[str]
    form_of: list[int]
    forms: list[Any]
    lists: list[ChunkList]
    list_of: list[int]

    def stored(self) -> dict[str, Any]:
        """Return torch's dict. Keys of one form have one object."""
        forms = map(self.forms.__getitem__, self.form_of)
        return dict(zip(self.fqns, forms, strict=True))


_PORTABLE = attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def build_entries(stored: Mapping[str, Any]) -> Entries:
    """Return the entries of ``Metadata.state_dict_metadata``."""
    numbers: dict[Hashable, int] = {}
    lists: dict[Hashable, tuple[int, ChunkList]] = {}
    entries = Entries(list(stored), [], [], [], [])
    # Of keys that are cut alike the planner lists one object.
    latest: dict[Any, tuple[Any, int]] = {}
    for entry in stored.values():
        size = getattr(entry, "size", None)
        size = size if isinstance(size, tuple) else None
        before, number = latest.get(size, (None, -1))
        if before is not entry:
            content: Any = type(entry)
            if type(entry) is TensorStorageMetadata:
                content = _PORTABLE(entry.properties), tuple(entry.size), _content(entry.chunks)
            elif type(entry) is not BytesStorageMetadata:
                content = type(entry), len(numbers)
            number = numbers.setdefault(content, len(numbers))
            latest[size] = entry, number
            if number == len(entries.forms):
                listed = -1
                if type(entry) is TensorStorageMetadata:
                    chunks = ChunkList.of(entry.chunks, len(entry.size))
                    held = chunks.array.shape, chunks.array.tobytes()
                    listed, chunks = lists.setdefault(held, (len(lists), chunks))
                    array: Any = chunks
                    if entry.chunks is not array:
                        entry = replace(entry, chunks=array)
                entries.forms.append(entry)
                entries.list_of.append(listed)
        entries.form_of.append(number)
    entries.lists.extend(chunks for _, chunks in lists.values())
    return entries


def _content(chunks: Sequence[ChunkStorageMetadata]) -> Hashable:
    """Return what equal lists of chunks have in common, and no others."""
    if isinstance(chunks, ChunkList):
        return chunks.array.shape, chunks.array.tobytes()
    return tuple([(tuple(one.offsets), tuple(one.sizes)) for one in chunks])
