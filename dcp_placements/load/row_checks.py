"""Rows that ranks list themselves, and who asks for which of them in a load.

A ``Stack`` or an ``IndexShard`` with the rows of another rank reads tensors of the right shape: the
wrong ones. As with renamed numbers no rank can see that, and all together can: several of them ask
for the same rows, and for others nobody does.
"""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_placements.bind.binding import Binding
from dcp_placements.bind.placed import Placing, StackedPlaced
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.layout.sharding import Chunk, Intervals, Layout, Pick, Sharding
from dcp_placements.load.families import format_numbers
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.storage.metadata.record import SaveRecord

_DIGITS = re.compile(r"\d+")
_MAX_PARTS = 4
_MAX_ROWS = 6

Bits = npt.NDArray[np.bool_]
Rows = tuple[tuple[int, ...], tuple[int, ...], bytes, tuple[Intervals, ...]]
"""``Listed`` without its rule."""

Part = tuple[bytes, tuple[Intervals, ...]]
Parts = dict[Part, list[int]]
"""The ranks that ask for the same elements, by ``bits`` and ``within`` of ``Listed``."""


@dataclass(frozen=True, slots=True)
class Listed:
    """How rows of a tensor are listed, and which of them.

    Attributes:
        dims: Of the tensor, those whose rows are listed.
        sizes: Of these dims.
        bits: Which rows, one bit per row in C order, packed.
        within: What of them, by the intervals of the other dims: ranks of FSDP or TP ask for
            different parts of the same rows.
        rule: What to call the rule of an ``IndexShard``; None where rename= stacks them.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    bits: bytes
    within: tuple[Intervals, ...]
    rule: str | None


def packed_rows(
    placing: Placing,
    state_dict: Iterable[str],
    stored: Iterable[str],
    excused: Callable[[str], bool],
) -> bytes:
    """Return the rows that a rank lists, for the coordinator.

    Keys that it asks for in another way go along as few names, without their numbers: what it reads
    of them is not known to the coordinator.

    Args:
        placing: This rank's.
        state_dict: Its keys.
        stored: The checkpoint's keys that are tensors.
        excused: Whether the rows of a key may be left out. Those of optimizer state always may:
            that of a parameter may be missing.
    """
    there = set(stored)
    states: OptimizerStates | None = None
    by_binding: dict[Binding, Rows | None] = {}
    groups: dict[Listed, list[str]] = {}
    others: set[str] = set()
    for fqn in state_dict:
        if fqn not in there or fqn in placing.absent:
            continue
        placed = placing.placed.get(fqn)
        rows = None
        if placed is not None:
            if placed.binding not in by_binding:
                binding = placed.binding
                by_binding[binding] = rows_of(binding.sharding, binding.layout, placed.chunks)
            rows = by_binding[placed.binding]
        if placed is None or rows is None:
            others.add(without_numbers(fqn))
            continue
        if states is None:
            states = OptimizerStates(dict.fromkeys(there, UNSEEN))
        if states.of(fqn) is None and not excused(fqn):
            rule = None if isinstance(placed, StackedPlaced) else placed.rule
            groups.setdefault(Listed(*rows, rule), []).append(fqn)
    return pack(groups, others)


def pack(groups: Mapping[Listed, Sequence[str]], others: Iterable[str]) -> bytes:
    """Return what a rank lists, and names of what it asks for otherwise, as they travel."""
    listed = [
        (one.dims, one.sizes, one.bits, one.within, one.rule, list(keys))
        for one, keys in groups.items()
    ]
    names = sorted(others)
    return zlib.compress(pickle.dumps((listed, names)), 1) if listed or names else b""


def without_numbers(fqn: str) -> str:
    """Return a key's name as ``packed_rows`` sends it for keys whose rows are not listed."""
    return _DIGITS.sub("{}", fqn)


def rows_of(sharding: Sharding, layout: Layout, chunks: Sequence[Chunk]) -> Rows | None:
    """Return what rows a rank lists; None where it lists none."""
    dims = tuple(sorted({cut.dim for cut in sharding.cuts if isinstance(cut, Pick)}))
    if not dims:
        return None
    sizes = tuple([sharding.global_shape[dim] for dim in dims])
    bits = np.zeros(sizes, np.bool_)
    for chunk in chunks:
        first = [chunk.offsets[dim] for dim in dims]
        counts = [chunk.sizes[dim] for dim in dims]
        bits[tuple([slice(a, a + n) for a, n in zip(first, counts, strict=True)])] = True
    intervals = enumerate(layout.intervals)
    within = tuple([interval for dim, interval in intervals if dim not in dims])
    return dims, sizes, np.packbits(bits).tobytes(), within


def row_faults(
    asked: Mapping[int, bytes],
    record: SaveRecord | None,
    renames: Mapping[int, Sequence[str]],
) -> list[Fault]:
    """Return the keys of which several ranks ask for the same rows, and none for others.

    Args:
        asked: By rank, what it asks for, packed.
        record: The checkpoint's; None where it has none.
        renames: By rank, the renames that are in force in this load.
    """
    holders: dict[bytes, list[int]] = {}
    for rank, packed in asked.items():
        holders.setdefault(packed, []).append(rank)
    # Most ranks list rows of the same keys: the work is per group of keys, not per key and rank.
    groups: dict[tuple[str, ...], list[tuple[Listed, list[int]]]] = {}
    others: set[str] = set()
    for packed, ranks in holders.items():
        listed: list[Any]
        listed, names = pickle.loads(zlib.decompress(packed))
        others.update(names)
        for *one, keys in listed:
            groups.setdefault(tuple(keys), []).append((Listed(*one), ranks))
    groups_of: dict[str, list[int]] = {}
    for number, keys in enumerate(groups):
        for fqn in keys:
            groups_of.setdefault(fqn, []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    for fqn, numbers in groups_of.items():
        together.setdefault(tuple(numbers), []).append(fqn)
    members = list(groups.values())
    faults = []
    for group, fqns in together.items():
        gap = _gap([one for number in group for one in members[number]])
        if gap is not None:
            faults += [
                _fault(fqn, gap, record, renames)
                for fqn in fqns
                if without_numbers(fqn) not in others
            ]
    return faults


@dataclass(frozen=True, slots=True)
class _Gap:
    """Rows that nobody asks for, beside others that several ranks do.

    Attributes:
        like: How they are listed.
        parts: Who asks for which rows.
        twice: All that one rank asks for, and another one, too.
        missing: What nobody asks for.
    """

    like: Listed
    parts: Parts
    twice: Bits
    missing: Bits


def _gap(asked: Sequence[tuple[Listed, list[int]]]) -> _Gap | None:
    like = asked[0][0]
    parts: Parts = {}
    for one, ranks in asked:
        if (one.dims, one.sizes) != (like.dims, like.sizes):
            return None
        parts.setdefault((one.bits, one.within), []).extend(ranks)
    count = int(np.prod(like.sizes))
    union = np.bitwise_or.reduce([np.frombuffer(bits, np.uint8) for bits, _ in parts])
    missing = ~_unpacked(union.tobytes(), count)
    if not missing.any():
        return None
    twice = _twice(parts, count)
    return _Gap(like, parts, twice, missing) if twice.any() else None


def _unpacked(bits: bytes, count: int) -> Bits:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)


def _twice(parts: Parts, count: int) -> Bits:
    """Return the rows that are all that a rank asks for, and that another asks for, too.

    Parts that only overlap are those of ranks with copies of some experts.
    """
    holders = np.zeros(count, np.int64)
    for bits, _ in parts:
        holders += _unpacked(bits, count)
    twice = np.zeros(count, np.bool_)
    for (bits, within), ranks in parts.items():
        part = _unpacked(bits, count)
        if len(ranks) > 1 or (
            part.any()
            and holders[part].min() > 1
            and any(
                other != bits and whole == within and _unpacked(other, count)[part].all()
                for other, whole in parts
            )
        ):
            twice |= part
    return twice


def _fault(
    fqn: str, gap: _Gap, record: SaveRecord | None, renames: Mapping[int, Sequence[str]]
) -> Fault:
    like = gap.like
    count = int(np.prod(like.sizes))
    by_rows: dict[bytes, list[int]] = {}
    for (bits, _), held in gap.parts.items():
        by_rows.setdefault(bits, []).extend(held)
    ordered = sorted(by_rows.items(), key=lambda part: min(part[1]))
    asked = [
        f"{_format_rows(_unpacked(bits, count), like.sizes)} by {format_ranks(ranks)}"
        for bits, ranks in ordered[:_MAX_PARTS]
    ]
    more = f" and {len(ordered) - _MAX_PARTS} other parts" if len(ordered) > _MAX_PARTS else ""
    ranks = sorted({rank for held in gap.parts.values() for rank in held})
    here = ", ".join(dict.fromkeys(one for rank in ranks for one in renames.get(rank, ())))
    dims = f"dim {like.dims[0]}"
    if len(like.dims) > 1:
        dims = f"dims {' and '.join(map(str, like.dims))}"
    if like.rule is not None:
        this = f"IndexShard of {dims} by rule {like.rule}"
        likely = "IndexShard in the rules of this load gives some ranks the rows of another rank"
        way_out = "IndexShard with each rank's own rows in the rules of this load"
    else:
        this = f"rename={here}"
        likely = "rename= of this load gives some ranks the numbers of another rank"
        way_out = "rename= in PlacementLoadPlanner with each rank's own numbers"
        if "Renumber(" not in here:
            likely = (
                "rename= of this load stacks by local numbers: Renumber before the Stack was "
                "forgotten"
            )
            way_out += ": a Renumber before the Stack"
    saved: tuple[str, ...] = ()
    if record is not None and like.rule is None and record.renames:
        saved = (f"saved with:  rename={', '.join(map(str, record.renames))}",)
    elif record is not None and record.cuts(fqn):
        saved = (f"saved:       {', then '.join(map(str, record.cuts(fqn)))}",)
    return Fault(
        fqn,
        f"several ranks ask for rows {_format_rows(gap.twice, like.sizes)} of {dims}, and none "
        f"for rows {_format_rows(gap.missing, like.sizes)}",
        (
            *saved,
            f"this load:   {this}",
            f"asked for:   {'; '.join(asked)}{more}",
            f"likely:      {likely}",
            f"way out:     {way_out}; optional=[pattern] or waive={{pattern: reason}} where the "
            "rest is left out on purpose",
        ),
    )


def _format_rows(rows: Bits, sizes: Sequence[int]) -> str:
    """Return rows as short text; those of several dims as tuples.

    >>> _format_rows(np.array([True, True, False, True]), (4,))
    '0-1, 3'
    >>> _format_rows(np.array([True, True, False, True]), (2, 2))
    '(0, 0), (0, 1), (1, 1)'
    """
    numbers = np.flatnonzero(rows)
    if len(sizes) == 1:
        return format_numbers(numbers.tolist())
    cells = [*zip(*np.unravel_index(numbers[:_MAX_ROWS], tuple(sizes)), strict=True)]
    shown = [str(tuple(map(int, cell))) for cell in cells]
    hidden = len(numbers) - len(shown)
    return ", ".join(shown) + (f" and {hidden} more" if hidden else "")
