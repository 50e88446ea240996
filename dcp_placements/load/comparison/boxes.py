"""Boxes of sharded keys that no rank asks for, although several ranks ask for another box.

A rename or the mesh of a rule with the position along a wrong axis gives each rank boxes of the
right shape. All numbers and all rows may be there, but no key is asked for completely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dcp_placements.errors import Fault, format_ranks
from dcp_placements.layout.boxes import as_boxes, format_box, uncovered, unique
from dcp_placements.layout.sharding import Box
from dcp_placements.load.comparison.asked import AllAsked, Askers, Form, rows_of
from dcp_placements.load.comparison.parts import MAX_PARTS
from dcp_placements.storage.metadata.record import SavedRename, SaveRecord


def box_faults(
    asked: AllAsked,
    record: SaveRecord | None,
    keys: Sequence[str],
    renames: Mapping[int, Sequence[SavedRename]],
) -> list[Fault]:
    """Return the keys of which several ranks ask for the same boxes, and none for others.

    Args:
        asked: What all ranks ask for.
        record: The checkpoint's; None where it has none.
        keys: The checkpoint's keys that are tensors, in the checkpoint's order.
        renames: By rank, the renames that are in force in this load.
    """
    faults = []
    for positions, askers in asked.parts:
        missing = _missing(askers)
        if missing:
            fqns = [keys[position] for position in positions]
            faults += _faults(fqns, askers, missing, record, renames)
    return faults


def _missing(askers: Sequence[Askers]) -> list[Box]:
    """Return boxes that no rank asks for, where several ranks ask for the same ones."""
    lists = [boxes for one in askers for boxes in rows_of(one.boxes) if boxes]
    if len(set(lists)) == len(lists):
        return []
    shapes = {one.form.shape for one in askers}
    if len(shapes) > 1:  # a fault of its own
        return []
    (shape,) = shapes
    ndim = len(shape)
    table = np.concatenate([one.boxes.reshape(-1, 2, ndim) for one in askers])
    return uncovered(Box.whole(shape), table[unique(table)[0]], MAX_PARTS + 1)


def _faults(
    fqns: Sequence[str],
    askers: Sequence[Askers],
    missing: Sequence[Box],
    record: SaveRecord | None,
    renames: Mapping[int, Sequence[SavedRename]],
) -> list[Fault]:
    by_boxes: dict[bytes, tuple[Form, list[int]]] = {}
    for one in askers:
        for packed, ranks in one.by_boxes().items():
            if packed:
                by_boxes.setdefault(packed, (one.form, []))[1].extend(ranks)
    shape = askers[0].form.shape
    parts = [
        (_format(as_boxes(np.frombuffer(packed, np.int64).reshape(-1, 2, len(shape))), shape), *by)
        for packed, by in sorted(by_boxes.items(), key=lambda part: min(part[1][1]))
    ]
    repeated, form, ranks = next(part for part in parts if len(part[2]) > 1)
    texts = [f"{text} by {format_ranks(by)}" for text, _, by in parts[:MAX_PARTS]]
    more = f" and {len(parts) - MAX_PARTS} other parts" if len(parts) > MAX_PARTS else ""
    here = ", ".join(dict.fromkeys(str(one) for rank in ranks for one in renames.get(rank, ())))
    source = f"rename={here}, or the mesh of a rule," if here else "the mesh of a rule"
    faults = []
    for fqn in fqns:
        cuts = record.cuts(fqn) if record is not None else ()
        saved = (f"saved:       {', then '.join(map(str, cuts))}",) if cuts else ()
        details = (
            *saved,
            f"this load:   {form.cuts}{f'; rename={here}' if here else ''}",
            f"asked for:   {'; '.join(texts)}{more}",
            f"likely:      {source} has the position of a rank along a wrong axis, for example "
            "along one that shards these tensors already (edp in place of ep)",
            "way out:     the position along the axis whose ranks hold different numbers, as in "
            "the save: at= of contiguous(), the mesh of the rule; optional=[pattern] or "
            "waive={pattern: reason} where the rest is left out on purpose",
        )
        headline = (
            f"several ranks ask for {repeated} of {shape}, and none for {_format(missing, shape)}"
        )
        faults.append(Fault(fqn, headline, details))
    return faults


def _format(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    text = ", ".join(format_box(box, shape) for box in boxes[:MAX_PARTS])
    return text + (" and others" if len(boxes) > MAX_PARTS else "")
