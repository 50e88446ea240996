"""``Metadata.state_dict_metadata`` in columns: what each key is, and the chunks of tensors.

Thousands of keys have a few forms: properties, shape and list of chunks. Torch's object is made
once for each form that is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_placements._torch import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_placements.layout.alike import BySequence
from dcp_placements.storage.index.columns import IndexDamage, Ints
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.pickles.tensor_properties import portable_state

OBJECT, OTHER = -1, -2

Stock = Callable[[IndexDamage], Metadata]
"""Reads the pickle before an index, once a part of the index turns out to be damaged."""


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
        list_counts: By list, its chunks.
    """

    fqns: Sequence[str]
    form_of: Sequence[int] | Ints
    forms: Sequence[Form]
    properties: Sequence[TensorProperties]
    shapes: Sequence[tuple[int, ...]]
    lists: Sequence[ChunkList]
    others: Sequence[Any] = ()
    list_counts: Sequence[int] = ()

    def list_of(self, key: int) -> tuple[int, Ints] | None:
        """Return number and offsets of the list of chunks of a key; None where it has none."""
        if key >= len(self.form_of):
            return None
        form = self.forms[int(self.form_of[key])]
        if form.properties < 0:
            return None
        return form.chunks, self.lists[form.chunks].offsets

    def entry(self, form: Form) -> Any:
        """Return torch's object for a form."""
        if form.properties == OBJECT:
            return BytesStorageMetadata()
        if form.properties == OTHER:
            return self.others[form.shape]
        return TensorStorageMetadata(
            self.properties[form.properties],
            torch.Size(self.shapes[form.shape]),
            self.lists[form.chunks],  # type: ignore[arg-type]
        )


class StoredEntries(Mapping[str, Any]):
    """``Metadata.state_dict_metadata`` of a checkpoint whose index is read in part.

    Its pickle is that of a dict of torch's objects.

    Args:
        entries: Of all keys; their lists of chunks may be read when they are used.
        stock: Serves where one of these is damaged; None to raise.
    """

    def __init__(self, entries: Entries, stock: Stock | None = None) -> None:
        self._stock = stock
        self._take(entries)

    def _take(self, entries: Entries) -> None:
        self.entries = entries
        form_of = np.asarray(entries.form_of, np.int64).tolist()
        self._form_of: dict[str, int] = dict(zip(entries.fqns, form_of, strict=True))
        self._made: dict[int, Any] = {}

    def __getitem__(self, fqn: str) -> Any:
        form = self._form_of[fqn]
        made = self._made.get(form)
        if made is None:
            try:
                made = self._made[form] = self.entries.entry(self.entries.forms[form])
            except IndexDamage as damage:
                if self._stock is None:
                    raise
                self._take(entries_of(self._stock(damage).state_dict_metadata))
                return self[fqn]
        return made

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


def entries_of(stored: Mapping[str, Any]) -> Entries:
    """Return entries in columns."""
    if isinstance(stored, StoredEntries):
        return stored.entries
    forms: dict[Form, int] = {}
    properties: dict[Hashable, tuple[int, TensorProperties]] = {}
    shapes: dict[tuple[int, ...], int] = {}
    lists = _Lists()
    others: list[Any] = []
    form_of = []
    for entry in stored.values():
        if type(entry) is TensorStorageMetadata:
            state = portable_state(entry.properties)
            form = Form(
                properties.setdefault(state, (len(properties), entry.properties))[0],
                shapes.setdefault(tuple(entry.size), len(shapes)),
                lists.number(entry.chunks, len(entry.size)),
            )
        elif type(entry) is BytesStorageMetadata:
            form = Form(OBJECT)
        else:
            form = Form(OTHER, len(others))
            others.append(entry)
        form_of.append(forms.setdefault(form, len(forms)))
    return Entries(
        tuple(stored),
        form_of,
        tuple(forms),
        [first for _, first in properties.values()],
        tuple(shapes),
        lists.all,
        others,
        [len(chunks) for chunks in lists.all],
    )


class _Lists:
    """Lists of chunks, each different one once."""

    def __init__(self) -> None:
        self.all: list[ChunkList] = []
        self._arrays: dict[Hashable, list[tuple[ChunkList, int]]] = {}
        self._lists: BySequence[int] = BySequence(_place)

    def number(self, chunks: Sequence[ChunkStorageMetadata], ndim: int) -> int:
        if isinstance(chunks, ChunkList):
            return self._number(chunks)
        number = self._lists.get(chunks, ndim)
        if number is None:
            number = self._number(ChunkList.of(chunks, ndim))
            self._lists.put(chunks, number, ndim)
        return number

    def _number(self, chunks: ChunkList) -> int:
        ends = chunks.offsets[-1:].tobytes(), chunks.sizes[-1:].tobytes()
        alike = self._arrays.setdefault((chunks.offsets.shape, ends), [])
        for other, number in alike:
            if other is chunks or other == chunks:
                return number
        alike.append((chunks, len(self.all)))
        self.all.append(chunks)
        return len(self.all) - 1


def _place(chunk: ChunkStorageMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)
