"""What torch's metadata have of each key, in columns: properties, shape and list of chunks.

Thousands of keys have a few forms. At thousands of ranks a list of torch's objects has thousands of
elements for each way in which tensors are cut, and a rank needs few of them. So each form and each
list is kept once, a list as an array. All of it is pickled as torch's own objects.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, NamedTuple, overload

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

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> ChunkList: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | ChunkList:
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
        # Equal sizes are one object, which is pickled once.
        size = cache(torch.Size)
        rows = [ChunkStorageMetadata(*map(size, box)) for box in as_boxes(self.array)]
        return list, (rows,)


OBJECT, OTHER = -1, -2


class Form(NamedTuple):
    """What keys have in common.

    Attributes:
        properties: The number of a tensor's properties; ``OBJECT``; or ``OTHER``, for an entry that
            is of no class of DCP's.
        shape: The number of a tensor's shape; of another entry, its number.
        chunks: The number of a tensor's list of chunks.
    """

    properties: int
    shape: int = 0
    chunks: int = 0


@dataclass(slots=True)
class Entries:
    """The entries of all keys.

    Attributes:
        fqns: The keys.
        form_of: By key, the number of its form.
        forms: The forms.
        properties: Each once.
        shapes: Of whole tensors, each once.
        lists: Of chunks, each once.
        others: Entries of other classes.
    """

    fqns: Sequence[str]
    form_of: Sequence[int] | Ints
    forms: Sequence[Form]
    properties: Sequence[TensorProperties]
    shapes: Sequence[tuple[int, ...]]
    lists: Sequence[ChunkList]
    others: Sequence[Any] = ()

    def list_numbers(self) -> list[int]:
        """Return by key the number of its list of chunks; -1 where it has none."""
        chunks = [form.chunks if form.properties >= 0 else -1 for form in self.forms]
        return [chunks[form] for form in self.form_of]


def build_entries(stored: Mapping[str, Any]) -> Entries:
    """Return the entries of ``Metadata.state_dict_metadata`` in columns."""
    forms: dict[Form, int] = {}
    properties: dict[Hashable, tuple[int, TensorProperties]] = {}
    shapes: dict[tuple[int, ...], int] = {}
    lists: dict[Hashable, tuple[int, ChunkList]] = {}
    others: list[Any] = []
    form_of: list[int] = []
    # Of keys that are cut alike the planner lists one entry.
    latest: dict[Hashable, tuple[Any, int]] = {}
    for entry in stored.values():
        size = getattr(entry, "size", None)
        size = size if isinstance(size, tuple) else None
        before = latest.get(size)
        if before is not None and before[0] is entry:
            form_of.append(before[1])
            continue
        if type(entry) is TensorStorageMetadata:
            one = entry.properties
            held = properties.setdefault(_portable(one), (len(properties), one))
            shape = shapes.setdefault(tuple(entry.size), len(shapes))
            chunks = ChunkList.of(entry.chunks, len(entry.size))
            content = chunks.array.shape, chunks.array.tobytes()
            form = Form(held[0], shape, lists.setdefault(content, (len(lists), chunks))[0])
        elif type(entry) is BytesStorageMetadata:
            form = Form(OBJECT)
        else:
            form = Form(OTHER, len(others))
            others.append(entry)
        number = forms.setdefault(form, len(forms))
        latest[size] = entry, number
        form_of.append(number)
    return Entries(
        tuple(stored),
        form_of,
        tuple(forms),
        [one for _, one in properties.values()],
        tuple(shapes),
        [one for _, one in lists.values()],
        others,
    )


def _portable(one: TensorProperties) -> Hashable:
    """Return what every torch has of properties."""
    return one.dtype, one.layout, one.requires_grad, one.memory_format, one.pin_memory


class StoredEntries(Mapping[str, Any]):
    """``Metadata.state_dict_metadata`` of a checkpoint whose entries are in columns.

    Torch's object is made once for each form that is looked up. Its pickle is that of a dict of
    torch's objects.

    Args:
        entries: Of all keys.
    """

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self._made: dict[int | None, Any] = {}

    @cached_property
    def _form_of(self) -> dict[str, int]:
        form_of = np.asarray(self.entries.form_of, np.int64).tolist()
        return dict(zip(self.entries.fqns, form_of, strict=True))

    def __getitem__(self, fqn: str) -> Any:
        made = self._made.get(self._form_of[fqn])
        return self.at((fqn,))[0] if made is None else made

    def at(self, fqns: Collection[str]) -> list[Any]:
        """Return the entries of keys; None where there is none."""
        forms = list(map(self._form_of.get, fqns))
        for form in set(forms).difference(self._made):
            self._made[form] = None if form is None else self._make(form)
        return list(map(self._made.get, forms))

    def _make(self, number: int) -> Any:
        entries, form = self.entries, self.entries.forms[number]
        if form.properties == OBJECT:
            return BytesStorageMetadata()
        if form.properties == OTHER:
            return entries.others[form.shape]
        return TensorStorageMetadata(
            entries.properties[form.properties],
            torch.Size(entries.shapes[form.shape]),
            entries.lists[form.chunks],  # type: ignore[arg-type]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._form_of)

    def __len__(self) -> int:
        return len(self._form_of)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._form_of

    def __repr__(self) -> str:
        return f"StoredEntries({len(self)} keys)"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def entries_at(stored: Mapping[str, Any], fqns: Collection[str]) -> list[Any]:
    """Return the entries of keys in ``Metadata.state_dict_metadata``; None where there is none."""
    return stored.at(fqns) if isinstance(stored, StoredEntries) else list(map(stored.get, fqns))


def entries_of(stored: Mapping[str, Any]) -> Entries:
    """Return the entries of ``Metadata.state_dict_metadata`` in columns."""
    return stored.entries if isinstance(stored, StoredEntries) else build_entries(stored)
