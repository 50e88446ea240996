"""``Metadata.state_dict_metadata`` by columns: torch's objects are made for the keys looked up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import BytesStorageMetadata, TensorStorageMetadata

from dcp_placements.storage.index.entries import OBJECT, OTHER, Entries, build_entries


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
