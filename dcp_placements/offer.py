"""What a rank offers to write: its plan items, and the evidence that goes with them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from dcp_placements.digests import full_digest, object_digest, sampled_digests
from dcp_placements.errors import Fault
from dcp_placements.evidence import Evidence
from dcp_placements.interop import (
    SavePlan,
    WriteItem,
    WriteItemType,
    default_write_items,
    named_axes,
)
from dcp_placements.items import WriteItems
from dcp_placements.layout import Pick
from dcp_placements.lint import lint
from dcp_placements.naming import Path
from dcp_placements.optimizer_state import stateless_parameters
from dcp_placements.placing import Placing
from dcp_placements.rules import PlacementRules, Rules, compile_pattern

Objects = dict[str, io.BytesIO]
"""Objects as a file will hold them, by key."""


def offered_items(state_dict: Mapping[str, Any], placing: Placing) -> list[WriteItem]:
    """Return the write items of a rank's flat state dict, replicas included."""
    made = WriteItems()
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        placed = placing.placed.get(fqn)
        if placed is not None:
            items += made.of(placed)
        elif fqn not in placing.absent:
            items += default_write_items(fqn, value)
    return items


def gather_evidence(
    plan: SavePlan,
    *,
    rank: int,
    state_dict: Mapping[str, Any],
    mappings: Mapping[str, Path] | None,
    placing: Placing,
    rules: Rules | None,
    waived: Mapping[str, str],
) -> Evidence:
    """Return all evidence of a rank but the digests."""
    return Evidence(
        rank=rank,
        mappings=mappings,
        axes=_axes(state_dict, placing),
        matched=placing.matched,
        patterns=rules.patterns if isinstance(rules, PlacementRules) else (),
        rules_of={fqn: p.rule for fqn, p in placing.placed.items() if p.rule is not None},
        row_maps={
            fqn: cut.indices
            for fqn, placed in placing.placed.items()
            for cut in placed.binding.sharding.cuts
            if isinstance(cut, Pick)
        },
        stateless=tuple(stateless_parameters(state_dict)),
        notes=tuple(_lints(placing, waived)),
    )


def item_digests(
    plan: SavePlan, lookup: Callable[[WriteItem], Any], kind: str
) -> tuple[list[bytes | None], list[bytes | None], Objects]:
    """Return digests of a plan's items: those to compare, those to store, the objects' bytes.

    Args:
        plan: This rank's plan.
        lookup: Gives the data of an item: a tensor, a view, or an object.
        kind: ``"sampled"``, ``"full"`` or ``"off"``; only full ones are worth storing.
    """
    if kind == "off":
        return [], [], {}
    compared: list[bytes | None] = [None] * len(plan.items)
    tensors: list[torch.Tensor] = []
    places: list[int] = []
    objects: Objects = {}
    kept: list[bytes | None] = list(compared) if kind == "full" else []
    for position, item in enumerate(plan.items):
        data = lookup(item)
        if item.type == WriteItemType.BYTE_IO:
            compared[position] = object_digest(data)
            if kind == "full":
                buffer = objects[item.index.fqn] = io.BytesIO()
                torch.save(data, buffer)
                kept[position] = xxhash.xxh3_128_digest(buffer.getbuffer())
        elif isinstance(data, torch.Tensor):
            tensors.append(data)
            places.append(position)
    made = [full_digest(t) for t in tensors] if kind == "full" else sampled_digests(tensors)
    for position, digest in zip(places, made, strict=True):
        compared[position] = digest
        if kind == "full":
            kept[position] = digest
    return compared, kept, objects


def _axes(state_dict: Mapping[str, Any], placing: Placing) -> dict[str, tuple[int, int]]:
    meshes = {
        id(mesh): mesh
        for fqn in placing.placed
        if (mesh := getattr(state_dict[fqn], "device_mesh", None)) is not None
    }
    axes: dict[str, tuple[int, int]] = {}
    for mesh in meshes.values():
        axes.update(named_axes(mesh))
    for binding in {id(p.binding): p.binding for p in placing.placed.values()}.values():
        axes.update({a.name: (a.position, a.size) for a in binding.axes if a.name is not None})
    return axes


def _lints(placing: Placing, waived: Mapping[str, str]) -> list[Fault]:
    patterns = [compile_pattern(pattern) for pattern in waived]
    return [
        note
        for note in lint(placing.placed.values())
        if not any(pattern.search(f".{note.fqn}") for pattern in patterns)
    ]
