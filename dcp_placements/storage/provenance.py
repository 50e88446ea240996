"""What a checkpoint records of its save: its identity, and how each key was cut and renamed.

The record is in ``Metadata.planner_data`` under one reserved key, which torch's readers ignore, and
a load is compared with it. Thousands of keys are cut in a few ways: the record has each tuple of
cuts once, by the names of axes, and a column with an index into these for each key, both as plain
values that any unpickler admits.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import torch
import xxhash

from dcp_placements import __version__
from dcp_placements.errors import CannotPlace
from dcp_placements.layout.sharding import Cut, Cuts, FusedPart, Kind, unknown_kind
from dcp_placements.names.recorded_numbers import Family, Numbering, Numberings
from dcp_placements.names.renames import Step

RESERVED_KEY = "dcp_placements"
"""The key in ``Metadata.planner_data``."""

OWN_PREFIX = f"{RESERVED_KEY}."
"""The prefix of keys in ``storage_data`` of records that are neither tensors nor objects."""

COPIES = "copies"
"""The key in the provenance of a save whose ranks write copies of what others write."""

DOUBTS = "doubts"
"""The key in the provenance of a save that let replicas through: it maps reasons to keys."""

_LARGEST, _MOST_PARTS = 1 << 31, 1 << 20
"""The largest number in a recorded cut, and the most parts of a cut that records their count."""

_MOST_ELEMENTS = 1 << 62
"""The largest range of a flat cut."""

DIFFERED, UNCOMPARED = "differed", "uncompared"
"""The reasons: replicas differed; or they were not compared, and no rule declares them."""


def identity(save_id: bytes, *, world_size: int, step: int | None) -> dict[str, Any]:
    """Return the provenance that every checkpoint has.

    Its keys are ``save_id``, ``versions``, ``world_size``, and ``step`` unless that is None.
    """
    provenance: dict[str, Any] = {
        "save_id": save_id.hex(),
        "versions": {"dcp_placements": __version__, "torch": str(torch.__version__)},
        "world_size": world_size,
    }
    if step is not None:
        provenance["step"] = step
    return provenance


def provenance_of(metadata: Any) -> Mapping[str, Any] | None:
    """Return the provenance of a checkpoint; None where it has none.

    Args:
        metadata: Torch's ``Metadata``, or another object with ``planner_data``.
    """
    data = metadata.planner_data
    provenance = data.get(RESERVED_KEY) if isinstance(data, Mapping) else None
    if isinstance(provenance, Mapping) and "save_id" in provenance:
        return provenance
    return None


def saved_by(metadata: Any) -> str:
    """Return a short text that names the save; empty if no id is recorded, or a rank saved alone.

    Ranks that save with ``no_dist=True``, each into its own directory, have different ids.
    """
    provenance = provenance_of(metadata)
    if provenance is None or provenance.get("world_size", 1) == 1:
        return ""
    step = f" (step {provenance['step']})" if "step" in provenance else ""
    return f"save {provenance['save_id'][:8]}{step}"


def cut_of_plain(
    axis: str | None,
    size: int,
    dim: int | None,
    kind: str,
    parts: int | Sequence[int] = 1,
    alternate: bool = False,
    of: Sequence[Any] | None = None,
    by_rule: bool = False,
    copies: Sequence[int] = (),
) -> Cut:
    """Return the cut of plain values.

    In records of older saves ``alternate`` says that parts alternate row by row, which is a plain
    cut. ``of`` is the part of a fused tensor, if only that is cut: its number, sizes and groups.

    Raises:
        CannotPlace: The kind is unknown, as of a later version; or no cut has such numbers.
        TypeError: A value has another type.
    """
    if alternate:
        kind, parts = Kind.PLAIN, 1
    part = None
    if of is not None:
        number, sizes, groups = of
        part = FusedPart(number, tuple(sizes), groups)
    named = None if axis is None else str(axis)
    inside = parts if isinstance(parts, int) else tuple(parts)
    cut = Cut(dim, named, size, Kind(kind), inside, part, bool(by_rule), tuple(copies))
    match cut.kind:
        case Kind.PLAIN | Kind.LISTED:
            is_possible = inside == 1
        case Kind.STRIDED:
            is_possible = isinstance(inside, int)
        case Kind.FUSED:
            is_possible = inside != ()
        case Kind.RAGGED:  # of which a shard may have no rows
            is_possible = isinstance(inside, tuple) and len(inside) == size
        case Kind.FLAT:  # of which the record leaves out the sizes
            is_possible = inside == 1 or (isinstance(inside, tuple) and len(inside) == size)
        case _:
            raise unknown_kind(cut.kind)
    number, sizes, groups = part or (0, (1,), 1)
    counts = [inside] if isinstance(inside, int) else [*inside]
    is_sized = cut.kind in (Kind.RAGGED, Kind.FLAT) and isinstance(inside, tuple)
    least, most = 0 if is_sized else 1, _MOST_PARTS if isinstance(inside, int) else _LARGEST
    if cut.kind is Kind.FLAT:
        most = _MOST_ELEMENTS
    is_possible &= all(type(count) is int and least <= count <= most for count in counts)
    is_possible &= (dim is None) == (cut.kind is Kind.FLAT)
    if cut.copies:
        fused = inside if isinstance(inside, int) else len(inside)
        is_possible &= cut.kind is Kind.FUSED and len(cut.copies) == fused
        is_possible &= all(type(n) is int and n >= 1 and size % n == 0 for n in cut.copies)
    for count in (size, 1 if dim is None else dim + 2, *sizes, number + 1, groups):
        is_possible &= type(count) is int and 1 <= count <= _LARGEST
    if not is_possible or number >= len(sizes):
        raise CannotPlace(f"a cut that no placement makes: {plain_of_cut(cut)!s:.100}")
    return cut


def plain_of_cut(cut: Cut) -> tuple[Any, ...]:
    """Return a cut as plain values."""
    of = None if cut.of is None else tuple(cut.of)
    values = cut.axis, cut.size, cut.dim, cut.kind.value, cut.parts, False, of, cut.by_rule
    return (*values, cut.copies) if cut.copies else values


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """How a checkpoint was saved, as far as that was recorded.

    Attributes:
        save_id: Id of the save, in hex.
        distinct_cuts: Different cuts of keys; the first are those of keys without a record.
        cuts_index: Index in ``distinct_cuts`` of each key.
        renames: Steps of all renames that any rank used.
        numberings: Families of keys that the renames numbered.
        unknown: By index in ``distinct_cuts``, why these cuts are unknown to this version; they are
            empty there.
    """

    save_id: str
    distinct_cuts: tuple[Cuts, ...]
    cuts_index: Mapping[str, int]
    renames: tuple[Step, ...]
    numberings: Numberings
    unknown: Mapping[int, str] = field(default_factory=dict)

    def cuts(self, fqn: str) -> Cuts:
        """Return how a key was cut; empty where it was not cut, or nothing is recorded."""
        return self.distinct_cuts[self.cuts_index.get(fqn, 0)]


def packed_record(
    distinct_cuts: Sequence[Cuts],
    cuts_index: Mapping[str, int],
    keys: Collection[str],
    renames: Iterable[Step],
    numberings: Numberings,
) -> dict[str, Any]:
    """Return a record as plain values; ``record_of`` reads them.

    The sizes of the ranges of flat cuts are left out: each tensor has its own, thousands of ranks
    have thousands, and a load may have any others.
    """
    ordered = sorted(keys)
    numbers: dict[tuple[Any, ...], int] = {}
    numbered: list[int] = []
    for cuts in distinct_cuts:
        kept = [cut._replace(parts=1) if cut.kind is Kind.FLAT else cut for cut in cuts]
        numbered.append(numbers.setdefault(tuple(map(plain_of_cut, kept)), len(numbers)))
    column = np.fromiter(map(cuts_index.get, ordered, repeat(0)), np.int64, len(ordered))
    column = np.array(numbered, np.int64)[column]
    kind = np.min_scalar_type(len(numbers))
    record: dict[str, Any] = {
        "cuts": {
            "groups": tuple(numbers),
            "keys": (len(ordered), _digest(ordered)),
            "group_of": (kind.char, zlib.compress(column.astype(kind).tobytes())),
        },
        "renames": tuple(map(plain_of_rename, renames)),
    }
    if numberings:
        record["numbers"] = plain_of_numberings(numberings)
    return record


def packed_doubts(doubts: Mapping[str, Set[str]], keys: Collection[str]) -> dict[str, Any]:
    """Return the record of replicas that were let through; ``doubts_of`` reads it.

    Args:
        doubts: Keys by reason. The record has a bit for each key of the checkpoint.
        keys: All keys of the checkpoint.
    """
    ordered = sorted(keys)
    bits = {
        reason: zlib.compress(np.packbits([fqn in of_reason for fqn in ordered]).tobytes())
        for reason, of_reason in doubts.items()
        if not of_reason.isdisjoint(ordered)
    }
    return {DOUBTS: {"keys": (len(ordered), _digest(ordered)), **bits}} if bits else {}


def doubts_of(
    provenance: Mapping[str, Any] | None, keys: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Return by reason the keys whose replicas a save let through; empty without a record.

    Args:
        provenance: Provenance of the checkpoint.
        keys: All keys of the checkpoint.
    """
    kept = (provenance or {}).get(DOUBTS)
    if kept is None:
        return {}
    ordered = sorted(keys)
    doubts: dict[str, frozenset[str]] = {}
    try:
        if tuple(kept["keys"]) != (len(ordered), _digest(ordered)):
            return {}
        for reason in kept.keys() & {DIFFERED, UNCOMPARED}:
            data = _inflated(kept[reason], (len(ordered) + 7) // 8)
            bits = np.unpackbits(np.frombuffer(data, np.uint8), count=len(ordered))
            doubts[reason] = frozenset([ordered[index] for index in np.flatnonzero(bits)])
    except Exception:  # damaged: a checkpoint without a record
        return {}
    return doubts


def record_of(provenance: Mapping[str, Any] | None, keys: Iterable[str]) -> SaveRecord | None:
    """Return how a checkpoint was saved; None without a record of exactly its keys.

    Args:
        provenance: Provenance of the checkpoint.
        keys: All keys of the checkpoint.
    """
    if provenance is None:
        return None
    ordered = sorted(keys)
    try:
        cuts = provenance["cuts"]
        distinct_cuts, unknown = _known_cuts(cuts["groups"])
        kind, packed = cuts["group_of"]
        if tuple(cuts["keys"]) != (len(ordered), _digest(ordered)) or kind not in tuple("BHIL"):
            return None
        data = _inflated(packed, len(ordered) * np.dtype(kind).itemsize)
        column: list[int] = np.frombuffer(data, kind).tolist()
        cuts_index = dict(zip(ordered, column, strict=True))
        renames = tuple([rename_of_plain(*step) for step in provenance["renames"]])
        plain = provenance.get("numbers")
        numberings = {} if plain is None else numberings_of_plain(plain)
        if max(column, default=0) >= len(distinct_cuts):
            return None
    except Exception:  # another version's, or damaged: a checkpoint without a record
        return None
    return SaveRecord(
        str(provenance["save_id"]), distinct_cuts, cuts_index, renames, numberings, unknown
    )


def _inflated(packed: bytes, nbytes: int) -> bytes:
    """Inflate bytes; refuse any other size than ``nbytes``, without inflating more."""
    data = zlib.decompressobj().decompress(packed, nbytes + 1)  # 0 would be no limit
    if len(data) != nbytes:
        raise ValueError(f"other than {nbytes} bytes")
    return data


def _known_cuts(plain: Iterable[Any]) -> tuple[tuple[Cuts, ...], dict[int, str]]:
    """Return the cuts of plain values; and by index why cuts are unknown, which are empty."""
    distinct_cuts: list[Cuts] = []
    unknown = {}
    for number, cuts in enumerate(plain):
        try:
            distinct_cuts.append(tuple([cut_of_plain(*cut) for cut in cuts]))
        except (TypeError, ValueError) as error:  # a later version's
            unknown[number] = str(error)
            distinct_cuts.append(())
    return tuple(distinct_cuts), unknown


def rename_of_plain(
    kind: str, pattern: str, total: int | None, shaping: Sequence[Any] = ()
) -> Step:
    """Return the step of a rename of plain values."""
    if shaping:
        dim, *parts = shaping
        shaping = (int(dim),)
        if parts:
            names, sizes, groups = parts
            shaping += tuple(map(str, names)), tuple(map(int, sizes)), int(groups)
    return Step(str(kind), str(pattern), None if total is None else int(total), tuple(shaping))


def plain_of_rename(step: Step) -> tuple[Any, ...]:
    """Return a step as plain values; without a shaping three, as in older versions."""
    return tuple(step[: 4 if step.shaping else 3])


def plain_of_numberings(numberings: Numberings) -> tuple[Any, ...]:
    """Return families as plain values: head, tail, total and step of each."""
    return tuple([(*family, *numbering) for family, numbering in numberings.items()])


def numberings_of_plain(plain: Iterable[Sequence[Any]]) -> dict[Family, Numbering]:
    """Return families of plain values."""
    return {
        Family(str(head), str(tail)): Numbering(None if total is None else int(total), str(step))
        for head, tail, total, step in plain
    }


def _digest(ordered: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(ordered).encode("utf-8", "surrogatepass"))
