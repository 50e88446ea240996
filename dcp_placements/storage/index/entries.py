"""``Metadata.state_dict_metadata`` in columns: what each key is, and the chunks of tensors.

Thousands of keys have a few forms: properties, shape and list of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dcp_placements.layout.alike import BySequence
from dcp_placements.storage.index.columns import Ints
from dcp_placements.storage.metadata.chunk_list import ChunkList
from dcp_placements.storage.metadata.properties import Properties

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
        list_counts: By list, its chunks.
    """

    fqns: Sequence[str]
    form_of: Sequence[int] | Ints
    forms: Sequence[Form]
    properties: Sequence[Properties]
    shapes: Sequence[tuple[int, ...]]
    lists: Sequence[ChunkList]
    others: Sequence[Any] = ()
    list_counts: Sequence[int] = ()

    def list_numbers(self) -> list[int]:
        """Return by key the number of its list of chunks; -1 where it has none."""
        chunks = [form.chunks if form.properties >= 0 else -1 for form in self.forms]
        return [chunks[form] for form in self.form_of]


def build_entries(
    stored: Mapping[str, Any], properties_of: Callable[[Any], Properties | None]
) -> Entries:
    """Return entries in columns.

    Args:
        stored: By key. What is a tensor has ``size`` and ``chunks``.
        properties_of: Returns the properties of a tensor; None of an object. Of an entry of another
            class it raises ``OtherEntry``.
    """
    forms: dict[Form, int] = {}
    properties: dict[Properties, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    lists = _Lists()
    others: list[Any] = []
    form_of: list[int] = []
    # Of keys that are cut alike the planner lists one entry.
    latest: dict[Hashable, tuple[Any, int]] = {}
    for entry in stored.values():
        size = getattr(entry, "size", None)
        size = size if isinstance(size, tuple) else None
        held = latest.get(size)
        if held is not None and held[0] is entry:
            form_of.append(held[1])
            continue
        try:
            described = properties_of(entry)
        except OtherEntry:
            form = Form(OTHER, len(others))
            others.append(entry)
        else:
            form = (
                Form(OBJECT)
                if described is None
                else Form(
                    properties.setdefault(described, len(properties)),
                    shapes.setdefault(tuple(entry.size), len(shapes)),
                    lists.number(entry.chunks, len(entry.size)),
                )
            )
        number = forms.setdefault(form, len(forms))
        latest[size] = entry, number
        form_of.append(number)
    return Entries(
        tuple(stored),
        form_of,
        tuple(forms),
        list(properties),
        tuple(shapes),
        lists.all,
        others,
        [len(chunks) for chunks in lists.all],
    )


class OtherEntry(TypeError):
    """An entry that is neither that of a tensor nor that of an object."""


class _Lists:
    """Lists of chunks, each different one once."""

    def __init__(self) -> None:
        self.all: list[ChunkList] = []
        self._arrays: dict[Hashable, list[tuple[ChunkList, int]]] = {}
        self._lists: BySequence[int] = BySequence(_place)

    def number(self, chunks: Sequence[Any], ndim: int) -> int:
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


def _place(chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)
