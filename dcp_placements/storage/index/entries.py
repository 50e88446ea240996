"""``Metadata.state_dict_metadata`` in columns: what each key is, and the chunks of tensors.

Thousands of keys have a few forms: properties, shape and list of chunks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_placements.storage.index.columns import Ints
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
    lists = _Lists()
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
            form = Form(held[0], shape, lists.number(entry.chunks, len(entry.size)))
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
        lists.all,
        others,
    )


def _portable(one: TensorProperties) -> Hashable:
    """Return what every torch has of properties."""
    return one.dtype, one.layout, one.requires_grad, one.memory_format, one.pin_memory


class _Lists:
    """Lists of chunks, each different one once."""

    def __init__(self) -> None:
        self.all: list[ChunkList] = []
        self._arrays: dict[Hashable, list[tuple[ChunkList, int]]] = {}

    def number(self, chunks: Sequence[Any], ndim: int) -> int:
        if isinstance(chunks, ChunkList):
            return self._number(chunks)
        return self._number(ChunkList.of(chunks, ndim))

    def _number(self, chunks: ChunkList) -> int:
        ends = chunks.offsets[-1:].tobytes(), chunks.sizes[-1:].tobytes()
        alike = self._arrays.setdefault((chunks.offsets.shape, ends), [])
        for other, number in alike:
            if other is chunks or other == chunks:
                return number
        alike.append((chunks, len(self.all)))
        self.all.append(chunks)
        return len(self.all) - 1
