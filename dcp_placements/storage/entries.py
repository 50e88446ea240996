"""``Metadata.state_dict_metadata`` in columns: what each key is, and the chunks of tensors.

Thousands of keys have a few forms: properties, shape and list of chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements.layout.boxes import Ints
from dcp_placements.storage.metadata.chunk_list import ChunkList

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
