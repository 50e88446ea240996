"""Listed rows that no rank asks for, although several ranks ask for others.

A ``Stack`` or an ``IndexShard`` with the rows of another rank reads tensors of the right shape, but
the wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from dcp_placements.errors import Fault
from dcp_placements.load.comparison.asked import AllAsked, Askers, Form
from dcp_placements.load.comparison.numbers import format_numbers
from dcp_placements.load.comparison.parts import Bits, Gap, Part, gap_of
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord

_MAX_ROWS = 6


def row_faults(
    asked: AllAsked,
    record: SaveRecord | None,
    keys: Sequence[str],
    renames: Mapping[int, Sequence[SavedRename]],
) -> list[Fault]:
    """Return the keys of which several ranks ask for the same rows, and none for others.

    Args:
        asked: What all ranks ask for.
        record: The checkpoint's; None where it has none.
        keys: The checkpoint's keys that are tensors, in the checkpoint's order.
        renames: By rank, the renames that are in force in this load.
    """
    faults = []
    for positions, askers in asked.parts:
        form = askers[0].form
        if not form.dims or any(
            (one.form.dims, _sizes(one.form)) != (form.dims, _sizes(form)) for one in askers
        ):
            continue
        gap = _row_gap(askers)
        if gap is not None:
            faults += [_row_fault(keys[at], gap, form, record, renames) for at in positions]
    return faults


def _sizes(form: Form) -> tuple[int, ...]:
    """Return the sizes of the dims whose rows are listed."""
    return tuple([form.shape[dim] for dim in form.dims])


def _row_gap(askers: Sequence[Askers]) -> Gap | None:
    parts: dict[Part, list[int]] = {}
    for one in askers:
        for packed, ranks in one.by_boxes().items():
            parts.setdefault(_part_of(packed, one.form), []).extend(ranks)
    return gap_of(parts, prod(_sizes(askers[0].form)))


def _part_of(packed: bytes, form: Form) -> Part:
    """Return which rows boxes have, in C order, and their intervals on the other dims."""
    ndim = len(form.shape)
    rows = np.zeros(_sizes(form), np.bool_)
    within = set()
    for box in np.frombuffer(packed, np.int64).reshape(-1, 2, ndim).transpose(0, 2, 1).tolist():
        spans = [(start, start + size) for start, size in box]
        rows[tuple([slice(*spans[dim]) for dim in form.dims])] = True
        within.add(tuple([span for dim, span in enumerate(spans) if dim not in form.dims]))
    return np.packbits(rows).tobytes(), tuple(sorted(within))


def _row_fault(
    fqn: str,
    gap: Gap,
    form: Form,
    record: SaveRecord | None,
    renames: Mapping[int, Sequence[SavedRename]],
) -> Fault:
    here = ", ".join(dict.fromkeys(str(one) for rank in gap.ranks for one in renames.get(rank, ())))
    dims = f"dim {form.dims[0]}"
    if len(form.dims) > 1:
        dims = f"dims {' and '.join(map(str, form.dims))}"
    if form.rule is not None:
        loaded = f"IndexShard of {dims} by rule {form.rule}"
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
    if record is not None and form.rule is None and record.renames:
        saved = (f"saved with:  rename={', '.join(map(str, record.renames))}",)
    elif record is not None and record.cuts(fqn):
        saved = (f"saved:       {', then '.join(map(str, record.cuts(fqn)))}",)
    return gap.fault(
        fqn,
        lambda bits: _format_rows(bits, _sizes(form)),
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
