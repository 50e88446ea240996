"""Rows that a rank lists itself, and which of them each rank asks for in a load.

A ``Stack`` or an ``IndexShard`` with the rows of another rank reads tensors of the right shape, but
the wrong ones.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_placements.bind.placed import Placing
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk, Intervals, Layout, Pick, Sharding
from dcp_placements.load.comparison.numbers import format_numbers
from dcp_placements.load.comparison.parts import Bits, Gap, Part, gap_of
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.storage.metadata.record import SaveRecord

_MAX_ROWS = 6


@dataclass(frozen=True, slots=True)
class ListedRows:
    """The rows of a tensor that a rank lists.

    Attributes:
        dims: The dims whose rows are listed.
        sizes: Of these dims.
        bits: Which rows, one bit per row in C order, packed.
        within: The intervals of the other dims.
        rule: The name of the rule of an ``IndexShard``; None where rename= stacks the rows.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    bits: bytes
    within: tuple[Intervals, ...]
    rule: str | None = None


def rows_of(sharding: Sharding, layout: Layout, chunks: Sequence[Chunk]) -> ListedRows | None:
    """Return the rows that a rank lists, without a rule; None where it lists none."""
    dims = tuple(sorted({cut.dim for cut in sharding.cuts if isinstance(cut, Pick)}))
    if not dims:
        return None
    sizes = tuple([sharding.global_shape[dim] for dim in dims])
    bits = np.zeros(sizes, np.bool_)
    for chunk in chunks:
        spans = [(chunk.offsets[dim], chunk.sizes[dim]) for dim in dims]
        bits[tuple([slice(start, start + size) for start, size in spans])] = True
    intervals = enumerate(layout.intervals)
    within = tuple([interval for dim, interval in intervals if dim not in dims])
    return ListedRows(dims, sizes, np.packbits(bits).tobytes(), within)


def packed_rows(
    placing: Placing,
    state_dict: Iterable[str],
    keys: Collection[str],
    excused: Callable[[str], bool],
) -> bytes:
    """Return the rows that a rank lists packed, for the coordinator.

    Keys that it asks for in another way are sent as names without numbers, which are few: the
    coordinator does not see what the rank reads of them.

    Args:
        placing: This rank's.
        state_dict: Its keys.
        keys: The checkpoint's keys that are tensors.
        excused: Whether the rows of a key may be left out. Those of optimizer state always may:
            that of a parameter may be missing.
    """
    by_binding = {placed.binding: placed for placed in placing.placed.values()}
    listed = {
        binding: rows
        for binding, placed in by_binding.items()
        if (rows := rows_of(binding.sharding, binding.layout, placed.chunks)) is not None
    }
    asked = [fqn for fqn in state_dict if fqn in keys and fqn not in placing.absent]
    if not listed:
        return pack({}, without_numbers(asked))
    states = OptimizerStates(dict.fromkeys(keys, UNSEEN))
    groups: dict[ListedRows, list[str]] = {}
    others = []
    for fqn in asked:
        placed = placing.placed.get(fqn)
        if placed is None or placed.binding not in listed:
            others.append(fqn)
        elif states.of(fqn) is None and not excused(fqn):
            rows = listed[placed.binding]
            if not placed.dims:
                rows = replace(rows, rule=placed.rule)
            groups.setdefault(rows, []).append(fqn)
    return pack(groups, without_numbers(others))


def pack(groups: Mapping[ListedRows, Sequence[str]], others: Iterable[bytes]) -> bytes:
    """Return the keys by the rows that a rank lists, and the names of its other keys, packed."""
    names = sorted(others)
    return zlib.compress(pickle.dumps((groups, names)), 1) if groups or names else b""


def without_numbers(fqns: Collection[str]) -> set[bytes]:
    """Return the names of keys as ``packed_rows`` sends them for keys whose rows are not listed.

    A key with a line break has a name per line.
    """
    # All at once: several times faster than a regular expression, key by key.
    names = "\n".join(fqns).encode("utf-8", "surrogatepass")
    return set(names.translate(None, b"0123456789").split(b"\n")) if fqns else set()


def row_faults(
    asked: Mapping[bytes, Sequence[int]],
    record: SaveRecord | None,
    renames: Mapping[int, Sequence[str]],
) -> list[Fault]:
    """Return the keys of which several ranks ask for the same rows, and none for others.

    Args:
        asked: The ranks by what they ask for, packed.
        record: The checkpoint's; None where it has none.
        renames: By rank, the renames that are in force in this load.
    """
    # Most ranks list rows of the same keys: the work is per group of keys, not per key and rank.
    groups: dict[tuple[str, ...], list[tuple[ListedRows, Sequence[int]]]] = {}
    others: set[bytes] = set()
    for packed, ranks in asked.items():
        listed, names = pickle.loads(zlib.decompress(packed))
        others.update(names)
        for rows, keys in listed.items():
            groups.setdefault(tuple(keys), []).append((rows, ranks))
    numbers_of: dict[str, list[int]] = {}
    for number, keys in enumerate(groups):
        for fqn in keys:
            numbers_of.setdefault(fqn, []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    for fqn, numbers in numbers_of.items():
        if not without_numbers([fqn]) <= others:
            together.setdefault(tuple(numbers), []).append(fqn)
    members = list(groups.values())
    faults = []
    for common, fqns in together.items():
        asking = [one for number in common for one in members[number]]
        gap = _row_gap(asking)
        if gap is not None:
            faults += [_row_fault(fqn, gap, asking[0][0], record, renames) for fqn in fqns]
    return faults


def _row_gap(asking: Sequence[tuple[ListedRows, Sequence[int]]]) -> Gap | None:
    first = asking[0][0]
    parts: dict[Part, list[int]] = {}
    for rows, ranks in asking:
        if (rows.dims, rows.sizes) != (first.dims, first.sizes):
            return None
        parts.setdefault((rows.bits, rows.within), []).extend(ranks)
    return gap_of(parts, int(np.prod(first.sizes)))


def _row_fault(
    fqn: str,
    gap: Gap,
    rows: ListedRows,
    record: SaveRecord | None,
    renames: Mapping[int, Sequence[str]],
) -> Fault:
    here = ", ".join(dict.fromkeys(one for rank in gap.ranks for one in renames.get(rank, ())))
    dims = f"dim {rows.dims[0]}"
    if len(rows.dims) > 1:
        dims = f"dims {' and '.join(map(str, rows.dims))}"
    if rows.rule is not None:
        loaded = f"IndexShard of {dims} by rule {rows.rule}"
        likely = "IndexShard in the rules of this load gives some ranks the rows of another rank"
        way_out = "IndexShard with each rank's own rows in the rules of this load"
    else:
        loaded = f"rename={here}"
        likely = "rename= of this load gives some ranks the numbers of another rank"
        way_out = "rename= in PlacementLoadPlanner with each rank's own numbers"
        if "Renumber(" not in here:
            likely = (
                "rename= of this load stacks by local numbers: Renumber before the Stack was "
                "forgotten"
            )
            way_out += ": a Renumber before the Stack"
    saved: tuple[str, ...] = ()
    if record is not None and rows.rule is None and record.renames:
        saved = (f"saved with:  rename={', '.join(map(str, record.renames))}",)
    elif record is not None and record.cuts(fqn):
        saved = (f"saved:       {', then '.join(map(str, record.cuts(fqn)))}",)
    return gap.fault(
        fqn,
        lambda bits: _format_rows(bits, rows.sizes),
        of=dims,
        noun="rows ",
        saved=saved,
        loaded=loaded,
        likely=likely,
        way_out=way_out,
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
