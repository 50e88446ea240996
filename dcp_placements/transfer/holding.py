"""Which rank of a world holds which boxes of its tensors, in one table per group of tensors.

A group is the tensors of one shape that lie alike on every rank. Ranks at one coordinate of the
axes that cut a group hold the same boxes, so a layout is computed once per such coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dcp_placements.errors import Fault, PlacementError
from dcp_placements.layout.sharding import Cut, Layout, LayoutError, Sharding
from dcp_placements.names.rename_record import holder
from dcp_placements.names.rename_results import Rename
from dcp_placements.names.renames import Renames
from dcp_placements.offline.declared import matcher, mesh_at, rules_at
from dcp_placements.offline.views.cutting import fsdp_axes, in_mesh_order, whole_sharding
from dcp_placements.rules.patterns import PlacementRules, Rules, rule_name
from dcp_placements.rules.placement import CheckpointPlacement
from dcp_placements.storage.metadata.table import Array
from dcp_placements.transfer.joins import expanded
from dcp_placements.transfer.names import Named, named_tensors, split_rename
from dcp_placements.transfer.world import TransferWorld


class Boxes(NamedTuple):
    """Boxes that ranks hold, one per row.

    Attributes:
        ranks: The global rank, ``[boxes]``.
        local: The start in the rank's local tensor, ``[boxes, dims]``.
        offsets: The start in the whole tensor, ``[boxes, dims]``.
        sizes: The sizes in elements, ``[boxes, dims]``.
    """

    ranks: Array
    local: Array
    offsets: Array
    sizes: Array


@dataclass(slots=True, eq=False)
class Group:
    """Tensors of a world that have one shape and lie alike.

    Attributes:
        tensors: They, in the order of the world.
        boxes: What each rank holds of each of them.
    """

    tensors: list[Named]
    boxes: Boxes


class _Rank(NamedTuple):
    """What one rank declares: its place in the mesh, its rules, and what determines its keys."""

    place: int
    coordinate: tuple[int, ...]
    rules: Rules
    rename: Renames
    absent: tuple[str, ...]

    def holds(self) -> Callable[[str], bool]:
        """Return a test of whether the rank has a key of the world."""
        has_number = holder(self.rename)
        patterns = [matcher(pattern) for pattern in self.absent]
        return lambda key: (
            (has_number is None or has_number(key))
            and not any(matches(key) for matches in patterns)
        )


def held_groups(
    world: TransferWorld, tensors: Mapping[str, Any], more: Rename | None, faults: list[Fault]
) -> list[Group]:
    """Return the tensors of a world by group.

    Args:
        world: The world.
        tensors: Its whole tensors, by key.
        more: A step from the keys that the world's rules see to the common keys, or None.
        faults: Takes in the tensors that cannot be placed.

    Raises:
        CannotLook: The function of the rules fails.
        PlacementError: A rename that is not as ``TransferWorld`` has it.
    """
    ranks, whole = _declared(world)
    named = named_tensors(tensors, whole, more, faults)
    cutter = _Cutter(world, faults)
    return [cutter.group(group, held) for group, held in _alike(named, ranks)]


def _declared(world: TransferWorld) -> tuple[list[_Rank], Renames]:
    """Return what each rank declares, and the steps of its rename that all ranks have alike."""
    ranks: list[_Rank] = []
    wholes: list[Renames] = []
    axes = dict(world.axes)
    for place, coordinate in enumerate(np.ndindex(*axes.values())):
        rules, rename, _ = rules_at(world.rules, axes, place)
        local, whole = split_rename(rename)
        absent = () if world.absent is None else tuple(world.absent(mesh_at(axes, place)))
        ranks.append(_Rank(place, coordinate, rules, local, absent))
        if whole not in wholes:
            wholes.append(whole)
    if len(wholes) > 1:
        raise PlacementError(
            f"ranks differ in how they stack, unstack or split: {wholes[0]!r} and {wholes[1]!r}\n"
            "    way out:     put Renumber before these steps; the rest must be equal on all ranks"
        )
    return ranks, wholes[0]


def _alike(named: Sequence[Named], ranks: Sequence[_Rank]) -> list[tuple[list[Named], list[_Rank]]]:
    """Return the tensors that lie alike, with the ranks that hold them."""
    by_rules: dict[Hashable, Rules] = {}
    by_keys: dict[Hashable, list[_Rank]] = {}
    for rank in ranks:
        rules = rank.rules
        # What any other function answers may differ from rank to rank.
        alike = rules.patterns if isinstance(rules, PlacementRules) else rank.place
        by_rules.setdefault(alike, rules)
        by_keys.setdefault((rank.rename, rank.absent), []).append(rank)
    members = list(by_keys.values())
    holds = [alike[0].holds() for alike in members]
    groups: dict[Hashable, list[Named]] = {}
    held_by: dict[Hashable, bytes] = {}
    for tensor in named:
        held = bytes([test(tensor.key) for test in holds])
        labels = [_label(rules, tensor) for rules in by_rules.values()] if tensor.shape else []
        lies = tensor.shape, tensor.dtype, tensor.rule_shape, tensor.rule_dims
        key = lies, tuple(labels), held
        groups.setdefault(key, []).append(tensor)
        held_by[key] = held
    found = []
    for lying, group in groups.items():
        held = held_by[lying]
        holders = [rank for has, alike in zip(held, members, strict=True) if has for rank in alike]
        found.append((group, sorted(holders, key=lambda rank: rank.place)))
    return found


def _label(rules: Rules, tensor: Named) -> Hashable:
    """Return what tensors of one shape have in common if one rank's rules cut them alike."""
    if isinstance(rules, PlacementRules):
        return rules.pattern_of(tensor.rule_name)
    return _signature(rules(tensor.rule_name, tensor.probe()))


def _signature(placement: CheckpointPlacement | None) -> Hashable:
    """Return what decides how a placement cuts, whatever its rank."""
    if placement is None:
        return None
    mesh = placement.mesh
    shapes = placement.global_shape, placement.padded_shape
    return placement.placements, tuple(mesh.shape), mesh.mesh_dim_names, shapes


class _Cut(NamedTuple):
    """How the ranks of one signature cut a group.

    Attributes:
        sharding: Of the shape that the rules cut; its last axis is FSDP's.
        own: The axes of FSDP.
        axes: The axes of ``sharding`` that cut.
    """

    sharding: Sharding
    own: list[str]
    axes: tuple[int, ...]


class _Cutter:
    """Cuts the groups of one world."""

    def __init__(self, world: TransferWorld, faults: list[Fault]) -> None:
        self._axes = dict(world.axes)
        self._fsdp = in_mesh_order(world.axes, world.fsdp)
        self._global = world.global_ranks
        self._faults = faults

    def group(self, tensors: list[Named], ranks: Sequence[_Rank]) -> Group:
        """Return a group with what each rank holds of it."""
        first = tensors[0]
        probe = first.probe()
        cuts: dict[Hashable, _Cut] = {}
        layouts: dict[Hashable, int] = {}
        boxes: list[Boxes] = []
        layout_of: list[int] = []
        holders: list[int] = []
        for rank in ranks:
            placement = rank.rules(first.rule_name, probe) if first.shape else None
            place = () if placement is None else placement.mesh.get_coordinate()
            if place is None:
                continue  # no part of the rule's mesh: it holds nothing
            try:
                signature = _signature(placement)
                cut = cuts.get(signature)
                if cut is None:
                    cut = cuts[signature] = self._cut(first, placement)
                coordinate = (*place, self._fsdp_position(rank.coordinate, cut.own))
                key = signature, tuple([coordinate[axis] for axis in cut.axes])
                if key not in layouts:
                    layouts[key] = len(boxes)
                    boxes.append(_boxes(first, cut.sharding, coordinate))
            except (PlacementError, LayoutError) as error:
                rule = rule_name(rank.rules, first.rule_name)
                detail = f"by rule:     {rule}, on rank {self._global[rank.place]}"
                self._faults += [Fault(tensor.key, str(error), (detail,)) for tensor in tensors]
                break
            layout_of.append(layouts[key])
            holders.append(self._global[rank.place])
        return Group(tensors, _joined(boxes, layout_of, holders, len(first.shape)))

    def _cut(self, tensor: Named, placement: CheckpointPlacement | None) -> _Cut:
        """Return how a tensor is cut: by its rule, without the dims that it lacks, then by FSDP."""
        own = fsdp_axes(tensor.shape, placement, self._fsdp)
        sharding = whole_sharding(tensor.rule_shape, placement, self._axes, own)
        # Of a row of a stack FSDP cuts dim 0, not the dim of the stack.
        rule_cuts = sharding.cuts[:-1] if own else sharding.cuts
        cuts = [cut for cut in rule_cuts if cut.dim in tensor.rule_dims]
        fsdp = len(sharding.axis_sizes) - 1
        if own:
            cuts.append(Cut(tensor.rule_dims[0], fsdp))
        axes = {cut.axis for cut in cuts if isinstance(cut, Cut)}
        return _Cut(replace(sharding, cuts=tuple(cuts)), own, tuple(sorted(axes)))

    def _fsdp_position(self, coordinate: Sequence[int], own: Sequence[str]) -> int:
        position = 0
        for index, (name, size) in zip(coordinate, self._axes.items(), strict=True):
            if name in own:
                position = position * size + index
        return position


def _boxes(tensor: Named, sharding: Sharding, coordinate: Sequence[int]) -> Boxes:
    """Return what one coordinate holds, for a rank that is not known yet."""
    intervals = [sharding.dim_at(dim, coordinate) for dim in tensor.rule_dims]
    chunks = Layout(tensor.shape, tuple(intervals)).chunks()
    shape = len(chunks), 3, len(tensor.shape)
    table = np.array(chunks, np.int64).reshape(shape)
    return Boxes(np.zeros(len(chunks), np.int64), table[:, 0], table[:, 1], table[:, 2])


def _joined(boxes: list[Boxes], layout_of: list[int], ranks: list[int], dims: int) -> Boxes:
    """Return the boxes of all ranks, by the index of each rank's layout."""
    if not boxes:
        none = np.zeros((0, dims), np.int64)
        return Boxes(np.zeros(0, np.int64), none, none, none)
    lengths = np.array([len(one.ranks) for one in boxes])
    starts = np.cumsum(lengths) - lengths
    layouts = np.array(layout_of, np.int64)
    holder_index, row = expanded(starts[layouts], lengths[layouts])
    local, offsets, sizes = (
        np.concatenate([one[column] for one in boxes])[row] for column in (1, 2, 3)
    )
    return Boxes(np.array(ranks, np.int64)[holder_index], local, offsets, sizes)
