"""Boxes of sharded keys that no rank asks for, although several ranks ask for another box.

A rename or the mesh of a rule with the position along a wrong axis gives each rank boxes of the
right shape. All numbers and all rows may be there, but no key is asked for completely.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dcp_placements.bind.placed import Placing
from dcp_placements.bind.rule_and_dtensor import Binding
from dcp_placements.errors import Fault, format_ranks
from dcp_placements.layout.sharding import Box, Pick
from dcp_placements.layout.tiling import format_box, tiles, uncovered
from dcp_placements.load.comparison.parts import MAX_PARTS
from dcp_placements.names.optimizer_state import UNSEEN, OptimizerStates
from dcp_placements.storage.metadata.record import SaveRecord, cuts_of


class HeldBoxes(NamedTuple):
    """What a rank asks for of keys that are sharded alike.

    Attributes:
        shape: Of the whole tensor.
        packed: The different boxes, ascending: offsets, then sizes.
        cuts: How axes shard the keys, as text.
    """

    shape: tuple[int, ...]
    packed: bytes
    cuts: str

    @property
    def boxes(self) -> list[Box]:
        """The boxes."""
        ndim = len(self.shape)
        rows = np.frombuffer(self.packed, np.int64).reshape(-1, 2 * ndim).tolist()
        return [Box(tuple(row[:ndim]), tuple(row[ndim:])) for row in rows]


def packed_boxes(
    placing: Placing,
    state_dict: Iterable[str],
    keys: Sequence[str],
    excused: Callable[[str], bool],
) -> bytes:
    """Return the boxes that a rank asks for packed, for the coordinator.

    Keys are sent by position in the checkpoint. Those that the rank asks for as a whole, or of
    which a part may be left out, are sent without boxes. Rows of optimizer state always may: that
    of a row's parameter may be missing.

    Args:
        placing: This rank's.
        state_dict: Its keys.
        keys: The checkpoint's keys that are tensors, in the checkpoint's order.
        excused: Whether a part of a key may be left out.
    """
    positions = {fqn: position for position, fqn in enumerate(keys)}
    states: OptimizerStates | None = None
    by_binding: dict[Binding, HeldBoxes | None] = {}
    groups: dict[HeldBoxes | None, list[int]] = {}
    for fqn in state_dict:
        if fqn not in positions or fqn in placing.absent:
            continue
        held = None
        placed = placing.placed.get(fqn)
        if placed is not None:
            binding = placed.binding
            if binding not in by_binding:
                by_binding[binding] = _held(binding)
            held = by_binding[binding]
            if any(isinstance(cut, Pick) for cut in binding.sharding.cuts):
                states = states or OptimizerStates(dict.fromkeys(keys, UNSEEN))
                held = None if states.of(fqn) is not None else held
        if held is not None and excused(fqn):
            held = None
        if held is None or held.packed:
            groups.setdefault(held, []).append(positions[fqn])
    packed = [(held, _packed_positions(at)) for held, at in groups.items()]
    return zlib.compress(pickle.dumps(packed), 1)


def _packed_positions(positions: Iterable[int]) -> bytes:
    """Return positions packed, in ascending order: most steps recur from layer to layer."""
    steps = np.diff(np.array(sorted(positions), np.int32), prepend=np.int32(0))
    return zlib.compress(steps.tobytes(), 1)


def _positions(packed: bytes) -> list[int]:
    positions: list[int] = np.cumsum(np.frombuffer(zlib.decompress(packed), np.int32)).tolist()
    return positions


def _held(binding: Binding) -> HeldBoxes | None:
    """Return the boxes of a layout; None where it is the whole tensor.

    None also where rows of two dims are listed: of a stack of stacks the layout has all pairs of
    them, of which the rank asks for some.
    """
    if binding.layout.is_whole or sum(isinstance(c, Pick) for c in binding.sharding.cuts) > 1:
        return None
    boxes = np.array(sorted({chunk.box for chunk in binding.layout.chunks()}), np.int64)
    cuts = cuts_of(binding.sharding, [axis.name for axis in binding.axes])
    return HeldBoxes(binding.global_shape, boxes.tobytes(), ", then ".join(map(str, cuts)))


def box_faults(
    asked: Mapping[bytes, Sequence[int]],
    record: SaveRecord | None,
    keys: Sequence[str],
    renames: Mapping[int, Sequence[str]],
) -> list[Fault]:
    """Return the keys of which several ranks ask for the same boxes, and none for others.

    Args:
        asked: All ranks by what they ask for, packed.
        record: The checkpoint's; None where it has none.
        keys: The checkpoint's keys that are tensors, in the checkpoint's order.
        renames: By rank, the renames that are in force in this load.
    """
    # Most ranks shard the same keys alike: the work is per group of keys, not per key and rank.
    groups: dict[bytes, dict[HeldBoxes, list[int]]] = {}
    without_boxes: set[bytes] = set()
    for packed, ranks in asked.items():
        for held, positions in pickle.loads(zlib.decompress(packed)):
            if held is None:
                without_boxes.add(positions)
            else:
                groups.setdefault(positions, {}).setdefault(held, []).extend(ranks)
    complete = {position for packed in without_boxes for position in _positions(packed)}
    groups_of: dict[int, list[int]] = {}
    for number, packed in enumerate(groups):
        for position in _positions(packed):
            groups_of.setdefault(position, []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    for position, numbers in sorted(groups_of.items()):
        if position not in complete:
            together.setdefault(tuple(numbers), []).append(keys[position])
    members = list(groups.values())
    faults = []
    for common, fqns in together.items():
        asking: dict[HeldBoxes, list[int]] = {}
        for number in common:
            for held, ranks in members[number].items():
                asking.setdefault(held, []).extend(ranks)
        missing = _missing(asking)
        if missing:
            faults += [_box_fault(fqn, asking, missing, record, renames) for fqn in fqns]
    return faults


def _missing(asking: Mapping[HeldBoxes, Sequence[int]]) -> list[Box]:
    """Return boxes that no rank asks for, where several ranks ask for the same ones."""
    if all(len(ranks) == 1 for ranks in asking.values()):
        return []
    shapes = {held.shape for held in asking}
    if len(shapes) > 1:  # a fault of its own
        return []
    whole = Box((0,) * len(next(iter(shapes))), shapes.pop())
    boxes = {box for held in asking for box in held.boxes}
    return [] if tiles(whole, boxes) else uncovered(whole, sorted(boxes), MAX_PARTS)


def _box_fault(
    fqn: str,
    asking: Mapping[HeldBoxes, Sequence[int]],
    missing: Sequence[Box],
    record: SaveRecord | None,
    renames: Mapping[int, Sequence[str]],
) -> Fault:
    ordered = sorted(asking.items(), key=lambda part: min(part[1]))
    repeated, ranks = next(part for part in ordered if len(part[1]) > 1)
    here = ", ".join(dict.fromkeys(one for rank in ranks for one in renames.get(rank, ())))
    parts = [f"{_format(held.boxes, held)} by {format_ranks(by)}" for held, by in ordered]
    more = f" and {len(parts) - MAX_PARTS} other parts" if len(parts) > MAX_PARTS else ""
    cuts = record.cuts(fqn) if record is not None else ()
    saved = (f"saved:       {', then '.join(map(str, cuts))}",) if cuts else ()
    source = f"rename={here}, or the mesh of a rule," if here else "the mesh of a rule"
    return Fault(
        fqn,
        f"several ranks ask for {_format(repeated.boxes, repeated)} of {repeated.shape}, and none "
        f"for {_format(missing, repeated)}",
        (
            *saved,
            f"this load:   {repeated.cuts}{f'; rename={here}' if here else ''}",
            f"asked for:   {'; '.join(parts[:MAX_PARTS])}{more}",
            f"likely:      {source} has the position of a rank along a wrong axis, for example "
            "along one that shards these tensors already (edp in place of ep)",
            "way out:     the position along the axis whose ranks hold different numbers, as in "
            "the save: at= of contiguous(), the mesh of the rule; optional=[pattern] or "
            "waive={pattern: reason} where the rest is left out on purpose",
        ),
    )


def _format(boxes: Sequence[Box], held: HeldBoxes) -> str:
    text = ", ".join(format_box(box, held.shape) for box in boxes[:MAX_PARTS])
    return text + (" and others" if len(boxes) > MAX_PARTS else "")
