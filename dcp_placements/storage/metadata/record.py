"""The record of a save: how each key was cut and renamed, so that a load can be compared with it.

Thousands of keys are cut in a few ways. The record is these few ways, by the names of axes, and a
column with the number of its way for each key. Both are plain values that any unpickler admits.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import xxhash

from dcp_placements.layout.sharding import Cut, Kind, LayoutError, Pick, Sharding, unknown_kind
from dcp_placements.storage.metadata.provenance import stored

CUTS_KEY = "cuts"
RENAMES_KEY = "renames"
"""Under the reserved key in ``Metadata.planner_data``."""


class SavedCut(NamedTuple):
    """One axis cuts one dim, as it was declared; of an axis of size 1, too.

    Attributes:
        axis: Its name; None where it has none.
        size: Ranks along it.
        dim: Of the tensor, from 0.
        kind: How it cuts.
        parts: The number of parts of the dim, or their sizes.
    """

    axis: str | None
    size: int
    dim: int
    kind: Kind
    parts: int | tuple[int, ...] = 1

    @classmethod
    def of(
        cls,
        axis: str | None,
        size: int,
        dim: int,
        kind: str,
        parts: int | tuple[int, ...],
        alternate: bool = False,
    ) -> SavedCut:
        """Return the cut of plain ``values``.

        Args:
            axis: Its name.
            size: Ranks along it.
            dim: Of the tensor.
            kind: The value of its kind.
            parts: Of the dim.
            alternate: In records of older saves: whether parts alternate row by row, which is a
                plain cut.

        Raises:
            ValueError: A kind that is not known.
        """
        if alternate:
            kind, parts = Kind.PLAIN, 1
        if not isinstance(parts, int):
            parts = tuple([int(part) for part in parts])
        name = None if axis is None else str(axis)
        return cls(name, int(size), int(dim), Kind(kind), parts)

    @property
    def values(self) -> tuple[str | None, int, int, str, int | tuple[int, ...]]:
        """Plain values that any unpickler admits; ``SavedCut.of(*values)`` is the cut."""
        return self.axis, self.size, self.dim, self.kind.value, self.parts

    @property
    def placement(self) -> str:
        """Its placement, as its user would declare it."""
        match self.kind:
            case Kind.PLAIN:
                return f"Shard({self.dim})"
            case Kind.FUSED:
                return f"FusedShard({self.dim}, {self.parts})"
            case Kind.STRIDED:
                return f"_StridedShard({self.dim}, split_factor={self.parts})"
            case Kind.LISTED:
                return f"rows of dim {self.dim}, each rank its own"
            case _:
                raise unknown_kind(self.kind)

    def __str__(self) -> str:
        if self.kind is Kind.LISTED:
            return self.placement
        axis = "an axis" if self.axis is None else repr(self.axis)
        return f"{self.placement} over {axis} of size {self.size}"


Cuts = tuple[SavedCut, ...]
"""In the order in which they apply."""


class SavedRename(NamedTuple):
    """One step of a rename that was in force.

    Attributes:
        kind: The name of its class; ``"function"`` for any other callable.
        pattern: Of the checkpoint's keys, ``{}`` for the number; what a function is called where
            it changed no number.
        total: How many numbers there are; None where that was not declared.
    """

    kind: str
    pattern: str
    total: int | None

    def __str__(self) -> str:
        of = "" if self.total is None else f", total={self.total}"
        return f"{self.kind}({self.pattern!r}{of})"


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """How a checkpoint was saved, as far as that was recorded.

    Attributes:
        save_id: Of the save.
        groups: The ways of cutting; the first is that of keys of which nothing is recorded.
        group_of: By key, position in ``groups``.
        renames: What renames were in force on any rank.
    """

    save_id: str
    groups: tuple[Cuts, ...]
    group_of: Mapping[str, int]
    renames: tuple[SavedRename, ...]

    def cuts(self, fqn: str) -> Cuts:
        """Return how a key was cut; empty where it was not cut, or nothing is recorded."""
        return self.groups[self.group_of.get(fqn, 0)]


def cuts_of(sharding: Sharding, axis_names: Sequence[str | None]) -> Cuts:
    """Return the cuts of a layout by the names of its axes."""
    return tuple([_saved_cut(cut, axis_names, sharding.axis_sizes) for cut in sharding.cuts])


def _saved_cut(
    cut: Cut | Pick, axis_names: Sequence[str | None], axis_sizes: Sequence[int]
) -> SavedCut:
    # Rows of no axis are those of a stack, which names identify.
    name = None if cut.axis < 0 else axis_names[cut.axis]
    size = 1 if cut.axis < 0 else axis_sizes[cut.axis]
    if isinstance(cut, Pick):
        return SavedCut(name, size, cut.dim, cut.kind)
    match cut.kind:
        case Kind.PLAIN | Kind.FUSED | Kind.STRIDED:
            return SavedCut(name, size, cut.dim, cut.kind, cut.parts)
        case Kind.LISTED:
            raise LayoutError("rows that a rank lists are a Pick, not a Cut")
        case _:
            raise unknown_kind(cut.kind)


def packed_record(
    groups: Sequence[Cuts],
    group_of: Mapping[str, int],
    keys: Collection[str],
    renames: Iterable[tuple[str, str, int | None]],
) -> dict[str, Any]:
    """Return a record as plain values; ``record_of`` reads them."""
    ordered = sorted(keys)
    column = np.fromiter(map(group_of.get, ordered, repeat(0)), np.int64, len(ordered))
    kind = np.min_scalar_type(len(groups))
    return {
        CUTS_KEY: {
            "groups": tuple([tuple([cut.values for cut in cuts]) for cuts in groups]),
            "keys": (len(ordered), _digest(ordered)),
            "group_of": (kind.char, zlib.compress(column.astype(kind).tobytes())),
        },
        RENAMES_KEY: tuple([tuple(step) for step in renames]),
    }


def merged_record(parts: Sequence[Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the record of a checkpoint whose ranks each wrote their own.

    Args:
        parts: Torch's ``Metadata`` of each rank.
        keys: Of the whole checkpoint.
    """
    numbers: dict[Cuts, int] = {(): 0}
    group_of: dict[str, int] = {}
    renames: dict[SavedRename, None] = {}
    read = [record_of(stored(part), part.state_dict_metadata) for part in parts]
    records = [record for record in read if record is not None]
    for record in records:
        renames.update(dict.fromkeys(record.renames))
        for fqn, group in record.group_of.items():
            number = numbers.setdefault(record.groups[group], len(numbers))
            if group_of.setdefault(fqn, number) != number:
                group_of[fqn] = 0
    return packed_record(list(numbers), group_of, keys, renames) if records else {}


def record_of(provenance: Mapping[str, Any] | None, keys: Iterable[str]) -> SaveRecord | None:
    """Return how a checkpoint was saved; None without a record of exactly its keys.

    Args:
        provenance: Of the checkpoint.
        keys: All keys of the checkpoint.
    """
    if provenance is None or not isinstance(provenance.get(CUTS_KEY), Mapping):
        return None
    ordered = sorted(keys)
    try:
        groups, column = _unpacked_cuts(provenance[CUTS_KEY], ordered)
        renames = tuple([_rename_of(*step) for step in provenance[RENAMES_KEY]])
    except Exception:  # another version's, or damaged: a checkpoint without a record
        return None
    return SaveRecord(
        str(provenance["save_id"]), groups, dict(zip(ordered, column, strict=True)), renames
    )


def _unpacked_cuts(
    packed_cuts: Mapping[str, Any], ordered: Sequence[str]
) -> tuple[tuple[Cuts, ...], list[int]]:
    groups = tuple([tuple([SavedCut.of(*cut) for cut in cuts]) for cuts in packed_cuts["groups"]])
    if tuple(packed_cuts["keys"]) != (len(ordered), _digest(ordered)):
        raise ValueError("other keys")
    kind, packed = packed_cuts["group_of"]
    if kind not in ("B", "H", "I", "L"):
        raise ValueError(kind)
    nbytes = len(ordered) * np.dtype(kind).itemsize
    data = zlib.decompressobj().decompress(packed, nbytes + 1)
    column: list[int] = np.frombuffer(data, kind).tolist()
    if len(column) != len(ordered) or max(column, default=0) >= len(groups):
        raise ValueError("no column of these keys")
    return groups, column


def _rename_of(kind: str, pattern: str, total: int | None) -> SavedRename:
    return SavedRename(str(kind), str(pattern), None if total is None else int(total))


def _digest(ordered: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(ordered).encode("utf-8", "surrogatepass"))
